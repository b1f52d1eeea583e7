"""How large a model is, as a whole and on one rank: numbers of parameters, heads of attention."""

from dataclasses import dataclass

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.planning.cost_model import Heads


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a model without biases, or of what one rank holds of it.

    Attributes:
        block: one block without its experts.
        experts: all experts of one block.
        vocabulary: the embedding; the output layer has as many.
        norm: the norm after the last block.
        dense: all that is not an expert.
    """

    block: int
    experts: int
    vocabulary: int
    norm: int
    dense: int


def parameters_of(model: ModelConfig, tensor_parallel: int = 1, expert_ranks: int = 1) -> Parameters:
    """Parameters of torchtitan's llama3 or qwen3 on a rank: tensor parallelism splits all but norms and gate.

    Args:
        expert_ranks: ranks that share out each block's experts.
    """
    heads, dim = 2 * (model.num_heads_q + model.num_heads_kv), model.dim
    split, block, experts = dim * heads * model.head_dim, 2 * dim, 0
    if model.experts is None:
        split += 3 * dim * model.hidden_dim
    else:
        block += dim * model.experts.num_experts
        experts = 3 * dim * model.experts.hidden_dim * model.experts.num_experts // expert_ranks
    block += split // tensor_parallel + (2 * model.head_dim if model.model == "qwen3" else 0)
    vocabulary = model.vocab_size * dim // tensor_parallel
    dense = model.num_layers * block + vocabulary * (1 if model.tied else 2) + dim
    return Parameters(block, experts, vocabulary, dim, dense)


def heads_of_rank(model: ModelConfig, tensor_parallel: int) -> Heads:
    """Shape of the attention layers on one rank.

    Raises:
        ValueError: the degree does not divide the heads.
    """
    queries, keys = model.num_heads_q, model.num_heads_kv
    if queries % tensor_parallel or keys % tensor_parallel:
        raise ValueError(
            f"parallelism.tensor_parallel_degree is {tensor_parallel}, but the model has {queries} query heads and "
            f"{keys} K/V heads; use a degree that divides both"
        )
    latent = (model.latent.kv_rank, model.latent.rope_dim) if model.latent else ()
    return Heads(queries // tensor_parallel, keys // tensor_parallel, model.head_dim, model.value_dim, latent)
