"""What the inspector calls wrong is said before the first step of training; what is surely wrong ends it there."""

import json
import logging
import os
import re
import signal

import pytest
from support.chat import TOKENIZER, byte_level_tokenizer
from support.conversations import assistant, user
from support.errors import assert_one_line, error_of, one_line
from support.jsonl import write_jsonl
from support.runs import corpus, train
from tokenizers import Tokenizer, models, pre_tokenizers

from torchtitan_magi.data import ChatTokenizer
from torchtitan_magi.data.inspection import judgement
from torchtitan_magi.data.inspection.examine import PARSERS
from torchtitan_magi.data.records.corpus import Corpus
from torchtitan_magi.data.tokens.chat import CHATML_TEMPLATE, PLAIN_TEMPLATE
from torchtitan_magi.training.batches.findings import check_findings

BLANK_END = """\
{%- for turn in messages -%}
{{ turn.role }}: {{ turn.content }}

{% endfor -%}
{%- if add_generation_prompt -%}assistant: {% endif -%}
"""
STOPS_AT_TEXT = BLANK_END.replace("content }}", "content }} ###")
OUTSIDE = CHATML_TEMPLATE.replace("+ '<|im_end|>\n' }}{% endgeneration %}", "+ '\n' }}{% endgeneration %}<|im_end|>\n")
EVERYTHING = (
    "{% for m in messages if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% endfor %}"
)
ANSWERS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.role + m.content }}{% endif %}{% endfor %}"
)
ROLES = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
OF_ANOTHER = CHATML_TEMPLATE.replace("<|im_start|>", "<|start_of_role|>")
PLAIN_TOKENS = byte_level_tokenizer(["<s>", "</s>"])
RECORDS = [{"messages": [user(f"the cat {i}"), assistant(f"the hat {i}")]} for i in range(5)]


def texts(form, count=5):
    return [{"text": form.format(f"the cat {i}")} for i in range(count)]


TEXTS = texts("{}")


@pytest.fixture
def look(tmp_path, caplog):
    """Checks records with a template; returns what is logged as (level, text)."""
    caplog.set_level(logging.INFO)
    assets = tmp_path / "assets"
    assets.mkdir()

    def look(
        records, template=CHATML_TEMPLATE, tokenizer=TOKENIZER, goes_on=False, eos=1, kind="documents", name="data"
    ):
        (assets / "chat_template.jinja").write_text(template)
        path = write_jsonl(tmp_path / f"{name}.jsonl", records)
        source = Corpus(path, PARSERS[kind])
        caplog.clear()
        tokenizer = ChatTokenizer(tokenizer, 0, eos, template, name=f"the chat template in {assets}")
        check_findings(source, tokenizer, kind, str(assets), goes_on)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    return look


SURE = {
    "an end of white space only": (
        {"template": BLANK_END},
        "the chat template in .*assets: no end-of-turn token is learned in all 5 records: .*; let the template",
    ),
    "an end that is not learned": (
        {"template": OUTSIDE},
        r"no end-of-turn token is learned .*\(<\|im_end\|> comes after the learned text, but is not learned\)",
    ),
    "another model's template": (
        {"template": OF_ANOTHER},
        r"the chat template in .*: the template writes <\|start_of_role\|>, which is not one token .*; take that of",
    ),
    "another model's end": (
        {"tokenizer": PLAIN_TOKENS},
        r"the template writes <\|im_start\|>, which is not one token of this tokenizer",
    ),
    "two BOS by the template": (
        {"template": "<s>" + CHATML_TEMPLATE},
        "the chat template in .*: BOS <s> comes twice at the beginning of all 5 records; take it out of",
    ),
    "two BOS in texts": (
        {"records": texts("<s>{}")},
        r"^5 of the 5 records of '.*data.jsonl': BOS <s> comes twice .* all 5 records; .* \(e.g. .*data.jsonl:1\)",
    ),
    "two EOS in texts": (
        {"records": texts("{}</s>")},
        "</s>, which ends a turn or text, comes twice in a row in all 5",
    ),
    "two ends of a turn": (
        {"template": CHATML_TEMPLATE.replace("<|im_end|>\n", "<|im_end|><|im_end|>\n")},
        r"<\|im_end\|>, which ends a turn or text, comes twice in a row in all 5 records; take it out of the text or",
    ),
    "everything learned": ({"template": EVERYTHING}, "everything is learned in all 5 records: the template marks"),
    "nothing learned": ({"records": [{"messages": [user("the")]}] * 5}, "nothing is learned in all 5 records"),
    "pairs": (
        {"records": [{"prompt": "the", "chosen": "cat", "rejected": "hat"}], "kind": "pairs", "template": BLANK_END},
        "no end-of-turn token is learned in 1 record",
    ),
}


