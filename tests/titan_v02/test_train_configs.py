"""The ready configurations: torchtitan reads them, they fit their hardware, and a batch of them can be planned."""

import importlib
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from support.published import CONFIGS as MODELS
from support.published import SHIPPED
from support.runs import ROOT
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_magi as magi
from torchtitan_magi.planning.cost_model import Heads

from torchtitan_magi.launch import num_processes  # isort: skip

CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_complete_and_fits_its_hardware(path, tmp_path):
    importlib.import_module("torchtitan_magi.titan")
    from torchtitan_magi.titan.v02.config import check_job_config
    from torchtitan_magi.titan.v02.models import args_of, config_of
    from torchtitan_magi.training.settings.model_folder import HF_FLAVOR, read_hf_config

    text = path.read_text()
    config = ConfigManager().parse_args(["--job.config_file", str(path)])
    flavors = get_train_spec(config.model.name).model_args
    attn_types = {name: args.attn_type for name, args in flavors.items()}
    check_job_config(config, attn_types | {HF_FLAVOR: "varlen"}, True)
    if config.model.flavor == HF_FLAVOR:
        published = MODELS[SHIPPED[Path(config.model.hf_assets_path).name]]
        (tmp_path / "config.json").write_text(json.dumps(published))
        config.model.hf_assets_path = str(tmp_path)
        model = read_hf_config(config, args_of)
    else:
        model = config_of(flavors[config.model.flavor])

    parallelism, training = config.parallelism, config.training
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    assert model.num_heads_kv % tp == 0
    assert training.seq_len % (2 * cp * tp) == 0  # torchtitan's rule
    named = re.search(r"(\d+) GPUs|two GPUs", text.partition("[job]")[0])
    assert num_processes(tomllib.loads(text), [], 0) == int(named[1] or 2)

    rng = np.random.default_rng(0)
    total = training.local_batch_size * training.seq_len
    lengths = np.minimum(rng.lognormal(7, 1.5, 10_000).astype(int) + 2, training.seq_len // 2)
    cu_seqlens = np.append(0, lengths.cumsum())
    cu_seqlens = np.append(cu_seqlens[cu_seqlens < total], total)
    heads = Heads(model.num_heads_q // tp, model.num_heads_kv // tp, model.head_dim)
    gpus_per_node = max(1, 8 // tp)
    plan = magi.make_plan(magi.varlen_causal(cu_seqlens), total, cp, heads=heads, gpus_per_node=gpus_per_node)
    assert {len(share.tokens) for share in plan.ranks} == {total // cp}
    assert plan.areas.max() <= 1.1 * plan.areas.mean()


def test_torchtitans_defaults_are_those_that_count_as_not_given():
    from torchtitan_magi.training.batches.run_length import DEFAULT_STEPS, DEFAULT_WARMUP

    config = ConfigManager().parse_args([])
    assert (config.training.steps, config.lr_scheduler.warmup_steps) == (DEFAULT_STEPS, DEFAULT_WARMUP)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_line_that_is_not_a_default_says_why(path):
    plain = {"description", "name", "flavor", "seq_len", "steps", "seed", "enable", "freq", "log_freq"}
    plain.add("enable_tensorboard")
    for line in path.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            assert " # " in line or line.partition(" =")[0] in plain, line
