"""Sources: files, folders and patterns, weights, epochs; large files in little memory."""

import collections
import json
from unittest import mock

import numpy as np
import pytest
from support.jsonl import write_jsonl
from support.numbered_records import dataset, flats
from support.streams import in_a_process, resume, take

from torchtitan_magi.data import Corpus, JsonlFile
from torchtitan_magi.data.packs.epoch_order import EpochOrder
from torchtitan_magi.data.records import jsonl


def write(path, names, length=9):
    """Documents that the tokenizer of test_data_sft understands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_jsonl(path, ({"text": f"{name} {length} 0"} for name in names))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "data/b.jsonl", range(10, 20))
    write(tmp_path / "data/a.jsonl", range(10))
    write(tmp_path / "data/more/c.jsonl", range(20, 26))
    (tmp_path / "data/notes.txt").write_text("no records")
    return tmp_path / "data"


def names(corpus):
    return [int(corpus[i]["text"].split()[0]) for i in range(len(corpus))]


def test_a_source_is_a_file_a_folder_or_a_pattern(folder):
    a, c = range(10), range(20, 26)
    assert names(Corpus(folder / "a.jsonl")) == [*a]
    assert names(Corpus(folder)) == [*range(20)]
    assert names(Corpus(f"{folder}/")) == [*range(20)]
    assert names(Corpus(f"{folder}/*.jsonl")) == [*range(20)]
    assert names(Corpus(f"{folder}/**/*.jsonl")) == [*range(26)]
    assert names(Corpus(f"{folder}/more/c.jsonl, {folder}/a.jsonl")) == [*c, *a]
    assert Corpus(f"{folder}/more,{folder}").where(17) == f"{folder}/b.jsonl:2"


def test_a_pattern_that_ends_in_two_stars_goes_down_to_records(folder):
    (folder / "a.jsonl.reference.npz").write_bytes(b"what training keeps beside the data")
    (folder / "more/README.md").write_text("no records")
    assert names(Corpus(f"{folder}/**")) == [*range(26)]
    assert names(Corpus(f"{folder}/a*")) == [*range(10)]


def test_a_path_may_hold_commas_and_equals_signs_where_it_exists(tmp_path):
    odd = write(tmp_path / "a,b=3.jsonl", [1])
    other = write(tmp_path / "lr=0.5", [2])
    brackets = write(tmp_path / "[x].jsonl", [3])
    assert names(Corpus(odd)) == [1]
    assert [source.weight for source in Corpus(f"{other}, {brackets}=2").sources] == [1, 2]
    assert names(Corpus(f"{other},{brackets}")) == [2, 3]
    write(tmp_path / "lang=en/x.jsonl", [4])
    assert names(Corpus(f"{tmp_path}/lang=en/*.jsonl")) == [4]


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ("{folder}/*.json", "no file matches '.*json'; check the pattern"),
        ("{folder}/a.jsonl,{folder}", "records file '.*a.jsonl' is in the data set twice; give its source a weight"),
        ("{folder}=half", "source '.*=half': weight 'half' is not a number; write path=0.5"),
        ("{folder}/a.jsonl=0.01", "the weights of '.*=0.01' leave less than one record an epoch; give larger ones"),
        ("{folder}/one.txt=0.5,{folder}/two.txt=0.5", "the weights of '.*' leave less than one record an epoch"),
        ("{folder}=0", "source '.*=0': weight '0' is out of range; give a number above 0"),
        ("{folder}=-1", "weight '-1' is out of range"),
        ("{folder}=nan", "weight 'nan' is out of range"),
        (" , ", "names no source; give a JSONL file"),
        ("{folder}/notes.txt,{folder}/void", "source '.*void' holds no record; write one JSON object per line"),
    ],
)
def test_sources_that_cannot_be_used_are_refused(folder, paths, words):
    (folder / "empty").mkdir()
    (folder / "void").write_text("\n \n")
    write(folder / "one.txt", [1])
    write(folder / "two.txt", [2])
    with pytest.raises(ValueError, match=words) as error:
        Corpus(paths.format(folder=folder))
    assert "\n" not in str(error.value)


def records_of(order):
    """Numbers of an epoch's records in the order in which they are read."""
    parts = [part for window in range(order.num_windows) for part in order.records(window)]
    return np.concatenate([order.corpus.block_firsts[block] + indices for block, indices in parts])


