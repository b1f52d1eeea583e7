"""Formats of sources and the text that names them: the same records, whatever holds them, and what goes wrong."""

import gzip
import json
import os
import pickle
import re
import resource
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.processes import python

from torchtitan_magi.data import Corpus, guard
from torchtitan_magi.data.records import tables
from torchtitan_magi.data.records.formats import parse_pair
from torchtitan_magi.data.records.jsonl import JsonlFile

datasets = pytest.importorskip("datasets")

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
}
RECORDS = [
    {"messages": [{"role": "user", "content": "hi ☃"}, {"role": "assistant", "content": "hello"}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": [TOOL], "system": "s"},
    {"text": "plain \u2028 text"},
    {"prompt": "a", "completion": "b"},
] * 3
for record in RECORDS[2::5]:  # a column of Arrow has one type: text, or a list of parts
    record["messages"][0]["content"] = "a"


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def with_other_columns(records):
    """A table with columns that Python cannot even read, beside those of the records."""
    table = pa.Table.from_pylist([{key: None for key in ("system", "tools")} | record for record in records])
    for key in {key for record in records for key in record} - {*table.column_names}:
        table = table.append_column(key, pa.array([record.get(key) for record in records]))
    times = pa.array([10**9 + 1] * len(records), pa.timestamp("ns"))
    return table.append_column("time", times).append_column("picture", pa.array([b"\xff"] * len(records)))


def save_jsonl(path, records):
    path.write_bytes(lines(records))


def save_gz(path, records):
    """Two members, as `cat a.gz b.gz` leaves them."""
    path.write_bytes(gzip.compress(lines(records[:4])) + gzip.compress(lines(records[4:])))


def save_zst(path, records):
    path.write_bytes(pa.Codec("zstd").compress(lines(records), asbytes=True))


def save_parquet(path, records):
    pq.write_table(with_other_columns(records), path, row_group_size=4)


def save_folder(path, records):
    datasets.Dataset(with_other_columns(records)).save_to_disk(path, num_shards=2)


def save_splits(path, records):
    data = datasets.Dataset(with_other_columns(records))
    datasets.DatasetDict({"train": data, "test": data.select([3])}).save_to_disk(path)


def save_hub(path, records):
    """The layout of a repository on the hub, with two subsets."""
    (path / "data").mkdir(parents=True)
    half = len(records) // 2
    save_parquet(path / "data/train-00000-of-00002.parquet", records[:half])
    save_parquet(path / "data/train-00001-of-00002.parquet", records[half:])
    save_parquet(path / "data/test-00000-of-00001.parquet", records[3:4])
    files = "data_files: [{split: train, path: data/train-*}, {split: test, path: data/test-*}]"
    (path / "README.md").write_text(
        f"---\nconfigs:\n- config_name: chat\n  {files}\n- config_name: rest\n  data_files: data/test-*\n---\n"
    )


# name of the file or folder -> (writes it, the source, what stands before the number of a record in messages)
FORMATS = {
    "a.jsonl": (save_jsonl, "{path}", "{path}:"),
    "a.jsonl.gz": (save_gz, "{path}", "{path}:"),
    "a.jsonl.zst": (save_zst, "{path}", "{path}:"),
    "a.parquet": (save_parquet, "{path}", "{path}:"),
    "saved": (save_folder, "{path}", "{path}:"),
    "splits": (save_splits, "{path}", "{path}@train:"),
    "hub": (save_hub, "hf://{path}?subset=chat", "hf://{path}@train:"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What `datasets` makes of a folder of the hub's layout goes to the test's own folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture(params=FORMATS)
def source(request, tmp_path):
    """A source of RECORDS and what its messages name, in each format."""
    save, text, place = FORMATS[request.param]
    path = tmp_path / "data" / request.param
    path.parent.mkdir()
    save(path, RECORDS)
    return text.format(path=path), place.format(path=path)


def test_the_same_records_whatever_holds_them(source, tmp_path, cache, monkeypatch):
    save_jsonl(tmp_path / "twin.jsonl", RECORDS)
    monkeypatch.setattr(tables, "_MAX_ROWS", 3)
    text, place = source
    twin, corpus = Corpus(tmp_path / "twin.jsonl"), Corpus(text, cache=cache)
    expected = [twin[i] for i in range(len(RECORDS))]
    assert [corpus[i] for i in range(len(corpus))] == expected
    for corpus_of_worker in (corpus, pickle.loads(pickle.dumps(corpus))):
        blocks = [corpus_of_worker.read(block) for block in range(corpus.num_blocks)]
        assert [record for block in blocks for record in block] == expected
    assert corpus.block_firsts.tolist() == [sum(map(len, blocks[:i])) for i in range(len(blocks) + 1)]
    assert corpus.where(6) == f"{place}7"
    again = Corpus(text, cache=cache)
    digests = [corpus.digest(block) for block in range(corpus.num_blocks)]
    assert [again.digest(block) for block in range(again.num_blocks)] == digests
    assert len({*digests}) == len(digests)
    assert again.fingerprint == corpus.fingerprint


def test_a_malformed_record_is_named_with_its_place(tmp_path, cache):
    for name, (save, text, place) in FORMATS.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(exist_ok=True)
        save(path, [*RECORDS, {"messages": [{"role": "bot", "content": "x"}]}])
        corpus = Corpus(text.format(path=path), cache=cache)
        with pytest.raises(ValueError, match=r"messages\[0\]\.role is 'bot'; use one of"):
            corpus[len(RECORDS)]
        assert corpus.where(len(RECORDS)) == f"{place.format(path=path)}{len(RECORDS) + 1}"


def test_content_that_is_digested_changes_the_fingerprint(tmp_path, cache):
    for name, (save, text, _) in FORMATS.items():
        found = []
        for number, records in enumerate([RECORDS, [*RECORDS[:-1], {"prompt": "a", "completion": "c"}]]):
            path = tmp_path / f"data{number}" / name
            path.parent.mkdir(exist_ok=True)
            save(path, records)
            found.append(Corpus(text.format(path=path), cache=cache).fingerprint)
        assert found[0] != found[1], name


@pytest.mark.parametrize("name", ["saved", "splits", "hub"])
def test_datasets_that_would_be_held_in_memory_are_told_apart(name, tmp_path, cache, monkeypatch):
    """Their tokens are kept by a digest of their files, of which such a data set has none."""
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 2**40)
    save, text, _ = FORMATS[name]
    digests = set()
    for number, records in enumerate([RECORDS, [*RECORDS[:-1], {"prompt": "a", "completion": "c"}]]):
        (tmp_path / f"data{number}").mkdir()
        save(tmp_path / f"data{number}" / name, records)
        digests.add(Corpus(text.format(path=tmp_path / f"data{number}" / name), cache=cache).digest(0))
    assert len(digests) == 2


def test_a_dataset_whose_files_do_not_say_what_it_holds_is_refused(tmp_path):
    save_folder(tmp_path / "saved", RECORDS)
    data = datasets.load_from_disk(tmp_path / "saved")
    for other in (datasets.Dataset.from_list(RECORDS), data.select([1, 0])):
        with pytest.raises(
            ValueError, match=r"'a' has its rows, or their order, in memory; save it with save_to_disk$"
        ):
            tables.DatasetFile("a", other)
    assert len(tables.DatasetFile("a", data)) == len(RECORDS)


# values of a column with images, and whether each row has some
IMAGES = {
    "paths": (pa.array(["", "a.png", None]), [False, True, False]),
    "bytes": (pa.array([b"", b"\xff" * 10_000, None]), [False, True, False]),
    "lists": (pa.array([[], ["a.png", "b.png"], None]), [False, True, False]),
    "objects": (pa.array([None, {"bytes": b"\xff", "path": None}, {"bytes": None, "path": "a"}]), [False, True, True]),
    "lists of objects": (pa.array([[], [{"bytes": b"\xff", "path": None}], None]), [False, True, False]),
    "categories": (pa.array(["", "a.png", None]).dictionary_encode(), [False, True, False]),
    "numbers of categories": (pa.array([7, 8, None]).dictionary_encode(), [True, True, False]),
    "bits": (pa.array([False, True, None]), [False, True, False]),
    "JSON": (pa.ExtensionArray.from_storage(pa.json_(), pa.array(["[]", '["a"]', None])), [False, True, False]),
    "none": (pa.nulls(3), [False, False, False]),
    "times that Python lacks": (pa.array([10**9 + 1, None, None], pa.timestamp("ns")), [True, False, False]),
}


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("name", ["a.parquet", "saved"])
def test_records_with_images_in_a_column_are_malformed_as_in_jsonl(name, kind, tmp_path):
    if name == "saved" and kind in ("numbers of categories", "JSON"):
        pytest.skip("the library cannot save them")
    column, has = IMAGES[kind]
    table = pa.table({"messages": [RECORDS[0]["messages"]] * 3, "image": column})
    if name == "saved":
        datasets.Dataset(table).save_to_disk(tmp_path / name)
    else:
        pq.write_table(table, tmp_path / name, row_group_size=2)
    corpus = Corpus(tmp_path / name)
    rows = [row for block in range(corpus.num_blocks) for row in corpus.read(block)]
    assert [isinstance(row, ValueError) for row in rows] == has
    assert all(
        str(row).startswith('the record has "image", and only text is') for row in rows if isinstance(row, ValueError)
    )
    assert corpus.unread_columns(0) == ()


def test_a_column_of_a_record_may_have_the_name_of_images(tmp_path):
    pq.write_table(pa.table({"image": ["a cat"], "text": ["x"]}), tmp_path / "a.parquet")
    assert Corpus(f"{tmp_path}/a.parquet?text=image")[0] == {"text": "a cat"}


def test_of_images_in_parquet_the_least_is_read(tmp_path):
    images = [{"bytes": bytes([number]) * 2**20, "path": f"{number}.png"} for number in range(8)]
    pq.write_table(pa.table({"text": ["a"] * 8, "images": [[image] for image in images]}), tmp_path / "a.parquet")
    corpus = Corpus(tmp_path / "a.parquet", parse=lambda record: record)
    assert corpus.num_blocks == 1  # blocks are by the size of the text
    with mock.patch.object(
        pq.ParquetFile, "iter_batches", autospec=True, side_effect=pq.ParquetFile.iter_batches
    ) as read:
        assert corpus.read(0) == [{"text": "a", "images": True}] * 8
    assert read.call_args.kwargs["columns"] == ["text", "images.list.element.path"]


def test_folders_and_patterns_take_all_formats(tmp_path, cache):
    (tmp_path / "in").mkdir()
    save_gz(tmp_path / "a.jsonl.gz", RECORDS)
    save_parquet(tmp_path / "b.parquet", RECORDS[:2])
    save_zst(tmp_path / "in/c.jsonl.zst", RECORDS[:1])
    (tmp_path / "notes.txt").write_text("no records")
    assert len(Corpus(tmp_path, cache=cache)) == len(RECORDS) + 2
    assert len(Corpus(f"{tmp_path}/**", cache=cache)) == len(RECORDS) + 3
    assert len(Corpus(f"{tmp_path}/*.parquet=3")) == 2


def test_splits_and_subsets(tmp_path, cache):
    save_splits(tmp_path / "splits", RECORDS)
    save_hub(tmp_path / "hub", RECORDS)
    hub = f"hf://{tmp_path}/hub"
    for source, length in (
        (f"{tmp_path}/splits?split=test", 1),
        (f"{tmp_path}/splits/test", 1),
        (f"{hub}?subset=chat&split=test", 1),
        (f"{hub}?subset=rest", 1),
        (f"{hub}?subset=chat&split=train[:40%]", 6),
    ):
        assert len(Corpus(source, cache=cache)) == length
    both = Corpus(f"{hub}?split=train&subset=chat=0.4, {tmp_path}/splits?split=test=2", cache=cache)
    assert [(source.weight, len(source)) for source in both.sources] == [(0.4, 15), (2, 1)]
    parts = [Corpus(f"{hub}?subset=chat&split=train[{part}]", cache=cache) for part in (":5", "5:10")]
    assert parts[0].digest(0) != parts[1].digest(0)


def test_a_dataset_on_the_hub_without_a_network_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = r"cannot load 'org/name', split 'train': Couldn't reach 'org/name' .*; load it once where"
    with pytest.raises(ValueError, match=words) as error:
        Corpus("hf://org/name")
    assert "\n" not in str(error.value)


RENAMED = [{"dialog": record["messages"], "messages": 3, "text": "a"} for record in RECORDS if "messages" in record]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "saved"])
def test_columns_of_other_names(name, tmp_path):
    save, text, _ = FORMATS[name]
    save(tmp_path / name, RENAMED)
    save_jsonl(tmp_path / "twin.jsonl", [{"messages": record["dialog"]} for record in RENAMED])
    source, twin = text.format(path=tmp_path / name), Corpus(tmp_path / "twin.jsonl")
    with pytest.raises(ValueError, match='"messages" and "text"; leave it one of them'):
        Corpus(source)[0]
    corpus = Corpus(f"{source}?messages=dialog")
    assert [corpus[i] for i in range(len(RENAMED))] == [twin[i] for i in range(len(RENAMED))]
    assert corpus.digest(0) != Corpus(source).digest(0)


PARQUET_ERRORS = {
    "no known column": (lambda path: pq.write_table(pa.table({"x": [1]}), path), r"has only the columns \['x'\], none"),
    "two columns of one name": (
        lambda path: pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]), path),
        r"has columns of the same name, \['text', 'text'\]; rename or remove one",
    ),
    "no Parquet": (lambda path: path.write_text("{}"), "cannot read records file .*Parquet file size is 2 bytes"),
    "empty": (lambda path: path.write_text(""), "cannot read records file .*: .*check the path"),
    "cut": (lambda path: (save_parquet(path, RECORDS), os.truncate(path, 2000)), "cannot read records file .*: .*Parq"),
    "missing": (lambda path: None, "cannot read records file .*: No such file or directory; check the path"),
    "a pipe": (os.mkfifo, "cannot read records file .*: it is no regular file"),
}


