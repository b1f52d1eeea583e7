"""Parts of the docs that are made from benchmarks/results/*.json: tables of figures. See write_docs.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def result(name: str) -> dict[str, Any]:
    """benchmarks/results/NAME.json."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def headline() -> str:
    """Three figures for the README: the kernel, context parallelism, a training step."""
    ours, torchs = (
        {(row["case"], row["tokens"]): row for row in result("kernel_h200")["rows"] if row["impl"] == implementation}
        for implementation in ("ours", "varlen_attn")
    )
    packs = [(ours[key], row) for key, row in torchs.items() if key in ours and key[0] == "histogram, all"]
    forward, backward = ([b[way] / a[way] for a, b in packs] for way in ("fwd_ms", "bwd_ms"))
    layers: dict[tuple[int, int], dict[str, float]] = {}
    for row in result("cp_h200x2")["rows"]:
        if row["pack"] == "histogram":
            times = layers.setdefault((row["tokens_per_gpu"], row["seed"]), {})
            times[row["strategy"]] = row["fwd_ms"] + row["bwd_ms"]
    shares = [100 * times["ideal"] / times["ours"] for times in layers.values()]
    step = {row["strategy"]: row for row in result("train_8b_64k_h200x2")["rows"]}
    faster = step["ours"]["tokens_per_s"] / step["flex"]["tokens_per_s"]
    saved = step["flex"]["peak_memory_gib"] - step["ours"]["peak_memory_gib"]
    return f"""
- **Kernel**: {span(forward, 1)} times the speed of torch's `varlen_attn` forward, {span(backward, 1)} times backward, on packs of
  8k to 256k tokens (one H200, heads 64:8).
- **Context parallelism**: {span(shares, 0)}% of the ideal, one GPU's time divided by two, on packs of 8k and 16k tokens per GPU (two H200).
- **Training**: Llama 3.1 8B whole, 128k-token packs, two H200: {faster:.2f} times the tokens per second of torchtitan's own context
  parallelism over flex_attention, with {saved:.0f} GiB less on each GPU.
"""


def span(values: list[float], digits: int) -> str:
    """The least to the greatest."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


PARTS: dict[str, Callable[[], str]] = {"headline": headline}
