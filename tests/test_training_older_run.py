"""A checkpoint, loader state and reference file written at commit 7adc6a3 are resumed with the losses seen there."""

import json
import shutil
from pathlib import Path

import pytest
from training import train

WRITTEN = Path(__file__).parent / "data_7adc6a3"


def shrink_the_model(report):
    from torchtitan.models.llama3 import llama3_args
    from torchtitan.protocols.train_spec import get_train_spec

    for args in (llama3_args["debugmodel_varlen_attn"], *get_train_spec("llama3").model_args.values()):
        args.dim, args.n_heads, args.n_kv_heads, args.vocab_size, args.multiple_of = 16, 4, 2, 64, 16


def dpo(folder):
    """What the run in the folder reports for the steps that it takes; two ranks share each pack."""
    paths = {"job.dump_folder": "", "training.dataset_path": "pairs.jsonl", "model.hf_assets_path": "tokenizer"}
    arguments = [f"--{option}={folder}/{path}" for option, path in paths.items()]
    model = {"layers": 1, "setup": shrink_the_model}
    run = train(2, arguments, toml=folder / "dpo.toml", defaults=(), entry="torchtitan_magi.train", **model)
    names = ("step", "loss_metrics/global_avg_loss", "grad_norm", "n_tokens_seen")
    return [{name: metrics[name] for name in names} for metrics in run.metrics]


def test_a_run_of_that_commit_continues_with_equal_losses(tmp_path):
    shutil.copytree(WRITTEN, tmp_path, dirs_exist_ok=True)
    shutil.unpack_archive(WRITTEN / "checkpoint.tar.gz", tmp_path, filter="data")
    expected = json.loads((WRITTEN / "steps.json").read_text())
    for step, want in zip(dpo(tmp_path), expected, strict=True):
        assert step == pytest.approx(want, rel=1e-5, abs=0)
