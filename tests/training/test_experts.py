"""A mixture of experts trains alike under every layout, and what the log says of its experts is right."""

import functools
import importlib
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.degrees import degree_arguments, num_processes
from support.errors import assert_one_line, error_of
from support.hf_models import hf_arguments, make_hf_folder, tensors_of
from support.marks import marked_long
from support.preference import DPO_TOML, copy_of_data
from support.preference import arguments as dpo_arguments
from support.runs import IS_0_3, call, corpus, new_folder, train, watch

from layouts import COMMON, max_relative_difference  # isort: skip

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
if IS_0_3:  # experts are always over all axes
    del LAYOUTS["cp2_tp2_ep2_etp2"]
WITH_TP = list(LAYOUTS)[-1]
MOE = "torchtitan.models.common.moe" if IS_0_3 else "torchtitan.models.moe.moe"
TOLERANCE = 1e-5


@functools.cache
def folder():
    """The weights are large enough for the experts to matter."""
    return make_hf_folder("qwen3_moe", initializer_range=0.1)


def model():
    return [*hf_arguments(folder(), "qwen3_moe"), "--checkpoint.enable"]


def arguments(degrees):
    """Data-parallel ranks share the two packs of a step."""
    batch = f"--training.local_batch_size {2 // (degrees.get('dp', 1) * degrees.get('ddp', 1))}"
    options = f"{COMMON} {batch} --checkpoint.initial_load_in_hf".split()
    return [*options, *degree_arguments(degrees), *model()]


def moe(degrees, *options, **kwargs):
    options = ["--training.steps", "3", "--checkpoint.load_only", *options]
    return train(num_processes(degrees), [*arguments(degrees), *options], entry="torchtitan_magi.train", **kwargs)


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
    """For each step: imbalance, that of the worst layer, and idle experts."""
    return [[value for name, value in metrics.items() if name.startswith("moe/")] for metrics in run.metrics]


@pytest.mark.parametrize("name", marked_long(list(LAYOUTS)[1:], {"ddp2", "tp2", "tp2_ep2", "cp2_ep2"}))
def test_it_is_the_training_of_one_process(name):
    """Each gradient by itself, as the router's and those of the norms before it are small parts of the whole."""
    ours, one = trained(name), trained("one")
    worst = {
        "loss": max_relative_difference(ours.losses, one.losses),
        "grad_norm": max_relative_difference(ours.grad_norms, one.grad_norms),
    }
    worst_gradient = 0.0
    for (gradients,), (reference,) in zip(ours.of("gradients"), one.of("gradients"), strict=True):
        assert gradients.keys() == reference.keys()
        differences = max_relative_difference([gradients[name] for name in reference], list(reference.values()))
        worst_gradient = max(differences, worst_gradient)
    print(f"{name}: {worst}, of one parameter {worst_gradient}")
    assert max(worst.values()) <= TOLERANCE
    assert worst_gradient <= 1e-4
    np.testing.assert_allclose(expert_load(ours), expert_load(one))


# ------------------------------------------------------------------------------------------------ the load of experts


def report_choices(report):
    """How many tokens each layer sends to each expert."""

    def see(result, router, *_):
        report("choices", result[1].flatten().bincount(minlength=router.num_experts).tolist())

    watch(importlib.import_module(MOE).TokenChoiceTopKRouter, "forward", see)


def test_the_log_says_how_evenly_tokens_go_to_experts():
    """Two microbatches a step on each of two ranks, logged every second step."""
    options = ["--activation_checkpoint.mode", "none", "--training.local_batch_size", "1", "--metrics.log_freq", "2"]
    run = moe(LAYOUTS["cp2_ep2"], *options, "--training.steps", "4", setup=report_choices)
    counts = np.array([[choices for (choices,) in run.of("choices", rank)] for rank in range(2)])
    counts = counts.reshape(2, 4, 2, 2, 4).sum(2).sum(0)  # [steps, layers, experts]
    for step, logged in zip((1, 2, 4), expert_load(run), strict=True):
        since = counts[step - 1 : step] if step < 3 else counts[2:4]
        imbalance = since.sum(0).max(-1) / since.sum(0).mean(-1)
        np.testing.assert_allclose(logged, [imbalance.mean(), imbalance.max(), 0], rtol=1e-6)
    assert f"moe/expert_imbalance: {expert_load(run)[-1][0]:.4f}  moe/worst_expert_imbalance: " in run.output


