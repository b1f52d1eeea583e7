"""The text part of Qwen3.5 to 3.8 in torchtitan 0.3: a decoder with layers that recur."""

import importlib
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.models import qwen3
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import dense_sequence_parallel_placement, set_decoder_sharding_config
from torchtitan.models.utils import get_moe_model_nparams_and_flops

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.titan.v03.families.configs import copied
from torchtitan_magi.titan.v03.families.positions import YarnRoPE


def _delta_net() -> Any:
    """The layers' module, imported by those alone who have such a model: it takes flash-linear-attention."""
    return importlib.import_module("torchtitan_magi.titan.v03.families.delta_net")


class TextModel(Decoder):
    """The text part of torchtitan's Qwen3.5."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        linear_flops: int
        """Operations of all layers' recurrence for each token, forward and backward."""

        def update_from_config(self, *, config: Any, **others: Any) -> None:
            """Takes degrees and lengths of a run: how tensor parallelism splits layers, and the length of positions."""
            Decoder.Config.update_from_config(self, config=config, **others)
            set_layer = importlib.import_module("torchtitan.models.qwen3_5.sharding")._set_qwen35_layer_sharding
            set_decoder_sharding_config(self, enable_sp=True)
            options = {"attention_input_layout": dense_sequence_parallel_placement()}
            options["enable_ep"] = config.parallelism.expert_parallel_degree > 1
            for layer in self.layers:
                set_layer(layer, **options)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Numbers of parameters, and of operations for a token: of products, of attention and of recurrences."""
            attention: Any = self.first_attention
            heads, dims = attention.n_heads, 2 * attention.head_dim
            numbers: tuple[int, int] = get_moe_model_nparams_and_flops(self, model, heads, dims, seq_len)
            return numbers[0], numbers[1] + self.linear_flops


def model_of(config: ModelConfig, rope: Any) -> Any:
    """torchtitan's configuration of the model."""
    delta_net = _delta_net()
    stock, size = delta_net.qwen3_5, {"in_features": config.dim, "out_features": config.vocab_size}
    return TextModel.Config(
        dim=config.dim,
        vocab_size=config.vocab_size,
        enable_weight_tying=config.tied,
        linear_flops=config.linear_flops,
        tok_embeddings=Embedding.Config(
            num_embeddings=config.vocab_size,
            embedding_dim=config.dim,
            param_init=qwen3._EMBEDDING_SKIP_INIT if config.tied else stock._EMBEDDING_INIT,
        ),
        norm=stock.OffsetRMSNorm.Config(dim=config.dim, eps=config.norm_eps, param_init=stock._OFFSET_NORM_INIT),
        lm_head=Linear.Config(**size, param_init=stock._output_linear_init(config.dim)),
        layers=delta_net.layers_of(config, _rope_of(config, rope)),
    )


def _rope_of(config: ModelConfig, rope: Any) -> Any:
    """The positions of a layer. rope: torchtitan's configuration of them."""
    if config.rope.attention_factor == 1:
        return rope
    return copied(YarnRoPE.Config, rope, attention_factor=config.rope.attention_factor)
