"""scripts/slurm.sh, with stand-ins for Slurm's commands: the torchrun that each node would start."""

import os
import subprocess
from pathlib import Path

import pytest
from support.processes import run
from support.runs import ROOT

SCRIPT = ROOT / "scripts" / "slurm.sh"
COMMANDS = {
    "scontrol": '[[ "$*" == "show hostnames node[3-4]" ]] && printf "node3\\nnode4\\n"',
    "srun": 'printf "%s\\n" "$@"',
}
JOB = {
    "SLURM_JOB_ID": "41007",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[3-4]",
    "SLURM_GPUS_ON_NODE": "4",
}


def submitted(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """What the script does as a job of two nodes of four GPUs."""
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return run(SCRIPT, *arguments, cwd=folder, **JOB, PATH=f"{folder}:{os.environ['PATH']}")


def test_each_node_starts_its_ranks_and_meets_the_others_at_the_first(tmp_path):
    ended = submitted(tmp_path, "my file.toml", "--training.steps", "100")
    assert ended.returncode == 0, ended.stderr
    first, torchrun, *arguments = ended.stdout.splitlines()
    assert (first, torchrun) == ("--kill-on-bad-exit=1", "torchrun")
    module = arguments.index("-m")
    given = dict(zip(arguments[:module:2], arguments[1:module:2], strict=True))
    assert (given["--nnodes"], given["--nproc-per-node"]) == ("2", "4")
    assert (given["--rdzv-id"], given["--rdzv-endpoint"]) == ("41007", "node3:29507")
    assert arguments[module:] == [
        "-m", "torchtitan_magi.train", "--job.config_file", "my file.toml", "--training.steps", "100"
    ]  # fmt: skip


def test_torchrun_knows_the_options(tmp_path):
    from torch.distributed.run import parse_args

    torchrun = submitted(tmp_path, "my.toml").stdout.splitlines()[2:]
    assert parse_args(torchrun).training_script == "torchtitan_magi.train"


def test_a_job_without_a_file_ends_with_the_remedy(tmp_path):
    ended = submitted(tmp_path)
    assert ended.returncode != 0
    assert ended.stderr.strip().endswith(
        "no TOML file; use sbatch scripts/slurm.sh FILE.toml [--SECTION.OPTION VALUE ...]"
    )


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda path: path.name)
def test_bash_can_parse_each_script(script):
    ended = run("bash", "-n", script)
    assert ended.returncode == 0, ended.stderr
