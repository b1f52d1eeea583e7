"""Predicts what a training step takes, by part, from the model, its layout and the time of its attention.

Matrix products run at one speed, element-wise passes at that of the memory; these and what else there is are fitted to
measured steps, see ``gpus``. Communication of FSDP2 hides behind a block's products, that of tensor and expert
parallelism does not.
"""

from dataclasses import dataclass

from torchtitan_magi.losses.logprobs import CHUNK_LOGITS
from torchtitan_magi.models.shapes import adapters_of, block_of, num_moe_layers
from torchtitan_magi.sizing.activations import CHUNK, blocks_of, kept_of_block, kinds_of_layers
from torchtitan_magi.sizing.gpus import BESIDE_COPIES, BETWEEN, HOST_LINK, IN_STEPS, OF_LAYER, RULE, RULE_BACKWARD, Gpu
from torchtitan_magi.sizing.keeping.kinds import AHEAD, ALL, INPUTS, KEPT, PRODUCTS
from torchtitan_magi.sizing.run_setup import Setup

OUTPUT, FIXED, COPYING = "output layer and loss", "fixed costs", "copies to the host and back"
GRADIENTS = 2  # a backward takes twice the products of its forward
OPTIMIZER_BYTES = 36  # read and written of a float32 parameter by fused AdamW (28) and by clipping (8)
SHARDING_PASSES = 8  # copies of FSDP2 in and out of its collectives, in elements of 16 bits
ROUTED_PASSES = 80  # over an expert's input and output by what moves, sorts, weighs and adds up tokens


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on a GPU, by part.

    Attributes:
        parts: name -> seconds; they add up to ``total``.
        flops: operations of matrix products, attention and recurrences that the step needs once, on a GPU, by which MFU
            is counted.
    """

    parts: dict[str, float]
    flops: float

    @property
    def total(self) -> float:
        """Seconds in all."""
        return sum(self.parts.values())


def time_of_step(setup: Setup, gpu: Gpu, gpus_per_node: int, attention: tuple[float, float], pairs: float) -> StepTime:
    """The time of one step.

    Args:
        gpus_per_node: GPUs in each node.
        attention: seconds of the forward and backward of all layers for one microbatch, as measured in bursts.
        pairs: (query, key) pairs of one microbatch on a context-parallel rank, the mean over layers with attention.
    """
    model, layers = setup.model, setup.model.num_layers / setup.pp
    blocks = [block_of(model, number) for number in range(model.num_layers)]
    used = sum(block.used for block in blocks) / setup.pp / setup.tp
    again = _recomputed(setup)
    weights = 1 if setup.lora_rank else GRADIENTS  # frozen weights have no gradients
    products = 2 * used * setup.tokens
    output = 2 * setup.on_rank.vocabulary * setup.tokens * setup.learned
    times = 1 + weights + setup.logits_again
    logits = output * times / gpu.products + _loss_passes(setup) / gpu.passes
    forward, backward = (IN_STEPS * seconds for seconds in attention)
    rule, passes = _rule(setup, gpu), _passes(setup) / setup.pp / gpu.passes
    experts, shared = _experts(setup, gpu, gpus_per_node), _tensor_parallel(setup, gpu) * layers
    parts = {
        "matrix products": products * (1 + weights) / gpu.products,
        "element-wise passes": passes * (3 + again.blocks),
        "attention": (forward + backward) / setup.pp,
        "linear attention": rule * (1 + RULE_BACKWARD),
        "recomputation": products * again.products / gpu.products + (forward / setup.pp + rule) * again.attention,
        OUTPUT: logits / setup.pp,
        "moving tokens to experts": experts * (1 + again.blocks / 3),
        "tensor parallelism": shared * (1 + again.blocks / 2),
        FIXED: OF_LAYER * layers,
    }
    in_layers = sum(seconds for name, seconds in parts.items() if name != OUTPUT)
    ahead = products / gpu.products + passes + forward / setup.pp + rule + (experts + shared) / 2
    waited = waiting(setup, ahead / layers, parts[OUTPUT], (in_layers - ahead) / layers)
    copies = 2 * sum(each or 0.0 for each in _copies_of_layers(setup)) / setup.pp
    parts[COPYING] = waited + BESIDE_COPIES * max(0.0, copies - waited)
    busy = sum(parts.values())
    parts["FSDP that nothing hides"] = max(0.0, _sharding(setup, gpu, gpus_per_node) - busy)
    parts["FSDP's copies"] = _copies(setup, gpu)
    if setup.pp > 1:
        parts["idle in the pipeline"] = sum(parts.values()) * (setup.pp - 1) / (setup.loops * setup.at_once)
    parts = {name: seconds * setup.microbatches for name, seconds in parts.items()}
    if setup.reference:
        passed = products / gpu.products + forward / setup.pp + rule
        parts["reference"] = setup.microbatches * (passed + output / gpu.products)
    parts[FIXED] += BETWEEN
    parts["optimizer"] = setup.trained * OPTIMIZER_BYTES * (setup.param_bytes / 4) / gpu.passes
    once = (products + output / setup.pp) * (1 + weights)
    once += (model.attention_flops * pairs + model.linear_flops * setup.tokens) / setup.tp / setup.pp
    return StepTime({name: seconds for name, seconds in parts.items() if seconds}, once * setup.microbatches)


@dataclass(frozen=True)
class _Recomputed:
    """What is computed again for the backward, as shares of what a forward computes: blocks, without what is kept of
    them; matrix products; attention."""

    blocks: float
    products: float
    attention: float


def _recomputed(setup: Setup) -> _Recomputed:
    if setup.checkpointing == "memory_budget":
        again = 1 - setup.budget
        return _Recomputed(again, again * _products_again(setup, INPUTS), again)
    kept = [keeping.kept for keeping in setup.keepings]
    share = {kind: kept.count(kind) / len(kept) for kind in KEPT}
    products = sum(share[kind] * _products_again(setup, kind) for kind in KEPT)
    return _Recomputed(1 - share[ALL], products, share[INPUTS])


def _products_again(setup: Setup, kept: str) -> float:
    """Which share of a block's products is computed again: all but the last of a dense block, as nothing waits for it;
    of these by operation every other one."""
    if kept == ALL:
        return 0.0
    needed = 1.0
    if not setup.model.experts:
        needed -= setup.model.dim * setup.model.hidden_dim / block_of(setup.model, 0).used
    return needed / 2 if kept == PRODUCTS else needed


def waiting(setup: Setup, forward: float, between: float, backward: float) -> float:
    """Seconds of a microbatch in which a layer's tensors are on their way to the host or back and nothing is computed,
    on the rank of a pipeline that waits the longest.

    Args:
        forward, backward: seconds of a layer.
        between: seconds of what follows the last layer.
    """
    copies = _copies_of_layers(setup)
    return max(_waiting([copies[layer] for layer in own], forward, between, backward) for own in setup.rank_layers)


def _copies_of_layers(setup: Setup) -> list[float | None]:
    """Seconds of each layer's copies of a microbatch one way; None where it does not offload."""
    blocks = blocks_of(setup)
    seconds = {block: kept_of_block(setup, block[0].kept, block[1]) / HOST_LINK for block in {*blocks}}
    return [seconds[block] if block[0].offloaded else None for block in blocks]


