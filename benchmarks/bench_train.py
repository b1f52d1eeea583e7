#!/usr/bin/env python3
"""Times torchtitan training steps: ours, torchtitan's own flex context parallelism, and no context parallelism.

    python benchmarks/bench_train.py [--gpus 4] [--tokens 16384 65536] [--output benchmarks/results/train_h200x4.json]
    python benchmarks/bench_train.py --gpus 2 --tokens 65536 --model qwen3 --shapes 30B-A3B --expert-parallel 2
    python benchmarks/bench_train.py --layers 32 --strategies ours --checkpointing none selective full

The model has the layer shapes of llama3 8B but few layers; --model, --shapes and --layers choose others. All strategies
read the same packed documents through torchtitan's text data set with a loader worker: the sources of Python's standard
library, cut into documents whose lengths follow the histogram of bench_cp.py, up to a quarter of the pack over all
GPUs; documents end with EOS. Step times are means over all packs after the first ones. Ours also has the ideal time of
its attention: our kernel on the same packs, each whole on one GPU, times layers, divided by the GPUs of the pack. Each
fifth of the timed steps has its own speed, to see that a long run keeps it; --steps 606 give all about the same packs.
Each row has the longest time that a timed step waited for its batch and plan, and how many ends of epochs its log has:
with --options of a small data set it shows whether an epoch's end stalls a step.
Memory is that of the fullest GPU at its peak: allocated and reserved by PyTorch, and outside its allocator.

Strategies
  ours          this package, context parallelism over all GPUs
  ours, dp 2    the same, half the GPUs in context parallelism, two data-parallel ranks (FSDP)
  ours, tp 2    the same, half the GPUs in context parallelism, tensor parallelism of two
  no attention  ours without its attention and communication: the rest of a step
  flex          torchtitan's flex_attention with context parallelism and the load balancer for it ("ptrr")
  no CP         torchtitan's varlen attention, one pack of `tokens` per GPU, data parallelism (FSDP)
  no CP, flex   the same with its flex_attention
  flex_flash    flex on the kernels of FlashAttention-4, as torchtitan 0.3's attn_backend = "flex_flash" has it; needs
                the packages flash-attn-4 and nvidia-cutlass-dsl
  no CP, flex_flash  the same without context parallelism
"""

import argparse
import functools
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_cp import histogram_pack
from figures import part, recording_parser, result, save, table, thousands
from steps import Steps

from torchtitan_magi.calibrate import facts_of_run

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "assets" / "demo" / "tokenizer"
RECORD = "--record-to"  # first argument of a benchmark's file as a process of a run
WARM_UP = 5  # steps before timing
TIMEOUT = 300  # seconds per run
PATIENCE = 45  # seconds that torchrun has to end its ranks
PACKS = 40  # packs until documents repeat
CHARACTERS = 3  # per token, about, by the demo tokenizer
NAMES = {"ours": "ours", "flex": "torchtitan's flex_attention CP", "no attention": "ours without attention",
         "no CP": "no CP, torchtitan's varlen", "no CP, flex": "no CP, torchtitan's flex_attention",
         "flex_flash": "torchtitan's flex_flash CP", "no CP, flex_flash": "no CP, torchtitan's flex_flash",
         "no CP, stock": "no CP, torchtitan's own model"}  # fmt: skip
HOOKS = "--job.custom_config_module torchtitan_magi.titan --experimental.custom_import torchtitan_magi.titan"


