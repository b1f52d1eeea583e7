"""Which layers of a model each stage of a pipeline has."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.models.shapes import adapters_of
from torchtitan_magi.wording import quoted

LOOPED = "Interleaved1F1B"  # the schedule under which a rank has several stages, two if nothing is said


def layers_of_stages(
    num_layers: int, pp: int, schedule: str, first_less: int = 1, last_less: int = 1, per_stage: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Numbers of the layers of each stage of a pipeline, as torchtitan shares them out: evenly, where embedding and
    output layer count as ``first_less`` and ``last_less`` layers.

    Args:
        per_stage: layers of a stage, by which the number of stages is found; None: a rank has one stage, or two.

    Raises:
        ValueError: one line that names the value and the remedy, for what torchtitan refuses.
    """
    counted, several = num_layers + first_less + last_less, schedule == LOOPED
    stages = -(-counted // per_stage) if per_stage else pp * (1 + several)
    if needed := _needed(stages, pp, schedule):
        raise ValueError(
            f"parallelism.pipeline_parallel_layers_per_stage is {per_stage}, which makes {stages} stages of {counted} "
            f"layers (embedding and output layer count as {first_less} and {last_less}); {quoted(schedule)} needs "
            f"{needed}: set it to other than {per_stage}, or leave it out"
        )
    each, more = divmod(counted, stages)
    if each < max(1, first_less, last_less):
        raise ValueError(
            f"parallelism.pipeline_parallel_degree is {pp}, but {stages} stages get {each} of {counted} layers each, "
            f"where embedding and output layer count as {first_less} and {last_less} (pipeline_parallel_first_stage_"
            "less_layers, pipeline_parallel_last_stage_less_layers); use a smaller degree"
        )
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    ends = itertools.accumulate(counts)
    return tuple(tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True))


def layers_of_parts(
    parts: Sequence[Sequence[str]], num_layers: int, pp: int, schedule: str
) -> tuple[tuple[int, ...], ...]:
    """The same by ``parallelism.module_fqns_per_model_part``, the names of each stage's modules.

    torchtitan leaves out what no stage names, and what is none of the model's names.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    option = "parallelism.module_fqns_per_model_part"
    names = ["tok_embeddings", *(f"layers.{layer}" for layer in range(num_layers)), "norm", "lm_head"]
    for pair in itertools.zip_longest(itertools.chain(*parts), names):
        if pair[0] != pair[1]:
            given, due = ("nothing more" if name is None else quoted(name) for name in pair)
            raise ValueError(
                f"{option} has {given} where the model has {due}; name tok_embeddings, layers.0 to "
                f"layers.{num_layers - 1}, norm and lm_head once and in this order, or leave it out"
            )
    if needed := _needed(len(parts), pp, schedule):
        raise ValueError(f"{option} has {len(parts)} stages; {quoted(schedule)} over {pp} ranks needs {needed}")
    layers = iter(range(num_layers))
    return tuple(tuple(next(layers) for name in part if name.startswith("layers.")) for part in parts)


def model_of_layers(model: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """One that has some of the model's layers, numbered from 0 in their order."""
    experts, windows = model.experts, model.windows
    moe = experts and replace(experts, num_dense_layers=sum(layer < experts.num_dense_layers for layer in layers))
    linear = model.linear and model.linear.among(layers)
    chosen = tuple(windows[layer] for layer in layers) if windows else ()
    return replace(model, num_layers=len(layers), windows=chosen, experts=moe, linear=linear)


def check_adapters(model: ModelConfig, stages: Sequence[Sequence[int]], targets: Collection[str]) -> None:
    """Raises ValueError, one line, for a stage without low-rank adapters, whose optimizer would have no weights."""
    for number, layers in enumerate(stages):
        if not adapters_of(model_of_layers(model, layers), 1, targets):
            raise ValueError(
                f"magi.lora.target_modules is {quoted([*targets])}, but stage {number} of the pipeline, with layers "
                f"{quoted([*layers])}, has none of these matrices; add other ones, or share layers out otherwise by "
                "parallelism.module_fqns_per_model_part"
            )


def check_microbatches(packs: int, size: int, pp: int, schedule: str) -> None:
    """Checks that the schedule takes as many microbatches as a rank has packs / ``size`` at once.

    Raises:
        ValueError: one line that names the values and the remedy, for what torch refuses.
    """
    number, needed = packs // size, ""
    if schedule == "1F1B" and number < pp:
        needed = f"{pp} at least"
    elif schedule == LOOPED and number > pp and number % (number // pp):
        needed = f"at most {pp}, or a multiple of {pp}"
    if needed:
        raise ValueError(
            f"training.local_batch_size is {packs}, and parallelism.pipeline_parallel_microbatch_size {size}: the "
            f"number of microbatches is {number}, but {quoted(schedule)} over {pp} ranks needs {needed}; change one of "
            "the two"
        )


def _needed(stages: int, pp: int, schedule: str) -> str | None:
    """How many stages the schedule needs, if it is not so many."""
    several = schedule == LOOPED
    if stages % pp == 0 and (stages > pp) == several:
        return None
    return f"a multiple of {pp}, of {2 * pp} at least" if several else str(pp)
