"""torchtitan's train specs with varlen context parallelism."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader
from torchtitan.models import _supported_models
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from torchtitan_magi.backends.choose import choose_block_attn
from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.sizing.keeping.kinds import AUTO
from torchtitan_magi.titan.v02 import hooks
from torchtitan_magi.titan.v02.attention import VarlenAttentionWrapper
from torchtitan_magi.titan.v02.components import MagiMetricsProcessor, MagiTokenizer, MagiValidator
from torchtitan_magi.titan.v02.config import check_experts, check_job_config, without_context_parallel
from torchtitan_magi.titan.v02.cpu import prepare_model
from torchtitan_magi.titan.v02.models import (
    MODELS,
    OF_0_3,
    args_of,
    check_model,
    check_tied,
    config_of,
    varlen_flavors,
    with_plan_metadata,
)
from torchtitan_magi.training.activations.layers import offload_layers
from torchtitan_magi.training.batches.planner import MagiRuntime, WorkCount
from torchtitan_magi.training.checkpoints.export import Export
from torchtitan_magi.training.checkpoints.hf_reader import adapter_of_all_layouts
from torchtitan_magi.training.memory_log import memory_of_run
from torchtitan_magi.training.objectives.objective import LossRecord
from torchtitan_magi.training.process.launcher import end_with_launcher
from torchtitan_magi.training.reductions import fit_reductions
from torchtitan_magi.training.run_parts import RunParts
from torchtitan_magi.training.settings.degrees import check_offload
from torchtitan_magi.training.settings.model_folder import HF_FLAVOR, read_hf_config

# A rank whose collective timed out waits four times this long, for itself and others to write torchtitan's flight
# records, before it ends; PyTorch's own value makes that a minute.
DUMP_MILLISECONDS = 3000


def register() -> None:
    """Makes torchtitan train MODELS with varlen context parallelism. Once per process."""
    end_with_launcher()
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", str(DUMP_MILLISECONDS))
    hooks.install()
    for name in MODELS:
        register_train_spec(name, MagiSpec(get_train_spec(name)).train_spec())
    for name in (_supported_models | set(OF_0_3)) - set(MODELS):
        register_train_spec(name, _unsupported(name))


class MagiSpec(RunParts):
    """The functions of one model's train spec; the Trainer calls each once, in this order."""

    has_objectives = False  # whether our own Trainer is built, which alone knows pairs and means over documents

    @classmethod
    @contextmanager
    def with_objectives(cls) -> Iterator[None]:
        """A context in which our own Trainer is built."""
        cls.has_objectives = True
        try:
            yield
        finally:
            cls.has_objectives = False

    def __init__(self, stock: TrainSpec) -> None:
        self.stock = stock
        self.model_args = varlen_flavors(stock.model_args)
        self._begin_run()

    def _begin_run(self) -> None:
        """Forgets the last run: torchtitan keeps one spec of a model for all Trainers of a process."""
        self.count, self.losses = WorkCount(), LossRecord(1)
        self.runtime: MagiRuntime | None = None
        self.attention_dtype: torch.dtype | None = None  # another than that in which q, k and v arrive
        self.export = Export()
        self.loader = self.sections = self.run_length = None

    def train_spec(self) -> TrainSpec:
        """torchtitan's, with ours in place of what differs."""
        return replace(
            self.stock,
            model_cls=with_plan_metadata(self.stock.model_cls),
            model_args=self.model_args,
            build_tokenizer_fn=self.build_tokenizer,
            build_dataloader_fn=self.build_dataloader,
            build_metrics_processor_fn=self.build_metrics_processor,
            build_loss_fn=self.build_loss,
            parallelize_fn=self.parallelize,
            build_validator_fn=self.build_validator,
            state_dict_adapter=self.build_state_dict_adapter,
        )

    def build_tokenizer(self, job_config: Any) -> Any:
        """The tokenizer, which a Trainer asks for first: so all settings are checked here. A collective of all ranks.

        Raises:
            ValueError: on all ranks, one line that names the value and the remedy.
        """
        self._begin_run()
        self.job_config = job_config
        attn_types = {name: args.attn_type for name, args in self.model_args.items()}
        check_job_config(job_config, {HF_FLAVOR: "varlen"} | attn_types, self.has_objectives)
        choose_block_attn(job_config.magi.backend, torch.device(utils.device_type))  # or say now why not
        self.read_model(partial(self._model, job_config))
        check_tied(job_config, self.model_facts)
        check_experts(job_config, self.model_facts.experts)
        tokenizer = MagiTokenizer(job_config.model.hf_assets_path)
        self.use_tokenizer(tokenizer)
        return tokenizer

    def _model(self, job_config: Any) -> ModelConfig:
        """The run's model."""
        flavor = job_config.model.flavor
        if flavor != HF_FLAVOR:
            return config_of(self.model_args[flavor])
        config = read_hf_config(job_config, args_of)
        self.model_args[HF_FLAVOR] = args_of(config)  # the Trainer looks there next
        return config

    def build_state_dict_adapter(self, model_args: Any, hf_assets_path: str | None) -> Any:
        """torchtitan's adapter for all layouts of weights, with what an export holds beside them."""
        adapter = adapter_of_all_layouts(self.stock.state_dict_adapter, model_args, hf_assets_path)
        adapter.fqn_to_index_mapping, adapter.export = self.export.layout.shards, self.export
        return adapter

    def build_dataloader(self, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> Any:
        """The training data, see ``training_data``."""
        place = dp_world_size, dp_rank
        self.open_data(job_config.training, place, job_config)
        return self.training_data(partial(self.stock.build_dataloader_fn, *place, tokenizer, job_config))

    def build_validator(
        self, job_config: Any, dp_world_size: int, dp_rank: int, tokenizer: Any, **attributes: Any
    ) -> MagiValidator:
        """The validator of packs with plans: one pass of ``validation.steps`` batches (-1: all of it)."""
        section, place = job_config.validation, (dp_world_size, dp_rank)
        stock = partial(build_text_validation_dataloader, *place, tokenizer, job_config, section.steps != -1)
        loader = self.validation_data(section, place, stock)
        return MagiValidator(job_config, loader, tokenizer=tokenizer, **attributes)

    def build_metrics_processor(self, job_config: Any, parallel_dims: Any, model_args: Any) -> MagiMetricsProcessor:
        """The metrics, with the work of plans and predicted memory."""
        training = job_config.training
        batches = parallel_dims.dp_replicate * parallel_dims.dp_shard * training.local_batch_size
        self.losses = LossRecord(max(1, training.global_batch_size // batches))
        config = config_of(model_args)
        device = utils.device_type
        memory = memory_of_run(job_config, parallel_dims, config, self.loader, self.has_objectives, device)
        job_config.activation_checkpoint.keeping = memory.setup.keepings
        processor = MagiMetricsProcessor(job_config, parallel_dims)
        processor.count_work(config.attention_flops, self, self.losses, memory)
        return processor

    def build_loss(self, job_config: Any, **kwargs: Any) -> Any:
        """torchtitan's loss, recorded."""
        return self.losses.record(self.stock.build_loss_fn(job_config, **kwargs))

    def make_runtime(self, model_args: Any, parallel_dims: Any, job_config: Any) -> MagiRuntime:
        """The runtime, see ``build_runtime``; also decides the dtype of attention. A collective of all ranks."""
        config = config_of(model_args)
        index = utils.device_module.current_device() if utils.device_type != "cpu" else None
        runtime = self.build_runtime(parallel_dims, config, torch.device(utils.device_type, index))
        arriving, mixed = _attention_dtypes(parallel_dims, job_config.training)
        if runtime.block_attn.name == "ffa" and arriving == torch.float32 != mixed:
            self.attention_dtype = mixed
            logger.info(f"Tensor parallelism without FSDP leaves layers in {arriving}; their attention runs in {mixed}")
        runtime.block_attn.check(config.head_dim, self.attention_dtype or arriving)
        return runtime

    def parallelize(self, model: Any, parallel_dims: Any, job_config: Any) -> nn.Module:
        """The model parallelized as torchtitan does, each layer with our attention."""
        check_offload(job_config.training.enable_cpu_offload, parallel_dims.fsdp_enabled)
        if self.runtime is None:  # a second model, the reference of preference training, runs on the same plans
            self.runtime = self.make_runtime(model.model_args, parallel_dims, job_config)
        model.magi = self.runtime
        for block in model.layers.values():
            block.attention.inner_attention = VarlenAttentionWrapper(self.attention_dtype)
        model = self.stock.parallelize_fn(model, parallel_dims, without_context_parallel(job_config))
        if parallel_dims.tp_enabled:
            model.tok_embeddings.register_forward_hook(_arrived)
        if (checkpointing := job_config.activation_checkpoint).mode == AUTO:
            offload_layers(model, checkpointing.keeping, torch.device(utils.device_type))
        fit_reductions(model, utils.device_type, parallel_dims.dp_replicate_enabled)
        if utils.device_type == "cpu":
            prepare_model(model)
        return model


def _arrived(embedding: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    """Waits for embeddings: of those still on their way, torch.compile loses the gradient."""
    return out.clone() if isinstance(out, AsyncCollectiveTensor) else out


def _attention_dtypes(parallel_dims: Any, training: Any) -> tuple[torch.dtype, torch.dtype]:
    """The dtype in which q, k and v arrive, and that of mixed precision, which torchtitan does not apply to tensor
    parallelism without FSDP."""
    has_mixed = parallel_dims.fsdp_enabled or not parallel_dims.tp_enabled
    mixed = TORCH_DTYPE_MAP[training.mixed_precision_param]
    return mixed if has_mixed else TORCH_DTYPE_MAP[training.dtype], mixed


def _unsupported(name: str) -> Any:
    """A train spec that says which models have varlen attention."""

    def refuse(job_config: Any) -> Any:
        check_model(name)

    required = [field.name for field in fields(TrainSpec) if field.default is MISSING]
    return TrainSpec(**dict.fromkeys(required) | {"build_tokenizer_fn": refuse})
