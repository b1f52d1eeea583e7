"""Whether a run can start from the checkpoint that torchtitan would load."""

import itertools
import logging
import os
from pathlib import Path
from typing import Any

from torchtitan_magi.training.checkpoints import digests
from torchtitan_magi.training.checkpoints.digests import METADATA
from torchtitan_magi.training.checkpoints.hf_weights import INDEX
from torchtitan_magi.training.process.all_ranks import agreed, rank_and_size
from torchtitan_magi.training.process.run_folder import lock_checkpoints, lock_folder
from torchtitan_magi.training.settings.options import DEFAULT_STEPS, DPO_DATASET, has_reference
from torchtitan_magi.wording import quoted, quoted_path, shown

logger = logging.getLogger(__name__)

EXCLUDABLE = ("optimizer", "lr_scheduler", "dataloader", "train_state")  # torchtitan's names of states beside weights


def check_checkpoints(job_config: Any) -> None:
    """Checks the checkpoints that the run will load. A collective of all ranks.

    Rank 0 locks the run's folders, so that no other run saves there, and checks what the checkpoints hold and the sizes
    of their files. With ``magi.verify_checkpoint`` each rank reads its part of the files and compares digests.

    Raises:
        ValueError: on all ranks, one line that names the checkpoint or its file and the remedy.
    """
    checkpoint = job_config.checkpoint
    if not checkpoint.enable:
        return
    if unknown := [name for name in checkpoint.exclude_from_loading if name not in EXCLUDABLE]:
        raise ValueError(
            f"checkpoint.exclude_from_loading has {quoted(unknown[0])}; use some of {', '.join(EXCLUDABLE)}"
        )
    rank, world_size = rank_and_size()

    def check() -> bool:
        if rank == 0 and not checkpoint.load_only:
            lock_folder(job_config.job.dump_folder)
            lock_checkpoints(os.path.join(job_config.job.dump_folder, checkpoint.folder))
        folders = _loaded_folders(job_config)
        for folder in folders if job_config.magi.verify_checkpoint else ():
            if (folder / digests.DIGESTS).is_file():
                digests.check_digests(folder, rank, world_size)
            elif rank == 0:
                logger.warning(
                    f"{shown(folder)} has no digests: the sizes of its files are checked, their bytes are not"
                )
        if rank == 0:  # of bytes that were compared, where they are
            for folder in folders:
                digests.check_sizes(folder)
            _check_continues(job_config)
        return True

    agreed(job_config.job.dump_folder, check, bool)


def folder_of_checkpoints(job_config: Any) -> Path:
    """Where torchtitan saves a run's checkpoints."""
    return Path(job_config.job.dump_folder) / job_config.checkpoint.folder


def initial_weights(job_config: Any) -> str:
    """The checkpoint or the folder of safetensors that a new run starts from; "" without one."""
    checkpoint = job_config.checkpoint
    return checkpoint.initial_load_path or (job_config.model.hf_assets_path if checkpoint.initial_load_in_hf else "")


def base_of_adapters(job_config: Any) -> tuple[str, str]:
    """The folder that an export of adapters names as that of the frozen weights: the option that gives it, its path."""
    checkpoint = job_config.checkpoint
    if checkpoint.initial_load_in_hf and checkpoint.initial_load_path:
        return "checkpoint.initial_load_path", checkpoint.initial_load_path
    return "model.hf_assets_path", job_config.model.hf_assets_path


def finished_steps(folder: Path) -> list[int]:
    """Steps of the finished checkpoints in torchtitan's folder, the latest first."""
    finished = itertools.chain(folder.glob(f"step-*/{METADATA}"), folder.glob(f"step-*/{INDEX}"))
    return sorted({int(name) for path in finished if (name := path.parent.name[5:]).isdecimal()}, reverse=True)


def step_to_load(checkpoint: Any, steps: list[int]) -> int:
    """The step from which a run goes on that has finished checkpoints of ``steps``; 0 without any."""
    return checkpoint.load_step if checkpoint.load_step != -1 else max(steps, default=0)


def check_load_step(checkpoint: Any, folder: Path, steps: list[int]) -> None:
    """Raises ValueError for a step that is none of the finished ones in the folder."""
    if checkpoint.load_step in (-1, *steps):
        return
    there, remedy = f"has the steps {', '.join(map(str, steps))}", "use one of them, or -1 for the latest"
    if not steps:
        there = "has no finished checkpoint"
        remedy = "set job.dump_folder to that of the run that has it, or load_step to -1"
    raise ValueError(f"checkpoint.load_step is {checkpoint.load_step}, but {shown(folder)} {there}; {remedy}")


