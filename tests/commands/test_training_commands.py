"""The commands themselves: torchrun with a module, and tests/long/loss_compare.py."""

import os
import re
import sys

import pytest
import torch
from support import runs
from support.processes import python, torchrun
from support.runs import DEBUG_TOML, SMALL, TrainingError, new_folder, on_corpus, run_script, train
from torch.distributed import checkpoint

from torchtitan_magi.training.checkpoints.digests import DigestWriter

import loss_compare  # isort: skip


def test_torchrun_prints_the_losses_of_the_forked_processes():
    """The harness of these tests runs what users run."""
    arguments = [*on_corpus(), *SMALL, "--parallelism.context_parallel_degree", "2", "--magi.overlap_stages", "2"]
    arguments += ["--training.steps", "2", "--metrics.disable_color_printing"]
    files = ["--job.config_file", DEBUG_TOML, "--job.dump_folder", new_folder()]
    ranks = ["--nproc-per-node=2", "--local-ranks-filter=0"]
    result = torchrun(*ranks, "-m", "torchtitan_magi.train", *files, *arguments)
    assert result.returncode == 0, result.stderr[-4000:]
    printed = re.findall(r"step: +(\d+)  loss: +([0-9.]+) ", result.stdout + result.stderr)
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
    """In the last line of its box."""
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


def test_loss_compare_prints_a_table(monkeypatch, capsys):
    options = ["--layouts", "cp2", "--steps", "1", *on_corpus(), *SMALL[:2]]
    monkeypatch.setattr(sys, "argv", ["loss_compare.py", str(DEBUG_TOML), *options])
    monkeypatch.setattr(runs, "TIMEOUT", runs.TIMEOUT)  # which the command makes longer
    with pytest.raises(SystemExit) as ended:
        loss_compare.main()
    assert ended.value.code == 0
    *_, head, line, row = capsys.readouterr().out.splitlines()
    assert head == "| layout | against | processes | max rel diff loss | max rel diff grad_norm | verdict |"
    assert line == "| --- | --- | --- | --- | --- | --- |"
    assert re.fullmatch(r"\| cp2 \| cp1 \| 2 \| \d\.\de[+-]\d\d \| \d\.\de[+-]\d\d \| equal \|", row)


class Recorded:
    """Stands in for the runs."""

    def __init__(self, **runs):
        self.runs = runs

    def of(self, name, layout):
        if name not in self.runs:
            raise TrainingError("ValueError", "", "", f"{name} printed this")
        loss, grad_norm = self.runs[name]
        return {"loss": loss, "grad_norm": grad_norm}


REFERENCE = [8.0, 7.0], [1.0, 2.0]


@pytest.mark.parametrize(
    ("ours", "row"),
    [
        (([8.0, 7.0005], [1.0, 2.0]), "| 7.1e-05 | 0.0e+00 | equal |"),
        (([8.0, 7.0], [1.0, 2.0004]), "| 0.0e+00 | 2.0e-04 | DIFFERS |"),
        (([8.0, 7.001], [1.0, 2.0]), "| 1.4e-04 | 0.0e+00 | DIFFERS |"),
        (([8.0, float("nan")], [1.0, 2.0]), "| inf | 0.0e+00 | DIFFERS |"),
        (([8.0], [1.0]), "| inf | inf | DIFFERS |"),
        (([], []), "| inf | inf | DIFFERS |"),
        (None, "| | | failed |"),
    ],
)
def test_loss_compare_fails_for_anything_but_equal_numbers(ours, row, capsys):
    layouts = loss_compare.LAYOUTS
    runs = Recorded(cp1=REFERENCE) if ours is None else Recorded(cp1=REFERENCE, cp2=ours)
    failed = loss_compare.print_table({"cp2": layouts["cp2"]}, layouts, runs, 1e-4)
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == f"| cp2 | cp1 | 2 {row}"
    assert failed == ("equal" not in row)
    assert ("cp2 printed this" in printed.err) == (ours is None)


def test_loss_compare_names_unknown_layouts():
    result = python("tests/long/loss_compare.py", DEBUG_TOML, "--layouts", "cp2,cp3")
    assert result.returncode == 2
    assert "unknown layouts cp3; use some of cp2, cp4" in result.stderr
