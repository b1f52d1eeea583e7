"""What layers keep: how a mix is written, what it takes, and which is chosen."""

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from support.processes import ROOT

from torchtitan_magi.models.published import published_sizes
from torchtitan_magi.sizing.activations import (
    block_input,
    kept_activations,
    kept_of_block,
    kept_on_host,
    whole_block,
)
from torchtitan_magi.sizing.gpus import H100, H200, HOST_LINK
from torchtitan_magi.sizing.keeping.choose import KINDS, MARGIN, Bound, choose
from torchtitan_magi.sizing.keeping.kinds import KEPT, Keeping, as_option, in_words, parse
from torchtitan_magi.sizing.memory import GIB, host_memory, moments, predict, states_on_host
from torchtitan_magi.sizing.predicted_run import Place, faster, predict_run
from torchtitan_magi.sizing.run_setup import Setup, setup_of
from torchtitan_magi.sizing.step_time import waiting

RESULTS = ROOT / "benchmarks" / "results"
LLAMA, QWEN_9B, QWEN_MOE = map(published_sizes, ("Llama-3.1-8B", "Qwen3.5-9B", "Qwen3-30B-A3B"))
MILLION = Setup(LLAMA, 2**20, cp=8, checkpointing="auto", compiled=True, compiled_loss=True)


def one_document(setup, gpu=H100, **fields):
    return predict_run(setup, Place(gpu, 8, (np.array([setup.seq_len]),), **fields))


# --------------------------------------------------------------------------------------------------------------- words


def test_a_mix_is_written_as_it_is_read():
    mix = parse("2 inputs offloaded, 1 all,3 attention", 6)
    assert mix == (Keeping("inputs", True),) * 2 + (Keeping("all"),) + (Keeping("attention"),) * 3
    assert as_option(mix) == "2 inputs offloaded, 1 all, 3 attention"
    assert in_words(mix) == "layers 0-1 keep inputs offloaded, 2 keep all, 3-5 keep attention"
    assert parse("attention", 4) == (Keeping("attention"),) * 4
    spread = parse("2 products offloaded among 3 products, 1 all", 6)
    offloaded = Keeping("products", True)
    assert [at for at, each in enumerate(spread) if each == offloaded] == [0, 3]
    assert spread[-1] == Keeping("all")
    assert in_words(spread) == "layers 0-4 keep 2 products offloaded among 3 products, 5 keep all"
    assert as_option((Keeping("all", True), Keeping("all")) * 3) == "3 all offloaded among 3 all"


def test_every_mix_is_written_in_a_way_that_comes_back():
    draw = random.Random(0)
    for _ in range(2000):
        kinds = draw.sample(KINDS, 3)
        mix = tuple(draw.choice(kinds) for _ in range(draw.randint(1, 20)))
        assert parse(as_option(mix), len(mix)) == mix
    for count, others in itertools.product(range(2, 30), repeat=2):
        text = f"{count} all offloaded among {others} products"
        assert as_option(parse(text, count + others)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("attentoin", "magi.keep has 'attentoin'; write it as 'attention', '20 inputs offloaded, 12 all', or"),
        ("3 all offload", "magi.keep has '3 all offload'"),
        ("", "magi.keep has ''"),
        ("3 all, 2 inputs", "magi.keep is '3 all, 2 inputs', which does not come to the model's 6 layers"),
        ("99999999999999 all", "does not come to the model's 6 layers"),
        ("all, 1 inputs", "does not come to the model's 6 layers"),
        ("2 all among inputs", "magi.keep has '2 all among inputs'"),
        ("3 all among 4 inputs", "does not come to the model's 6 layers"),
        ("all among 1 inputs", "does not come to the model's 6 layers"),
    ],
)
def test_what_is_no_mix_is_refused_in_one_line(text, words):
    with pytest.raises(ValueError, match=r"magi\.keep") as caught:
        parse(text, 6)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mix_without_the_mode_for_it_is_refused():
    values = {
        "magi.keep": "all",
        "activation_checkpoint.mode": "full",
        "training.seq_len": 1024,
        "training.dataset": "",
    }
    default = lambda option, kind: kind[0] if isinstance(kind, tuple) else kind  # noqa: E731
    with pytest.raises(ValueError, match=r"magi.keep is 'all', but activation_checkpoint.mode is 'full'; set that to"):
        setup_of(lambda option, kind: values.get(option, default(option, kind)), LLAMA, 1)


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("model", [LLAMA, QWEN_9B, QWEN_MOE], ids=lambda model: model.model)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_kept_is_in_order(model, compiled):
    setup = Setup(model, 131072, cp=4, compiled=compiled)
    for is_linear in {False, bool(model.linear)}:
        sizes = [kept_of_block(setup, kept, is_linear) for kept in KEPT]
        assert sizes == sorted(set(sizes), reverse=True)
        assert (sizes[0], sizes[-1]) == (whole_block(setup, is_linear), block_input(setup))


