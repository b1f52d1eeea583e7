"""Which tokens each context-parallel rank owns: the same number for every rank, nearly the same attention work."""

import heapq

import numpy as np
import numpy.typing as npt

from torchtitan_magi.slices import AttnSlices

# Chunks per rank: enough to balance the work, few enough that documents stay together.
_MIN_CHUNKS, _MAX_CHUNKS, _CHUNK_TOKENS = 8, 32, 128


def place(slices: AttnSlices, num_tokens: int, cp_size: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Splits the tokens into equal chunks and gives the heaviest to the rank with the least work so far.

    Args:
        slices: the mask over the whole pack.
        num_tokens: tokens of the pack, a multiple of cp_size.
        cp_size: number of ranks.

    Returns:
        per rank int64 [n, 2]: the half-open token ranges it owns, ascending, adjacent ones joined. Every rank owns
        exactly ``num_tokens / cp_size`` tokens.
    """
    tokens_per_rank = num_tokens // cp_size
    if tokens_per_rank == 0:
        return tuple(np.zeros((0, 2), np.int64) for _ in range(cp_size))
    num_chunks = min(tokens_per_rank, max(_MIN_CHUNKS, min(_MAX_CHUNKS, tokens_per_rank // _CHUNK_TOKENS)))
    size, rest = divmod(tokens_per_rank, num_chunks)
    # Every rank gets num_chunks chunks of `size` tokens, and one of `rest` tokens from the end of the pack.
    sizes = np.repeat([size, rest], [num_chunks * cp_size, cp_size if rest else 0])
    ends = sizes.cumsum()
    starts = ends - sizes
    work = np.add.reduceat(slices.row_cost(num_tokens), starts)

    owned: list[list[int]] = [[] for _ in range(cp_size)]
    load = np.zeros(cp_size)
    for first, last, capacity in ((0, num_chunks * cp_size, num_chunks), (num_chunks * cp_size, len(sizes), 1)):
        heap = [(load[rank], rank, capacity) for rank in range(cp_size)]
        heapq.heapify(heap)
        for chunk in first + np.argsort(-work[first:last], kind="stable"):
            _, rank, free = heapq.heappop(heap)
            owned[rank].append(int(chunk))
            load[rank] += work[chunk]
            if free > 1:
                heapq.heappush(heap, (load[rank], rank, free - 1))
    return tuple(_joined(starts[chunks], ends[chunks]) for chunks in map(sorted, owned))


def _joined(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Ascending ranges with adjacent ones joined, [n, 2]."""
    new = np.append(True, starts[1:] != ends[:-1])
    return np.stack([starts[new], ends[np.append(np.flatnonzero(new)[1:] - 1, len(ends) - 1)]], 1)
