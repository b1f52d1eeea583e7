#!/usr/bin/env bash
# Runs what needs Hopper GPUs: kernels under compute-sanitizer and against fp64, then the tests marked gpu.
#
# usage: ./scripts/test_gpu.sh [FOLDER]
#
# example:
#   ./scripts/test_gpu.sh outputs/test_gpu
#
#   FOLDER        for the logs (default: outputs/test_gpu)
#   -h, --help    this text
#
# The checks are spread over the GPUs of this machine.
set -euo pipefail
needs="torch torchtitan pytest hypothesis"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
logs=$(realpath -m "${1:-outputs/test_gpu}")
mkdir -p "$logs"
gpus=$(nvidia-smi -L | wc -l)
failed=0

run() { # name and command: a log, and a line that says how it ended
    local name=$1 state=passed
    shift
    "$@" >"$logs/$name.log" 2>&1 || state=FAILED
    echo "$name: $state; $(tail -n 1 "$logs/$name.log")"
    [[ $state == passed ]]
}

run compile "$python" benchmarks/check_kernel.py --only-ours --cases 1 # once, for all that follow
jobs=()
for tool in memcheck racecheck; do
    # The CUDA bindings ask the driver for functions that it may lack; that is no error of ours.
    sanitizer="compute-sanitizer --tool $tool --error-exitcode 1 --report-api-errors no"
    CUDA_VISIBLE_DEVICES=$((${#jobs[@]} % gpus)) run "$tool-attention" \
        $sanitizer "$python" benchmarks/check_kernel.py --only-ours --cases 5 &
    jobs+=($!)
    CUDA_VISIBLE_DEVICES=$((${#jobs[@]} % gpus)) run "$tool-rows" \
        $sanitizer "$python" -m pytest --quiet -m gpu tests/backends/test_rows_gpu.py &
    jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job" || failed=1; done
run fp64 "$python" benchmarks/check_kernel.py --cases 2000 || failed=1
run tests "$python" -m pytest --quiet -m gpu || failed=1
exit $failed
