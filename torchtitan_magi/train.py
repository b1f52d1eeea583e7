"""Trains as a TOML file says: packed SFT, DPO or rollouts under varlen context parallelism.

usage: torchrun --nproc-per-node GPUS -m torchtitan_magi.train --job.config_file FILE [--SECTION.OPTION VALUE ...]

GPUS is the product of the parallel degrees in the file; several nodes take
torchrun's own options (--nnodes, --rdzv-endpoint). A run that is started again
continues from its last checkpoint.

example:
  torchrun --nproc-per-node 8 -m torchtitan_magi.train \\
      --job.config_file train_configs/llama3_8b_sft_128k.toml --training.steps 100

options:
  --job.config_file FILE    the TOML file; train_configs/ has ready ones
  --SECTION.OPTION VALUE    any option, instead of its value in the file;
                            true and false are --SECTION.OPTION and
                            --SECTION.no-OPTION
  -h, --help                this text; after --job.config_file FILE, every
                            option with its value in that file
"""

import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_magi.training.process.error_file import is_message, recorded
from torchtitan_magi.training.process.noise import leave_out_noise
from torchtitan_magi.wording import quoted

if TYPE_CHECKING:
    from torchtitan_magi.training.rollout_trainer import RolloutTrainer


@contextmanager
def open_trainer(arguments: Sequence[str]) -> "Iterator[RolloutTrainer]":
    """A run that this program leads, in each process that torchrun starts: rollouts in, steps out.

        with open_trainer(["--job.config_file", "rl.toml"]) as trainer:
            while trainer.step < trainer.num_steps:
                rollouts = sample(...) if trainer.is_first_rank else None
                metrics = trainer.train_step(rollouts)

    It starts as the command does, from the last checkpoint if there is one.

    Args:
        arguments: of the command line; training.dataset is "rollouts" and training.dataset_path left out.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    is_list = isinstance(arguments, Sequence) and not isinstance(arguments, str)
    if not is_list or not all(isinstance(argument, str) for argument in arguments):
        raise ValueError(
            f"open_trainer got {quoted(arguments)}; give a list of the command line's arguments, each a string, such "
            'as ["--job.config_file", "rl.toml"]'
        )
    import torch.distributed as dist

    from torchtitan_magi.training.process.last_line import LAST_LINE
    from torchtitan_magi.training.rollout_trainer import RolloutTrainer

    trainer = _trainer_module().build(list(arguments))
    try:
        with trainer.given_steps() as train_on:
            yield RolloutTrainer(trainer, train_on)
    finally:
        trainer.close()
    dist.destroy_process_group()
    LAST_LINE.tell()


def _trainer_module() -> Any:
    """``trainer`` of the adapter, for a run whose log has no noise."""
    from torchtitan_magi.titan import adapter

    leave_out_noise()
    return importlib.import_module(f"{adapter.__name__}.trainer")


@recorded  # so that torchrun says last what went wrong, whatever it is
def main() -> None:
    """Trains as the command line says."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its former name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # less is lost between blocks

    _trainer_module().main()


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__.strip())
        sys.exit()
    try:
        main()
    except ImportError as error:
        if error.name != "torchtitan":
            raise
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            Path(error_file).write_text(json.dumps({"message": str(error)}))
        sys.exit(str(error))
    except ValueError as error:
        if not is_message(error):
            raise
        sys.exit(f"ValueError: {error}")