def _waiting(copies: list[float | None], forward: float, between: float, backward: float) -> float:
    """The same of a rank, by the seconds of each layer's copies one way.

    A layer begins when what the layer ``AHEAD`` before it keeps has left, and its backward when what it keeps is back,
    which sets out when the backward of the layer behind it begins; only layers that offload count. What the last ones
    keep stays, though its copies are made. All copies follow each other.
    """
    each = [seconds for seconds in copies if seconds is not None]
    clock, waited, gone, there = 0.0, 0.0, list[float](), [0.0] * len(each)
    for seconds in copies:
        if seconds is not None:
            late = max(0.0, gone[-AHEAD] - clock) if len(gone) >= AHEAD else 0.0
            clock, waited = clock + late, waited + late
        clock += forward
        if seconds is not None:
            gone.append(max([clock, *gone[-1:]]) + seconds)
    clock += between
    at, free = len(each), gone[-1] if gone else 0.0
    for seconds in reversed(copies):
        if seconds is not None:
            at -= 1
            if 0 < at <= len(each) - AHEAD:
                free = there[at - 1] = max(clock, free) + each[at - 1]
            late = max(0.0, there[at] - clock)
            clock, waited = clock + late, waited + late
        clock += backward
    return waited


def _rule(setup: Setup, gpu: Gpu) -> float:
    """Seconds of the gated delta rule in all layers of a microbatch's forward, by chunks of C tokens.

    Of each value head it takes 6 K V operations per token for the state, as the recurrence does, and C (6 K + 4 V) for
    products inside chunks: k k^T, q k^T, the triangular inverse with keys and with values, and what scores make of
    the latter (arXiv 2406.06484, section 3; with gates 2412.06464). Those of keys with keys count whole, not half.
    """
    if (linear := setup.model.linear) is None:
        return 0.0
    inside = linear.num_heads_v * CHUNK * (6 * linear.head_dim + 4 * linear.value_dim)
    operations = setup.tokens * len(linear.layers) * (linear.flops + inside) / setup.tp / setup.pp
    return operations / (RULE * gpu.products)


