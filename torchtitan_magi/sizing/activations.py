"""What activations take on each rank: what blocks keep for their backward and compute again, gradients, logits.

Formulas follow the operations of torchtitan's blocks; tests compare them with what those of llama3, qwen3 and qwen3_5
save. A layer is of one kind or the other: softmax attention, or linear attention (Gated DeltaNet).
"""

from torchtitan_magi.losses.logprobs import CHUNK_LOGITS
from torchtitan_magi.models.model_config import LinearAttention
from torchtitan_magi.sizing.exchanged_rows import states_of_parts
from torchtitan_magi.sizing.keeping.kinds import AHEAD, ALL, ATTENTION, INPUTS, PRODUCTS, Keeping
from torchtitan_magi.sizing.run_setup import FLOAT32, Setup

CHUNK = 64  # tokens that kernels of linear attention compute at once


def kinds_of_layers(setup: Setup) -> dict[bool, int]:
    """Whether layers have linear attention -> how many do; without kinds that the model has not."""
    linear = len(setup.model.linear.layers) if setup.model.linear else 0
    found = {False: setup.model.num_attention_layers, True: linear}
    return {is_linear: count for is_linear, count in found.items() if count}


def _norm_saved(setup: Setup) -> int:
    """Bytes per element that a norm saves: its input. Qwen3.5's is plain torch, which saves two float32 copies if it
    is not compiled."""
    return setup.compute_bytes if setup.compiled or setup.model.model != "qwen3_5" else 2 * FLOAT32


def attention_saved(setup: Setup) -> int:
    """Bytes per token that attention and the norm before it save for the backward.

    The block's input, the normalized input, q, k and v as attention gets them (and q and k before their norms, where
    they have such), its output, lse in float32, cosines and sines. Latent vectors before and after their norms; a gated
    output, the gate and the input of a norm after it.
    """
    model, heads = setup.model, setup.heads
    q, k, v = heads.query_elements, heads.num_heads_kv * heads.head_dim, heads.num_heads_kv * heads.value_dim
    elements, normed = model.dim + q + k + v + heads.out_elements, setup.local_dim
    if model.model in ("qwen3", "qwen3_5", "muse_glimmer"):
        normed += q + k
    if model.model == "qwen3_5":
        elements += 2 * heads.out_elements
    if (latent := model.latent) is not None:
        elements += 2 * (latent.q_rank + latent.kv_rank) + latent.rope_dim
    if model.muse is not None:
        elements += 2 * heads.out_elements + setup.local_dim
    rest = heads.num_heads_q * FLOAT32 + model.rotary_dim * 4
    return elements * setup.compute_bytes + normed * _norm_saved(setup) + rest


def linear_saved(setup: Setup) -> int:
    """Bytes per token that linear attention and the norm before it save for the backward.

    The block's input and the normalized input; queries, keys and values before and behind the short convolution, and
    queries and keys divided by their lengths; the gate's input and the gate in float32, the strength of the update; the
    rule's output, the gate of its norm, and what the norm puts out; what kernels keep. What is not compiled is plain
    torch, which saves float32 copies at both norms, at lengths and at the gate.
    """
    linear, compute = _linear_of(setup), setup.compute_bytes
    heads, values = linear.num_heads_v, linear.num_heads_v * linear.value_dim
    lengths = 2 * linear.num_heads_qk * linear.head_dim
    elements = setup.model.dim + 2 * linear.channels + lengths + 3 * values + 2 * heads
    copies = lengths * FLOAT32 + heads * FLOAT32 + values * (4 * FLOAT32 - compute)
    copies *= not setup.compiled
    rest = 2 * heads * FLOAT32 + _of_kernels(setup)
    return elements * compute + setup.local_dim * _norm_saved(setup) + copies + rest


def _of_kernels(setup: Setup) -> int:
    """Bytes per token that kernels keep: sums of gates in float32, and the inverse of each chunk's triangular matrix
    (arXiv 2412.06464). Plain torch keeps nothing."""
    return _linear_of(setup).num_heads_v * (CHUNK * setup.compute_bytes + FLOAT32) * setup.gpu


def _linear_of(setup: Setup) -> LinearAttention:
    """The linear attention of a rank, which has its tensor-parallel part of the heads."""
    linear = setup.model.linear
    assert linear is not None
    return linear.on_rank(setup.tp)