@dataclass(frozen=True)
class Strategy:
    """Parallel degrees. A degree of 0 stands for all GPUs that the others leave."""

    attention: str  # suffix of the model's flavor
    cp: int = 1
    tp: int = 1
    dp: int = 1
    options: str = ""

    def on(self, gpus: int) -> "Strategy":
        """The same with degrees for so many GPUs."""
        rest = gpus // max(1, self.cp * self.tp * self.dp)
        return replace(self, cp=self.cp or gpus // (self.tp * self.dp), dp=self.dp or rest)


STRATEGIES = {
    "ours": Strategy("varlen", cp=0, options=HOOKS),
    "ours, dp 2": Strategy("varlen", cp=0, dp=2, options=HOOKS),
    "ours, tp 2": Strategy("varlen", cp=0, tp=2, options=HOOKS),
    "no attention": Strategy("varlen", cp=0, options=HOOKS),
    "flex": Strategy("flex", cp=0, options="--parallelism.context_parallel_load_balancer ptrr"),
    "flex_flash": Strategy("flex_flash", cp=0, options="--parallelism.context_parallel_load_balancer ptrr"),
    "no CP": Strategy("varlen", dp=0),
    "no CP, flex": Strategy("flex", dp=0),
    "no CP, flex_flash": Strategy("flex_flash", dp=0),
}


def run(name: str, tokens: int, mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second over all GPUs, and GiB at the peak of the fullest one. mode: of activation checkpointing."""
    strategy = STRATEGIES[name].on(arguments.gpus)
    with tempfile.TemporaryDirectory() as folder:
        command = [*torchrun(arguments.gpus), __file__, RECORD, folder]
        command += [arguments.model, arguments.shapes, str(arguments.layers)]
        # under full activation checkpointing the forward runs once more
        forwards = 0 if name == "no attention" else 1 + (mode == "full")
        command += [str(tokens * arguments.gpus), str(forwards), "--model.name", arguments.model]
        command += ["--model.flavor", f"bench_{strategy.attention}", "--model.hf_assets_path", "assets/demo/tokenizer"]
        command += ["--training.dataset", "documents", "--training.dataloader.num_workers", "1"]
        command += ["--training.local_batch_size", "1", "--training.seq_len", str(tokens * strategy.cp * strategy.tp)]
        command += ["--training.steps", str(arguments.steps), "--metrics.log_freq", "1", "--job.dump_folder", folder]
        command += ["--parallelism.context_parallel_degree", str(strategy.cp)]
        command += ["--parallelism.tensor_parallel_degree", str(strategy.tp)]
        command += ["--parallelism.data_parallel_shard_degree", str(strategy.dp), "--comm.trace_buf_size", "0"]
        command += ["--parallelism.expert_parallel_degree", str(arguments.expert_parallel)]
        command += ["--activation_checkpoint.mode", mode, "--activation_checkpoint.selective_ac_option", "op"]
        command += [*strategy.options.split(), *arguments.options.split()]
        if not ended_well(command, Path(folder, "log"), TIMEOUT):
            return {"error": Path(folder, "log").read_text()[-3000:]}
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("rank*.json")]
        epochs = len(set(re.findall(r"end of epoch (\d+)", Path(folder, "log").read_text())))
    times = ranks[0]["seconds"][WARM_UP:]  # packs differ in their work, so all of them count
    seconds = statistics.mean(times)
    fifths = [float(part.mean()) for part in np.array_split(times, 5)]
    ideal = [statistics.mean(rank["ideal_attention"][WARM_UP:]) for rank in ranks if rank["ideal_attention"]]
    return {
        "tokens_per_gpu": tokens, "checkpointing": mode, "cp": strategy.cp, "tp": strategy.tp, "dp_shard": strategy.dp,
        "tokens_per_s": tokens * arguments.gpus / seconds, "step_ms": 1e3 * seconds,
        "tokens_per_s_by_fifth": [tokens * arguments.gpus / fifth for fifth in fifths],
        "longest_data_wait_ms": 1e3 * max(max(rank["data_waits"][WARM_UP + 1 :]) for rank in ranks),
        "ends_of_epochs": epochs,
        "ideal_attention_ms": 1e3 * max(ideal) if ideal else None,
        "peak_memory_gib": max(rank["peak_gib"] for rank in ranks),
        "reserved_gib": max(rank["reserved_gib"] for rank in ranks),
        "outside_gib": max(rank["outside_gib"] for rank in ranks), "loss": ranks[0]["losses"][-1],
    }  # fmt: skip


def torchrun(num_gpus: int) -> list[str]:
    """The command that starts a process on each GPU; the file that they run and its arguments come behind it."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}"]


def copy_tokenizer(folder: Path) -> None:
    """Puts the demo's tokenizer into a folder."""
    for path in TOKENIZER.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())


