"""Cases of attention, and who computes them beside our kernel: FlashAttention-3, cuDNN, torch's varlen_attn and
flex_attention."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_magi import flex_flash_attn
from torchtitan_magi.masks.builders import block_causal, sliding_window, tree_causal, varlen_causal, varlen_full
from torchtitan_magi.masks.slices import AttnSlices

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of q [T, Hq, D], k [T, H, D], v [T, H, Dv]


@dataclass(frozen=True)
class Case:
    """Documents of one pack, or nodes of trees of them, and how their tokens see each other."""

    name: str
    cu_seqlens: tuple[int, ...]
    mask: str = "causal"  # or "full", "window", "block", "tree"
    parents: tuple[int, ...] = ()  # of the nodes of trees, -1 for none
    heads: tuple[int, int] = (64, 8)  # of queries, of keys and values
    dims: tuple[int, int] = (128, 128)  # columns of queries and keys, of values
    width: int = 1024  # tokens of a window or a block
    softcap: float = 0.0
    sinks: bool = False

    @property
    def tokens(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def longest(self) -> int:
        return int(np.diff(self.cu_seqlens).max())

    @property
    def is_plain(self) -> bool:
        return not self.softcap and not self.sinks

    def slices(self) -> AttnSlices:
        if self.mask == "tree":
            return tree_causal(np.diff(self.cu_seqlens), self.parents)
        if self.mask in ("window", "block"):
            return {"window": sliding_window, "block": block_causal}[self.mask](self.cu_seqlens, self.width)
        return {"causal": varlen_causal, "full": varlen_full}[self.mask](self.cu_seqlens)

    def window(self) -> tuple[int, int]:
        """As FlashAttention has it: tokens that are seen to the left and to the right, -1 for all."""
        return {"full": (-1, -1), "causal": (-1, 0), "window": (self.width - 1, 0)}[self.mask]


def ours(case: Case, deterministic: bool = False) -> Attention:
    slices = case.slices()
    sinks = torch.randn(case.heads[0], device="cuda") if case.sinks else None
    options = {"deterministic": deterministic, "softcap": case.softcap, "sinks": sinks}
    return lambda q, k, v: flex_flash_attn(q, k, v, slices, **options)[0]


def ours_deterministic(case: Case) -> Attention:
    return ours(case, deterministic=True)


# Each of the following is None where it cannot do the case.
def cudnn(case: Case) -> Attention | None:
    if len(case.cu_seqlens) > 2 or case.mask not in ("full", "causal") or not case.is_plain:
        return None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(*heads_first, is_causal=case.mask == "causal", enable_gqa=True)
        return out[0].transpose(0, 1)

    return run


def cudnn_packed(case: Case) -> Attention | None:
    """By nvidia-cudnn-frontend if it is installed."""
    if case.mask not in ("full", "causal", "window") or not case.is_plain:
        return None
    try:
        from cudnn_packed import PackedAttention, backward_graph, forward_graph, handle
    except ImportError:
        return None
    graphs = [make(case, handle=handle()) for make in (forward_graph, backward_graph)]
    return lambda q, k, v: PackedAttention.apply(q, k, v, *graphs)


def torch_varlen(case: Case) -> Attention | None:
    if case.mask in ("block", "tree") or not case.is_plain or case.dims[0] > 128:
        return None
    from torch.nn.attention.varlen import varlen_attn

    cu = torch.tensor(case.cu_seqlens, dtype=torch.int32, device="cuda")
    longest, window = case.longest, case.window()
    return lambda q, k, v: varlen_attn(q, k, v, cu, cu, longest, longest, window_size=window)


def flex(case: Case) -> Attention | None:
    if case.mask == "tree" or not case.is_plain:
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document = torch.repeat_interleave(
        torch.arange(len(case.cu_seqlens) - 1), torch.tensor(np.diff(case.cu_seqlens))
    ).cuda()
    width = case.width

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = document[q] == document[k]
        if case.mask == "full":
            return same
        if case.mask == "window":
            return same & (k <= q) & (k > q - width)
        return same & (k <= q) if case.mask == "causal" else same & (k // width <= q // width)

    mask = create_block_mask(visible, None, None, case.tokens, case.tokens, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return run


def flash_attention_3(case: Case) -> Attention | None:
    """The forward only, from the wheel fa3-fwd if it is installed."""
    if case.mask in ("block", "tree") or case.sinks:
        return None
    try:
        import fa3_fwd._C  # noqa: F401
    except ImportError:
        return None
    cu = torch.tensor(case.cu_seqlens, dtype=torch.int32, device="cuda")
    longest, scale, is_causal = case.longest, case.dims[0] ** -0.5, case.mask == "causal"
    window = case.window() if case.mask == "window" else (-1, -1)
    size = longest, longest

    @torch.no_grad()
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.fa3_fwd.fwd(
            q, k, v, None, None, None, None, cu, cu, None, None, None, *size, *[None] * 9, scale, is_causal, *window,
            0, case.softcap, True, None, 1, None, 0,
        )[0]  # fmt: skip

    return run


ATTENTIONS = {
    "ours": ours,
    "ours deterministic": ours_deterministic,
    "fa3": flash_attention_3,
    "cudnn packed": cudnn_packed,
    "cudnn": cudnn,
    "varlen_attn": torch_varlen,
    "flex": flex,
}
