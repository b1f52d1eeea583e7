"""Ranks agree on what each reads, however long one of them takes, and do not wait for one that is gone."""

import pickle
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from torchtitan_magi.training.process import all_ranks
from torchtitan_magi.training.process.all_ranks import agreed


def agreements():
    """Ranks of which the last comes later than a collective waits: on the number, on different ones, on an error."""
    rank, found = dist.get_rank(), []

    def number(wrong):
        time.sleep(1.2 if rank == 2 and not wrong else 0)
        if rank == 1 and wrong == "error":
            raise ValueError("data.jsonl:7: not JSON")
        return 7 + (wrong == "number" and rank == 2)

    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    for wrong in ("", "number", "error"):
        try:
            found.append(agreed("data", lambda wrong=wrong: number(wrong), lambda n: f"{n} packs"))
        except ValueError as error:
            found.append(str(error))
    dist.group.WORLD.set_timeout(timedelta(seconds=1800))
    return found


def test_ranks_agree_without_a_time_out(three_ranks):
    different = "'data' has 7 packs on rank 0, 8 packs on rank 2; give every rank the same data"
    assert three_ranks.run(agreements) == [[7, different, "data.jsonl:7: not JSON"]] * 3


def signs_of_life():
    """How many signs of life this rank gives while it makes something, and whether it goes on after that."""
    store, signs = dist.group.WORLD.get_group_store(), set()

    def make():
        (life,) = (thread for thread in threading.enumerate() if thread.name == "signs of life")
        while len(signs) < 3:
            signs.add(store.get(f"{life._target.__self__.key}/{dist.get_rank()}/alive"))
            time.sleep(0.01)
        return life

    before, all_ranks.SILENCE = all_ranks.SILENCE, 10.0  # a sign in each tenth of it
    made = agreed("data", make, lambda _: "packs")
    all_ranks.SILENCE = before
    return len(signs), made.is_alive()


def test_a_rank_gives_signs_of_life_as_long_as_it_is_waited_for(three_ranks):
    assert three_ranks.run(signs_of_life) == [(3, False)] * 3


@pytest.fixture
def meeting(monkeypatch):
    """Of two ranks, in a time of its own: what ``during`` does every half minute."""
    one = all_ranks._Meeting()
    one.store, one.key, one.now, one.during = dist.HashStore(), "meeting", 0.0, lambda: None

    def sleep(_):
        one.now += 30.0
        one.during()

    monkeypatch.setattr(all_ranks, "time", SimpleNamespace(monotonic=lambda: one.now, sleep=sleep))
    return one


def test_a_rank_that_lives_is_waited_for(meeting):
    def during():
        meeting.store.set("meeting/1/alive", str(meeting.now))
        if meeting.now == 36_000:
            meeting.store.set("meeting/1", pickle.dumps("found"))

    meeting.during = during
    assert meeting._heard(1) == "found"
    assert meeting.now == 36_000


@pytest.mark.parametrize("last", [0, 3_000])
def test_a_rank_that_is_gone_is_not(meeting, last):
    """From the beginning, or after a while."""

    def during():
        if meeting.now <= last:
            meeting.store.set("meeting/1/alive", str(meeting.now))

    meeting.during = during
    with pytest.raises(RuntimeError, match="rank 1 has given no sign of life for 300 s: see"):
        meeting._heard(1)
    assert last + 300 < meeting.now <= last + 360


def test_a_rank_is_waited_for_as_long_as_a_first_collective_would(meeting):
    meeting.store.set_timeout(timedelta(seconds=1200))
    with pytest.raises(RuntimeError, match="no sign of life for 1200 s"):
        meeting._heard(1)
