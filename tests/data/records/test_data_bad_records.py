"""Every way in which data may be bad, and what becomes of it: an error with file and line, or left out and counted."""

import json

import pytest
from support.chat import chat
from support.conversations import assistant, user
from support.streams import assert_nothing_is_lost, in_a_process

from torchtitan_magi.data import Corpus, PackedPairDataset, PackedSFTDataset
from torchtitan_magi.data.records.record_file import MAX_RECORD_BYTES
from torchtitan_magi.data.tokens.chat import CHATML_TEMPLATE

SEQ_LEN = 48
ASK = user("hi")


def messages(*turns, **others):
    return json.dumps({"messages": turns} | others).encode()


def pair(**changes):
    return json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"} | changes).encode()


GOOD, GOOD_PAIR = messages(ASK, assistant("hello")), pair()
# line -> words of the message; told before the first step
MALFORMED = {
    "truncated JSON": (GOOD[:40], "not JSON"),
    "a cut string": (GOOD[:-5], r"not JSON \(Unterminated string"),
    "two objects on a line": (GOOD + GOOD, "not JSON .*Extra data.*one JSON object per line"),
    "an object over two lines": (b'{"text":\n"a"}', "not JSON"),
    "a trailing comma": (b'{"text": "a",}', "not JSON"),
    "single quotes": (b"{'text': 'a'}", "not JSON"),
    "no JSON at all": (b"Once upon a time", "not JSON"),
    "raw NUL bytes": (b'{"text": "a\x00b"}', "not JSON .*Invalid control character"),
    "only NUL bytes": (b"\x00" * 64, "not JSON"),
    "invalid UTF-8": (b'{"text": "caf\xe9"}', "byte 0xe9 at column 14 is not UTF-8; save the file as UTF-8"),
    "invalid UTF-8 behind a mark": (b'\xef\xbb\xbf{"text": "caf\xe9"}', "byte 0xe9 at column 14 is not UTF-8"),
    "cut UTF-8": (b'{"text": "caf\xc3', "is not UTF-8"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16-be"), "not JSON"),
    "UTF-16 with its mark": ('{"text": "a"}'.encode("utf-16"), "byte 0xff at column 1.*UTF-8"),
    "half a surrogate pair": (b'{"text": "\\ud83d"}', r"\\ud83d.* half of a surrogate pair"),
    "a list": (b"[1, 2]", r"the line is \[1, 2\] \(list\).*write an object"),
    "a number": (b"3", r"the line is 3 \(int\)"),
    "null": (b"null", "the line is null"),
    "an empty object": (b"{}", r"only the keys \[\]"),
    "unknown keys": (b'{"question": "a", "answer": "b"}', 'give it "messages" or "text" \\(or "conversations"'),
    "two forms": (b'{"text": "a", "messages": []}', '"messages" and "text"; leave it one of them'),
    "text not a string": (b'{"text": ["a"]}', '"text" is .*; write a string'),
    "text a number": (b'{"text": 3}', r'"text" is 3 \(int\).*string'),
    "empty text": (b'{"text": ""}', '"text" is empty; remove the line'),
    "no turns": (b'{"messages": []}', '"messages" is empty.*remove the line'),
    "turns a string": (b'{"messages": "hi"}', "\"messages\" is 'hi' \\(str\\).*list"),
    "turns not a list": (b'{"messages": {"role": "user"}}', '"messages" is .*; write a list'),
    "a turn not an object": (messages(ASK, "hello"), r"messages\[1\] is 'hello' \(str\)"),
    "an empty turn": (messages(ASK, assistant("")), r"messages\[1\].content is empty"),
    "content null": (messages(user(None)), r"messages\[0\].content is null; write a string"),
    "content a number": (messages(user(1)), r"messages\[0\].content is 1 \(int\)"),
    "an image": (
        messages(user([{"type": "image_url", "image_url": "x"}])),
        r"messages\[0\].content\[0\] is .*image_url.*only parts",
    ),
    "images": (messages(user("q"), assistant("a"), images=["x.png"]), '"images", and only text is trained here'),
    "a video": (messages(user("q"), assistant("a"), video={"path": "x"}), '"video", and only text is trained here'),
    "no role": (messages({"content": "hi"}), r"""messages\[0\] has no "role".*'content'"""),
    "no content": (messages({"role": "user"}), r'messages\[0\] has no "content".*add it'),
    "a part without a type": (messages(user([{"text": "a"}])), r'content\[0\] is \{.*"type": "text"'),
    "an unknown role": (messages({"role": "bot", "content": "hi"}), "'bot'; use one of system, user, assistant"),
    "a role not a string": (messages({"role": ["user"], "content": "hi"}), r"role is \['user'\] \(list\)"),
    "calls not a list": (messages({"role": "assistant", "tool_calls": "f"}), "tool_calls is 'f'"),
    "tools not JSON": (GOOD[:-1] + b', "tools": "f(x)"}', '"tools" is .* not JSON'),
    "tools not objects": (GOOD[:-1] + b', "tools": ["f"]}', '"tools" is .*; write a list of objects'),
    "ShareGPT, unknown speaker": (b'{"conversations": [{"from": "bing", "value": "x"}]}', "from is 'bing'; use one of"),
    "ShareGPT, no value": (b'{"conversations": [{"from": "human"}]}', r'conversations\[0\] has no "value"'),
    "no prompt": (b'{"completion": "a"}', 'has no "prompt", only the keys .*; add it'),
    "Alpaca, no instruction": (b'{"output": "a"}', 'has no "instruction"'),
    "Alpaca, empty output": (b'{"instruction": "a", "output": ""}', '"output" is empty'),
    "a number of 5,000 digits": (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "too many digits.*remove the line"),
    "nested 100,000 deep": (b"[" * 100_000, "nested too deeply"),
}
MALFORMED_PAIRS = {
    "no chosen": (b'{"prompt": "a", "rejected": "b"}', 'has no "chosen"'),
    "no rejected": (b'{"prompt": "a", "chosen": "b"}', 'has no "rejected"'),
    "empty rejected": (pair(rejected=""), '"rejected" is empty'),
    "chosen a number": (pair(chosen=3), r'"chosen" is 3 \(int\); write a string'),
    "no common prompt": (
        json.dumps({"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("b")]}).encode(),
        'begin with different messages; give the record a "prompt"',
    ),
    "nothing after the prompt": (pair(rejected=[user("b")]), '"rejected" has no assistant message'),
    "strings without a prompt": (b'{"chosen": "a", "rejected": "b"}', 'give the record a "prompt"'),
}
# line -> the count that it must show up in; no error in either mode
LEFT_OUT = {
    "no assistant": (messages(ASK), "unlabeled"),
    "an answer beyond the pack": (messages(user("hi " * 99), assistant("a")), "unlabeled"),
}
LEFT_OUT_PAIRS = {
    "chosen equals rejected": (pair(rejected="a"), "equal"),
    "equal after truncation": (pair(chosen="hi " * 50, rejected="hi " * 60), "equal"),
    "a prompt longer than the pack": (pair(prompt="hi " * 99), "long_prompts"),
}


def dataset(path, pairs=False, **options):
    tokenizer = chat(CHATML_TEMPLATE)
    if pairs:
        return PackedPairDataset(path, tokenizer.pair, SEQ_LEN, epochs=1, **options)
    return PackedSFTDataset(path, tokenizer, SEQ_LEN, epochs=1, **options)


def counts_of_epoch(path, pairs=False, bad_records="skip"):
    packs = dataset(path, pairs, bad_records=bad_records)
    list(packs)
    assert_nothing_is_lost(packs.counts)
    return packs.counts


@pytest.fixture
def path(tmp_path):
    return tmp_path / "train.jsonl"


@pytest.mark.parametrize("name", [*MALFORMED, *MALFORMED_PAIRS])
def test_malformed_records_stop_the_run_before_it_starts_or_are_left_out(name, path, caplog):
    pairs = name in MALFORMED_PAIRS
    (line, words), good = (MALFORMED | MALFORMED_PAIRS)[name], GOOD_PAIR if pairs else GOOD
    path.write_bytes(good + b"\n\n" + good + b"\n" + line + b"\n" + good + b"\n")
    with pytest.raises(ValueError, match=f"^{path}:4: .*{words}") as error:
        dataset(path, pairs)
    assert "\n" not in str(error.value)
    assert "; " in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 200
    counts, bad_lines = counts_of_epoch(path, pairs), line.count(b"\n") + 1
    assert (counts.documents, counts.skipped, counts.pieces) == (3 + bad_lines, bad_lines, 3)
    assert f"record left out: {path}:4: " in caplog.text


@pytest.mark.parametrize("bad_records", ["error", "skip"])
@pytest.mark.parametrize("name", [*LEFT_OUT, *LEFT_OUT_PAIRS])
def test_records_of_no_use_are_left_out_and_counted(name, bad_records, path):
    pairs = name in LEFT_OUT_PAIRS
    (line, count), good = (LEFT_OUT | LEFT_OUT_PAIRS)[name], GOOD_PAIR if pairs else GOOD
    path.write_bytes(b"\n".join([good, line, good]))
    counts = counts_of_epoch(path, pairs, bad_records)
    assert (counts.documents, getattr(counts, count), counts.pieces) == (3, 1, 2)


def test_all_of_them_in_one_file(path, caplog):
    """The counts add up, the log names the first ten, and the good records are trained on."""
    lines = [line for cases in (MALFORMED, LEFT_OUT) for line, _ in cases.values() if b"\n" not in line]
    path.write_bytes(b"\n".join(part for line in lines for part in (GOOD, line)))
    counts = counts_of_epoch(path)
    num_malformed = len(lines) - len(LEFT_OUT)
    assert num_malformed >= 30
    assert (counts.documents, counts.skipped, counts.unlabeled) == (2 * len(lines), num_malformed, len(LEFT_OUT))
    assert counts.pieces == len(lines)
    assert caplog.text.count("record left out: ") == 10
    assert f"left out: {len(LEFT_OUT)} without a label, {num_malformed} malformed" in str(counts)


def test_a_file_of_malformed_records_alone_is_an_error(path):
    path.write_bytes(b"{\n" * 40)
    with pytest.raises(ValueError, match=r"no record of .* has a token to train on \(40 documents.* 40 malformed\)"):
        list(dataset(path, bad_records="skip"))


@pytest.mark.parametrize("bad_records", ["error", "skip"])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.jsonl", b"", "holds no record; write one JSON object per line"),
        ("blank.jsonl", b" \n\t\r\n", "blank.jsonl' holds no record"),
        ("missing.jsonl", None, "cannot read records file .*missing.jsonl': No such file .*; check the path"),
        ("folder", "folder", r"holds no \*.jsonl, .* file; give one that does, or a pattern"),
    ],
)
def test_files_that_cannot_be_used_are_an_error_in_both_modes(name, content, words, bad_records, tmp_path):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        dataset(path, bad_records=bad_records)
    assert "\n" not in str(error.value)


def test_an_empty_file_among_others_is_let_through(tmp_path):
    for name, content in (("a", b""), ("b", GOOD), ("c", b"\n")):
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    assert len(Corpus(tmp_path)) == 1


def test_a_record_that_the_chat_template_refuses(path, caplog):
    """Only found when it is tokenized."""
    tools = GOOD[:-1] + b', "tools": [{"name": "f"}]}'
    path.write_bytes(b"\n".join([GOOD, tools, GOOD]))
    with pytest.raises(ValueError, match=r'train.jsonl:2: the chat template has no place for "tools"; give'):
        list(dataset(path))
    counts = counts_of_epoch(path)
    assert (counts.documents, counts.skipped, counts.pieces) == (3, 1, 2)
    assert "train.jsonl:2: the chat template has no place" in caplog.text


def test_unknown_policy_is_refused(tmp_path):
    with pytest.raises(ValueError, match="bad_records is 'drop'; use one of error, skip"):
        dataset(tmp_path, bad_records="drop")


HUGE = """
from support.chat import chat
from torchtitan_magi.data import PackedSFTDataset
from torchtitan_magi.data.tokens.chat import CHATML_TEMPLATE

def dataset(**options):
    return PackedSFTDataset(path, chat(CHATML_TEMPLATE), 48, epochs=1, **options)
try:
    dataset()
except ValueError as error:
    print(str(error).split(": ", 1)[1])
packs = dataset(bad_records="skip")
list(packs)
print(packs.counts.documents, packs.counts.skipped, packs.counts.pieces)
"""


def test_a_huge_line_is_malformed_and_never_in_memory(path):
    """50 MB without a line end, as of a file that is no JSONL."""
    with open(path, "wb") as file:
        file.write(GOOD + b'\n{"text": "')
        for _ in range(50):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n' + GOOD)
    printed, grown = in_a_process(HUGE, path)
    assert printed == ["the line has 50,000,013 bytes, more than 16,777,216; split the record", "3 1 2"]
    assert grown < 30e6
    assert MAX_RECORD_BYTES == 16_777_216
