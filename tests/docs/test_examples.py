"""The examples run as they stand."""

import re

import pytest
from support.processes import python, torchrun
from support.runs import ROOT, run_script

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name, processes=None):
    """What it prints."""
    path = ROOT / "examples" / name
    done = torchrun(f"--nproc-per-node={processes}", path) if processes else python(path)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) < 120


def test_a_mask_of_ones_own():
    printed = run("own_mask.py")
    assert "7 slices, 333 of 729 pairs" in printed
    assert float(re.search(r"relative: (\S+)", printed)[1]) < 1e-5
    assert printed.count("receives K/V of") == 4


def test_a_plain_loop_learns_the_same_on_any_number_of_ranks():
    one, two = run("fsdp_loop.py", 1), run_script(2, ROOT / "examples" / "fsdp_loop.py").output
    alone, together = ([float(loss) for loss in re.findall(r"loss (\S+)", printed)] for printed in (one, two))
    assert together == pytest.approx(alone, rel=0, abs=1.01e-4)  # the last printed digit may round apart
    assert alone[-1] < 0.5 < 4 < alone[0]


def test_models_of_transformers_have_the_losses_they_have_alone():
    printed = run("transformers_attention.py", 2)  # it asserts that they have
    assert re.findall(r"^(\w+) +on 2 ranks", printed, re.M) == ["llama", "qwen3", "mistral", "granite"]
