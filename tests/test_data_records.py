"""Records: what is accepted, and random access. What is refused: test_data_bad_records."""

import json
import pickle

import pytest

from torchtitan_magi.data import RecordFile


def test_a_folder_is_no_records_file(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read records file .*Is a directory"):
        RecordFile(tmp_path)  # a folder is for a Corpus


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\n  \n"])
@pytest.mark.parametrize("last", ["", "end"])
def test_random_access_gives_the_lines(tmp_path, end, last):
    records = [{"text": f"line {i} ☃ \u2028 \x85 {'x' * (7 * i % 31)}"} for i in range(20)]
    path = tmp_path / "train.jsonl"
    lines = end.join(json.dumps(record, ensure_ascii=False) for record in records)
    path.write_bytes((lines + (end if last else "")).encode())
    file = RecordFile(path)
    assert len(file) == 20
    assert [file[i] for i in reversed(range(20))] == records[::-1]
    assert file.num_bytes == path.stat().st_size
    assert file.where(3) == f"{path}:{1 + 3 * end.count(chr(10))}"
    assert [pickle.loads(pickle.dumps(file))[i] for i in range(20)] == records


def test_byte_order_mark_and_extra_keys_are_let_through(tmp_path):
    path = tmp_path / "train.jsonl"
    messages = [{"role": "assistant", "content": "x", "name": "bot", "tool_calls": []}]
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps({"id": 7, "messages": messages}).encode() + b'\n{"text": "\\ud83d\\ude00 \\u0000"}'
    )
    file = RecordFile(path)
    assert file[0] == {"messages": [{"role": "assistant", "content": "x", "name": "bot"}]}
    assert file[1] == {"text": "\U0001f600 \x00"}
