"""What the checks of this folder run: a training in processes of its own, of tiny models on the tests' data.

Each check is a table of cases. `train` runs one and returns what its ranks reported: losses, gradient norms, metrics.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("tests", "benchmarks")]

from support import runs  # noqa: E402
from support.runs import DEBUG_TOML, TITAN, Run, TrainingError, corpus  # noqa: E402

__all__ = ["DEBUG_TOML", "ROOT", "TITAN", "Run", "TrainingError", "runs", "train"]

VERSIONS = ("0.2.2", "0.3.0")
TOMLS = {"SFT": DEBUG_TOML, "DPO": ROOT / "train_configs" / "dpo_debug.toml"}
# of tests/support/hf_models.py
KINDS = {"llama3": "llama", "qwen3": "qwen3", "qwen3 MoE": "qwen3_moe", "gpt_oss": "gpt_oss", "qwen3_5": "qwen3_5"}
train: Callable[..., Run] = partial(runs.train, defaults=(), layers=None, entry="torchtitan_magi.train")


def write_models(folder: Path, fields: Callable[[str], dict[str, int]] = lambda model: {}) -> None:
    """A folder of safetensors for each of KINDS that is not there yet. fields: of a model's config.json."""
    from support.hf_models import make_hf_folder

    for model, kind in KINDS.items():
        if not (folder / kind).exists():
            make_hf_folder(kind, folder=folder / kind, **fields(model))


def data_of(task: str) -> tuple[Path, Path]:
    """Files of "SFT" or "DPO": for training, for validation."""
    from support.preference import data

    folder, name = (data(), "pairs") if task == "DPO" else (corpus(), "train")
    return folder / f"{name}.jsonl", folder / "validation.jsonl"


def on_model(model: str, models: Path, task: str, seq_len: int, steps: int) -> list[str]:
    """Overrides that train one of KINDS, in ``models``, on the tests' data, and validate on them where that is on."""
    path, validation = data_of(task)
    return (
        f"--model.name {model.split()[0]} --model.flavor hf --model.hf_assets_path {models / KINDS[model]} "
        f"--training.steps {steps} --training.seq_len {seq_len} --training.dataset_path {path} "
        f"--validation.dataset_path {validation} --validation.seq_len {seq_len}"
    ).split()


def overrides_of(degrees: dict[str, int]) -> list[str]:
    """degrees: by torchtitan's names, such as "context_parallel"."""
    return [f"--parallelism.{name}_degree={degree}" for name, degree in degrees.items()]
