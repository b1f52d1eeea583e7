"""What our Trainer does beside torchtitan's: SFT, DPO and policy gradients, by an ``Objective``."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.models.names import ADAPTERS
from torchtitan_magi.models.shapes import weights_used
from torchtitan_magi.training.activations.layers import stop_offloading
from torchtitan_magi.training.batches.given_rollouts import GivenRollouts
from torchtitan_magi.training.batches.microbatch import MICROBATCH, Batch, Microbatch, Process, on_device
from torchtitan_magi.training.batches.pack_loader import PackLoader, build_dataloader
from torchtitan_magi.training.batches.planned_loader import PlannedLoader
from torchtitan_magi.training.checkpoints.digests import METADATA, read_metadata, saving
from torchtitan_magi.training.experts import expert_biases, expert_counts_kept, whole
from torchtitan_magi.training.memory_log import give_back_before
from torchtitan_magi.training.objectives.dpo import DPO, read_pairs
from torchtitan_magi.training.objectives.logprob_model import LogprobModel
from torchtitan_magi.training.objectives.lora import check_base, check_trainable, check_untrained, log_trainable
from torchtitan_magi.training.objectives.objective import SFT, Objective, Reference
from torchtitan_magi.training.objectives.pipeline import Pipeline
from torchtitan_magi.training.objectives.policy_gradient import PolicyGradient
from torchtitan_magi.training.objectives.reference_file import reference_file
from torchtitan_magi.training.objectives.reference_model import ReferenceModel
from torchtitan_magi.training.process.all_ranks import gathered
from torchtitan_magi.training.process.groups import data_parallel_place, group_of, reduced
from torchtitan_magi.training.process.last_line import LAST_LINE, stopped, told_on_signal
from torchtitan_magi.training.process.last_words import LastWords
from torchtitan_magi.training.process.timeouts import set_pg_timeouts
from torchtitan_magi.training.settings.model_folder import HF_FLAVOR
from torchtitan_magi.training.settings.options import DPO_DATASET, ROLLOUTS_DATASET, has_reference
from torchtitan_magi.training.settings.resume import base_of_adapters, last_checkpoint
from torchtitan_magi.wording import quoted, quoted_path, shown

TRAIN_STATE = "train_state"  # torchtitan's name for what a checkpoint holds of the Trainer
ALPHA = "lora_alpha"  # entry of it


class ObjectiveTrainer:
    """Mixed into torchtitan's Trainer: the loss of an ``Objective``, by the items of all microbatches and ranks.

    The adapter of a torchtitan gives what is declared here.
    """

    job_config: Any
    parallel_dims: Any
    metrics_processor: Any
    checkpointer: Any
    tokenizer: Any
    model_parts: Sequence[nn.Module]
    model_facts: ModelConfig
    gc_handler: Any
    dataloader: PlannedLoader
    device: torch.device
    step: int
    steps_done = 0
    gradient_accumulation_steps: int
    num_pipeline_parallel_microbatches = 1
    optimizers: Any
    pipeline: Pipeline | None = None  # where the model is in parts
    process: Process
    loaded_names: frozenset[str] | None = None  # of all entries of the checkpoint that is being loaded
    loaded_alpha: float | None = None  # of the adapters of the checkpoint, as far as it says

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of a step, on this rank."""
        return self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches

    def train_context(self) -> AbstractContextManager[None]:
        """The context that a forward and its backward run in."""
        raise NotImplementedError

    def forward_context(self) -> AbstractContextManager[None]:
        """The context that a forward runs in, inside ``train_context``."""
        raise NotImplementedError

    def build_frozen_copy(self) -> LogprobModel | Pipeline:
        """A model built as the Trainer builds its own, with weights of no meaning, without activation checkpointing."""
        raise NotImplementedError

    def with_memory(self, model: Any) -> nn.Module:
        """A frozen copy that lies on the meta device, parallelized, with memory of its own and its buffers made."""
        offload = self.job_config.training.enable_cpu_offload
        model.to_empty(device="cpu" if offload else self.device.type)
        with torch.no_grad():
            model.init_weights(buffer_device=torch.device(self.device.type) if offload else None)
        return model.eval()

    def load_weights(self, parts: Sequence[nn.Module], path: str) -> None:
        """Loads the checkpoint that [checkpoint] ``initial_load_*`` describes into the parts of a model.

        The CheckpointManager's ``dcp_load`` loads the model among its states, so the model stands there for the time of
        the call.
        """
        checkpoint, checkpointer = self.job_config.checkpoint, self.checkpointer
        policy = checkpointer.states["model"]
        checkpointer.states["model"] = states = type(policy)(list(parts))
        quantized = checkpoint.initial_load_in_hf_quantized
        checkpointer.dcp_load(states.state_dict(), path, checkpoint.initial_load_in_hf, quantized)
        checkpointer.states["model"] = policy

    def open_packs(self, section: Any) -> PackLoader:
        """One pass over every record of a section, job_config.training or .validation, in the order of the files."""
        size, rank = data_parallel_place(self.parallel_dims)
        return build_dataloader(section, size, rank, self.tokenizer, self.job_config, False)

    def logprobs_of(self, loader: PackLoader) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's pairs, as the numbers of their records and their own in these, int64 [n] each, and what the model
        as it is now gives them, float64 [n, 2]."""
        cp_group, found = group_of(self.parallel_dims, "cp"), []
        with torch.no_grad(), self.train_context(), self.forward_context(), expert_counts_kept(self.model_parts):
            for batch in PlannedLoader(loader, self.dataloader.plan, self.dataloader.waited):
                pairs = read_pairs(*on_device(batch, self.device), self.process, cp_group)
                found.append((pairs.pair_ids, pairs.pair_numbers, pairs.logprobs(self.model)))
        self.metrics_processor.count.take()  # this was no training
        self.metrics_processor.time_last_log = time.perf_counter()
        ids, numbers, logprobs = (torch.cat(values) for values in zip(*found, strict=True))
        return ids, numbers, logprobs

    def start_objectives(self, model: LogprobModel | None) -> None:
        """Makes the objectives of training and of validation, for a model that has been parallelized.

        Args:
            model: None with a ``pipeline``.
        """
        dims, job = self.parallel_dims, self.job_config
        pairs = job.training.dataset == DPO_DATASET and job.magi.dpo.shared_prompt
        option = "magi.share_prefixes" if job.magi.share_prefixes else "magi.dpo.shared_prompt" if pairs else ""
        if (option or job.training.dataset == ROLLOUTS_DATASET) and self.moves_expert_bias():
            what = f"{option} is true" if option else "training.dataset is 'rollouts', which share their prompts"
            raise ValueError(
                f"{what}, but this model balances its experts by the tokens that each gets (expert_bias), of which it "
                f"would count shared ones once; {'set it to false, or ' if option else ''}use a model without that"
            )
        # DDP takes the mean of the ranks' gradients, while torchtitan tells FSDP2 to add them.
        self.gradient_factor = dims.dp_replicate if self.is_replicated_by_ddp() else 1
        self.model: Any = model
        if rank := self.job_config.magi.lora.rank:
            check_trainable(self.model_parts, rank)
            log_trainable(self.model_parts, group_of(dims, "pp"), self.device)
            self.metrics_processor.num_flops_per_token -= 2 * weights_used(self.model_facts)  # without gradients
        self.reference_model = self.make_reference()
        self.objective = self._make_objective(self.job_config.training)
        self.objectives = [self.objective]
        self.metrics_processor.objective_metrics = self.objective.metrics
        self.num_tokens_seen = torch.zeros((), dtype=torch.int64, device=self.device)  # of documents, on all ranks
        self.metrics_processor.tokens_seen = lambda: int(self.num_tokens_seen)
        self.metrics_processor.tokens_and_labels = torch.zeros(2, dtype=torch.int64, device=self.device)
        if self.job_config.validation.enable:
            self.validator: Any
            self.validator.objective = self._make_objective(self.job_config.validation)
            self.objectives.append(self.validator.objective)

    def make_reference(self) -> Reference:
        """The reference of ``magi.dpo.reference = "model"``."""
        return ReferenceModel(self)

    def is_replicated_by_ddp(self) -> bool:
        """Whether DDP averages gradients, where FSDP2 adds them."""
        return self.parallel_dims.dp_replicate_enabled and not self.parallel_dims.fsdp_enabled

    def moves_expert_bias(self) -> bool:
        """Whether torchtitan moves the bias by which experts are chosen, by how many tokens they get: not that of a
        checkpoint's model, nor beside adapters."""
        job = self.job_config
        return job.model.flavor != HF_FLAVOR and not job.magi.lora.rank and bool(expert_biases(self.model_parts))

    def _make_objective(self, section: Any) -> Objective:
        magi = self.job_config.magi
        if section.dataset == ROLLOUTS_DATASET:
            loss_group = group_of(self.parallel_dims, "loss")
            return PolicyGradient(self.model, magi.rollouts, self.reference_model, loss_group)
        if section.dataset != DPO_DATASET:
            return SFT(self.model, magi.loss_per)
        groups = group_of(self.parallel_dims, "cp"), group_of(self.parallel_dims, "batch")
        reference = reference_file(self, section) if magi.dpo.reference == "file" else self.reference_model
        return DPO(self.model, magi.dpo, reference, *groups)

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        """torchtitan calls this once, between loading the checkpoint and the first step."""
        self._begin()
        self.dataloader.at_once = self.num_microbatches
        return super().batch_generator(data_iterable)  # type: ignore[misc]

    def _begin(self) -> None:
        """Once, between loading the checkpoint and the first step."""
        self.steps_done = self.step
        alpha, loaded = self.job_config.magi.lora.alpha, self.loaded_alpha
        if loaded not in (None, alpha):
            raise ValueError(
                f"magi.lora.alpha is {alpha:g}, but the adapters of the run that resumes at step {self.step} have "
                f"{loaded:g}; set it to that"
            )
        self._check_base()
        if self.step == 0 and has_reference(self.job_config) and self.job_config.magi.lora.rank:
            check_untrained(self.job_config.checkpoint.initial_load_path, self.model_parts)
        give_back_before(self.optimizers)
        for objective in self.objectives:
            objective.reference.prepare(self.step)

    def _check_base(self) -> None:
        """See ``check_base``; of a run whose frozen weights are not those that were just read from that folder."""
        checkpoint, magi, checkpointer = self.job_config.checkpoint, self.job_config.magi, self.checkpointer
        exports = checkpoint.enable and checkpoint.last_save_in_hf and not checkpoint.load_only
        is_new = self.step == 0 and (checkpoint.initial_load_in_hf or not checkpoint.initial_load_path)
        if not magi.lora.rank or magi.random_weights or not exports or is_new:
            return
        option, base = base_of_adapters(self.job_config)

        def read() -> None:
            states = checkpointer.states["model"].state_dict()
            checkpointer.dcp_load(states, base, True, checkpoint.initial_load_in_hf_quantized)

        check_base(option, base, self.model_parts, read, group_of(self.parallel_dims, "pp"))

    def train(self) -> None:
        """torchtitan's, with the reason of a rank that waits too long."""
        with self._running():
            super().train()  # type: ignore[misc]

    @contextmanager
    def _running(self) -> Iterator[None]:
        comm = self.job_config.comm
        set_pg_timeouts(timedelta(seconds=comm.init_timeout_seconds), self.parallel_dims)  # else those of torch
        words = LastWords(comm.init_timeout_seconds, comm.train_timeout_seconds)
        with words as self.last_words, told_on_signal(self._stopped):
            yield
            self._end_saving()
        stop_offloading()

    def _end_saving(self) -> None:
        """Waits for a checkpoint that is still being written; a save of a last step has done so."""
        if (writing := getattr(self.checkpointer, "save_future", None)) is not None:
            with saving(self.checkpointer.folder):
                writing.result()

    @contextmanager
    def given_steps(self) -> Iterator[Callable[[Sequence[Any]], dict[str, float]]]:
        """Runs steps on rollouts that are given, in place of ``train``. The time-outs stay those of the first step.

        Yields what trains a step on records, see ``rollout_format``, the same on all ranks, and returns what is logged
        of it. A collective of all ranks.
        """
        if not isinstance(given := self.dataloader.loader, GivenRollouts):
            raise ValueError(
                f"training.dataset_path is {quoted_path(self.job_config.training.dataset_path)}, but the rollouts of "
                'each step are given; leave it out, and set training.dataset to "rollouts"'
            )
        job = self.job_config
        without_effect = {
            "training.global_batch_size": (job.training.global_batch_size, -1),
            "magi.epochs": (job.magi.epochs, -1),
            "magi.shuffle": (job.magi.shuffle, True),
            "magi.bad_records": (job.magi.bad_records, "error"),
            "checkpoint.create_seed_checkpoint": (job.checkpoint.create_seed_checkpoint, False),
            "validation.enable": (job.validation.enable, False),
        }
        for option, (value, default) in without_effect.items():
            if value != default:
                raise ValueError(
                    f"{option} is {quoted(value)}, but a program leads this run and gives each step its rollouts; "
                    f"set it to {quoted(default)}"
                )
        self.metrics_processor.every_step = True
        num_steps = job.training.steps

        def train_on(rollouts: Sequence[Any]) -> dict[str, float]:
            if self.step >= num_steps:
                raise ValueError(f"training.steps is {num_steps}, and all of them are done; set it to more")
            started = time.perf_counter()
            batches = given.batches(rollouts, self.step, self.num_pipeline_parallel_microbatches)
            planned = [self.dataloader.planned(*batch) for batch in batches]
            self.gradient_accumulation_steps = len(planned) // self.num_pipeline_parallel_microbatches
            self.metrics_processor.ntokens_since_last_log += sum(labels.numel() for _, labels in planned)
            self.metrics_processor.data_loading_times.append(time.perf_counter() - started)
            self.step += 1
            self.gc_handler.run(self.step)
            self.train_step(iter(planned))
            self.checkpointer.save(self.step, last_step=self.step == num_steps)
            return self.metrics_processor.last

        with self._running():
            self.checkpointer.load(step=job.checkpoint.load_step)
            self._begin()
            yield train_on

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """transformers' name and value of each trained weight, whole, one after the other. A collective of all ranks.

        Raises:
            ValueError: the model is in parts, or has adapters.
        """
        if self.pipeline is not None or self.job_config.magi.lora.rank:
            raise ValueError(
                "weights are given whole, but the model is cut by parallelism.pipeline_parallel_degree or has adapters "
                "(magi.lora.rank); export them by checkpoint.last_save_in_hf instead"
            )
        if not self.checkpointer.enable:
            raise ValueError("weights are given by the names of checkpoints, and checkpoint.enable is false; set it")
        layers: dict[str, dict[str, Tensor]] = {}  # of experts, whose adapters split only what this rank has of them
        for name, tensor in self.checkpointer.states["model"].state_dict().items():
            layer = name.partition("experts.")[0] if "experts." in name else ""
            layers.setdefault(layer, {})[name] = tensor
        for layer, tensors in layers.items():
            found = {name: whole(tensor) for name, tensor in tensors.items()} if layer else tensors
            for name, tensor in self.checkpointer.sd_adapter.to_hf(found).items():
                yield name, whole(tensor)

    def _stopped(self) -> str:
        return LAST_LINE.text or stopped(self.steps_done, last_checkpoint(self.job_config))

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """A step of torchtitan's, with the items of all its microbatches counted before the first."""
        microbatches = [next(data_iterator) for _ in range(self.num_microbatches)]
        self.objective.start_step()
        self.metrics_processor.losses.start(self.num_microbatches)
        batches: list[Microbatch] = [inputs[MICROBATCH] for inputs, _ in microbatches]
        for batch in batches:
            batch.num_items = self.objective.count_items(batch)
        counts = zip(*((batch.num_items, batch.num_tokens, batch.num_labels) for batch in batches), strict=True)
        of_all = torch.stack([torch.full((), sum(count), dtype=torch.float64, device=self.device) for count in counts])
        reduced(of_all, group_of(self.parallel_dims, "batch"))
        self.num_items = of_all[0].where(of_all[0] > 0, 1).float()  # a step without any item has no loss
        self.num_tokens_seen += of_all[1].long()
        self.metrics_processor.tokens_and_labels += of_all[1:].long()
        with self.metrics_processor.memory.noting():
            super().train_step(iter(microbatches))  # type: ignore[misc]
        self.last_words.note_step(self.step)
        self.steps_done = self.step

    def forward_backward_step(
        self, *, input_dict: dict[str, Any], labels: Tensor, global_valid_tokens: Tensor | float
    ) -> Tensor:
        """This rank's addend to the step's mean loss, detached: it is the sum over all ranks and microbatches."""
        if self.pipeline is not None:
            return self._pipeline_step(self.pipeline, input_dict, labels)
        num_items = input_dict[MICROBATCH].num_items
        with self.train_context():
            with self.forward_context():
                loss_sum = self.objective.loss(input_dict, labels, self.process)
                loss = loss_sum / self.num_items
            (loss * self.gradient_factor).backward()
        replicas = self.objective.num_loss_replicas
        self.metrics_processor.losses.add(loss_sum / replicas, num_items / self.parallel_dims.cp)
        return loss.detach() / replicas

    def _pipeline_step(self, pipeline: Pipeline, inputs: Any, labels: Any) -> Tensor:
        """The same sum for the microbatches of a pipeline; -1 on ranks without the last stage, as torchtitan has it."""
        counts, replicas = [batch[MICROBATCH].num_items for batch in inputs], self.objective.num_loss_replicas
        with self.train_context():
            losses = pipeline.losses(self.objective, inputs, labels, self.process, self.num_items)
        losses = [loss.to(self.device) / replicas for loss in losses]
        if not losses:
            self.metrics_processor.losses.add(torch.zeros((), device=self.device), 0.0)
            return torch.tensor(-1.0, device=self.device)
        for loss, count in zip(losses, counts, strict=True):
            self.metrics_processor.losses.add(loss * self.num_items, count / self.parallel_dims.cp)
        return torch.stack(losses).sum()

    def state_dict(self) -> dict[str, Any]:
        """ntokens_seen counts the tokens of all data-parallel ranks, as a resumed run may have more or fewer ranks."""
        state, own = super().state_dict(), self.objective.reference.state_dict()  # type: ignore[misc]
        if self.job_config.magi.lora.rank:
            own |= {ALPHA: self.job_config.magi.lora.alpha}
        if self.loaded_names is not None:
            own = {name: value for name, value in own.items() if f"{TRAIN_STATE}.{name}" in self.loaded_names}
        return state | {"ntokens_seen": int(self.num_tokens_seen)} | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reads what ``state_dict`` returned."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self.num_tokens_seen.fill_(state_dict["ntokens_seen"])
        self.loaded_alpha = state_dict.get(ALPHA)
        for objective in self.objectives:
            objective.reference.load_state_dict(state_dict)


