"""Records: what is accepted, what is refused and in which words, and random access."""

import json
import pickle

import pytest

from torchtitan_magi.data import Corpus, RecordFile

GOOD = b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n'

# line -> words of the message; every one must be refused when the file is opened
MALFORMED = {
    "truncated JSON": (b'{"messages": [{"role": "user", "content": "h', ["not JSON", "Unterminated string"]),
    "two objects on a line": (b'{"text": "a"}{"text": "b"}', ["not JSON", "Extra data", "one JSON object per line"]),
    "raw control character": (b'{"text": "a\x00b"}', ["not JSON", "Invalid control character"]),
    "invalid UTF-8": (b'{"text": "caf\xe9"}', ["byte 0xe9 at column 14", "save the file as UTF-8"]),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), ["byte 0xff at column 1", "UTF-8"]),
    "nesting too deep": (b"[" * 100_000, ["nested too deeply"]),
    "number too long": (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", ["too many digits", "remove the line"]),
    "half a surrogate pair": (b'{"text": "\\ud83d"}', ["\\ud83d", "surrogate"]),
    "an array": (b"[1, 2]", ["[1, 2] (list)", "write an object"]),
    "null": (b"null", ["the line is null"]),
    "neither key": (b'{"dialogue": []}', ["'dialogue'", '"messages" or "text"']),
    "both keys": (b'{"text": "a", "messages": []}', ['"messages" and "text"', "leave it one"]),
    "text a number": (b'{"text": 3}', ['"text" is 3 (int)', "string"]),
    "text empty": (b'{"text": ""}', ['"text" is empty', "remove the line"]),
    "messages a string": (b'{"messages": "hi"}', ["\"messages\" is 'hi' (str)", "list"]),
    "messages empty": (b'{"messages": []}', ['"messages" is empty', "remove the line"]),
    "message a string": (b'{"messages": ["hi"]}', ["messages[0] is 'hi' (str)"]),
    "no role": (b'{"messages": [{"content": "hi"}]}', ['messages[0] has no "role"', "'content'"]),
    "no content": (b'{"messages": [{"role": "user"}]}', ['messages[0] has no "content"', "add it"]),
    "role a number": (b'{"messages": [{"role": 1, "content": "hi"}]}', ["messages[0].role is 1 (int)"]),
    "unknown role": (b'{"messages": [{"role": "human", "content": "hi"}]}', ["'human'", "user, assistant"]),
    "content null": (b'{"messages": [{"role": "user", "content": null}]}', ["messages[0].content is null"]),
    "content a list": (
        b'{"messages": [{"role": "user", "content": [{"text": "a"}]}]}',
        ["content[0] is {", '"type": "text"'],
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_line_is_refused_with_file_and_line(tmp_path, name):
    line, words = MALFORMED[name]
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD + line + b"\n" + GOOD)
    with pytest.raises(ValueError) as error:
        Corpus(path).check()
    message = str(error.value)
    assert message.startswith(f"{path}:4: ")
    assert "\n" not in message
    assert "; " in message
    assert len(message) < len(str(path)) + 200
    for word in words:
        assert word in message


@pytest.mark.parametrize("content", [b"", b"\n", b" \n\t\r\n"])
def test_file_without_a_record_is_refused(tmp_path, content):
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"train.jsonl' holds no record; write one JSON object per line"):
        Corpus(path)


def test_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read records file .*nowhere.jsonl': No such file .*; check the path"):
        RecordFile(tmp_path / "nowhere.jsonl")
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
