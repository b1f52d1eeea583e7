"""Faults of a rank in a run of tests/support/runs.py: a signal in a given phase; and what the rank uses.

train(2, arguments, setup=Fault("backward", 7, 1, signal.SIGKILL))
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from support.runs import watch

FORWARDS = ("forward", "reference", "validation")
WAITING = 3.0  # seconds after which the other ranks surely wait


@dataclass(frozen=True)
class Fault:
    """A rank is struck, once, at a step or the first time after it that it reaches the phase.

    It reports ("struck", its process id) before. All ranks report ("resources", KiB resident, open descriptors,
    threads) after each step.

    Args:
        phase: "forward" and "backward" of a layer; "reference": of the frozen model of preference training;
            "validation": of the model within a validation pass; "rows" before the rank sends K/V rows of a layer on a
            GPU, while the others' attention waits for them; "write" when the rank has written its shards of a
            checkpoint; "finish" before rank 0 completes it; "export" when the rank has written its shards of an export;
            "merge" when rank 0 has begun the files that they are merged to; "none": nothing happens.
        cause: a signal that the rank sends itself, or a function that it calls.
    """

    phase: str
    step: int = 0
    rank: int = 0
    cause: int | Callable[[], None] = 0

    def __call__(self, report: Callable[..., None]) -> None:
        from torch.distributed.checkpoint import HuggingFaceStorageWriter, _consolidate_hf_safetensors
        from torch.nn.modules import module
        from torchtitan.train import Trainer

        from torchtitan_magi.backends.ffa.row_kernels import CudaRowMover
        from torchtitan_magi.training.checkpoints.digests import DigestWriter

        now, struck, policy = 0, False, None

        def see_step(_: object, trainer: Trainer, *args: object) -> None:
            nonlocal now, policy
            now, policy = trainer.step, trainer.model_parts[0]
            report("resources", *resources())

        def strike(*_: object, **__: object) -> None:
            nonlocal struck
            if now + 1 >= self.step and not struck:
                struck = True
                report("struck", os.getpid())
                self.cause() if callable(self.cause) else os.kill(os.getpid(), self.cause)

        def wait_and_strike() -> None:
            if now + 1 >= self.step and not struck:
                time.sleep(WAITING)
            strike()

        calls = {  # after which it is struck
            "write": (DigestWriter, "write_data"),
            "export": (HuggingFaceStorageWriter, "write_data"),
            "merge": (_consolidate_hf_safetensors, "_write_metadata"),
        }
        watch(Trainer, "train_step", see_step)
        if os.environ["RANK"] != str(self.rank):
            return
        if self.phase in FORWARDS:
            module.register_module_forward_pre_hook(lambda layer, _: see_forward(layer))
        elif self.phase == "backward":
            module.register_module_forward_hook(lambda layer, _, x: strike_in_backward(layer, x))
        elif self.phase == "rows":
            watch(CudaRowMover, "gather", before=wait_and_strike)
        elif self.phase == "finish":
            watch(DigestWriter, "finish", before=strike)
        elif self.phase in calls:
            watch(*calls[self.phase], strike)

        def see_forward(layer: object) -> None:
            if is_block(layer) and policy is not None and self.phase == phase_of(layer, policy):
                strike()

        def strike_in_backward(layer: object, x: object) -> None:
            if is_block(layer) and x.requires_grad:
                x.register_hook(strike)


def phase_of(layer: object, policy: object) -> str:
    """The one of FORWARDS that a layer is in. policy: the model that is trained."""
    if not policy.training:
        return "validation"
    return "forward" if layer.training else "reference"


def is_block(layer: object) -> bool:
    return type(layer).__name__.endswith("TransformerBlock")


def resources() -> tuple[int, int, int]:
    """KiB resident, open descriptors, threads of this process."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def report_saved(report):
    from torchtitan.components.checkpoint import CheckpointManager

    def report_step(_, manager, curr_step, last_step=False):
        groups = [
            group for group in dist.distributed_c10d._world.pg_map if group.group_desc != "undefined"
        ]  # of meshes
        backends = [group._get_backend(torch.device("cpu")) for group in groups if dist.get_backend(group) != "fake"]
        report("timeouts", curr_step, {backend.options._timeout.total_seconds() for backend in backends})
        if manager._should_save(curr_step, last_step):
            report("saved", curr_step)

    watch(CheckpointManager, "save", report_step)
