"""Packs that run together have nearly equal work; every pack is given out once, also where a run goes on otherwise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.numbered_records import dataset, flats, write
from support.streams import join, resume, take, with_small_blocks

from torchtitan_magi.data.packs.dealing import Deal, order_of

SEED = [0, 1]


def work(number):
    """(query, key) pairs of packs, of which the heaviest has 1,000 times those of the lightest."""
    return np.random.default_rng(number).lognormal(10, 1.5, number).astype(np.int64)


@given(st.integers(0, 200), st.lists(st.tuples(st.integers(1, 40), st.integers(0, 39), st.integers(0, 60)), max_size=3))
@settings(max_examples=200)
def test_every_pack_is_dealt_once(number, found):
    deals, left = [], number
    for per_step, taken, dealt in [*found, (8, 0, 0)]:
        deals.append(Deal(per_step, taken % per_step, min(dealt, left)))
        left -= deals[-1].given
    assert sorted(order_of(work(number), deals, SEED).tolist()) == list(range(number))


@pytest.mark.parametrize("per_step", [2, 8, 64])
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_whole_steps_are_neighbours_by_work(per_step, taken):
    pairs, taken = work(1000), taken % per_step
    order = order_of(pairs, [Deal(per_step, taken, 0)], SEED)
    rank = np.empty(1000, np.int64)
    rank[np.argsort(pairs, kind="stable")] = np.arange(1000)
    first = -taken % per_step
    steps = rank[order[first : first + (1000 - first) // per_step * per_step]].reshape(-1, per_step)
    middle = 1000 - steps.size
    assert (np.ptp(steps, axis=1) < per_step + middle + 2).all()  # some packs have equal work
    mixed = np.random.default_rng(0).permutation(1000)[: steps.size]
    of_steps, of_mixed = (
        pairs[found].reshape(-1, per_step).max(1).sum() for found in (order[first:][: steps.size], mixed)
    )
    assert of_steps < 0.8 * of_mixed


def test_one_pack_a_step_is_the_order_of_the_plan():
    assert order_of(work(9), [Deal(1, 0, 0)], SEED).tolist() == list(range(9))


blocks = with_small_blocks(2000)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    lengths = np.random.default_rng(0).lognormal(2.5, 1, 400).astype(int).clip(2, 60).tolist()
    documents = [(number, length, 0) for number, length in enumerate(lengths)]
    return write(tmp_path_factory.mktemp("records") / "r.jsonl", documents)


def packs_of(path, per_step, **options):
    return dataset(path, packs_per_step=per_step, epochs=2, **options)


def in_any_order(packs):
    return sorted(map(str, packs))


def test_ranks_share_steps_of_equal_work_and_lose_nothing(records):
    plain, dealt = (flats(packs_of(records, number)) for number in (1, 4))
    assert plain != dealt
    assert in_any_order(plain) == in_any_order(dealt)
    shards = [flats(packs_of(records, 4, dp_rank=rank, dp_world_size=2)) for rank in range(2)]
    assert join(shards)[: len(dealt)] == dealt


def slowest(packs, per_step):
    """(query, key) pairs of the heaviest pack of each step, summed."""
    pairs = [sum((end - start) ** 2 for start, end in documents) for _, _, documents, _ in packs]
    return sum(max(pairs[first : first + per_step]) for first in range(0, len(pairs), per_step))


def test_the_heaviest_packs_of_steps_are_lighter(records):
    plain, dealt = (flats(packs_of(records, number)) for number in (1, 4))
    assert slowest(dealt, 4) < 0.9 * slowest(plain, 4)
    assert slowest(flats(packs_of(records, 4, shuffle=False)), 4) == slowest(
        flats(packs_of(records, 1, shuffle=False)), 4
    )


@pytest.mark.parametrize("before", [4, 20, 36])
@pytest.mark.parametrize("per_step", [1, 4, 6])
def test_a_run_that_goes_on_with_other_steps_gets_the_rest(records, before, per_step):
    whole = packs_of(records, 4)
    first = take(iter(whole), before)
    rest = resume(packs_of(records, per_step), whole.state_dict())
    again = resume(packs_of(records, 4), rest.state_dict())  # a state that was loaded can be saved
    found, expected = flats(first) + flats(rest), flats(packs_of(records, 4))
    assert in_any_order(found) == in_any_order(expected)
    assert flats(first) + flats(again) == expected
    if per_step == 4:
        assert found == expected
