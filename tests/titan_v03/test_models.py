"""gpt-oss and DeepSeek V3: config.json -> torchtitan 0.3's configuration and back; models that are not served."""

from dataclasses import replace

import pytest
import torch
from support.errors import value_errors
from support.hf_models import KINDS, make_hf_folder
from support.published import CONFIGS, OF_0_3, WITH_PICTURES, read
from support.runs import call

from torchtitan_magi.models.model_config import Rope, differences, read_model_config
from torchtitan_magi.models.shapes import adapters_of, num_moe_layers, parameters_of
from torchtitan_magi.training.checkpoints.hf_weights import tensor_shapes
from torchtitan_magi.training.settings.options import Magi

FLAVORS = {"gpt-oss 20b": "20b", "gpt-oss 120b": "120b", "DeepSeek V3": "671B"}


def in_torchtitan(config):
    """The model, once through torchtitan's configuration; the shapes of an export; the factor of its scores."""
    from torchtitan_magi.titan.v03 import models

    spec = models.model_spec(config.model, "hf", config)
    with torch.device("meta"):
        model = spec.model.build()
    adapter = spec.state_dict_adapter(spec.model, None)
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter.to_hf(model.state_dict()).items()}
    return models.config_of(spec.model), shapes, models.temperature_of(config)


def named_flavor(name, flavor):
    from torchtitan_magi.titan.v03.models import config_of, model_spec

    return config_of(model_spec(name, flavor, None).model)


@pytest.mark.parametrize("name", OF_0_3)
def test_a_published_model_is_one_of_torchtitan(name):
    config = read(OF_0_3[name])
    again, shapes, temperature = call(in_torchtitan, config)
    assert again == config
    assert shapes == tensor_shapes(config)
    assert temperature == pytest.approx(1)  # torchtitan's attention has all of YaRN's factor
    found = differences(config, call(named_flavor, config.model, FLAVORS[name]))
    bias = "other () in the file, ('a bias by which experts are chosen',) in the flavor"
    assert found == [{"gpt_oss": bias}.get(config.model, "norm_eps 1e-06 in the file, 1e-05 in the flavor")]


def numbers_of_parameters(config, targets):
    """Of the model in torchtitan, and of its adapters of rank 8."""
    from torchtitan_magi.titan.v03 import lora, models
    from torchtitan_magi.training.settings.options import LoRA

    options = LoRA(rank=8, target_modules=targets or LoRA().target_modules)
    adapted = lora.with_adapters(models.model_spec(config.model, "hf", config), options).model
    with torch.device("meta"):
        named = dict(adapted.build().named_parameters())
    adapters = sum(x.numel() for name, x in named.items() if ".lora_" in name)
    return sum(x.numel() for x in named.values()) - adapters, adapters, adapters_of(config, 8, options.target_modules)


@pytest.mark.parametrize("targets", [None, ["wo", "experts"]], ids=["default", "experts"])
@pytest.mark.parametrize("name", ["Llama 3.1 8B", "Qwen3 8B", "Qwen3 4B", "Qwen3 30B-A3B", *OF_0_3, *WITH_PICTURES])
def test_sizing_counts_every_parameter(name, targets):
    config = read((CONFIGS | OF_0_3 | WITH_PICTURES)[name])
    if targets and config.experts is None:
        targets = ["wo", "w2"]
    whole, adapters, counted = call(numbers_of_parameters, config, targets)
    of_model = parameters_of(config)
    assert whole == of_model.dense + of_model.experts * num_moe_layers(config)
    assert adapters == counted


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_other_sizes_windows_and_positions(kind):
    config = read_model_config(make_hf_folder(kind))
    if kind == "gpt_oss":
        config = replace(config, windows=(0, 7), rope=replace(config.rope, attention_factor=2.0))
    else:
        latent, experts = replace(config.latent, q_rank=0, mscale=0.0), replace(config.experts, num_dense_layers=0)
        config = replace(config, latent=latent, experts=experts, hidden_dim=0, rope=Rope(1e5, "linear", 2.0))
    again, shapes, temperature = call(in_torchtitan, config)
    if kind == "gpt_oss":
        assert temperature == pytest.approx((2.0 / 1.1386294) ** 2)
        again = replace(again, rope=config.rope)  # where the Trainer takes the factor from
    assert again == config
    assert shapes == tensor_shapes(config)