def ffn_saved(setup: Setup) -> int:
    """Bytes per token that the feed-forward, and the norm before it, save for the backward.

    Dense: input and output of the norm, w1's and w3's outputs, w2's input; the activation's output only where it is not
    compiled, as a compiler computes it again. Experts: for each of a token's top_k experts the routed input, the same
    three or four widths, and the output, by which the router's gradient is computed; the router's scores.
    This takes every rank to get its share of the tokens: the busiest rank of an expert-parallel group takes more.
    """
    model, kept = setup.model, 3 if setup.compiled else 4
    norm = setup.local_dim * (2 if model.muse else 1) * _norm_saved(setup) + model.dim * setup.compute_bytes
    if model.experts is None:
        return norm + kept * model.hidden_dim // setup.tp * setup.compute_bytes
    split = setup.tp if setup.ep > 1 and setup.etp == 1 else 1  # tensor-parallel ranks take their share of the tokens
    routed = model.dim // split + kept * model.experts.hidden_dim // setup.tp
    scores = 2 * model.experts.num_experts * FLOAT32
    shared = kept * model.experts.num_shared * model.experts.hidden_dim // setup.tp
    norm += (shared + model.dim * (model.model == "qwen3_5")) * setup.compute_bytes  # whose gate takes their output
    out = model.dim * (FLOAT32 if setup.by_02 else setup.compute_bytes)
    return norm + model.experts.top_k * (routed * setup.compute_bytes + out) + scores


def block_input(setup: Setup) -> int:
    """Bytes of a block's input: all that it saves under full checkpointing."""
    return setup.tokens * setup.local_dim * setup.compute_bytes


def _selected(setup: Setup, is_linear: bool) -> int:
    """Bytes that a block saves when it is checkpointed by operation.

    torchtitan keeps attention's outputs and every other matrix product, in their order those of wq, wv, w1 and w2; that
    of w2 is not needed where the block is compiled. Of linear attention it keeps what convolution and rule put out, and
    the products of in_proj_q, in_proj_v, in_proj_b, out_proj and w3. Under tensor parallelism also sums over its ranks.
    """
    model, rest = setup.model, _of_kernels(setup) if is_linear else setup.heads.num_heads_q * FLOAT32
    elements = setup.local_dim + (_selected_of_linear(setup) if is_linear else _selected_of_attention(setup))
    if model.experts is None:
        elements += model.hidden_dim // setup.tp + (0 if setup.compiled or is_linear else model.dim)
    elif model.model == "qwen3_5":  # of the experts that every token goes to
        elements += model.experts.num_shared * model.experts.hidden_dim // setup.tp + (0 if is_linear else model.dim)
    if setup.tp > 1:
        elements += setup.local_dim if setup.compiled else 2 * setup.local_dim
    states = states_of_parts(setup) if is_linear else 0
    return setup.tokens * (elements * setup.compute_bytes + rest) + states


def _selected_of_attention(setup: Setup) -> int:
    """Elements of a token's query, value and output; Qwen3.5's wq also makes the gate."""
    queries = 3 if setup.model.model == "qwen3_5" else 2
    return queries * setup.heads.query_elements + setup.heads.num_heads_kv * setup.heads.head_dim


def _selected_of_linear(setup: Setup) -> int:
    linear = _linear_of(setup)
    of_heads = linear.num_heads_v * (2 * linear.value_dim + 1)  # values, strengths of updates, outputs
    return linear.num_heads_qk * linear.head_dim + linear.channels + of_heads + setup.model.dim


def whole_block(setup: Setup, is_linear: bool) -> int:
    """Bytes that a block of that kind saves for its backward if it computes nothing again."""
    mixer = linear_saved(setup) if is_linear else attention_saved(setup)
    return setup.tokens * (mixer + ffn_saved(setup)) + (states_of_parts(setup) if is_linear else 0)


def _attention_out(setup: Setup, is_linear: bool) -> int:
    """Bytes of what attention puts out, with lse in float32; of linear attention convolution and rule."""
    if is_linear:
        linear = _linear_of(setup)
        elements = linear.channels + linear.num_heads_v * linear.value_dim
        return setup.tokens * (elements * setup.compute_bytes + _of_kernels(setup)) + states_of_parts(setup)
    heads = setup.heads
    return setup.tokens * (heads.out_elements * setup.compute_bytes + heads.num_heads_q * FLOAT32)


