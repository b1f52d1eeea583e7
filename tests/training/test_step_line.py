"""The log says where a run is: which steps it names, what it says of them, by the same names with any torchtitan."""

from types import SimpleNamespace

import pytest
from support.errors import one_line
from support.parity import trained_anew
from support.runs import ROOT, corpus, watch

from torchtitan_magi.training.metrics import PlanMetrics, duration, step_line

TOKENS = 512  # of a step
NAMES = {
    "loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm", "lr", "epoch", "n_tokens_seen",
    "learned_tokens(%)",
    "throughput(tps)", "throughput_of_all_gpus(tps)", "tflops", "mfu(%)",
    "time_metrics/end_to_end(s)", "time_metrics/data_loading(s)", "time_metrics/data_loading(%)",
    "time_metrics/plan_wait(s)", "time_metrics/eta(s)",
    "memory/max_active(GiB)", "memory/max_active(%)", "memory/max_reserved(GiB)", "memory/max_reserved(%)",
    "memory/num_alloc_retries", "memory/num_ooms",
}  # fmt: skip


def test_the_first_and_the_last_step_are_logged_by_the_same_names():
    arguments = ["--training.steps", "5", "--metrics.log_freq", "2", "--lr_scheduler.warmup_steps", "2"]
    run = trained_anew("dp2", *arguments, entry="torchtitan_magi.train")
    assert [metrics["step"] for metrics in run.metrics] == [1, 2, 4, 5]
    first, *others = [metrics.keys() - {"step", "memory/outside_pytorch(GiB)"} for metrics in run.metrics]
    assert first == NAMES - {"time_metrics/eta(s)"}
    assert all(names == NAMES for names in others)
    assert run.metrics[-1]["time_metrics/eta(s)"] == 0
    for metrics in run.metrics:
        assert metrics["throughput_of_all_gpus(tps)"] == pytest.approx(2 * metrics["throughput(tps)"])
        assert metrics["epoch"] == pytest.approx(metrics["step"] * run.metrics[0]["epoch"])
    for metrics, steps in zip(run.metrics, [1, 1, 2, 1], strict=True):  # since the line before
        seconds = metrics["time_metrics/end_to_end(s)"] * steps
        assert metrics["throughput_of_all_gpus(tps)"] * seconds == pytest.approx(TOKENS * steps)
    assert run.metrics[1]["lr"] > run.metrics[0]["lr"] > 0


def report_validated_tokens(report):
    from torchtitan_magi.training.metrics import PlanMetrics

    stock = PlanMetrics.log_validation

    def log_validation(self, *arguments):
        report("validated", self.ntokens_since_last_log)
        stock(self, *arguments)

    PlanMetrics.log_validation = log_validation


def test_validation_between_two_lines_leaves_the_time_of_a_step_as_it_is():
    arguments = ["--training.steps", "9", "--metrics.log_freq", "4", "--validation.enable", "--validation.freq", "3"]
    arguments += ["--validation.dataset", "sft", "--validation.dataset_path", f"{corpus()}/validation.jsonl"]
    arguments += ["--validation.steps", "2", "--validation.seq_len", "256"]
    run = trained_anew("dp2", *arguments, entry="torchtitan_magi.train", setup=report_validated_tokens)
    assert [metrics["step"] for metrics in run.metrics] == [1, 4, 8, 9]
    for metrics in run.metrics:
        seconds = metrics["time_metrics/end_to_end(s)"]
        assert metrics["throughput_of_all_gpus(tps)"] * seconds == pytest.approx(TOKENS)
        if metrics["step"] > 1:
            assert metrics["time_metrics/eta(s)"] == pytest.approx(seconds * (9 - metrics["step"]))
    assert len({tokens for tokens in run.of("validated")}) == 1  # of validation alone, whatever steps came before


def test_the_page_on_metrics_has_all_of_them():
    page = (ROOT / "docs" / "how-to" / "metrics.md").read_text()
    assert [name for name in sorted(NAMES) if f"`{name}`" not in page] == []


def report_labels(report):
    from torchtitan_magi.training.batches.planner import MagiRuntime

    watch(
        MagiRuntime,
        "plan_ahead",
        lambda batch, *_: report("labels", batch.labels.tolist(), batch.branches.tolist()),
    )


def test_the_share_of_learned_tokens_is_that_of_the_documents_with_any_layout():
    options = {"entry": "torchtitan_magi.train", "setup": report_labels}
    runs = {name: trained_anew(name, **options) for name in ("cp1", "cp2", "cp2_accumulation")}
    shares = {name: [metrics["learned_tokens(%)"] for metrics in run.metrics] for name, run in runs.items()}
    assert shares["cp1"] == shares["cp2"] == shares["cp2_accumulation"]
    for share, (labels, branches) in zip(shares["cp1"], runs["cp1"].of("labels"), strict=False):
        learned = sum(label != -100 for row in labels for label in row)
        assert share == pytest.approx(100 * learned / sum(end - start for start, end, _ in branches))
        assert 0 < share < 100


def test_weights_and_biases_that_cannot_begin_end_the_run():
    """torchtitan logs an error, and goes on without."""
    processor = PlanMetrics()
    processor.logger = SimpleNamespace(number_of_loggers=1)
    options = SimpleNamespace(enable_wandb=True, enable_tensorboard=True)
    with one_line("metrics.enable_wandb is true, but no run of wandb could be started, .*; log in, set WANDB_MODE"):
        processor.count_work(0, SimpleNamespace(job_config=SimpleNamespace(metrics=options)), None, None)


def test_a_line_has_what_is_known():
    metrics = {"loss_metrics/global_avg_loss": 2.1234567, "grad_norm": 0.51, "lr": 2e-5, "throughput(tps)": 9100.4}
    assert step_line(3, 1000, metrics) == (
        "step: 3/1,000  loss: 2.12346  grad_norm: 0.5100  lr: 2.00e-05  per GPU: 9,100"
    )
    metrics = {"epoch": 1.8, "learned_tokens(%)": 36.7, "throughput_of_all_gpus(tps)": 72803.0, "mfu(%)": 41.23}
    metrics |= {"memory/max_reserved(GiB)": 48.1, "memory/max_reserved(%)": 60.2, "time_metrics/eta(s)": 11100.0}
    assert step_line(1200, 10_000, metrics) == (
        "step: 1,200/10,000  epoch: 1.80  learned: 37%  tokens/s: 72,803  MFU: 41.2%  memory: 48.10 GiB (60%)  "
        "ETA: 3 h 05 min"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (754, "13 min"), (3599, "1 h 00 min"), (172_700, "47 h 58 min"),
        (172_800, "2 d 00 h"),
    ],
)  # fmt: skip
def test_a_duration_is_short(seconds, text):
    assert duration(seconds) == text
