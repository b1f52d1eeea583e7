"""A run of commit 7adc6a3, which packed records in another way, is not continued silently with other packs."""

import shutil
from pathlib import Path

import pytest
from support.runs import TrainingError, train

WRITTEN = Path(__file__).parent / "data_7adc6a3"


def shrink_the_model(report):
    from torchtitan.models.llama3 import llama3_args
    from torchtitan.protocols.train_spec import get_train_spec

    for args in (llama3_args["debugmodel_varlen_attn"], *get_train_spec("llama3").model_args.values()):
        args.dim, args.n_heads, args.n_kv_heads, args.vocab_size, args.multiple_of = 16, 4, 2, 64, 16


def dpo(folder):
    """Continues the run in the folder; two ranks share each pack."""
    paths = {"job.dump_folder": "", "training.dataset_path": "pairs.jsonl", "model.hf_assets_path": "tokenizer"}
    arguments = [f"--{option}={folder}/{path}" for option, path in paths.items()]
    model = {"layers": 1, "setup": shrink_the_model}
    train(2, arguments, toml=folder / "dpo.toml", defaults=(), entry="torchtitan_magi.train", **model)


def test_the_state_of_its_loader_is_refused(tmp_path):
    shutil.copytree(WRITTEN, tmp_path, dirs_exist_ok=True)
    shutil.unpack_archive(WRITTEN / "checkpoint.tar.gz", tmp_path, filter="data")
    with pytest.raises(TrainingError, match="has packing version 1, this program has 2; resume with the program"):
        dpo(tmp_path)
