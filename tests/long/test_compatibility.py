"""What tests/long/compatibility.py trains, and a few of its combinations."""

import functools
import itertools
from pathlib import Path

import pytest
from support import runs as training  # puts scripts/ on the path

from compatibility import AXES, LAYOUTS, Cell, Outcome, Runs, cells, gpu_cells  # isort: skip


@functools.cache
def runs():
    return Runs(Path(training.new_folder()), on_gpus=False)


@pytest.mark.parametrize("model", LAYOUTS)
def test_every_two_values_of_two_options_meet(model):
    chosen = [cell for cell in cells() if cell.model == model]
    axes = {"layout": LAYOUTS[model]} | AXES
    for (a, xs), (b, ys) in itertools.combinations(axes.items(), 2):
        met = {(getattr(cell, a), getattr(cell, b)) for cell in chosen}
        assert met >= set(itertools.product(xs, ys)), f"{a} and {b}"


def test_what_needs_gpus_is_not_run_on_the_cpu():
    assert {cell.extra for cell in cells()} == {"none"}
    assert {cell.extra for cell in gpu_cells()} == {"CPU offload", "float8", "async TP"}
    assert max(cell.processes for cell in gpu_cells()) == 2


@pytest.mark.parametrize(
    "cell",
    [
        Cell("llama3", "HSDP", "selective", packs=2, validation=True),
        Cell("qwen3", "TP", "full", precision="bf16", accumulation=2, task="DPO"),
        Cell("qwen3 MoE", "FSDP + TP + CP + EP", "selective", accumulation=2, validation=True),
    ],
    ids=str,
)
def test_a_combination_trains_as_the_plain_run(cell):
    verdict, detail = runs().verdict(cell)
    assert verdict == "works", detail


def test_a_combination_that_cannot_be_is_refused_by_name():
    verdict, detail = runs().verdict(Cell("llama3", "EP"))
    assert verdict == "refused"
    assert "expert_parallel_degree is 2" in detail


@pytest.mark.parametrize(("loss", "on_gpus", "on_cpu"), [
    (1.16, "works", "works"), (1.25, "works", "FAILS"), (1.35, "FAILS", "FAILS"),
])  # fmt: skip
def test_on_gpus_low_precision_may_lose_twice_what_the_plain_run_loses(loss, on_gpus, on_cpu):
    cell = Cell(layout="CP", precision="bf16", extra="float8", task="DPO")
    losses = {cell: loss, cell.plain: 1.15, cell.plain.exact: 1.0}
    runs = object.__new__(Runs)
    runs.of = lambda cell: Outcome((losses[cell],) * 3)
    for runs.on_gpus, want in ((True, on_gpus), (False, on_cpu)):
        assert runs.verdict(cell)[0] == want
