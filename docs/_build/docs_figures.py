"""Parts of the docs that are made from benchmarks/results/*.json: the tables of those who write the files.

See write_docs.py.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("benchmarks", "tests/long")]

from bench_cp import packs_of  # noqa: E402
from figures import RESULTS, result, sources, table, total_ms  # noqa: E402

__all__ = ["PARTS", "RESULTS", "result", "sources", "table"]

OWNERS = (
    "bench_cp",
    "bench_data",
    "bench_kernel",
    "bench_models",
    "bench_plan",
    "bench_train",
    "bench_versions",
    "check_kernel",
    "check_prediction",
)
OWNERS += ("compare_versions", "compatibility", "loss_curves", "start_configs", "suite_by_torch")


def span(values: Sequence[float], digits: int) -> str:
    """The least to the greatest."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def headline() -> str:
    """Three figures for the README: the kernel, context parallelism, a training step."""
    ours, torchs = (
        {(row["case"], row["tokens"]): row for row in result("kernel_h200")["rows"] if row["impl"] == implementation}
        for implementation in ("ours", "varlen_attn")
    )
    packs = [(ours[key], row) for key, row in torchs.items() if key in ours and key[0] == "histogram, all"]
    forward, backward = ([b[way] / a[way] for a, b in packs] for way in ("fwd_ms", "bwd_ms"))
    tokens = [row["tokens"] // 1024 for row, _ in packs]
    layers = packs_of(result("cp_h200x2")["rows"])
    shares = [100 * total_ms(by["ideal"]) / total_ms(by["ours"]) for key, by in layers.items() if key[2] == "histogram"]
    step = {row["strategy"]: row for row in result("train_8b_64k_h200x2")["rows"]}
    faster = step["ours"]["tokens_per_s"] / step["flex"]["tokens_per_s"]
    saved = step["flex"]["peak_memory_gib"] - step["ours"]["peak_memory_gib"]
    return f"""
- **Kernel**: {span(forward, 1)} times the speed of torch's `varlen_attn` forward, {span(backward, 1)} times backward,
  on packs of {min(tokens)}k to {max(tokens)}k tokens (one H200, heads 64:8).
- **Context parallelism**: {span(shares, 0)}% of the ideal, one GPU's time divided by two, on packs of 8k and 16k tokens
  per GPU (two H200).
- **Training**: Llama 3.1 8B whole, 128k-token packs, two H200: {faster:.2f} times the tokens per second of torchtitan's
  own context parallelism over flex_attention, with {saved:.0f} GiB less on each GPU.
"""


PARTS: dict[str, Callable[[], str]] = {"headline": headline}
for name in OWNERS:
    PARTS |= importlib.import_module(name).PARTS
