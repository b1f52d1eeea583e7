"""What activations take on each rank: what blocks keep for their backward and compute again, gradients, logits.

Formulas follow the operations of torchtitan's blocks; tests compare them with what llama3's and qwen3's save.
"""

from torchtitan_magi.losses.logprobs import CHUNK_LOGITS
from torchtitan_magi.sizing.run_setup import FLOAT32, Setup


def attention_saved(setup: Setup) -> int:
    """Bytes per token that attention and the norm before it save for the backward.

    The block's input, the normalized input, q, k and v as attention gets them (and q and k before their norms, where
    they have such), its output, lse in float32, cosines and sines. Latent vectors before and after their norms; a gated
    output, the gate and the input of a norm after it.
    """
    model, heads = setup.model, setup.heads
    q, k, v = heads.query_elements, heads.num_heads_kv * heads.head_dim, heads.num_heads_kv * heads.value_dim
    elements = setup.local_dim + model.dim + q + k + v + heads.out_elements
    if model.model in ("qwen3", "muse_glimmer"):
        elements += q + k
    if (latent := model.latent) is not None:
        elements += 2 * (latent.q_rank + latent.kv_rank) + latent.rope_dim
    if model.muse is not None:
        elements += 2 * heads.out_elements + setup.local_dim
    return elements * setup.compute_bytes + heads.num_heads_q * FLOAT32 + model.head_dim * 4


def ffn_saved(setup: Setup) -> int:
    """Bytes per token that the feed-forward, and the norm before it, save for the backward.

    Dense: input and output of the norm, w1's and w3's outputs, w2's input; the activation's output only where it is not
    compiled, as a compiler computes it again. Experts: for each of a token's top_k experts the routed input, the same
    three or four widths, and the output, by which the router's gradient is computed; the router's scores.
    This takes every rank to get its share of the tokens: the busiest rank of an expert-parallel group takes more.
    """
    model, kept = setup.model, 3 if setup.compiled else 4
    norm = (setup.local_dim * (2 if model.muse else 1) + model.dim) * setup.compute_bytes
    if model.experts is None:
        return norm + kept * model.hidden_dim // setup.tp * setup.compute_bytes
    split = setup.tp if setup.ep > 1 and setup.etp == 1 else 1  # tensor-parallel ranks take their share of the tokens
    routed = model.dim // split + kept * model.experts.hidden_dim // setup.tp
    scores = 2 * model.experts.num_experts * FLOAT32
    norm += kept * model.experts.num_shared * model.experts.hidden_dim // setup.tp * setup.compute_bytes
    out = model.dim * (FLOAT32 if setup.float32_experts else setup.compute_bytes)
    return norm + model.experts.top_k * (routed * setup.compute_bytes + out) + scores


def block_input(setup: Setup) -> int:
    """Bytes of a block's input: all that it saves under full checkpointing."""
    return setup.tokens * setup.local_dim * setup.compute_bytes


def _selected(setup: Setup) -> int:
    """Bytes that a block saves when it is checkpointed by operation.

    torchtitan keeps attention's outputs and every other matrix product, in their order those of wq, wv, w1 and w2; that
    of w2 is not needed where the block is compiled. Under tensor parallelism also the sums over its ranks.
    """
    model, heads = setup.model, setup.heads
    elements = setup.local_dim + 2 * heads.query_elements + heads.num_heads_kv * heads.head_dim
    if model.experts is None:
        elements += model.hidden_dim // setup.tp + (0 if setup.compiled else model.dim)
    if setup.tp > 1:
        elements += setup.local_dim if setup.compiled else 2 * setup.local_dim
    return setup.tokens * (elements * setup.compute_bytes + heads.num_heads_q * FLOAT32)


def kept_and_recomputed(setup: Setup) -> tuple[int, int]:
    """Bytes that all blocks keep for their backward, of all microbatches that wait for it, and the most that one block
    computes again then."""
    layers, least = setup.model.num_layers, block_input(setup)
    whole = setup.tokens * (attention_saved(setup) + ffn_saved(setup))
    if setup.checkpointing == "selective" and setup.every:
        full = layers // setup.every
        return int(setup.in_flight * (full * least + (layers - full) * whole)), whole - least if full else 0
    kept = {
        "full": least,
        "selective": min(whole, _selected(setup)),
        "memory_budget": least + int(setup.budget * (whole - least)),
    }.get(setup.checkpointing, whole)
    sums = 0 if setup.model.experts or not setup.lora_rank else 4 * setup.model.hidden_dim // setup.tp
    again = whole - kept + (setup.tokens * sums * setup.compute_bytes if kept == least else 0)
    return int(setup.in_flight * layers * kept), again


def attention_gradients(setup: Setup) -> int:
    """Bytes of gradients at the largest moment of attention's backward, beside what is saved.

    Those of the residual, of the output, of q in float32 and rounded, of k and v rounded; delta in float32.
    """
    heads = setup.heads
    q, k = heads.query_elements, heads.num_heads_kv * heads.head_dim
    rounded = (setup.local_dim + 2 * q + 2 * k) * setup.compute_bytes
    return setup.tokens * (rounded + (q + heads.num_heads_q) * FLOAT32)


def ffn_gradients(setup: Setup) -> int:
    """Bytes of gradients at the largest moment of a feed-forward's backward, beside all that the block has saved.

    Dense: those of the block's output and of w1's and w3's outputs; w2's input is gone by then, and its gradient is
    there. Experts: of their outputs, sorted by token and by expert, and perhaps in float32 before.
    """
    model, compute = setup.model, setup.compute_bytes
    if model.experts is None:
        adapters = 2 * model.hidden_dim // setup.tp if setup.lora_rank else 0  # what goes to them, scaled
        return setup.tokens * (setup.local_dim + 2 * model.hidden_dim // setup.tp + adapters) * compute
    experts = model.experts.top_k * model.dim * ((FLOAT32 if setup.float32_experts else 0) + 2 * compute)
    return setup.tokens * (setup.local_dim * compute + experts)


def output_layer(setup: Setup) -> int:
    """Bytes for logits and what belongs to them, in forward or backward, whichever is more.

    Chunked: the hidden states and their gradient; the weight, and its gradient in float32, in whose memory it is
    rounded; a chunk of logits and of their gradient, with two float32 copies where not compiled.
    Whole: hidden states and gradient, weight and gradient; logits and their gradient, and without a compiled loss the
    log-probabilities and their gradient in float32.
    """
    compute, weight = setup.compute_bytes, setup.on_rank.vocabulary
    of_gradient = 0 if setup.lora_rank else FLOAT32
    hidden = 2 * setup.tokens * setup.model.dim * compute
    logits = setup.tokens * setup.model.vocab_size // setup.tp
    if setup.whole_logits:
        each = 2 * compute if setup.compiled_loss else compute + 2 * FLOAT32
        return hidden + weight * 2 * compute + logits * each
    each = 2 * compute if setup.compiled_loss else 2 * compute + 2 * FLOAT32
    return hidden + weight * (compute + of_gradient) + min(CHUNK_LOGITS, logits) * each
