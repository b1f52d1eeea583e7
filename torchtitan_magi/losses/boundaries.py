"""Values per token that a loss needs, from the boundaries of documents in a packed batch."""

from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_magi.losses import IGNORE_INDEX


def spread(
    starts: npt.NDArray[Any], ends: npt.NDArray[Any], values: npt.NDArray[Any], num_tokens: int, elsewhere: float
) -> npt.NDArray[Any]:
    """[num_tokens]: ``values[i]`` on the tokens [starts[i], ends[i]), which are disjoint, and ``elsewhere``."""
    lengths = ends.astype(np.int64) - starts
    spread_values = np.full(num_tokens, elsewhere, values.dtype)
    where = np.repeat(starts - (lengths.cumsum() - lengths), lengths) + np.arange(lengths.sum())
    spread_values[where] = np.repeat(values, lengths)
    return spread_values


def num_labels(starts: npt.NDArray[Any], ends: npt.NDArray[Any], labels: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """int64, shaped as starts: how many of the tokens [start, end) have a label.

    Args:
        labels: [num_tokens], IGNORE_INDEX where there is none.
    """
    labels_before = np.append(0, (labels != IGNORE_INDEX).cumsum())
    return labels_before[ends] - labels_before[starts]


def document_weights(documents: npt.NDArray[Any], labels: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float32], int]:
    """Weights that turn a sum over tokens into a sum over documents of the mean over the document's labels.

    Args:
        documents: [n, 2] token ranges. labels: [num_tokens], IGNORE_INDEX where there is none.

    Returns:
        float32 [num_tokens], and the number of documents with a label.
    """
    starts, ends = documents.T
    counts = num_labels(starts, ends, labels)
    weights = (1 / np.maximum(counts, 1)).astype(np.float32)
    return spread(starts, ends, weights, len(labels), 0), int((counts > 0).sum())


def branch_numbers(branches: npt.NDArray[Any], num_tokens: int) -> npt.NDArray[np.int32]:
    """int32 [num_tokens]: the branch, of n, whose own token each is; -1: none's.

    Args:
        branches: [n, 2 or more]: first own token, and the one behind the last.
    """
    return spread(branches[:, 0], branches[:, 1], np.arange(len(branches), dtype=np.int32), num_tokens, -1)
