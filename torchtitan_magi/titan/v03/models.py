"""torchtitan 0.3's models: from and to our own ``ModelConfig``."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models import deepseek_v3, gpt_oss, llama3, muse_glimmer, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import RoPE
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils

from torchtitan_magi.models.model_config import Experts, ModelConfig, Rope, yarn_factor
from torchtitan_magi.titan.v03.components import MagiMixedAC
from torchtitan_magi.titan.v03.cpu import draw_stage
from torchtitan_magi.titan.v03.experts import MagiExperts
from torchtitan_magi.titan.v03.families import deepseek_v3 as our_deepseek_v3
from torchtitan_magi.titan.v03.families import gpt_oss as our_gpt_oss
from torchtitan_magi.titan.v03.families import kimi_k2_7 as our_kimi_k2_7
from torchtitan_magi.titan.v03.families import muse_glimmer as our_muse_glimmer
from torchtitan_magi.titan.v03.families import qwen3_5 as our_qwen3_5
from torchtitan_magi.titan.v03.families.configs import copied
from torchtitan_magi.titan.v03.families.positions import LinearRoPE
from torchtitan_magi.titan.v03.families.qwen3_5_tensors import Qwen35Adapter
from torchtitan_magi.titan.v03.lora import check_factors, join_local_layers
from torchtitan_magi.training.activations.layers import offload_layers
from torchtitan_magi.training.checkpoints.hf_reader import adapter_of_all_layouts
from torchtitan_magi.training.experts import note_expert_counts
from torchtitan_magi.training.reductions import fit_reductions
from torchtitan_magi.training.settings.model_folder import HF_FLAVOR
from torchtitan_magi.wording import quoted

MODELS = {
    "llama3": llama3,
    "qwen3": qwen3,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
    "muse_glimmer": muse_glimmer,
    "kimi_k2_7": deepseek_v3,  # which torchtitan's kimi_k2_7 is without its vision encoder
    "qwen3_5": qwen3,  # parallelized and cut for a pipeline as that
}
# Text parts, of a config.json only: flavors have parts that see pictures
BY_FILE = ("muse_glimmer", "kimi_k2_7", "qwen3_5")
CONFIGS = {
    "llama3": llama3.Llama3Model.Config,
    "qwen3": qwen3.Qwen3Model.Config,
    "gpt_oss": gpt_oss.GptOssModel.Config,
    "deepseek_v3": deepseek_v3.DeepSeekV3Model.Config,
    "kimi_k2_7": deepseek_v3.DeepSeekV3Model.Config,
}
REPLACED: dict[Any, Any] = {
    GroupedExperts.Config: MagiExperts.Config,
    **our_gpt_oss.REPLACED,
    **our_deepseek_v3.REPLACED,
    **our_muse_glimmer.REPLACED,
}
ADAPTERS = {  # of weights
    "gpt_oss": our_gpt_oss.GptOssAdapter,
    "kimi_k2_7": our_kimi_k2_7.KimiAdapter,
    "qwen3_5": Qwen35Adapter,
}
COMPLEX = ("llama3", "deepseek_v3", "kimi_k2_7", "muse_glimmer")  # models that rotate adjacent elements
VARLEN_SUFFIXES = ("_varlen", "_varlen_attn")  # of 0.2.2's flavors; here every flavor has varlen attention


def stock_flavor(name: str, flavor: str) -> str | None:
    """torchtitan's flavor of that name, with or without 0.2.2's suffix; None if it has none."""
    plain = next((flavor.removesuffix(suffix) for suffix in VARLEN_SUFFIXES if flavor.endswith(suffix)), flavor)
    return plain if plain in flavors(name) else None


def flavors(name: str) -> list[str]:
    """torchtitan's flavors of a model."""
    return [] if name in BY_FILE else list(getattr(MODELS[name], f"{name.replace('_', '')}_configs"))


def check_model(name: str) -> None:
    """Raises ValueError, one line, for a model that is not served."""
    if name not in MODELS:
        raise ValueError(f"model.name is {quoted(name)}, which has no varlen attention; use one of {', '.join(MODELS)}")


