"""Compiles the kernels of a run before its first step, so that in no later one ranks wait for a compiler.

TileLang compiles a kernel when it is first called, which takes 2 to 40 seconds, and keeps it on disk. Which of them a
layer calls follows from its sequences: how many there are, whether any is cut into fragments, whether states come in or
maps go out. So each step may need another one, and a layer several: in all, longer than collectives wait.
"""

import logging
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from torchtitan_magi.linear.backend import Tokens
from torchtitan_magi.linear.kernels import HEAD_DIM, Kernels

CHUNK, MOST = 64, 256  # tokens of a chunk, chunks of the longest kind: more than a GPU has SMs

logger = logging.getLogger(__name__)


def compile_ahead(heads: tuple[int, int], dtype: torch.dtype, device: torch.device, num_ranks: int) -> None:
    """Runs layers of all kinds, both ways. A rank alone, for which nobody waits, compiles in its steps what they need.

    Ranks of a node begin with different kinds, and find on disk what others have compiled.

    Args:
        heads: of q and k, and of v, on this rank.
        dtype: of q, k, v.
        num_ranks: of the run.
    """
    from tilelang import env

    cache = env.TILELANG_CACHE_DIR
    if num_ranks == 1:
        logger.info("Linear attention: steps compile the kernels that they are first to need, kept in %s", cache)
        return
    logger.info("Linear attention: compiling kernels that are not in %s yet, minutes if there are none", cache)
    start, kinds = time.monotonic(), list(_kinds())
    first = len(kinds) * (device.index or 0) // max(1, torch.cuda.device_count())
    for lengths, is_linked in kinds[first:] + kinds[:first]:
        _run(_tokens(sum(lengths), heads, dtype, device), lengths, is_linked)
    torch.cuda.empty_cache()
    logger.info("Linear attention: kernels are ready after %.0f s", time.monotonic() - start)


def _kinds() -> Iterator[tuple[list[int], bool]]:
    """Lengths of sequences, and whether states come in and maps go out. Kernels change where sequences times heads pass
    one number, and twice that."""
    for chunks in (2**i for i in range(MOST.bit_length())):
        for is_linked in (False, True):
            yield [CHUNK] * chunks, is_linked
            yield [CHUNK * chunks], is_linked


def _tokens(num: int, heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tokens:
    def zeros(num_heads: int, *width: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(num, num_heads, *width, dtype=dtype, device=device)

    gates, wide = zeros(heads[1], dtype=torch.float32), HEAD_DIM
    return Tokens(zeros(heads[0], wide), zeros(heads[0], wide), zeros(heads[1], wide), gates, gates)


def _run(tokens: Tokens, lengths: list[int], is_linked: bool) -> None:
    """Both directions of a layer, as ``delta_rule`` calls them."""
    mapped = range(len(lengths)) if is_linked else ()
    states = {i: tokens.g.new_zeros(tokens.state_shape) for i in mapped}
    scale, backend = HEAD_DIM**-0.5, Kernels()
    forward = backend.start(tokens, lengths, scale, mapped)
    if is_linked:
        forward.maps()
    out, kept = forward.finish(states)
    backward = backend.start_backward(tokens, lengths, scale, states, kept, out, mapped)
    if is_linked:
        backward.state_grads()
    backward.prepare()
    backward.finish(states)
