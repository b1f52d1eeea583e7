"""Which layers each rank of a pipeline has is what torchtitan gives it, and what options change is known to sizing."""

import importlib
import itertools
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
from support.errors import value_errors
from support.runs import IS_0_3, call

from torchtitan_magi.models.pipeline_stages import LOOPED, check_adapters, check_microbatches, layers_of_stages
from torchtitan_magi.models.published import published_sizes
from torchtitan_magi.sizing.activations import block_input
from torchtitan_magi.sizing.gpus import H100
from torchtitan_magi.sizing.keeping.kinds import parse
from torchtitan_magi.sizing.memory import GIB, _moments, host_memory, predict, states_on_host
from torchtitan_magi.sizing.predicted_run import Place, predict_run
from torchtitan_magi.sizing.run_setup import Setup, setup_of
from torchtitan_magi.sizing.sample_packs import make_packs

LLAMA = published_sizes("Llama-3.1-8B")
RUN = Setup(LLAMA, 65536, cp=2, pp=4, at_once=8, checkpointing="auto", compiled=True, compiled_loss=True)
PLACE = Place(H100, 8, tuple(make_packs("histogram", 65536, 3)))
SCHEDULES = "1F1B", "Interleaved1F1B"
GRID = [
    *itertools.product((1, 3, 4, 7, 32, 61), (2, 4, 8), SCHEDULES, (0, 1, 3), (0, 1, 4), (None,)),
    *itertools.product((7, 32), (2, 4), SCHEDULES, (1,), (1,), (1, 2, 4, 5, 9, 17)),
]