@contextmanager
def loading_train_state(states: dict[str, Any], folder: str | os.PathLike[str]) -> Iterator[None]:
    """Lets a checkpoint of an earlier version be loaded, which has fewer entries: torch reads all that a ``state_dict``
    names. Torch leaves the rest out, which may not be adapters. A collective of all ranks.

    Args:
        states: what is loaded; a Trainer of ours may be among them.
        folder: of the checkpoint.

    Raises:
        ValueError: the checkpoint has other adapters than the run; one line.
    """
    trainer, path = states.get(TRAIN_STATE), Path(folder)
    names = frozenset[str]()  # of safetensors, of which all must have a place
    if isinstance(trainer, ObjectiveTrainer) or (path / METADATA).is_file():
        names = frozenset(read_metadata(path).state_dict_metadata)
    _check_adapters(names, states, path)
    if not isinstance(trainer, ObjectiveTrainer):
        yield
        return
    trainer.loaded_names = names
    try:
        yield
    finally:
        trainer.loaded_names = None


def _check_adapters(names: frozenset[str], states: dict[str, Any], folder: Path) -> None:
    """names: of all that the checkpoint holds; empty where it is in safetensors, which have none."""
    saved, here = (
        {name for name in found if ADAPTERS.search(name) and not name.startswith("optimizer.")}
        for found in (names, states if names else ())
    )
    own = here.union(*gathered(here))
    if left_out := saved - own:
        raise ValueError(
            f"{shown(folder)} has trained adapters of {_layers(left_out)}, for which this run has none; set "
            "magi.lora.rank and magi.lora.target_modules to those of the run that made it"
        )
    if missing := own - saved:
        raise ValueError(
            f"{shown(folder)} has no adapters of {_layers(missing)}, which this run trains; set "
            "magi.lora.target_modules to those of the run that made it, or begin with an export of it in safetensors"
        )


def _layers(names: set[str]) -> str:
    return ", ".join(sorted({ADAPTERS.split(name)[0].rpartition(".")[2] for name in names}))