def refusals():
    from torchtitan.models import deepseek_v3, gpt_oss, kimi_k2_7, muse_glimmer

    from torchtitan_magi.titan.v03.models import with_varlen

    other = kimi_k2_7.model_registry("debugmodel", attn_backend="flex")
    varlen, predicting = (
        gpt_oss.model_registry("debugmodel"),
        deepseek_v3.model_registry("debugmodel", num_mtp_layers=1),
    )
    sees = muse_glimmer.model_registry("debugmodel")
    return value_errors(with_varlen, [(other,), (varlen,), (predicting,), (sees,)])


def test_specs_that_are_not_served_are_refused_by_name():
    other, varlen, predicting, sees = call(refusals)
    assert "model.name is 'kimi_k2_5', which has no varlen attention; use one of" in other
    assert varlen == 'the attention of gpt_oss is VarlenAttention; make the model with attn_backend="flex"'
    assert sees.startswith("muse_glimmer 'debugmodel' may see pictures, which is not trained here; train the text part")
    assert predicting == "deepseek_v3 has mtp_layers, which are not trained here; set num_mtp_layers to 0"


def layers_of_own_configuration():
    from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel_flex

    from torchtitan_magi.titan import with_magi
    from torchtitan_magi.titan.v03.models import REPLACED

    model = with_magi(gpt_oss_debugmodel_flex()).model_spec.model
    return {type(config).__qualname__ for stock in REPLACED for _, config, _, _ in model.traverse(stock)}


def test_torchtitans_own_configurations_get_our_layers():
    assert call(layers_of_own_configuration) == {"GptOssExperts.Config", "RowwiseLinear.Config"}


def refused_parts():
    """What is said of parts that ours would replace, each of a class of a user's own or for other models."""
    from dataclasses import dataclass, replace

    from torchtitan.components.loss import ChunkedLossWrapper, MSELoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from torchtitan_magi.titan import with_magi

    @dataclass(kw_only=True, slots=True)
    class OwnMetrics(MetricsProcessor.Config):
        pass

    @dataclass(kw_only=True, slots=True)
    class OwnAC(SelectiveAC.Config):
        pass

    @dataclass(kw_only=True, slots=True)
    class Experiment(MetricsProcessor.Config):
        __module__ = "torchtitan.experiments.rl.metrics"

    config, said = llama3_debugmodel(), []
    for part in (
        {"loss": MSELoss.Config()},
        {"loss": ChunkedLossWrapper.Config(loss_fn=MSELoss.Config())},
        {"metrics": OwnMetrics()},
        {"activation_checkpoint": OwnAC()},
        {"metrics": Experiment()},
    ):
        try:
            with_magi(replace(config, **part))
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_ours_would_replace_is_torchtitans_own():
    loss, inner, metrics, checkpointing, experiment = call(refused_parts)
    assert loss == inner
    assert "in the place of torchtitan.components.loss.MSELoss.Config, which would not be used; leave" in loss
    assert "OwnMetrics, which would not be used" in metrics
    assert "OwnAC, which would not be used" in checkpointing
    assert "torchtitan.experiments.rl.metrics." in experiment


