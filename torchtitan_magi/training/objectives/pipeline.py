"""A model in the stages of a pipeline: passes of torch's schedule whose microbatches have plans of their own."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchtitan_magi.training.batches.microbatch import LocalBatch, Process
from torchtitan_magi.training.experts import expert_counts_kept
from torchtitan_magi.training.objectives.logprob_model import LogprobModel
from torchtitan_magi.training.objectives.objective import Objective


class Pipeline:
    """The stages of a model on this rank.

    Args:
        schedule: torch's. It computes the loss of hidden states and a microbatch's number by ``loss``.
        parts: the modules of the stages.
        is_first, is_last: whether the first, the last stage is among them.
        loss: its ``of_hidden`` is set here.
        compiled: as for ``LogprobModel``.
    """

    def __init__(
        self, schedule: Any, parts: Sequence[Any], is_first: bool, is_last: bool, loss: Any, compiled: bool
    ) -> None:
        self.schedule, self.parts, self.is_first, self.is_last, self.loss = schedule, parts, is_first, is_last, loss
        self.prefix = "_stages" if hasattr(schedule, "_initialize_stages") else "_stage"  # of the names that torch uses
        self.shape: torch.Size | None = None  # of the tokens that its stages are set up for
        name = f"_initialize{self.prefix}"
        kept, uncounted = _gradients_kept(parts), expert_counts_kept(parts)  # it runs the stages to look at them
        setattr(schedule, name, kept(uncounted(getattr(schedule, name))))
        if is_last:
            parts[-1]._skip_lm_head = True  # the loss calls the output layer, as torchtitan's chunked loss does
            self.last = LogprobModel(parts[-1], compiled)
            self.last.model = self.last.output

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of a pass."""
        return self.schedule._n_microbatches

    def run(
        self, batches: Sequence[LocalBatch], result: Callable[[Any, int], Tensor], backward: bool = False
    ) -> list[Tensor]:
        """A pass of at most ``num_microbatches``: forward, with backward from the results too.

        Args:
            result: what is wanted of the microbatch of that number, from a model that is called as a ``LogprobModel``.
                It may be called several times.

        Returns:
            the results of all microbatches, on ranks with the last stage; none elsewhere.
        """
        missing = self.num_microbatches - len(batches)
        results: list[Tensor] = []
        batches = [*batches, *[batches[-1]] * missing]  # every pass has as many
        numbers = torch.arange(len(batches)).clamp(max=len(batches) - missing - 1)  # on the CPU; targets are tensors
        self._set_up_for(batches[0].tokens.shape)
        self.loss.of_hidden = lambda hidden, number: result(_OutputOnly(self.last, hidden), int(number))
        _run_microbatches(
            self.schedule,
            backward,
            arg_mbs=[(batch.tokens,) for batch in batches] if self.is_first else None,
            kwarg_mbs=[batch.model_inputs for batch in batches],
            target_mbs=list(numbers) if self.is_last else None,
            losses=results if self.is_last else None,
        )
        return results[: len(batches) - missing]

    def _set_up_for(self, shape: torch.Size) -> None:
        """Has torch set its stages up anew for tokens of another shape, as those of validation may have: by itself it
        does so only where passes with and without backward take turns."""
        for way in ("forward", "backward") if shape != self.shape else ():
            flag = f"{self.prefix}_{way}_initialized"
            assert hasattr(self.schedule, flag), flag
            setattr(self.schedule, flag, False)
        self.shape = shape

    def losses(
        self,
        objective: Objective,
        inputs: Sequence[dict[str, Any]],
        labels: Sequence[Tensor],
        process: Process,
        divisor: Tensor | None = None,
    ) -> list[Tensor]:
        """The objective's loss of each microbatch on the device, detached, on ranks with the last stage.

        Args:
            divisor: of the losses, which then have a backward.
        """
        read = [objective.read(batch, of, process) for batch, of in zip(inputs, labels, strict=True)]
        with torch.no_grad():
            references = objective.reference.logprobs(read)

        def loss(model: Any, number: int) -> Tensor:
            of_one = objective.loss_of(read[number], model, references[number] if references else None)
            return of_one if divisor is None else of_one / divisor

        found = self.run([batch.local for batch in read], loss, backward=divisor is not None)
        return [of_one.detach() for of_one in found]


def _run_microbatches(schedule: Any, backward: bool, **given: Any) -> None:
    """Passes microbatches that are made already. Before torch 2.14, ``step`` and ``eval`` make them of one batch."""
    if "arg_mbs" in inspect.signature(schedule.step).parameters:
        (schedule.step if backward else schedule.eval)(**given, return_outputs=False)
        return
    schedule._has_backward = backward
    for stage in schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]:
        stage.has_backward = backward
        stage.clear_runtime_states()
    schedule._step_microbatches(**given, return_outputs=False)


@contextmanager
def _gradients_kept(parts: Sequence[Any]) -> Iterator[None]:
    """Keeps those of a step's earlier passes; also a decorator. torch sets stages up anew wherever passes with and
    without backward take turns, and leaves FSDP's parameters without gradients."""
    kept = [(parameter, parameter.grad) for part in parts for parameter in part.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    yield
    for parameter, gradient in kept:
        parameter.grad = gradient


class _OutputOnly:
    """Stands in for a ``LogprobModel`` whose hidden states are there already."""

    def __init__(self, last: LogprobModel, hidden: Tensor) -> None:
        self.last, self.hidden = last, hidden

    def __call__(self, batch: LocalBatch) -> Tensor:
        return self.last(self._after_layers(batch))

    def summed(self, batch: LocalBatch, scale: Tensor | None, kept: Tensor | None = None) -> Tensor:
        return self.last.summed(self._after_layers(batch), scale, kept)

    def _after_layers(self, batch: LocalBatch) -> LocalBatch:
        return replace(batch, tokens=self.hidden, model_inputs={})