def model_spec(name: str, flavor: str, config: ModelConfig | None) -> ModelSpec:
    """torchtitan's bundle of a model for its Trainer, with our attention where context parallelism is concerned.

    Args:
        config: the model; None: that of the flavor.
    """
    stock = stock_flavor(name, flavor) if config is None else "debugmodel"
    spec = MODELS[name].model_registry(stock, attn_backend="flex")
    spec.name, spec.flavor = name, flavor
    if config is not None:
        spec.model = model_of(config)
        spec.post_optimizer_build_fn = None  # a checkpoint's bias where experts are selected stays as it is
    return with_varlen(spec)


def _replace_layers(model: Any) -> None:
    """Puts our layers in place of torchtitan's in a model's configuration."""
    for stock, ours in REPLACED.items():
        for _, config, parent, name in list(model.traverse(stock)):
            if config._owner is stock._owner:
                setattr(parent, name, copied(_ours(type(config), stock, ours), config))


def _ours(kind: type, stock: type, ours: Any) -> Any:
    """The configuration of our layer; where a converter has derived one from torchtitan's, derived from that."""
    return ours if kind is stock else type(kind.__name__, (kind,), {"_owner": ours._owner})


def _check_layers(model: nn.Module) -> None:
    """Raises ValueError, one line, where a converter or an override has put a layer of its own in place of ours."""
    for name, layer in model.named_modules():
        needed = [ours._owner for stock, ours in REPLACED.items() if isinstance(layer, stock._owner)]
        if needed and not isinstance(layer, tuple(needed)):
            raise ValueError(
                f"{name} is {type(layer).__qualname__}, but {needed[-1].__name__} is needed here; leave out the "
                "converter or override that makes it so, or convert what with_magi returns"
            )


def with_varlen(spec: ModelSpec) -> ModelSpec:
    """The same model with our layers, accepting our attention under context parallelism.

    Raises:
        ValueError: no model that is served, or not as it is served; one line.
    """
    check_model(spec.name)
    if spec.name in BY_FILE and spec.flavor != HF_FLAVOR:
        raise ValueError(
            f"{spec.name} {quoted(spec.flavor)} may see pictures, which is not trained here; train the text part of a "
            'checkpoint with model.flavor = "hf"'
        )
    attention = spec.model.first_attention.inner_attention
    if not isinstance(attention, FlexAttention.Config):
        kind = type(attention).__qualname__.removesuffix(".Config")
        raise ValueError(f'the attention of {spec.name} is {kind}; make the model with attn_backend="flex"')
    if getattr(spec.model, "mtp_layers", None):
        raise ValueError(f"{spec.name} has mtp_layers, which are not trained here; set num_mtp_layers to 0")
    _replace_layers(spec.model)
    adapter = ADAPTERS.get(spec.name, spec.state_dict_adapter)
    # torchtitan's own of Muse Glimmer wants a backend that is refused here; the text part needs no more than Llama.
    parallelize: Any = parallelize_llama if spec.name == "muse_glimmer" else spec.parallelize_fn
    balance = spec.post_optimizer_build_fn
    return replace(
        spec,
        parallelize_fn=partial(_parallelize, parallelize),
        post_optimizer_build_fn=balance and partial(_balance, balance),
        state_dict_adapter=partial(adapter_of_all_layouts, adapter),
    )


def _balance(stock: Any, optimizers: Any, model_parts: Any, parallel_dims: Any) -> None:
    """Keeps what experts have counted for the log: torchtitan moves their bias by the counts of a step, and deletes
    these."""
    optimizers.register_step_pre_hook(lambda *_, **__: note_expert_counts(model_parts))
    stock(optimizers, model_parts, parallel_dims)


class _WithoutCP:
    """torchtitan's ParallelDims for its ``parallelize_fn``, which must leave our attention alone: it is
    context-parallel by itself."""

    cp_enabled = False

    def __init__(self, dims: Any) -> None:
        self._dims = dims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dims, name)


def _parallelize(stock: Any, model: Any, *, parallel_dims: Any, **options: Any) -> nn.Module:
    _check_layers(model)
    join_local_layers(model)
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.register_forward_pre_hook(_arrived)
            # DTensor cannot view tokens of a number of packs that torch.compile takes for variable, as validation's.
            torch._dynamo.config.automatic_dynamic_shapes &= not parallel_dims.tp_enabled
    model = stock(model, parallel_dims=_WithoutCP(parallel_dims), **options)
    check_factors(model)
    if isinstance(checkpointing := options["ac_config"], MagiMixedAC.Config):
        offload_layers(model, checkpointing.keeping, torch.device(utils.device_type))
    fit_reductions(model, utils.device_type, parallel_dims.dp_replicate_enabled)
    if utils.device_type == "cpu" and parallel_dims.pp_enabled:
        draw_stage(model, parallel_dims)
    return model


