"""What training takes of a GPU's memory, by part, predicted from the model, its layout and the tokens on each rank.

A step takes the most memory at one of a few moments; the prediction is the largest of these, with all parts that are
live then. It is meant for SwiGLU decoders as torchtitan's llama3 and qwen3 run them, on packs that one document fills.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_magi.exchange.peer_memory import memory_bytes
from torchtitan_magi.losses.logprobs import CHUNK_LOGITS
from torchtitan_magi.masks.builders import varlen_causal
from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.planning.choose_stages import equal_stages
from torchtitan_magi.planning.cost_model import H200, Heads
from torchtitan_magi.planning.plan import AttnPlan, PlanSpec, plan_afresh
from torchtitan_magi.planning.row_memory import memory_of_rows
from torchtitan_magi.planning.topology import Nodes

GIB = 2**30
FLOAT32 = 4  # bytes
OUTSIDE_PYTORCH = ("rows in flight", "CUDA and NCCL")  # parts that PyTorch's allocator does not hand out
CUDA_AND_NCCL = 3 * GIB // 2  # an estimate: the CUDA context, loaded kernels and NCCL's buffers


@dataclass(frozen=True)
class Setup:
    """What decides about memory.

    Args:
        dp_replicate, dp_shard, cp, tp, ep, etp: parallel degrees; experts of ``ep`` above 1 are shared out over it.
        seq_len: tokens of a pack. packs: of a microbatch on a data-parallel rank.
        checkpointing: torchtitan's activation_checkpoint.mode. every: full checkpointing of every so many-th block, for
            "selective"; 0: by operation. budget: fraction of the activations to keep, for "memory_budget".
        compiled: whether the blocks are compiled. compiled_loss: whether the loss is.
        param_bytes, compute_bytes, reduce_bytes: bytes per element of stored parameters, of what is computed with, and
            of the gradients that are reduced.
        foreach: whether the optimizer, Adam or AdamW, steps all parameters at once by operations on lists of tensors.
        accumulates: whether a step has several microbatches.
        reference: whether a frozen copy of the model is there for preference training.
        offload: whether parameters, gradients and states are in the host's memory.
        whole_logits: whether the logits of all tokens exist at once, as with torchtitan's own loss.
        gpu: whether training runs on GPUs.
        cp_per_machine: context-parallel ranks of a pack in each machine, one number if alike; None: all are in one.
        overlap_stages: magi.overlap_stages.
    """

    model: ModelConfig
    seq_len: int
    packs: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    checkpointing: str = "none"
    every: int = 0
    budget: float = 1.0
    compiled: bool = False
    compiled_loss: bool = False
    param_bytes: int = FLOAT32
    compute_bytes: int = 2
    reduce_bytes: int = FLOAT32
    foreach: bool = False
    accumulates: bool = False
    reference: bool = False
    offload: bool = False
    whole_logits: bool = False
    gpu: bool = True
    cp_per_machine: int | tuple[int, ...] | None = None
    overlap_stages: int = -1

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank."""
        return self.seq_len * self.packs // self.cp

    @property
    def fsdp(self) -> int:
        """Ranks over which FSDP2 shards what is not an expert."""
        return self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """Ranks over which a layer's experts are sharded, in all."""
        return self.fsdp * self.tp


@dataclass(frozen=True)
class Prediction:
    """Bytes on each GPU at the moment of a step that takes the most.

    ``parts``: name -> bytes; they add up to ``total``. ``moment``: in words.
    """

    moment: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


