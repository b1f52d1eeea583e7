"""torchtitan's model arguments: with varlen attention, and from and to our own ``ModelConfig``."""

import math
from collections import UserDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_magi.models.model_config import Experts, ModelConfig, Rope
from torchtitan_magi.titan.v02.attention import PlanMetadata, attention_metadata
from torchtitan_magi.titan.v02.config import without_context_parallel
from torchtitan_magi.training.process.all_ranks import rank_and_size
from torchtitan_magi.wording import quoted

MODELS = ("llama3", "qwen3")
OF_0_3 = ("gpt_oss", "deepseek_v3", "muse_glimmer", "kimi_k2_7", "qwen3_5")  # which torchtitan 0.2.2 has not
VARLEN = {"attn_type": "varlen", "attn_mask_type": "block_causal"}
# torchtitan's llama3 always scales frequencies as Llama 3.1 does. No wavelength is above the first of these lengths, so
# none is scaled; every one is above the second, so all are divided by the factor.
NEVER_SCALED, ALWAYS_SCALED = 2**60, 0
COMMON = {  # fields of a ModelConfig -> of the arguments of both models
    "dim": "dim",
    "num_layers": "n_layers",
    "num_heads_q": "n_heads",
    "num_heads_kv": "n_kv_heads",
    "vocab_size": "vocab_size",
    "norm_eps": "norm_eps",
    "max_positions": "max_seq_len",
}
# How the experts of a Qwen3 checkpoint are chosen, as far as its config.json does not say it.
QWEN3_ROUTING = {
    "num_shared_experts": 0,
    "score_func": "softmax",
    "route_scale": 1.0,
    "gate_bias": False,
    "score_before_experts": False,
    "num_expert_groups": None,
}


class Flavors(UserDict[str, Any]):
    """A model's arguments by flavor. Those added later, also by a user's module, become usable here as well."""

    def __setitem__(self, flavor: str, args: Any) -> None:
        super().__setitem__(flavor, _for_plans(args))


def varlen_flavors(stock: Mapping[str, Any]) -> Flavors:
    """The model's flavors, and for each with dense attention and no varlen one yet, ``<flavor>_varlen``."""
    flavors = dict(stock)
    for name, args in stock.items():
        if args.attn_type == "sdpa" and not {f"{name}_varlen", f"{name}_varlen_attn"} & set(stock):
            flavors[f"{name}_varlen"] = replace(args, **VARLEN)
    return Flavors(flavors)


def args_of(config: ModelConfig) -> Any:
    """torchtitan's arguments of that model, with varlen attention.

    Raises:
        ValueError: torchtitan 0.2.2 has no such model; one line, to be put behind the path of the config.json.
    """
    check_model(config.model)
    return _llama3_args(config) if config.model == "llama3" else _qwen3_args(config)


def check_name(name: str) -> None:
    """Raises ValueError, one line, for a model that neither torchtitan nor a module of the user has."""
    try:
        get_train_spec(name)
    except ValueError:
        raise ValueError(
            f"model.name is {quoted(name)}, which is no model of torchtitan 0.2.2; use one of {', '.join(MODELS)}, or "
            "name the module that registers it in magi.imports"
        ) from None


def check_model(name: str) -> None:
    """Raises ValueError, one line with the remedy, for a model that is not served."""
    if name in OF_0_3:
        raise ValueError(f"model.name is {quoted(name)}, which needs torchtitan 0.3; pip install torchtitan==0.3.0")
    if name not in MODELS:
        raise ValueError(f"model.name is {quoted(name)}, which has no varlen attention; use one of {', '.join(MODELS)}")


def _check_rope(rope: Rope, kinds: tuple[str, ...], model: str) -> None:
    if rope.type not in kinds:
        known = ", ".join(map(repr, kinds))
        raise ValueError(
            f"rope_type is {rope.type!r}, but torchtitan 0.2.2's {model} has {known} only; use a checkpoint of such a "
            "type, take it out if it was added by hand, or install torchtitan 0.3"
        )


def _common_args(config: ModelConfig) -> dict[str, Any]:
    """What the arguments of both models have."""
    common = {theirs: getattr(config, ours) for ours, theirs in COMMON.items()}
    return common | {"rope_theta": config.rope.theta} | VARLEN


def _llama3_args(config: ModelConfig) -> TransformerModelArgs:
    _check_rope(config.rope, ("default", "linear", "llama3"), "llama3")
    if config.tied:
        raise ValueError(
            "tie_word_embeddings is True, which torchtitan 0.2.2's llama3 has not; use a checkpoint with an output "
            "layer of its own"
        )
    if config.head_dim * config.num_heads_q != config.dim:
        raise ValueError(
            f"head_dim is {config.head_dim}, but torchtitan 0.2.2's llama3 has hidden_size / num_attention_heads only, "
            f"{config.dim} / {config.num_heads_q}; use a checkpoint of that shape"
        )
    rope = config.rope
    scaling = {
        "default": RoPEScalingArgs(original_max_position_embeddings=NEVER_SCALED),
        "linear": RoPEScalingArgs(rope.factor, original_max_position_embeddings=ALWAYS_SCALED),
        "llama3": RoPEScalingArgs(
            rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
        ),
    }
    return TransformerModelArgs(
        **_common_args(config),
        multiple_of=1,
        ffn_dim_multiplier=(config.hidden_dim + 0.5) / _llama3_hidden_dim(config.dim, None, 1),
        rope_scaling_args=scaling[rope.type],
    )