ENDS = {  # of the process that reads footers
    "abort": ("import os; os.abort()", "was ended by SIGABRT"),
    "no end": ("import time; time.sleep(1000)", "gave no answer for 2 s"),
    "exit": ("import sys; sys.exit(3)", "ended with exit code 3"),
}
FOOTERS = {
    "negative": (tables.Footer(["text"], [-11], [{}]), "its footer says that it has -11 rows"),
    "huge": (tables.Footer(["text"], [2**60], [{}]), "its footer says that it has 1,152,921"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_footer_that_ends_the_process_that_reads_it_is_one_line(name, tmp_path, cache, monkeypatch):
    program, words = ENDS[name]
    save_parquet(tmp_path / "a.parquet", RECORDS)
    monkeypatch.setattr(guard, "_CLEAN", program)
    monkeypatch.setattr(guard, "WAIT_SECONDS", 2 if name == "no end" else 600)
    words = (
        f"cannot read records file '{tmp_path}/a.parquet': the process that reads its footer {words}; check the path$"
    )
    with pytest.raises(ValueError, match=words):
        Corpus(tmp_path / "a.parquet", cache=cache)


def test_a_process_that_is_waited_for_is_ended_where_the_wait_is_interrupted():
    pipe, end = mock.Mock(poll=mock.Mock(side_effect=KeyboardInterrupt)), mock.Mock()
    with pytest.raises(KeyboardInterrupt):
        guard.receive(pipe, end)
    end.assert_called_once_with()


@pytest.mark.parametrize("name", FOOTERS)
def test_a_damaged_footer_is_one_line(name, tmp_path, cache, monkeypatch):
    footer, words = FOOTERS[name]
    save_parquet(tmp_path / "a.parquet", RECORDS)
    monkeypatch.setattr(guard, "receive", lambda *_: footer)
    with pytest.raises(ValueError, match=f"cannot read records file '{tmp_path}/a.parquet': {words}.*; check the path"):
        Corpus(tmp_path / "a.parquet", cache=cache)


def test_of_many_files_the_first_that_cannot_be_read_is_named(tmp_path):
    for number in range(6):
        save_parquet(tmp_path / f"{number}.parquet", RECORDS)
    assert len(Corpus(tmp_path)) == 6 * len(RECORDS)
    for number in (2, 4):
        os.truncate(tmp_path / f"{number}.parquet", 2000)
    with pytest.raises(ValueError, match=f"cannot read records file '{tmp_path}/2.parquet': .*Parquet"):
        Corpus(tmp_path)
    (tmp_path / "1.parquet").unlink()
    os.mkfifo(tmp_path / "1.parquet")
    with pytest.raises(ValueError, match=f"cannot read records file '{tmp_path}/1.parquet': it is no regular file"):
        Corpus(tmp_path)


GROUPS = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torchtitan_magi.data import Corpus
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
DTensor.from_local(torch.ones(2), mesh, [Replicate()]).clone()
del mesh
dist.destroy_process_group()
print(len(Corpus(sys.argv[1])))
"""


def test_files_are_opened_where_a_cache_holds_the_last_of_a_process_group(tmp_path):
    """DTensor's own, of the main thread: what is forked in another thread frees it, and waits for gloo for ever."""
    save_parquet(tmp_path / "a.parquet", RECORDS)
    result = python("-c", GROUPS, tmp_path / "a.parquet")
    assert result.stdout == f"{len(RECORDS)}\n", result.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("what type: \x0f\n"), r"what type: \?; check"),
        (OSError(""), "'[^']*': ; check"),
        (UnicodeDecodeError("utf-8", b"\xe5", 0, 1, "unexpected end"), "can't decode byte 0xe5"),
        (pa.ArrowInvalid("two\nlines"), "two lines; check"),
    ],
)
def test_whatever_arrow_says_of_a_file_is_one_printable_line(error, words, tmp_path, monkeypatch):
    save_parquet(tmp_path / "a.parquet", RECORDS)
    corpus = Corpus(tmp_path / "a.parquet")
    monkeypatch.setattr(pq, "ParquetFile", mock.Mock(side_effect=error))
    with pytest.raises(ValueError, match=words) as caught:
        corpus.read(0)
    assert str(caught.value).isprintable()


