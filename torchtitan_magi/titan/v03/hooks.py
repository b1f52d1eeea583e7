"""Names of torchtitan 0.3 that we replace, because no configuration holds them."""

from torchtitan.distributed import utils as dist_utils

from torchtitan_magi.training.finite import noting
from torchtitan_magi.training.process.timeouts import set_pg_timeouts


def install() -> None:
    """Replaces them, once per process."""
    dist_utils.clip_grad_norm_ = noting(dist_utils.clip_grad_norm_)  # to end steps that are not finite
    dist_utils.set_pg_timeouts = set_pg_timeouts  # to reach our own communicators as well
