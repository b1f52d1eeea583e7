"""Best-fit-decreasing bin packing of documents, and the counts of packing."""

from bisect import bisect_left, insort
from dataclasses import dataclass, fields

import numpy as np

from torchtitan_magi.wording import amount


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Best-fit-decreasing: the longest document first, each into the fullest pack that still has room for it.

    lengths: integers [n], tokens, each in 1..capacity. Returns the document indices of every pack; each index occurs
    once. Deterministic. O(n log n) apart from list insertion: 100,000 documents take well under a second.

    Raises ValueError for other lengths.
    """
    lengths = np.asarray(lengths)
    if len(lengths) == 0:
        return []
    smallest, largest = lengths.min(), lengths.max()
    if lengths.dtype.kind not in "iu" or not 1 <= smallest <= largest <= capacity:
        raise ValueError(
            f"lengths are from {smallest} to {largest}; give integers from 1 to {capacity}, the capacity of a pack"
        )
    packs: list[list[int]] = []
    open_packs: dict[int, list[int]] = {}  # free tokens -> packs with that many, if a document may still fit
    rooms: list[int] = []  # the keys of open_packs, ascending
    order = np.argsort(-lengths, kind="stable")
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fit = bisect_left(rooms, length)
        if fit == len(rooms):
            room, pack = capacity, len(packs)
            packs.append([])
        else:
            room = rooms[fit]
            pack = open_packs[room].pop()
            if not open_packs[room]:
                del open_packs[room], rooms[fit]
        packs[pack].append(document)
        room -= length
        if room >= smallest:
            if room not in open_packs:
                insort(rooms, room)
                open_packs[room] = []
            open_packs[room].append(pack)
    return packs


@dataclass(frozen=True)
class PackingCounts:
    """Counts of the records read so far, over all data-parallel ranks; `str()` is one line for the log.

    The counts add up. At the end of an epoch
    `documents + extra_pieces == pieces + unlabeled + skipped + equal + long_prompts`, and
    `tokens_read == tokens + shared_tokens + truncated_tokens + tokens_left_out`.
    """

    documents: int = 0  # records read: documents, or prompts with preference pairs
    tokens_read: int = 0  # positions of these records before truncation
    truncated: int = 0  # documents or pairs cut to seq_len
    truncated_tokens: int = 0  # positions removed by truncation
    split: int = 0  # documents cut into several pieces
    extra_pieces: int = 0  # pieces, answers and pairs left out of a record, beyond the first
    unlabeled: int = 0  # pieces and pairs left out because they have no label
    skipped: int = 0  # malformed records left out
    equal: int = 0  # pairs left out because chosen and rejected have equal tokens, before or after truncation
    long_prompts: int = 0  # pairs left out because their prompt leaves no room for both completions
    tokens_left_out: int = 0  # positions of the pieces and pairs left out
    packs: int = 0
    pieces: int = 0  # pieces in the packs
    tokens: int = 0  # positions that the pieces fill
    shared_tokens: int = 0  # positions of pieces that stand in the pack once for several of them
    slots: int = 0  # packs x seq_len

    @property
    def fill(self) -> float:
        """Fraction of the packs' positions that pieces fill, 0 to 1."""
        return self.tokens / max(1, self.slots)

    def sharing(self, packs_per_step: int, packs_per_epoch: float) -> str:
        """What common beginnings save and what that does to steps, in words."""
        if not self.shared_tokens:
            return f"no two of {self.documents:,} records that are packed together begin with the same tokens"
        whole, steps = self.tokens + self.shared_tokens, packs_per_epoch / packs_per_step
        times, records = whole / self.tokens, packs_per_step * self.pieces / self.packs
        return (
            f"{self.tokens:,} tokens in place of {whole:,} in {self.documents:,} records; a step takes about "
            f"{amount(records, 'record')} in place of {amount(records / times)}, an epoch about "
            f"{amount(steps, 'step')} in place of {amount(steps * times)}, and training.steps and the learning rate "
            "count such steps"
        )

    def __add__(self, other: "PackingCounts") -> "PackingCounts":
        return PackingCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __str__(self) -> str:
        left_out = (
            (self.unlabeled, "without a label"),
            (self.skipped, "malformed"),
            (self.equal, "with chosen equal to rejected"),
            (self.long_prompts, "with too long a prompt"),
        )
        reasons = ", ".join(f"{count:,} {reason}" for count, reason in left_out if count) or "none"
        shared = f" {self.shared_tokens:,} tokens shared;" if self.shared_tokens else ""
        return (
            f"{self.documents:,} documents, {self.packs:,} packs {100 * self.fill:.1f}% full;{shared}"
            f" {self.truncated:,} truncated ({self.truncated_tokens:,} tokens), {self.split:,} split;"
            f" left out: {reasons}"
        )
