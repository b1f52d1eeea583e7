"""How long data-parallel ranks wait for the heaviest pack of each step, with packs dealt by their work and without.

    python benchmarks/bench_dealing.py --output benchmarks/results/dealing.json

No GPU. Windows of documents are packed and dealt as training does it. Of each step the slowest pack's time over the
mean: of attention alone, whose work is its (query, key) pairs, and of all products of Llama 3.1 8B.
"""

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from figures import grouped, part, recording_parser, save, table, thousands

from torchtitan_magi.calibrate import facts_of_run
from torchtitan_magi.data import pack_best_fit
from torchtitan_magi.data.packs.dealing import Deal, order_of
from torchtitan_magi.models.published import LLAMA_8B
from torchtitan_magi.models.shapes import block_of
from torchtitan_magi.sizing.sample_packs import draw_lengths

WINDOW_TOKENS, WINDOWS = 2**25, 3  # 128 MiB of text each
RANKS = (2, 4, 8, 16, 32, 64)


LENGTHS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {  # in tokens, of 10,000 documents
    "histogram": lambda rng: draw_lengths(rng, 10**4),
    "lognormal": lambda rng: rng.lognormal(np.log(8192) - 1.2**2 / 2, 1.2, 10**4).astype(np.int64),  # mean 8,192
    "chat": lambda rng: rng.lognormal(np.log(900) - 0.8**2 / 2, 0.8, 10**4).astype(np.int64),  # mean 900
}


def window_of(name: str, rng: np.random.Generator, seq_len: int) -> np.ndarray:
    """Document lengths of a window, none longer than a pack."""
    lengths = np.zeros(0, np.int64)
    while lengths.sum() < WINDOW_TOKENS:
        lengths = np.append(lengths, np.clip(LENGTHS[name](rng), 2, seq_len))
    return lengths[: int(np.searchsorted(lengths.cumsum(), WINDOW_TOKENS)) + 1]


def slowest_over_mean(times: np.ndarray, order: np.ndarray, ranks: int) -> float:
    """The slowest rank's time over the mean, of the whole steps of packs in an order."""
    steps = times[order[: len(order) // ranks * ranks]].reshape(-1, ranks)
    return float(steps.max(1).sum() / steps.mean(1).sum())


def row_of(name: str, seq_len: int, ranks: int) -> dict[str, Any]:
    """Ratios of windows of one kind."""
    found = []
    for window in range(WINDOWS):
        rng = np.random.default_rng(window)
        lengths = window_of(name, rng, seq_len)
        pairs = np.array([(lengths[pack] * (lengths[pack] + 1) // 2).sum() for pack in pack_best_fit(lengths, seq_len)])
        products = 6 * seq_len * sum(block_of(LLAMA_8B, number).used for number in range(LLAMA_8B.num_layers))
        times = {"attention": pairs, "all": products + LLAMA_8B.attention_flops * pairs}
        orders = {"before": rng.permutation(len(pairs)), "after": order_of(pairs, [Deal(ranks, 0, 0)], [window])}
        found.append([slowest_over_mean(t, order, ranks) for t in times.values() for order in orders.values()])
    keys = [f"{what} {when}" for what in ("attention", "all") for when in ("before", "after")]
    means = np.mean(found, 0).round(4).tolist()
    return {
        "lengths": name,
        "tokens": seq_len,
        "ranks": ranks,
        "packs": len(pairs),
        **dict(zip(keys, means, strict=True)),
    }


def dealing_table(found: dict[str, Any]) -> str:
    """Rows by lengths and tokens of a pack, two columns for each number of ranks."""
    columns = ["documents", "tokens", *(f"{ranks} ranks" for ranks in RANKS)]
    rows = []
    for (lengths, tokens), of_ranks in grouped(found["rows"], "lengths", "tokens").items():
        for what in ("attention", "all"):
            cells = [f"{row[f'{what} before']:.2f} -> {row[f'{what} after']:.3f}" for row in of_ranks]
            rows.append([f"{lengths}, {'all products' if what == 'all' else what}", thousands(tokens), *cells])
    return table(columns, rows)


PARTS = {"dealing": part(dealing_table, "dealing")}


def main() -> None:
    arguments = recording_parser(__doc__).parse_args()
    rows = [row_of(name, tokens, ranks) for name in LENGTHS for tokens in (32768, 131072) for ranks in RANKS]
    found = facts_of_run(arguments.commit) | {"processor": platform.processor() or platform.machine(), "rows": rows}
    print(dealing_table(found))
    save(found, arguments.output)


if __name__ == "__main__":
    main()
