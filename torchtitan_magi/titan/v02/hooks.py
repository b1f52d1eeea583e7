"""Functions of torchtitan that we replace by name, because no train spec holds them."""

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.ops import profiler
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torchtitan.components import metrics
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims, context_parallel, parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.expert_parallel import ExpertTensorParallel, TensorParallel
from torchtitan.models.llama3.infra import parallelize as llama3
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.llama4.infra import parallelize as llama4
from torchtitan.models.moe import kernels, moe
from torchtitan.models.moe import utils as moe_utils
from torchtitan.models.qwen3.infra import parallelize as qwen3
from torchtitan.models.utils import MoEStateDictAdapter
from torchtitan.tools import profiling, utils

from torchtitan_magi.attention.op import attention_op
from torchtitan_magi.sizing.keeping.kinds import ATTENTION, AUTO, INPUTS, PRODUCTS
from torchtitan_magi.titan.v02.attention import PlanMetadata
from torchtitan_magi.titan.v02.config import check_copies, check_expert_degrees, check_expert_tensor_degree
from torchtitan_magi.titan.v02.cpu import TorchOfExperts
from torchtitan_magi.titan.v02.experts import GateStyle, LayerStyle, prepare_input, token_dispatch
from torchtitan_magi.titan.v02.models import check_name
from torchtitan_magi.titan.wrap import wrap
from torchtitan_magi.training.activations.layers import told_apart
from torchtitan_magi.training.batches.planned_loader import PlannedLoader
from torchtitan_magi.training.checkpoints.digests import loading, save_with_digests, saving
from torchtitan_magi.training.checkpoints.export import Export
from torchtitan_magi.training.continued import load_checkpoint, purge_stale
from torchtitan_magi.training.experts import own_experts
from torchtitan_magi.training.finite import StepGuard, check_state, clip_and_note
from torchtitan_magi.training.process.cpu import use_cpu
from torchtitan_magi.training.process.error_file import ERROR_FILE, recorded
from torchtitan_magi.training.process.last_line import LAST_LINE
from torchtitan_magi.training.process.launcher import config_file_if_any
from torchtitan_magi.training.process.timeouts import set_pg_timeouts
from torchtitan_magi.training.settings.degrees import check_degrees
from torchtitan_magi.training.settings.magi_section import import_modules
from torchtitan_magi.training.settings.options import Magi
from torchtitan_magi.training.settings.sections import check_gpu_options
from torchtitan_magi.training.settings.values import check_toml, check_values, read_toml, usage_errors
from torchtitan_magi.training.trainer import ObjectiveTrainer, loading_train_state
from torchtitan_magi.wording import one_line