def shared_out_by_torchtitan():
    """Layers of each stage for each of GRID; None where torchtitan refuses it."""
    module = importlib.import_module("torchtitan.distributed.pipeline_parallel")
    split = module._generate_llm_fqn_per_model_part if IS_0_3 else module.generate_llm_fqn_per_model_part
    found = []
    for num_layers, pp, schedule, first, last, per_stage in GRID:
        stages = pp * (1 + (schedule == "Interleaved1F1B"))
        if per_stage:
            stages = -(-(num_layers + first + last) // per_stage)
            if stages % pp or (stages // pp == 1) != (schedule == "1F1B"):
                found.append(None)
                continue
        try:
            parts = split(stages, num_layers, first, last)
        except ValueError:
            found.append(None)
        else:
            found.append([[int(name.split(".")[1]) for name in part if name[:7] == "layers."] for part in parts])
    return found


def shared_out(*of):
    try:
        return [[*stage] for stage in layers_of_stages(*of)]
    except ValueError:
        return None


@pytest.mark.either
def test_stages_have_the_layers_that_torchtitan_gives_them():
    expected = call(shared_out_by_torchtitan)
    assert [shared_out(*of) for of in GRID] == expected
    assert 100 < sum(stages is not None for stages in expected) < len(GRID)


def test_ranks_of_a_looped_pipeline_have_several_stages():
    run = replace(RUN, schedule="Interleaved1F1B")
    assert run.rank_layers[0] == (0, 1, 2, 3, 17, 18, 19, 20)
    assert sorted(itertools.chain(*run.rank_layers)) == [*range(32)]
    (stage, *_) = replace(run, keeping=parse("16 inputs, 16 all", 32)).stages()
    assert [keeping.kept for keeping in stage.keeping] == ["inputs"] * 4 + ["all"] * 4


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_what_is_chosen_fits_every_rank(schedule, pp):
    run = predict_run(replace(RUN, pp=pp, cp=8 // pp, at_once=2 * pp, schedule=schedule), PLACE)
    setup = run.setup
    for rank, layers in enumerate(setup.rank_layers):
        stage = replace(setup._stage(rank, layers), in_flight=setup._in_flight(rank))
        assert max(each.total for each in _moments(stage)) <= run.memory.total <= 0.91 * H100.capacity
        assert [setup.keeping[layer] for layer in layers] == [*stage.keeping]


def test_stages_in_the_middle_count():
    ends, heavy = (replace(RUN, keeping=parse(text, 32)) for text in ("inputs", "8 inputs, 16 all, 8 inputs"))
    assert predict(heavy).total > 3 * predict(ends).total
    offloads = replace(RUN, keeping=parse("8 inputs, 16 all offloaded, 8 inputs", 32))
    assert host_memory(offloads) > 100 * GIB


def read_of(**options):
    """Reads options of [parallelism] as given, and others as torchtitan has them by default."""
    given = {"training.seq_len": 65536, "training.dataset": "sft", "activation_checkpoint.mode": "full"}
    given |= {f"parallelism.{name}": value for name, value in options.items()}

    def read(name, default):
        return given.get(name, default[0] if isinstance(default, tuple) else default)

    return read


def layers_read(**options):
    setup = setup_of(read_of(pipeline_parallel_degree=2, **options), LLAMA, 1)
    return [len(layers) for layers in setup.rank_layers], setup.loops


def test_options_about_stages_are_read():
    assert layers_read() == ([16, 16], 1)
    less = {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 8}
    assert layers_read(**less) == ([20, 12], 1)
    looped = {"pipeline_parallel_schedule": "Interleaved1F1B"}
    assert layers_read(**looped) == ([16, 16], 2)
    assert layers_read(**looped, pipeline_parallel_layers_per_stage=6) == ([16, 16], 3)
    assert layers_read(module_fqns_per_model_part=parts_of(1)) == ([1, 31], 1)


def parts_of(*cuts):
    """Names of the modules of each stage, which begin at these layers."""
    names = ["tok_embeddings", *(f"layers.{layer}" for layer in range(32)), "norm", "lm_head"]
    ends = [0, *(cut + 1 for cut in cuts), len(names)]
    return [names[first:last] for first, last in itertools.pairwise(ends)]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            [[name for name in part if name != "layers.7"] for part in parts_of(16)],
            "'layers.8' where the model has 'layers.7'",
        ),
        (parts_of(16)[::-1], "has 'layers.16' where the model has 'tok_embeddings'"),
        ([*parts_of(16)[:1], parts_of(16)[1][:-1]], "has nothing more where the model has 'lm_head'"),
        ([*parts_of(16)[:1], [*parts_of(16)[1][:-1], "output"]], "has 'output' where the model has 'lm_head'"),
        ([*parts_of(16), ["layers.31"]], "has 'layers.31' where the model has nothing more"),
        (parts_of(8, 16), "has 3 stages; '1F1B' over 2 ranks needs 2"),
    ],
)
def test_stages_that_leave_modules_out_are_refused(parts, words):
    """torchtitan would train a smaller model, or one in another order, and say nothing."""
    with pytest.raises(ValueError, match=r"parallelism\.module_fqns_per_model_part has") as caught:
        layers_read(module_fqns_per_model_part=parts)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def changed(**options):
    """What is predicted of a run with some option, and without it."""
    read = read_of(tensor_parallel_degree=2, context_parallel_degree=4)
    given = {name.replace("__", "."): value for name, value in options.items()}
    return [
        setup_of(lambda name, default, given=given: given.get(name, read(name, default)), LLAMA, 1)
        for given in (given, {})
    ]


def test_options_that_change_memory_are_read():
    never, plain = changed(parallelism__fsdp_reshard_after_forward="never")
    assert (
        predict(never).parts["gathered parameters"] > 8.03e9 / 2 * 2 > 3 * predict(plain).parts["gathered parameters"]
    )
    whole, plain = changed(parallelism__enable_sequence_parallel=False)
    assert block_input(whole) == 2 * block_input(plain)
    staged, plain = changed(checkpoint__enable=True, checkpoint__async_mode="async_with_pinned_mem")
    assert states_on_host(staged) == pytest.approx(12 * 8.03e9 / 8, rel=0.01)
    assert states_on_host(plain) == 0
    pairs, plain = changed(training__dataset="dpo", magi__dpo__reference="file")
    assert (pairs.reference, pairs.logits_again, plain.logits_again) == (False, True, False)
    pipeline = setup_of(
        read_of(pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=4, fsdp_reshard_after_forward="always"),
        LLAMA, 1,
    )  # fmt: skip
    assert (pipeline.packs, pipeline.at_once, pipeline.keeps_gathered) == (4, 2, False)
    assert replace(pipeline, reshard="default").keeps_gathered


def test_a_pipeline_that_torchtitan_refuses_is_refused_in_one_line():
    with pytest.raises(ValueError, match="pipeline_parallel_degree is 64, but 64 stages get 0 of 34 layers each"):
        setup_of(read_of(pipeline_parallel_degree=64), LLAMA, 1)
    with pytest.raises(ValueError, match=r"microbatch_size is 16, which does not divide training\.local_batch_size, 8"):
        layers_read(pipeline_parallel_microbatch_size=16)
    with pytest.raises(ValueError, match="layers_per_stage is 4, which makes 9 stages of 34 layers"):
        layers_read(pipeline_parallel_layers_per_stage=4)
    with pytest.raises(ValueError, match=r"batch_size is 8, and .*_size 8: .* is 1, but '1F1B' over 2 ranks needs 2"):
        layers_read(pipeline_parallel_microbatch_size=8)


def test_stages_without_adapters_are_refused():
    """Of layers with experts and without, and of linear and of full attention."""
    sparse, hybrid = published_sizes("Qwen3-30B-A3B"), published_sizes("Qwen3.5-9B")
    sparse = replace(sparse, experts=replace(sparse.experts, num_dense_layers=1))
    check_adapters(sparse, [(0, 1), (2, 3)], ["experts"])
    with pytest.raises(ValueError, match=r"\['experts'\], but stage 0 of the pipeline, with layers \[0\], has none"):
        check_adapters(sparse, [(0,), (1, 2)], ["experts"])
    check_adapters(hybrid, [(0, 1, 2, 3)], ["wo"])
    with pytest.raises(ValueError, match=r"\['wo'\], but stage 1 of the pipeline, with layers \[4, 5, 6\], has none"):
        check_adapters(hybrid, [(0, 1, 2, 3), (4, 5, 6)], ["wo"])
    stages = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": LOOPED}
    read = read_of(**stages, pipeline_parallel_last_stage_less_layers=11)
    setup_of(read, LLAMA, 1)
    with pytest.raises(ValueError, match=r"but stage 3 of the pipeline, with layers \[\], has none of these"):
        setup_of(lambda name, default: 4 if name == "magi.lora.rank" else read(name, default), LLAMA, 1)


@pytest.mark.either
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_are_refused_where_torch_refuses_them(schedule):
    make = getattr(importlib.import_module("torch.distributed.pipelining"), f"Schedule{schedule}")
    for pp, number in itertools.product((2, 3, 4), range(1, 13)):
        stages = [MagicMock(num_stages=2 * pp, group_size=pp, group_rank=0) for _ in range(2)]
        stages = stages if schedule == LOOPED else MagicMock(num_stages=pp)
        by_torch = value_errors(make, [(stages, number)])
        ours = value_errors(check_microbatches, [(2 * number, 2, pp, schedule)])
        assert (by_torch == [None]) == (ours == [None]), f"{number} over {pp}"


def test_more_than_the_host_has_may_not_fit():
    from torchtitan_magi.sizing.answer import Answer, verdict

    by_hand = replace(RUN, pp=1, cp=8, seq_len=2**20, keeping=parse("all offloaded", 32))
    run = predict_run(by_hand, replace(PLACE, packs=tuple(make_packs("histogram", 2**20, 1))))
    assert not run.fits
    text = verdict(Answer(run, [], 1, None, None, []))[0]
    assert text.startswith("May not fit: 65 of 79 GiB on each of 8 H100, and 546 GiB of the host's memory for each, ")
