#!/usr/bin/env bash
# Runs what needs Hopper GPUs: kernels under compute-sanitizer and against fp64, and the tests marked gpu.
#
# usage: ./scripts/test_gpu.sh [FOLDER [PART ...]]
#
# examples:
#   ./scripts/test_gpu.sh
#   ./scripts/test_gpu.sh outputs/test_gpu fp64 tests-on-two
#
#   FOLDER        for the logs (default: outputs/test_gpu)
#   PART          of memcheck-attention, memcheck-rows, racecheck-attention, racecheck-rows, fp64, tests, tests-on-two,
#                 tests-on-more (default: all)
#   -h, --help    this text
#
# All parts are spread over the GPUs of this machine, or over those that $CUDA_VISIBLE_DEVICES names. A line says how
# each part ended; one that takes longer than $PART_SECONDS (default: 3600) is stopped and has failed. Where there is no
# GPU the tests skip themselves, with a reason.
set -euo pipefail
needs="torch torchtitan pytest xdist hypothesis"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
logs=$(realpath -m "${1:-outputs/test_gpu}")
wanted=" ${*:2} " all=" memcheck-attention memcheck-rows racecheck-attention racecheck-rows fp64 tests tests-on-two tests-on-more "
for part in "${@:2}"; do
    [[ $all == *" $part "* ]] || { echo "There is no part $part; the parts are:$all" >&2 && exit 1; }
done
mkdir -p "$logs"
here=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-$(seq -s , 0 $((here - 1)))}"
IFS=, read -r -a gpus <<<"$CUDA_VISIBLE_DEVICES"
declare -A parts=() # by process
failed=0 sanitized=0
trap '((${#parts[@]} == 0)) || kill "${!parts[@]}" 2>/dev/null || true' EXIT

start() { # name and command: beside what runs, with a log
    local name=$1
    shift
    [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
    timeout --signal=INT --kill-after=30 "${PART_SECONDS:=3600}" "$@" >"$logs/$name.log" 2>&1 &
    parts[$!]=$name
}

finish() { # waits for all that was started; a line says how each part ended
    local part code state
    while ((${#parts[@]})); do
        code=0
        wait -n -p part "${!parts[@]}" || code=$?
        case $code in
            0) state=passed ;;
            124 | 137) state="FAILED, stopped after $PART_SECONDS s" ;;
            *) state="FAILED with exit code $code" ;;
        esac
        ((code == 0)) || failed=1
        echo "${parts[$part]}: $state; $(tail -n 1 "$logs/${parts[$part]}.log")"
        unset "parts[$part]"
    done
}

other=titan_v02
[[ $TITAN == 0.3 ]] || other=titan_v03
mapfile -t files < <(grep --recursive --files-with-matches --include='test_*.py' --exclude-dir="$other" 'mark\.gpu\b' tests)
tests() { # name, processes, which tests
    start "$1" "$python" -m pytest --quiet -rfEs --numprocesses "$2" --maxschedchunk 1 -m "$3" "${files[@]}"
}

if ((${#gpus[@]} == 0)); then
    echo "There is no GPU here: kernels are not checked." >&2
    tests tests 0 gpu
    finish
    exit $failed
fi
for tool in memcheck racecheck; do
    # The CUDA bindings ask the driver for functions that it may lack; that is no error of ours.
    sanitizer="compute-sanitizer --tool $tool --error-exitcode 1 --report-api-errors no"
    for name in attention rows; do
        work="benchmarks/check_kernel.py --only-ours --cases 5"
        [[ $name == attention ]] || work="-m pytest --quiet -m gpu tests/backends/test_rows_gpu.py"
        gpu=${gpus[$((sanitized++ % ${#gpus[@]}))]}
        start "$tool-$name" env CUDA_VISIBLE_DEVICES="$gpu" $sanitizer "$python" $work
    done
done
start fp64 nice "$python" benchmarks/check_kernel.py --cases 2000 --seconds inf
at_least_one() { echo $(($1 > 0 ? $1 : 1)); }
processes=$(at_least_one $(($(env -u OMP_NUM_THREADS nproc) / 4))) # a test may start four processes
tests tests $((processes < 6 * ${#gpus[@]} ? processes : 6 * ${#gpus[@]})) "gpu and not alone"
finish
# What wants GPUs for itself: first two for each process, then all of them.
GPUS_ALONE=2 tests tests-on-two "$(at_least_one $((${#gpus[@]} / 2)))" "gpu and alone(gpus=2)"
((${#gpus[@]} < 4)) || finish
tests tests-on-more 1 "gpu and alone and not alone(gpus=2)"
finish
exit $failed
