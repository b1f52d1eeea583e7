"""The numbers a trainer shows, made right for packed documents and for context parallelism."""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_magi.exchange.transport import gathered
from torchtitan_magi.training.batches.planner import WorkCount
from torchtitan_magi.training.experts import take_expert_load
from torchtitan_magi.training.memory_log import MeasuredMemory
from torchtitan_magi.training.objectives.objective import LossRecord
from torchtitan_magi.training.process.groups import group_of, reduced
from torchtitan_magi.training.run_parts import RunParts

logger = logging.getLogger(__name__)

NOTICEABLE = 0.1  # seconds that the steps between two lines of the log may wait for plans


class PlanMetrics:
    """Mixed into torchtitan's MetricsProcessor: the same metrics and the same line for a step with any torchtitan.

    - MFU and TFLOP/s count the attention that the packed documents need, 12 * D * Hq operations per layer and
      (query, key) pair, forward and backward, 6 * (D + Dv) * Hq where values are narrower; torchtitan counts a dense
      pack. Of linear attention they count the recurrence, 18 * K * V * H per layer and token.
    - global_max_loss is the largest mean loss of a data-parallel rank, also when its tokens are on several ranks and
      some of these have no label.
    - learned_tokens(%) is the share of the documents' tokens that have a label, and so a loss.
    - n_tokens_seen is what ``tokens_seen`` returns, which our Trainer sets: the tokens of documents, each once. Without
      it, torchtitan's number, with padding, less what it counts once for each context-parallel rank.

    It also logs what ``objective_metrics`` returns, which a Trainer may set, the load of a model's experts, and memory.
    """

    num_flops_per_token: float  # set by the Trainer, without attention
    parallel_dims: Any
    model_parts: Any
    logger: Any
    device_memory_monitor: Any
    gpu_peak_flops: float
    ntokens_since_last_log: int
    data_loading_times: list[float]
    time_last_log: float
    has_quantization = False
    every_step = False  # whether each step is logged, whatever metrics.log_freq says
    last: dict[str, Any]  # what was logged of the last step

    def count_work(self, attention_flops: int, run: RunParts, losses: LossRecord, memory: MeasuredMemory) -> None:
        """Begins to count. attention_flops: per (query, key) pair, in all layers.

        Raises:
            ValueError: on the rank that has no run of Weights & Biases and should; torchtitan would go on without.
        """
        options = run.job_config.metrics
        wanted = options.enable_wandb + options.enable_tensorboard
        if getattr(self.logger, "number_of_loggers", wanted) < wanted:
            raise ValueError(
                "metrics.enable_wandb is true, but no run of wandb could be started, as the log says above; log in, "
                "set WANDB_MODE=offline in the environment, or set it to false"
            )
        self.attention_flops, self.run, self.losses, self.memory = attention_flops, run, losses, memory
        self.count = run.count
        self.objective_metrics: Callable[[], dict[str, float]] = dict
        self.tokens_seen: Callable[[], int] | None = None
        self.tokens_and_labels: Tensor | None = None  # of all ranks since the last line, which our Trainer counts
        self.first_step: int | None = None  # of this process
        self.last_logged = 0  # step

    def should_log(self, step: int) -> bool:
        """Whether a step is logged: also the first of this process and the last of the run."""
        if self.first_step is None:
            self.first_step, self.last_logged = step, step - 1
        return self.every_step or step in (self.first_step, self.run.num_steps) or super().should_log(step)  # type: ignore[misc]

    def log(
        self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, extra_metrics: Any = None
    ) -> None:
        """Logs a step. A collective of all ranks."""
        seconds, num_steps = time.perf_counter() - self.time_last_log, step - self.last_logged
        counted, extra = self.count.take(), extra_metrics or {}
        tokens, stages = group_of(self.parallel_dims, "loss"), group_of(self.parallel_dims, "pp")
        of_stage = global_avg_loss, self._max_loss(), self.objective_metrics()
        global_avg_loss, max_loss, own_metrics = gathered(of_stage, stages)[-1]  # the last stage's, which has losses
        own_metrics |= take_expert_load(self.model_parts, tokens, stages)
        metrics = {
            **{name: value for name, value in extra.items() if not _is_rate(name)},
            "loss_metrics/global_avg_loss": global_avg_loss,
            "loss_metrics/global_max_loss": max_loss,
            "grad_norm": grad_norm,
            "lr": next((value for name, value in extra.items() if _is_rate(name)), 0.0),
            "n_tokens_seen": self._tokens_seen(extra),
            **self._learned(),
            **self._speed(seconds, counted),
            **self._times(seconds, num_steps, counted),
            **self._peak_memory(),
            **self._progress(step, seconds / num_steps),
            **self.memory.look(step),
            **own_metrics,
        }
        self.last = metrics
        self.logger.log(metrics, step)
        logger.info(step_line(step, self.run.num_steps, metrics))
        self._print("step", step, own_metrics)
        self._report_waiting(step, counted.waited)
        self.ntokens_since_last_log, self.last_logged = 0, step
        self.data_loading_times.clear()
        self.device_memory_monitor.reset_peak_stats()
        self.time_last_log = time.perf_counter()

    def _speed(self, seconds: float, counted: WorkCount) -> dict[str, float]:
        """Tokens and operations per second; MFU by the peak of bfloat16, which says nothing of other formats."""
        tokens = self.ntokens_since_last_log / (seconds * self.parallel_dims.non_data_parallel_size)
        attention = self.attention_flops * counted.area / max(counted.tokens, 1)
        flops = (self.num_flops_per_token + attention) * tokens
        speed = {
            "throughput(tps)": tokens,
            "throughput_of_all_gpus(tps)": tokens * self.parallel_dims.world_size,
            "tflops": flops / 1e12,
        }
        return speed if self.has_quantization else speed | {"mfu(%)": 100 * flops / self.gpu_peak_flops}

    def _times(self, seconds: float, num_steps: int, counted: WorkCount) -> dict[str, float]:
        loading = self.data_loading_times
        return {
            "time_metrics/end_to_end(s)": seconds / num_steps,
            "time_metrics/data_loading(s)": sum(loading) / len(loading),
            "time_metrics/data_loading(%)": 100 * sum(loading) / seconds,
            "time_metrics/plan_wait(s)": counted.waited,
        }

    def _peak_memory(self) -> dict[str, float]:
        peak = self.device_memory_monitor.get_peak_stats()
        return {
            "memory/max_active(GiB)": peak.max_active_gib,
            "memory/max_active(%)": peak.max_active_pct,
            "memory/max_reserved(GiB)": peak.max_reserved_gib,
            "memory/max_reserved(%)": peak.max_reserved_pct,
            "memory/num_alloc_retries": peak.num_alloc_retries,
            "memory/num_ooms": peak.num_ooms,
        }

    def _progress(self, step: int, seconds_per_step: float) -> dict[str, float]:
        """Epochs and the time to the end, where they are known: a process takes longer for its first step."""
        epoch, left = self.run.epoch_at(step), self.run.num_steps - step
        known = {} if epoch is None else {"epoch": epoch}
        return known if step == self.first_step else known | {"time_metrics/eta(s)": left * seconds_per_step}

    def _tokens_seen(self, extra_metrics: Any) -> float:
        if self.tokens_seen is not None:
            return self.tokens_seen()
        return float(extra_metrics.get("n_tokens_seen", 0)) / self.parallel_dims.cp

    def _learned(self) -> dict[str, float]:
        """The share of the documents' tokens that have a label, of the steps since the last line."""
        if self.tokens_and_labels is None:
            return {}
        tokens, labels = self.tokens_and_labels.tolist()
        self.tokens_and_labels.zero_()
        return {"learned_tokens(%)": 100 * labels / max(tokens, 1)}

    def start_validation(self) -> None:
        """Begins to count a validation pass: steps since the last line, and a checkpoint, are none of its speed."""
        self.ntokens_since_last_log, self.time_last_log = 0, time.perf_counter()

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Logs a validation pass. The next line of a step counts from here."""
        super().log_validation(loss, step, extra_metrics)  # type: ignore[misc]
        self.count.take()
        self.last_logged = step
        self.data_loading_times.clear()
        self._print("validate step", step, extra_metrics or {})

    def _print(self, what: str, step: int, metrics: dict[str, float]) -> None:
        """Logs a line of metrics that torchtitan's own line does not show."""
        if metrics:
            named = (f"{name.removeprefix('validation_metrics/')}: {value:.4f}" for name, value in metrics.items())
            logger.info(f"{what}: {step}  {'  '.join(named)}")

    def _report_waiting(self, step: int, seconds: float) -> None:
        """Logs the time waited for plans where it is noticeable. The first step always waits."""
        if step != self.first_step and seconds > NOTICEABLE:
            first = self.last_logged + 1
            steps = f"Step {step}" if first == step else f"Steps {first} to {step} together"
            logger.info(f"{steps} waited {seconds:.1f} s for plans")

    def _max_loss(self) -> float:
        loss, count = reduced(self.losses.sum_and_count(), group_of(self.parallel_dims, "cp"))
        mean = torch.where(count > 0, loss / count.clamp(min=1), -torch.inf)
        return reduced(mean, group_of(self.parallel_dims, "batch"), dist.ReduceOp.MAX).item()


