"""gpt-oss and DeepSeek V3: config.json -> torchtitan 0.3's configuration and back; models that are not served."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hf_models import KINDS, make_hf_folder
from published import OF_0_3
from training import call, new_folder

from torchtitan_magi.models.model_config import Rope, differences, read_model_config
from torchtitan_magi.training.hf_weights import tensor_shapes

FLAVORS = {"gpt-oss 20b": "20b", "gpt-oss 120b": "120b", "DeepSeek V3": "671B"}


def model_of(fields):
    folder = Path(new_folder())
    (folder / "config.json").write_text(json.dumps(fields))
    return read_model_config(folder)


def in_torchtitan(config):
    """The model, once through torchtitan's configuration; the shapes of an export; the factor of its scores."""
    import torch

    from torchtitan_magi.titan.v03 import models

    spec = models.model_spec(config.model, "hf", config, [])
    with torch.device("meta"):
        model = spec.model.build()
    adapter = spec.state_dict_adapter(spec.model, None)
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter.to_hf(model.state_dict()).items()}
    return models.config_of(spec.model), shapes, models.temperature_of(config)


def named_flavor(name, flavor):
    from torchtitan_magi.titan.v03.models import config_of, model_spec

    return config_of(model_spec(name, flavor, None, []).model)


@pytest.mark.parametrize("name", OF_0_3)
def test_a_published_model_is_one_of_torchtitan(name):
    config = model_of(OF_0_3[name])
    again, shapes, temperature = call(in_torchtitan, config)
    assert again == config
    assert shapes == tensor_shapes(config)
    assert temperature == pytest.approx(1)  # torchtitan's attention has all of YaRN's factor
    found = differences(config, call(named_flavor, config.model, FLAVORS[name]))
    bias = "other () in the file, ('a bias by which experts are chosen',) in the flavor"
    assert found == [{"gpt_oss": bias}.get(config.model, "norm_eps 1e-06 in the file, 1e-05 in the flavor")]


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
    from torchtitan.models import deepseek_v3, gpt_oss, kimi_k2_7

    from torchtitan_magi.titan.v03.models import with_varlen

    found = []
    for spec in (
        kimi_k2_7.model_registry("debugmodel", attn_backend="flex"),
        gpt_oss.model_registry("debugmodel"),
        deepseek_v3.model_registry("debugmodel", num_mtp_layers=1),
    ):
        try:
            with_varlen(spec)
        except ValueError as error:
            found.append(str(error))
    return found


def test_specs_that_are_not_served_are_refused_by_name():
    other, varlen, predicting = call(refusals)
    assert "model.name is 'kimi_k2_5', which has no varlen attention; use one of" in other
    assert varlen == 'the attention of gpt_oss is VarlenAttention; make the model with attn_backend="flex"'
    assert predicting == "deepseek_v3 has mtp_layers, which are not trained here; set num_mtp_layers to 0"


def layers_of_own_configuration():
    from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel_flex

    from torchtitan_magi.titan import with_magi
    from torchtitan_magi.titan.v03.models import REPLACED

    model = with_magi(gpt_oss_debugmodel_flex()).model_spec.model
    return {type(config).__qualname__ for stock in REPLACED for _, config, _, _ in model.traverse(stock)}


def test_torchtitans_own_configurations_get_our_layers():
    assert call(layers_of_own_configuration) == {"GptOssExperts.Config", "RowwiseLinear.Config"}


def test_tied_weights_are_refused_by_name():
    with pytest.raises(Exception, match="tie_word_embeddings is True, which torchtitan's gpt_oss has not"):
        call(in_torchtitan, replace(model_of(OF_0_3["gpt-oss 20b"]), tied=True))


def saved_in_float32(config, names):
    """torchtitan's parameters of these tensors."""
    import torch

    from torchtitan_magi.titan.v03 import models
    from torchtitan_magi.training.exports import Export
    from torchtitan_magi.training.hf_folder import ExportLayout

    spec = models.model_spec(config.model, "hf", config, [])
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