def ended_well(command: Sequence[str], log: Path, timeout: float) -> bool:
    """Whether a torchrun ended without an error. What it prints is written to ``log``.

    Args:
        timeout: seconds, after which it is ended, and its ranks with it; so they are if this process is told to end.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with log.open("w") as out:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        job = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            return job.wait(timeout) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            job.terminate()  # ranks are in process groups of their own: torchrun ends them
            with suppress(subprocess.TimeoutExpired):
                job.wait(PATIENCE)
            job.kill()


def record_run() -> None:
    """One process of a run: torchtitan's entry with the model and the data of the benchmark."""
    folder, model, shapes, layers, pack, forwards = sys.argv[2:8]
    sys.argv[1:8] = []

    import datasets
    import torch
    import torchtitan.train
    from torchtitan.hf_datasets import DatasetConfig, text_datasets
    from torchtitan.protocols.train_spec import get_train_spec

    flavors: Any = get_train_spec(model).model_args
    for attention in ("flex", "flex_flash", "varlen"):
        kind = attention.removesuffix("_flash")
        flavors[f"bench_{attention}"] = replace(
            flavors[shapes], n_layers=int(layers), attn_type=kind, attn_mask_type="block_causal"
        )
    if "bench_flex_flash" in sys.argv:
        use_flex_flash()
    text_datasets.DATASETS["documents"] = DatasetConfig(
        path="",
        loader=lambda _: datasets.Dataset.from_list(documents(int(pack))),
        sample_processor=lambda row: row["text"],
    )
    packs: list[Any] = []  # per step: its plan and a rank's heads
    if "torchtitan_magi.titan" in sys.argv:  # after the flavors, which it extends
        from torchtitan_magi.titan.v02 import attention as wrapper
        from torchtitan_magi.titan.v02.trainer import MagiTrainer as Trainer
        from torchtitan_magi.training.batches.planner import MagiRuntime
        from torchtitan_magi.training.metrics import PlanMetrics as Metrics

        bind = MagiRuntime.bind

        def remember_plan(self, batch):  # type: ignore[no-untyped-def]
            packs.append((batch.plans[0], self.heads))
            return bind(self, batch)

        MagiRuntime.bind = remember_plan  # type: ignore[method-assign]
        if not int(forwards):  # all gradients still exist
            wrapper.attend = lambda q, k, v, *_: (q + 0 * (k.mean() + v.mean()), None)
    else:
        from torchtitan.components.metrics import MetricsProcessor as Metrics
        from torchtitan.train import Trainer
    steps = Steps(Metrics)
    torchtitan.train.main(Trainer)
    record: dict[str, Any] = {"seconds": steps.seconds, "losses": steps.losses, "data_waits": steps.waits}
    record |= {"ideal_attention": []} | steps.peaks
    if packs and int(forwards) and torch.cuda.is_available():
        timed = packs[1 : len(steps.times)]  # those of "seconds"
        record["ideal_attention"] = [int(layers) * ideal_seconds(plan, heads, int(forwards)) for plan, heads in timed]
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(record))


def use_flex_flash() -> None:
    """Gives torchtitan 0.2.2's flex_attention the kernels and blocks of 0.3's "flex_flash"."""
    from torchtitan.models import attention

    flex: Any = attention.FlexAttentionWrapper
    flex._compiled_flex_attn = functools.partial(flex._compiled_flex_attn, kernel_options={"BACKEND": "FLASH"})
    create = attention._compiled_create_block_mask
    attention._compiled_create_block_mask = functools.partial(create, BLOCK_SIZE=(128, 128))


def ideal_seconds(plan: Any, heads: Any, forwards: int) -> float:
    """One layer's attention, so many forwards and a backward, over the whole pack on this GPU, divided by the plan's
    ranks."""
    import torch

    from torchtitan_magi import flex_flash_attn

    numbers = heads.num_heads_q, heads.num_heads_kv, heads.num_heads_kv, heads.num_heads_q
    shapes = [(plan.total_tokens, number, heads.head_dim) for number in numbers]
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    for _ in range(2):  # the first call also makes work lists
        start.record()
        out, _ = flex_flash_attn(*inputs, plan.slices)
        middle.record()
        torch.autograd.grad(out, inputs, dout)
        end.record()
    torch.cuda.synchronize()
    return 1e-3 * (forwards * start.elapsed_time(middle) + middle.elapsed_time(end)) / plan.cp_size