def _is_rate(name: str) -> bool:
    """Whether a metric of torchtitan is the learning rate: "lr", or "lr/" and a group's name."""
    return name.partition("/")[0] == "lr"


def step_line(step: int, num_steps: int, metrics: dict[str, float]) -> str:
    """The log's line of a step; what is not in its metrics is left out."""
    texts = {
        "loss_metrics/global_avg_loss": "  loss: {:.5f}",
        "grad_norm": "  grad_norm: {:.4f}",
        "lr": "  lr: {:.2e}",
        "epoch": "  epoch: {:.2f}",
        "learned_tokens(%)": "  learned: {:.0f}%",
        "throughput_of_all_gpus(tps)": "  tokens/s: {:,.0f}",
        "throughput(tps)": "  per GPU: {:,.0f}",
        "mfu(%)": "  MFU: {:.1f}%",
        "memory/max_reserved(GiB)": "  memory: {:.2f} GiB",
        "memory/max_reserved(%)": " ({:.0f}%)",
    }
    parts = [text.format(metrics[name]) for name, text in texts.items() if name in metrics]
    if "time_metrics/eta(s)" in metrics:
        parts.append(f"  ETA: {duration(metrics['time_metrics/eta(s)'])}")
    return f"step: {step:,}/{num_steps:,}{''.join(parts)}"


def duration(seconds: float) -> str:
    """Such as "45 s", "12 min", "3 h 05 min" or "2 d 04 h"."""
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours == 0:
        return f"{minutes} min"
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24:02} h"
