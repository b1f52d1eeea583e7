"""A mixture of experts trains alike under every layout, and what the log says of its experts is right."""

import functools
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hf_models import make_hf_folder
from test_training_dpo import DPO_TOML
from test_training_dpo import arguments as dpo_arguments
from test_training_errors import assert_one_line, error_of
from training import call, corpus, new_folder, train, watch

from loss_compare import COMMON, DEGREES, max_relative_difference  # isort: skip

NAMES = DEGREES | {
    "ddp": "data_parallel_replicate_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}
LAYOUTS = {
    "one": {},
    "ddp2": {"ddp": 2},
    "cp2": {"cp": 2},
    "tp2": {"tp": 2},
    "dp2_ep2": {"dp": 2, "ep": 2},
    "cp2_ep2": {"cp": 2, "ep": 2},
    "tp2_ep2": {"tp": 2, "ep": 2},
    "dp2_cp2_ep2": {"dp": 2, "cp": 2, "ep": 2},
    "hsdp_ep2": {"ddp": 2, "cp": 2, "ep": 2},
    "cp2_tp2_ep4": {"cp": 2, "tp": 2, "ep": 4},
    "cp2_tp2_ep2_etp2": {"cp": 2, "tp": 2, "ep": 2, "etp": 2},
}
TOLERANCE = 1e-5


@functools.cache
def folder():
    """The weights are large enough for the experts to matter."""
    return make_hf_folder("qwen3_moe", initializer_range=0.1)


def processes(degrees):
    return math.prod(degree for name, degree in degrees.items() if name not in ("ep", "etp"))


def model():
    return f"--model.name qwen3 --model.flavor hf --model.hf_assets_path {folder()} --checkpoint.enable".split()


def arguments(degrees):
    """Data-parallel ranks share the two packs of a step."""
    layout = [f"--parallelism.{NAMES[name]} {degree}" for name, degree in degrees.items()]
    batch = f"--training.local_batch_size {2 // (degrees.get('dp', 1) * degrees.get('ddp', 1))}"
    return [*" ".join([COMMON, *layout, batch, "--checkpoint.initial_load_in_hf"]).split(), *model()]


def moe(degrees, *options, **kwargs):
    options = ["--training.steps", "3", "--checkpoint.load_only", *options]
    return train(processes(degrees), [*arguments(degrees), *options], entry="torchtitan_magi.train", **kwargs)


def report_gradients(report):
    """The norm of each parameter's gradient."""
    import torchtitan.train
    from torch.distributed.tensor import DTensor

    def report_norms(_, trainer, *args):
        norms = {}
        for name, parameter in trainer.model_parts[0].named_parameters():
            norm = parameter.grad.double().norm()
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            norms[name.replace("_checkpoint_wrapped_module.", "")] = norm.item()
        report("gradients", norms)

    watch(torchtitan.train.Trainer, "train_step", report_norms)


@functools.cache
def trained(name):
    return moe(LAYOUTS[name], setup=report_gradients)


def expert_load(run):
    """Of each step: imbalance, that of the worst layer, and idle experts."""
    return [[value for name, value in metrics.items() if name.startswith("moe/")] for metrics in run.metrics]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one"])
def test_it_is_the_training_of_one_process(name):
    """Each gradient by itself, as the router's and those of the norms before it are small parts of the whole."""
    ours, one = trained(name), trained("one")
    worst = {
        "loss": max_relative_difference(ours.losses, one.losses),
        "grad_norm": max_relative_difference(ours.grad_norms, one.grad_norms),
    }
    for (gradients,), (reference,) in zip(ours.of("gradients"), one.of("gradients"), strict=True):
        assert gradients.keys() == reference.keys()
        differences = max_relative_difference([gradients[name] for name in reference], list(reference.values()))
        worst["gradient"] = max(differences, worst.get("gradient", 0))
    print(f"{name}: {worst}")
    assert max(worst.values()) <= TOLERANCE
    np.testing.assert_allclose(expert_load(ours), expert_load(one))
