"""The memory of a run in the log: predicted before its first step, then measured."""

import functools
import logging
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_magi.exchange.mesh import ranks_per_node
from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.sizing.keeping.kinds import AUTO, in_words
from torchtitan_magi.sizing.memory import GIB, Prediction, describe, predict, remedies
from torchtitan_magi.sizing.run_setup import Setup, setup_of
from torchtitan_magi.training.activations.decide import beyond_of_last, decided, note_beyond
from torchtitan_magi.training.activations.gpu_memory import GpuMemory, of_all_gpus
from torchtitan_magi.training.batches.pack_loader import PackLoader
from torchtitan_magi.training.process.all_ranks import is_first_rank
from torchtitan_magi.wording import one_line

logger = logging.getLogger(__name__)

FULL = 0.05  # of a GPU's memory that the next decision leaves free beside if a run did not fit, or hardly
SETTLED = 5  # steps of a process after which all memory has been taken: compilers are done, optimizer states exist


def memory_of_run(
    job_config: Any, dims: Any, model: ModelConfig, loader: Any, has_objectives: bool, device_type: str
) -> "MeasuredMemory":
    """Decides what layers keep where activation checkpointing is "auto", and logs what a run will take.

    A collective of all ranks.

    Args:
        dims: torchtitan's ParallelDims.
        loader: of the training data, whose first packs decide if it is a ``PackLoader``.
        has_objectives: whether our Trainer runs, not torchtitan's own.
        device_type: that of torchtitan's tools.
    """

    def read(option: str, default: Any) -> Any:
        section, name = option.rsplit(".", 1)
        return getattr(operator.attrgetter(section)(job_config), name, default)  # 0.3 lacks some options of 0.2.2

    cp_mesh = dims.get_optional_mesh("cp")
    machines = None if cp_mesh is None else ranks_per_node(cp_mesh.get_group())
    setup = replace(
        setup_of(read, model, dims.dp_shard),
        whole_logits=not has_objectives,
        gpu=device_type == "cuda",
        cp_per_machine=tuple(machines) if machines else None,
    )
    folder, chosen = Path(job_config.job.dump_folder), setup.checkpointing == AUTO and not setup.keeping
    memory = of_all_gpus() if setup.gpu else GpuMemory(0)
    if setup.checkpointing == AUTO:
        setup = decided(setup, folder, loader if isinstance(loader, PackLoader) else None, memory.capacity)
    prediction = log_prediction(setup, memory.capacity if setup.gpu else None)
    return MeasuredMemory(setup, prediction, device_type, folder if chosen else None, memory)


def log_prediction(setup: Setup, capacity: int | None) -> Prediction:
    """Logs what the run will take, with a warning that says what to change if the GPU has less.

    Args:
        capacity: bytes of a GPU that the run may take; None: it has none.
    """
    prediction = predict(setup)
    logger.info(describe(prediction, capacity))
    if capacity is not None and prediction.total > capacity:
        logger.warning(
            f"The run is predicted to take {prediction.total / GIB:.1f} GiB on each GPU of {capacity / GIB:.1f}; if it "
            f"does not fit, change one or more of: {remedies(setup)}"
        )
    return prediction


def give_back_before(optimizers: Any) -> None:
    """Before the first step of torchtitan's optimizers, gives the GPU back what the allocator has free. In that step
    their states are made, which stay: they would take pieces of the blocks that later backwards need whole."""
    once = functools.cache(torch.cuda.empty_cache)
    optimizers.register_step_pre_hook(lambda *_: once())


class MeasuredMemory:
    """Measures what training takes of the GPUs' memory, and logs it once beside what was predicted. Once it looks, too,
    whether steps are slow because the allocator searches for free memory.

    Args:
        device_type: of the ranks' collectives.
        folder: job.dump_folder, where it is noted for later decisions; None where what layers keep was not decided.
        memory: of the GPUs, before the run.
    """

    def __init__(
        self, setup: Setup, predicted: Prediction, device_type: str, folder: Path | None, memory: GpuMemory
    ) -> None:
        self.setup, self.predicted, self.device_type, self.folder = setup, predicted, device_type, folder
        self.memory = memory
        self.before = 0 if folder is None else beyond_of_last(setup, folder)
        self.allocated = self.reserved = 0  # most bytes that PyTorch's allocator has given out, and has had
        self.retries = 0  # of its searches for free memory, in each of which all that it has free goes back to the GPU
        self.settled: int | None = None  # step
        self.to_say = [self._say_slow, self._say_measured]

    def look(self, step: int) -> dict[str, float]:
        """Metrics to log, none on the CPU. To be called on all ranks, before torchtitan resets the peak."""
        if not torch.cuda.is_available():
            return {}
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        self.allocated = max(self.allocated, torch.cuda.max_memory_allocated())
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        if self.settled is None:
            self.settled = step + SETTLED - 1
        if step >= self.settled and self.to_say:
            found = torch.tensor([self.allocated, self.reserved, outside, retries - self.retries])
            found = found.to(self.device_type)
            dist.all_reduce(found, dist.ReduceOp.MAX)
            self.to_say.pop()(*found.tolist())
        self.retries = retries
        return {"memory/outside_pytorch(GiB)": outside / GIB}

    def _say_measured(self, allocated: int, reserved: int, outside: int, _: int) -> None:
        taken = self.memory.taken
        before = f", of which {taken / GIB:.1f} were taken before the run" if taken else ""
        logger.info(
            f"Measured memory per GPU: at most {allocated / GIB:.1f} GiB allocated by PyTorch ({reserved / GIB:.1f} "
            f"reserved) and {outside / GIB:.1f} GiB outside it{before}; predicted "
            f"{self.predicted.total / GIB:.1f} in all"
        )
        if is_first_rank():
            self._note(allocated + outside - taken - self.predicted.total)

    def _say_slow(self, allocated: int, reserved: int, outside: int, retries: int) -> None:
        if retries:
            logger.warning(
                f"The GPU's memory is full: PyTorch's allocator searched for free memory {retries} times since the "
                f"last line of the log, which slows steps; {self._remedy()}"
            )
            if is_first_rank():
                self._note_full()

    def _remedy(self) -> str:
        if self.folder is not None:
            return "the next run keeps less, by what is noted in job.dump_folder"
        return f"change one or more of: {remedies(self.setup)}"

    def _note_full(self) -> None:
        """Any rank may, and several: each adds to what was noted before the run."""
        self._note(self.before + int(FULL * self.memory.capacity))

    def _note(self, beyond: int) -> None:
        if self.folder is not None:
            note_beyond(self.setup, self.folder, beyond)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Says of what runs out of the GPU's memory what layers were to keep, and what helps.

        Raises:
            RuntimeError: it has run out.
        """
        try:
            yield
        except RuntimeError as error:  # of PyTorch's allocator, or the driver's and NCCL's beside it
            if self.setup.checkpointing != AUTO or "out of memory" not in str(error):
                raise
            self._note_full()
            raise RuntimeError(
                f"out of memory with {in_words(self.setup.keepings)}, predicted to take "
                f"{self.predicted.total / GIB:.1f} GiB ({one_line(error)}); {self._remedy()}"
            ) from error
