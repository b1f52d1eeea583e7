"""Parts of the docs that are made from benchmarks/results/*.json: the tables of those who write the files.

See write_docs.py.
"""

import importlib
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("benchmarks", "tests/long")]

from bench_cp import packs_of  # noqa: E402
from bench_kernel import by_card  # noqa: E402
from figures import RESULTS, Row, result, sources, table, thousands, total_ms  # noqa: E402

__all__ = ["PARTS", "RESULTS", "result", "sources", "table"]

OWNERS = (
    "bench_cp",
    "bench_data",
    "bench_dealing",
    "bench_keeping",
    "bench_kernel",
    "bench_hybrid",
    "bench_linear",
    "bench_models",
    "bench_plan",
    "bench_train",
    "bench_short",
    "bench_trees",
    "bench_versions",
    "eight",
    "check_kernel",
    "check_prediction",
)
OWNERS += ("compare_versions", "compatibility", "loss_curves", "start_configs", "suite_by_torch")


def span(values: Sequence[float], digits: int) -> str:
    """The least to the greatest."""
    least, greatest = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return least if least == greatest else f"{least} to {greatest}"


def headline() -> str:
    """The README's figures: the kernel, context parallelism, training steps."""
    texts = kernel_figures(), cp_figures(), training_figures()
    return "\n".join(textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ") for text in texts)


def kernel_figures() -> str:
    """Our kernel beside FlashAttention-3 and cuDNN's packed attention, on the first card of those measured."""
    found = next(iter(by_card("kernel").values()))
    rows = [row for row in found["rows"] if row["heads"] == "64:8"]
    packs, document, narrow, narrow_packs = (
        [row for row in rows if row["case"] in cases and row["head_dim"] == dim]
        for cases, dim in ((PACKS, 128), (("causal",), 128), (("causal",), 64), (PACKS, 64))
    )
    card = found["device"].split()[1]  # NVIDIA H200
    return (
        f"**Kernel** (one {card}, heads 64:8, head_dim 128): forward {faster(packs, 'fa3')} times as fast as "
        f"FlashAttention-3 on packs of {lengths(packs)} tokens, {faster(document, 'fa3')} times on one causal document "
        f"of {lengths(document)}; with head_dim 64 {faster(narrow_packs, 'fa3')} and {faster(narrow, 'fa3')} times. "
        f"Backward {faster(packs, 'cudnn packed', 'bwd')} times as fast as cuDNN's on packs, "
        f"{faster(document, 'cudnn packed', 'bwd')} times on one document."
    )


PACKS = "histogram", "lognormal"


def faster(rows: Sequence[Row], other: str, way: str = "fwd") -> str:
    """The least and the greatest speed of ours over that of another kernel."""
    return span([row[f"{way}_ratio"] for row in rows if row["impl"] == other], 2)


def lengths(rows: Sequence[Row]) -> str:
    """The least and the greatest number of tokens."""
    tokens = [row["tokens"] for row in rows]
    return f"{thousands(min(tokens))} to {thousands(max(tokens))}"


def cp_figures() -> str:
    """How near context parallelism comes to the ideal, on two GPUs."""
    layers = packs_of(result("cp_h200x2")["rows"])
    shares = [100 * total_ms(by["ideal"]) / total_ms(by["ours"]) for key, by in layers.items() if key[2] == "histogram"]
    return (
        f"**Context parallelism**: {span(shares, 0)}% of the ideal, one GPU's time divided by two, on packs of 8k and "
        "16k tokens per GPU (one layer's attention, two H200)."
    )


def training_figures() -> str:
    """Whole steps beside torchtitan's, with context parallelism and without."""
    step, alone = (
        {row["strategy"]: row for row in result(name)["rows"]} for name in ("train_8b_64k_h200x2", "train_rivals_h200")
    )
    speed, saved = compared(step, "flex")
    speed_alone, saved_alone = compared(alone, "no CP, flex_flash")
    return (
        f"**Training**: Llama 3.1 8B whole, packs of 128k tokens, two H200: {speed:.2f} times the tokens per second of "
        f"torchtitan's context parallelism over flex_attention, with {saved:.0f} GiB less on each GPU. Eight of its "
        f"layers on one GPU, where nothing needs context parallelism: as fast ({speed_alone:.2f} times) as "
        f"torchtitan's flex_flash (FlashAttention-4), with {saved_alone:.0f} GiB less."
    )


def compared(steps: Mapping[str, Row], other: str) -> tuple[float, float]:
    """Our tokens per second over those of another strategy, and the GiB that we take less."""
    ours, theirs = steps["ours"], steps[other]
    return ours["tokens_per_s"] / theirs["tokens_per_s"], theirs["peak_memory_gib"] - ours["peak_memory_gib"]


PARTS: dict[str, Callable[[], str]] = {"headline": headline}
for name in OWNERS:
    PARTS |= importlib.import_module(name).PARTS
