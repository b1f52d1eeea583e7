"""What common beginnings of records save, and a tree of them as it is computed."""

import itertools
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan_magi.data.datasets.packed_dataset import PackedDataset, Sample
from torchtitan_magi.data.datasets.sft import PackedSFTDataset
from torchtitan_magi.data.inspection.spelling import Speller, visible
from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.data.packs.prefix_trees import branches_of_documents, nodes_of
from torchtitan_magi.data.tokens.chat import ChatTokenizer
from torchtitan_magi.data.tokens.token_cache import default_folder

_PACKS = 8  # that the tree is chosen from
_NODES = 24  # shown
_TEXT = 60  # characters of a node that are shown

Tree = tuple[Sample, int, int]  # an item, the first document of the tree in it, and the one behind the last


@dataclass(frozen=True)
class Node:
    """A run of tokens that is computed once.

    depth: nodes above it; position: of its first token in its records; tokens: how many; records: how many have it;
    where: the record, if it is one's alone; text: how it begins.
    """

    depth: int
    position: int
    tokens: int
    records: int
    where: str
    text: str

    def __str__(self) -> str:
        whose = self.where or f"{self.records:,} records"
        lead = "  " * (self.depth - 1) + "└ " * (self.depth > 0)
        return f"{self.position:>9,}  {lead}{self.tokens:,} tokens, {whose}: {self.text}"


@dataclass(frozen=True)
class Sharing:
    """What is computed once for several records.

    counts: of the packs that training begins with; tree: the nodes of the one of them that saves most, depth first;
    num_nodes: of the whole tree; empty and 0 if nothing is shared.
    """

    counts: PackingCounts
    tree: list[Node]
    num_nodes: int

    def lines(self) -> list[str]:
        """The words for it."""
        counts, left = self.counts, self.num_nodes - len(self.tree)
        if not self.tree:
            return [f"none: no two of the first {counts.documents:,} records begin with the same tokens"]
        whole = counts.tokens + counts.shared_tokens
        saved = f"{counts.tokens:,} tokens in place of {whole:,} ({counts.tokens / whole:.1%})"
        head = f"the first {counts.documents:,} records take {saved}; the tree that saves most of some packs:"
        more = [f"{'':>9}  and {left:,} more nodes"] if left else []
        return [head, *map(str, self.tree), *more]


def sharing(source: str | os.PathLike[str], chat: ChatTokenizer, seq_len: int) -> Sharing:
    """Packs the beginning of a data set as training does with ``share_prefixes``; its tokens are kept for training.

    Raises ValueError as a run would.
    """
    options: dict[str, Any] = {"epochs": 1, "check": False, "bad_records": "skip", "token_cache": default_folder()}
    dataset = PackedSFTDataset(source, chat, seq_len, share_prefixes=True, **options)
    trees = [tree for item in itertools.islice(dataset, _PACKS) for tree in _trees(item)]
    saved, tree = max(trees, key=lambda found: found[0])
    nodes = _nodes(tree, dataset, Speller(chat)) if saved else []
    return Sharing(dataset.counts, nodes[:_NODES], len(nodes))


def _trees(item: Sample) -> list[tuple[int, Tree]]:
    """How many positions each tree of an item saves, and the tree."""
    shared = item[0]["documents"][:, 2]
    bounds = np.append(np.flatnonzero(shared == 0), len(shared)).tolist()
    return [(int(shared[first:last].sum()), (item, first, last)) for first, last in itertools.pairwise(bounds)]


def _nodes(tree: Tree, dataset: PackedDataset, speller: Speller) -> list[Node]:
    (inputs, _), first, last = tree
    start, end, parent, ends_with = nodes_of(branches_of_documents(inputs["documents"][first:last]))
    depth, records = np.zeros(len(start), int), np.bincount(ends_with, minlength=len(start))
    for node in np.flatnonzero(parent >= 0).tolist():
        depth[node] = depth[parent[node]] + 1
    for node in np.flatnonzero(parent >= 0)[::-1].tolist():
        records[parent[node]] += records[node]
    of_one = {int(node): int(record) for node, record in zip(ends_with, inputs["records"][first:last], strict=True)}
    found = []
    for node, (begin, stop) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        where = dataset.records.where(of_one[node]) if records[node] == 1 else ""
        position = int(inputs["positions"][begin])
        text = speller.text(inputs["input"][begin : min(stop, begin + _TEXT)].tolist())
        text = visible(text).replace("\n", "⏎")[:_TEXT]
        found.append(Node(int(depth[node]), position, stop - begin, int(records[node]), where, text))
    return found
