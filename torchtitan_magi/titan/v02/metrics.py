"""torchtitan's metrics, with those of plans, documents and memory."""

from typing import Any

from torchtitan.components.metrics import MetricsProcessor

from torchtitan_magi.training.batches.planner import WorkCount
from torchtitan_magi.training.memory_log import MeasuredMemory
from torchtitan_magi.training.metrics import PlanMetrics
from torchtitan_magi.training.objectives.objective import LossRecord


class MagiMetricsProcessor(PlanMetrics, MetricsProcessor):
    """torchtitan's, with the numbers of ``PlanMetrics``."""

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