def _passes(setup: Setup) -> float:
    """Bytes that a forward reads and writes beside its products, in all layers: of each block two norms and residuals
    and SwiGLU; of attention rotary positions, and a gate; of linear attention the short convolution, lengths of
    queries and keys, and the norm with a gate; of low-rank adapters twice the inputs and outputs of their layers."""
    model, heads = setup.model, setup.heads
    width = model.hidden_dim // setup.tp
    if model.experts is not None:
        width = (model.experts.top_k + model.experts.num_shared) * model.experts.hidden_dim // setup.tp
    mixers = {False: 2 * (heads.query_elements + heads.num_heads_kv * heads.head_dim)}
    if model.model == "qwen3_5":
        mixers[False] += 3 * heads.out_elements
    if model.linear is not None:
        linear = model.linear.on_rank(setup.tp)
        lengths, values = 4 * linear.num_heads_qk * linear.head_dim, linear.num_heads_v * linear.value_dim
        mixers[True] = 4 * linear.channels + lengths + 3 * values
    elements = sum(
        count * (10 * setup.local_dim + 3 * width + mixers[is_linear])
        for is_linear, count in kinds_of_layers(setup).items()
    )
    if setup.lora_rank:  # those of experts are added to weights
        elements += 2 * adapters_of(model, 1, {*setup.lora_targets} - {"experts"}) // setup.tp
    return setup.tokens * elements * setup.compute_bytes * (1 if setup.compiled else 2)


def _loss_passes(setup: Setup) -> float:
    """Bytes of logits that are read and written, twice in 16 bits where compiled, else in float32 as well; and of the
    weight's gradient, to which each chunk adds in float32."""
    logits = setup.tokens * setup.learned * setup.model.vocab_size / setup.tp
    sums = 0 if setup.lora_rank else logits / CHUNK_LOGITS * setup.on_rank.vocabulary * 8
    return logits * (8 if setup.compiled_loss else 40) + sums


def _experts(setup: Setup, gpu: Gpu, gpus_per_node: int) -> float:
    """Seconds of a microbatch to bring tokens to their experts and back, forward and backward."""
    experts = setup.model.experts
    if experts is None:
        return 0.0
    layers = num_moe_layers(setup.model) / setup.pp
    routed = setup.tokens / setup.tp * experts.top_k * setup.model.dim * setup.compute_bytes  # bytes
    passes = ROUTED_PASSES * routed / gpu.passes
    link = gpu.cost.inside if setup.ep * setup.tp <= gpus_per_node else gpu.cost.across
    exchanged = 4 * (routed * (setup.ep - 1) / setup.ep / link.bandwidth + link.latency) if setup.ep > 1 else 0.0
    return layers * (passes + exchanged)


def _tensor_parallel(setup: Setup, gpu: Gpu) -> float:
    """Seconds of a block's eight collectives of hidden states under tensor parallelism, forward and backward."""
    if setup.tp == 1:
        return 0.0
    sent = setup.tokens * setup.model.dim * setup.compute_bytes * (setup.tp - 1) / setup.tp
    return 8 * (gpu.cost.inside.latency + sent / gpu.cost.inside.bandwidth)


def _sharding(setup: Setup, gpu: Gpu, gpus_per_node: int) -> float:
    """Seconds of a microbatch to gather parameters and reduce gradients over FSDP2's ranks, and over its replicas."""
    if setup.fsdp == 1:
        return 0.0
    reduced = 0 if setup.lora_rank else setup.reduce_bytes
    num_bytes = _gathered(setup) * (2 * setup.compute_bytes + reduced)
    ranks_in_node = max(1, min(setup.fsdp, gpus_per_node // setup.tp))
    nodes = setup.fsdp / ranks_in_node
    inside = num_bytes * (ranks_in_node - 1) / ranks_in_node / gpu.cost.inside.bandwidth
    across = num_bytes * (nodes - 1) / nodes / (ranks_in_node * gpu.cost.across.bandwidth)
    return inside + across


def _copies(setup: Setup, gpu: Gpu) -> float:
    """Seconds of a microbatch for FSDP2's copies in and out of its collectives."""
    if setup.fsdp == 1:
        return 0.0
    return _gathered(setup) * SHARDING_PASSES * setup.compute_bytes / gpu.passes


def _gathered(setup: Setup) -> float:
    """Number of parameters that FSDP2 brings to a rank in a pass over its layers."""
    each = setup.on_rank
    return (each.dense + each.experts * num_moe_layers(setup.model)) / setup.pp
