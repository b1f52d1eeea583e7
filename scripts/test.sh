#!/usr/bin/env bash
# Runs ruff, mypy and the tests; sets up what is missing.
#
# usage: ./scripts/test.sh [ARGUMENT ...]
#
# examples:
#   ./scripts/test.sh
#   ./scripts/test.sh -x tests/planning/test_plan.py
#
#   ARGUMENT      of pytest (default: all tests, over three processes)
#   -h, --help    this text
#
# Tests marked gpu skip themselves, with a reason, where there is no Hopper GPU.
set -euo pipefail
needs="torch torchtitan pytest xdist hypothesis ruff mypy transformers trl mkdocs"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

"$python" -m ruff check .
"$python" -m ruff format --check .
types=$(mktemp)
trap 'kill $! 2> /dev/null || true; rm -f "$types"' EXIT
"$python" -m mypy > "$types" 2>&1 &  # beside the tests
# All of them over three processes: most tests wait for processes of their own. A file's tests share what they set up.
if (($# == 0)); then set -- --numprocesses 3 --dist loadfile --no-loadscope-reorder; fi
status=0
"$python" -m pytest "$@" || status=$?
wait $! || status=$?
cat "$types"
exit $status