def documents(pack: int) -> list[dict[str, str]]:
    """The standard library's sources, again and again, cut into documents of PACKS packs."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    text = "".join(path.read_text(errors="ignore") for path in paths if "site-packages" not in path.parts)
    lengths = np.concatenate([np.diff(histogram_pack(pack, seed)) for seed in range(PACKS)]) * CHARACTERS
    starts = np.cumsum(lengths) % (len(text) - lengths.max())
    return [{"text": text[start : start + length]} for start, length in zip(starts, lengths, strict=True)]


# -------------------------------------------------------------------------------------------------------------- tables


def speed_table(*files: dict[str, Any]) -> str:
    """Steps of each strategy."""
    lines = []
    for found in files:
        for row in found["rows"]:
            mode = row.get("checkpointing") or re.search(r"checkpoint.mode (\w+)", found["options"])[1]  # type: ignore[index]
            speed = row["tokens_per_s"] / found["num_gpus"]
            lines.append([
                found["num_gpus"], found["layers"], thousands(row["tokens_per_gpu"]), mode,
                NAMES.get(row["strategy"], row["strategy"]), f"{speed:,.0f}", f"{row['step_ms']:,.0f}",
                f"{row['peak_memory_gib']:.1f}",
            ])  # fmt: skip
    columns = ["GPUs", "layers", "tokens per GPU", "checkpointing", "attention", "tokens/s per GPU", "step, ms"]
    return table([*columns, "peak GiB"], lines)


def steadiness_table(*files: dict[str, Any]) -> str:
    """Runs of many steps: whether they keep their speed, and whether a step waits for data."""
    lines = []
    for found in files:
        (row,) = found["rows"]
        steps = re.search(r"--steps (\d+)", found["command"])
        assert steps
        fifths = [f"{speed / found['num_gpus']:,.0f}" for speed in row["tokens_per_s_by_fifth"]]
        wait = f"{row['longest_data_wait_ms']:.1f}"
        lines.append([steps[1], thousands(row["tokens_per_gpu"]), ", ".join(fifths), row["ends_of_epochs"], wait])
    columns = ["steps", "tokens per GPU", "tokens/s per GPU, by fifths of the run", "ends of epochs"]
    return table([*columns, "longest wait for data, ms"], lines)


def cost_of_cp() -> str:
    """What a step takes beyond one without attention and the ideal attention."""
    lines = []
    for name in ("train_h200x2", "train_h200x4", "train_moe_balanced_h200x2"):
        found = result(name)
        by = {row["strategy"]: row for row in found["rows"]}
        step, without, ideal = by["ours"]["step_ms"], by["no attention"]["step_ms"], by["ours"]["ideal_attention_ms"]
        model = "Qwen3 30B-A3B's shapes" if "moe" in name else "Llama 3 8B's shapes"
        left = f"{100 * (step - without - ideal) / step:.1f}%"
        lines.append([model, found["num_gpus"], f"{step:,.0f}", f"{without:,.0f}", f"{ideal:,.0f}", left])
    return table(["model", "GPUs", "step, ms", "without attention, ms", "ideal attention, ms", "left for CP"], lines)


def memory_table(*files: dict[str, Any]) -> str:
    lines = [
        [
            f"{row['tokens_per_gpu']:,}", row["checkpointing"], NAMES[row["strategy"]],
            f"{row['peak_memory_gib']:.1f}", f"{row['reserved_gib']:.1f}", f"{row['outside_gib']:.1f}",
            f"{row['tokens_per_s'] / found['num_gpus']:,.0f}", f"{row['step_ms']:,.0f}",
        ]
        for found in files
        for row in found["rows"]
    ]  # fmt: skip
    columns = ["tokens per GPU", "checkpointing", "attention", "peak GiB", "reserved GiB", "outside PyTorch, GiB"]
    return table([*columns, "tokens/s per GPU", "step, ms"], lines)


PARTS: dict[str, Callable[[], str]] = {  # of the docs
    "training": part(speed_table, "train_8b_64k_h200x2", "train_8b_h200x4", "train_h200x2", "train_h200x4"),
    "training-rivals": part(speed_table, "train_rivals_h200"),
    "training-long": part(steadiness_table, "train_long_h200x2", "train_epochs_h200x2"),
    "training-moe": part(speed_table, "train_moe_h200x2", "train_moe_balanced_h200x2"),
    "training-cp": cost_of_cp,
    "checkpointing": part(memory_table, "train_checkpointing_h200x2", "train_8b_64k_h200x2"),
}


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=4, help="number of GPUs")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536], help="per GPU and step")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES, help="to time, see above")
    parser.add_argument("--steps", type=int, default=25, help="of each run, at least 11: the first ones are not timed")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--model", default="llama3", choices=["llama3", "qwen3"], help="architecture")
    parser.add_argument("--shapes", default="8B", help="flavor of the model whose layers are trained")
    parser.add_argument("--expert-parallel", type=int, default=1, help="degree, for mixtures of experts")
    parser.add_argument("--checkpointing", nargs="+", default=["none"], choices=("none", "selective", "full"),
                        help="of activations; selective: by operation")  # fmt: skip
    parser.add_argument("--options", default="--compile.enable", help="torchtitan overrides for all")
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP + 6:  # times between steps, a fifth of which has a mean of its own
        parser.error(f"--steps is {arguments.steps}; give at least {WARM_UP + 6}")
    options = {key: getattr(arguments, key) for key in ("model", "shapes", "layers", "options")}
    options |= {"num_gpus": arguments.gpus, "expert_parallel": arguments.expert_parallel, "rows": []}
    found: dict[str, Any] = facts_of_run(arguments.commit) | options
    for tokens in arguments.tokens:
        for name, mode in itertools.product(arguments.strategies, arguments.checkpointing):
            row = {"strategy": name} | run(name, tokens, mode, arguments)
            if "error" in row:
                print(f"{name}, checkpointing {mode}, {tokens} tokens FAILED\n{row['error']}", flush=True)
                continue
            print(", ".join(f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}"
                            for key, value in row.items()), flush=True)  # fmt: skip
            found["rows"].append(row)
            save(found, arguments.output)  # after every run: a benchmark that is cut short leaves what it has
    print(speed_table(found))


if __name__ == "__main__":
    record_run() if sys.argv[1:2] == [RECORD] else main()
