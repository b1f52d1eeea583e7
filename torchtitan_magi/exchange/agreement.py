"""Checks that all ranks of a data-parallel rank have the same microbatches, without making any of them wait.

Context-, tensor- and pipeline-parallel ranks load the same data, each by itself, and plan from them. Where they differ,
rows that do not fit each other are exchanged, or parts of different sums are added up, which shows as a hang or as
wrong numbers; here it becomes an error that names the ranks.
"""

import faulthandler
import logging
import queue
import threading
import time
import weakref
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from torchtitan_magi.exchange.transport import all_gather_single, gathered
from torchtitan_magi.planning.plan import AttnPlan

logger = logging.getLogger(__name__)

# The main thread has as long to raise the error by itself. It cannot when the device hangs: a launch into a full queue
# never returns, and holds the interpreter's lock. A timer of faulthandler ends the process without that lock.
_GRACE_SECONDS = 20


_agreements: "weakref.WeakSet[PlanAgreement]" = weakref.WeakSet()


def agreement_of(cp_group: dist.ProcessGroup | None, data_rank: int) -> "PlanAgreement | None":
    """The agreement of all ranks with this data-parallel rank; None if it has one rank. A collective of all ranks."""
    if not dist.is_initialized():
        return None
    ranks = [rank for rank, its_data in enumerate(gathered(data_rank, dist.group.WORLD)) if its_data == data_rank]
    cp_ranks = [dist.get_rank()] if cp_group is None else dist.get_process_group_ranks(cp_group)
    return PlanAgreement(ranks, cp_ranks) if len(ranks) > 1 else None


def raise_differences(wait: bool = False) -> None:
    """Raises what the agreements of this process have found.

    Args:
        wait: also of what was handed over last, for which the host may wait a moment.

    Raises:
        RuntimeError: as ``PlanAgreement.check``.
    """
    for agreement in list(_agreements):
        if wait:
            agreement.wait()
        agreement.raise_error()


class PlanAgreement:
    """Compares the microbatches of ranks in a thread of its own; an error is raised at the next one, or when asked for.

    The thread has a group of its own as well, and ends with it.

    Args:
        ranks: that have the same data. Creating the object is a collective of theirs.
        cp_ranks: those of them that exchange rows with this one, so that their plans are the same, too. Those of others
            may be for machines laid out in another way.
    """

    def __init__(self, ranks: list[int], cp_ranks: list[int]) -> None:
        self.ranks, self.first_cp_rank = ranks, cp_ranks[0]
        own = dist.new_group(self.ranks, backend="gloo", use_local_synchronization=True)
        self.group = weakref.ref(own)
        self.given: queue.SimpleQueue[tuple[int, int] | threading.Event | None] = queue.SimpleQueue()
        weakref.finalize(own, self.given.put, None)
        self.error: str | None = None
        self.thread = threading.Thread(target=self._compare, name="plan-agreement", daemon=True)
        self.thread.start()
        _agreements.add(self)

    def check(self, plan: AttnPlan, content: int = 0) -> None:
        """Hands over a microbatch for comparison.

        Args:
            content: 63 bits that stand for its tokens, labels and documents.

        Raises:
            RuntimeError: an earlier one was not the same on all ranks; names the ranks.
        """
        self.raise_error()
        self.given.put((plan.fingerprint, content))

    def raise_error(self) -> None:
        """Raises RuntimeError, as ``check`` does, if a difference was found."""
        if self.error is not None:
            faulthandler.cancel_dump_traceback_later()
            _agreements.discard(self)  # another run in this process is not to blame
            raise RuntimeError(self.error)

    def wait(self) -> None:
        """Until all that was handed over has been compared, or another rank does not come to it."""
        compared, deadline = threading.Event(), time.monotonic() + _GRACE_SECONDS
        self.given.put(compared)
        while self.thread.is_alive() and time.monotonic() < deadline and not compared.wait(0.01):
            pass

    def _compare(self) -> None:
        number = 0
        while (mine := self.given.get()) is not None:
            if isinstance(mine, threading.Event):
                mine.set()
                continue
            number += 1
            try:
                values = self._of_all_ranks(mine)
            except (RuntimeError, ValueError):
                return  # another rank is gone, or the job is over; whoever failed says why
            if others := self._others(values):
                error = (
                    f"microbatch {number}: ranks {others} have other documents than the rest of ranks {self.ranks}; "
                    "all context-, tensor- and pipeline-parallel ranks of a data-parallel rank must load the same data "
                    "and the same magi.cost_model"
                )
                logger.error(error)
                get_error_handler().record_exception(RuntimeError(error))  # for torchrun's last line
                faulthandler.dump_traceback_later(_GRACE_SECONDS, exit=True)
                self.error = error
                return

    def _others(self, values: list[list[int]]) -> list[int]:
        """The ranks that do not have what most have: of the contents, else of the plans of their context-parallel
        group. values: of each rank, its first context-parallel rank, fingerprint of the plan, content."""
        contents = [(0, content) for _, _, content in values]
        plans = [(first, plan) for first, plan, _ in values]
        return self._unlike_most(contents) or self._unlike_most(plans)

    def _unlike_most(self, values: list[tuple[int, int]]) -> list[int]:
        """The ranks whose second number is not that of most ranks with the same first one."""
        most = {first: Counter(one for one in values if one[0] == first).most_common(1)[0][0] for first, _ in values}
        return [rank for rank, one in zip(self.ranks, values, strict=True) if one != most[one[0]]]

    def _of_all_ranks(self, mine: tuple[int, int]) -> list[list[int]]:
        group = self.group()
        if group is None:
            raise RuntimeError("the group has ended")
        everyone = torch.empty(len(self.ranks), 3, dtype=torch.int64, device="cpu")
        own = torch.tensor([[self.first_cp_rank, *mine]], device="cpu")
        all_gather_single(everyone, own, group=group)
        values: list[list[int]] = everyone.tolist()
        return values
