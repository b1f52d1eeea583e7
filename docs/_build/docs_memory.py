"""Parts of the docs about memory: predicted, and measured in benchmarks/results/train_*.json. See write_docs.py."""

from collections.abc import Callable
from dataclasses import replace

from docs_figures import RESULTS, result, sources, table
from predict_memory import MODES, comparisons, shapes_of

from torchtitan_magi.sizing.memory import GIB, Setup, predict

LAYOUTS = [(gpus, tokens) for gpus in (2, 8) for tokens in (16384, 32768, 65536, 131072)]  # GPUs, tokens on each


def checkpointing_predicted() -> str:
    """GiB per GPU of Llama 3.1 8B by activation checkpointing."""
    setup = Setup(shapes_of("llama3", "8B"), 1, compiled=True, compiled_loss=True)
    rows = []
    for gpus, tokens in LAYOUTS:
        setups = [replace(setup, seq_len=gpus * tokens, cp=gpus, checkpointing=mode) for mode in MODES]
        rows.append((gpus, f"{tokens:,}", *(f"{predict(each).total / GIB:.0f}" for each in setups)))
    return table(("GPUs", "tokens per GPU", *MODES), rows)


def memory_measured() -> str:
    """The prediction beside each measured run: GiB of PyTorch's allocator."""
    names = sorted(path.stem for path in RESULTS.glob("train_*.json"))
    rows, used = [], []
    for name in names:
        facts = result(name)
        for row, predicted in comparisons(facts):
            measured, mode = row["peak_memory_gib"], row.get("checkpointing", "none")
            model = f"{facts.get('model', 'llama3')} {facts.get('shapes', '8B')}, {facts['layers']} layers"
            run = (row["strategy"], row["cp"], f"{row['tokens_per_gpu']:,}", mode)
            rows.append((model, *run, f"{predicted:.1f}", f"{measured:.1f}", f"{predicted / measured - 1:+.1%}"))
            used += [name] * (name not in used)
    heads = ("model", "attention", "GPUs", "tokens per GPU", "checkpointing", "predicted", "measured", "error")
    return f"{table(heads, rows)}\n\n{sources(*used)}"


PARTS: dict[str, Callable[[], str]] = {
    "memory-checkpointing": checkpointing_predicted,
    "memory-measured": memory_measured,
}
