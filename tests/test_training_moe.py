"""Experts train alike under every layout, and what is logged about them is right."""

import functools

import pytest
from training import new_folder, train

from loss_compare import COMMON, DEGREES, max_relative_difference  # isort: skip


def tiny_moe(report):
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import Qwen3ModelArgs
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_magi.titan.v02.spec import _without_guard

    args = Qwen3ModelArgs(
        vocab_size=2048, head_dim=16, dim=64, n_layers=2, n_heads=8, n_kv_heads=2, moe_enabled=True, moe_inter_dim=32,
        attn_type="varlen", attn_mask_type="block_causal",
        moe_args=MoEArgs(num_experts=4, num_shared_experts=0, top_k=2, score_func="softmax", route_norm=True, score_before_experts=False))
    spec = get_train_spec("qwen3")
    spec.build_tokenizer_fn.__self__.model_args["tiny_moe"] = args
    spec.model_args["tiny_moe"] = _without_guard(args)


NAMES = DEGREES | {"ddp": "data_parallel_replicate_degree", "ep": "expert_parallel_degree", "etp": "expert_tensor_parallel_degree"}
LAYOUTS = {
    "one": ({}, ""),
    "cp2": ({"cp": 2}, ""),
    "tp2": ({"tp": 2}, ""),
    "ddp2": ({"ddp": 2}, ""),
    "dp2_ep2": ({"dp": 2, "ep": 2}, ""),
    "cp2_ep2": ({"cp": 2, "ep": 2}, ""),
    "tp2_ep2": ({"tp": 2, "ep": 2}, ""),
    "dp2_cp2_ep2": ({"dp": 2, "cp": 2, "ep": 2}, ""),
    "dp2_cp2_ep4": ({"dp": 2, "cp": 2, "ep": 4}, ""),
    "cp2_tp2_ep2": ({"cp": 2, "tp": 2, "ep": 2}, ""),
    "cp2_tp2_ep4": ({"cp": 2, "tp": 2, "ep": 4}, ""),
    "cp2_tp2_ep2_etp2": ({"cp": 2, "tp": 2, "ep": 2, "etp": 2}, ""),
    "hsdp_ep2": ({"ddp": 2, "cp": 2, "ep": 2}, ""),
    "full": ({"cp": 2, "ep": 2}, "--activation_checkpoint.mode full"),
    "compile": ({"cp": 2, "ep": 2}, "--compile.enable"),
}


def options_of(name):
    degrees, options = LAYOUTS[name]
    batch = 2 // (degrees.get("dp", 1) * degrees.get("ddp", 1))
    layout = [f"--parallelism.{NAMES[key]} {degree}" for key, degree in degrees.items()]
    return " ".join([COMMON, *layout, f"--training.local_batch_size {batch}", options, "--model.name qwen3 --model.flavor tiny_moe"]).split()


def processes(name):
    import math
    return math.prod(d for k, d in LAYOUTS[name][0].items() if k in ("dp", "ddp", "cp", "tp"))


@functools.cache
def seed():
    folder = new_folder()
    train(1, [*options_of("one"), "--checkpoint.enable", "--checkpoint.create_seed_checkpoint", "--job.dump_folder", folder], setup=tiny_moe)
    return f"{folder}/checkpoint/step-0"


@functools.cache
def trained(name):
    return train(processes(name), [*options_of(name), "--training.steps", "3", "--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.initial_load_path", seed()],
        entry="torchtitan_magi.train", setup=tiny_moe)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name):
    run, one = trained(name), trained("one")
    print(name, run.losses, max_relative_difference(run.losses, one.losses), max_relative_difference(run.grad_norms, one.grad_norms))
    print([[v for k, v in m.items() if "moe" in k] for m in run.metrics], run.grad_norms)
    assert max_relative_difference(run.losses, one.losses) < 1e-5
    assert max_relative_difference(run.grad_norms, one.grad_norms) < 1e-4
