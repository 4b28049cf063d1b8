#!/bin/sh
# Puts nvcc and a clang for AMD GPUs into FOLDER/bin, from the Python package index: for machines and build
# containers that have neither. Linux, x86-64 and aarch64; 0.9 GB.
#   compilers.sh FOLDER [PYTHON]      then put FOLDER/bin at the front of PATH
set -eu

[ $# -ge 1 ] || { echo "usage: compilers.sh FOLDER [PYTHON]" >&2; exit 2; }
folder=$1
python=${2:-python3}

"$python" -m venv "$folder"
# nvcc comes in parts. Device code made by 13.0 runs with the drivers of every CUDA 13.
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    "nvidia-cuda-nvcc==13.0.*" "nvidia-cuda-crt==13.0.*" "nvidia-nvvm==13.0.*" \
    "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*" "ziglang==0.17.1"

cuda=$(echo "$folder"/lib/python3.*/site-packages/nvidia/cu13)
[ -x "$cuda/bin/nvcc" ] || { echo "compilers.sh: $cuda/bin/nvcc: not there after the installation" >&2; exit 1; }
cuda=$(cd "$cuda" && pwd)
bin=$(cd "$folder/bin" && pwd)
[ -e "$cuda/lib64" ] || ln -s lib "$cuda/lib64"  # nvcc.profile says lib64

# zig carries a whole clang and lld; both are asked for by the names that build files know.
wrap() {
    printf '#!/bin/sh\nexec %s "$@"\n' "$2" >"$bin/$1"
    chmod +x "$bin/$1"
}
wrap nvcc "'$cuda/bin/nvcc'"
wrap clang++ "'$bin/python' -m ziglang clang"
wrap ld.lld "'$bin/python' -m ziglang ld.lld"
# clang calls it "lld -flavor gnu ...".
printf '#!/bin/sh\n[ "$1" = -flavor ] && shift 2\nexec "%s" "$@"\n' "$bin/ld.lld" >"$bin/lld"
chmod +x "$bin/lld"

# It has no bundler, which puts the code of several targets into one file; the format is a table and the parts.
cat >"$bin/clang-offload-bundler" <<BUNDLER
#!$bin/python
BUNDLER
cat >>"$bin/clang-offload-bundler" <<'BUNDLER'
import struct
import sys

given = {"-input": []}
for word in sys.argv[1:]:
    name, _, value = word.partition("=")
    given.setdefault(name, []).append(value)
align = int(given.get("-bundle-align", ["1"])[0])
targets = given["-targets"][0].split(",")
parts = [open(path, "rb").read() for path in given["-input"]]
if len(parts) != len(targets):
    sys.exit(f"clang-offload-bundler: {len(parts)} inputs for {len(targets)} targets")
at = 32 + sum(24 + len(target) for target in targets)
table, body = b"", b""
head = at
for target, part in zip(targets, parts):
    at = -(-at // align) * align
    body = body.ljust(at - head, b"\0") + part
    table += struct.pack("<QQQ", at, len(part), len(target)) + target.encode()
    at += len(part)
with open(given["-output"][0], "wb") as file:
    file.write(b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(targets)) + table + body)
BUNDLER
chmod +x "$bin/clang-offload-bundler"
