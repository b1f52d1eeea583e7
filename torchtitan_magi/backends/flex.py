"""Attention of one stage in torch's own operations, on any device: ``backend = "flex"``.

On GPUs the forward is torch's flex_attention, compiled. On CPU the forward is written out, as the backward is
everywhere, in tiles of at most ``TILE`` queries and keys: scores take constant memory whatever the lengths. The
backward cannot be flex_attention's own, because it starts from the final lse over all stages.

Shapes: Tq queries, Tk keys, Hq query heads, H K/V heads, D head_dim, Dv that of v. ``wide`` is float32, or
float64 for float64 inputs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from torchtitan_magi.backends.interface import Gradients, OutGrads, StageInputs, StageMask
from torchtitan_magi.exchange.in_flight import LateKeys, RowShape, keys_and_values
from torchtitan_magi.exchange.rows import TorchRowMover
from torchtitan_magi.masks.geometry import Int32Array, IntArray, clip_keys, clip_rows, intersecting

TILE = 512  # queries and keys of a tile
_BLOCK = 128  # flex_attention's default block of queries and of keys
_MAX_VARIANTS = 64  # of flex_attention; after torch's limit of 8 it would run uncompiled, with all scores in memory


@dataclass(frozen=True, eq=False)
class FlexMask:
    """A stage's mask: tiles for the written-out passes; row bands and key blocks for flex_attention.

    A tile is a row of an AttnSlices table, int [5], whose every query sees a key.
    """

    by_queries: list[IntArray]  # tiles [n, 5], an array for each block of TILE queries
    by_keys: list[IntArray]  # the same tiles, an array for each block of TILE keys
    num_q: int
    num_k: int
    index: tuple[Int32Array, ...]  # lo, hi [num_layers, num_q] of row_bands; counts, numbers of _key_blocks
    block_mask: BlockMask | None = None  # set by ``to`` on GPUs, unless the mask is empty
    num_bytes = 0  # device memory beside the words

    @property
    def words(self) -> Int32Array:
        """The index data as one array, int32 [n]."""
        return np.concatenate([array.ravel() for array in self.index])

    def to(self, words: Tensor) -> "FlexMask":
        """The mask ready for calls on the device of ``words``, a copy of ``self.words``."""
        return self if words.device.type == "cpu" else self.with_block_mask(words)

    def with_block_mask(self, words: Tensor) -> "FlexMask":
        """The mask ready for flex_attention, unless it is empty."""
        if not self.by_keys:
            return self
        arrays = words.split([array.size for array in self.index])
        lo, hi, counts, numbers = (x.view(array.shape) for x, array in zip(arrays, self.index, strict=True))
        block_mask = BlockMask.from_kv_blocks(
            counts[None, None], numbers[None, None], BLOCK_SIZE=_BLOCK, mask_mod=functools.partial(_in_bands, lo, hi),
            seq_lengths=(self.num_q, self.num_k), compute_q_blocks=False,
        )  # fmt: skip
        return replace(self, block_mask=block_mask)


class FlexBlockAttn:
    """Attention of one stage's queries over its K/V rows. ``FfaBlockAttn`` has the same methods."""

    name = "flex"

    def check(self, head_dim: int, dtype: torch.dtype, value_dim: int | None = None) -> None:
        """Takes every head_dim and float dtype."""

    def row_mover(self) -> TorchRowMover:
        """Torch's own operations."""
        return TorchRowMover()

    def prepare(self, mask: StageMask) -> FlexMask:
        """Index data of a stage, on the host. The number of heads and the direction do not matter here."""
        num_q, num_k, own, table = mask.num_q, mask.num_k, mask.num_own, mask.rows
        q_edges = np.append(np.arange(0, num_q, TILE), num_q)
        k_edges = np.concatenate([np.arange(0, own, TILE), np.arange(own, num_k, TILE), [num_k]])
        which, block = intersecting(table[:, 0], table[:, 1], q_edges[:-1], q_edges[1:])
        tiles = clip_rows(table[which], q_edges[block], q_edges[block + 1])
        which, block = intersecting(tiles[:, 2], tiles[:, 3], k_edges[:-1], k_edges[1:])
        tiles, _ = clip_keys(tiles[which], k_edges[block], k_edges[block + 1])
        by_queries, by_keys = _split(tiles, tiles[:, 0], q_edges), _split(tiles, tiles[:, 2], k_edges)
        lo, hi = mask.slices.row_bands(num_q)
        spare = (1 << (len(lo) - 1).bit_length()) - len(lo)  # few numbers of layers: each is a compiled variant
        lo, hi = (np.pad(bound, ((0, spare), (0, 0))) for bound in (lo, hi))
        return FlexMask(by_queries, by_keys, num_q, num_k, (lo, hi, *_key_blocks(lo, hi, num_k)))

    def forward(
        self, inputs: StageInputs, earlier: tuple[Tensor, Tensor] | None = None, more: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Attention over the keys of this stage and of earlier ones.

        Args:
            inputs: q, k, v of any float dtype; late rows are waited for.
            earlier: what the call for the stages before returned, with ``more``; overwritten.
            more: further stages follow.

        Returns:
            out [Tq, Hq, Dv] in the dtype of q, or wide if more stages follow; lse [Tq, Hq], wide, natural logarithms.
            Rows that have seen no key have out 0 and lse -inf.
        """
        q, k, v, mask, softmax_scale, late, softcap, sinks = inputs
        sources = _sources(k, v, late)
        wide = torch.promote_types(q.dtype, torch.float32)
        if mask.block_mask is None:
            if earlier is None:
                out = torch.zeros(*q.shape[:2], v.shape[2], dtype=wide if more else q.dtype, device=q.device)
                earlier = out, torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
            out, lse = earlier
            for tiles in mask.by_queries:
                _attend(q, sources, tiles, softmax_scale, softcap, out, lse)
        else:
            k, v = (torch.cat(x) if late else x[0] for x in zip(*sources, strict=True))
            out, lse = _flex_attention(q, k, v, mask.block_mask, softmax_scale, softcap)
            if earlier is not None:
                merge_(*earlier, out, lse)
                out, lse = earlier
        if sinks is not None and not more:
            add_sinks_(out, lse, sinks)
        return out.to(wide if more else q.dtype), lse

    def marks(self, mask: FlexMask, k: Tensor, v: Tensor) -> None:
        """None: dq starts from zeros."""

    def adds_keys(self, mask: FlexMask) -> bool:
        """False: the backward overwrites dk and dv."""
        return False

    def key_sums(self, mask: FlexMask, k: Tensor, v: Tensor, spare: Tensor) -> None:
        """None: the backward needs no memory for sums of dk and dv."""

    def backward(self, inputs: StageInputs, out_grads: OutGrads, grads: Gradients) -> None:
        """Gradients of one stage; always deterministic. dS K, without softmax_scale, is added to dq.

        P = exp(S - lse), dS = P * (dout v^T - delta): the FlashAttention-2 backward (arXiv 2307.08691). S is
        scale * q k^T; with a softcap it is softcap * tanh of that / softcap, and dS has a factor 1 - (S / softcap)^2.
        """
        (q, k, v, mask, softmax_scale, late, softcap, _), (dout, lse, delta), (dq, dkv, *_) = inputs, out_grads, grads
        sources = _sources(k, v, late)
        heads = k.shape[1], q.shape[1] // k.shape[1]
        dk, dv = keys_and_values(dkv, RowShape.of(k, v))
        dk.zero_()
        dv.zero_()
        for tiles in mask.by_keys:
            first, last = int(tiles[:, 2].min()), int(tiles[:, 3].max())
            k_rows, v_rows = _rows(sources, first, last, dq.dtype)
            dk_rows, dv_rows = torch.zeros_like(k_rows), torch.zeros_like(v_rows)
            for q_start, q_end, k_start, k_end, mask_type in tiles.tolist():
                rows, at = slice(q_start, q_end), slice(k_start - first, k_end - first)
                q_rows, dout_rows = (x[rows].to(dq.dtype).unflatten(1, heads) for x in (q, dout))
                lse_rows, delta_rows = (x[rows].unflatten(1, heads).permute(1, 2, 0)[..., None] for x in (lse, delta))
                q_rows = q_rows * softmax_scale
                scores = _scores(q_rows, k_rows[at], softcap)
                slope = 1 - (scores / softcap) ** 2 if softcap else None
                probs = _hide(scores, mask_type).sub_(lse_rows).exp_()
                dv_rows[at] += torch.einsum("hgqk,qhgd->khd", probs, dout_rows)
                dscores = torch.einsum("qhgd,khd->hgqk", dout_rows, v_rows[at]).sub_(delta_rows).mul_(probs)
                if slope is not None:
                    dscores *= slope
                dq[rows] += torch.einsum("hgqk,khd->qhgd", dscores, k_rows[at]).flatten(1, 2)
                dk_rows[at] += torch.einsum("hgqk,qhgd->khd", dscores, q_rows)
            dk[first:last], dv[first:last] = dk_rows, dv_rows


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merges the attention over more keys into (out, lse), in place.

    out = out * exp(lse - lse') + new_out * exp(new_lse - lse') with lse' = log(exp(lse) + exp(new_lse)); rows that have
    seen no key have lse = -inf and out = 0, before and after.

    Args:
        out: [T, H, D], float32 or wider. lse: [T, H], natural logarithms.
        new_out, new_lse: the same shapes, any float dtype.
    """
    merged = torch.logaddexp(lse, new_lse)
    finite = merged.masked_fill(merged == -torch.inf, 0.0)
    out.mul_(torch.exp(lse - finite).unsqueeze(-1))
    out.add_(new_out * torch.exp(new_lse - finite).unsqueeze(-1))
    lse.copy_(merged)


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Lets the sinks [H] take part in the softmax behind (out [T, H, D], lse [T, H]), final but for them, in place.

    Where a row sees no key and its head's sink is -inf, lse stays -inf and out 0.
    """
    before = lse.clone()
    torch.logaddexp(before, sinks.to(lse.dtype), out=lse)
    out.mul_(torch.exp(before - lse.masked_fill(lse == -torch.inf, 0.0)).unsqueeze(-1))


def _attend(
    q: Tensor,
    sources: list[tuple[Tensor, Tensor]],
    tiles: IntArray,
    softmax_scale: float,
    softcap: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Merges the attention of one block of queries over the keys of its tiles into (out, lse), in place."""
    num_heads_kv = sources[0][0].shape[1]
    heads = num_heads_kv, q.shape[1] // num_heads_kv
    first, last = int(tiles[:, 0].min()), int(tiles[:, 1].max())
    q_rows = (q[first:last].to(lse.dtype) * softmax_scale).unflatten(1, heads)
    out_rows = out[first:last].to(lse.dtype).unflatten(1, heads)  # a view if out is wide
    lse_rows = lse[first:last].unflatten(1, heads)
    for q_start, q_end, k_start, k_end, mask_type in tiles.tolist():
        rows = slice(q_start - first, q_end - first)
        k_rows, v_rows = _rows(sources, k_start, k_end, lse.dtype)
        scores = _hide(_scores(q_rows[rows], k_rows, softcap), mask_type)
        merged = torch.logaddexp(lse_rows[rows], scores.logsumexp(-1).permute(2, 0, 1))
        probs = scores.sub_(merged.permute(1, 2, 0)[..., None]).exp_()
        out_rows[rows] *= torch.exp(lse_rows[rows] - merged)[..., None]
        out_rows[rows] += torch.einsum("hgqk,khd->qhgd", probs, v_rows)
        lse_rows[rows] = merged
    out[first:last] = out_rows.flatten(1, 2)


def _scores(q: Tensor, k: Tensor, softcap: float) -> Tensor:
    """q k^T [H, Hq / H, rows, keys] of a tile, capped if softcap is not 0. q: [rows, H, Hq / H, D]. k: [keys, H, D]."""
    scores = torch.einsum("qhgd,khd->hgqk", q, k)
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap else scores


def _hide(scores: Tensor, mask_type: int) -> Tensor:
    """Sets scores [H, Hq / H, rows, keys] of a tile to -inf where it hides a key."""
    if mask_type:
        rows, keys = scores.shape[2:]
        seen = torch.ones(rows, keys, dtype=torch.bool, device=scores.device)
        if mask_type & 1:
            seen = seen.tril(keys - rows)
        if mask_type & 2:
            seen = seen.triu()
        scores.masked_fill_(~seen, -torch.inf)
    return scores


def _sources(k: Tensor, v: Tensor, late: LateKeys | None) -> list[tuple[Tensor, Tensor]]:
    """K [rows, H, D] and V [rows, H, Dv]: the given ones, then late ones, which are waited for."""
    if late is None:
        return [(k, v)]
    late.arrival.settle(awaited=False)
    return [(k, v), RowShape.of(k, v).split(late.kv)]


def _rows(sources: list[tuple[Tensor, Tensor]], start: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [start, end) of K and of V; rows of the second source follow those of the first. All lie in one source."""
    k, v = sources[0]
    if start >= len(k):
        start, end = start - len(k), end - len(k)
        k, v = sources[1]
    return k[start:end].to(dtype), v[start:end].to(dtype)


# ----------------------------------------------------------------------------------------------------- flex_attention


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


@functools.lru_cache(maxsize=16)
def _capped(softcap: float) -> Callable[..., Tensor]:
    """flex_attention's score function of a softcap."""
    return lambda score, batch, head, q, k: softcap * torch.tanh(score / softcap)


def _flex_attention(
    q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, softmax_scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """out [Tq, Hq, Dv] in the dtype of q, contiguous; lse [Tq, Hq]."""
    heads_first = (x.detach().transpose(0, 1)[None] for x in (q, k, v))
    with torch._dynamo.config.patch(recompile_limit=_MAX_VARIANTS):
        out, aux = _compiled()(
            *heads_first, score_mod=_capped(softcap) if softcap else None, block_mask=block_mask, scale=softmax_scale,
            enable_gqa=True, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
    return out[0].transpose(0, 1).contiguous(), aux.lse[0].transpose(0, 1).contiguous()


def _in_bands(lo: Tensor, hi: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """flex_attention's mask function: whether key k is in one of the bands [num_layers, num_q] of row q."""
    inside = (lo[0][q] <= k) & (k < hi[0][q])
    for layer in range(1, len(lo)):
        inside = inside | ((lo[layer][q] <= k) & (k < hi[layer][q]))
    return inside


# ---------------------------------------------------------------------------------------------------------- index data


def _split(tiles: IntArray, starts: IntArray, edges: IntArray) -> list[IntArray]:
    """The tiles by the block that their start lies in, an array for each block that has any."""
    block = np.searchsorted(edges, starts, "right")
    order = np.argsort(block, kind="stable")
    return [x for x in np.split(tiles[order], np.flatnonzero(np.diff(block[order])) + 1) if len(x)]


def _key_blocks(lo: Int32Array, hi: Int32Array, num_k: int) -> tuple[Int32Array, Int32Array]:
    """For each block of queries, how many blocks of keys it touches, and their numbers first in its row."""
    starts, block = np.arange(0, lo.shape[1], _BLOCK), np.arange(-(-num_k // _BLOCK))
    first = np.minimum.reduceat(np.where(lo < hi, lo, num_k), starts, 1) // _BLOCK
    last = -(-np.maximum.reduceat(hi, starts, 1) // _BLOCK)  # hi is 0 where unused
    touched = ((first[..., None] <= block) & (block < last[..., None])).any(0)
    order = np.argsort(~touched, axis=1, kind="stable")
    return touched.sum(1).astype(np.int32), order.astype(np.int32)
