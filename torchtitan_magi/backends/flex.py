"""Attention of one stage on flex_attention: the reference, and the path for machines without a Hopper GPU.

Chosen by ``backend = "flex"``; nothing else imports this file. The forward is torch's flex_attention (eager on CPU,
compiled on GPUs). The backward is written out, slice by slice, because it starts from the final lse over all stages,
which flex_attention's own backward cannot take.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from torchtitan_magi.backends import Gradients, OutGrads, StageInputs
from torchtitan_magi.backends.merge import merge_
from torchtitan_magi.exchange.in_flight import LateKeys, keys_and_values
from torchtitan_magi.exchange.rows import TorchRowMover
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.stages import H200, CostModel

_BLOCK = 128  # flex_attention's default block of queries and of keys
_CPU_ROWS = 256  # queries per call on CPU, where flex_attention makes its scores whole
_BACKWARD_ROWS = 1024  # queries at a time, so that scores stay small

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class FlexMask:
    """One stage's mask, on the host until ``to``: bands for flex_attention, slices for the written-out backward."""

    slices: AttnSlices
    num_q: int
    num_k: int
    words: Int32Array  # lo and hi [num_layers, num_q], then key-block counts and numbers of each block of queries
    calls: tuple[tuple[slice, slice, BlockMask], ...] = ()  # rows of q, rows of k and mask of each flex_attention call

    num_bytes = 0  # device memory beside the words

    def to(self, words: Tensor) -> "FlexMask":
        """The mask ready for calls, with its index data on the device of ``words``, a copy of ``self.words``."""
        num_q_blocks, num_k_blocks = -(-self.num_q // _BLOCK), -(-self.num_k // _BLOCK)
        bands, counts, numbers = words.split(
            [len(words) - num_q_blocks * (1 + num_k_blocks), num_q_blocks, num_q_blocks * num_k_blocks]
        )
        lo, hi = bands.view(2, -1, self.num_q) if self.num_q else bands.view(2, 1, 0)
        if words.device.type == "cpu":
            calls = tuple(_cpu_calls(lo, hi))
        else:
            blocks = counts.view(1, 1, -1), numbers.view(1, 1, num_q_blocks, num_k_blocks)
            mask = _block_mask(*blocks, functools.partial(_in_bands, lo, hi), self.num_q, self.num_k)
            calls = ((slice(0, self.num_q), slice(0, self.num_k), mask),)
        return FlexMask(self.slices, self.num_q, self.num_k, self.words, calls)


class FlexBlockAttn:
    """Attention of one stage's queries over its K/V rows. ``ffa.FfaBlockAttn`` has the same methods."""

    name = "flex"

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Takes every head_dim and float dtype."""

    def row_mover(self) -> TorchRowMover:
        return TorchRowMover()

    def prepare(
        self,
        slices: AttnSlices,
        num_q: int,
        num_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        forward: bool = True,
        backward: bool = True,
        late_from: int | None = None,
        head_dim: int = 128,
        cost: CostModel = H200,
    ) -> FlexMask:
        """Index data of a stage, on the host. Heads, direction and late keys do not matter here."""
        lo, hi = slices.row_bands(num_q)
        counts, numbers = _key_blocks(lo, hi, num_q, num_k)
        return FlexMask(slices, num_q, num_k, np.concatenate([a.ravel() for a in (lo, hi, counts, numbers)]))

    def forward(
        self, inputs: StageInputs, earlier: tuple[Tensor, Tensor] | None = None, more: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Attention over k, v and over the keys of earlier stages.

        Args:
            q: [Tq, Hq, D]. k, v: [Tk, Hkv, D].
            earlier: what the call for the stages before returned, with ``more``; overwritten.
            more: further stages follow.
            late: rows of k and v that follow.

        Returns:
            out [Tq, Hq, D] in the dtype of q, or float32 or wider if more stages follow; lse [Tq, Hq], natural
            logarithms. Rows that have seen no key have out 0 and lse -inf.
        """
        q, k, v, mask, softmax_scale, late = inputs
        k, v = _with_late(k, v, late)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, keys, block_mask in mask.calls if len(mask.slices) else ():
            out_rows, aux = _flex_attention(q.device.type)(
                *(x.detach().transpose(0, 1).unsqueeze(0) for x in (q[rows], k[keys], v[keys])),
                block_mask=block_mask,
                scale=softmax_scale,
                enable_gqa=True,
                return_aux=AuxRequest(lse=True),
            )
            out[rows], lse[rows] = out_rows[0].transpose(0, 1), aux.lse[0].transpose(0, 1)
        if earlier is not None:
            merge_(*earlier, out, lse)
            out, lse = earlier
        return out.to(lse.dtype if more else q.dtype), lse

    def adds_keys(self, mask: FlexMask) -> bool:
        """False: the backward overwrites dk and dv."""
        return False

    def key_sums(self, mask: FlexMask, k: Tensor, spare: Tensor) -> None:
        """None: the backward needs no memory for sums of dk and dv."""

    def backward(self, inputs: StageInputs, out_grads: OutGrads, grads: Gradients) -> None:
        """Gradients of one stage; always deterministic.

        P = exp(scale * q k^T - lse), dS = P * (dout v^T - delta): the FlashAttention-2 backward (arXiv 2307.08691).

        Args:
            dout, q: [Tq, Hq, D]. k, v: [Tk, Hkv, D]. lse, delta: [Tq, Hq], final over all stages; delta is
                rowsum(out * dout).
            dq: [Tq, Hq, D] in float32 or wider: dS K, without softmax_scale, is added to it.
            dkv: of Tk and late rows, overwritten.
        """
        (q, k, v, mask, softmax_scale, late), (dout, lse, delta), (dq, dkv, _) = inputs, out_grads, grads
        k, v = _with_late(k, v, late)
        groups = (k.shape[1], q.shape[1] // k.shape[1])
        dk_sum, dv_sum = (torch.zeros(x.shape, dtype=dq.dtype, device=x.device) for x in (k, v))
        for q_start, q_end, k_start, k_end, kind in mask.slices.table.tolist():
            keys = slice(k_start, k_end)
            k_rows, v_rows = k[keys].to(dq.dtype), v[keys].to(dq.dtype)
            for first in range(q_start, q_end, _BACKWARD_ROWS):
                rows = slice(first, min(first + _BACKWARD_ROWS, q_end))
                q_rows, dout_rows = (x[rows].to(dq.dtype).unflatten(1, groups) for x in (q, dout))
                lse_rows, delta_rows = (x[rows].unflatten(1, groups).permute(1, 2, 0)[..., None] for x in (lse, delta))
                scores = torch.einsum("qhgd,khd->hgqk", q_rows, k_rows) * softmax_scale
                probs = torch.exp(scores - lse_rows)
                if kind:
                    row = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
                    col = torch.arange(k_start, k_end, device=q.device)
                    outside = torch.zeros_like(probs[0, 0], dtype=torch.bool)
                    if kind & 1:
                        outside |= col >= k_end - (q_end - 1 - row)
                    if kind & 2:
                        outside |= col < k_start + (row - q_start)
                    probs = probs.masked_fill(outside, 0.0)
                dv_sum[keys] += torch.einsum("hgqk,qhgd->khd", probs, dout_rows)
                dscores = probs * (torch.einsum("qhgd,khd->hgqk", dout_rows, v_rows) - delta_rows)
                dq[rows] += torch.einsum("hgqk,khd->qhgd", dscores, k_rows).flatten(1, 2)
                dk_sum[keys] += torch.einsum("hgqk,qhgd->khd", dscores, q_rows)
        dk, dv = keys_and_values(dkv)
        dk.copy_(dk_sum * softmax_scale)
        dv.copy_(dv_sum)


def _with_late(k: Tensor, v: Tensor, late: LateKeys | None) -> tuple[Tensor, Tensor]:
    if late is None:
        return k, v
    late.arrival.begin()
    late.arrival.wait()
    late_k, late_v = keys_and_values(late.kv)
    return torch.cat([k, late_k]), torch.cat([v, late_v])


@functools.cache
def _flex_attention(device_type: str) -> Callable[..., Any]:
    if device_type != "cpu":
        return torch.compile(flex_attention, dynamic=True)
    # Run it as plain operations: without this flag, torch traces it anew for every mask even when it is not compiled.
    torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    return _with_vmap(flex_attention)


def _with_vmap(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, able to use vmap below a compiled graph, which runs with vmap's dispatch keys switched off."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        for key in ("DynamicLayerFrontMode", "DynamicLayerBackMode", "VmapMode", "Batched"):
            excluded = excluded.remove(getattr(torch._C.DispatchKey, f"FuncTorch{key}"))
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            return function(*args, **kwargs)

    return call


def _in_bands(lo: Tensor, hi: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """flex_attention's mask function: whether key k is in one of the bands [num_layers, num_q] of row q."""
    inside = (lo[0][q] <= k) & (k < hi[0][q])
    for layer in range(1, len(lo)):
        inside = inside | ((lo[layer][q] <= k) & (k < hi[layer][q]))
    return inside


def _in_dense(dense: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return dense[q, k]


def _block_mask(counts: Tensor, numbers: Tensor, mask_mod: Callable[..., Tensor], num_q: int, num_k: int) -> BlockMask:
    return BlockMask.from_kv_blocks(
        counts, numbers, BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=(num_q, num_k), compute_q_blocks=False
    )


def _cpu_calls(lo: Tensor, hi: Tensor) -> Iterator[tuple[slice, slice, BlockMask]]:
    """A call for each _CPU_ROWS rows that see anything, over the keys they reach; blocks mean nothing on CPU."""
    no_blocks = (lo.new_zeros(1, 1, 1), lo.new_zeros(1, 1, 1, 1))
    for first in range(0, lo.shape[1], _CPU_ROWS):
        rows = slice(first, min(first + _CPU_ROWS, lo.shape[1]))
        row_lo, row_hi = lo[:, rows], hi[:, rows]
        used = row_lo < row_hi
        if used.any():
            keys = slice(int(row_lo[used].min()), int(row_hi[used].max()))
            key = torch.arange(keys.start, keys.stop, device=lo.device)
            dense = ((row_lo[..., None] <= key) & (key < row_hi[..., None])).any(0)
            yield rows, keys, _block_mask(*no_blocks, functools.partial(_in_dense, dense), *dense.shape)


def _key_blocks(lo: Int32Array, hi: Int32Array, num_q: int, num_k: int) -> tuple[Int32Array, Int32Array]:
    """For each block of queries, how many blocks of keys it touches, and their numbers first in its row."""
    num_q_blocks, num_k_blocks = -(-num_q // _BLOCK), -(-num_k // _BLOCK)
    edges = np.zeros((num_q_blocks, num_k_blocks + 1), np.int32)  # +1 where a run of blocks begins, -1 after its end
    rows = np.arange(num_q_blocks)
    for layer_lo, layer_hi in zip(lo, hi, strict=True):
        used = layer_lo < layer_hi
        if num_q:
            starts = np.arange(0, num_q, _BLOCK)
            first = np.minimum.reduceat(np.where(used, layer_lo, num_k), starts) // _BLOCK
            last = -(-np.maximum.reduceat(np.where(used, layer_hi, 0), starts) // _BLOCK)
            some = first < last
            np.add.at(edges, (rows[some], first[some]), 1)
            np.add.at(edges, (rows[some], last[some]), -1)
    touched = edges.cumsum(1)[:, :num_k_blocks] > 0
    order = np.argsort(~touched, axis=1, kind="stable").astype(np.int32)
    return touched.sum(1).astype(np.int32), order
