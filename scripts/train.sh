#!/usr/bin/env bash
# Trains on this machine, with as many processes as the parallel degrees multiply to; sets up what is missing.
#
# usage: ./scripts/train.sh [FILE.toml] [--SECTION.OPTION VALUE ...]
#
# examples:
#   ./scripts/train.sh
#   ./scripts/train.sh train_configs/llama3_8b_sft_128k.toml --training.steps 100
#
#   FILE.toml                 options of the run; paths in it are relative to the checkout (default:
#                             train_configs/debug.toml, packed SFT of a small model for 20 steps)
#   --SECTION.OPTION VALUE    any option, instead of its value in the file
#   -h, --help                this text
#
# It runs on the CPU where there are fewer GPUs than processes.
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
exec "$python" -P torchtitan_magi/launch.py "$config" "$@"
