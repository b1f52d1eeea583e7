"""What a stream of packs depends on besides its records and their tokens."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from torchtitan_magi.data.packs.epoch_order import WINDOW_BLOCKS
from torchtitan_magi.wording import quoted

BadRecords = Literal["error", "skip"]


def is_integer(value: object, least: int) -> bool:
    """Whether a value is an integer of at least `least`, of Python or of NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


@dataclass(frozen=True)
class PackOptions:
    """Which packs are made, and in which order; `PackedDataset` says what each field means.

    Raises ValueError for values out of range.
    """

    seq_len: int
    seed: int = 0
    shuffle: bool = True
    epochs: int = -1
    bad_records: BadRecords = "error"
    weighted: bool = True
    window_blocks: int = WINDOW_BLOCKS
    share_prefixes: bool = False
    share_labels: bool = True
    packs_per_step: int = 1

    def __post_init__(self) -> None:
        for name, least in (("seq_len", 1), ("window_blocks", 1), ("packs_per_step", 1), ("seed", 0)):
            if not is_integer(value := getattr(self, name), least):
                raise ValueError(f"{name} is {quoted(value)}; give an integer of at least {least}")
        if not is_integer(self.epochs, 1) and self.epochs != -1:
            raise ValueError(
                f"epochs is {quoted(self.epochs)}; give an integer of at least 1, or -1 for epochs without end"
            )
        for name in ("shuffle", "weighted", "share_prefixes", "share_labels"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} is {quoted(value)}; use True or False")
        if self.bad_records not in get_args(BadRecords):
            raise ValueError(f"bad_records is {quoted(self.bad_records)}; use one of {', '.join(get_args(BadRecords))}")

    @property
    def skips_bad(self) -> bool:
        """Whether a record that is malformed or that the tokenizer refuses is left out; otherwise it is an error."""
        return self.bad_records == "skip"

    @property
    def order_seed(self) -> int | None:
        """Seeds the order of records and packs; None: the order of the files."""
        return self.seed if self.shuffle else None

    def has_epoch(self, epoch: int) -> bool:
        """Whether there is an epoch of this number, counted from 0."""
        return self.epochs == -1 or epoch < self.epochs
