"""Makes the losses of documents not a number, or only their gradients: where a token is to be predicted that no other
document has.

Tests call ``poison``; a run as users start it has this file in ``magi.imports``, and its environment says which token.
"""

import json
import os
from pathlib import Path

from torchtitan_magi.losses import logprobs

LOSSES, GRADIENTS = "_statistics", "_grad_logits"  # the function whose result is not a number
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


def write_records(path: Path, poisoned: set[int]) -> None:
    """Records of one pack of 256 tokens each, read in their order without shuffling. poisoned: lines, from 1."""
    words = [[f"{line}", *["bada"] * 40, *[WORD] * (line in poisoned), *["bada"] * 40] for line in range(1, 17)]
    path.write_text("".join(json.dumps({"text": " ".join(record)}) + "\n" for record in words))


if "POISON" in os.environ:
    what, token = os.environ["POISON"].split()
    poison(what, int(token))
