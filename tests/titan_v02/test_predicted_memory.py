"""Memory is predicted as models and runs of torchtitan 0.2.2 take it, from its options, and as it was measured."""

import json
import operator
import re
import tempfile
import tomllib
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from support.runs import DEBUG_TOML, call, train, watch
from support.saved_bytes import bytes_saved

from torchtitan_magi.models.model_config import Experts, ModelConfig, Rope
from torchtitan_magi.models.shapes import parameters_of
from torchtitan_magi.sizing.activations import ffn_saved, kept_activations
from torchtitan_magi.sizing.memory import OUTSIDE_PYTORCH
from torchtitan_magi.sizing.run_file import RunFile
from torchtitan_magi.sizing.run_setup import Setup, setup_of
from torchtitan_magi.training.settings.options import Magi

ANY_MODEL = ModelConfig("llama3", 4096, 32, 32, 8, 128, 14336, 128256, 1e-5, Rope(5e5))


# ------------------------------------------------------------------------------------------ against torchtitan's models


def parameters_of_flavors():
    """Flavor -> numbers of parameters, ours and torchtitan's."""
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_magi.titan.v02.models import config_of

    found = {}
    for name in ("llama3", "qwen3"):
        spec = get_train_spec(name)
        for flavor in ("debugmodel_varlen_attn", "8B_varlen", "405B_varlen", "0.6B_varlen", "30B-A3B_varlen"):
            if args := spec.model_args.get(flavor):
                with torch.device("meta"):
                    model = spec.model_cls(args)
                ours = parameters_of(config := config_of(args))
                theirs = sum(x.numel() for x in model.parameters())
                found[name, flavor] = ours.dense + config.num_layers * ours.experts, theirs
    return found


def test_a_model_has_as_many_parameters_as_torchtitans():
    found = call(parameters_of_flavors)
    assert len(found) == 6
    for flavor, (ours, theirs) in found.items():
        assert ours == theirs, flavor


CHECKPOINTING = [("llama3", mode) for mode in ("none", "selective", "full")] + [
    ("qwen3", "none"),
    ("qwen3", "selective"),
]


