"""The commands themselves: torchrun with our module."""

import os
import re
from types import SimpleNamespace

import pytest
import torch
from support.processes import torchrun
from support.runs import DEBUG_TOML, SMALL, TrainingError, new_folder, on_corpus, run_script, train
from torch.distributed import checkpoint

from torchtitan_magi import train as command
from torchtitan_magi.training.checkpoints.digests import DigestWriter


def test_torchrun_prints_the_losses_of_the_forked_processes():
    """The harness of these tests runs what users run."""
    arguments = [*on_corpus(), *SMALL, "--parallelism.context_parallel_degree", "2", "--magi.overlap_stages", "2"]
    arguments += ["--training.steps", "2", "--metrics.disable_color_printing"]
    files = ["--job.config_file", DEBUG_TOML, "--job.dump_folder", new_folder()]
    ranks = ["--nproc-per-node=2", "--local-ranks-filter=0"]
    result = torchrun(*ranks, "-m", "torchtitan_magi.train", *files, *arguments)
    assert result.returncode == 0, result.stderr[-4000:]
    printed = re.findall(r"step: (\d+)/[\d,]+  loss: ([0-9.]+) ", result.stdout + result.stderr)
    losses = train(2, arguments, layers=None, entry="torchtitan_magi.train").losses
    assert printed == [(f"{step}", f"{loss:.5f}") for step, loss in enumerate(losses, 1)]


ONE_ENDS_FIRST = """
import os, sys, time
from pathlib import Path
path = Path(sys.argv[1])
if os.environ["RANK"] == "0":
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
else:
    while not path.exists() or Path(f"/proc/{path.read_text()}").exists():
        time.sleep(0.01)
    raise ValueError("the other one has ended")
"""


def test_the_harness_sends_no_signal_to_a_process_that_has_ended(tmp_path, monkeypatch):
    """Its id may be that of somebody else's process: so, it seems, a rank of soak.py died without a word once."""
    struck, kill = [], os.kill
    monkeypatch.setattr(os, "kill", lambda process, number: (struck.append(process), kill(process, number)))
    script, ended = tmp_path / "script.py", tmp_path / "ended"
    script.write_text(ONE_ENDS_FIRST)
    with pytest.raises(TrainingError, match="the other one has ended"):
        run_script(2, script, ended)
    assert int(ended.read_text()) not in struck


def test_plain_torchrun_says_which_checkpoint_is_broken_and_what_to_do(tmp_path):
    """In the last line of its box, and where the rank ends, which has no traceback."""
    folder = tmp_path / "step-2"
    checkpoint.save({"x": torch.zeros(9)}, storage_writer=DigestWriter(folder), checkpoint_id=folder, no_dist=True)
    (folder / "__0_0.distcp").write_bytes(b"")
    arguments = [*on_corpus(), "--parallelism.context_parallel_degree", "1", "--checkpoint.enable"]
    arguments += ["--checkpoint.initial_load_path", folder, "--job.dump_folder", tmp_path]
    result = torchrun("-m", "torchtitan_magi.train", "--job.config_file", DEBUG_TOML, *arguments)
    assert result.returncode
    *_, last = filter(None, (line.strip(" =") for line in result.stderr.splitlines()))
    assert last.startswith(f"ValueError: {folder}/__0_0.distcp is damaged: ")
    assert last.endswith("; load another checkpoint, or copy this one again from where it is whole")
    assert last in result.stderr.splitlines()
    assert "Traceback" not in result.stderr.partition("failed (exitcode")[0]  # torchrun's own follow


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_memory_grows_in_segments_unless_the_user_sets_the_allocator(given, expected, monkeypatch):
    seen = []
    trainer = SimpleNamespace(main=lambda: seen.append(os.environ.get("PYTORCH_ALLOC_CONF")))
    monkeypatch.setattr(command, "importlib", SimpleNamespace(import_module=lambda _: trainer))
    monkeypatch.setattr(os, "environ", {**given})
    command.main()
    assert seen == [expected]
