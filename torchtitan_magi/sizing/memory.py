"""Predicts what training takes of a GPU's memory, by part, from the model, its layout and the tokens on each rank.

A step takes the most memory at one of a few moments; the prediction is the largest of these, with all parts that are
live then, on whichever stage of a pipeline. It is meant for SwiGLU decoders as torchtitan's llama3 and qwen3 run them,
on packs that one document fills; what other models keep is counted by the same operations.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchtitan_magi.sizing import activations
from torchtitan_magi.sizing.exchanged_rows import maps_held, rows_and_sums, rows_in_flight
from torchtitan_magi.sizing.run_setup import Setup

GIB = 2**30
OUTSIDE_PYTORCH = ("rows in flight", "CUDA and NCCL")  # parts that PyTorch's allocator does not hand out
CUDA_AND_NCCL = 3 * GIB // 2  # an estimate: the CUDA context, loaded kernels and NCCL's buffers


@dataclass(frozen=True)
class Prediction:
    """Bytes on each GPU at the moment of a step that takes the most.

    Attributes:
        moment: in words.
        parts: name -> bytes; they add up to ``total``.
    """

    moment: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        """Bytes that PyTorch's allocator hands out."""
        return sum(size for part, size in self.parts.items() if part not in OUTSIDE_PYTORCH)


def predict(setup: Setup) -> Prediction:
    """The memory of training on each GPU at the moment of a step that takes the most."""
    return max(moments(setup), key=lambda each: each.total)


def host_memory(setup: Setup) -> int:
    """Bytes that each GPU's process keeps in the host's memory, of what layers offload."""
    return max(activations.kept_on_host(stage) for stage in setup.stages())


def states_on_host(setup: Setup) -> int:
    """Bytes of parameters, gradients and optimizer states that each GPU's process has there with
    training.enable_cpu_offload, and of a checkpoint that is written while training goes on."""
    weights, states = setup.stored + setup.adapters, 2 * setup.trained * (setup.state_bytes or setup.param_bytes)
    offloaded = weights * (1 + (setup.reference and not setup.lora_rank)) + setup.trained
    staged = setup.staged * (weights * setup.param_bytes + states)
    return setup.offload * (offloaded * setup.param_bytes + states) + staged


def moments(setup: Setup) -> Iterator[Prediction]:
    """The moments of a step that may take the most memory; of the first and the last stage of a pipeline."""
    for stage in setup.stages():
        yield from _moments(stage)


