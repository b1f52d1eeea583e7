"""The facts of a run that decide about its memory, from torchtitan's job config or from a TOML file alone."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.models.shapes import Parameters, heads_of_rank, parameters_of
from torchtitan_magi.planning.cost_model import Heads

# Gives the value of an option "section.option" of a run. It is also told torchtitan 0.2.2's default, or all values with
# the default first, or the type of an option that every run says.
Read = Callable[[str, Any], Any]

FLOAT32 = 4  # bytes
DTYPES = ("float32", "bfloat16")
BYTES = dict(zip(DTYPES, (FLOAT32, 2), strict=True))  # of an element
PREDICTED = ("llama3", "qwen3")  # models


@dataclass(frozen=True)
class Setup:
    """What of a run decides about its memory.

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
        """Numbers of parameters that a rank's GPU holds of a block while it runs, and of embedding or output layer."""
        return parameters_of(self.model, self.tp, self.ep * self.etp if self.ep > 1 else self.tp)

    @functools.cached_property
    def stored(self) -> int:
        """Number of parameters that a rank stores: its tensor- and expert-parallel part, sharded by FSDP2."""
        experts = parameters_of(self.model).experts * self.model.num_layers
        return -(-self.on_rank.dense // self.fsdp) + -(-experts // (self.fsdp * self.tp))


def setup_of(read: Read, model: ModelConfig, dp_shard: int) -> Setup:
    """The facts of a run that its options say; the others are as in ``Setup``."""
    mode = read("activation_checkpoint.mode", ("selective", "full", "memory_budget", "none"))
    option = read("activation_checkpoint.selective_ac_option", "2")
    every = int(option) if mode == "selective" and option.isdigit() else None
    components = read("compile.components", ["model", "loss"]) if read("compile.enable", False) else []
    packs, copies = read("training.local_batch_size", 8), read("parallelism.data_parallel_replicate_degree", 1)
    cp, tp = read("parallelism.context_parallel_degree", int), read("parallelism.tensor_parallel_degree", 1)
    mixed = dp_shard * cp > 1 or tp == 1  # tensor parallelism alone computes in the training dtype
    stored, computed = read("training.dtype", DTYPES), read("training.mixed_precision_param", DTYPES[::-1])
    return Setup(
        model,
        read("training.seq_len", int),
        packs,
        copies,
        dp_shard,
        cp,
        tp,
        read("parallelism.expert_parallel_degree", 1),
        read("parallelism.expert_tensor_parallel_degree", 1),
        checkpointing="full" if every == 0 else mode,  # as torchtitan takes "every 0th block"
        every=every or 0,
        budget=read("activation_checkpoint.memory_budget", 0.5),
        compiled="model" in components,
        compiled_loss="loss" in components,
        param_bytes=BYTES[stored],
        compute_bytes=BYTES[computed if mixed else stored],
        reduce_bytes=BYTES[read("training.mixed_precision_reduce", DTYPES)],
        foreach=read("optimizer.implementation", "fused") == "foreach",
        accumulates=read("training.global_batch_size", -1) > packs * copies * dp_shard,
        reference=read("training.dataset", str) == "dpo" and read("magi.dpo.reference", "model") == "model",
        offload=read("training.enable_cpu_offload", False),
        overlap_stages=read("magi.overlap_stages", -1),
    )


def unpredicted(read: Read, model: ModelConfig) -> str:
    """Names what of a run has memory that is not predicted, "" if all of it is."""
    is_there = {
        model.model: model.model not in PREDICTED,
        "pipelines": read("parallelism.pipeline_parallel_degree", 1) > 1,
        "LoRA": read("magi.lora.rank", 0) > 0,
    }
    return " and ".join(name for name, there in is_there.items() if there)
