"""The ready configurations: torchtitan reads them, they fit their hardware, and a batch of them can be planned."""

import json
import re
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
from support.adapter import check, read_job, read_model
from support.published import needs_0_3, shipped_model
from support.runs import IS_0_3, ROOT, call

import torchtitan_magi as magi
from torchtitan_magi.planning.cost_model import Heads

from torchtitan_magi.launch import num_processes  # isort: skip

FILES = sorted((ROOT / "train_configs").glob("*.toml"))
CONFIGS = [path for path in FILES if IS_0_3 or not needs_0_3(tomllib.loads(path.read_text()))]


def checked(path, overrides):
    """[parallelism], the sizes in [training], and the model."""
    check(path, *overrides)
    job = read_job(path, *overrides)
    sizes = SimpleNamespace(seq_len=job.training.seq_len, local_batch_size=job.training.local_batch_size)
    return SimpleNamespace(**vars(job.parallelism)), sizes, read_model(path, *overrides)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_complete_and_fits_its_hardware(path, tmp_path):
    text = path.read_text()
    overrides = ["--job.dump_folder", str(tmp_path)]
    if published := shipped_model(tomllib.loads(text)):
        (tmp_path / "config.json").write_text(json.dumps(published))
        overrides += ["--model.hf_assets_path", str(tmp_path)]
    parallelism, training, model = call(checked, path, overrides)
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    assert model.num_heads_kv % tp == 0
    assert training.seq_len % (2 * cp * tp) == 0  # torchtitan's rule
    experts, ranks = model.experts, parallelism.expert_parallel_degree
    assert ranks == 1 or (experts.num_experts % ranks == 0 and 8 % ranks == 0)  # inside a node
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


def defaults(path):
    job = read_job(path)
    return job.training.steps, job.lr_scheduler.warmup_steps


def test_torchtitans_defaults_are_those_that_count_as_not_given(tmp_path):
    from torchtitan_magi.training.batches.run_length import DEFAULT_STEPS, DEFAULT_WARMUP

    (tmp_path / "empty.toml").touch()
    assert call(defaults, tmp_path / "empty.toml") == (DEFAULT_STEPS, DEFAULT_WARMUP)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_line_that_is_not_a_default_says_why(path):
    plain = {"description", "name", "flavor", "seq_len", "steps", "seed", "enable", "freq", "log_freq"}
    plain.add("enable_tensorboard")
    for line in path.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            assert " # " in line or line.partition(" =")[0] in plain, line
