"""The masks of packs to size a run with.

A pack is an int64 array of tokens: [n] of causal documents; [n, 3] of preference pairs: prompt, chosen, rejected; or
[m, 2] of the nodes of trees, each tree depth first: a node's tokens, and the number of its parent, -1: it has none.
"""

import numpy as np

from torchtitan_magi.data.packs.prefix_trees import branches_of_documents, nodes_of
from torchtitan_magi.masks.builders import tree_causal
from torchtitan_magi.masks.geometry import Int32Array, Int64Array
from torchtitan_magi.masks.slices import AttnSlices


def pack_of_trees(documents: Int32Array) -> Int64Array:
    """The pack of branches int32 [n, 3], see ``PackedSFTDataset``."""
    start, end, parent, _ = nodes_of(branches_of_documents(documents))
    return np.stack([end - start, parent], 1)


def tokens_and_parents(pack: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The nodes of all documents of a pack, one behind the other, [m] each: a document is one, a pair is three."""
    if pack.ndim == 1:
        return pack, np.full_like(pack, -1)
    if pack.shape[1] == 2:
        return pack[:, 0], pack[:, 1]
    prompts = 3 * np.arange(len(pack))
    return pack.ravel(), np.stack([np.full_like(prompts, -1), prompts, prompts], 1).ravel()


def mask_of(pack: Int64Array, window: int = 0) -> AttnSlices:
    """What attends to what, canonical. window: how many tokens a row sees at most; 0: all of its document."""
    return tree_causal(*tokens_and_parents(pack), window=window or None).canonical()
