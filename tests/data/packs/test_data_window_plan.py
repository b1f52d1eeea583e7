"""Plans of windows that are kept: the same packs with and without them, and whatever happens to their files."""

import errno
import json
import os
import threading
import time
from unittest import mock

import pytest
from support.kept_tokens import corpus_fixtures, damage, dataset, flats
from support.streams import join, resume, take, with_small_blocks

from torchtitan_magi.data.packs import stream
from torchtitan_magi.data.packs.window_plan import Cursor, WindowPlan
from torchtitan_magi.data.tokens.array_file import Damaged
from torchtitan_magi.data.tokens.token_block import TokenBlock
from torchtitan_magi.data.tokens.token_cache import Cancelled

blocks = with_small_blocks(20_000)
folder, tokenizer = corpus_fixtures()


@pytest.fixture(scope="module")
def tokens(folder, tokenizer, tmp_path_factory):
    """A cache with all tokens and no plan."""
    cache = tmp_path_factory.mktemp("tokens")
    list(dataset(folder, tokenizer, cache))
    for plan in cache.glob("*.plan"):
        plan.unlink()
    return cache


@pytest.fixture
def cache(tokens, tmp_path):
    (tmp_path / "cache").mkdir()
    for path in tokens.glob("*.tokens"):
        os.link(path, tmp_path / "cache" / path.name)
    return tmp_path / "cache"


def plans(cache):
    """name -> content."""
    return {path.name: path.read_bytes() for path in cache.glob("*.plan")}


no_packing = mock.patch.object(stream, "plan_window", side_effect=AssertionError("all plans are there"))


@pytest.mark.parametrize("options", [{}, {"shuffle": False, "long_documents": "split", "seq_len": 100}])
def test_packs_are_the_same_with_plans_and_without(folder, tokenizer, cache, options):
    here = dataset(folder, tokenizer, None, epochs=2, **options)
    expected = flats(here)
    cold = dataset(folder, tokenizer, cache, epochs=2, **options)
    assert flats(cold) == expected
    kept = plans(cache)
    assert len(kept) == sum(cold._stream.order_of(epoch).num_windows for epoch in range(2)) > 4
    with no_packing:
        warm = dataset(folder, tokenizer, cache, epochs=2, **options)
        assert flats(warm) == expected
    assert warm.counts == cold.counts == here.counts
    for name in sorted(kept)[::2]:
        (cache / name).unlink()
    assert flats(dataset(folder, tokenizer, cache, epochs=2, **options)) == expected
    assert plans(cache) == kept
    assert not list(cache.glob("*.unfinished"))


