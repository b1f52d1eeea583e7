"""`python -m torchtitan_magi.data`: what is learned is what is marked, figures are training's, mistakes are named."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat import CHATML_UNMARKED, LLAMA3_TEMPLATE, byte_level_tokenizer, chat, texts
from support.conversations import assistant, user
from support.jsonl import write_jsonl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from torchtitan_magi.data import ChatTokenizer, PackedPairDataset, PackedRolloutDataset, PackedSFTDataset
from torchtitan_magi.data import __main__ as command
from torchtitan_magi.data.inspection import judgement, summary
from torchtitan_magi.data.inspection.examine import parts_of
from torchtitan_magi.data.inspection.page import html_page
from torchtitan_magi.data.inspection.spelling import Cell, Part, Speller, shorten, visible
from torchtitan_magi.data.inspection.summary import inspect_data, joined
from torchtitan_magi.data.inspection.terminal import LEARNED, LEARNED_SPECIAL, Painter, report
from torchtitan_magi.data.packs import prefix_trees
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer
from torchtitan_magi.data.tokens.chat import CHATML_TEMPLATE, PLAIN_TEMPLATE

GOOD = [{"messages": [user("the cat"), assistant(f"the hat {i}"), user("and"), assistant("a dog")]} for i in range(3)]


def messages(*turns, **more):
    return {"messages": list(turns), **more}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_MAGI_CACHE", str(tmp_path / "cache"))


def write_folder(folder, template=CHATML_TEMPLATE, tokenizer=None, **config):
    """A tokenizer's folder."""
    folder.mkdir(exist_ok=True)
    (tokenizer or byte_level_tokenizer()).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def inspect(tmp_path):
    """Inspects records; the folder of the tokenizer is made of the arguments that are not options."""

    def inspect(records, template=CHATML_TEMPLATE, tokenizer=None, config=(), **options):
        path = write_jsonl(tmp_path / "data.jsonl", records)
        return inspect_data(path, write_folder(tmp_path / "tokenizer", template, tokenizer, **dict(config)), **options)

    return inspect


def warnings_of(inspection, *levels):
    return [w.text for w in inspection.warnings if not levels or w.level in levels]


# -------------------------------------------------------------------------------------------------------- what is shown


TEMPLATES = {"chatml": chat(CHATML_TEMPLATE), "unmarked": chat(CHATML_UNMARKED), "llama": chat(LLAMA3_TEMPLATE)}