def refused_configurations():
    """What is said of arguments of with_magi that are none, and of values in a configuration that it made."""
    from dataclasses import replace

    from torchtitan.hf_datasets.text_datasets import ChatDataLoader, HFDataSource
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from torchtitan_magi.titan import with_magi
    from torchtitan_magi.titan.v03.trainer import MagiTrainer

    config = llama3_debugmodel()
    without = replace(config, model_spec=None)
    given = [(None,), (llama3_debugmodel,), (type(config),), (without,), (config, {"epochs": 1}), (config, Magi)]
    said = value_errors(with_magi, [*given, (config, Magi(dpo={"beta": 0.1}))])
    made = with_magi(config)
    changed = [
        replace(made, **{name: replace(getattr(made, name), **{option: value})})
        for name, option, value in (
            ("training", "steps", 0),
            ("training", "steps", "10"),
            ("training", "max_norm", float("nan")),
            ("validator", "freq", 0),
            ("checkpoint", "folder", "s3://b/x"),
            ("validator", "dataloader", HFDataSource(dataset="sft", weight=2)),
        )
    ]
    changed.append(replace(made, dataloader=ChatDataLoader.Config(dataset_path="json", sample_processor=print)))
    return said, value_errors(MagiTrainer, [(each,) for each in [*changed, replace(made, dump_folder="/dev/null/x")]])


def test_what_with_magi_cannot_make_a_run_of_is_one_line():
    arguments, values = call(refused_configurations)
    none, function, kind, without, options, of_class, dpo = arguments
    for said in (none, function, kind, without):
        assert said.startswith("with_magi got ")
        assert "give a configuration of torchtitan's Trainer with a model, as a function such as" in said
    assert options == "with_magi got {'epochs': 1} as its [magi] options; give Magi(...), or leave it out"
    assert of_class.startswith("with_magi got <class 'torchtitan_magi.training.settings.options.Magi'> as its [magi]")
    assert dpo == "magi.dpo is {'beta': 0.1}; give DPO(...), or leave it out"
    for said, message in zip(
        values,
        (
            "training.steps is 0; use a whole number of at least 1",
            "training.steps is '10'; use a whole number of at least 1",
            "training.max_norm is nan; use a finite number",
            "validation.freq is 0; use a whole number of at least 1",
            "checkpoint.folder is 's3://b/x', an address; mount what it names",
            "validator.dataloader is HFDataSource(dataset='sft', ",
            "dataloader is ChatDataLoader.Config(dataset='', ",
            "job.dump_folder is '/dev/null/x', which cannot be written",
        ),
        strict=True,
    ):
        assert message in str(said)