@pytest.mark.parametrize("ranks", [2, 7, 1000])
def test_any_number_of_ranks_uses_the_plans_of_one_also_when_it_resumes(folder, tokenizer, cache, ranks):
    whole = flats(dataset(folder, tokenizer, cache))
    with no_packing:
        if ranks < 10:
            shards = [flats(dataset(folder, tokenizer, cache, dp_rank=r, dp_world_size=ranks)) for r in range(ranks)]
            assert [item for item in join(shards) if item[2]] == whole
        first = dataset(folder, tokenizer, cache)
        for steps in (0, 1, len(whole) // 2, len(whole) - 1):
            take(first, steps)
            state = json.loads(json.dumps(first.state_dict()))
            last = dataset(folder, tokenizer, cache, dp_rank=ranks - 1, dp_world_size=ranks)
            rest = flats(resume(last, state) if steps else last)
            left = whole[steps:]
            assert [item for item in rest if item[2]] == left[ranks - 1 :: ranks]
            assert len(rest) == -(-len(left) // ranks)


def test_other_options_have_other_plans(folder, tokenizer, cache, tmp_path):
    list(dataset(folder, tokenizer, cache))
    before = plans(cache)
    list(dataset(folder, tokenizer, cache))
    assert plans(cache) == before
    other = type(tokenizer)(tokenizer.tokenizer, tokenizer.bos_id, None, tokenizer.template)
    for options in ({"seq_len": 511}, {"seed": 1}, {"shuffle": False}, {"window_blocks": 3}, {"tokenizer": other}):
        known = plans(cache)
        list(dataset(folder, options.pop("tokenizer", tokenizer), cache, **options))
        new = plans(cache).keys() - known.keys()
        assert len(new) >= 4, options
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join([*lines[1:], lines[0]]))
    known = plans(cache)
    list(dataset(tmp_path, tokenizer, cache))
    assert len(plans(cache).keys() - known.keys()) >= 4


@pytest.mark.parametrize("what", ["truncated", "empty", "magic", "head", "index", "content", "longer"])
def test_a_damaged_plan_is_made_again(folder, tokenizer, cache, what, caplog):
    expected = flats(dataset(folder, tokenizer, cache))
    kept = plans(cache)
    path = cache / sorted(kept)[1]
    damage(path, what)
    if what == "content":
        plan = WindowPlan.open(str(path))  # only a reader of the pack notices
        with pytest.raises(Damaged):
            plan.rows_of(plan.num_packs - 1)
    else:
        with pytest.raises(Damaged):
            WindowPlan.open(str(path))
    assert flats(dataset(folder, tokenizer, cache)) == expected
    assert f"{path} is damaged and is made again" in caplog.text
    assert plans(cache) == kept


def test_a_rank_reads_the_rows_of_its_own_packs_only(folder, tokenizer, cache, caplog):
    """Damage of all rows is found by the ranks that have a pack, and by no other."""
    whole = flats(dataset(folder, tokenizer, cache))
    for path in cache.glob("*.plan"):
        content = path.read_bytes()
        plan = WindowPlan.open(str(path))
        path.unlink()
        path.write_bytes(content[: len(content) - plan.rows.nbytes] + bytes(plan.rows.nbytes))
    ranks = len(whole) + 1
    nothing = flats(dataset(folder, tokenizer, cache, dp_rank=ranks - 1, dp_world_size=ranks))
    assert (len(nothing), nothing[0][2]) == (1, [])
    assert caplog.text == ""
    mine = flats(dataset(folder, tokenizer, cache, dp_rank=ranks - 2, dp_world_size=ranks))
    assert mine == whole[-1:]
    assert caplog.text.count("is damaged") == 1


def test_a_damaged_plan_of_the_last_round_is_made_again(folder, tokenizer, cache):
    """Nothing is read ahead any more, and tokens of the window that are not open have to be opened."""
    whole = flats(dataset(folder, tokenizer, cache))
    for path in cache.glob("*.plan"):
        damage(path, "content")
    for rank in (0, len(whole) - 1):
        assert flats(dataset(folder, tokenizer, cache, dp_rank=rank, dp_world_size=1000)) == whole[rank : rank + 1]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["tempfile.mkstemp", "fcntl.flock"])
def test_on_a_disk_that_is_full_or_read_only_plans_are_not_kept_which_is_said_once(
    folder, tokenizer, cache, error, call, caplog
):
    with mock.patch(call, side_effect=OSError(error, os.strerror(error))):
        found = flats(dataset(folder, tokenizer, cache))
    assert [record.message for record in caplog.records if "packs for itself" in record.message] == [
        f"plans cannot be kept in {cache} ({os.strerror(error)}): every process packs for itself"
    ]
    assert plans(cache) == {}
    assert found == flats(dataset(folder, tokenizer, None))


def test_a_plan_that_nobody_has_read_for_long_is_removed_when_another_is_made(folder, tokenizer, cache):
    for name, days in (("old", 31), ("new", 29)):
        (cache / f"{name}.plan").touch()
        os.utime(cache / f"{name}.plan", (time.time() - days * 86400,) * 2)
    list(dataset(folder, tokenizer, cache))
    assert {path.name for path in cache.glob("*.plan")} & {"old.plan", "new.plan"} == {"new.plan"}