def test_a_file_with_fewer_rows_than_its_footer_says_is_refused(tmp_path, monkeypatch):
    save_parquet(tmp_path / "a.parquet", RECORDS)
    footer = tables._read_footer(f"{tmp_path}/a.parquet")
    monkeypatch.setattr(guard, "receive", lambda *_: footer._replace(num_rows=[len(RECORDS) + 1]))
    with pytest.raises(ValueError, match=r"a\.parquet': it has fewer rows than its footer says; check the path"):
        Corpus(tmp_path / "a.parquet").read(0)


COMPRESSED_ERRORS = {
    "cut": (lambda path: path.write_bytes(gzip.compress(os.urandom(9999))[:5000]), "Truncated compressed stream"),
    "damaged": (lambda path: path.write_bytes(gzip.compress(b"a")[:-8] + bytes(8)), "zlib inflate failed"),
    "not compressed": (lambda path: path.write_text("{}"), "zlib inflate failed: incorrect header check"),
    "a pipe": (os.mkfifo, "it is no regular file"),
}


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [("a.parquet", *case) for case in PARQUET_ERRORS.values()]
    + [("a.jsonl.gz", *case) for case in COMPRESSED_ERRORS.values()],
    ids=[*PARQUET_ERRORS, *COMPRESSED_ERRORS],
)
def test_files_that_cannot_be_read_are_one_line(name, make, words, tmp_path, cache):
    make(tmp_path / name)
    with pytest.raises(ValueError, match=words) as error:
        Corpus(tmp_path / name, cache=cache)
    assert "\n" not in str(error.value)
    assert str(tmp_path / name) in str(error.value)
    assert not cache.exists() or not [*cache.iterdir()]