def install() -> None:
    """Replaces the names, once per process: most by a function whose first argument is torchtitan's own."""
    if not torch.accelerator.is_available():
        _use_cpu()
    for owner, name, replacement in (
        (ConfigManager, "_maybe_load_toml", _maybe_load_toml),  # to say why it cannot be read
        (ConfigManager, "_maybe_add_custom_config", _maybe_add_custom_config),  # to say that a module is missing
        (ConfigManager, "_dict_to_dataclass", _dict_to_dataclass),  # to say what is wrong with a TOML file
        (tyro, "cli", _cli),  # to say it in one line, and to torchrun, for the command line as well
        (ConfigManager, "_validate_config", _validate_config),  # to check all values and import the user's modules
        (context_parallel, "cp_shard", _cp_shard),  # to deal out tokens as planned, not by their place in the pack
        (MoEStateDictAdapter, "_caculate_indices_from_placements", own_experts),  # to have them under HSDP as well
        (ParallelDims, "_validate", _validate),  # to say what is wrong with the degrees
        (dist_utils, "clip_grad_norm_", _clip_grad_norm),  # to have gradients added up under tensor parallelism alone
        (dist_utils, "clip_grad_norm_", clip_and_note),  # to end steps that are not finite
        (CheckpointManager, "__init__", _guard),  # the last that a Trainer builds: to end steps that are not finite
        (CheckpointManager, "save", _save),  # to save when the data end early, to say why a save failed; for timeouts
        (CheckpointManager, "load", _load),  # to have the learning rate follow the data that are left
        (CheckpointManager, "close", _close),  # to say where the model is
        (CheckpointManager, "dcp_load", _dcp_load),  # to say in one line what does not fit
        (checkpoint, "save", save_with_digests),  # to write digests beside the files
        (checkpoint, "async_save", save_with_digests),  # the same
        (CheckpointManager, "dcp_save", _dcp_save),  # to check weights; to export a whole model without a second copy
        (Llama3StateDictAdapter, "_permute", _whole_heads),  # for shards that end inside a head
        (Llama3StateDictAdapter, "_reverse_permute", _whole_heads),  # the same
        (FSDPParamGroup, "unshard", _unseen),  # for experts, which FSDP2 gathers inside a block
        (FSDPParamGroup, "wait_for_unshard", _unseen),  # the same
        (FSDPParamGroup, "reshard", _unseen),  # the same
        (llama3, "apply_ac", _apply_ac),  # to have layers that keep more and layers that keep less
        (qwen3, "apply_ac", _apply_ac),  # the same; each model has imported its own name
        (llama3, "apply_cp_to_attention_module", _apply_cp),  # not to refuse varlen attention
        (qwen3, "apply_cp_to_attention_module", _apply_cp),  # the same; each model has imported its own name
        (qwen3, "apply_non_moe_tp", _apply_tp),  # to accept positions without context parallelism
    ):
        wrap(owner, name, replacement)
    for owner, name, ours in (
        (dist_utils, "set_pg_timeouts", set_pg_timeouts),  # to reach our own communicators as well
        (CheckpointManager, "_purge_stale_checkpoints", purge_stale),  # to count those that a run can go on from
        (llama4, "PrepareModuleInputOutput", LayerStyle),  # to have exact gradients of experts under tensor parallelism
        (llama4, "NoParallel", GateStyle),  # the same
        (TensorParallel, "_prepare_input_fn", prepare_input),  # the same
        (ExpertTensorParallel, "_token_dispatch", token_dispatch),  # the same
    ):
        setattr(owner, name, ours)
    for model in (llama3, qwen3):  # so that selective activation checkpointing does not redo attention
        model._op_sac_save_list.add(attention_op)
    # FSDP2 of experts, inside a block, names other steps for profilers when the block is computed again.
    names = profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction
    SAC_IGNORED_OPS.update(names)


def _use_cpu() -> None:
    """Makes torchtitan use the CPU."""
    use_cpu((utils, dist_utils, parallel_dims, metrics, profiling), metrics)
    moe.torch = TorchOfExperts("torch")  # to count tokens of experts
    moe_utils.generate_permute_indices = partial(kernels.generate_permute_indices, use_cpu=True)  # a CUDA kernel's work


@recorded  # so that torchrun says last what went wrong; the same below
def _maybe_load_toml(stock: Any, manager: ConfigManager, arguments: list[str]) -> Any:
    path = config_file_if_any(arguments)
    return stock(manager, arguments) if path is None else read_toml(path)


@recorded
def _maybe_add_custom_config(stock: Any, manager: ConfigManager, *args: Any) -> type:
    with _usable("job.custom_config_module", ImportError, AttributeError, TypeError):  # or a module that is no config
        return stock(manager, *args)


@recorded
def _dict_to_dataclass(stock: Any, manager: ConfigManager, config: type, values: dict[str, Any]) -> Any:
    """Checks the whole file first. torchtitan calls this for the file, and for each section of it."""
    if issubclass(config, JobConfig):
        check_toml(config, values)
    with usage_errors():
        return stock(manager, config, values)