def _arrived(experts: nn.Module, inputs: Any) -> Any:
    """Waits for tokens: of those still on their way from tensor-parallel ranks, torch's ``local_map`` loses the
    gradient, as it waits for them outside of autograd."""
    x_BLD, *others = inputs
    return (x_BLD.clone() if isinstance(x_BLD, DTensor) else x_BLD, *others)


def model_of(config: ModelConfig) -> Any:
    """torchtitan's configuration of that model.

    Raises:
        ValueError: torchtitan 0.3 has no such model; one line, to be put behind the path of the config.json.
    """
    name, stock = config.model, MODELS[config.model]
    if config.tied and name not in ("llama3", "qwen3", "qwen3_5"):
        raise ValueError(f"tie_word_embeddings is True, which torchtitan's {name} has not; use a checkpoint without")
    if family := {"muse_glimmer": our_muse_glimmer, "qwen3_5": our_qwen3_5}.get(name):
        return family.model_of(config, _rope_of(config))
    build = our_deepseek_v3.layers_of if config.latent else {"gpt_oss": our_gpt_oss.layers_of}.get(name, _layers_of)
    output = qwen3._LINEAR_INIT if stock is qwen3 else stock._output_linear_init(config.dim)
    size = {"in_features": config.dim, "out_features": config.vocab_size}
    embedding = stock._EMBEDDING_SKIP_INIT if config.tied else stock._EMBEDDING_INIT
    model = CONFIGS[name](
        dim=config.dim,
        vocab_size=config.vocab_size,
        enable_weight_tying=config.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=config.vocab_size, embedding_dim=config.dim, param_init=embedding
        ),
        norm=RMSNorm.Config(normalized_shape=config.dim, param_init=stock._NORM_INIT),
        lm_head=Linear.Config(**size, param_init=output),
        layers=build(config, _rope_of(config)),
    )
    for _, norm, _, _ in model.traverse(RMSNorm.Config):
        norm.eps = config.norm_eps
    if config.latent is not None:
        our_deepseek_v3.set_latent_norms(model)
    return model


def _layers_of(config: ModelConfig, rope: RoPE.Config) -> list[Any]:
    """The layers of llama3 and qwen3."""
    common: dict[str, Any] = {"n_layers": config.num_layers, "dim": config.dim, "n_heads": config.num_heads_q}
    common |= {"n_kv_heads": config.num_heads_kv, "attn_backend": "flex", "rope": rope}
    if config.model == "llama3":
        if config.head_dim * config.num_heads_q != config.dim:
            raise ValueError(
                f"head_dim is {config.head_dim}, but torchtitan's llama3 has hidden_size / num_attention_heads only, "
                f"{config.dim} / {config.num_heads_q}; use a checkpoint of that shape"
            )
        return llama3._build_llama3_layers(**common, hidden_dim=config.hidden_dim)
    common["head_dim"] = config.head_dim
    if (experts := config.experts) is None:
        return qwen3._build_qwen3_layers(**common, hidden_dim=config.hidden_dim)
    layers = qwen3._build_qwen3_moe_layers(
        **common,
        moe_hidden_dim=experts.hidden_dim,
        num_experts=experts.num_experts,
        top_k=experts.top_k,
        moe_comm_backend="standard",
    )
    for layer in layers:
        layer.moe.router.route_norm = experts.norm_topk_prob
        layer.moe.load_balance_coeff = None  # no bias where experts are selected: a checkpoint has none
    return layers


def _rope_of(config: ModelConfig) -> RoPE.Config:
    rope = config.rope
    is_complex = config.model in COMPLEX
    common: dict[str, Any] = {"dim": config.rotary_dim, "max_seq_len": config.max_positions, "theta": rope.theta}
    kind = ComplexRoPE if is_complex else CosSinRoPE
    if rope.type == "default":
        return kind.Config(**common)
    if rope.type == "yarn":
        return kind.Config(
            **common,
            scaling="yarn",
            rope_factor=rope.factor,
            beta_fast=rope.beta_fast,
            beta_slow=rope.beta_slow,
            original_seq_len=rope.original_max_positions,
            truncate=rope.truncate,
        )
    if is_complex:  # linear: every wavelength is above 0, so all frequencies are divided
        return ComplexRoPE.Config(
            **common,
            scaling="llama",
            scaling_factor=rope.factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor if rope.type == "llama3" else 2.0,
            original_max_position_embeddings=rope.original_max_positions if rope.type == "llama3" else 0,
        )
    if rope.type == "linear":
        return LinearRoPE.Config(**common, rope_factor=rope.factor)
    raise ValueError(
        f"rope_type is {quoted(rope.type)}, which torchtitan's {config.model} has not; use a checkpoint without it"
    )


