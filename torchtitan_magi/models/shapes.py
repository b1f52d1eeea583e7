"""How large a model is, as a whole and on one rank: numbers of parameters, heads of attention."""

from collections.abc import Collection
from dataclasses import dataclass

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.planning.cost_model import Heads


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a model, or of what one rank holds of it.

    Attributes:
        block: the largest block without its experts.
        experts: all experts of one block, but those that every token goes to.
        vocabulary: the embedding; the output layer has as many.
        norm: the norm after the last block.
        dense: all that is not an expert.
    """

    block: int
    experts: int
    vocabulary: int
    norm: int
    dense: int


@dataclass(frozen=True)
class Block:
    """Numbers of parameters of one block.

    Attributes:
        split, whole: without its experts, what tensor parallelism splits and what each rank has.
        expert: one of its experts; 0 where there are none.
        used: those that a token's products go through.
    """

    split: int
    whole: int
    expert: int
    used: int


def block_of(model: ModelConfig, number: int) -> Block:
    """The parameters of a model's block of that number."""
    is_linear = model.linear is not None and number in model.linear.layers
    split, whole = _linear_attention(model) if is_linear else _attention(model)
    whole += (4 if model.muse else 2) * model.dim  # norms
    experts = model.experts
    if experts is None or number < experts.num_dense_layers:
        dense = 3 * model.dim * model.hidden_dim
        return Block(split + dense, whole, 0, split + dense + whole)
    has_biases = model.model == "gpt_oss"
    expert = 3 * (model.dim * experts.hidden_dim) + has_biases * (2 * experts.hidden_dim + model.dim)
    split += experts.num_shared * 3 * model.dim * experts.hidden_dim
    whole += (model.dim + has_biases) * experts.num_experts
    whole += model.dim * (model.model == "qwen3_5")  # the gate of shared experts
    return Block(split, whole, expert, split + whole + experts.top_k * expert)


def weights_used(model: ModelConfig) -> int:
    """Parameters that a token is computed with: those of its experts only, and of the output layer."""
    return sum(block_of(model, number).used for number in range(model.num_layers)) + model.vocab_size * model.dim


def _attention(model: ModelConfig) -> tuple[int, int]:
    """Parameters of a block's attention that tensor parallelism splits, and those that it does not."""
    dim, queries, keys = model.dim, model.num_heads_q * model.head_dim, model.num_heads_kv * model.head_dim
    values, out = model.num_heads_kv * model.value_dim, model.num_heads_q * model.value_dim
    if (latent := model.latent) is not None:
        expanded = model.num_heads_kv * (model.head_dim - latent.rope_dim + model.value_dim)
        split = (latent.q_rank or dim) * queries + latent.kv_rank * expanded + out * dim
        whole = dim * (latent.q_rank + latent.kv_rank + latent.rope_dim) + latent.q_rank + latent.kv_rank
        return split, whole
    split, whole = dim * (queries + keys + values + out), 0
    if model.model in ("qwen3", "qwen3_5"):
        whole += 2 * model.head_dim
    if model.model == "gpt_oss":
        split += queries + keys + values + dim + model.num_heads_q  # biases and sinks
    if model.muse is not None or model.model == "qwen3_5":
        split += dim * out  # the gate of the output
    return split, whole


def _linear_attention(model: ModelConfig) -> tuple[int, int]:
    """Likewise of a block that has linear attention."""
    assert model.linear is not None
    linear, dim = model.linear, model.dim
    heads, values = linear.num_heads_v, linear.num_heads_v * linear.value_dim
    split = linear.channels * (dim + linear.conv_width) + 2 * dim * (values + heads) + 2 * heads
    return split, linear.value_dim


def parameters_of(model: ModelConfig, tensor_parallel: int = 1, expert_ranks: int = 1) -> Parameters:
    """Parameters of torchtitan's model on a rank: tensor parallelism splits all but norms, router and latent vectors.

    Args:
        expert_ranks: ranks that share out each block's experts.
    """
    kinds = [block_of(model, number) for number in range(model.num_layers)]
    blocks = [kind.split // tensor_parallel + kind.whole for kind in kinds]
    experts = max(kind.expert for kind in kinds) * (model.experts.num_experts if model.experts else 0) // expert_ranks
    vocabulary = model.vocab_size * model.dim // tensor_parallel
    dense = sum(blocks) + vocabulary * (1 if model.tied else 2) + model.dim
    return Parameters(max(blocks), experts, vocabulary, model.dim, dense)


def adapters_of(model: ModelConfig, rank: int, targets: Collection[str]) -> int:
    """Parameters of low-rank adapters beside the layers that ``magi.lora.target_modules`` names, as far as the model
    has them."""
    if not rank:
        return 0
    queries, out = model.num_heads_q * model.head_dim, model.num_heads_q * model.value_dim
    rows = model.num_heads_kv * (model.head_dim + model.value_dim)
    sides = {"wo": out + model.dim}  # rows and columns of each matrix
    if (latent := model.latent) is not None:
        expanded = rows - model.num_heads_kv * latent.rope_dim
        sides |= {"wkv_a": model.dim + latent.kv_rank + latent.rope_dim, "wkv_b": latent.kv_rank + expanded}
        of_q = {"wq_a": model.dim + latent.q_rank, "wq_b": latent.q_rank + queries}
        sides |= of_q if latent.q_rank else {"wq": model.dim + queries}
    elif model.muse:  # keys and values have a matrix each
        sides |= {"wq": model.dim + queries, "wkv": 2 * model.dim + rows}
    elif model.model == "qwen3_5":  # a matrix each, that of queries with a gate's rows
        sides |= {"wq": model.dim + 2 * queries, "wk": model.dim + rows // 2, "wv": model.dim + rows // 2}
    else:
        sides["wqkv"] = model.dim + queries + rows
    each = model.num_attention_layers * sum(size for name, size in sides.items() if name in targets)
    if (linear := model.linear) is not None:
        values = linear.num_heads_v * linear.value_dim
        sides = {"in_proj_qkv": 3 * model.dim + linear.channels}  # three matrices
        sides |= dict.fromkeys(("in_proj_z", "out_proj"), model.dim + values)
        sides |= dict.fromkeys(("in_proj_a", "in_proj_b"), model.dim + linear.num_heads_v)
        each += len(linear.layers) * sum(size for name, size in sides.items() if name in targets)
    experts, of_experts = model.experts, num_moe_layers(model)
    widths = [model.hidden_dim] * (model.num_layers - of_experts)  # of feed-forwards that every token goes through
    if experts is not None:
        widths += [experts.num_shared * experts.hidden_dim] * (of_experts if experts.num_shared else 0)
        routed = 2 * model.dim + 3 * experts.hidden_dim  # both products of the input share the first matrix
        each += of_experts * experts.num_experts * routed * ("experts" in targets)
    names = [name in targets for name in ("w1", "w2", "w3")]
    return rank * (each + sum(names) * sum(model.dim + width for width in widths))


def num_moe_layers(model: ModelConfig) -> int:
    """How many layers have experts."""
    return model.num_layers - model.experts.num_dense_layers if model.experts else 0


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
    if (linear := model.linear) is not None and linear.num_heads_qk % tensor_parallel:
        raise ValueError(
            f"parallelism.tensor_parallel_degree is {tensor_parallel}, but linear attention has {linear.num_heads_qk} "
            "heads of queries and keys; use a degree that divides them"
        )
    latent = (model.latent.kv_rank, model.latent.rope_dim) if model.latent else ()
    return Heads(queries // tensor_parallel, keys // tensor_parallel, model.head_dim, model.value_dim, latent)