def test_attention_is_one_more_vector_than_the_input():
    setup = replace(MILLION, keeping=parse("attention", 32))
    each = setup.tokens * (4096 * 2 + 4096 * 2 + 32 * 4)
    assert kept_activations(setup) == 32 * each
    some = replace(setup, keeping=parse("20 attention offloaded, 12 attention", 32))
    assert kept_activations(some) == (12 + 2) * each  # two are on their way
    assert kept_on_host(some) == 20 * each
    of_pipeline = replace(some, pp=2, at_once=4, cp=4)
    assert host_memory(of_pipeline) == 2 * 16 * each * 2  # first stage: two microbatches wait, all 16 layers, twice T


def test_the_mode_that_is_a_kind_takes_the_same():
    for mode, kept in (("none", "all"), ("selective", "products"), ("full", "inputs")):
        setup = replace(MILLION, keeping=parse(kept, 32))
        same = replace(setup, checkpointing=mode, keeping=())
        assert predict(setup) == predict(same)
        assert one_document(setup).time == one_document(same).time


def test_the_moment_between_two_kinds_counts():
    """Where later layers keep all and earlier ones nothing, these compute again in the room that the others leave."""
    setup = replace(MILLION, cp=16, keeping=parse("28 inputs, 4 all", 32))
    totals = {each.moment: each.total for each in moments(setup)}
    assert totals["number 27 block's backward"] < totals["the last block's backward"] == predict(setup).total


# -------------------------------------------------------------------------------------------------------------- choice


def test_eight_gpus_take_a_million_tokens():
    run, full = one_document(MILLION), one_document(replace(MILLION, checkpointing="full"))
    assert run.fits
    assert run.time.total < 0.85 * full.time.total < 300
    assert {keeping.kept for keeping in run.setup.keepings[:24]} == {"attention"}
    assert "inputs" not in {keeping.kept for keeping in run.setup.keepings}
    assert 0 < host_memory(run.setup) <= 64 * GIB


