"""The facts of a run that decide about its memory, from torchtitan's job config or from a TOML file alone."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_magi.machine import version_of
from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.models.pipeline_stages import (
    LOOPED,
    check_adapters,
    check_microbatches,
    layers_of_parts,
    layers_of_stages,
    model_of_layers,
)
from torchtitan_magi.models.shapes import Parameters, adapters_of, heads_of_rank, num_moe_layers, parameters_of
from torchtitan_magi.planning.cost_model import Heads
from torchtitan_magi.sizing.keeping.kinds import ALL, AUTO, INPUTS, OF_MODE, Keeping, parse
from torchtitan_magi.training.settings.options import LoRA
from torchtitan_magi.wording import quoted

# Gives the value of an option "section.option" of a run. It is also told torchtitan 0.2.2's default, or all values with
# the default first, or the type of an option that every run says.
Read = Callable[[str, Any], Any]

FLOAT32 = 4  # bytes
DTYPES = ("float32", "bfloat16")
BYTES = dict(zip(DTYPES, (FLOAT32, 2), strict=True))  # of an element
RESHARD = ("default", "always", "never")
LESS = (1, 0, *range(2, 1000))  # values of an option, the default first


@dataclass(frozen=True)
class Setup:
    """What of a run decides about its memory.

    Args:
        dp_replicate, dp_shard, cp, tp, ep, etp, pp: parallel degrees; experts of ``ep`` above 1 are shared out over it.
        seq_len: tokens of a pack. packs: of a microbatch on a data-parallel rank.
        checkpointing: torchtitan's activation_checkpoint.mode, or "auto". every: full checkpointing of every so many-th
            block, for "selective"; 0: by operation. budget: fraction of the activations to keep, for "memory_budget".
            keeping: what each layer keeps, for "auto"; empty while that is not decided.
        compiled: whether the blocks are compiled. compiled_loss: whether the loss is.
        param_bytes, mixed_bytes, reduce_bytes: bytes per element of stored parameters, of what mixed precision computes
            with, and of the gradients that are reduced.
        foreach: whether the optimizer, Adam or AdamW, steps all parameters at once by operations on lists of tensors.
        state_bytes: bytes per element of its states; None: as of parameters.
        microbatches: of a step. schedule: in which order a pipeline computes them, ``at_once`` at a time. stage_layers:
            layers of each of its stages; empty: as torchtitan shares them out by itself, see ``layers_of_stages``.
        lora_rank, lora_targets: of adapters, where only these are trained.
        reference: whether a frozen copy of the model is there for preference training. reference_in_file: whether a
            file may stand in for it. logits_again: whether the loss makes logits again for its backward, as those of
            pairs and of rollouts.
        offload: whether parameters, gradients and states are in the host's memory. staged: whether a checkpoint of them
            is there, too, while it is written. reshard: torchtitan's fsdp_reshard_after_forward. sequence_parallel:
            whether tensor parallelism splits the sequence between blocks.
        whole_logits: whether the logits of all tokens exist at once, as with torchtitan's own loss.
        gpu: whether training runs on GPUs.
        cp_per_machine: context-parallel ranks of a pack in each machine, one number if alike; None: all are in one.
        overlap_stages: magi.overlap_stages.
        has_embedding, has_output: whether the first and the last layer are there. in_flight: microbatches whose
            activations are kept at once; of a stage of a pipeline, see ``stages``.
        learned: share of the tokens that have a label.
        flex: whether attention runs by flex_attention. deterministic: whether its backward repeats bit for bit.
        by_02: whether torchtitan 0.2.2 trains: it replicates by DDP, computes in the stored dtype where there is tensor
            parallelism alone, and weighs in float32 what experts put out.
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
    pp: int = 1
    checkpointing: str = "none"
    every: int = 0
    budget: float = 1.0
    keeping: tuple[Keeping, ...] = ()
    compiled: bool = False
    compiled_loss: bool = False
    param_bytes: int = FLOAT32
    mixed_bytes: int = 2
    reduce_bytes: int = FLOAT32
    foreach: bool = False
    state_bytes: int | None = None
    microbatches: int = 1
    schedule: str = "1F1B"
    at_once: int = 1
    stage_layers: tuple[tuple[int, ...], ...] = ()
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    reference: bool = False
    reference_in_file: bool = True
    logits_again: bool = False
    offload: bool = False
    staged: bool = False
    reshard: str = RESHARD[0]
    sequence_parallel: bool = True
    whole_logits: bool = False
    gpu: bool = True
    cp_per_machine: int | tuple[int, ...] | None = None
    overlap_stages: int = -1
    has_embedding: bool = True
    has_output: bool = True
    in_flight: float = 1.0
    learned: float = 1.0
    flex: bool = False
    deterministic: bool = False
    by_02: bool = False

    @property
    def world_size(self) -> int:
        """GPUs of the run."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def packs_per_step(self) -> int:
        """Packs that a step takes, over all data-parallel ranks."""
        return self.packs * self.microbatches * self.dp_shard * self.dp_replicate

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank."""
        return self.seq_len * self.packs // self.cp

    @property
    def fsdp(self) -> int:
        """Ranks over which FSDP2 shards what is not an expert."""
        return self.dp_shard * self.cp

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of what is computed with."""
        return self.param_bytes if self.by_02 and self.fsdp == 1 and self.tp > 1 else self.mixed_bytes

    @property
    def local_dim(self) -> int:
        """Elements per token of what lies between blocks, where tensor parallelism may split the sequence."""
        return self.model.dim // self.tp if self.sequence_parallel else self.model.dim

    @property
    def keeps_gathered(self) -> bool:
        """Whether FSDP2 keeps what it gathers, from one forward to all backwards: by default it does in a pipeline."""
        return self.reshard == "never" or (self.reshard == RESHARD[0] and self.pp > 1)

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
        """Number of the model's parameters that a rank stores: its tensor- and expert-parallel part, sharded."""
        missing = 0 if self.model.tied else 2 - self.has_embedding - self.has_output
        dense = self.on_rank.dense - missing * self.on_rank.vocabulary
        return -(-dense // self.fsdp) + -(-self._experts // (self.fsdp * self.tp))

    @property
    def _experts(self) -> int:
        return parameters_of(self.model).experts * num_moe_layers(self.model)

    @functools.cached_property
    def whole(self) -> int:
        """Number of the model's parameters that a rank's GPU holds while it keeps them gathered."""
        dense = self.stored - -(-self._experts // (self.fsdp * self.tp))
        return dense * self.fsdp + self.on_rank.experts * num_moe_layers(self.model)

    @functools.cached_property
    def adapters(self) -> int:
        """Number of parameters of low-rank adapters that a rank stores."""
        return -(-adapters_of(self.model, self.lora_rank, self.lora_targets) // (self.fsdp * self.tp))

    @property
    def trained(self) -> int:
        """Number of parameters that a rank stores and trains."""
        return self.adapters if self.lora_rank else self.stored

    @property
    def accumulates(self) -> bool:
        """Whether a step has several microbatches."""
        return self.microbatches > 1

    @functools.cached_property
    def keepings(self) -> tuple[Keeping, ...]:
        """What each layer keeps for its backward; for "memory_budget", which keeps a part of all, as if it were all."""
        layers = self.model.num_layers
        if self.checkpointing == AUTO:
            return self.keeping or (Keeping(INPUTS),) * layers
        if self.checkpointing == "selective" and self.every:
            return tuple(Keeping(ALL if (i + 1) % self.every else INPUTS) for i in range(layers))
        return (Keeping(OF_MODE.get(self.checkpointing, ALL)),) * layers

    @functools.cached_property
    def _stage_layers(self) -> tuple[tuple[int, ...], ...]:
        return self.stage_layers or layers_of_stages(self.model.num_layers, self.pp, self.schedule)

    @property
    def loops(self) -> int:
        """Stages of a rank of the pipeline."""
        return len(self._stage_layers) // self.pp

    @functools.cached_property
    def rank_layers(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the layers that each rank of the pipeline has."""
        return tuple(tuple(itertools.chain(*self._stage_layers[rank :: self.pp])) for rank in range(self.pp))

    def stages(self) -> "Iterator[Setup]":
        """What each rank of a pipeline has, as setups of their own, without those that take no more than one before
        them; without a pipeline the setup as it is."""
        if self.pp == 1:
            yield self
            return
        seen: set[Setup] = set()
        for rank, layers in enumerate(self.rank_layers):
            stage = self._stage(rank, layers or (self.model.num_layers - 1,))
            if stage not in seen:
                seen.add(stage)
                yield replace(stage, in_flight=self._in_flight(rank))  # of all ranks behind at most as many

    def _stage(self, rank: int, layers: tuple[int, ...]) -> "Setup":
        model = model_of_layers(self.model, layers)
        keeping = tuple(self.keeping[layer] for layer in layers) if self.keeping else ()
        first, last = not rank, rank == self.pp - 1
        return replace(self, model=model, keeping=keeping, has_embedding=first, has_output=last)

    def _in_flight(self, rank: int) -> float:
        """Microbatches whose activations a rank of the pipeline keeps at once, in units of all that it has."""
        most, behind = self.at_once, self.pp - rank
        if self.schedule == "GPipe":
            return most
        if self.schedule == LOOPED:
            return min(most, ((self.loops - 1) * self.pp + 2 * behind - 1) / self.loops)
        return min(most, behind)


def _read_stage_layers(read: Read, num_layers: int, pp: int, schedule: str) -> tuple[tuple[int, ...], ...]:
    if pp == 1:
        return ()
    if parts := read("parallelism.module_fqns_per_model_part", []):
        return layers_of_parts(parts, num_layers, pp, schedule)
    first, last = (read(f"parallelism.pipeline_parallel_{end}_stage_less_layers", LESS) for end in ("first", "last"))
    per_stage = read("parallelism.pipeline_parallel_layers_per_stage", 0)
    return layers_of_stages(num_layers, pp, schedule, first, last, per_stage)


def _has_reference(read: Read) -> bool:
    """Whether a second model is in memory, the reference of the loss."""
    dataset = read("training.dataset", str)
    if dataset == "rollouts":
        return bool(read("magi.rollouts.beta", 0.0) > 0)
    return bool(dataset == "dpo" and read("magi.dpo.reference", "model") == "model")


@functools.cache
def is_titan_02() -> bool:
    """Whether the torchtitan that is installed is of the line 0.2; False where there is none."""
    return version_of("torchtitan").startswith("0.2.")


def setup_of(read: Read, model: ModelConfig, dp_shard: int) -> Setup:
    """The facts of a run that its options say, and the torchtitan that is installed; the others are as in ``Setup``."""
    mode = read("activation_checkpoint.mode", ("selective", "full", "memory_budget", "none", AUTO))
    keep = read("magi.keep", "")
    if keep and mode != AUTO:
        raise ValueError(
            f"magi.keep is {quoted(keep)}, but activation_checkpoint.mode is {quoted(mode)}; set that to 'auto', or "
            "leave magi.keep out"
        )
    option = read("activation_checkpoint.selective_ac_option", "2" if is_titan_02() else "op")
    every = int(option) if mode == "selective" and option.isdigit() else None
    components = read("compile.components", ["model", "loss"]) if read("compile.enable", False) else []
    batch, copies = read("training.local_batch_size", 8), read("parallelism.data_parallel_replicate_degree", 1)
    pp, cp, tp = (read(f"parallelism.{kind}_parallel_degree", 1) for kind in ("pipeline", "context", "tensor"))
    packs = batch if pp == 1 else read("parallelism.pipeline_parallel_microbatch_size", 1)
    if batch % packs:
        raise ValueError(
            f"parallelism.pipeline_parallel_microbatch_size is {packs}, which does not divide "
            f"training.local_batch_size, {batch}; use one that does"
        )
    schedule = read("parallelism.pipeline_parallel_schedule", "1F1B")
    stage_layers = _read_stage_layers(read, model.num_layers, pp, schedule)
    rank, dataset = read("magi.lora.rank", 0), read("training.dataset", str)
    targets = tuple(read("magi.lora.target_modules", LoRA().target_modules)) if rank else ()
    if pp > 1:
        check_microbatches(batch, packs, pp, schedule)
        if rank:
            check_adapters(model, stage_layers, targets)
    steps_of_batches = -(-max(read("training.global_batch_size", -1), 1) // (batch * copies * dp_shard))
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
        pp,
        checkpointing="full" if every == 0 else mode,  # as torchtitan takes "every 0th block"
        every=every or 0,
        budget=read("activation_checkpoint.memory_budget", 0.5),
        keeping=parse(keep, model.num_layers) if keep else (),
        compiled="model" in components,
        compiled_loss="loss" in components,
        param_bytes=BYTES[read("training.dtype", DTYPES)],
        mixed_bytes=BYTES[read("training.mixed_precision_param", DTYPES[::-1])],
        reduce_bytes=BYTES[read("training.mixed_precision_reduce", DTYPES)],
        foreach=read("optimizer.implementation", "fused") == "foreach",
        state_bytes=2 if read("optimizer.implementation", "fused") == "fused_opt_states_bf16" else None,
        microbatches=steps_of_batches * batch // packs,
        schedule=schedule,
        at_once=batch // packs,
        stage_layers=stage_layers,
        lora_rank=rank,
        lora_targets=targets,
        reference=_has_reference(read),
        reference_in_file=dataset == "dpo" and pp == 1,
        logits_again=dataset in ("dpo", "rollouts"),
        offload=read("training.enable_cpu_offload", False),
        staged=read("checkpoint.enable", False) and read("checkpoint.async_mode", "disabled") != "disabled",
        reshard=read("parallelism.fsdp_reshard_after_forward", RESHARD),
        sequence_parallel=read("parallelism.enable_sequence_parallel", True),
        overlap_stages=read("magi.overlap_stages", -1),
        flex=read("magi.backend", ("auto", "ffa", "flex")) == "flex",
        deterministic=read("magi.deterministic", False) or read("debug.deterministic", False),
        by_02=is_titan_02(),
    )