def _qwen3_args(config: ModelConfig) -> Qwen3ModelArgs:
    _check_rope(config.rope, ("default",), "qwen3")
    args = Qwen3ModelArgs(
        **_common_args(config),
        head_dim=config.head_dim,
        hidden_dim=config.hidden_dim,
        enable_weight_tying=config.tied,
    )
    experts = config.experts
    if experts is None:
        return args
    moe_args = MoEArgs(
        num_experts=experts.num_experts,
        top_k=experts.top_k,
        route_norm=experts.norm_topk_prob,
        load_balance_coeff=None,  # no bias where experts are selected: a checkpoint has none
        **QWEN3_ROUTING,
    )
    return replace(args, moe_enabled=True, moe_inter_dim=experts.hidden_dim, moe_args=moe_args)


def check_tied(job_config: Any, config: ModelConfig) -> None:
    """Refuses FSDP2 of a model whose output layer is its embedding, unless TP makes two parameters of them.

    Raises:
        ValueError: one line with the remedy.
    """
    parallelism = job_config.parallelism
    world = rank_and_size()[1]
    tp = parallelism.tensor_parallel_degree
    if config.tied and tp == 1 and world > parallelism.data_parallel_replicate_degree:
        raise ValueError(
            "tie_word_embeddings is True for this model, which FSDP2 of torchtitan 0.2.2, on which context parallelism "
            "runs too, cannot train; set parallelism.tensor_parallel_degree to 2"
        )


def config_of(args: Any) -> ModelConfig:
    """The model of torchtitan's arguments; a model whose scaling of frequencies scales none has "default" positions."""
    common: dict[str, Any] = {ours: getattr(args, theirs) for ours, theirs in COMMON.items()}
    common["num_heads_kv"] = args.n_kv_heads or args.n_heads
    if isinstance(args, TransformerModelArgs):
        return ModelConfig(
            **common,
            model="llama3",
            head_dim=args.dim // args.n_heads,
            hidden_dim=_llama3_hidden_dim(args.dim, args.ffn_dim_multiplier, args.multiple_of),
            rope=_llama3_rope(args),
        )
    experts, other = None, [] if args.qk_norm else ["qk_norm False"]
    if args.moe_enabled:
        moe = args.moe_args
        experts = Experts(moe.num_experts, moe.top_k, args.moe_inter_dim, moe.route_norm)
        odd = [name for name, value in QWEN3_ROUTING.items() if getattr(moe, name) != value]
        other += [f"{name} {quoted(getattr(moe, name))}" for name in odd]
    return ModelConfig(
        **common,
        model="qwen3",
        head_dim=args.head_dim,
        hidden_dim=args.hidden_dim,
        rope=Rope(args.rope_theta),
        tied=args.enable_weight_tying,
        experts=experts,
        other=tuple(other),
    )


def _llama3_hidden_dim(dim: int, multiplier: float | None, multiple_of: int) -> int:
    """The width of the feed-forward that torchtitan's llama3 makes of these."""
    hidden_dim = int(2 * 4 * dim / 3)
    if multiplier is not None:
        hidden_dim = int(multiplier * hidden_dim)
    return math.ceil(hidden_dim / multiple_of) * multiple_of


def _llama3_rope(args: TransformerModelArgs) -> Rope:
    scaling, theta = args.rope_scaling_args, args.rope_theta
    original = scaling.original_max_position_embeddings
    if original == NEVER_SCALED:
        return Rope(theta)
    if original == ALWAYS_SCALED:
        return Rope(theta, "linear", scaling.scaling_factor)
    factors = scaling.scaling_factor, scaling.low_freq_factor, scaling.high_freq_factor
    return Rope(theta, "llama3", *factors, original)


def _for_plans(args: Any) -> Any:
    """The model arguments, accepting varlen attention under context parallelism.

    Their operation count leaves attention out, which ``MagiMetricsProcessor`` adds from the real documents.
    """
    stock = type(args)

    def update_from_config(self: Any, job_config: Any, **kwargs: Any) -> None:
        stock.update_from_config(self, without_context_parallel(job_config), **kwargs)

    def get_nparams_and_flops(self: Any, model: nn.Module, seq_len: int) -> tuple[int, int]:
        return stock.get_nparams_and_flops(self, model, 0)

    methods = {"update_from_config": update_from_config, "get_nparams_and_flops": get_nparams_and_flops}
    return type(stock.__name__, (stock,), methods)(**vars(args))


def with_plan_metadata(stock: Any) -> Any:
    """The model class, making our metadata for varlen attention."""

    def get_attention_masks(
        self: Any, input_batch: Tensor, tokenizer: Any, extra_inputs: dict[str, Any]
    ) -> PlanMetadata:
        return attention_metadata(self.magi, input_batch, tokenizer.eos_id, extra_inputs)

    return type(stock.__name__, (stock,), {"get_attention_masks": get_attention_masks})
