"""torchtitan 0.3 on a machine without an accelerator; see ``training.cpu``."""

from torchtitan.components import metrics
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import profiler, utils

from torchtitan_magi.training.process.cpu import use_cpu


def run_on_cpu() -> None:
    """Makes torchtitan use the CPU. Call it before the Trainer is built."""
    use_cpu((utils, dist_utils, parallel_dims, metrics, profiler), metrics)
