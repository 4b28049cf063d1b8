#!/usr/bin/env bash
# Everything that only a GPU can show, in at most 8 minutes on one device; no network is needed.
#
#   run.sh [--kit FOLDER] [--out FOLDER] [--python PYTHON] [--backend cuda|rocm] [--seconds N] [--dry-run] [STEP...]
#
#   build    the wheel from this tree, in place, for the backend alone, into OUT/site
#   doctor   lmcache device list, explain and doctor
#   ipc      two processes: memory by handle and by file descriptor, order by events
#   measure  GB/s beside the ceilings of the same run, and the host's time per launch
#   kit      the conformance kit at every level; its highest has both transfer modes with a real server
#   modes    store and load through a real server, both modes: bytes and GB/s
#   sync     the profiler: no wait for the whole device
#
# PYTHON (python3) has torch with the device, pytest, numpy, pip, scikit-build-core, pybind11 and cmake; nvcc or a
# ROCm clang is on PATH. KIT (made by prepare.sh where there is a network) holds wheels of what else lmcache needs.
# OUT (build/gpu) gets logs, reports and figures. Exit code 1 if a step fails, 2 if it was asked wrongly.
set -uo pipefail

here=$(cd "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
plugin=$(cd "$here/../.." && pwd)
root=$(cd "$plugin/../.." && pwd)
all=(build doctor ipc measure kit modes sync)
out=$root/build/gpu kit='' python=python3 backend=cuda seconds=480 dry='' steps=()

usage() {
    echo "run.sh: $*" >&2
    echo "usage: run.sh [--kit FOLDER] [--out FOLDER] [--python PYTHON] [--backend cuda|rocm] [--seconds N] [--dry-run] [STEP...]; steps: ${all[*]}" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
    --kit | --out | --python | --backend | --seconds)
        [ $# -ge 2 ] || usage "$1: expected a value"
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
    --dry-run) dry=1 && shift ;;
    -*) usage "$1: no such option" ;;
    *)
        [[ " ${all[*]} " == *" $1 "* ]] || usage "$1: no such step"
        steps+=("$1") && shift
        ;;
    esac
done
[[ $seconds =~ ^[1-9][0-9]*$ ]] || usage "--seconds $seconds: expected a whole number above 0"
[[ $backend == cuda || $backend == rocm ]] || usage "--backend $backend: expected cuda or rocm"
[ -z "$kit" ] || [ -d "$kit" ] || usage "--kit $kit: no such folder; prepare.sh makes it"
[ ${#steps[@]} -gt 0 ] || steps=("${all[@]}")

site=$out/site
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} LMCACHE_DEVICE_BACKEND=$backend PYTHONUNBUFFERED=1
unset DEVICE_TYPE LMCACHE_DISABLE_PLUGINS
end=$((SECONDS + seconds))

# Run a command in at most so many seconds, and never beyond the end of the whole run.
limited() {
    local most=$1 left=$((end - SECONDS))
    shift
    if [ -n "$dry" ]; then
        printf '%q ' "$@" && echo
        return 0
    fi
    [ "$left" -gt 0 ] || { echo "no time is left of $seconds s" && return 124; }
    timeout -k 10 "$((most < left ? most : left))" "$@"
}

lmcache() { limited "$1" "$python" -m lmcache.cli.main "${@:2}"; }

pip_target() {
    limited 120 "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --upgrade --target "$site" "$@"
}

step_build() {
    local made=$out/wheel
    [ -n "$dry" ] || { rm -rf "$site" "$made" && mkdir -p "$site" "$made"; }
    if [ -n "$kit" ]; then
        pip_target "$kit"/*.whl || return
    fi
    limited 240 "$python" -m pip wheel --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation \
        --config-settings=cmake.define.LMCACHE_CUDA_TARGETS="$backend" -w "$made" "$plugin" || return
    pip_target --find-links "$made" lmcache-cuda
}

step_doctor() {
    lmcache 60 device list && lmcache 60 device explain && lmcache 120 device doctor
}

step_ipc() { limited 60 "$python" "$here/two_processes.py" --kind "$backend"; }

step_measure() { limited 120 "$python" "$here/measure.py" --kind "$backend" --json "$out/measure.json"; }

step_kit() {
    local level failed=0
    # The highest level runs the tests of all; of the lower ones only what they ask for is left to see.
    for level in packaging basic native; do
        lmcache 60 device verify "$backend" --level $level --only test_level --report "$out/kit-$level.json" || failed=1
    done
    lmcache 300 device verify "$backend" --level lmcache-driven --timeout 290 --test-timeout 60 \
        --report "$out/kit.json" --junit "$out/kit.xml" || failed=1
    return $failed
}

step_modes() { limited 90 "$python" "$here/modes.py" --backend "$backend" --json "$out/modes.json"; }

step_sync() { limited 60 "$python" "$here/sync_check.py" --backend "$backend"; }

mkdir -p "$out"
results=() failed=0
for step in "${steps[@]}"; do
    began=$SECONDS
    echo "==== $step"
    "step_$step" 2>&1 | tee "$out/$step.log"
    code=${PIPESTATUS[0]}
    case $code in 0) verdict=ok ;; 124 | 137) verdict='NOT DONE IN TIME' ;; *) verdict="FAILED ($code)" ;; esac
    [ "$code" = 0 ] || failed=1
    results+=("$(printf '%-8s %-18s %4d s' "$step" "$verdict" $((SECONDS - began)))")
    # Nothing else can be run without the wheel.
    [ "$step" != build ] || [ "$code" = 0 ] || break
done
echo "==== results"
printf '%s\n' "${results[@]}" | tee "$out/results.txt"
exit $failed