def _moments(setup: Setup) -> Iterator[Prediction]:
    each, lasting = setup.on_rank, _lasting(setup)
    block, gradient = each.block + each.experts, setup.param_bytes * (not setup.offload)
    gradients = setup.trained * gradient
    kept_apart = setup.dp_replicate > 1 and not _by_ddp(setup)  # by HSDP: what they free serves nothing else
    before = gradients if setup.accumulates or kept_apart else 0
    if setup.pp > 1 and setup.accumulates and not setup.lora_rank:  # a pipeline adds them up whole
        before = gradients = setup.whole * setup.reduce_bytes
    kept = activations.kept_activations(setup)

    def moment(name: str, gradients: int, held: int, gathered: int = 0, **others: int) -> Prediction:
        parts = {**lasting, "gradients": gradients, "activations": held, **others}
        parts["gathered parameters"] += gathered
        return Prediction(name, {part: size for part, size in parts.items() if size})

    of_block = _gathered(setup, block)
    logits = {"logits": activations.output_layer(setup)}
    if setup.has_output:
        yield moment("the output layer", before, kept + activations.block_input(setup), of_block // 3, **logits)
    of_first = -(-(block + each.vocabulary * setup.has_embedding) // setup.fsdp) * gradient * (not setup.lora_rank)
    of_output = -(-each.vocabulary // setup.fsdp) * gradient * (setup.has_output and not setup.lora_rank)
    on_gpu, num_blocks = activations.kept_on_gpu(setup), setup.model.num_layers
    waiting = max(0.0, setup.in_flight - 1) * on_gpu[-1]  # of other microbatches of a pipeline
    of_others, last = gradients - of_first - of_output, num_blocks - 1
    done = [before or of_output + of_others * (last - number) // max(1, last) for number in range(num_blocks)]
    for number, (work, rows, maps) in _backwards(setup, [held + made for held, made in zip(on_gpu, done, strict=True)]):
        name = "the last" if number == last else "the first" if not number else f"number {number}"
        reduced = _reduced(setup, block if number < last else each.vocabulary)
        held = int(on_gpu[number] + waiting) + work
        others = {"K/V and their gradients": rows, "maps of states": maps}
        yield moment(f"{name} block's backward", done[number], held, of_block + reduced, **others)
    if setup.has_embedding and not setup.lora_rank:
        of_embedding = _gathered(setup, each.vocabulary) + _reduced(setup, each.vocabulary + block)
        yield moment("the embedding's backward", gradients, activations.block_input(setup), of_embedding)
    yield moment("the optimizer's step", gradients, 0, **{"square roots": gradients * setup.foreach})


def _backwards(setup: Setup, held: list[int]) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Blocks whose backward may take the most, and bytes beside what is held, see ``_of_backward``: of those that keep
    the same the last, and that beside which most is held.

    Args:
        held: bytes that are kept and gradients that are made, by block.
    """
    blocks = activations.blocks_of(setup)
    for kept in dict.fromkeys(keeping.kept for keeping, _ in blocks):
        numbers = [number for number, (keeping, _) in enumerate(blocks) if keeping.kept == kept]
        mixers = {blocks[number][1] for number in numbers}
        work = max((each for is_linear in mixers for each in _of_backward(setup, kept, is_linear)), key=sum)
        for number in {max(numbers, key=held.__getitem__), numbers[-1]}:
            yield number, work


def _of_backward(setup: Setup, kept: str, is_linear: bool) -> Iterator[tuple[int, int, int]]:
    """Bytes at the largest moments of a block's backward beside what it kept: what is computed again and gradients,
    rows of K/V, maps of states."""
    again = activations.recomputed(setup, kept, is_linear)
    yield again + activations.ffn_gradients(setup), 0, 0
    again -= setup.tokens * activations.ffn_saved(setup)  # which is gone by then
    if is_linear:
        yield again + activations.linear_gradients(setup), 0, maps_held(setup)
    else:
        yield again + activations.attention_gradients(setup), rows_and_sums(setup), 0


def _lasting(setup: Setup) -> dict[str, int]:
    """Bytes that are taken at every moment, by part."""
    model, copies = setup.model, 0
    stored = (setup.stored + setup.adapters) * setup.param_bytes
    on_gpu = stored * (not setup.offload)
    if _by_ddp(setup):  # autocast's rounded parameters, and DDP's buckets of gradients
        copies = setup.stored * setup.compute_bytes if setup.compute_bytes < setup.param_bytes else 0
        copies += setup.trained * setup.param_bytes
    elif setup.keeps_gathered:
        copies = setup.whole * setup.compute_bytes
    return {
        "parameters": on_gpu,
        "optimizer states": 2 * setup.trained * (setup.state_bytes or setup.param_bytes) * (not setup.offload),
        "reference": on_gpu * (setup.reference and not setup.lora_rank),
        "gathered parameters": copies,
        "rotary positions": setup.seq_len * model.rotary_dim * (8 if model.model in ("qwen3", "qwen3_5") else 4),
        "rows in flight": rows_in_flight(setup),
        "CUDA and NCCL": CUDA_AND_NCCL * setup.gpu,
    }


def _gathered(setup: Setup, parameters: int) -> int:
    """Bytes of FSDP2 for a group of so many parameters in its backward: gathered, the next group's, and gradients. What
    stays gathered counts at every moment, and a pipeline's gradients too."""
    if _by_ddp(setup):
        return 0
    copies = 2 * (not setup.keeps_gathered) + (not setup.lora_rank and setup.pp == 1)
    return parameters * copies * setup.compute_bytes


def _reduced(setup: Setup, parameters: int) -> int:
    """Bytes of gradients that FSDP2 is reducing, held until the next group's."""
    return 0 if _by_ddp(setup) or setup.lora_rank else parameters * setup.reduce_bytes


def _by_ddp(setup: Setup) -> bool:
    """Whether DDP replicates the model, as torchtitan 0.2.2 does; else FSDP2 casts parameters, of one GPU too."""
    return setup.by_02 and setup.fsdp == 1 and setup.dp_replicate > 1


# ------------------------------------------------------------------------------------------------------------- in words


def describe(prediction: Prediction, capacity: int | None = None) -> str:
    """One line: the total, the GPU's memory (capacity in bytes; None: unknown), the moment and the parts."""
    unit, name = (GIB, "GiB") if prediction.total >= GIB else (2**20, "MiB")
    of = "" if capacity is None else f" of {capacity / unit:.1f}"
    parts = ", ".join(f"{part} {size / unit:.1f}" for part, size in prediction.parts.items())
    return (
        f"Predicted memory per GPU: at most {prediction.total / unit:.1f} {name}{of}, in {prediction.moment} ({parts})"
    )


def remedies(setup: Setup) -> str:
    """Names what to change for less memory, each change with the GiB predicted for it alone."""
    now = predict(setup).total
    totals = ((option, predict(changed).total) for option, changed in _changes(setup))
    return "; ".join(f"{option} ({total / GIB:.1f} GiB)" for option, total in totals if total < now)


def _changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Changes that may take less memory, in the order in which to try them: options, and the setup with them."""
    model, cp, tp, shard, copies = setup.model, setup.cp, setup.tp, setup.dp_shard, setup.dp_replicate
    if copies % 2 == 0:
        fewer = f"parallelism.data_parallel_replicate_degree = {copies // 2}, data_parallel_shard_degree = {2 * shard}"
        yield fewer, replace(setup, dp_replicate=copies // 2, dp_shard=2 * shard)
    context = f"parallelism.context_parallel_degree = {2 * cp}"
    if shard % 2 == 0:
        split = f"{context}, data_parallel_shard_degree = {shard // 2}"
        yield split, replace(setup, cp=2 * cp, dp_shard=shard // 2)
    else:
        yield f"{context} on twice the GPUs", replace(setup, cp=2 * cp)
    if model.num_heads_kv % (2 * tp) == model.vocab_size % (2 * tp) == 0:
        yield f"parallelism.tensor_parallel_degree = {2 * tp} on twice the GPUs", replace(setup, tp=2 * tp)
    yield 'activation_checkpoint.mode = "full"', replace(setup, checkpointing="full")
    if setup.reference_in_file:
        yield 'magi.dpo.reference = "file"', replace(setup, reference=False)
    if setup.fsdp > 1 or not setup.by_02:  # FSDP does it, which 0.3 has on one GPU, too
        yield "training.enable_cpu_offload = true", replace(setup, offload=True)
    yield f"training.seq_len = {setup.seq_len // 2}", replace(setup, seq_len=setup.seq_len // 2)
