"""The numbers a trainer shows, made right for packed documents and for context parallelism."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_magi.training.batches.planner import WorkCount
from torchtitan_magi.training.experts import take_expert_load
from torchtitan_magi.training.memory_log import MeasuredMemory
from torchtitan_magi.training.objectives.objective import LossRecord
from torchtitan_magi.training.process.groups import group_of, reduced

logger = logging.getLogger(__name__)

NOTICEABLE = 0.1  # seconds that the steps between two lines of the log may wait for plans


class PlanMetrics:
    """Mixed into torchtitan's MetricsProcessor; corrects three numbers.

    - MFU and TFLOP/s count the attention that the packed documents need, 12 * D * Hq operations per layer and
      (query, key) pair, forward and backward, 6 * (D + Dv) * Hq where values are narrower; torchtitan counts a dense
      pack.
    - global_max_loss is the largest mean loss of a data-parallel rank, also when its tokens are on several ranks and
      some of these have no label.
    - n_tokens_seen is what ``tokens_seen`` returns, which our Trainer sets: the tokens of documents, each once. Without
      it, torchtitan's number, with padding, less what it counts once for each context-parallel rank.

    It also logs what ``objective_metrics`` returns, which a Trainer may set, the load of a model's experts, and memory.
    """

    num_flops_per_token: float  # set by the Trainer, without attention
    parallel_dims: Any
    model_parts: Any

    def count_work(self, attention_flops: int, count: WorkCount, losses: LossRecord, memory: MeasuredMemory) -> None:
        """Begins to count. attention_flops: per (query, key) pair, in all layers."""
        self.attention_flops, self.count, self.losses, self.memory = attention_flops, count, losses, memory
        self.objective_metrics: Callable[[], dict[str, float]] = dict
        self.tokens_seen: Callable[[], int] | None = None
        self.last_logged: int | None = None  # step
        self.said_waiting = False

    def log(
        self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, extra_metrics: Any = None
    ) -> None:
        """Logs a step: torchtitan's line with the numbers made right. A collective of all ranks."""
        counted = self.count.take()
        waited = {"time_metrics/plan_wait(s)": counted.waited}
        without_attention = self.num_flops_per_token
        self.num_flops_per_token = without_attention + self.attention_flops * counted.area / max(counted.tokens, 1)
        groups = group_of(self.parallel_dims, "loss"), group_of(self.parallel_dims, "pp")
        own_metrics = self.objective_metrics() | take_expert_load(self.model_parts, *groups)
        seen = {"n_tokens_seen": self._tokens_seen(extra_metrics)}
        extra_metrics = (extra_metrics or {}) | seen | waited | own_metrics | self.memory.look(step)
        super().log(step, global_avg_loss, self._max_loss(), grad_norm, extra_metrics)  # type: ignore[misc]
        self.num_flops_per_token = without_attention
        self._print("step", step, own_metrics)
        self._report_waiting(step, counted.waited)

    def _tokens_seen(self, extra_metrics: Any) -> float:
        if self.tokens_seen is not None:
            return self.tokens_seen()
        return float((extra_metrics or {}).get("n_tokens_seen", 0)) / self.parallel_dims.cp

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Logs a validation pass."""
        super().log_validation(loss, step, extra_metrics)  # type: ignore[misc]
        self.count.take()
        self._print("validate step", step, extra_metrics or {})

    def _print(self, what: str, step: int, metrics: dict[str, float]) -> None:
        """Logs a line of metrics that torchtitan's own line does not show."""
        if metrics:
            named = (f"{name.removeprefix('validation_metrics/')}: {value:.4f}" for name, value in metrics.items())
            logger.info(f"{what}: {step:2}  {'  '.join(named)}")

    def _report_waiting(self, step: int, seconds: float) -> None:
        """Logs the time waited for plans: once, and again whenever it is noticeable. The first step always waits."""
        if self.last_logged is not None and (not self.said_waiting or seconds > NOTICEABLE):
            first = self.last_logged + 1
            steps = f"Step {step}" if first == step else f"Steps {first} to {step} together"
            logger.info(f"{steps} waited {1e3 * seconds:.1f} ms for plans")
            self.said_waiting = True
        self.last_logged = step

    def _max_loss(self) -> float:
        loss, count = reduced(self.losses.sum_and_count(), group_of(self.parallel_dims, "cp"))
        mean = torch.where(count > 0, loss / count.clamp(min=1), -torch.inf)
        return reduced(mean, group_of(self.parallel_dims, "batch"), dist.ReduceOp.MAX).item()