def _cli(stock: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        with usage_errors():
            return stock(*args, **kwargs)
    except ValueError as error:  # as ``recorded`` does, which would go on after --help
        ERROR_FILE.record_exception(error)
        raise


@recorded
def _validate_config(stock: Any, manager: ConfigManager) -> None:
    """Also checks values and what would stop torchtitan before it comes to our checks, and imports the modules of
    ``magi.imports``."""
    stock(manager)
    check_values(manager.config)
    magi: Any = getattr(manager.config, "magi", None)  # without our hook there is none, which is refused later
    if name := manager.config.experimental.custom_import:
        with _usable("experimental.custom_import", ImportError, TypeError):
            importlib.import_module(name)  # as torchtitan does next
    if isinstance(magi, Magi):
        import_modules(magi.imports)
        check_name(manager.config.model.name)
        check_gpu_options(manager.config, utils.device_type)


@contextlib.contextmanager
def _usable(option: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns these errors of the module that an option names into one line."""
    try:
        yield
    except errors as error:
        raise ValueError(f'{option} cannot be used ({one_line(error)}); set it to "torchtitan_magi.titan"') from error


def _clip_grad_norm(stock: Any, parameters: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Adds up the ranks' parts of each gradient first, as FSDP2 does; torch 2.11's Adam takes a part for the whole."""
    for parameter in parameters:
        if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return stock(parameters, *args, **kwargs)


def _cp_shard(
    stock: Any, cp_mesh: Any, inputs: tuple[Tensor, ...], attention_masks: Any, *args: Any, **kwargs: Any
) -> tuple[tuple[Tensor, ...], Any]:
    """Gives each rank its tokens of the microbatch's plan. What has no plan goes to torchtitan's own."""
    if not isinstance(attention_masks, PlanMetadata):
        return stock(cp_mesh, inputs, attention_masks, *args, **kwargs)
    tokens, labels, positions = inputs
    if attention_masks.positions is not None:
        positions = attention_masks.positions
    return tuple(attention_masks.take(x) for x in (tokens, labels, positions)), attention_masks


def _validate(stock: Any, dims: ParallelDims) -> None:
    """Says what is wrong with the degrees; torchtitan does so in part, by assertions."""
    check_degrees(dims)
    check_expert_tensor_degree(dims)
    stock(dims)  # also works out data_parallel_shard_degree where it is -1
    check_expert_degrees(dims)
    check_copies(dims)


def _guard(stock: Any, checkpointer: CheckpointManager, *args: Any, states: dict[str, Any], **kwargs: Any) -> None:
    stock(checkpointer, *args, states=states, **kwargs)
    checkpointer.guard = StepGuard(states["train_state"])  # type: ignore[attr-defined]


def _save(stock: Any, checkpointer: CheckpointManager, curr_step: int, last_step: bool = False) -> None:
    """Also counts the step that used up the data as the last one. An asynchronous save that failed is reported by the
    next. torchtitan calls this after every step, but lowers the timeouts after step 1 alone, which a run that continues
    does not come to."""
    if not hasattr(checkpointer, "has_stepped"):
        checkpointer.has_stepped = True  # type: ignore[attr-defined]
        trainer: Any = checkpointer.states["train_state"]
        if curr_step > 1:
            set_pg_timeouts(timedelta(seconds=trainer.job_config.comm.train_timeout_seconds), trainer.parallel_dims)
    loader = checkpointer.states["dataloader"]
    if isinstance(loader, PlannedLoader):
        last_step |= loader.state_dict().get("exhausted", False)
    checkpointer.guard.end_step(checkpointer._should_save(curr_step, last_step), last_step)  # type: ignore[attr-defined]
    with saving(checkpointer.folder if checkpointer.enable else ""):
        stock(checkpointer, curr_step, last_step)
    if last_step and checkpointer._should_save(curr_step, last_step):
        LAST_LINE.note(checkpointer, curr_step)


def _close(stock: Any, checkpointer: CheckpointManager) -> None:
    """Says where the model is. After our own Trainer ``main`` does, when torchtitan has said all."""
    stock(checkpointer)
    if not isinstance(getattr(checkpointer, "states", {}).get("train_state"), ObjectiveTrainer):
        LAST_LINE.tell()


def _load(stock: Any, checkpointer: CheckpointManager, step: int = -1) -> bool:
    trainer: Any = checkpointer.states.get("train_state")

    def build(optimizers: Any, steps: int) -> Any:
        return trainer.train_spec.build_lr_schedulers_fn(optimizers, trainer.job_config.lr_scheduler, steps)

    return load_checkpoint(checkpointer, step, partial(stock, checkpointer), build)


def _dcp_load(
    stock: Any, checkpointer: CheckpointManager, weights: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any
) -> None:
    with loading(checkpoint_id), loading_train_state(weights, checkpoint_id):
        stock(checkpointer, weights, checkpoint_id, *args, **kwargs)


def _dcp_save(
    stock: Any, checkpointer: CheckpointManager, weights: dict[str, Any], *, to_hf: bool = False, **options: Any
) -> Any:
    """Saves or exports what is finite, as our spec's adapter says; a spec of the user's own has none."""
    check_state(weights, checkpointer.states["train_state"].step)

    def save(weights: dict[str, Any], folder: Path) -> Any:
        return stock(checkpointer, weights, to_hf=to_hf, **(options | {"checkpoint_id": str(folder)}))

    export: Export = getattr(checkpointer.sd_adapter, "export", Export())
    return export.save(checkpointer, weights, Path(options["checkpoint_id"]), to_hf, save)


def _apply_ac(stock: Any, model: nn.Module, config: Any, *, op_sac_save_list: Any = None, **options: Any) -> None:
    """Mode "auto": torchtitan's, once for all layers that keep the same."""
    if config.mode != AUTO:
        stock(model, config, op_sac_save_list=op_sac_save_list, **options)
        return
    if not hasattr(config, "keeping"):
        raise ValueError(
            'activation_checkpoint.mode is "auto", which a train spec that is not ours does not decide; set it to '
            '"selective", "full" or "none"'
        )
    layers = model.get_submodule("layers")
    for kept, mode in ((INPUTS, "full"), (PRODUCTS, "selective"), (ATTENTION, "selective")):
        alike = nn.Module()
        alike.layers = nn.ModuleDict(
            {name: layer for name, layer in layers.named_children() if config.keeping[int(name)].kept == kept}
        )
        if alike.layers:
            saved = {attention_op} if kept == ATTENTION else op_sac_save_list
            stock(alike, replace(config, mode=mode, selective_ac_option="op"), op_sac_save_list=saved, **options)
            for name, layer in alike.layers.named_children():
                layers.register_module(name, told_apart(layer, kept))


def _whole_heads(stock: Any, adapter: Any, weight: Tensor, *args: Any) -> Tensor:
    """Permutes the rows of each head where every rank has all of them, of some columns: with a part of a head on a rank
    torchtitan ends in an error, or reads and writes wrong rows."""
    if not isinstance(weight, DTensor):
        return stock(adapter, weight, *args)
    by_columns, by_rows = (
        [Replicate() if placement.is_replicate() else Shard(dim) for placement in weight.placements] for dim in (1, 0)
    )
    permuted = stock(adapter, weight.redistribute(placements=by_columns), *args)
    return permuted.redistribute(placements=by_rows)  # which files are read and written by


def _unseen(stock: Any, group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
    """Hides FSDP2's own operations from selective activation checkpointing, which wants the same ones when a block is
    computed again."""
    if not is_in_torch_dispatch_mode():
        return stock(group, *args, **kwargs)
    with _disable_current_modes():
        return stock(group, *args, **kwargs)


def _apply_cp(stock: Any, attention_modules: Any, cp_mesh: Any, attention_type: str) -> None:
    """Leaves varlen attention alone: our module is context-parallel by itself."""
    if attention_type != "varlen":
        stock(attention_modules, cp_mesh, attention_type)


def _apply_tp(stock: Any, *args: Any, **kwargs: Any) -> None:
    """Shards positions under every layout, as our batches always have them."""
    stock(*args, **{**kwargs, "cp_enabled": True})