def layers_after_converters():
    """The layers' classes: of a preset flavor with adapters; after a user's converter that derives a configuration,
    before and after ours; and what is said of one that puts a layer of its own there."""
    from dataclasses import dataclass, replace

    from torchtitan.models import qwen3
    from torchtitan.models.common.moe import GroupedExperts

    from torchtitan_magi.titan.v03.lora import with_adapters
    from torchtitan_magi.titan.v03.models import REPLACED, _check_layers, with_varlen
    from torchtitan_magi.training.settings.options import LoRA

    class Theirs(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    class Derived(GroupedExperts.Config):
        def build(self):
            experts = GroupedExperts.Config.build(self)
            experts.theirs = True
            return experts

    def spec():
        stock = qwen3.model_registry("debugmodel_moe", attn_backend="flex")
        return replace(stock, model=replace(stock.model, layers=stock.model.layers[:1]))

    def convert(spec, kind):
        experts = spec.model.layers[0].moe.routed_experts
        size = {name: getattr(experts.inner_experts, name) for name in ("dim", "hidden_dim", "num_experts")}
        experts.inner_experts = kind(**size)
        return spec

    def build(spec):
        with torch.device("meta"):
            model = spec.model.build()
        _check_layers(model)
        experts = model.layers["0"].moe.routed_experts.inner_experts
        assert isinstance(experts, tuple(ours._owner for ours in REPLACED.values()))
        return experts

    with_lora = with_adapters(with_varlen(spec()), LoRA(rank=4))
    frozen = [parameter.requires_grad for parameter in build(with_lora).parameters()]
    derived = build(with_varlen(convert(spec(), Derived))).theirs
    with pytest.raises(ValueError) as own:
        build(with_varlen(convert(spec(), Theirs.Config)))
    with pytest.raises(ValueError) as twice:
        with_adapters(with_lora, LoRA())
    with pytest.raises(ValueError) as none:
        with_adapters(with_varlen(spec()), LoRA(rank=4, target_modules=["wo", "w1"]))
    with pytest.raises(ValueError) as never:
        with_adapters(with_varlen(spec()), LoRA(rank=4, target_modules=["lm_head"]))
    return frozen, derived, with_lora.post_optimizer_build_fn, [str(error.value) for error in (own, twice, none, never)]


def test_layers_are_ours_after_converters_or_refused():
    frozen, derived, balance, (own, twice, none, never) = call(layers_after_converters)
    assert frozen == [False] * 3
    assert derived
    assert balance is None  # the bias by which experts are chosen belongs to the frozen model
    assert "layers.0.moe.routed_experts.inner_experts is " in own
    assert "Theirs, but MagiExperts is needed here; leave out the converter or override that makes it so" in own
    assert "the model has adapters of rank 4 by a LoRAConverter of its own; leave that out, and set" in twice
    assert none == "magi.lora.target_modules names w1, which qwen3 'debugmodel_moe' has not; leave it out"
    assert never.startswith("magi.lora.target_modules is ['lm_head']; use some of wqkv, wq_a, ")


def balanced_step():
    """The load of experts after a step in which torchtitan moved their bias, and that bias."""
    from types import SimpleNamespace

    from torchtitan_magi.titan.v03.models import model_spec
    from torchtitan_magi.training.experts import take_expert_load

    spec = model_spec("qwen3", "debugmodel_moe", None)
    spec.model.layers = spec.model.layers[:1]
    model = spec.model.build()
    moe, optimizer = model.layers["0"].moe, torch.optim.SGD(model.parameters(), lr=0.0)
    dims = SimpleNamespace(get_optional_mesh=lambda _: None, ep_enabled=False, tp=1)
    spec.post_optimizer_build_fn(optimizer, [model], dims)
    loads = []
    for steps in (1, 2):
        for _ in range(steps):
            moe.tokens_per_expert_E.copy_(torch.arange(64.0))
            optimizer.step()
        loads.append(take_expert_load([model], None))
    return loads, moe.expert_bias_E.tolist()


def test_the_load_of_experts_is_logged_where_torchtitan_moves_their_bias():
    loads, bias = call(balanced_step)
    assert loads == [{"moe/expert_imbalance": 2.0, "moe/worst_expert_imbalance": 2.0, "moe/idle_experts": 1.0}] * 2
    assert bias[0] == pytest.approx(3e-3) == pytest.approx(-bias[-1])


def test_a_flavor_with_a_bias_that_no_checkpoint_has_is_not_the_published_model():
    bias = "other () in the file, ('a bias by which experts are chosen',) in the flavor"
    found = differences(read(CONFIGS["Qwen3 30B-A3B"]), call(named_flavor, "qwen3", "30B-A3B"))
    assert bias in found


def test_tied_weights_are_refused_by_name():
    with pytest.raises(Exception, match="tie_word_embeddings is True, which torchtitan's gpt_oss has not"):
        call(in_torchtitan, replace(read(OF_0_3["gpt-oss 20b"]), tied=True))


def saved_in_float32(config, names):
    """torchtitan's parameters of these tensors."""
    import torch

    from torchtitan_magi.titan.v03 import models
    from torchtitan_magi.training.checkpoints.export import Export
    from torchtitan_magi.training.settings.model_folder import ExportLayout

    spec = models.model_spec(config.model, "hf", config)
    adapter = spec.state_dict_adapter(spec.model, None)
    with torch.device("meta"):
        parameters = spec.model.build().state_dict()
    found = Export(layout=ExportLayout(float32=names)).parameters(adapter)
    assert found <= parameters.keys()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_can_keep_its_dtype(kind):
    config = read_model_config(make_hf_folder(kind))
    found = call(saved_in_float32, config, tuple(tensor_shapes(config)))
    assert len(found) > 20
    assert ("layers.1.moe.expert_bias_E" in found) == (kind == "deepseek_v3")