def last_checkpoint(job_config: Any) -> int:
    """The step from which the same command goes on; -1 without a finished checkpoint."""
    checkpoint = job_config.checkpoint
    steps = finished_steps(folder_of_checkpoints(job_config)) if checkpoint.enable else []
    return step_to_load(checkpoint, steps or [-1])


def _loaded_folders(job_config: Any) -> list[Path]:
    """Checkpoints in torch's format that the run will load: the one it continues from or begins with, and for
    preference training the weights of the reference.

    Raises:
        ValueError: torchtitan would look for one that is not there.
    """
    checkpoint, saved, folders = job_config.checkpoint, folder_of_checkpoints(job_config), []
    initial = checkpoint.initial_load_path
    steps = finished_steps(saved)
    check_load_step(checkpoint, saved, steps)
    last = saved / f"step-{step_to_load(checkpoint, steps)}"
    if (last / METADATA).is_file():
        folders.append(last)
    if initial and (not steps or has_reference(job_config)):
        if not Path(initial).is_dir():
            raise ValueError(
                f"checkpoint.initial_load_path is {quoted_path(initial)}, which is no folder; give that of a checkpoint"
            )
        if not checkpoint.initial_load_in_hf:
            folders.append(Path(initial))
    return folders


def _check_continues(job_config: Any) -> None:
    """Checks that a checkpoint from which the run would continue holds what it needs, more than weights."""
    checkpoint, folder = job_config.checkpoint, folder_of_checkpoints(job_config)
    steps = finished_steps(folder)
    if not steps and any(folder.glob("step-*")):
        logger.warning(f"{shown(folder)} has no finished checkpoint, as a save was cut off: the run begins anew")
    step = step_to_load(checkpoint, steps)
    if checkpoint.load_only or step == 0 or step not in steps:  # of step 0 torchtitan loads the weights only
        return
    if step < max(steps):
        logger.warning(
            f"checkpoint.load_step is {step}, but {shown(folder)} has later checkpoints, up to step {max(steps)}: the "
            "same command begins at that step again, and without load_step a start goes on from the last one; move "
            "them away to go on from this run's"
        )
    if not checkpoint.exclude_from_loading and not _can_continue(folder, step):
        earlier = next((other for other in steps if other < step and _can_continue(folder, other)), None)
        instead = "" if earlier is None else f"set checkpoint.load_step to {earlier}, or "
        in_hf = str((folder / f"step-{step}" / INDEX).is_file()).lower()
        raise ValueError(
            f"{shown(folder)}/step-{step} has no state of the data loader, as a run's last checkpoint holds weights "
            f"only unless checkpoint.last_save_model_only is false; {instead}start another run with its path as "
            f"checkpoint.initial_load_path and initial_load_in_hf = {in_hf}"
        )
    if "train_state" in checkpoint.exclude_from_loading:
        return
    _check_steps_are_left(job_config, step)
    reference, had_file = job_config.magi.dpo.reference, "train_state.reference_model" in _names_in(folder, step)
    if job_config.training.dataset == DPO_DATASET and (reference == "file") != had_file:
        before = "file" if had_file else "model"
        raise ValueError(
            f'magi.dpo.reference is "{reference}", but {shown(folder)}/step-{step} is of a run with "{before}"; set it '
            "to that, or start another run"
        )


def _check_steps_are_left(job_config: Any, step: int) -> None:
    """Checks that a run from a checkpoint of ``step`` has steps to come; where the data say how many, it is not known
    yet."""
    steps = job_config.training.steps
    if job_config.magi.epochs != -1 and steps == DEFAULT_STEPS:
        return
    what = f"training.steps is {steps}, but the run goes on from step {step}"
    if steps < step:
        raise ValueError(f"{what}; set it to more, or checkpoint.load_step to an earlier one")
    if steps == step:
        logger.warning(f"{what}, its last: it trains and saves nothing more; set it to more for that")


def _can_continue(folder: Path, step: int) -> bool:
    """Whether it holds a state of the data loader; of step 0 torchtitan loads the weights only."""
    return step == 0 or any(name.startswith("dataloader") for name in _names_in(folder, step))


def _names_in(folder: Path, step: int) -> list[str]:
    """Names of what a checkpoint holds; none for one in safetensors."""
    path = folder / f"step-{step}"
    return list(digests.read_metadata(path).state_dict_metadata) if (path / METADATA).is_file() else []
