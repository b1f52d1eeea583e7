#!/usr/bin/env bash
# Trains on the nodes of a Slurm job, from the folder of this checkout:
#   sbatch --nodes 8 scripts/slurm.sh FILE.toml [--SECTION.OPTION VALUE ...]
# Not run on hardware. Options of sbatch go before the script; add --partition and --account if your cluster asks for them.
#SBATCH --job-name=torchtitan_magi
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail

config=${1:?"no TOML file; use sbatch scripts/slurm.sh FILE.toml [--SECTION.OPTION VALUE ...]"}
shift
if [[ -f .venv/bin/activate ]]; then # made by train.sh; else the environment of the shell that called sbatch
    source .venv/bin/activate
fi

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((29500 + SLURM_JOB_ID % 1000)) # another one for another job on the same node

# One torchrun per node; srun ends all of them when one fails. The log has rank 0 of each node.
exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "${hosts[0]}:$port" \
    --role rank --local-ranks-filter 0 --tee 3 \
    -m torchtitan_magi.train --job.config_file "$config" "$@"
