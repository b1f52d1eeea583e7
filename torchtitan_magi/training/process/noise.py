"""Leaves out of a run's log what torchtitan and torch say in every run, though no option of the user's is behind it."""

import logging
import warnings

NOISE = (
    "initial_load_model_only=True has no effect",  # its default; twice
    "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING]",  # torchrun's value, in place of which torchtitan sets its own
    "[Override] torchtitan_magi.",  # a line for each layer; their number follows
)


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a record is none of NOISE."""
    return not record.getMessage().startswith(NOISE)


def leave_out_noise() -> None:
    """Silences it in this process: in torchtitan's logger, which is the root, and among torch's warnings."""
    logging.getLogger().addFilter(is_worth_a_line)
    # torchtitan calls it where a run resumes
    warnings.filterwarnings("ignore", "To get the last learning rate computed by the scheduler", UserWarning)
