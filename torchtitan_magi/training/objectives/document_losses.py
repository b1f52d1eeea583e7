"""Losses of the documents of a step, kept on the device; they are read only when a step ends the run."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from torchtitan_magi.training.batches.microbatch import Microbatch
from torchtitan_magi.training.process.all_ranks import gathered

MOST_NAMED = 5  # documents in a line of the log

Part = tuple[str, float, int]  # the name of a document, the sum of some of its losses, and how many they are
Where = Callable[[int], str]  # number of a record -> its file and line


@dataclass(eq=False)
class DocumentLosses:
    """What a rank has of a microbatch's losses, of documents or of preference pairs.

    losses: [l] of the rank's labelled tokens, or [n] of pairs; on the device.
    """

    batch: Microbatch
    losses: Tensor | None = None

    def parts(self, where: Where | None, place: str) -> list[Part]:
        """The losses added up by document. Waits for the device.

        Args:
            where: None where there are no records.
            place: of the microbatch, for the name of a document without a record.
        """
        if self.losses is None:
            return []
        losses = self.losses.double().cpu().numpy()
        sums, counts = self._of_documents(losses) if self.batch.pairs is None else (losses, np.ones_like(losses))
        return [(self._name(n, where, place), float(sums[n]), int(counts[n])) for n in np.flatnonzero(counts).tolist()]

    def _of_documents(self, losses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[2, n]: the sum of the losses of each document, with those it shares, and how many they are."""
        tokens, labelled, nodes = self.batch.indices[0].share.tokens, self.batch.labelled, self.batch.nodes
        own = tokens if labelled is None else tokens[labelled.numpy()]
        node = np.searchsorted(nodes.start, own, side="right") - 1
        values = losses, np.ones_like(losses)
        found: npt.NDArray[np.float64] = np.stack([np.bincount(node, each, len(nodes.start)) for each in values])
        for number in np.flatnonzero(nodes.parent >= 0).tolist():  # a parent comes before its children
            found[:, number] += found[:, nodes.parent[number]]
        return found[:, nodes.last]

    def _name(self, number: int, where: Where | None, place: str) -> str:
        if self.batch.records is not None and where is not None:
            return where(int(self.batch.records[number]))
        branches = self.batch.branches[[number] if self.batch.pairs is None else self.batch.pairs[number]]
        begin, end = branches[:, 0].min(), branches[:, 1].max()
        return f"tokens {begin} to {end - 1} of {place}"


def mean_losses(kept: Iterable[DocumentLosses], where: Where | None, reader: int) -> dict[str, float]:
    """The mean loss of each document of a step, by its name. A collective of all ranks.

    Args:
        kept: this rank's microbatches.
        where: None where there are no records.
        reader: number of the data-parallel rank.
    """
    places = (f"microbatch {number} of data-parallel rank {reader}" for number in itertools.count(1))
    mine = [part for batch, place in zip(kept, places, strict=False) for part in batch.parts(where, place)]
    sums, counts = defaultdict[str, float](float), Counter[str]()
    for name, losses, count in itertools.chain(*gathered(mine)):  # context-parallel ranks have parts of one document
        sums[name] += losses
        counts[name] += count
    return {name: sums[name] / counts[name] for name in sums}


def described(means: dict[str, float]) -> str:
    """Which documents a step failed by, to be read after "is not finite"; "" if nobody knows any."""
    odd = [name for name, mean in means.items() if not math.isfinite(mean)]
    if odd:
        return f" in {len(odd):,} of {len(means):,} documents: {_named(odd)}"
    highest = [f"{name} ({means[name]:.4g})" for name in sorted(means, key=lambda name: -means[name])]
    return f"; the highest losses are those of {_named(highest)}" if highest else ""


def _named(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