def counted(corpus, epochs, shuffle=True, seed=3):
    weights = [source.weight for source in corpus.sources]
    orders = [records_of(EpochOrder.of(corpus, weights, epoch, seed if shuffle else None)) for epoch in range(epochs)]
    return orders, collections.Counter(np.concatenate(orders).tolist())


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_are_passes_per_epoch(folder, shuffle):
    """a comes twice an epoch, of b 0.3, of c half: after ten epochs 20, 3 and 5 times each."""
    corpus = Corpus(f"{folder}/a.jsonl=2, {folder}/b.jsonl=0.3, {folder}/more=0.5")
    orders, counts = counted(corpus, 10, shuffle)
    assert {len(order) for order in orders} == {20 + 3 + 3}
    assert [counts[i] for i in range(26)] == [20] * 10 + [3] * 10 + [5] * 6
    assert collections.Counter(orders[4].tolist()).most_common(10)[-1][1] == 2  # every record of a twice
    again, _ = counted(corpus, 10, shuffle)
    assert all((one == two).all() for one, two in zip(orders, again, strict=True))
    other, _ = counted(corpus, 10, shuffle, seed=4)
    assert any((one != two).any() for one, two in zip(orders, other, strict=True)) == shuffle
    assert sorted(records_of(EpochOrder.of(corpus, [1, 1, 1], 0, 3 if shuffle else None)).tolist()) == list(range(26))
    assert records_of(EpochOrder.of(corpus, [1, 1, 1], 0, None)).tolist() == list(range(26))


def test_a_share_is_drawn_anew_in_every_pass(folder):
    orders, _ = counted(Corpus(f"{folder}/a.jsonl=0.5"), 6)
    for first in range(0, 6, 2):
        assert sorted([*orders[first], *orders[first + 1]]) == list(range(10))
    assert len({frozenset(order.tolist()) for order in orders[::2]}) > 1


def test_weights_and_epochs_in_a_stream_that_resumes(folder):
    paths = f"{folder}/a.jsonl=2, {folder}/more=0.5"
    options = {"epochs": 4, "seq_len": 24, "window_blocks": 2}
    whole = dataset(paths, **options)
    stream = flats(whole)
    assert whole.counts.documents == 4 * (20 + 3)
    for steps in range(0, len(stream), 5):
        first = dataset(paths, **options)
        take(first, steps)
        state = json.loads(json.dumps(first.state_dict()))
        assert flats(resume(dataset(paths, **options), state)) == stream[steps:]
    assert dataset(paths, **options | {"weighted": False}).num_records == 16
    once = dataset(paths, **options | {"weighted": False, "epochs": 1})
    list(once)
    assert once.counts.documents == 16


def test_state_of_other_files_or_weights_is_refused(folder):
    state = dataset(f"{folder}/a.jsonl").state_dict()
    dataset(f"{folder}/a.jsonl").load_state_dict(state)
    moved = (folder / "a.jsonl").rename(folder / "moved.jsonl")
    dataset(moved).load_state_dict(state)
    with pytest.raises(ValueError, match=r"weights = \[1.0\], this run has \[2.0\]; resume with the same value"):
        dataset(f"{moved}=2").load_state_dict(state)
    moved.write_text(moved.read_text().replace("0 9 0", "1 9 0"))  # as many bytes
    with pytest.raises(ValueError, match=r"this run has '10 records, .*'; resume with the same files in the"):
        dataset(moved).load_state_dict(state)