def metaspace_tokenizer():
    vocabulary = {c: i for i, c in enumerate(["<unk>", *"▁abcdehnost"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")] if "▁a" in vocabulary else [], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


@settings(max_examples=40, deadline=None)
@given(st.lists(texts.filter(str.strip), min_size=2, max_size=5), st.sampled_from(["chatml", "unmarked", "llama"]))
def test_cells_spell_the_rendered_text_and_mark_what_is_learned(contents, name):
    tokenizer = TEMPLATES[name]
    record = messages(*((user, assistant)[i % 2](content) for i, content in enumerate(contents)))
    rendered, _ = tokenizer.render(record["messages"])
    document = tokenizer(record)
    (part,) = parts_of(record, document)
    cells = Speller(tokenizer).cells(part)
    assert "".join(cell.text for cell in cells) == rendered
    assert [i for cell in cells for i in cell.ids] == document.tokens.tolist()
    assert [cell.place for cell in cells] == np.cumsum([0, *(len(cell.ids) for cell in cells)])[:-1].tolist()
    learned = [i for cell in cells if cell.is_learned for i in cell.ids]
    assert learned == document.tokens[document.loss_mask].tolist()


def test_spaces_of_a_sentencepiece_like_tokenizer_are_shown():
    tokenizer = chat(PLAIN_TEMPLATE, metaspace_tokenizer(), None, None)
    ids = np.array(tokenizer.tokenizer.encode("the cat sat", add_special_tokens=False).ids)
    cells = Speller(tokenizer).cells(Part("", ids, np.zeros(len(ids), bool), ()))
    assert "".join(cell.text for cell in cells) == " the cat sat"


def test_what_the_template_writes_is_told_from_the_record():
    tokenizer = chat(CHATML_TEMPLATE)
    record = messages(user("a"), assistant("the hat"))  # "a" is in "<|im_start|>", too
    (part,) = parts_of(record, tokenizer(record))
    cells = Speller(tokenizer).cells(part)
    assert "".join(cell.text for cell in cells if not cell.is_added) == "athe hat"
    special = [cell.text for cell in cells if cell.is_special]
    assert special == ["<s>", "<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]


def test_long_runs_are_shortened_but_every_edge_of_what_is_learned_stays():
    flags = [0] * 50 + [1] * 3 + [0] * 9 + [1] * 40
    cells = [Cell(f"{i} ", i, (i,), bool(flag), False, False) for i, flag in enumerate(flags)]
    kept = shorten(cells, 12, 1000)
    places = [cell.place for cell in kept if isinstance(cell, Cell)]
    assert places == [*range(8), *range(46, 62), *range(62, 70), *range(98, 102)]
    assert [cell for cell in kept if isinstance(cell, str)] == [
        " … 38 tokens, 0 of them learned … ",
        " … 28 tokens, 28 of them learned … ",
    ]
    assert shorten(cells, 102, 102) == cells
    assert len(shorten(cells, 102, 30)) == 31


def test_control_characters_do_not_reach_the_terminal():
    assert visible("a\x1b[31m\u202e\x85\tb\n") == "a\\x1b[31m\\u202e\\x85\\tb\n"


def test_colours_and_marks_are_around_what_is_learned(inspect):
    inspection = inspect(GOOD[:1], num_shown=1)
    plain = report(inspection, Painter(has_color=False))
    assert "⟦the hat 0<|im_end|>⏎⟧\n" in plain
    assert "\x1b" not in plain
    colored = report(inspection, Painter(has_color=True))
    assert f"\x1b[{LEARNED}mthe hat 0\x1b[0m\x1b[{LEARNED_SPECIAL}m<|im_end|>\x1b[0m" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored).count("the hat 0") == 1
    bounded = report(inspection, Painter(has_color=False, boundaries=True))
    assert re.search(r"⟦│the│.*hat│.*│<\|im_end\|>│⏎⟧", bounded)


def test_a_pair_is_shown_as_prompt_chosen_and_rejected(inspect):
    record = {"prompt": "the cat", "chosen": "the hat", "rejected": "a dog"}
    inspection = inspect([record], kind="pairs", num_shown=1)
    lines = report(inspection, Painter(has_color=False)).splitlines()
    assert lines.index("prompt:") < lines.index("chosen:") < lines.index("rejected:")
    assert lines[lines.index("chosen:") + 1].startswith("⟦the hat<|im_end|>")
    assert lines[lines.index("rejected:") + 1].startswith("⟦a dog<|im_end|>")


# --------------------------------------------------------------------------------------------------------- the figures


def lognormal_records(rng, count):
    lengths = np.clip(rng.lognormal(3, 1, count), 1, 300).astype(int)
    answered = [messages(user("cat " * n), assistant("hat " * n)) for n in lengths.tolist()]
    return [messages(user("?")) if i % 7 == 0 else record for i, record in enumerate(answered)]


def test_figures_are_those_of_training(inspect, tmp_path):
    records = [*lognormal_records(np.random.default_rng(0), 80), {"messages": []}]
    tally = inspect(records, seq_len=200, read_all=True).tallies[0]
    tokenizer = load_chat_tokenizer(tmp_path / "tokenizer")
    packs = PackedSFTDataset(tmp_path / "data.jsonl", tokenizer, 200, epochs=1, bad_records="skip", shuffle=False)
    assert len(list(packs)) == packs.counts.packs
    counts = packs.counts
    assert tally.read == len(records)
    assert tally.left_out["refused"] == counts.skipped == 1
    assert sum(tally.left_out.values()) - 1 == counts.unlabeled > 5
    assert sum(tally.kept) == counts.tokens
    assert tally.truncated_tokens > counts.tokens / 20
    documents = [tokenizer(record) for record in records[:-1]]
    assert list(tally.tokens) == [len(document.tokens) for document in documents]
    assert tally.learned == sum(int(document.loss_mask.sum()) for document in documents)
    assert sum(count for _, count in tally.histogram()) == len(documents)
    assert all(sum(2**b <= n < 2 ** (b + 1) for n in tally.tokens) == count for b, count in tally.histogram())
    assert tally.fill(200) == pytest.approx(counts.fill, rel=1e-9)


def test_figures_of_pairs_are_those_of_training(inspect, tmp_path):
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 60, (60, 3))
    names = ("prompt", "chosen", "rejected")
    records = [{name: "the " * int(n) for name, n in zip(names, size, strict=True)} for size in sizes]
    records += [dict(zip(names, "abb", strict=True)), dict(zip(names, ("the " * 200, "b", "c"), strict=True))]
    tally = inspect(records, kind="pairs", seq_len=100, read_all=True).tallies[0]
    tokenizer = load_chat_tokenizer(tmp_path / "tokenizer")
    packs = PackedPairDataset(tmp_path / "data.jsonl", tokenizer.pair, 100, epochs=1, shuffle=False)
    counts = list(packs) and packs.counts
    assert tally.left_out["with chosen equal to rejected"] == counts.equal > 0
    assert tally.left_out["with too long a prompt"] == counts.long_prompts > 0
    assert (tally.truncated, tally.truncated_tokens) == (counts.truncated, counts.truncated_tokens)
    assert sum(tally.kept) == counts.tokens


def test_sources_are_told_apart_and_joined(tmp_path):
    first, second = (write_jsonl(tmp_path / f"{n}.jsonl", GOOD[:n]) for n in (1, 3))
    write_jsonl(tmp_path / "third.jsonl", [{"messages": "x"}])
    source = f"{first}, {second}=2, {tmp_path}/third.jsonl"
    inspection = inspect_data(source, write_folder(tmp_path / "tokenizer"), seq_len=64)
    assert [(t.path, t.records, t.read, len(t.tokens)) for t in inspection.tallies] == [
        (str(first), 1, 1, 1),
        (str(second), 3, 3, 3),
        (f"{tmp_path}/third.jsonl", 1, 1, 0),
    ]
    together = joined(inspection.tallies)
    assert (together.records, together.read, len(together.tokens), together.left_out["refused"]) == (5, 5, 4, 1)
    assert {where.rsplit(":")[0] for where, _ in inspection.shown} == {t.path for t in inspection.tallies}
    text = report(inspection, Painter(False))
    assert f"left out of {tmp_path}/third.jsonl: 1 refused" in text
    assert re.search(r"^together +5 +5 ", text, re.MULTILINE)


def test_a_sample_is_what_it_says(inspect, monkeypatch):
    monkeypatch.setattr(summary, "SAMPLE", 50)
    records = lognormal_records(np.random.default_rng(0), 120)
    inspection = inspect(records)
    assert "50 of 120 records read, drawn at random (--all reads all)" in inspection.setting[0]
    assert (inspection.tallies[0].records, inspection.tallies[0].read) == (120, 50)
    everything = inspect(records, read_all=True)
    assert "all 120 records read" in everything.setting[0]
    assert set(inspection.tallies[0].tokens) <= set(everything.tallies[0].tokens)
    monkeypatch.setattr(summary, "SAMPLE_TOKENS", 400)
    few = inspect(records).tallies[0]
    assert few.read < 50
    assert sum(few.tokens[:-1]) < 400 <= sum(few.tokens)


# ----------------------------------------------------------------------------------------------------- what looks wrong


def test_nothing_is_said_of_good_records(inspect):
    inspection = inspect(GOOD)
    assert warnings_of(inspection) == []
    assert report(inspection, Painter(False)).endswith("What looks wrong\nnothing\n")


TURNS = "{{ bos_token }}{% for message in messages %}%s{% endfor %}"
EVERYTHING = TURNS.replace(
    "%s", "{% generation %}{{ message.role + message.content + '<|im_end|>' }}{% endgeneration %}"
)
NOTHING = TURNS.replace("%s", "{{ message.role + message.content }}{% generation %}{% endgeneration %}")
NO_END = CHATML_TEMPLATE.replace("+ '<|im_end|>\n' }}{% endgeneration %}", "}}{% endgeneration %}<|im_end|>\n")
NO_BOS = CHATML_TEMPLATE.removeprefix("{{ bos_token }}")
NO_SYSTEM = CHATML_TEMPLATE.replace("in messages %}", "in messages if message.role != 'system' %}")
ANSWERS_ONLY = EVERYTHING.replace("in messages %}", "in messages if message.role == 'assistant' %}")
TWO_ENDS = CHATML_TEMPLATE.replace("<|im_end|>", "<|im_end|><|im_end|>")
BLANK_END = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
OTHER_TOKENS = CHATML_TEMPLATE.replace("<|im_start|>", "<|start_of_role|>")
LATE_REASONING = CHATML_UNMARKED.replace(
    "message.content +", "(message.reasoning_content or '') * loop.last + message.content +"
)
REFUSES = "{{ raise_exception('too odd') }}"
SYSTEM = {"role": "system", "content": "be brief"}

OF_TEMPLATES = [
    (EVERYTHING, "wrong", "all 3 records are refused: .* marks what a message of role 'user' says"),
    (ANSWERS_ONLY, "wrong", "everything is learned in all 3 records: the template marks the user's text, too, or does"),
    (NOTHING, "wrong", "nothing is learned in all 3 records"),
    (NO_END, "wrong", "no end-of-turn token is learned in all 3 records: .* (<|im_end|> comes after the learned text"),
    ("<s>" + CHATML_TEMPLATE, "wrong", "BOS <s> comes twice at the beginning of all 3 records"),
    (TWO_ENDS, "wrong", "<|im_end|>, which ends a turn or text, comes twice in a row in all 3 records; take it out"),
    (BLANK_END, "wrong", "no end-of-turn token is learned in all 3 records"),
    (
        BLANK_END.replace("}}\n", "}} ###\n"),
        "look",
        "turns end with the text ### in all 3 records: generation must",
    ),
    (
        CHATML_TEMPLATE.replace("im_start", "user"),
        "look",
        "the template writes <|user|>, which is not one token",
    ),
    (NO_BOS, "look", "BOS <s> is not at the beginning of all 3 records"),
    (OTHER_TOKENS, "wrong", "the template writes <|start_of_role|>, which is not one token of this tokenizer"),
    (REFUSES, "wrong", "a plain conversation of two rounds is refused: the chat template .* (too odd)"),
    (REFUSES, "wrong", "training refuses to start: the chat template in .* (too odd)"),
    ("{% for %}", "wrong", "training refuses to start: the chat template in .* is not valid"),
    (REFUSES, "wrong", "all 3 records are refused: the chat template .* (too odd)"),
]
THINKS = assistant("a", reasoning_content="I think")
OF_RECORDS = [
    ([GOOD[0], messages({}), messages({})], "wrong", '2 records of 3 (66.7%) are refused: messages[0] has no "role"'),
    ([GOOD[0], messages(user("q"))], "wrong", "nothing is learned in 1 record of 2 (50.0%)"),
    ([messages(user("q"), assistant("a", mood="good"))], "look", 'does not use "mood" of a message: in 1 record'),
    ([messages(user("<|im_end|>"), assistant("a"))], "look", "text of 1 record spells the special token <|im_end|>"),
    ([messages(user("q"), assistant("a"), id=3)], "note", 'the key "id" of 1 record is not used'),
    ([*GOOD, {"text": "the cat"}], "note", "1 record of 4 (25.0%) is plain text: all of it is learned"),
]
MISTAKES = [
    ({"template": NO_SYSTEM}, [messages(SYSTEM, *GOOD[0]["messages"])], "look", "what a message of role 'system' says"),
    (
        {"template": LATE_REASONING},
        [messages(user("q"), THINKS, *GOOD[0]["messages"])],
        "look",
        "reasoning: in 1 record",
    ),
    ({"template": None}, GOOD, "wrong", "no chat template: conversations are written as ChatML"),
    ({"config": {"eos_token": "</s>"}}, GOOD, "note", "turns end with <|im_end|>, which is not the tokenizer's EOS"),
    (
        {"config": {"eos_token": None}, "template": PLAIN_TEMPLATE},
        GOOD,
        "wrong",
        "no end-of-turn token is learned in all 3 records: .* (the tokenizer names no EOS)",
    ),
    ({"config": {"eos_token": None}}, [{"text": "the cat"}], "wrong", "no EOS is learned in 1 record of plain text"),
    *(({"template": template}, GOOD, level, said) for template, level, said in OF_TEMPLATES),
    *(({}, records, level, said) for records, level, said in OF_RECORDS),
]


@pytest.mark.parametrize(("options", "records", "level", "said"), MISTAKES)
def test_mistakes_are_named(inspect, options, records, level, said):
    inspection = inspect(records, **options)
    pattern = re.escape(said).replace(r"\.\*", ".*")
    assert [text for text in warnings_of(inspection, level) if re.search(pattern, text)], warnings_of(inspection)
    assert re.search(pattern, report(inspection, Painter(False)))


def test_what_a_run_would_refuse_is_said(inspect):
    refuses = 'a run refuses to start, unless magi.findings is "warn"'
    assert f"is of another model; take that of the model; {refuses}" in report(
        inspect(GOOD, OTHER_TOKENS), Painter(False)
    )
    twice = [{"text": "<s>the cat"}] * 2
    assert f"take it out of the text or the template; {refuses}" in html_page(inspect(twice)).replace("&quot;", '"')
    assert refuses not in report(inspect([*twice, *GOOD]), Painter(False))


def test_an_unknown_token_is_named(inspect):
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "[UNK]": 1, "Assistant": 2, ":": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    inspection = inspect(GOOD, PLAIN_TEMPLATE, tokenizer, config={"eos_token": None})
    assert [text for text in warnings_of(inspection, "wrong") if "unknown token [UNK] is in all 3 records" in text]


def test_reasoning_that_is_kept_is_no_finding(inspect):
    record = messages(user("q"), assistant("a", reasoning_content="I think"))
    assert warnings_of(inspect([record], LATE_REASONING)) == []


def test_of_many_different_mistakes_some_are_named(inspect):
    records = [messages(user("q"), assistant("a"), **{f"key {chr(97 + i)}": 1}) for i in range(20)]
    assert len(warnings_of(inspect(records))) == judgement.MAX_OF_A_KIND


def test_a_column_that_is_not_read_is_named_like_a_key(tmp_path):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist([record | {"system_prompt": "be brief"} for record in GOOD]), path)
    inspection = inspect_data(path, write_folder(tmp_path / "tokenizer"))
    assert warnings_of(inspection) == [f'the key "system_prompt" of all {len(GOOD)} records is not used']


# ------------------------------------------------------------------------------------------------------------- the page


class Page(HTMLParser):
    """Collects the text of each class of spans, and tags that were not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.titles = [], {}, []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        assert not {"src", "href", "onclick"} & attributes.keys()
        assert tag not in ("script", "link", "img", "iframe")
        if tag not in ("meta", "br", "input", "rect"):
            self.open.append((tag, attributes.get("class")))
        self.titles += [attributes["title"]] if "title" in attributes else []

    def handle_endtag(self, tag):
        if tag != "rect":
            assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data


def test_the_page_has_everything_and_fetches_nothing(inspect):
    record = messages(user("<b>bold</b> & \x1b"), assistant('a "dog"'))
    inspection = inspect([record, messages({})], num_shown=2, seq_len=64, config={"eos_token": "</s>"})
    text = html_page(inspection)
    page = Page()
    page.feed(text)
    assert page.open == []
    assert 'a "dog"' in page.texts["span", "l"]
    assert "<|im_end|>" in page.texts["span", "l s a"]
    assert "<|im_start|>" in page.texts["span", "s a"]
    assert "<b>bold</b> & \\x1b" in page.texts["span", ""]
    assert "token 0, id 0" in page.titles
    assert any(title.endswith(", learned") for title in page.titles)
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert 'messages[0] has no "role"' in page.texts["p", "wrong"]
    assert "which is not the tokenizer's EOS" in page.texts["li", "note"]


# -------------------------------------------------------------------------------------------------------- command line


def test_the_command_writes_report_and_page(tmp_path, capsys):
    path, folder = write_jsonl(tmp_path / "data.jsonl", GOOD), write_folder(tmp_path / "tokenizer")
    command.main([str(path), "--tokenizer", str(folder), "--seq-len", "1k", "--html", str(tmp_path / "page.html")])
    printed = capsys.readouterr().out
    assert f"{path}: all 3 records read" in printed
    assert "⟦the hat" in printed
    assert printed.endswith("What looks wrong\nnothing\n")
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(("term", "no_color", "colored"), [("xterm", "", 1), ("xterm", "1", 0), ("dumb", "", 0)])
def test_colours_are_for_terminals_that_want_them(monkeypatch, term, no_color, colored):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert command._has_color() == colored


def test_a_real_terminal_gets_colours(tmp_path):
    path, folder = write_jsonl(tmp_path / "data.jsonl", GOOD), write_folder(tmp_path / "tokenizer")
    controller, terminal = pty.openpty()
    call = [sys.executable, "-m", "torchtitan_magi.data", path, "--tokenizer", folder, "--records", "0"]
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"}
    process = subprocess.Popen(call, stdout=terminal, stderr=subprocess.PIPE, env=environment)
    os.close(terminal)
    printed = b""
    while True:
        try:
            chunk = os.read(controller, 4096)
        except OSError:  # the other end is closed
            break
        printed += chunk
    os.close(controller)
    assert (process.wait(), process.stderr.read()) == (0, b"")
    assert f"\x1b[{LEARNED}mFirst answer.\x1b[0m" in printed.decode()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("data.jsonl --tokenizer none", "none/tokenizer.json does not exist; give the directory of"),
        ("none.jsonl --tokenizer tokenizer", "cannot read records file 'none.jsonl': No such file or directory"),
        ("empty.jsonl --tokenizer tokenizer", "holds no record"),
        (
            "data.jsonl --tokenizer tokenizer --html none/page.html",
            "cannot write none/page.html; give a file",
        ),
        ("data.jsonl --tokenizer tokenizer --html tokenizer", "cannot write tokenizer; give a file in a folder"),
        ("data.jsonl --tokenizer tokenizer --seq-len 0", "--seq-len is 0; give at least 1"),
        ("data.jsonl --tokenizer tokenizer --seq-len 8x", "--seq-len is '8x'; write tokens as 300000, 512k or 1M"),
        ("data.jsonl --tokenizer tokenizer --records -1", "--records is -1; give at least 0"),
        ("data.jsonl --tokenizer tokenizer --colour", "unrecognized arguments: --colour"),
        ("data.jsonl", "the following arguments are required: --tokenizer"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    write_jsonl(tmp_path / "data.jsonl", GOOD)
    write_jsonl(tmp_path / "empty.jsonl", [])
    write_folder(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments.split())
    printed = capsys.readouterr()
    assert exit_.value.code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert said in printed.err


def test_a_page_that_cannot_be_written_is_one_line(tmp_path, capsys):
    path, folder = write_jsonl(tmp_path / "data.jsonl", GOOD), write_folder(tmp_path / "tokenizer")
    with pytest.raises(SystemExit) as exit_:
        command.main([str(path), "--tokenizer", str(folder), "--html", "/dev/full"])
    printed = capsys.readouterr().err
    assert (exit_.value.code, printed.count("\n")) == (2, 1)
    assert "cannot write /dev/full: No space left on device; make room there" in printed


def test_a_reader_that_has_seen_enough_is_no_error(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        command.print_text("seen enough")
        monkeypatch.undo()


def test_a_template_that_takes_its_process_down_is_one_line(inspect, monkeypatch):
    monkeypatch.setattr(ChatTokenizer, "documents", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ValueError, match=r"^a process that renders the chat template died; correct the template"):
        inspect(GOOD)


def test_of_a_template_that_training_refuses_a_few_records_are_enough(inspect):
    inspection = inspect(GOOD * 10, REFUSES)
    assert inspection.tallies[0].read == summary.FEW
    assert inspection.template == []
    assert "refused, see above" in html_page(inspection)


# --------------------------------------------------------------------------------------------------- common beginnings


def test_common_beginnings_are_shown_as_they_are_computed(inspect, tmp_path):
    begin = [{"role": "system", "content": "the cat " * 60}]
    asked = [*begin, user("a dog " * 60)]
    records = [messages(*asked, assistant(f"answer {number}")) for number in range(3)]
    records += [messages(*begin, user("and?"), assistant("the end")), messages(user("the hat"), assistant("a dog"))]
    inspection = inspect(records, seq_len=2048, share_prefixes=True)
    assert inspection.sharing.counts.documents == 5
    root, question, *rest = inspection.sharing.tree
    assert (root.depth, root.position, root.records, root.where) == (0, 0, 4, "")
    assert (question.depth, question.position, question.records) == (1, root.tokens, 3)
    assert root.text.startswith("<s><|im_start|>system⏎the cat the cat")
    assert question.text.startswith("a dog a dog")
    answers = [node for node in rest if node.depth == 2]
    assert sorted(node.where for node in answers) == [f"{tmp_path}/data.jsonl:{line}" for line in (1, 2, 3)]
    assert {node.position for node in answers} == {question.position + question.tokens}
    (other,) = [node for node in rest if node.depth == 1]
    assert (other.where, other.position) == (f"{tmp_path}/data.jsonl:4", root.tokens)
    saved = inspection.sharing.counts
    assert saved.shared_tokens == 3 * root.tokens + 2 * question.tokens
    said = report(inspection, Painter(has_color=False))
    assert f"Common beginnings\nthe first 5 records take {saved.tokens:,} tokens in place of" in said
    assert f"\n        0  {root.tokens:,} tokens, 4 records: <s>" in said
    assert f"{root.tokens:>9,}  └ {question.tokens:,} tokens, 3 records: " in said
    assert "<h2>Common beginnings</h2><p>the first 5 records take" in html_page(inspection)


def test_nothing_in_common_is_said(inspect):
    inspection = inspect(GOOD, seq_len=256, share_prefixes=True)
    assert "\nnone: no two of the first 3 records begin with the same tokens\n" in report(inspection, Painter(False))
    assert inspect(GOOD, seq_len=256).sharing is None


@pytest.mark.parametrize("given", [[], ["--seq-len", "64", "--dataset", "dpo"]])
def test_common_beginnings_need_a_length_and_documents(capsys, given):
    with pytest.raises(SystemExit):
        command.main(["data.jsonl", "--tokenizer", "folder", "--share-prefixes", *given])
    assert (
        "--share-prefixes shows how documents are packed; give --seq-len, and --dataset sft" in capsys.readouterr().err
    )


def test_answers_are_shown_behind_their_prompt(inspect, tmp_path):
    answers = ["the cat", {"completion": "a dog", "weight": 0.5}]
    inspection = inspect([{"prompt": "the hat", "completions": answers, "mood": 1}] * 2, seq_len=64, num_shown=1)
    ((_, seen),) = inspection.shown
    (first, cells), (second, more) = seen.cells
    assert (first, second) == ("answer 1", "answer 2")
    assert "".join(cell.text for cell in cells).startswith("<s><|im_start|>user\nthe hat")
    assert "".join(cell.text for cell in more if cell.is_learned) == "a dog<|im_end|>\n"
    assert seen.tokens == len(cells) + len(more)
    assert seen.length == seen.kept == seen.tokens - 1
    assert [text for text in warnings_of(inspection) if "mood" in text]
    assert not [text for text in warnings_of(inspection) if "completions" in text]


def scored(*answers):
    return [{"completion": answer, "score": score} for answer, score in answers]


def test_answers_in_pairs_are_shown_with_what_each_is_preferred_to(inspect):
    answers = scored(("a dog", 1), ("the cat", 3), ("the end", 2))
    inspection = inspect(
        [{"prompt": "the hat", "completions": answers, "mood": 1}], kind="pairs", seq_len=64, num_shown=1
    )
    ((_, seen),) = inspection.shown
    assert [name for name, _ in seen.cells] == ["prompt", "answer 1", "answer 2, better than 1, 3", "answer 3"]
    (_, prompt), *parts = seen.cells
    texts = ["".join(cell.text for cell in cells) for _, cells in parts]
    assert texts == [f"{text}<|im_end|>\n" for text in ("a dog", "the cat", "the end")]
    assert all(cell.is_learned for _, cells in parts for cell in cells)
    shared, (dog, cat, end) = sum(len(cell.ids) for cell in prompt) - 1, (len(cells) for _, cells in parts)
    assert (seen.length, seen.kept, seen.pairs) == (shared + dog + cat + end, shared + dog + cat + end, 2)
    assert seen.alone == 2 * shared + dog + 2 * cat + end
    text = report(inspection, Painter(has_color=False))
    said = f"2 pairs in {seen.kept} positions of packs, in place of {seen.alone} if each were a record"
    assert text.count(said) == 2  # of the record and of its source
    assert [line for line in warnings_of(inspection) if "mood" in line]
    assert not [line for line in warnings_of(inspection) if "completions" in line]
    record = {"prompt": "the hat", "completions": ["a", "b"], "pairs": [[1, 0]]}
    inspection = inspect([record], kind="pairs", num_shown=1)
    assert [name for name, _ in inspection.shown[0][1].cells] == ["prompt", "rejected", "chosen"]
    assert "in place of" not in report(inspection, Painter(has_color=False))
    assert not [line for line in warnings_of(inspection) if "not used" in line]


def test_figures_of_answers_in_pairs_are_those_of_training(inspect, tmp_path):
    rng = np.random.default_rng(2)
    records = []
    for size in rng.integers(1, 60, 60).tolist():
        answers = scored(*(("the " * int(n), int(s)) for n, s in rng.integers(1, 40, (rng.integers(2, 7), 2))))
        answers[0]["score"] = -1  # not all are alike
        records.append({"prompt": "the " * size, "completions": answers})
    records += [
        {"prompt": "a", "completions": ["b", "b", "c"], "pairs": pairs} for pairs in ([[0, 1]], [[0, 1], [0, 2]])
    ]
    records.append({"prompt": "the " * 200, "completions": ["b", "c", "d"], "pairs": [[0, 1], [0, 2]]})
    tally = inspect(records, kind="pairs", seq_len=100, read_all=True).tallies[0]
    tokenizer = load_chat_tokenizer(tmp_path / "tokenizer")
    packs = PackedPairDataset(tmp_path / "data.jsonl", tokenizer.pair, 100, epochs=1, shuffle=False)
    items = list(packs)
    counts = packs.counts
    assert 1 <= tally.left_out["with chosen equal to rejected"] < counts.equal
    assert (tally.left_out["with too long a prompt"], counts.long_prompts) == (1, 2)
    assert tally.truncated_tokens == counts.truncated_tokens
    assert sum(tally.kept) == counts.tokens
    assert len(tally.kept) == counts.pieces > len(records)
    assert tally.pairs == sum(len(inputs["pairs"]) for inputs, _ in items)
    assert tally.alone > 1.1 * counts.tokens


def test_rollouts_as_text_and_as_token_ids(inspect):
    answers = [{"completion": text, "reward": number} for number, text in enumerate(("cat", "hat"))]
    ids = {"completion_ids": [7, 8, 9], "completion_mask": [1, 0, 1], "advantage": 0.5}
    records = [{"prompt": "the", "completions": answers, "mood": 1}, {"prompt_ids": [5, 6], **ids}]
    inspection = inspect(records, kind="rollouts", seq_len=64, num_shown=2, read_all=True)
    text, tokens = (seen for _, seen in inspection.shown)
    assert [name for name, _ in text.cells] == ["answer 1", "answer 2"]
    assert (tokens.tokens, tokens.learned) == (5, 2)
    assert any('"mood"' in warning.text for warning in inspection.warnings)
    assert not any('"reward"' in warning.text or '"advantage"' in warning.text for warning in inspection.warnings)


def test_answers_that_begin_alike_or_are_equal_are_each_learned(inspect):
    ids = [{"completion_ids": ids, "advantage": 1} for ids in ([7, 8], [7, 8], [7], [7, 8, 9])]
    ids[-1]["completion_mask"] = [1, 1, 0]
    answers = [{"completion": text, "advantage": 1} for text in ("the cat", "the", "the cat", "the cat ate")]
    records = [{"prompt": "the hat", "completions": answers}, {"prompt_ids": [5, 6], "completions": ids}]
    inspection = inspect(records, kind="rollouts", seq_len=64, num_shown=2)
    assert not [text for text in warnings_of(inspection) if "is learned" in text]
    assert "".join(cell.text for cell in inspection.shown[0][1].cells[2][1]) == ""  # all of it stands in the first
    record = {"prompt": "the hat", "completions": ["the cat", "the cat"]}
    assert not [text for text in warnings_of(inspect([record])) if "is learned" in text]


@pytest.mark.parametrize(("prompt", "answers"), [([5], [[6], [6]]), ([5, 6], [[6] * 40] * 2), ([5, 7], [[6], [7, 8]])])
def test_positions_of_answers_are_those_of_their_packs(prompt, answers, inspect, tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_trees, "SHORTEST", 1)
    ids = [{"completion_ids": own, "advantage": 1} for own in answers]
    (tally,) = inspect([{"prompt_ids": prompt, "completions": ids}], kind="rollouts", seq_len=8).tallies
    chat = load_chat_tokenizer(tmp_path / "tokenizer")
    dataset = PackedRolloutDataset(tmp_path / "data.jsonl", chat, 8, epochs=1, on_policy=True)
    list(dataset)
    assert sum(tally.kept) == dataset.counts.tokens > 0
    assert tally.fill(8) == dataset.counts.fill


def test_sampled_tokens_may_end_anywhere_and_be_masked(inspect):
    answer = {"completion_ids": [7, 8], "advantage": 1}
    masked = answer | {"completion_mask": [0, 0]}
    records = [{"prompt_ids": [5], "completions": [answer, masked]}] * 3
    assert not [warning for warning in inspect(records, kind="rollouts").warnings if warning.level == "wrong"]
    none = warnings_of(inspect([{"prompt_ids": [5], "completions": [masked, masked]}], kind="rollouts"))
    assert [text for text in none if text.startswith("nothing is learned in 1 record")]


def test_token_ids_that_the_tokenizer_lacks(inspect, tmp_path):
    inspect([{"text": "a"}])
    tokens = 1 + max(load_chat_tokenizer(tmp_path / "tokenizer").tokenizer.get_vocab().values())
    records = [{"prompt_ids": [5], "completion_ids": [tokens - 1, own], "advantage": 1} for own in (7, tokens)]
    (said,) = [text for text in warnings_of(inspect(records, kind="rollouts")) if "token id" in text]
    assert said.startswith(f"the token id {tokens} of 1 record of 2 (50.0%) is none of the tokenizer: a run ends there")


def test_answers_of_weight_0_do_not_count(inspect):
    answers = ["the cat", {"completion": "a dog", "weight": 0}]
    records = [{"prompt": "the hat", "completions": some} for some in (answers, answers[:1], answers[1:])]
    inspection = inspect(records, seq_len=64, num_shown=3, read_all=True)
    one, same, none = (seen for _, seen in sorted(inspection.shown, key=lambda shown: shown[1].index))
    assert not any(cell.is_learned for cell in one.cells[1][1])
    assert (one.learned, one.kept) == (same.learned, same.kept)
    assert (none.learned, none.left_out) == (0, "without a label")
    assert [text for text in warnings_of(inspection) if text.startswith("nothing is learned in 1 record of 3")]


@pytest.mark.parametrize(
    ("kind", "record", "unused"),
    [
        (
            "documents",
            {"completions": [{"completion": "a", "wieght": 0}, "b"]},
            ['"completions[].wieght", which may be meant for "weight"'],
        ),
        ("documents", {"completions": [{"completion": "a", "weight": 1, "score": 1}]}, ["completions[].score"]),
        ("documents", {"completions": [{"role": "assistant", "content": "a", "weight": 1}]}, []),
        ("pairs", {"completions": [{"completion": "a", "score": 1, "weight": 2}, *scored(("b", 0))]}, ["weight"]),
        ("rollouts", {"completions": [{"completion": "a", "advantage": 1, "weight": 2}]}, ["completions[].weight"]),
        ("rollouts", {"completions": [{"completion": "a", "advantage": 1}], "logprobs": [-1]}, ["logprobs"]),
        ("rollouts", {"completion": "a", "advantage": 1, "reason": "x"}, ["reason"]),
        ("rollouts", {"completion": "a", "advantage": 1, "completion_masks": [1]}, ['meant for "completion_mask"']),
        ("documents", {"completion": "a", "tool": []}, ['"tool", which may be meant for "tools"']),
    ],
)
def test_keys_of_answers_that_nothing_reads(inspect, kind, record, unused):
    said = [text for text in warnings_of(inspect([{"prompt": "the"} | record], kind=kind)) if "is not used" in text]
    assert len(said) == len(unused)
    assert all(key in text for key, text in zip(unused, said, strict=True))
