#!/usr/bin/env bash
# Trains: ./scripts/train.sh [config.toml] [torchtitan overrides such as --training.steps 100]
# Does all set-up. Without arguments: packed SFT of a small model under context parallelism, on GPUs if there are enough.
set -euo pipefail
caller=$PWD
needs="torch torchtitan"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export PYTHONPATH="$PYTHONPATH:$caller" # for the caller's own modules, [magi] imports

config=train_configs/debug.toml
if [[ ${1:-} == *.toml ]]; then
    config=$(cd "$caller" && realpath "$1")
    shift
fi
if grep -q assets/demo "$config"; then
    "$python" scripts/make_demo_data.py
fi
exec "$python" scripts/launch.py "$config" "$@"
