"""Checks that all context-parallel ranks planned the same microbatch, without making any of them wait.

Plans are computed from replicated input. Ranks whose data loaders disagree would exchange rows that do not fit each
other, which shows as a hang or as wrong numbers; here it becomes an error that names them.
"""

import faulthandler
import logging
import queue
import threading
import weakref

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from torchtitan_magi.planning.plan import AttnPlan

logger = logging.getLogger(__name__)

# The main thread has as long to raise the error by itself. It cannot when the device hangs: a launch into a full queue
# never returns, and holds the interpreter's lock. A timer of faulthandler ends the process without that lock.
_GRACE_SECONDS = 20


class PlanAgreement:
    """Compares the plans of a group's ranks in a thread of its own; an error is raised at the next plan.

    The thread has a group of its own as well, and ends with it.

    Args:
        group: group of the context-parallel ranks. Creating the object is a collective of theirs.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(self.ranks, backend="gloo", use_local_synchronization=True)
        self.group = weakref.ref(own)
        self.fingerprints: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        weakref.finalize(own, self.fingerprints.put, None)
        self.error: str | None = None
        threading.Thread(target=self._compare, name="plan-agreement", daemon=True).start()

    def check(self, plan: AttnPlan) -> None:
        """Hands over a plan for comparison.

        Raises:
            RuntimeError: an earlier plan was not the same on all ranks; names the ranks.
        """
        if self.error is not None:
            faulthandler.cancel_dump_traceback_later()
            raise RuntimeError(self.error)
        self.fingerprints.put(plan.fingerprint)

    def _compare(self) -> None:
        for number, mine in enumerate(iter(self.fingerprints.get, None), 1):
            try:
                values = self._of_all_ranks(mine)
            except (RuntimeError, ValueError):
                return  # another rank is gone, or the job is over; whoever failed says why
            most = max(values, key=values.count)
            others = [rank for rank, value in zip(self.ranks, values, strict=True) if value != most]
            if others:
                error = (
                    f"microbatch {number}: ranks {others} have other documents than the rest of ranks {self.ranks}; "
                    "all context-parallel ranks of a data-parallel rank must load the same data "
                    "and the same magi.cost_model"
                )
                logger.error(error)
                get_error_handler().record_exception(RuntimeError(error))  # for torchrun's last line
                faulthandler.dump_traceback_later(_GRACE_SECONDS, exit=True)
                self.error = error
                return

    def _of_all_ranks(self, mine: int) -> list[int]:
        group = self.group()
        if group is None:
            raise RuntimeError("the group has ended")
        everyone = torch.empty(len(self.ranks), dtype=torch.int64)
        dist.all_gather_into_tensor(everyone, torch.tensor([mine]), group=group)
        values: list[int] = everyone.tolist()
        return values
