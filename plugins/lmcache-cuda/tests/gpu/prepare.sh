#!/usr/bin/env bash
# Where there is a network: wheels of lmcache and of what it needs, for a machine with a GPU that has none.
#   prepare.sh FOLDER [PYTHON-VERSION-OF-THAT-MACHINE]
set -euo pipefail

[ $# -ge 1 ] || { echo "usage: prepare.sh FOLDER [PYTHON-VERSION, 3.12]" >&2 && exit 2; }
folder=$1 version=${2:-3.12}
root=$(cd "$(dirname -- "${BASH_SOURCE[0]}")/../../../.." && pwd)

mkdir -p "$folder"
rm -f "$folder"/*.whl
python3 -m pip wheel --quiet --disable-pip-version-check --no-deps -w "$folder" "$root/core"
# Not torch, pytest, numpy and the build tools: those are the machine's own.
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux2010 manylinux_2_5 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$version" \
    --implementation cp --abi "cp${version/./}" --abi abi3 --abi none "${platforms[@]}" -d "$folder" \
    blake3 msgspec pluggy prometheus-client pyzmq starlette uvicorn anyio click h11 idna packaging typing-extensions
ls "$folder"
