"""What a stream of packs depends on besides its records and their tokens."""

from dataclasses import dataclass
from typing import Literal, get_args

from torchtitan_magi.data.packs.epoch_order import WINDOW_BLOCKS
from torchtitan_magi.wording import quoted

BadRecords = Literal["error", "skip"]


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
        if self.seq_len < 1:
            raise ValueError(f"seq_len is {self.seq_len}; give at least 1 token")
        if self.window_blocks < 1:
            raise ValueError(f"window_blocks is {self.window_blocks}; give at least 1 block")
        if self.packs_per_step < 1:
            raise ValueError(f"packs_per_step is {self.packs_per_step}; give at least 1 pack")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; give an integer >= 0")
        if self.epochs < 1 and self.epochs != -1:
            raise ValueError(f"epochs is {self.epochs}; give at least 1, or -1 for epochs without end")
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