def test_compressed_files_that_cannot_be_read_leave_no_memory_behind(tmp_path, cache):
    def address_space():
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(os.urandom(200))[:100])
    before = 0
    for number in range(72):
        with pytest.raises(ValueError, match="cannot read records file"):
            JsonlFile(path, cache=cache)
        before = before if number >= 8 else address_space()
    assert address_space() - before < 32 * 2**20  # half a buffer for each


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{path}/a.jsonl?mesages=x", "'mesages' is no option; use one of split, subset, messages"),
        ("{path}/a.jsonl?messages=", "messages is empty; give it one value"),
        ("{path}/a.jsonl?split=a&split=b", "split comes twice; give it one value"),
        (
            "{path}/a.jsonl?split=test",
            "neither a name hf://org/name nor a folder saved by datasets; leave out its split",
        ),
        ("{path}/a.parquet?messages=dialog", r"has no column 'dialog' for messages, only \["),
        ("{path}/a.jsonl?messages=x=y", "weight 'y' is not a number"),
        ("{path}/a.jsonl.gz", "is compressed; name a cache folder for its content, or unpack it"),
        ("{path}/splits?split=none", r"has the splits \['train', 'test'\], not 'none'; name one, as in \?split=train"),
        ("{path}/saved?split=train", "has no splits, but split is 'train'; leave it out"),
        ("{path}/saved,{path}/saved", "saved@train' is in the data set twice; give its source a weight"),
        ("hf://{path}/hub", r"Config name is missing.*\['chat', 'rest'\]; check its name, subset and split"),
        ("hf://{path}/hub?subset=none", r"BuilderConfig 'none' not found. Available: \['chat', 'rest'\]; check"),
        (
            "hf://{path}/hub?subset=chat&split=dev",
            r"Unknown split \"dev\". Should be one of \['train', 'test'\].; check",
        ),
        ("a\0b.jsonl", r"the data set is 'a\\x00b.jsonl', with a NUL character; remove it"),
        ("{path}/damaged", "cannot read '.*damaged', saved by datasets: .*; save it again"),
    ],
)
def test_names_that_cannot_be_used_are_one_line(source, words, tmp_path):
    for name, (save, _, _) in FORMATS.items():
        if name.split(".")[0] in source:
            save(tmp_path / name, RECORDS)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/state.json").write_text("{")
    with pytest.raises(ValueError, match=words) as error:
        Corpus(source.format(path=tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("odd", "words", "patterns"),
    [
        ("b.jsonl", "No such file or directory", ["*.jsonl", "**", "b*"]),
        ("part2", "No such file or directory", ["**", "*/*.jsonl", "**/x.jsonl"]),
        ("b.jsonl/", "it is a directory", ["*.jsonl", "**", "*", "*.*"]),
    ],
)
def test_a_pattern_drops_neither_a_broken_link_nor_a_folder_with_the_name_of_a_file(odd, words, patterns, tmp_path):
    (tmp_path / "part1").mkdir()
    save_jsonl(tmp_path / "part1/x.jsonl", RECORDS)
    save_jsonl(tmp_path / "a.jsonl", RECORDS)
    if odd.endswith("/"):
        (tmp_path / odd).mkdir()
    else:
        (tmp_path / odd).symlink_to(tmp_path / "gone.jsonl")
    for pattern in patterns:
        with pytest.raises(ValueError, match=f"cannot read records file '.*{odd.rstrip('/')}': {words}"):
            Corpus(f"{tmp_path}/{pattern}")


OF_JSON = r"JSON parse error: .* in row 3; correct its files"
if datasets.__version__ < "5":
    OF_JSON = r"Expected object or value.*; check its name.* and its files"


@pytest.mark.parametrize(
    ("source", "words"), [("json", OF_JSON), ("hub?subset=chat", ".*Parquet.*; correct its files")]
)
def test_broken_files_behind_a_name_on_the_hub_are_one_line_with_the_cause(source, words, tmp_path):
    (tmp_path / "json").mkdir()
    (tmp_path / "json/train.jsonl").write_bytes(lines(RECORDS[:3]) + b'{"messages": [\n')
    save_hub(tmp_path / "hub", RECORDS)
    os.truncate(tmp_path / "hub/data/train-00000-of-00002.parquet", 200)
    with pytest.raises(ValueError, match=rf"cannot load '.*', .*: {words}$"):
        Corpus(f"hf://{tmp_path}/{source}")


def test_the_footer_of_a_file_is_read_once_however_many_blocks_it_has(tmp_path):
    """It is as long as the file has row groups, each of which is a block at least."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {number}" for number in range(50)]}), path, row_group_size=1)
    corpus = Corpus(path)
    with (
        mock.patch("pyarrow.parquet.read_metadata", wraps=pq.read_metadata) as read,
        mock.patch("pyarrow.parquet.ParquetFile", wraps=pq.ParquetFile) as opened,
    ):
        texts = [record["text"] for block in range(50) for record in corpus.read(block)]
    assert texts == [f"text {number}" for number in range(50)]
    assert read.call_count == 1
    assert all(call.kwargs["metadata"] is not None for call in opened.call_args_list)
    assert len(pickle.dumps(corpus)) < 10_000  # without it


def test_columns_of_other_names_change_the_fingerprint(tmp_path):
    save_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "good": "a", "bad": "b"}])
    options = ("", "?chosen=good&rejected=bad", "?chosen=bad&rejected=good", "?rejected=bad&chosen=good")
    none, one, other, same = (Corpus(f"{tmp_path}/a.jsonl{option}").fingerprint for option in options)
    assert len({none, one, other}) == 3
    assert same == one


@pytest.mark.parametrize("paths", [["a.jsonl"], 3, None])
def test_a_data_set_that_is_no_text(paths):
    with pytest.raises(ValueError, match=r"the data set is .*; name its sources in one string, separated by commas"):
        Corpus(paths)


def test_rows_that_cannot_be_read_are_malformed(tmp_path, monkeypatch):
    texts = [b'{"a": 1}', b"caf\xe9", b"x" * 90, b"c"]
    column = pa.Array.from_buffers(pa.string(), 4, pa.array(texts, pa.binary()).buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    monkeypatch.setattr(tables, "MAX_RECORD_BYTES", 80)
    rows = Corpus(tmp_path / "a.parquet").read(0)
    assert [str(row) for row in rows if isinstance(row, ValueError)] == [
        "a text is not UTF-8; write the file again",
        "the row has 94 bytes, more than 80; split the record",
    ]
    assert [row["text"] for row in rows if isinstance(row, dict)] == ['{"a": 1}', "c"]


def test_json_columns_of_datasets(tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "tools": datasets.List(datasets.Json())})
    tools = [{"a": 1, "b": None}, {"a": [{}]}]
    data = datasets.Dataset.from_list([{"text": "a", "tools": tools}], features=features)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    for name in ("a.parquet", "saved"):
        corpus = Corpus(tmp_path / name, parse=lambda record: record)
        assert corpus.read(0) == [{"text": "a", "tools": tools}]


def test_json_text_in_a_column_is_checked_as_a_line(tmp_path):
    column = pa.ExtensionArray.from_storage(
        pa.json_(), pa.array(["{", '["\\ud83d"]', '{"a": 1, "a": 2}', "[" * 9999, "3"])
    )
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    *malformed, good = Corpus(tmp_path / "a.parquet", parse=lambda record: record).read(0)
    words = ["not JSON", "half of a surrogate pair", "comes twice", "nested too deeply"]
    assert all(word in str(error) for word, error in zip(words, malformed, strict=True))
    assert good == {"text": 3}


def test_a_date_that_python_does_not_have(tmp_path):
    dates = pa.array([2**31 - 1, 0], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"text": dates}), tmp_path / "a.parquet")
    malformed, _ = Corpus(tmp_path / "a.parquet", parse=lambda record: record).read(0)
    assert re.fullmatch(r"the row cannot be read \(days=2147483647; .*\); write it again", str(malformed))


def test_answers_in_pairs_come_from_tables(tmp_path):
    """Where a column has null for what a record lacks."""
    scored = [{"completion": "a", "score": 1}, {"completion": "b", "score": 2.5}]
    given = {"prompt": "q", "completions": [{"completion": "a"}, {"completion": "b"}], "pairs": [[1, 0]]}
    records = [{"prompt": "q", "completions": scored}, given]
    pq.write_table(pa.Table.from_pylist([{"pairs": None} | record for record in records]), tmp_path / "a.parquet")
    corpus = Corpus(tmp_path / "a.parquet", parse=parse_pair)
    assert corpus.read(0) == [parse_pair(record) for record in records]
    renamed = pa.table({"question": ["q"], "answers": [["a", "b"]], "messages": ["x"], "best": [[[0, 1]]]})
    pq.write_table(renamed, tmp_path / "b.parquet")
    (record,) = Corpus(f"{tmp_path}/b.parquet?prompt=question&completions=answers&pairs=best", parse=parse_pair).read(0)
    assert record == parse_pair({"prompt": "q", "completions": ["a", "b"], "pairs": [[0, 1]]})


@pytest.mark.parametrize("list_of", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view])
def test_what_a_tool_lacks_is_left_out_in_lists_and_maps_of_all_kinds(list_of, tmp_path):
    value = pa.struct({"type": pa.string(), "enum": list_of(pa.string())})
    tool = pa.struct({"name": pa.string(), "properties": pa.map_(pa.string(), value)})
    whole = [{"name": "look", "properties": {"at": {"type": "string", "enum": None}}}]
    said = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]]
    table = pa.table({"messages": pa.array(said), "tools": pa.array([whole], list_of(tool))})
    pq.write_table(table, tmp_path / "a.parquet")
    assert Corpus(tmp_path / "a.parquet")[0]["tools"] == [{"name": "look", "properties": {"at": {"type": "string"}}}]


def test_a_table_that_changes_is_named(tmp_path):
    for name in ("a.parquet", "saved"):
        FORMATS[name][0](tmp_path / name, RECORDS)
        corpus = Corpus(tmp_path / name)
        file = tmp_path / name if name == "a.parquet" else next((tmp_path / name).glob("*.arrow"))
        os.truncate(file, 50)
        with pytest.raises(ValueError, match=f"records file '{tmp_path / name}' shrank from .* to 50 bytes"):
            corpus.read(0)
