"""torchtitan's metrics, with those of plans, documents and memory."""

from typing import Any

from torchtitan.components.metrics import MetricsProcessor

from torchtitan_magi.training.memory_log import MeasuredMemory
from torchtitan_magi.training.metrics import PlanMetrics
from torchtitan_magi.training.objectives import LossRecord
from torchtitan_magi.training.runtime import WorkCount


class MagiMetricsProcessor(PlanMetrics, MetricsProcessor):
    """torchtitan's MetricsProcessor with three numbers corrected: two by ``PlanMetrics``, and n_tokens_seen, which
    counts a token once, not once per context-parallel rank."""

    def __init__(
        self,
        job_config: Any,
        parallel_dims: Any,
        attention_flops: int,
        count: WorkCount,
        losses: LossRecord,
        memory: MeasuredMemory,
    ) -> None:
        super().__init__(job_config, parallel_dims)
        self.count_work(attention_flops, count, losses, memory)

    def log(
        self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, extra_metrics: Any = None
    ) -> None:
        extra_metrics = dict(extra_metrics or {})
        if "n_tokens_seen" in extra_metrics:
            extra_metrics["n_tokens_seen"] /= self.parallel_dims.cp
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
