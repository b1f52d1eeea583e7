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
from figures import RESULTS, Row, result, side_by_side, sources, table, thousands, total_ms  # noqa: E402

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
    "bench_trees",
    "bench_versions",
    "eight",
    "check_kernel",
    "check_prediction",
)
OWNERS += ("compare_versions", "compatibility", "loss_curves", "start_configs", "suite_by_torch")


def span(values: Sequence[float], digits: int) -> str:
    """The least to the greatest."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def headline() -> str:
    """The README's figures: the kernel, context parallelism, training steps."""
    texts = kernel_figures(), cp_figures(), training_figures()
    return "\n".join(textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ") for text in texts)


def kernel_figures() -> str:
    """Our kernel beside FlashAttention-3 and cuDNN; only what kernel_h200.json has of both."""
    rows = [row for row in result("kernel_h200")["rows"] if row["heads"] == "64:8" or row["head_dim"] == 64]
    packs, document, narrow = (
        side_by_side([row for row in rows if (row["case"], row["head_dim"]) == kind], "impl", "tokens", "heads")
        for kind in (("histogram, all", 128), ("causal", 128), ("causal", 64))
    )
    on_packs, on_one, on_narrow = (faster(cases, "fa3", "fwd_ms") for cases in (packs, document, narrow))
    return (
        f"**Kernel** (one H200, heads 64:8, head_dim 128): forward {on_packs} times as fast as FlashAttention-3 on "
        f"packs of {lengths(packs)} tokens, {on_one} times on one causal document of {lengths(document)}; with "
        f"head_dim 64 {on_narrow} times. "
        f"Backward {faster(document, 'cudnn', 'bwd_ms')} times as fast as cuDNN on one document; that of others "
        "on packs has not been measured."
    )


def faster(cases: Mapping[tuple[int, str], Mapping[str, Row]], other: str, way: str) -> str:
    """The least and the greatest speed of ours over that of another kernel."""
    return span([found[other][way] / found["ours"][way] for found in cases.values()], 2)


def lengths(cases: Mapping[tuple[int, str], Mapping[str, Row]]) -> str:
    """The least and the greatest number of tokens."""
    tokens = [tokens for tokens, _ in cases]
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
