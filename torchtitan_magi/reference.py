"""Attention of one stage on flex_attention: the reference, and the path for machines without a Hopper GPU.

Chosen by ``backend = "flex"``; nothing else imports this file. The forward is torch's flex_attention (eager on CPU,
compiled on GPUs). The backward is written out, slice by slice, because it starts from the final lse over all stages,
which flex_attention's own backward cannot take.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from torchtitan_magi.merge import merge_
from torchtitan_magi.slices import AttnSlices

_BLOCK = 128  # flex_attention's default block of queries and of keys
_BACKWARD_ROWS = 1024  # queries at a time, so that scores stay small


@dataclass(frozen=True, eq=False)
class FlexMask:
    """One stage's mask on its device: as bands for flex_attention, as slices for the written-out backward."""

    slices: AttnSlices
    num_q: int
    num_k: int
    words: npt.NDArray[np.int32]  # lo and hi [num_layers, num_q], then block counts and block numbers
    block_mask: BlockMask | None = None

    def to(self, words: Tensor) -> "FlexMask":
        """The mask with its index data on the device of ``words`` (a copy of ``self.words``)."""
        num_q_blocks, num_k_blocks = -(-self.num_q // _BLOCK), -(-self.num_k // _BLOCK)
        num_blocks = num_q_blocks * (1 + num_k_blocks)
        bands, blocks = words[: len(words) - num_blocks], words[len(words) - num_blocks :]
        lo, hi = bands.view(2, -1, self.num_q)
        if words.device.type == "cpu":  # flex_attention makes the scores whole here, so the mask may be whole, too
            keys = torch.arange(self.num_k)
            dense = ((lo[..., None] <= keys) & (keys < hi[..., None])).any(0)

        def allowed(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if words.device.type == "cpu":
                return dense[q, k]
            inside = (lo[0][q] <= k) & (k < hi[0][q])
            for layer in range(1, len(lo)):
                inside = inside | ((lo[layer][q] <= k) & (k < hi[layer][q]))
            return inside

        block_mask = BlockMask.from_kv_blocks(
            blocks[:num_q_blocks].view(1, 1, -1),
            blocks[num_q_blocks:].view(1, 1, num_q_blocks, num_k_blocks),
            BLOCK_SIZE=_BLOCK,
            mask_mod=allowed,
            seq_lengths=(self.num_q, self.num_k),
            compute_q_blocks=False,
        )
        return FlexMask(self.slices, self.num_q, self.num_k, self.words, block_mask)


class FlexBlockAttn:
    """Attention of one stage's queries over its K/V buffer. ``ffa.FfaBlockAttn`` has the same methods."""

    name = "flex"

    def prepare(self, slices: AttnSlices, num_q: int, num_k: int, num_heads_q: int, num_heads_kv: int) -> FlexMask:
        """Index data of a stage, on the host. The heads do not matter here."""
        lo, hi = slices.row_bands(num_q)
        counts, numbers = _key_blocks(lo, hi, num_q, num_k)
        return FlexMask(slices, num_q, num_k, np.concatenate([a.ravel() for a in (lo, hi, counts, numbers)]))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: FlexMask,
        softmax_scale: float,
        accumulate: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention over k, v; merged into ``accumulate`` in place if given.

        Args:
            q: [Tq, Hq, D]. k, v: [Tk, Hkv, D].
            accumulate: (out [Tq, Hq, D], lse [Tq, Hq]) in float32 or wider; 0 and -inf where no key was seen yet.

        Returns:
            out [Tq, Hq, D] in the dtype of q (of accumulate if given) and lse [Tq, Hq], natural logarithms; rows
            that see no key have out 0 and lse -inf.
        """
        if len(q) == 0 or len(k) == 0 or len(mask.slices) == 0:
            lse_dtype = torch.promote_types(q.dtype, torch.float32)
            return accumulate or (torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=lse_dtype))
        out, aux = _flex_attention(q.device.type)(
            *(x.detach().transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
            block_mask=mask.block_mask,
            scale=softmax_scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        out, lse = out[0].transpose(0, 1), aux.lse[0].transpose(0, 1)
        if accumulate is None:
            return out.contiguous(), lse.contiguous()
        merge_(*accumulate, out, lse)
        return accumulate

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: FlexMask,
        softmax_scale: float,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        deterministic: bool = False,
    ) -> None:
        """Gradients of one stage; always deterministic.

        P = exp(scale * q k^T - lse), dS = P * (dout v^T - delta): the FlashAttention-2 backward (arXiv 2307.08691).

        Args:
            dout, q: [Tq, Hq, D]. k, v: [Tk, Hkv, D]. lse, delta: [Tq, Hq], final over all stages; delta is
                rowsum(out * dout).
            dq: [Tq, Hq, D] in float32 or wider, added to. dk, dv: [Tk, Hkv, D], overwritten.
        """
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
                dscores = probs * (torch.einsum("qhgd,khd->hgqk", dout_rows, v_rows) - delta_rows) * softmax_scale
                dq[rows] += torch.einsum("hgqk,khd->qhgd", dscores, k_rows).flatten(1, 2)
                dk_sum[keys] += torch.einsum("hgqk,qhgd->khd", dscores, q_rows)
        dk.copy_(dk_sum)
        dv.copy_(dv_sum)


@functools.cache
def _flex_attention(device_type: str) -> Callable[..., Any]:
    if device_type != "cpu":
        return torch.compile(flex_attention, dynamic=True)
    # Run it as plain operations: without this flag, torch traces it anew for every mask even when it is not compiled.
    torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    return flex_attention


def _key_blocks(
    lo: npt.NDArray[np.int32], hi: npt.NDArray[np.int32], num_q: int, num_k: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
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