def test_state_of_files_in_other_sources_is_refused(tmp_path):
    for number in range(3):
        write(tmp_path / f"x{number}.jsonl", range(10 * number, 10 * number + 10))
    state = dataset(f"{tmp_path}/x[01].jsonl=2, {tmp_path}/x2.jsonl").state_dict()
    with pytest.raises(ValueError, match=r"records of the sources = \[20, 10\], this run has \[10, 20\]"):
        dataset(f"{tmp_path}/x0.jsonl=2, {tmp_path}/x[12].jsonl").load_state_dict(state)


def test_check_in_shares_finds_each_bad_line_once(folder):
    lines = (folder / "b.jsonl").read_text().splitlines()
    lines[3] = lines[7] = "{"
    (folder / "b.jsonl").write_text("\n".join(lines))
    with mock.patch("torchtitan_magi.data.records.record_file.BLOCK_BYTES", 40):
        packs = dataset(f"{folder}/**/*.jsonl", check=False)
    with pytest.raises(ValueError, match=r"b.jsonl:4: not JSON"):
        packs.check()
    for shares in (1, 2, 5, 26, 40):
        found = []
        for share in range(shares):
            try:
                packs.check(share, shares)
            except ValueError as error:
                found.append(str(error).split(": ")[0].rsplit("/")[-1])
        assert found[0] == "b.jsonl:4"
        assert found[1:] in ([], ["b.jsonl:8"])


def test_lines_are_found_wherever_chunks_end(tmp_path, monkeypatch):
    """The index is made in chunks; a line, a blank line or a line end may cross from one to the next."""
    lines = ['{"text": "a"}', "", '  {"text": "b"}', "\r", " \t ", '{"text": "ccccccccccccccccc"}', "", '{"text": "d"}']
    for end in ("", "\n"):
        path = tmp_path / "train.jsonl"
        path.write_bytes(("\n".join(lines) + end).encode())
        for chunk in range(1, 40):
            monkeypatch.setattr(jsonl, "_CHUNK_BYTES", chunk)
            file = JsonlFile(path)
            assert [file[i]["text"] for i in range(len(file))] == ["a", "b", "ccccccccccccccccc", "d"]
            assert [file.where(i).rsplit(":")[-1] for i in range(4)] == ["1", "3", "6", "8"]
            assert file.num_bytes == path.stat().st_size


def test_windows_grow_to_their_size_and_hold_every_part_once(folder):
    """A window has at most its size in bytes, or one part; the first is an eighth."""
    with mock.patch("torchtitan_magi.data.records.record_file.BLOCK_BYTES", 40):
        corpus = Corpus(f"{folder}/**/*.jsonl")
        order = EpochOrder.of(corpus, [1.0] * len(corpus.sources), 0, 3, window_blocks=8)
    sizes = np.diff(order.windows)
    assert sizes[0] == 1
    assert sizes.max() == 8 or sizes.sum() < 16
    assert (sizes[1:-1] >= sizes[:-2]).all()
    assert sorted(records_of(order).tolist()) == list(range(26))
    assert order.blocks_from(0) == order.parts[:, 0].tolist()
    assert set(order.blocks_from(1)) == set(range(corpus.num_blocks)) - {int(order.parts[0, 0])}


GROWTH = """
from support.streams import take
from support.numbered_records import dataset
from support.jsonl import write_jsonl
from torchtitan_magi.data import Corpus

corpus = Corpus(path)
for block in range(corpus.num_blocks):
    corpus.read(block)
take(dataset(path, check=False, seq_len=4096, window_blocks=2), 100)
print(len(corpus))
"""


def test_a_large_file_takes_little_memory(tmp_path):
    """100 MB of records: memory grows by their index and the packing window, far less than the file."""
    path = tmp_path / "large.jsonl"
    with open(path, "w") as file:
        for name in range(50_000):
            file.write(json.dumps({"text": f"{name} 500 0", "padding": "x" * 2000}) + "\n")
    assert path.stat().st_size > 100e6
    printed, grown = in_a_process(GROWTH, path)
    assert printed == ["50000"]
    assert grown < 25e6