def send_all_tokens_to_two_experts(report):
    def choose(self, scores):
        chosen = torch.tensor([0, 2]).repeat(*scores.shape[:-1], 1)
        return chosen, scores.gather(-1, chosen)

    importlib.import_module(MOE).TokenChoiceTopKRouter._debug_force_load_balance_routing = choose


def test_experts_without_tokens_train_and_are_counted():
    options = ["--debug.moe_force_load_balance", "--training.steps", "2"]
    balanced = moe(LAYOUTS["cp2_ep2"], *options)
    assert expert_load(balanced) == [[1.0, 1.0, 0.0]] * 2
    assert balanced.output.count("learns nothing of routing: debug.moe_force_load_balance is true") == 1
    two = moe(LAYOUTS["cp2_ep2"], *options, setup=send_all_tokens_to_two_experts)
    assert expert_load(two) == [[2.0, 2.0, 4.0]] * 2
    assert "idle_experts: 4" in two.output


def test_validation_leaves_the_counts_alone():
    validation = f"--validation.enable --validation.dataset sft --validation.dataset_path {corpus()}/validation.jsonl"
    validation += " --validation.freq 1 --validation.steps 2 --validation.seq_len 256 --validation.local_batch_size 1"
    run = moe(LAYOUTS["one"], *validation.split())
    assert len(run.validation_losses) >= 3
    assert run.losses == trained("one").losses
    assert expert_load(run) == expert_load(trained("one"))


# --------------------------------------------------------------------------------------------------------------- DPO


@functools.cache
def dpo_folder():
    """Records of preference pairs, without reference files."""
    return copy_of_data()


def dpo(degrees, *options, **kwargs):
    batch = {name: degree for name, degree in degrees.items() if name not in ("ep", "etp")}
    experts = degree_arguments({name: degrees[name] for name in degrees.keys() - batch})
    fixed = ["--validation.no-enable", "--checkpoint.load_only", "--checkpoint.initial_load_in_hf"]
    options = [*dpo_arguments(batch, folder=dpo_folder()), *experts, *model(), *fixed, *options]
    return train(num_processes(degrees), options, toml=DPO_TOML, defaults=(), entry="torchtitan_magi.train", **kwargs)


def bias_the_choice_of_experts(report):
    """As in a checkpoint that was trained with a bias, which is a buffer."""
    from torchtitan_magi.training.experts import expert_biases
    from torchtitan_magi.training.objectives.reference_model import ReferenceModel

    moe = importlib.import_module(MOE)
    init, prepare = moe.MoE.__init__, ReferenceModel.prepare

    def init_with_bias(self, config, **sizes):
        init(self, replace(config, load_balance_coeff=1e-3), **sizes)

    def prepare_biased(self, step):
        for bias in expert_biases(self.policy.model_parts):
            bias.copy_(torch.tensor([1.0, 0.0, 0.0, -1.0]))
        prepare(self, step)

    moe.MoE.__init__, ReferenceModel.prepare = init_with_bias, prepare_biased


def test_preference_training_is_that_of_one_process_from_a_loss_of_ln_2():
    one = dpo(LAYOUTS["one"])
    for name in ("cp2_ep2", WITH_TP):
        run = dpo(LAYOUTS[name])
        assert run.losses[0] == pytest.approx(math.log(2), abs=1e-6)
        assert max_relative_difference(run.losses, one.losses) <= TOLERANCE
        assert max_relative_difference(run.grad_norms, one.grad_norms) <= 1e-4
        np.testing.assert_allclose(expert_load(run), expert_load(one))


def test_the_reference_has_the_bias_of_the_policy():
    run = dpo(LAYOUTS["cp2_ep2"], setup=bias_the_choice_of_experts)
    assert run.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert expert_load(run)[0][2] > 0  # so it chooses others


def test_computing_a_reference_file_leaves_the_counts_alone():
    """Also those of the validation set, whose pairs are others."""
    options = ["--validation.enable", "--training.steps", "1", "--magi.dpo.reference"]
    by_file, by_model = (dpo({}, *options, way) for way in ("file", "model"))
    assert by_file.output.count("Computing the reference") == 2
    assert expert_load(by_file) == expert_load(by_model)


# ------------------------------------------------------------------------------------------------------- checkpoints


