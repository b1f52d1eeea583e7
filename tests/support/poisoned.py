"""Makes the losses of documents not a number, or only their gradients: where a token is to be predicted that no other
document has.

Tests call ``poison``; a run as users start it has this file in ``magi.imports``, and its environment says which token.
"""

import json
import os
from pathlib import Path
from typing import Any

from torchtitan_magi.losses import logprobs

LOSSES, GRADIENTS = "_statistics", "_grad_products"  # the function whose result is not a number
WORD = "#"  # of no other document


def poison(what: str, token: int) -> None:
    """what: LOSSES or GRADIENTS; token: the one to be predicted."""
    stock = getattr(logprobs, what)

    def poisoned(logits, *others):
        row = others[0] if what == LOSSES else others[1]
        result = stock(logits, *others)
        if what == LOSSES:
            return result[0].masked_fill(row == token, float("nan")), result[1]
        return result.masked_fill((row == token)[:, None], float("nan"))

    setattr(logprobs, what, poisoned)


def write_records(path: Path, poisoned: int, pairs: bool = False) -> None:
    """Documents, or preference pairs, of which one fits a pack of 256 tokens. poisoned: line of the one, from 1."""
    others = ["bada"] * (18 if pairs else 35)
    for line in range(1, 13):
        words = [f"{line}", *others, *[WORD] * (line == poisoned), *others]
        record: dict[str, Any] = {"text": " ".join(words)}
        if pairs:
            record = {name: [{"role": "assistant", "content": record["text"]}] for name in ("chosen", "rejected")}
            record["rejected"][0]["content"] += " ba"
            record["prompt"] = [{"role": "user", "content": "bada"}]
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


if "POISON" in os.environ:
    what, token = os.environ["POISON"].split()
    poison(what, int(token))