# ---------------------------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters: of a block without its experts, of its experts, of embedding or output layer, of the last
    norm. Of the whole model, or of the part of a tensor- and expert-parallel rank.
    """

    block: int
    experts: int
    vocabulary: int
    norms: int


def _parameters(model: ModelConfig, tp: int = 1, expert_ranks: int = 1) -> Parameters:
    """torchtitan's llama3 and qwen3: without biases; tensor parallelism splits each matrix, but not norms and gate."""
    heads = (2 * model.num_heads_q + 2 * model.num_heads_kv) * model.head_dim
    block, experts = model.dim * heads // tp, 0
    if model.experts is None:
        block += 3 * model.dim * model.hidden_dim // tp
    else:
        block += model.dim * model.experts.num_experts
        experts = 3 * model.dim * model.experts.hidden_dim * model.experts.num_experts // expert_ranks
    block += 2 * model.dim + (2 * model.head_dim if model.model == "qwen3" else 0)
    return Parameters(block, experts, model.vocab_size * model.dim // tp, model.dim)


def num_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model."""
    each = _parameters(model)
    return model.num_layers * (each.block + each.experts) + each.vocabulary * (1 if model.tied else 2) + each.norms


def _on_rank(setup: Setup) -> Parameters:
    """What a rank's GPU holds of a block while it runs, and of embedding or output layer."""
    return _parameters(setup.model, setup.tp, setup.ep * setup.etp if setup.ep > 1 else setup.tp)


def _stored(setup: Setup) -> int:
    """Parameters that a rank stores: its tensor- and expert-parallel part, sharded by FSDP2."""
    model, each = setup.model, _on_rank(setup)
    dense = model.num_layers * each.block + each.vocabulary * (1 if model.tied else 2) + each.norms
    whole = _parameters(model).experts * model.num_layers
    return -(-dense // setup.fsdp) + -(-whole // setup.expert_shards)


# --------------------------------------------------------------------------------------------------------- activations


def _widths(setup: Setup) -> tuple[int, int, int, int]:
    """Elements per token: D, D of the rank where the sequence is split by tensor parallelism, Q, K."""
    model = setup.model
    q, k = (heads * model.head_dim // setup.tp for heads in (model.num_heads_q, model.num_heads_kv))
    return model.dim, model.dim // setup.tp, q, k


def _attention_saved(setup: Setup) -> int:
    """Bytes per token that attention and the norm before it save for the backward.

    The block's input, the normalized input, q, k and v as attention gets them (and q and k before their norms, where
    they have such), its output, lse in float32, cosines and sines.
    """
    model, (dim, local, q, k) = setup.model, _widths(setup)
    normalized = q + k if model.model == "qwen3" else 0
    elements = local + dim + normalized + 2 * q + 2 * k
    lse, rotary = model.num_heads_q // setup.tp * FLOAT32, model.head_dim * 4
    return elements * setup.compute_bytes + lse + rotary


def _ffn_saved(setup: Setup) -> int:
    """Bytes per token that the feed-forward, and the norm before it, save for the backward.

    Dense: input and output of the norm, w1's and w3's outputs, w2's input; the activation's output only where it is not
    compiled, as a compiler computes it again. Experts: for each of a token's top_k experts the routed input, the same
    three or four widths, and the output in float32, by which the router's gradient is computed; the router's scores.
    This takes every rank to get its share of the tokens: the busiest rank of an expert-parallel group takes more.
    """
    model, (dim, local, _, _) = setup.model, _widths(setup)
    kept = 3 if setup.compiled else 4
    norm = (local + dim) * setup.compute_bytes
    if model.experts is None:
        return norm + kept * model.hidden_dim // setup.tp * setup.compute_bytes
    split = setup.tp if setup.ep > 1 and setup.etp == 1 else 1  # tensor-parallel ranks take their share of the tokens
    routed = dim // split + kept * model.experts.hidden_dim // setup.tp
    scores = 2 * model.experts.num_experts * FLOAT32
    return norm + model.experts.top_k * (routed * setup.compute_bytes + dim * FLOAT32) + scores


def _whole_block(setup: Setup) -> int:
    """Bytes that a block saves for its backward without checkpointing."""
    return setup.tokens * (_attention_saved(setup) + _ffn_saved(setup))


def _block_input(setup: Setup) -> int:
    """Bytes that a block under full checkpointing saves: its input."""
    return setup.tokens * _widths(setup)[1] * setup.compute_bytes


def _selected(setup: Setup) -> int:
    """Bytes that a block saves when it is checkpointed by operation.

    torchtitan keeps attention's outputs and every other matrix product, in their order those of wq, wv, w1 and w2; that
    of w2 is not needed where the block is compiled. Under tensor parallelism also the sums over its ranks.
    """
    model, (dim, local, q, k) = setup.model, _widths(setup)
    elements = local + 2 * q + k
    if model.experts is None:
        elements += model.hidden_dim // setup.tp + (0 if setup.compiled else dim)
    if setup.tp > 1:
        elements += local if setup.compiled else 2 * local
    return setup.tokens * (elements * setup.compute_bytes + model.num_heads_q // setup.tp * FLOAT32)


def _saved(setup: Setup) -> tuple[int, int]:
    """Bytes that all blocks keep for their backward, and the most that one block computes again then."""
    layers, whole, least = setup.model.num_layers, _whole_block(setup), _block_input(setup)
    match setup.checkpointing:
        case "full":
            return layers * least, whole - least
        case "selective" if setup.every:
            full = layers // setup.every
            return full * least + (layers - full) * whole, whole - least if full else 0
        case "selective":
            kept = min(whole, _selected(setup))
            return layers * kept, whole - kept
        case "memory_budget":
            kept = least + int(setup.budget * (whole - least))
            return layers * kept, whole - kept
        case _:
            return layers * whole, 0


def _ffn_backward(setup: Setup) -> int:
    """Bytes of gradients at the largest moment of a feed-forward's backward, beside all that the block has saved.

    Dense: those of the block's output and of w1's and w3's outputs; w2's input is gone by then, and its gradient is
    there. Experts: of their outputs, in float32 and then, sorted by token and by expert, in the dtype of computation.
    """
    model, (dim, local, _, _) = setup.model, _widths(setup)
    if model.experts is None:
        return setup.tokens * (local + 2 * model.hidden_dim // setup.tp) * setup.compute_bytes
    experts = model.experts.top_k * dim * (FLOAT32 + 2 * setup.compute_bytes)
    return setup.tokens * (local * setup.compute_bytes + experts)


# ------------------------------------------------------------------------------------------------------ K/V and logits


def _heads(setup: Setup) -> Heads:
    """Of one rank."""
    model = setup.model
    num_kv = max(1, model.num_heads_kv // setup.tp)
    return Heads(num_kv * (model.num_heads_q // model.num_heads_kv), num_kv, model.head_dim)


def fullest_plan(setup: Setup) -> AttnPlan:
    """The plan of one document that fills a rank's packs: no other brings a rank as many rows."""
    total = setup.seq_len * setup.packs
    return _fullest_plan(total, setup.cp, setup.overlap_stages, _heads(setup), setup.cp_per_machine)


@functools.lru_cache(maxsize=16)
def _fullest_plan(
    total: int, cp: int, stages: int, heads: Heads, cp_per_machine: int | tuple[int, ...] | None
) -> AttnPlan:
    spec = PlanSpec(total, cp, stages, heads, Nodes.of(cp_per_machine, cp), H200)
    return plan_afresh(varlen_causal([0, total]), spec)


def _attention_backward(setup: Setup) -> tuple[int, int]:
    """Bytes at the largest moment of attention's backward: of gradients beside what is saved, and of rows and sums.

    Gradients: of the residual, of the output, of q in float32 and rounded, of k and v rounded, delta. Rows: float32
    sums of dK and dV of own rows, and what the received ones and their gradients take, see ``memory_of_rows``.
    """
    _, local, q, k = _widths(setup)
    gradients = (local + 2 * q + 2 * k) * setup.compute_bytes + q * FLOAT32
    gradients += setup.model.num_heads_q // setup.tp * FLOAT32
    return setup.tokens * gradients, _rows_and_sums(setup)


def _rows_and_sums(setup: Setup) -> int:
    if setup.cp == 1:
        return 0
    plan = fullest_plan(setup)
    most = max(
        memory_of_rows(plan.work, plan.heads, spans, backward, setup.compute_bytes).max()
        for spans, backward in ((plan.forward, False), (plan.backward, True))
    )
    return int(most) + setup.tokens * plan.heads.row_bytes // 2 * FLOAT32


def _rows_in_flight(setup: Setup) -> int:
    """Bytes outside PyTorch's allocator for exchanges inside a machine, of rows that all travel at once."""
    if setup.cp == 1 or not setup.gpu:
        return 0
    plan = fullest_plan(setup)
    if not plan.work.is_inside_a_node or equal_stages(0) not in (plan.forward, plan.backward):
        return 0
    return memory_bytes(int(plan.work.inside.max()) * plan.heads.row_bytes // 2 * setup.compute_bytes)


def _output_layer(setup: Setup) -> int:
    """Bytes for logits and what belongs to them, in forward or backward, whichever is more.

    Chunked: the hidden states and their gradient; the weight, and its gradient in float32, in whose memory it is
    rounded; a chunk of logits and of their gradient, with two float32 copies where not compiled.
    Whole: hidden states and gradient, weight and gradient; logits and their gradient, and without a compiled loss the
    log-probabilities and their gradient in float32.
    """
    dim, compute = setup.model.dim, setup.compute_bytes
    weight, hidden = _on_rank(setup).vocabulary, setup.tokens * dim
    logits = setup.tokens * setup.model.vocab_size // setup.tp
    if setup.whole_logits:
        each = 2 * compute if setup.compiled_loss else compute + 2 * FLOAT32
        return 2 * hidden * compute + weight * 2 * compute + logits * each
    each = 2 * compute if setup.compiled_loss else 2 * compute + 2 * FLOAT32
    return 2 * hidden * compute + weight * (compute + FLOAT32) + min(CHUNK_LOGITS, logits) * each


# ------------------------------------------------------------------------------------------------------------- moments


def _gathered(setup: Setup, parameters: int) -> int:
    """Bytes of FSDP2 for a group of so many parameters in its backward: gathered, the next group's, and gradients."""
    return parameters * 3 * setup.compute_bytes if setup.fsdp > 1 else 0


def _reduced(setup: Setup, parameters: int) -> int:
    """Bytes of gradients that FSDP2 is reducing, held until the next group's."""
    return parameters * setup.reduce_bytes if setup.fsdp > 1 else 0


def _lasting(setup: Setup) -> dict[str, int]:
    """Bytes that are taken at every moment, by part."""
    model, stored, on_gpu = setup.model, _stored(setup), not setup.offload
    copies = 0
    if setup.fsdp == 1:  # autocast's rounded parameters, and DDP's buckets of gradients
        copies = stored * setup.compute_bytes if setup.compute_bytes < setup.param_bytes else 0
        copies += stored * setup.param_bytes if setup.dp_replicate > 1 else 0
    return {
        "parameters": stored * setup.param_bytes * on_gpu,
        "optimizer states": 2 * stored * setup.param_bytes * on_gpu,
        "reference": stored * setup.param_bytes * on_gpu * setup.reference,
        "gathered parameters": copies,
        "rotary positions": setup.seq_len * model.head_dim * (8 if model.model == "qwen3" else 4),
        "rows in flight": _rows_in_flight(setup),
        "CUDA and NCCL": CUDA_AND_NCCL * setup.gpu,
    }


def moments(setup: Setup) -> Iterator[Prediction]:
    """The moments of a step that may take the most memory."""
    model, each, lasting = setup.model, _on_rank(setup), _lasting(setup)
    block, gradient = each.block + each.experts, setup.param_bytes * (not setup.offload)
    gradients = _stored(setup) * gradient
    before = gradients if setup.accumulates else 0
    kept, again = _saved(setup)

    def moment(name: str, gradients: int, activations: int, gathered: int = 0, **others: int) -> Prediction:
        parts = {**lasting, "gradients": gradients, "activations": activations, **others}
        parts["gathered parameters"] += gathered
        return Prediction(name, {part: size for part, size in parts.items() if size})

    of_block = _gathered(setup, block)
    logits = {"logits": _output_layer(setup)}
    yield moment("the output layer", before, kept + _block_input(setup), of_block // 3, **logits)
    attention, rows = _attention_backward(setup)
    attention -= setup.tokens * _ffn_saved(setup)  # which is gone by then
    work, rows = max((_ffn_backward(setup), 0), (attention, rows), key=sum)
    of_output = -(-each.vocabulary // setup.fsdp) * gradient
    for name, first, saved, reducing in (
        ("the last block's backward", before or of_output, kept, each.vocabulary),
        ("the first block's backward", gradients, kept // model.num_layers, block),
    ):
        reduced = _reduced(setup, reducing)
        yield moment(name, first, saved + again + work, of_block + reduced, **{"K/V and their gradients": rows})
    of_embedding = _gathered(setup, each.vocabulary) + _reduced(setup, each.vocabulary + block)
    yield moment("the embedding's backward", gradients, _block_input(setup), of_embedding)
    yield moment("the optimizer's step", gradients, 0, **{"square roots": gradients * setup.foreach})


def predict(setup: Setup) -> Prediction:
    """The memory of training on each GPU at the moment of a step that takes the most."""
    return max(moments(setup), key=lambda each: each.total)


# ------------------------------------------------------------------------------------------------------------- in words


def describe(prediction: Prediction, capacity: int | None) -> str:
    """One line: the total, the GPU's memory (bytes; None: unknown), the moment and the parts."""
    unit, name = (GIB, "GiB") if prediction.total >= GIB else (2**20, "MiB")
    of = "" if capacity is None else f" of {capacity / unit:.1f}"
    parts = ", ".join(f"{part} {size / unit:.1f}" for part, size in prediction.parts.items())
    return (
        f"Predicted memory per GPU: at most {prediction.total / unit:.1f} {name}{of}, in {prediction.moment} ({parts})"
    )


def _changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """What takes less memory, in the order in which to try it: a line of the configuration, and the setup with it."""

    def changed(option: str, **fields: Any) -> tuple[str, Setup]:
        return option, replace(setup, **fields)

    model, cp, tp, shard, copies = setup.model, setup.cp, setup.tp, setup.dp_shard, setup.dp_replicate
    if copies % 2 == 0:
        degrees = (
            f"parallelism.data_parallel_replicate_degree = {copies // 2}, data_parallel_shard_degree = {2 * shard}"
        )
        yield changed(degrees, dp_replicate=copies // 2, dp_shard=2 * shard)
    context = f"parallelism.context_parallel_degree = {2 * cp}"
    if shard % 2 == 0:
        yield changed(f"{context}, data_parallel_shard_degree = {shard // 2}", cp=2 * cp, dp_shard=shard // 2)
    else:
        yield changed(f"{context} on twice the GPUs", cp=2 * cp)
    if model.num_heads_kv % (2 * tp) == model.vocab_size % (2 * tp) == 0:
        yield changed(f"parallelism.tensor_parallel_degree = {2 * tp} on twice the GPUs", tp=2 * tp)
    yield changed('activation_checkpoint.mode = "full"', checkpointing="full")
    yield changed('magi.dpo.reference = "file"', reference=False)
    yield changed("training.enable_cpu_offload = true", offload=True)
    yield changed(f"training.seq_len = {setup.seq_len // 2}", seq_len=setup.seq_len // 2)


def remedies(setup: Setup) -> str:
    """What to change for less memory, each with the GiB predicted for it alone."""
    now = predict(setup).total
    totals = ((option, predict(changed).total) for option, changed in _changes(setup))
    return "; ".join(f"{option} ({total / GIB:.1f} GiB)" for option, total in totals if total < now)