@pytest.mark.parametrize("gpu", [H100, H200], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("tokens", [2**13, 2**15, 2**17])
@pytest.mark.parametrize("model", [LLAMA, QWEN_9B, QWEN_MOE], ids=lambda model: model.model)
def test_what_is_chosen_fits_and_no_single_kind_is_faster(model, tokens, gpu):
    setup = Setup(model, 8 * tokens, cp=8, ep=8 if model.experts else 1, checkpointing="auto", compiled=True)
    chosen = one_document(setup, gpu)
    margin = chosen.memory.total
    assert margin <= MARGIN * gpu.capacity or not chosen.fits
    for kind in KINDS:
        other = one_document(replace(setup, keeping=(kind,) * model.num_layers), gpu)
        if other.memory.total <= margin and host_memory(other.setup) <= other.place.host:
            assert chosen.time.total <= 1.02 * other.time.total  # what offloads is taken to cost a little


@pytest.mark.parametrize("name", ["keeping_h200", "keeping_h200x2"])
def test_steps_took_what_is_predicted_and_the_fastest_is_known(name):
    from bench_keeping import CASES, predicted

    facts = json.loads((RESULTS / f"{name}.json").read_text())
    times = {}
    for row in facts["rows"]:
        case = CASES[row["case"]][0]
        run = predicted(case, facts["device"], parse(row["kept"], case.layers))
        assert run.memory.allocated / GIB == pytest.approx(row["peak_gib"], rel=0.08), row
        if row["case"] != "500 steps":  # whose small layers wait for the host's launches
            assert 1e3 * run.time.total == pytest.approx(row["step_ms"], rel=0.15), row
            times.setdefault(row["case"], []).append((run.time.total, row["step_ms"]))
    for case, found in times.items():
        chosen = min(found)[1]
        assert chosen <= 1.02 * min(step for _, step in found), case


def test_layers_wait_for_copies_that_follow_each_other():
    setup = replace(MILLION, model=replace(LLAMA, num_layers=4), keeping=parse("inputs offloaded", 4))
    copy = kept_of_block(setup, "inputs", False) / HOST_LINK

    def waits(setup, forward, between, backward):
        return waiting(setup, *(copies * copy for copies in (forward, between, backward))) / copy

    assert waits(replace(setup, keeping=parse("inputs", 4)), 0.1, 0, 0.1) == 0
    assert waits(setup, 1, 0, 1) == pytest.approx(0)
    # The third layer begins after one copy, the fourth after two: at 1/3 + 1 and at 1/3 + 2.
    assert waits(setup, 1 / 3, 0, 10) == pytest.approx(2 + 2 / 3 - 4 / 3)
    # The fourth copy ends at 4 + 1/3, behind which the others come back for the last two of four backwards.
    assert waits(setup, 1 / 3, 0, 0) == pytest.approx(4 + 1 / 3 + 2 - 4 / 3)
    assert waits(setup, 1 / 3, 100, 0) == pytest.approx(2 + 2 / 3 - 4 / 3 + 2)
    assert waits(replace(setup, keeping=parse("2 inputs offloaded, 2 inputs", 4)), 0.1, 0, 0.1) == 0  # these stay
    stages = replace(setup, model=replace(LLAMA, num_layers=8), pp=2, keeping=parse("4 inputs, 4 inputs offloaded", 8))
    assert waits(stages, 1 / 3, 0, 10) == waits(setup, 1 / 3, 0, 10)  # those of the second


def test_it_is_as_good_as_the_best_mix_of_two():
    model = replace(LLAMA, num_layers=6)
    setup = Setup(model, 2**18, checkpointing="auto", compiled=True, compiled_loss=True)
    place = Place(H200, 1, (np.array([2**18]),))

    gpu, host = Bound(lambda mixed: predict(mixed).total, MARGIN * H200.capacity), Bound(host_memory, 0)

    def fits(mixed):
        return all(bound.takes(mixed) <= bound.most for bound in (gpu, host))

    def seconds(mixed):
        return predict_run(mixed, place).time.total

    chosen = choose(setup, gpu, host, seconds)
    kinds = [Keeping(kept) for kept in KEPT]
    mixes = [(low,) * (6 - n) + (high,) * n for low, high in itertools.product(kinds, repeat=2) for n in range(7)]
    setups = [replace(setup, keeping=mix) for mix in mixes]
    assert fits(chosen)
    assert seconds(chosen) <= min(seconds(mixed) for mixed in setups if fits(mixed)) * 1.001


def test_the_host_is_a_bound():
    least = one_document(MILLION, host=0)
    assert host_memory(least.setup) == 0
    some = one_document(MILLION, host=16 * GIB)
    assert 0 < host_memory(some.setup) <= 16 * GIB
    weights = one_document(replace(MILLION, offload=True), host=16 * GIB)  # 15 of which hold weights and their states
    assert states_on_host(weights.setup) == pytest.approx(8.03e9 * 16 / 8, rel=0.01)
    assert host_memory(weights.setup) <= 1.1 * GIB
    assert some.time.total < least.time.total


def test_weights_that_fill_the_host_leave_layers_none_of_it():
    model = published_sizes("Llama-3.1-70B")
    run = one_document(replace(MILLION, model=model, seq_len=2**16, offload=True))
    assert states_on_host(run.setup) > 64 * GIB
    assert run.fits
    assert host_memory(run.setup) == 0


def test_what_is_said_by_hand_stays_where_others_are_compared():
    setup = replace(MILLION, seq_len=2**17, microbatches=4)
    by_hand = one_document(replace(setup, keeping=parse("inputs", 32)))
    found = faster(by_hand)
    assert found
    assert all(other.setup.keeping == by_hand.setup.keeping for _, other in found)
    assert all("checkpoint" not in words for words, _ in found)
    chosen = one_document(setup)
    assert chosen.given.keeping == () != chosen.setup.keeping


def test_where_nothing_fits_the_least_is_kept():
    run = one_document(replace(MILLION, cp=1))
    assert not run.fits
    assert {str(keeping) for keeping in run.setup.keepings} == {"inputs"}
    for kind in KINDS:
        other = replace(run.setup, keeping=(kind,) * 32)
        assert host_memory(other) > 64 * GIB or predict(other).total >= run.memory.total


def test_stages_of_a_pipeline_keep_alike():
    run = one_document(replace(MILLION, cp=4, pp=2, at_once=4, seq_len=2**18), H100)
    assert run.setup.keepings[:16] == run.setup.keepings[16:]


def test_a_step_of_a_million_tokens_follows_from_smaller_ones():
    """By the rule of bench_keeping.py, of steps as predicted."""
    from bench_keeping import CASES, million, predicted

    rows = []
    for name, (case, _, keeps) in CASES.items():
        for keep in keeps:
            if case.one_document and "attention" in keep:
                run = predicted(case, "NVIDIA H100", parse(keep, case.layers))
                rows.append({"case": name, "kept": as_option(run.setup.keeping), "step_ms": 1e3 * run.time.total})
    found = million(rows, "NVIDIA H100")
    seconds = one_document(MILLION).time.total
    assert f"As predicted {seconds:.0f} s, " in found
    assert float(found.split(" = ")[1].split(" s a step")[0]) == pytest.approx(seconds, rel=0.02)
    assert million(rows[:2], "NVIDIA H100") == ""