def kept_of_block(setup: Setup, kept: str, is_linear: bool) -> int:
    """Bytes that a block of that kind keeps for its backward, which are ``Keeping.kept``."""
    whole, least = whole_block(setup, is_linear), block_input(setup)
    if setup.checkpointing == "memory_budget":
        return least + int(setup.budget * (whole - least))
    sizes = {ALL: whole, INPUTS: least}
    sizes[PRODUCTS] = _selected(setup, is_linear)
    sizes[ATTENTION] = least + _attention_out(setup, is_linear)
    return min(whole, sizes[kept])


def blocks_of(setup: Setup) -> list[tuple[Keeping, bool]]:
    """What each block keeps, and whether it has linear attention."""
    linear = frozenset(setup.model.linear.layers) if setup.model.linear else frozenset()
    return [(keeping, number in linear) for number, keeping in enumerate(setup.keepings)]


def kept_on_gpu(setup: Setup) -> list[int]:
    """Bytes that the blocks up to each one keep on the GPU, of one microbatch: of those that are offloaded the last
    two, as one is on its way to the host while the next is computed, and back."""
    found, total, moving = [], 0, list[int]()
    sizes = {block: kept_of_block(setup, block[0].kept, block[1]) for block in {*blocks_of(setup)}}
    for block in blocks_of(setup):
        if block[0].offloaded:
            moving.append(sizes[block])
        else:
            total += sizes[block]
        found.append(total + sum(moving[-AHEAD:]))
    return found


def kept_on_host(setup: Setup) -> int:
    """Bytes that all blocks keep in the host's memory, of all microbatches that wait for their backward."""
    blocks = [(keeping.kept, is_linear) for keeping, is_linear in blocks_of(setup) if keeping.offloaded]
    return int(setup.in_flight * sum(kept_of_block(setup, *block) for block in blocks))


def kept_activations(setup: Setup) -> int:
    """Bytes that all blocks keep on the GPU for their backward, of all microbatches that wait for it."""
    return int(setup.in_flight * kept_on_gpu(setup)[-1])


def recomputed(setup: Setup, kept: str, is_linear: bool) -> int:
    """Bytes that a block of that kind, which keeps ``Keeping.kept``, computes again in its backward."""
    if kept == ALL and setup.checkpointing != "memory_budget":
        return 0
    stays = kept_of_block(setup, kept, is_linear)
    sums = 0 if setup.model.experts or not setup.lora_rank else 4 * setup.model.hidden_dim // setup.tp
    again = whole_block(setup, is_linear) - stays
    return again + (setup.tokens * sums * setup.compute_bytes if stays == block_input(setup) else 0)


def attention_gradients(setup: Setup) -> int:
    """Bytes of gradients at the largest moment of attention's backward, beside what is saved.

    Those of the residual, of the output, of q in float32 and rounded, of k and v rounded; delta in float32.
    """
    heads = setup.heads
    q, k = heads.query_elements, heads.num_heads_kv * heads.head_dim
    rounded = (setup.local_dim + 2 * q + 2 * k) * setup.compute_bytes
    return setup.tokens * (rounded + (q + heads.num_heads_q) * FLOAT32)


def linear_gradients(setup: Setup) -> int:
    """Bytes at the largest moment of linear attention's backward, beside what is saved, by kernels.

    Gradients of the residual and of the output; those of q, k and v, q's and k's for every head of values; the states
    before all chunks; copies of what parts of documents have saved, and their gradients where they are put together.
    """
    linear = _linear_of(setup)
    heads = linear.num_heads_v
    of_heads = heads * (2 * linear.value_dim + 2 * linear.head_dim)
    states = heads * linear.head_dim * linear.value_dim // CHUNK
    elements = setup.local_dim + of_heads + states + 2 * linear.channels + heads * CHUNK
    return setup.tokens * (elements * setup.compute_bytes + 4 * heads * FLOAT32)


def ffn_gradients(setup: Setup) -> int:
    """Bytes of gradients at the largest moment of a feed-forward's backward, beside all that the block has saved.

    Dense: those of the block's output and of w1's and w3's outputs; w2's input is gone by then, and its gradient is
    there. Experts: of their outputs, sorted by token and by expert, and perhaps in float32 before.
    """
    model, compute = setup.model, setup.compute_bytes
    if model.experts is None:
        adapters = 2 * model.hidden_dim // setup.tp if setup.lora_rank else 0  # what goes to them, scaled
        return setup.tokens * (setup.local_dim + 2 * model.hidden_dim // setup.tp + adapters) * compute
    experts = model.experts.top_k * model.dim * ((FLOAT32 if setup.by_02 else 0) + 2 * compute)
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