def test_an_epoch_opens_the_files_of_small_data_once(folder, tokenizer, cache):
    list(dataset(folder, tokenizer, cache, epochs=3))
    packs = dataset(folder, tokenizer, cache, epochs=3)
    with mock.patch.object(TokenBlock, "open", wraps=TokenBlock.open) as opened:
        list(packs)
    paths = [call.args[0] for call in opened.call_args_list]
    assert sorted(paths) == sorted(packs.tokens.path(block) for block in range(packs.records.num_blocks))


def test_of_many_who_need_a_plan_one_makes_it(folder, tokenizer, cache):
    expected = flats(dataset(folder, tokenizer, None))
    found = []

    def read():
        found.append(flats(dataset(folder, tokenizer, cache)))

    threads = [threading.Thread(target=read) for _ in range(4)]
    with mock.patch.object(stream, "plan_window", wraps=stream.plan_window) as made:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [expected] * 4
    assert made.call_count == len(plans(cache))


def test_who_waits_for_a_plan_that_another_makes_can_be_stopped(folder, tokenizer, cache):
    packs = dataset(folder, tokenizer, cache)
    cancelled = threading.Event()

    def make(cancelled):
        other = threading.Thread(target=wait)
        other.start()
        cancelled.set()
        other.join()
        raise Cancelled

    stopped = []

    def wait():
        with pytest.raises(Cancelled):
            packs._stream.plans.open("name", mock.Mock(side_effect=AssertionError("another makes it")), cancelled)
        stopped.append(True)

    with pytest.raises(Cancelled):
        packs._stream.plans.open("name", make, cancelled)
    assert stopped == [True]
    made = packs._stream._window(Cursor(), packs._stream.order_of(0), threading.Event(), stream.SoFar()).plan
    assert packs._stream.plans.open("name", lambda _: made, threading.Event()) is made  # the lock is free again


def test_plans_of_small_windows_are_not_kept(folder, tokenizer, cache, monkeypatch):
    expected = flats(dataset(folder, tokenizer, cache))
    for path in cache.glob("*.plan"):
        path.unlink()
    monkeypatch.setattr(stream, "_FEWEST_KEPT", 10_000)
    assert flats(dataset(folder, tokenizer, cache)) == expected
    assert plans(cache) == {}


def test_malformed_records_are_told_with_a_plan_as_without(folder, tokenizer, cache, tmp_path, caplog):
    lines = (folder / "train.jsonl").read_text().splitlines()
    for number in range(150, 165):
        lines[number] = '{"text": 1}'
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    options = {"check": False, "window_blocks": 50}
    told = []
    for _ in range(2):
        packs = dataset(tmp_path, tokenizer, cache, bad_records="skip", **options)
        list(packs)
        told.append([record.message for record in caplog.records if record.message.startswith("record left out: ")])
        assert (packs.counts.documents, packs.counts.skipped) == (600, 15)
        caplog.clear()
    assert told[0] == told[1]
    assert len(told[0]) == 10
    with no_packing, pytest.raises(ValueError, match=r'train.jsonl:1\d\d: "text" is 1'):
        list(dataset(tmp_path, tokenizer, cache, **options))


def test_a_record_that_is_malformed_since_it_was_packed_is_named(folder, tokenizer, cache):
    packs = dataset(folder, tokenizer, cache, shuffle=False)
    list(packs)
    block = TokenBlock.open(packs.tokens.path(0))
    parts = [block.document(*block.bounds[index : index + 2]) for index in range(len(block))]
    os.unlink(packs.tokens.path(0))
    TokenBlock.of([ValueError("it took too long"), *parts[1:]]).write(packs.tokens.path(0))
    with pytest.raises(ValueError, match=r"train.jsonl:1: it took too long"):
        list(dataset(folder, tokenizer, cache, shuffle=False, check=False))
