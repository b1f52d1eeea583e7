"""Parts of the docs about memory: predicted, and measured in benchmarks/results/train_*.json. See write_docs.py."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from docs_figures import RESULTS, result, table

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.sizing.gpus import H100, H200
from torchtitan_magi.sizing.keeping.kinds import AUTO, OF_MODE, as_option
from torchtitan_magi.sizing.memory import GIB, host_memory, predict
from torchtitan_magi.sizing.predicted_run import Place, predict_run
from torchtitan_magi.sizing.run_setup import Setup

LAYOUTS = [(gpus, tokens) for gpus in (2, 8) for tokens in (16384, 32768, 65536, 131072)]  # GPUs, tokens on each
STRATEGIES = ("ours", "ours, dp 2", "ours, tp 2", "flex")  # "flex" has torchtitan's own loss, over all logits


def shapes_of(model: str, flavor: str) -> ModelConfig:
    """The model of a flavor of torchtitan's."""
    from torchtitan_magi.titan.v03.models import config_of, model_spec

    return config_of(model_spec(model, flavor, None).model)


def checkpointing_predicted() -> str:
    """GiB per GPU of Llama 3.1 8B by activation checkpointing."""
    setup = Setup(shapes_of("llama3", "8B"), 1, compiled=True, compiled_loss=True)
    rows = []
    for gpus, tokens in LAYOUTS:
        setups = [replace(setup, seq_len=gpus * tokens, cp=gpus, checkpointing=mode) for mode in OF_MODE]
        rows.append((gpus, f"{tokens:,}", *(f"{predict(each).total / GIB:.0f}" for each in setups)))
    return table(("GPUs", "tokens per GPU", *OF_MODE), rows)


def chosen() -> str:
    """What layers of Llama 3.1 8B are chosen to keep, of one document a pack on GPUs of one machine."""
    rows = []
    for gpu, gpus, tokens in (
        (H200, 2, 16384),
        (H200, 2, 131072),
        (H100, 8, 16384),
        (H100, 8, 65536),
        (H100, 8, 131072),
    ):
        place = Place(gpu, 8, (np.array([gpus * tokens]),))
        setup = Setup(shapes_of("llama3", "8B"), gpus * tokens, cp=gpus, compiled=True, compiled_loss=True)
        auto, full = (predict_run(replace(setup, checkpointing=mode), place) for mode in (AUTO, "full"))
        gib = f"{auto.memory.total / GIB:.0f} of {gpu.capacity / GIB:.0f}", f"{host_memory(auto.setup) / GIB:.0f}"
        seconds = f"{auto.time.total:.1f}", f"{full.time.total:.1f}"
        rows.append((f"{gpus} {gpu.name}", f"{tokens:,}", as_option(auto.setup.keepings), *gib, *seconds))
    columns = "GPUs", "tokens per GPU", "layers keep", "GiB", "of the host's", "a step, s", "all recomputed, s"
    return table(columns, rows)


def comparisons(facts: dict[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
    """Rows of bench_train.py's file that can be predicted, and the GiB of PyTorch's allocator predicted for each."""
    shapes = shapes_of(facts.get("model", "llama3"), facts.get("shapes", "8B"))
    model, compiled = replace(shapes, num_layers=facts["layers"]), "--compile.enable" in facts["options"]
    for row in facts["rows"]:
        if row["strategy"] not in STRATEGIES:
            continue
        setup = Setup(
            model,
            row["tokens_per_gpu"] * row["cp"] * row["tp"],
            dp_shard=row["dp_shard"],
            cp=row["cp"],
            tp=row["tp"],
            ep=facts.get("expert_parallel", 1),
            checkpointing=row.get("checkpointing", "none"),
            compiled=compiled,
            compiled_loss=compiled,
            whole_logits=row["strategy"] == "flex",
            by_02=True,  # all are runs of torchtitan 0.2.2
        )
        yield row, predict(setup).allocated / GIB


def memory_measured() -> str:
    """The prediction beside each measured run: GiB of PyTorch's allocator."""
    names = sorted(path.stem for path in RESULTS.glob("train_*.json"))
    rows = []
    for name in names:  # training.md says where they are from
        facts = result(name)
        for row, predicted in comparisons(facts):
            measured, mode = row["peak_memory_gib"], row.get("checkpointing", "none")
            model = f"{facts.get('model', 'llama3')} {facts.get('shapes', '8B')}, {facts['layers']} layers"
            run = (row["strategy"], row["cp"], f"{row['tokens_per_gpu']:,}", mode)
            rows.append((model, *run, f"{predicted:.1f}", f"{measured:.1f}", f"{predicted / measured - 1:+.1%}"))
    heads = ("model", "attention", "GPUs", "tokens per GPU", "checkpointing", "predicted", "measured", "error")
    return table(heads, rows)


PARTS: dict[str, Callable[[], str]] = {
    "memory-checkpointing": checkpointing_predicted,
    "memory-chosen": chosen,
    "memory-measured": memory_measured,
}
