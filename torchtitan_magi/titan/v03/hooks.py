"""Names of torchtitan 0.3 that we replace, because no configuration holds them."""

import torch
from torch.distributed import checkpoint
from torchtitan.components import lora, metrics
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.utils import MoEStateDictAdapter
from torchtitan.tools import profiler, utils

from torchtitan_magi.titan.v03.lora import sharding_of_adapter
from torchtitan_magi.titan.wrap import wrap
from torchtitan_magi.training.checkpoints.digests import save_with_digests
from torchtitan_magi.training.experts import own_experts
from torchtitan_magi.training.finite import clip_and_note
from torchtitan_magi.training.process.cpu import use_cpu
from torchtitan_magi.training.process.timeouts import set_pg_timeouts


def install() -> None:
    """Replaces the names, once per process, before torchtitan's Trainer is imported."""
    if not torch.accelerator.is_available():
        use_cpu((utils, dist_utils, parallel_dims, metrics, profiler), metrics)
    for owner, name, replacement in (
        (dist_utils, "clip_grad_norm_", clip_and_note),  # to end steps that are not finite
        (checkpoint, "save", save_with_digests),  # to write digests beside the files
        (checkpoint, "async_save", save_with_digests),  # the same
        (MoEStateDictAdapter, "_caculate_indices_from_placements", own_experts),  # to have them under HSDP as well
        (lora, "_lora_adapter_sharding", sharding_of_adapter),  # for DeepSeek's layers of latent vectors
    ):
        wrap(owner, name, replacement)
    dist_utils.set_pg_timeouts = set_pg_timeouts  # to reach our own communicators as well