def temperature_of(config: ModelConfig) -> float:
    """Factor of the scores that YaRN asks for, beside what torchtitan's model has of it."""
    if config.model == "qwen3_5":  # whose rotated elements have it
        return 1.0
    has = yarn_factor(config.rope.factor) if config.model == "gpt_oss" and config.rope.type == "yarn" else 1.0
    return (config.rope.attention_factor / has) ** 2


def config_of(model: Any) -> ModelConfig:
    """The model of torchtitan's configuration."""
    name = next(name for name, kind in CONFIGS.items() if isinstance(model, kind))
    attention, layers = model.first_attention, model.layers
    others: dict[str, Any] = {"num_heads_kv": attention.n_heads}
    if name == "deepseek_v3":
        others |= {"latent": our_deepseek_v3.latent_of(attention), "value_dim": attention.v_head_dim}
        head_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    else:
        others["num_heads_kv"] = attention.n_kv_heads or attention.n_heads
        head_dim = attention.head_dim or model.dim // attention.n_heads
    if name == "gpt_oss":
        windows = tuple(layer.attention.sliding_window_size or 0 for layer in layers)
        others["windows"] = windows if any(windows) else ()
    dense = [layer.feed_forward for layer in layers if layer.moe is None]
    if len(dense) < len(layers):
        moe = layers[len(dense)].moe
        others |= {"experts": _experts(moe, len(dense)), "other": tuple(_unsupported_moe_options(moe, name))}
    return ModelConfig(
        model=name,
        dim=model.dim,
        num_layers=len(layers),
        num_heads_q=attention.n_heads,
        head_dim=head_dim,
        hidden_dim=dense[0].w1.out_features if dense else 0,
        vocab_size=model.vocab_size,
        norm_eps=model.norm.eps,
        rope=_rope(attention.rope, name),
        tied=model.enable_weight_tying,
        max_positions=attention.rope.max_seq_len,
        **others,
    )


def _experts(moe: Any, num_dense_layers: int) -> Experts:
    """The experts of a layer's configuration."""
    router, width, shared = moe.router, moe.routed_experts.inner_experts.hidden_dim, moe.shared_experts
    return Experts(
        moe.num_experts,
        router.top_k,
        width,
        router.route_norm,
        num_dense_layers,
        num_shared=shared.w1.out_features // width if shared else 0,
        num_groups=router.num_expert_groups or 1,
        top_groups=router.num_limited_groups if router.num_expert_groups else 1,
        scale=router.route_scale,
    )


def _unsupported_moe_options(moe: Any, model: str) -> Iterator[str]:
    """What a layer has that the published models of its architecture have not."""
    if moe.router.score_func != ("sigmoid" if model == "deepseek_v3" else "softmax"):
        yield f"score_func {moe.router.score_func}"
    if model != "deepseek_v3" and moe.shared_experts is not None:
        yield "shared experts"
    if model != "deepseek_v3" and moe.load_balance_coeff is not None:
        yield "a bias by which experts are chosen"


def _rope(rope: Any, model: str) -> Rope:
    if isinstance(rope, LinearRoPE.Config):
        return Rope(rope.theta, "linear", rope.rope_factor)
    if rope.scaling == "none":
        return Rope(rope.theta)
    if rope.scaling == "yarn":
        betas = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        factor = yarn_factor(rope.rope_factor) if model == "gpt_oss" else 1.0
        others = {"original_max_positions": rope.original_seq_len, "attention_factor": factor}
        return Rope(rope.theta, "yarn", rope.rope_factor, **betas, **others)
    if rope.original_max_position_embeddings == 0:
        return Rope(rope.theta, "linear", rope.scaling_factor)
    factors = rope.scaling_factor, rope.low_freq_factor, rope.high_freq_factor
    return Rope(rope.theta, "llama3", *factors, rope.original_max_position_embeddings)