def saving(name, dump_folder):
    options = ["--training.steps", "4", "--checkpoint.interval", "2", "--checkpoint.last_save_in_hf"]
    return moe(LAYOUTS[name], *options, "--checkpoint.no-load_only", "--job.dump_folder", dump_folder)


@functools.cache
def whole_run():
    folder = new_folder()
    return saving("cp2_ep2", folder), folder


@pytest.mark.parametrize("name", marked_long(["cp2_ep2", "hsdp_ep2", WITH_TP], ["hsdp_ep2"]))
def test_a_run_continues_under_another_layout_and_exports_the_same_weights(name):
    whole, first = whole_run()
    exported = tensors_of(Path(f"{first}/checkpoint/step-4"))
    assert exported.keys() == tensors_of(folder()).keys()
    again = f"{first}/{name}"
    shutil.copytree(f"{first}/checkpoint/step-2", f"{again}/checkpoint/step-2")
    resumed = saving(name, again)
    if name == "cp2_ep2":
        assert resumed.losses == whole.losses[2:]
    assert max_relative_difference(resumed.losses, whole.losses[2:]) <= TOLERANCE
    weights = tensors_of(Path(f"{again}/checkpoint/step-4"))
    assert weights.keys() == exported.keys()
    for key, weight in weights.items():
        np.testing.assert_allclose(weight.numpy(), exported[key].numpy(), atol=1e-4, err_msg=key)


# ------------------------------------------------------------------------------------------------- what is refused


THREE_PACKS = "--training.local_batch_size 1 --training.global_batch_size 3"


@pytest.mark.parametrize(
    ("degrees", "options", "messages"),
    [
        ({"dp": 2}, "--parallelism.expert_parallel_degree 4", ["expert_parallel_degree is 4", "does not divide"]),
        ({"dp": 3}, f"{THREE_PACKS} --parallelism.expert_parallel_degree 3",
         ["expert_parallel_degree is 3, which does not divide the 4 experts of model.flavor 'hf'"]),
        (
            {"dp": 3},
            THREE_PACKS,
            ["initial_load_in_hf is true, but 3 ranks share 4 experts, not as many each; use a number of ranks"],
        ),
        ({}, "--parallelism.expert_parallel_comm_backend deepep",
         ["comm_backend is 'deepep'", "leave it out" if IS_0_3 else 'set it to "standard"']),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_spread(degrees, options, messages):
    options = [*arguments(degrees), *options.split()]
    assert_one_line(error_of(options, num_processes(degrees), entry="torchtitan_magi.train"), messages)


def test_a_dense_model_has_no_experts_to_spread():
    options = ["--parallelism.data_parallel_shard_degree", "2", "--parallelism.expert_parallel_degree", "2"]
    messages = ["expert_parallel_degree is 2, but model.flavor 'debugmodel_varlen_attn' has no experts", "set it to 1"]
    assert_one_line(error_of(options, 2), messages)
    said = "debug.moe_force_load_balance is true, but model.flavor 'debugmodel_varlen_attn' has no experts; set it to"
    assert_one_line(error_of(["--debug.moe_force_load_balance"], 1), [said])


# ------------------------------------------------------------------------------------------------------ operations


def count_operations(path):
    """Parameters of the model with all its experts, and operations of a token without attention."""
    from torchtitan_magi.models.model_config import read_model_config

    config, length = read_model_config(path), 100_000
    if IS_0_3:
        from torchtitan_magi.titan.v03.models import model_spec

        model = model_spec("qwen3", "hf", config).model
        with torch.device("meta"):
            parameters, operations = model.get_nparams_and_flops(model.build(), length)
        return parameters, operations - config.attention_flops * length
    from torchtitan.models.qwen3 import Qwen3Model

    from torchtitan_magi.titan.v02.models import args_of, varlen_flavors, with_plan_metadata

    args = varlen_flavors({"hf": args_of(config)})["hf"]
    with torch.device("meta"):
        return args.get_nparams_and_flops(with_plan_metadata(Qwen3Model)(args), length)


def test_operations_are_those_of_the_experts_that_a_token_takes():
    parameters, operations = call(count_operations, folder())
    weights = {name: tensor.numel() for name, tensor in tensors_of(folder()).items()}
    experts = sum(number for name, number in weights.items() if ".experts." in name)
    assert parameters == sum(weights.values())
    assert operations == 6 * (parameters - weights["model.embed_tokens.weight"] - experts // 2)
