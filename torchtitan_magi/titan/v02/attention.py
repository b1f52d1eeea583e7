"""The attention module of a layer, in torchtitan's shapes."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models import attention as titan_attention
from torchtitan.models.attention import VarlenMetadata

from torchtitan_magi.attention.op import attend
from torchtitan_magi.titan.v02.metadata import PlanMetadata


class VarlenAttentionWrapper(titan_attention.VarlenAttentionWrapper):
    """torchtitan's varlen attention, over the ranks of the context-parallel mesh.

    Args:
        dtype: in which attention runs; None: that of v.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(
        self, xq: Tensor, xk: Tensor, xv: Tensor, attention_masks: VarlenMetadata, scale: float | None = None
    ) -> Tensor:
        """Attention of this rank's tokens.

        Args:
            xq: [b, Hq, s, D]. xk, xv: [b, H, s, D]. Tensors, or DTensors that tensor parallelism shards by heads.
            attention_masks: the microbatch's ``PlanMetadata``.
            scale: the scores' factor; default D ** -0.5.

        Returns:
            [b * s, Hq, D] in the dtype of xv; a DTensor if xq is one.
        """
        assert isinstance(attention_masks, PlanMetadata)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (xq, xk, xv))
        layout = (q.device_mesh, q.placements) if isinstance(q, DTensor) else None
        if layout is not None:
            q, k, v = (x.to_local() for x in (q, k, v))
        dtype = self.dtype or v.dtype
        q, k, v = (x.to(dtype) for x in (q, k, v))  # on CUDA autocast leaves the norms of qwen3's q and k in float32
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out, _ = attend(q, k, v, attention_masks.handle, scale)
        out = out.to(xv.dtype)
        return out if layout is None else DTensor.from_local(out, *layout, run_check=False)