def saved_by_blocks():
    """(model, mode) -> bytes that torchtitan's block saves for its backward when it is compiled, ours and theirs."""
    from torch import nn
    from torchtitan.config.job_config import ActivationCheckpoint
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.models.llama3.infra import parallelize as llama3
    from torchtitan.models.qwen3.infra import parallelize as qwen3
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_magi import varlen_causal
    from torchtitan_magi.attention.bound_plan import bind_slices
    from torchtitan_magi.attention.op import PlanHandle, attend
    from torchtitan_magi.backends.choose import choose_block_attn
    from torchtitan_magi.titan.v02.attention import PlanMetadata
    from torchtitan_magi.titan.v02.models import args_of

    tokens, dim, heads_q, heads_kv, head_dim = 256, 128, 8, 2, 16
    block_attn, cpu = choose_block_attn("flex", torch.device("cpu")), torch.device("cpu")
    slices = varlen_causal(torch.tensor([0, tokens]))
    handle = PlanHandle(bind_slices(slices, tokens, tokens, heads_q, heads_kv, block_attn, cpu))

    class Attention(nn.Module):
        def forward(self, q, k, v, metadata, scale=None):
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            return attend(q, k, v, handle, head_dim**-0.5)[0]

    found = {}
    for name, mode in CHECKPOINTING:
        config = ModelConfig(name, dim, 1, heads_q, heads_kv, head_dim, 448, 512, 1e-5, Rope(1e4))
        args = args_of(config)
        args.max_seq_len = tokens
        model = get_train_spec(name).model_cls(args).bfloat16()
        block = model.layers["0"]
        block.attention.inner_attention = Attention()
        rotary, positions = model.freqs_cis if name == "llama3" else model.rope_cache, torch.arange(tokens)[None]
        not_counted = [*model.parameters(), rotary, positions]
        if mode != "none":
            saved_ops = {"llama3": llama3, "qwen3": qwen3}[name]._op_sac_save_list
            block = activation_checkpoint._apply_ac_to_transformer_block(
                block,
                ActivationCheckpoint(mode=mode, selective_ac_option="op"),
                base_fqn="layers.0",
                op_sac_save_list=saved_ops,
            )
        block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
        x = torch.randn(1, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
        inputs = x, rotary, PlanMetadata(None, None, 0, 0), positions
        block(*inputs)  # compiles
        saved = bytes_saved(block, inputs, not_counted)
        setup = Setup(config, tokens, checkpointing=mode, compiled=True)
        found[name, mode] = kept_activations(setup), saved
    return found


def saved_by_experts():
    """Bytes that torchtitan's mixture of experts saves for its backward, ours and theirs."""
    from torchtitan.models.moe.moe import MoE

    from torchtitan_magi.titan.v02.models import args_of

    tokens, experts = 1024, Experts(8, 4, 48, True)
    config = ModelConfig("qwen3", 64, 1, 4, 4, 16, 0, 512, 1e-6, Rope(1e4), experts=experts)
    moe_args = replace(args_of(config).moe_args, use_grouped_mm=False)  # a kernel of GPUs
    moe = MoE(moe_args, config.dim, experts.hidden_dim).bfloat16()
    with torch.no_grad():
        moe.init_weights(0.02, torch.device("cpu"))
    x = torch.randn(1, tokens, config.dim, dtype=torch.bfloat16, requires_grad=True)

    def histc(x, bins, min, max):  # torch's takes no integers on the CPU
        return torch.bincount(x, minlength=bins)

    with mock.patch.object(torch, "histc", histc):
        theirs = bytes_saved(moe, (x,), moe.parameters())
    setup = Setup(config, tokens, by_02=True)
    input_of_norm = config.dim * setup.compute_bytes
    return tokens * (ffn_saved(setup) - input_of_norm), theirs


def test_experts_save_for_the_backward_what_is_predicted():
    ours, theirs = call(saved_by_experts)
    assert ours == pytest.approx(theirs, rel=0.1)


def test_blocks_save_for_the_backward_what_is_predicted():
    found = call(saved_by_blocks)
    for case in CHECKPOINTING:
        ours, theirs = found[case]
        assert ours == pytest.approx(theirs, rel=0.03), case


def report_state(report):
    """What a rank's parameters, gradients and optimizer states take at the end of each step, and the prediction."""
    import torchtitan.train

    def look(_, trainer, *__):
        parameters = [*trainer.model_parts[0].parameters()]
        states = [x for states in trainer.optimizers.optimizers[0].state.values() for x in states.values()]
        local = [
            sum(x.to_local().nbytes for x in tensors if hasattr(x, "to_local")) for tensors in (parameters, states)
        ]
        parts = trainer.metrics_processor.memory.predicted.parts
        report("state", [parts["parameters"], parts["optimizer states"]], local)

    watch(torchtitan.train.Trainer, "train_step", look)


def test_a_run_says_what_it_is_predicted_to_take_and_its_parameters_and_states_take_that():
    arguments = "--parallelism.context_parallel_degree 2 --parallelism.tensor_parallel_degree 2 --training.steps 2"
    run = train(4, arguments.split(), setup=report_state)
    predicted, real = run.of("state")[-1]
    assert predicted == pytest.approx(real, rel=1e-3)  # what does not divide is padded
    said = re.findall(r"Predicted memory per GPU: at most ([\d.]+) MiB, in .* \(parameters ([\d.]+), .*\)", run.output)
    assert [float(x) for _, x in said] == pytest.approx([predicted[0] / 2**20], abs=0.05)
    assert run.output.index("Predicted memory") < run.output.index("Training starts")
    assert "Measured memory" not in run.output  # there is no GPU
    assert not {*OUTSIDE_PYTORCH} & set(re.findall(r"[A-Za-z ]+(?= [\d.]+[,)])", run.output))


FACTS = [  # options of a run -> fields of its Setup
    ({"parallelism.context_parallel_degree": 4, "parallelism.tensor_parallel_degree": 2}, {"cp": 4, "tp": 2}),
    ({"parallelism.context_parallel_degree": 1, "parallelism.tensor_parallel_degree": 2,
      "parallelism.data_parallel_shard_degree": 1}, {"cp": 1, "tp": 2, "dp_shard": 1, "compute_bytes": 4}),
    ({"parallelism.data_parallel_replicate_degree": 2, "parallelism.expert_parallel_degree": 4},
     {"dp_replicate": 2, "ep": 4}),
    ({"training.seq_len": 512, "training.local_batch_size": 3, "training.global_batch_size": 24},
     {"seq_len": 512, "packs": 3, "microbatches": 4}),
    ({"training.dataset": "dpo", "training.enable_cpu_offload": True},
     {"reference": True, "reference_in_file": True, "logits_again": True, "offload": True}),
    ({"training.dataset": "dpo", "magi.dpo.reference": "file"},
     {"reference": False, "reference_in_file": True, "logits_again": True}),
    ({"compile.enable": True, "compile.components": ["model"]}, {"compiled": True, "compiled_loss": False}),
    ({"activation_checkpoint.mode": "full"}, {"checkpointing": "full", "every": 0}),
    ({"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
     {"checkpointing": "selective", "every": 0}),
    ({"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "3"},
     {"checkpointing": "selective", "every": 3}),
    ({"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "0"},
     {"checkpointing": "full", "every": 0}),
    ({"activation_checkpoint.mode": "memory_budget", "activation_checkpoint.memory_budget": 0.25},
     {"checkpointing": "memory_budget", "budget": 0.25, "every": 0}),
    ({"training.dtype": "bfloat16", "optimizer.implementation": "foreach"}, {"param_bytes": 2, "foreach": True}),
    ({"training.mixed_precision_param": "float32"}, {"mixed_bytes": 4}),
    ({"magi.backend": "flex", "debug.deterministic": True}, {"flex": True, "deterministic": True}),
    ({"magi.overlap_stages": 3}, {"overlap_stages": 3}),
    ({"parallelism.fsdp_reshard_after_forward": "never"}, {"reshard": "never"}),
    ({"checkpoint.enable": True, "checkpoint.async_mode": "async"}, {"staged": True}),
]  # fmt: skip
OF_0_3 = "parallelism.enable_sequence_parallel"


def value_of(config, option, default):
    return default if option == OF_0_3 else operator.attrgetter(option)(config)


def facts_of(changes):
    """Setups of the debug configuration with these options: from torchtitan's job config, and from the file alone."""
    from torchtitan.config import ConfigManager
    from torchtitan.tools import utils

    sections = tomllib.loads(DEBUG_TOML.read_text())
    for name, value in ({"activation_checkpoint.selective_ac_option": "2"} | changes).items():
        section, _, option = name.rpartition(".")
        sections.setdefault(section, {})[option] = value
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        for section, options in sections.items():
            print(
                f"[{section}]",
                *(f"{name} = {json.dumps(value)}" for name, value in options.items()),
                sep="\n",
                file=file,
            )
        file.flush()
        with mock.patch.object(utils, "device_type", "cuda"):  # the CPU has no CPU offload
            config = ConfigManager().parse_args(["--job.config_file", file.name])
        ways = partial(value_of, config), RunFile(file.name).read
        return [setup_of(read, ANY_MODEL, changes.get("parallelism.data_parallel_shard_degree", 2)) for read in ways]


def all_facts():
    return [facts_of(changes) for changes, _ in [({}, {}), *FACTS]]


def test_the_facts_are_those_of_the_configuration_and_of_its_file():
    (default, _), *found = call(all_facts)
    for (changes, fields), (setup, by_file) in zip(FACTS, found, strict=True):
        assert setup == by_file, changes
        assert {name: getattr(setup, name) for name in fields} == fields, changes
        changed = {name for name, value in vars(setup).items() if value != getattr(default, name)}
        assert changed <= fields.keys(), changes


def defaults_of_options():
    """Option -> its default for a TOML file, and in torchtitan."""
    from torchtitan.config import ConfigManager

    config, found = ConfigManager().parse_args([]), {}
    config.magi = Magi()

    def read(option, default):
        value = value_of(config, option, default)
        if option != OF_0_3 and not isinstance(default, type):
            found[option] = default[0] if isinstance(default, tuple) else default, value
        return True if option == "compile.enable" else value

    setup_of(read, ANY_MODEL, 1)
    return found


def test_what_a_file_leaves_out_is_as_torchtitan_has_it():
    found = call(defaults_of_options)
    assert len(found) == 27
    assert {option: both for option, both in found.items() if both[0] != both[1]} == {}
