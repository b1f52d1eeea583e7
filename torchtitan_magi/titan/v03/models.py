"""torchtitan 0.3's models: from and to our own ``ModelConfig``."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils

from torchtitan_magi.titan.v03.experts import use_our_experts
from torchtitan_magi.training.cpu import reduce_by_plain_sums
from torchtitan_magi.training.model_config import Experts, ModelConfig, Rope
from torchtitan_magi.wording import quoted

MODELS = {"llama3": llama3, "qwen3": qwen3}
VARLEN_SUFFIXES = ("_varlen", "_varlen_attn")  # of 0.2.2's flavors; here every flavor has varlen attention


class LinearRoPE(CosSinRoPE):
    """Rotary positions of which every frequency is divided by a factor."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        config = self.config
        inv_freq = 1.0 / (config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim)) / config.rope_factor
        angles = torch.outer(torch.arange(config.max_seq_len).float(), inv_freq)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


def stock_flavor(name: str, flavor: str) -> str | None:
    """torchtitan's flavor of that name, with or without 0.2.2's suffix; None if it has none."""
    plain = next((flavor.removesuffix(suffix) for suffix in VARLEN_SUFFIXES if flavor.endswith(suffix)), flavor)
    configs = getattr(MODELS[name], f"{name}_configs")
    return plain if plain in configs else None


def model_spec(name: str, flavor: str, config: ModelConfig | None, converters: list[Any]) -> ModelSpec:
    """torchtitan's bundle of a model for its Trainer, with our attention where context parallelism is concerned.

    Args:
        config: the model; None: that of the flavor.
    """
    stock = stock_flavor(name, flavor) if config is None else "debugmodel"
    spec = MODELS[name].model_registry(stock, attn_backend="flex")
    spec.flavor = flavor
    if config is not None:
        spec.model = model_of(config)
    use_our_experts(spec.model)
    for converter in converters:
        spec.model = converter.build().convert(spec.model)
    return with_varlen(spec)


def with_varlen(spec: ModelSpec) -> ModelSpec:
    """The same model, accepting our attention under context parallelism."""
    return replace(
        spec,
        parallelize_fn=partial(_parallelize, spec.parallelize_fn),
        state_dict_adapter=partial(_adapter, spec.state_dict_adapter),
    )


class _WithoutCP:
    """torchtitan's ParallelDims for its ``parallelize_fn``, which must leave our attention alone: it is
    context-parallel by itself."""

    cp_enabled = False

    def __init__(self, dims: Any) -> None:
        self._dims = dims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dims, name)


def _parallelize(stock: Any, model: Any, *, parallel_dims: Any, **options: Any) -> nn.Module:
    model = stock(model, parallel_dims=_WithoutCP(parallel_dims), **options)
    if utils.device_type == "cpu":
        reduce_by_plain_sums(model)
    return model


def _adapter(stock: Any, model_config: Any, hf_assets_path: str | None) -> Any:
    """torchtitan's own, without its reading of the index, which fails for a single file."""
    adapter = stock(model_config, None)
    adapter.hf_assets_path = hf_assets_path
    return adapter


def model_of(config: ModelConfig) -> Any:
    """torchtitan's configuration of that model.

    Raises:
        ValueError: torchtitan 0.3 has no such model; one line, to be put behind the path of the config.json.
    """
    common: dict[str, Any] = {"n_layers": config.num_layers, "dim": config.dim, "n_heads": config.num_heads_q}
    common |= {"n_kv_heads": config.num_heads_kv, "attn_backend": "flex", "rope": _rope_of(config)}
    model: Any
    if config.model == "llama3":
        if config.head_dim * config.num_heads_q != config.dim:
            raise ValueError(
                f"head_dim is {config.head_dim}, but torchtitan's llama3 has hidden_size / num_attention_heads only, "
                f"{config.dim} / {config.num_heads_q}; use a checkpoint of that shape"
            )
        stock, build, make = llama3, llama3._build_llama3_layers, llama3.Llama3Model.Config
        layers = build(**common, hidden_dim=config.hidden_dim)
    else:
        stock, make = qwen3, qwen3.Qwen3Model.Config
        common["head_dim"] = config.head_dim
        if (experts := config.experts) is None:
            layers = qwen3._build_qwen3_layers(**common, hidden_dim=config.hidden_dim)
        else:
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
    embedding = stock._EMBEDDING_SKIP_INIT if config.tied else stock._EMBEDDING_INIT
    output = llama3._output_linear_init(config.dim) if stock is llama3 else qwen3._LINEAR_INIT
    size = {"in_features": config.dim, "out_features": config.vocab_size}
    model = make(
        dim=config.dim,
        vocab_size=config.vocab_size,
        enable_weight_tying=config.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=config.vocab_size, embedding_dim=config.dim, param_init=embedding
        ),
        norm=RMSNorm.Config(normalized_shape=config.dim, param_init=stock._NORM_INIT),
        lm_head=Linear.Config(**size, param_init=output),
        layers=layers,
    )
    for _, norm, _, _ in model.traverse(RMSNorm.Config):
        norm.eps = config.norm_eps
    return model


def _rope_of(config: ModelConfig) -> RoPE.Config:
    rope = config.rope
    common: dict[str, Any] = {"dim": config.head_dim, "max_seq_len": config.max_positions, "theta": rope.theta}
    kind = ComplexRoPE if config.model == "llama3" else CosSinRoPE
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
    if config.model == "llama3":  # linear: every wavelength is above 0, so all frequencies are divided
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
    raise ValueError(f"rope_type is {quoted(rope.type)}, which torchtitan's qwen3 has not; use a checkpoint without it")


def config_of(model: Any) -> ModelConfig:
    """The model of torchtitan's configuration."""
    attention, layer = model.first_attention, model.layers[0]
    is_llama = isinstance(model, llama3.Llama3Model.Config)
    experts, other = None, []
    if layer.moe is not None:
        moe = layer.moe
        router, inner = moe.router, moe.routed_experts.inner_experts
        experts = Experts(moe.num_experts, router.top_k, inner.hidden_dim, router.route_norm)
        if moe.shared_experts is not None or router.score_func != "softmax":
            other.append("experts of another kind than Qwen3's")
    return ModelConfig(
        model="llama3" if is_llama else "qwen3",
        dim=model.dim,
        num_layers=len(model.layers),
        num_heads_q=attention.n_heads,
        num_heads_kv=attention.n_kv_heads or attention.n_heads,
        head_dim=attention.head_dim or model.dim // attention.n_heads,
        hidden_dim=layer.feed_forward.w1.out_features if layer.moe is None else 0,
        vocab_size=model.vocab_size,
        norm_eps=model.norm.eps,
        rope=_rope(attention.rope),
        tied=model.enable_weight_tying,
        experts=experts,
        other=tuple(other),
        max_positions=attention.rope.max_seq_len,
    )


def _rope(rope: Any) -> Rope:
    if isinstance(rope, LinearRoPE.Config):
        return Rope(rope.theta, "linear", rope.rope_factor)
    if rope.scaling == "none":
        return Rope(rope.theta)
    if rope.scaling == "yarn":
        betas = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        return Rope(rope.theta, "yarn", rope.rope_factor, original_max_positions=rope.original_seq_len, **betas)
    if rope.original_max_position_embeddings == 0:
        return Rope(rope.theta, "linear", rope.scaling_factor)
    factors = rope.scaling_factor, rope.low_freq_factor, rope.high_freq_factor
    return Rope(rope.theta, "llama3", *factors, rope.original_max_position_embeddings)
