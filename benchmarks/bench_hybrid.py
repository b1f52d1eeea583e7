#!/usr/bin/env python3
"""Times steps of layers of Qwen3.5 9B's shapes: what context parallelism costs, and torchtitan's own model without it.

    python benchmarks/bench_hybrid.py [--gpus 2] [--tokens 32768] --output benchmarks/results/hybrid_h200x2.json

All ways read the same packed documents, those of bench_train.py, through torchtitan 0.3's text data set: up to a
quarter of the pack over all GPUs. Weights are random. Step times are medians over packs after the first ones, as a step
may have to compile a kernel. What context parallelism costs is the step, less one without attention, less the ideal
attention: full attention, recurrence and convolution of the same packs, each whole on one GPU, divided by the GPUs.

Ways
  ours            context parallelism over all GPUs
  ours, not compiled
  no attention    the same without attention, recurrence, convolution and their exchanges: the rest of a step
  no CP, ours     a pack of `tokens` for each GPU, data parallelism (FSDP)
  no CP, stock    the same by torchtitan's own model of text, with flex_attention (without its search for the fastest
                  kernel) and the kernels of FlashQLA, which fla calls. Not compiled: torchtitan compiles whole blocks,
                  which fla's calls refuse
  no CP, ours, not compiled
"""

import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bench_linear
import torch
from bench_models import QWEN3_5, QWEN3_5_TEXT, Case
from bench_train import RECORD, copy_tokenizer, documents, ended_well, ideal_seconds, speed_table, torchrun
from figures import Row, parts, recording_parser, save, table
from steps import Steps

import torchtitan_magi as magi
from torchtitan_magi.calibrate import facts_of_run, gpu_ms

WAYS = {  # -> options
    "ours": "",
    "ours, not compiled": "--compile.no-enable",
    "no attention": "",
    "no CP, ours": "",
    "no CP, stock": "",
    "no CP, ours, not compiled": "--compile.no-enable",
}
WARM_UP = 5  # steps before timing
TIMEOUT = 420  # seconds per run, in which kernels may have to be compiled
HEADS = QWEN3_5_TEXT["linear_num_key_heads"], QWEN3_5_TEXT["linear_num_value_heads"]


def run(way: str, arguments: Any) -> Row:
    """A row of `speed_table`; what was printed, if the run failed."""
    gpus, tokens, cp = arguments.gpus, arguments.tokens, 1 if way.startswith("no CP") else arguments.gpus
    case = Case("qwen3_5", QWEN3_5, arguments.layers, tokens * cp, "selective", "documents", packs=gpus // cp, cp=cp)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        case.write(folder)
        command = [*torchrun(gpus), __file__, RECORD, way, name, str(tokens * gpus), str(case.tokens)]
        command += [str(arguments.layers), steps := str(arguments.steps)]
        command += ["--job.config_file", f"{name}/bench.toml", "--training.steps", steps]
        command += ["--training.dataloader.num_workers", "1", *WAYS[way].split()]
        if not ended_well(command, folder / "log", TIMEOUT):
            return {"error": (folder / "log").read_text()[-3000:]}
        ranks = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    seconds = statistics.median(ranks[0]["seconds"][WARM_UP:])
    ideal = [statistics.median(map(sum, rank["ideal"][WARM_UP:])) for rank in ranks if rank["ideal"]]
    return {
        "strategy": way, "tokens_per_gpu": tokens, "checkpointing": "selective", "cp": cp, "step_ms": 1e3 * seconds,
        "tokens_per_s": tokens * gpus / seconds, "ideal_attention_ms": 1e3 * max(ideal) if ideal else None,
        "peak_memory_gib": max(rank["peak_gib"] for rank in ranks),
        **{name: ranks[0][name] for name in ("losses", "seconds", "ideal")},
    }  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """The demo's, without its chat template, whose tags torchtitan's own tokenizer does not know."""
    copy_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def record_run() -> None:
    """One process of a run, whose steps are timed."""
    way, folder, pack, *numbers = sys.argv[2:8]
    tokens, layers, steps = map(int, numbers)
    sys.argv[1:8] = []
    import datasets
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.hf_datasets import DatasetConfig, text_datasets

    text_datasets.DATASETS["documents"] = DatasetConfig(
        path="",
        loader=lambda _: datasets.Dataset.from_list(documents(int(pack))),
        sample_processor=lambda row: row["text"],
    )
    metrics: Any = MetricsProcessor
    plans: list[Any] = []  # per step: its plan and a rank's heads
    train: Callable[[], None] = partial(train_stock, folder, tokens, layers, steps)
    if way != "no CP, stock":
        from torchtitan_magi.train import main
        from torchtitan_magi.training.metrics import PlanMetrics

        metrics, train = PlanMetrics, main
        prepare_ours(plans, with_attention=way != "no attention")
    recorded = Steps(metrics)
    train()
    timed = plans[1 : len(recorded.times)]
    ideal = ideal_of_layers(timed, layers) if way == "ours" and torch.cuda.is_available() else []
    record = {"seconds": recorded.seconds, "losses": recorded.losses, "ideal": ideal} | recorded.peaks
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(record))


