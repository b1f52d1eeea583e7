"""The text part of Muse Glimmer in torchtitan 0.3: its configuration, and logits of an output layer that caps them."""

from dataclasses import dataclass
from typing import Any

from torchtitan.models import muse_glimmer
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.muse_glimmer.model import SoftCappedLinear

from torchtitan_magi.losses.logprobs import LogitCap
from torchtitan_magi.models.model_config import ModelConfig


class CappedLinear(SoftCappedLinear):
    """torchtitan's output layer, which says how it caps logits, for log-probabilities without all of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(SoftCappedLinear.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert config.output_soft_cap_temp is not None
        self.logit_cap = LogitCap(config.output_multiplier, config.output_soft_cap_temp)


REPLACED: dict[Any, Any] = {SoftCappedLinear.Config: CappedLinear.Config}


def model_of(config: ModelConfig, rope: Any) -> Any:
    """torchtitan's configuration of the model. Its builder knows the published factors and windows only."""
    assert config.muse is not None
    model = muse_glimmer._muse_glimmer_config(
        dim=config.dim,
        n_layers=config.num_layers,
        n_heads=config.num_heads_q,
        n_kv_heads=config.num_heads_kv,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_seq_len=config.max_positions,
        window_pattern=[0],
        output_multiplier=config.muse.logit_scale,
        attn_backend="flex",
    )
    model.lm_head.output_soft_cap_temp = config.muse.logit_limit
    for _, norm, _, _ in model.traverse(RMSNorm.Config):
        norm.eps = config.norm_eps
    for number, layer in enumerate(model.layers):
        _set_layer(layer, number, config, rope)
    return model


def _set_layer(layer: Any, number: int, config: ModelConfig, rope: Any) -> None:
    assert config.muse is not None
    attention, feed_forward = layer.attention, layer.feed_forward
    attention.window_size = (config.windows[number] if config.windows else 0) or None
    attention.use_rope, attention.rope = number not in config.muse.unrotated, rope
    attention.scale_query_by = config.muse.query_scale
    feed_forward.w1.out_features = feed_forward.w3.out_features = feed_forward.w2.in_features = config.hidden_dim
    layer.post_attention_norm.eps = layer.post_ffn_norm.eps = config.muse.post_norm_eps