@pytest.mark.parametrize("name", SURE)
def test_what_is_surely_wrong_is_one_line_and_goes_on_by_the_option(name, look):
    options, said = SURE[name]
    options = {"records": RECORDS} | options
    with one_line(said) as error:
        look(**options)
    assert str(error.value).endswith('; or set magi.findings to "warn" to train all the same')
    logged = [text for level, text in look(goes_on=True, **options) if level == "WARNING"]
    assert [text for text in logged if re.search(said, text)]


UNKNOWN = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "[UNK]": 2, ":": 3, "Assistant": 4}, unk_token="[UNK]"))
UNKNOWN.add_special_tokens(["<s>", "</s>"])
UNKNOWN.pre_tokenizer = pre_tokenizers.Whitespace()
MEANT = {
    "good records": ({}, []),
    "good texts": ({"records": TEXTS}, []),
    "texts and records": ({"records": [*TEXTS, *RECORDS]}, []),
    "texts with EOS inside": ({"records": texts("{}</s></s>the hat")}, ["INFO text of .*spells the special .* </s>"]),
    "texts of a tokenizer without EOS": ({"records": TEXTS, "eos": None}, ["WARNING no EOS is learned in all 5 rec"]),
    "texts with a template that is of no use": ({"records": TEXTS, "template": OF_ANOTHER}, []),
    "answers alone": ({"records": [{"messages": [assistant("the cat")]}], "template": "<s>" + ANSWERS}, []),
    "an end of text": ({"template": STOPS_AT_TEXT}, ["INFO BOS <s> is no", "INFO turns end with the text ###"]),
    "roles that are plain text": (
        {"template": "<s>" + ROLES, "tokenizer": PLAIN_TOKENS},
        [r"INFO the template writes <\|(user|assistant)\|>"] * 2,
    ),
    "one of five": (
        {"records": [*RECORDS[:4], *texts("<s>{}", 1)]},
        [r"WARNING BOS <s> comes twice at the beginning of 1 record of 5 \(20.0%\); take", "INFO .*spells the special"],
    ),
    "unknown tokens": (
        {"template": PLAIN_TEMPLATE, "tokenizer": UNKNOWN},
        [r"WARNING the unknown token \[UNK\] is in"],
    ),
    "malformed records": ({"records": [{"txt": ""}, *RECORDS]}, []),
    "malformed records only": ({"records": [{"txt": ""}]}, []),
}


@pytest.mark.parametrize("name", MEANT)
def test_what_may_be_meant_is_logged(name, look):
    options, said = MEANT[name]
    logged = look(**{"records": RECORDS} | options)
    assert len(logged) == len(said), logged
    for (level, text), pattern in zip(logged, said, strict=True):
        assert re.search(pattern.replace(" ", ".*: (?:.*)?", 1), f"{level} {text}"), text


def test_a_folder_without_template_is_named(look, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judgement, "load_chat_template", lambda folder: None)
        ((level, text),) = look(RECORDS)
    assert level == "WARNING"
    assert (
        f"the chat template in {tmp_path}/assets: the folder has no chat template: conversations are written as" in text
    )


def test_of_much_data_a_few_records_of_some_sources_are_looked_at(tmp_path):
    names = [f"{tmp_path}/{number}.jsonl" for number in range(6)]
    for name in names:
        with open(name, "w") as file:
            file.writelines(json.dumps({"text": "the cat " * 2000}) + "\n" for _ in range(100))
    drawn = judgement._drawn(Corpus(", ".join(names), PARSERS["documents"]))
    assert len({index // 100 for index in drawn}) == judgement.BLOCKS
    characters = sum(len(record["text"]) for record in drawn.values())
    assert judgement.CHARACTERS // 2 < characters <= judgement.CHARACTERS + judgement.BLOCKS * 16_000
    assert len(judgement._drawn(Corpus(_many(tmp_path), PARSERS["documents"]))) == judgement.RECORDS


def _many(folder):
    (folder / "many.jsonl").write_text(json.dumps({"text": "a"}) + "\n" + (json.dumps({"text": "b"}) + "\n") * 999)
    return folder / "many.jsonl"


def test_a_process_that_dies_does_not_end_the_run(look, monkeypatch):
    monkeypatch.setattr(ChatTokenizer, "documents", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    ((level, text),) = look(RECORDS)
    assert level == "WARNING"
    assert re.search(r"The first look at '.*data.jsonl' ended early: its process was ended by SIGKILL", text)


def test_a_run_ends_before_its_first_step_or_goes_on(tmp_path):
    folder = tmp_path / "assets"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((corpus() / "tokenizer" / name).read_bytes())
    (folder / "chat_template.jinja").write_text(BLANK_END)
    arguments = ["--model.hf_assets_path", str(folder), "--training.steps", "1"]
    error = error_of(arguments, 2)
    assert_one_line(error, [])
    assert str(error).startswith(f"the chat template in {folder}: no end-of-turn token is learned in ")
    run = train(1, [*arguments, "--magi.findings", "warn"])
    assert len(run.losses) == 1
    assert "no end-of-turn token is learned" in run.output