def prepare_ours(plans: list[Any], with_attention: bool) -> None:
    """Has our Trainer add each step's plan and a rank's heads to `plans`, and leave out attention of both kinds."""
    from torchtitan_magi.titan.v03 import attention
    from torchtitan_magi.titan.v03.families import delta_net
    from torchtitan_magi.training.batches.planner import MagiRuntime

    bind = MagiRuntime.bind

    def remember_plan(self, batch):  # type: ignore[no-untyped-def]
        plans.append((batch.plans[0], self.heads))
        return bind(self, batch)

    MagiRuntime.bind = remember_plan  # type: ignore[method-assign]
    if not with_attention:  # all gradients still exist
        attention.attend = lambda q, k, v, *_: (q + 0 * (k.mean() + v.mean()), None)
        delta_net.convolve = lambda x, weight, *_: x + 0 * weight.mean()
        delta_net.recur = lambda q, k, v, g, beta, *_: v + 0 * (q.mean() + k.mean() + g.mean() + beta.mean())


def ideal_of_layers(plans: list[Any], layers: int) -> list[list[float]]:
    """Seconds of full attention, the rule and the convolution in all layers, forward and backward: of each plan's pack,
    whole on this GPU, divided by the plan's ranks."""
    gc.collect()  # the run's model
    torch.cuda.empty_cache()
    kinds = (QWEN3_5_TEXT["layer_types"] * layers)[:layers]
    full, linear = (kinds.count(f"{kind}_attention") for kind in ("full", "linear"))
    calls = bench_linear.operations(plans[0][0].total_tokens, HEADS).values()
    found = []
    for plan, heads in plans:
        alone = magi.make_plan(plan.slices, plan.total_tokens, cp_size=1)
        seconds = [full * ideal_seconds(plan, heads, forwards=1)]
        for rows, weights, dout, call in calls:
            layer = partial(lambda call, plan, *x: call(*x, plan), call, alone)
            both = partial(bench_linear.both, layer, [*rows, *weights], dout)
            both()  # the first call also makes tables
            seconds.append(1e-3 * linear * gpu_ms(both, bench_linear.QUEUED) / plan.cp_size)
        found.append(seconds)
    return found


def train_stock(folder: str, tokens: int, layers: int, steps: int) -> None:
    """Trains torchtitan's own model of text, with FSDP over all GPUs."""
    from torchtitan.components import loss, metrics, optimizer
    from torchtitan.config.configs import CommConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models import qwen3_5
    from torchtitan.tools.logging import init_logger
    from torchtitan.trainer import Trainer

    def without_vision(model, **options):  # type: ignore[no-untyped-def]
        model.vision_encoder = None
        return qwen3_5.parallelize_qwen3_5(model, **options)

    qwen3_5.Qwen35Model._prepare_multimodal_embeds = lambda self, tokens, **_: self.tok_embeddings(tokens)
    fit_to_torch()
    calls = calls_of_flash_qla()
    init_logger()
    spec = qwen3_5.model_registry("9B")
    spec.model.layers = spec.model.layers[:layers]
    spec.parallelize_fn, spec.state_dict_adapter = without_vision, None
    inner = loss.CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    trainer = Trainer.Config(
        model_spec=spec,
        hf_assets_path=folder,
        dump_folder=f"{folder}/outputs",
        loss=loss.ChunkedLossWrapper.Config(loss_fn=inner),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="documents", num_workers=1),
        optimizer=optimizer.default_adamw(lr=8e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=tokens, steps=steps, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # the other ones need a newer torch
        activation_checkpoint=SelectiveAC.Config(),
        comm=CommConfig(init_timeout_seconds=TIMEOUT, train_timeout_seconds=TIMEOUT),  # for another rank's compiler
    ).build()
    try:
        trainer.train()
    finally:
        trainer.close()
    assert calls, "fla has not called FlashQLA"


