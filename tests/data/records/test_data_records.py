"""Records: what is accepted, random access, blocks, the kept index, and files that change.

What is refused: test_data_bad_records.py.
"""

import gzip
import hashlib
import json
import os
import pickle
from itertools import pairwise

import pytest
from support.jsonl import write_jsonl

from torchtitan_magi.data import JsonlFile
from torchtitan_magi.data.records import jsonl, record_file


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\n  \n"])
@pytest.mark.parametrize("last", ["", "end"])
def test_random_access_gives_the_lines(tmp_path, end, last):
    texts = [{"text": f"line {i} ☃ \u2028 \x85 {'x' * (7 * i % 31)}"} for i in range(20)]
    path = tmp_path / "train.jsonl"
    lines = end.join(json.dumps(text, ensure_ascii=False) for text in texts)
    path.write_bytes((lines + (end if last else "")).encode())
    file = JsonlFile(path)
    assert len(file) == 20
    assert [file[i] for i in reversed(range(20))] == texts[::-1]
    assert file.num_bytes == path.stat().st_size
    assert file.where(3) == f"{path}:{1 + 3 * end.count(chr(10))}"
    assert [pickle.loads(pickle.dumps(file))[i] for i in range(20)] == texts


def test_byte_order_mark_and_extra_keys_are_let_through(tmp_path):
    path = tmp_path / "train.jsonl"
    messages = [{"role": "assistant", "content": "x", "name": "bot", "tool_calls": []}]
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps({"id": 7, "messages": messages}).encode() + b'\n{"text": "\\ud83d\\ude00 \\u0000"}'
    )
    file = JsonlFile(path)
    assert file[0] == {"messages": [{"role": "assistant", "content": "x", "name": "bot"}]}
    assert file[1] == {"text": "\U0001f600 \x00"}


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A file of nine records in five blocks."""
    monkeypatch.setattr(record_file, "BLOCK_BYTES", 60)
    return write_jsonl(tmp_path / "train.jsonl", [*({"text": f"{i} " * 5} for i in range(8)), {"text": "x" * 100}])


def test_blocks_are_consecutive_records_of_bounded_size(texts):
    file = JsonlFile(texts)
    lines = texts.read_text().splitlines(keepends=True)
    assert file.block_firsts.tolist() == [0, 2, 4, 6, 8, 9]
    for block, (first, last) in enumerate(pairwise(file.block_firsts.tolist())):
        assert file.read(block) == [file[i] for i in range(first, last)]
        assert file.digest(block) == hashlib.sha256("".join(lines[first:last]).encode()).hexdigest()


def test_a_kept_index_spares_reading_the_file(texts, tmp_path, monkeypatch):
    made = JsonlFile(texts, cache=tmp_path / "cache")
    monkeypatch.setattr(jsonl, "_make_index", lambda path: pytest.fail("the index was made again"))
    kept = JsonlFile(texts, cache=tmp_path / "cache")
    for file in (made, kept, pickle.loads(pickle.dumps(kept))):
        assert file.read(4) == [{"text": "x" * 100}]
        assert (len(file), file.digest(1), file.crc32, file.num_bytes) == (
            9,
            made.digest(1),
            made.crc32,
            made.num_bytes,
        )
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".index"]


@pytest.mark.parametrize("damage", [b"", b"\x00" * 8, b"\x01" * 500])
def test_a_damaged_index_is_made_again(texts, tmp_path, damage):
    digests = [JsonlFile(texts, cache=tmp_path / "cache").digest(i) for i in range(5)]
    (index,) = (tmp_path / "cache").iterdir()
    index.write_bytes(damage)
    file = JsonlFile(texts, cache=tmp_path / "cache")
    assert [file.digest(i) for i in range(5)] == digests
    assert len(index.read_bytes()) == 8 * (4 + 10 + 6 + 4 * 5)


@pytest.mark.parametrize("when", ["before it is opened", "while it is open"])
@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:104], lambda data: data.replace(b"3", b"4")])
def test_damaged_content_is_unpacked_again(texts, tmp_path, damage, when, caplog):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(texts.read_bytes()))
    file = JsonlFile(tmp_path / "a.jsonl.gz", cache=tmp_path / "cache")
    expected = [file.read(block) for block in range(5)]
    (content,) = (tmp_path / "cache").iterdir()
    whole = content.read_bytes()
    damaged = tmp_path / "damaged"
    damaged.write_bytes(damage(whole))
    damaged.replace(content)
    if when == "before it is opened":
        file = JsonlFile(tmp_path / "a.jsonl.gz", cache=tmp_path / "cache")
    assert [file.read(block) for block in range(5)] == expected
    assert f"{content} is damaged and is made again" in caplog.text
    assert content.read_bytes() == whole


def test_a_file_is_indexed_in_one_pass(texts, monkeypatch):
    """What is digested was read for its lines just before."""
    scanned, behind = [], []

    def read_at(file, start, read=jsonl._read_at):
        scanned.append(start)
        return read(file, start)

    def digest_of_range(file, start, stop, digest=jsonl._digest_of_range):
        behind.append(scanned[-1] - start)
        return digest(file, start, stop)

    monkeypatch.setattr(jsonl, "_CHUNK_BYTES", 10)
    monkeypatch.setattr(jsonl, "_read_at", read_at)
    monkeypatch.setattr(jsonl, "_digest_of_range", digest_of_range)
    JsonlFile(texts)
    assert scanned == sorted({*scanned})
    assert scanned[-1] == texts.stat().st_size
    assert len(behind) == 5
    assert max(behind) <= 60 + 113  # a block, and the longest record


def test_a_cache_that_cannot_be_written_is_one_line(texts, tmp_path):
    (tmp_path / "file").write_text("")
    words = r"cannot write the data cache '.*file/cache': Not a directory; .* another folder in \[magi\] token_cache"
    with pytest.raises(ValueError, match=words):
        JsonlFile(texts, cache=tmp_path / "file" / "cache")


def shrink(path):
    os.truncate(path, 100)


def grow(path):
    path.write_text(path.read_text() + '{"text": "more"}\n')


def rewrite(path):
    path.write_text(path.read_text().replace("3", "7"))
    os.utime(path, ns=(0, 0))


def rewrite_unseen(path):
    before = path.stat()
    path.write_text(path.read_text().replace("3", "7"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = {
    shrink: r"shrank from \d+ to 100 bytes since it was opened",
    grow: r"grew from \d+ to \d+ bytes since it was opened",
    rewrite: "was rewritten since it was opened",
    os.remove: "cannot be read any more: No such file or directory",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("use", ["read", "__getitem__", "where"])
def test_a_file_that_changes_is_named_in_one_line(texts, tmp_path, change, use):
    file = JsonlFile(texts, cache=tmp_path / "cache")
    change(texts)
    with pytest.raises(ValueError, match=f"records file '{texts}' {CHANGES[change]}; leave it as it is") as error:
        getattr(file, use)(2)
    assert "\n" not in str(error.value)


def test_a_block_is_compared_with_what_was_indexed(texts, tmp_path):
    """A file rewritten at the same size and time, as within one tick of the clock."""
    file = JsonlFile(texts, cache=tmp_path / "cache")
    rewrite_unseen(texts)
    with pytest.raises(ValueError, match="was rewritten since it was opened"):
        file.read(1)
    assert JsonlFile(texts, cache=tmp_path / "cache").read(1)[1] == {"text": "7 " * 5}


@pytest.mark.parametrize(
    "text",
    ['{"text": "a", "text": "b"}', '{"messages": [{"role": "user", "role": "assistant", "content": "a"}], "n": {}}'],
)
def test_a_key_that_comes_twice_is_malformed(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"the key '(text|role)' comes twice in one object; leave it once"):
        JsonlFile(tmp_path / "a.jsonl")[0]


@pytest.mark.parametrize("path", ["pipe", "/dev/zero", "/dev/null", "."])
def test_what_is_no_regular_file_is_refused(tmp_path, path):
    os.mkfifo(tmp_path / "pipe")
    words = "it is a directory; check the path" if path == "." else "it is no regular file but a pipe, sock"
    with pytest.raises(ValueError, match=f"cannot read records file .*: {words}"):
        JsonlFile(tmp_path / path)
