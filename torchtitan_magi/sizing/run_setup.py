"""The facts of a run that decide about its memory, from torchtitan's job config or from a TOML file alone."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.models.shapes import Parameters, heads_of_rank, parameters_of
from torchtitan_magi.planning.cost_model import Heads

FLOAT32 = 4  # bytes
PREDICTED = ("llama3", "qwen3")  # models


@dataclass(frozen=True)
class Setup:
    """What decides about memory.

    Args:
        dp_replicate, dp_shard, cp, tp, ep, etp: parallel degrees; experts of ``ep`` above 1 are shared out over it.
        seq_len: tokens of a pack. packs: of a microbatch on a data-parallel rank.
        checkpointing: torchtitan's activation_checkpoint.mode. every: full checkpointing of every so many-th block, for
            "selective"; 0: by operation. budget: fraction of the activations to keep, for "memory_budget".
        compiled: whether the blocks are compiled. compiled_loss: whether the loss is.
        param_bytes, compute_bytes, reduce_bytes: bytes per element of stored parameters, of what is computed with, and
            of the gradients that are reduced.
        foreach: whether the optimizer, Adam or AdamW, steps all parameters at once by operations on lists of tensors.
        accumulates: whether a step has several microbatches.
        reference: whether a frozen copy of the model is there for preference training.
        offload: whether parameters, gradients and states are in the host's memory.
        whole_logits: whether the logits of all tokens exist at once, as with torchtitan's own loss.
        gpu: whether training runs on GPUs.
        cp_per_machine: context-parallel ranks of a pack in each machine, one number if alike; None: all are in one.
        overlap_stages: magi.overlap_stages.
    """

    model: ModelConfig
    seq_len: int
    packs: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    checkpointing: str = "none"
    every: int = 0
    budget: float = 1.0
    compiled: bool = False
    compiled_loss: bool = False
    param_bytes: int = FLOAT32
    compute_bytes: int = 2
    reduce_bytes: int = FLOAT32
    foreach: bool = False
    accumulates: bool = False
    reference: bool = False
    offload: bool = False
    whole_logits: bool = False
    gpu: bool = True
    cp_per_machine: int | tuple[int, ...] | None = None
    overlap_stages: int = -1

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank."""
        return self.seq_len * self.packs // self.cp

    @property
    def fsdp(self) -> int:
        """Ranks over which FSDP2 shards what is not an expert."""
        return self.dp_shard * self.cp

    @property
    def local_dim(self) -> int:
        """Elements per token of what lies between blocks, where tensor parallelism splits the sequence."""
        return self.model.dim // self.tp

    @functools.cached_property
    def heads(self) -> Heads:
        """Shape of the attention layers on a rank."""
        return heads_of_rank(self.model, self.tp)

    @functools.cached_property
    def on_rank(self) -> Parameters:
        """What a rank's GPU holds of a block while it runs, and of embedding or output layer."""
        return parameters_of(self.model, self.tp, self.ep * self.etp if self.ep > 1 else self.tp)

    @functools.cached_property
    def stored(self) -> int:
        """Number of parameters that a rank stores: its tensor- and expert-parallel part, sharded by FSDP2."""
        experts = parameters_of(self.model).experts * self.model.num_layers
        return -(-self.on_rank.dense // self.fsdp) + -(-experts // (self.fsdp * self.tp))


def setup_of(
    run: Any,
    model: ModelConfig,
    dp_shard: int,
    *,
    whole_logits: bool = False,
    gpu: bool = True,
    cp_per_machine: int | tuple[int, ...] | None = None,
) -> Setup:
    """The facts of a run.

    Args:
        run: options as ``run.training.seq_len``: torchtitan's job config, or what ``run_file.read_run`` returns.
        dp_shard, whole_logits, gpu, cp_per_machine: see ``Setup``.
    """
    training, checkpointing, compiled, parallelism = (
        run.training,
        run.activation_checkpoint,
        run.compile,
        run.parallelism,
    )
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    dp_replicate = parallelism.data_parallel_replicate_degree
    option = checkpointing.selective_ac_option
    every = int(option) if checkpointing.mode == "selective" and option.isdigit() else None
    mixed = dp_shard * cp > 1 or tp == 1  # tensor parallelism alone computes in the training dtype
    return Setup(
        model,
        training.seq_len,
        training.local_batch_size,
        dp_replicate,
        dp_shard,
        cp,
        tp,
        parallelism.expert_parallel_degree,
        parallelism.expert_tensor_parallel_degree,
        checkpointing="full" if every == 0 else checkpointing.mode,  # as torchtitan takes "every 0th block"
        every=every or 0,
        budget=checkpointing.memory_budget,
        compiled=compiled.enable and "model" in compiled.components,
        compiled_loss=compiled.enable and "loss" in compiled.components,
        param_bytes=_bytes_of(training.dtype),
        compute_bytes=_bytes_of(training.mixed_precision_param if mixed else training.dtype),
        reduce_bytes=_bytes_of(training.mixed_precision_reduce),
        foreach=run.optimizer.implementation == "foreach",
        accumulates=training.global_batch_size > training.local_batch_size * dp_replicate * dp_shard,
        reference=training.dataset == "dpo" and run.magi.dpo.reference == "model",
        offload=training.enable_cpu_offload,
        whole_logits=whole_logits,
        gpu=gpu,
        cp_per_machine=cp_per_machine,
        overlap_stages=run.magi.overlap_stages,
    )


def _bytes_of(dtype: str) -> int:
    """Bytes of an element of torch's dtype of this name."""
    return int(getattr(torch, dtype).itemsize)


def unpredicted(run: Any, model: ModelConfig) -> str:
    """Names what of a run has memory that is not predicted, "" if all of it is; run: see ``setup_of``."""
    is_there = {
        model.model: model.model not in PREDICTED,
        "pipelines": run.parallelism.pipeline_parallel_degree > 1,
        "LoRA": run.magi.lora.rank > 0,
    }
    return " and ".join(name for name, there in is_there.items() if there)
