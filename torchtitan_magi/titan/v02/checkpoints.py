"""Whether a run can continue from the checkpoint that torchtitan would load."""

import itertools
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader


def check_continues(job_config: Any) -> None:
    """Checks that a checkpoint from which the run would continue holds what it needs, more than weights.

    Raises:
        ValueError: one line that names the checkpoint and the remedy.
    """
    checkpoint = job_config.checkpoint
    if not checkpoint.enable:
        return
    folder = Path(job_config.job.dump_folder) / checkpoint.folder
    finished = itertools.chain(folder.glob("step-*/.metadata"), folder.glob("step-*/model.safetensors.index.json"))
    names = {path.parent.name[5:] for path in finished}
    steps = sorted(map(int, filter(str.isdigit, names)), reverse=True)
    if folder.is_dir() and not steps and (checkpoint.initial_load_in_hf or checkpoint.initial_load_path):
        raise ValueError(  # torchtitan would begin with random weights, with a warning that it does not load these
            f"{folder} has no finished checkpoint, but while it is there torchtitan does not load the initial weights; "
            "remove it to start from them"
        )
    if checkpoint.load_only or checkpoint.exclude_from_loading:
        return
    step = checkpoint.load_step if checkpoint.load_step != -1 else max(steps, default=0)
    if step == 0 or step not in steps:  # of step 0 torchtitan loads the weights only
        return
    if not _can_continue(folder, step):
        earlier = next((other for other in steps if other < step and _can_continue(folder, other)), None)
        instead = "" if earlier is None else f"set checkpoint.load_step to {earlier}, or "
        raise ValueError(
            f"{folder}/step-{step} has no state of the data loader, as a run's last checkpoint holds weights only "
            f"unless checkpoint.last_save_model_only is false; {instead}start another run with its path as "
            "checkpoint.initial_load_path"
        )
    needs_file = job_config.training.dataset == "dpo" and job_config.magi.dpo.reference == "file"
    if needs_file and "train_state.reference_model" not in _names_in(folder, step):
        raise ValueError(
            f'magi.dpo.reference is "file", but {folder}/step-{step} is of a run with "model"; set it to that, or '
            "start another run"
        )


def _can_continue(folder: Path, step: int) -> bool:
    """Whether it holds a state of the data loader; of step 0 torchtitan loads the weights only."""
    return step == 0 or any(name.startswith("dataloader") for name in _names_in(folder, step))


def _names_in(folder: Path, step: int) -> list[str]:
    """Names of what a checkpoint holds; none for one in safetensors."""
    path = folder / f"step-{step}"
    if not (path / ".metadata").is_file():
        return []
    return list(FileSystemReader(path).read_metadata().state_dict_metadata)