def fit_to_torch() -> None:
    """Lets torchtitan 0.3 train with torch 2.11, and without minutes of search for flex_attention's fastest kernel."""
    from torch.nn.attention.flex_attention import flex_attention
    from torchtitan.distributed import fsdp, utils
    from torchtitan.models.common import attention

    from torchtitan_magi.training.process.timeouts import set_pg_timeouts

    flex, create_mask, shard = attention.FlexAttention, attention._compiled_create_block_mask, fsdp.fully_shard
    searches = ("max_autotune", "coordinate_descent_tuning")
    chosen = {name: value for name, value in flex.inductor_configs.items() if name not in searches}
    flex._compiled_flex_attn = torch.compile(flex_attention, options=chosen)
    # full blocks are kept by themselves, without being asked
    attention._compiled_create_block_mask = lambda *x, separate_full_blocks, **options: create_mask(*x, **options)

    def shard_each(modules, **options):  # type: ignore[no-untyped-def]
        for module in modules if isinstance(modules, list) else [modules]:
            shard(module, **options)

    utils.set_pg_timeouts = set_pg_timeouts
    fsdp.fully_shard = shard_each  # gradients of a unit have one dtype: the head's are sums in float32, the norm's not


def calls_of_flash_qla() -> list[None]:
    """A list that grows with each call."""
    import flash_qla

    call, calls = flash_qla.chunk_gated_delta_rule, []

    def counted(*arguments, **options):  # type: ignore[no-untyped-def]
        calls.append(None)
        return call(*arguments, **options)

    flash_qla.chunk_gated_delta_rule = counted
    return calls


def cost_table(found: dict[str, Any]) -> str:
    """What a step takes beyond one without attention and the ideal attention."""
    by = {row["strategy"]: row for row in found["rows"]}
    if not {"ours", "no attention"} <= set(by) or by["ours"]["ideal_attention_ms"] is None:
        return ""
    step, without, ideal = by["ours"]["step_ms"], by["no attention"]["step_ms"], by["ours"]["ideal_attention_ms"]
    cells = [f"{ms:,.0f}" for ms in (step, without, ideal)]
    columns = ["model", "GPUs", "step, ms", "without attention, ms", "ideal attention, ms", "left for CP"]
    left = f"{100 * (step - without - ideal) / step:.1f}%"
    return table(columns, [["Qwen3.5 9B's shapes", found["num_gpus"], *cells, left]])


def tables(found: dict[str, Any]) -> str:
    """Steps of each way, and what context parallelism costs."""
    return f"{speed_table(found)}\n\n{cost_table(found)}"


PARTS: dict[str, Callable[[], str]] = {"training-hybrid": parts(tables, "hybrid_*")}  # of the docs


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=2, help="number of GPUs")
    parser.add_argument("--tokens", type=int, default=32768, help="per GPU and step")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--steps", type=int, default=16, help=f"of each run, more than {WARM_UP + 2}")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY", help="to time, see above")
    arguments = parser.parse_args()
    found: dict[str, Any] = facts_of_run(arguments.commit) | {"num_gpus": arguments.gpus, "layers": arguments.layers}
    found["rows"] = []
    for way in arguments.ways:
        row = run(way, arguments)
        if "error" in row:
            print(f"{way} FAILED\n{row['error']}", flush=True)
            continue
        print(f"{way}: {row['step_ms']:.1f} ms a step, {row['peak_memory_gib']:.1f} GiB", flush=True)
        found["rows"].append(row)
        save(found, arguments.output)  # after every run: a benchmark that is cut short leaves what it has
    print(tables(found))


if __name__ == "__main__":
    record_run() if sys.argv[1:2] == [RECORD] else main()
