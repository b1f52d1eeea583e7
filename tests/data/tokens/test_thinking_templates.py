"""Templates that think, as those of Qwen3.5, 3.6 and 3.8: what is learned of reasoning and calls, and what is said."""

import json
from datetime import date

import pytest
from support.chat import byte_level_tokenizer
from support.conversations import assistant, calling, thinking, tool, user
from support.jsonl import write_jsonl

from torchtitan_magi.data.inspection.page import html_page
from torchtitan_magi.data.inspection.summary import inspect_data
from torchtitan_magi.data.tokens.template import ChatTemplate

# Our own, with the tokens of Qwen3.5's: an open <think> prompts the model, the last question's turns keep reasoning.
SHAPE = """
{%- if tools %}<|im_start|>system
<tools>{% for one in tools %}
{{ one | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}
{%- set last = namespace(question=0) %}
{%- for m in messages if m.role == 'user' %}{% set last.question = m %}{% endfor %}
{%- set seen = namespace(last=false) %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- if KEEPS or seen.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{% set call = call.function %}
{{- '\n\n' if m.content else '' }}<tool_call>
<function={{ call.name }}>
{% for name, value in call.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- if m is sameas last.question %}{% set seen.last = true %}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}
{%- if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}
"""
QWEN3_5 = SHAPE.replace("KEEPS or ", "")
QWEN3_6 = SHAPE.replace("KEEPS", "preserve_thinking is true")
QWEN3_8 = SHAPE.replace("KEEPS", "preserve_thinking is not false")
TWO = [user("bbb"), thinking("rrr", "ccc"), user("ddd"), thinking("sss", "eee")]
PLAIN = [user("bbb"), assistant("ccc"), user("ddd"), assistant("eee")]
END = "<|im_end|>\n"


def rendered(source, messages, **kwargs):
    """What is learned, and the notes."""
    template = ChatTemplate(source.strip("\n"), {}, date.today(), "shape")
    template.check()
    found = template.render(messages, kwargs=kwargs)
    return [found.text[start:stop] for start, stop in found.spans], " ".join(found.notes)


@pytest.mark.parametrize(
    ("source", "kwargs"),
    [(QWEN3_6, {"preserve_thinking": True}), (QWEN3_8, {})],
    ids=["3.6, preserved", "3.8"],
)
def test_reasoning_of_all_turns_is_learned_behind_the_prompt_for_it(source, kwargs):
    learned, notes = rendered(source, TWO, **kwargs)
    assert learned == [f"rrr\n</think>\n\nccc{END}", f"sss\n</think>\n\neee{END}"]
    assert notes == ""


@pytest.mark.parametrize(
    ("source", "remedy"),
    [(QWEN3_5, "give them weight 0"), (QWEN3_6, 'weight 0, or set "preserve_thinking" in chat_template_kwargs')],
    ids=["3.5", "3.6"],
)
def test_turns_without_the_reasoning_that_the_model_will_be_asked_for_are_named(source, remedy):
    """They are learned as they are written: an answer right behind the role, where the model is never asked for one."""
    learned, notes = rendered(source, TWO)
    assert learned == [f"ccc{END}", f"sss\n</think>\n\neee{END}"]
    assert "turns are learned without '<think>', with which the chat template prompts the model; " in notes
    assert notes.endswith("the chat template drops reasoning")
    assert remedy in notes
    last_only = [TWO[0], TWO[1] | {"weight": 0}, *TWO[2:]]
    assert rendered(source, last_only) == (learned[1:], "the chat template drops reasoning")


def test_an_answer_without_reasoning_teaches_not_to_think_unless_thinking_is_off():
    learned, notes = rendered(QWEN3_8, PLAIN)
    assert learned == [f"\n</think>\n\n{answer}{END}" for answer in ("ccc", "eee")]
    assert 'the model learns not to think; give it "reasoning_content", or set "enable_thinking" to false' in notes
    assert rendered(QWEN3_8, PLAIN, enable_thinking=False) == ([f"ccc{END}", f"eee{END}"], "")
    with pytest.raises(ValueError, match="leave out its reasoning or enable_thinking of chat_template_kwargs"):
        rendered(QWEN3_8, TWO, enable_thinking=False)


def test_calls_and_what_tools_answer():
    """Arguments that are no strings are JSON; turns behind a tool's answer are of the same question."""
    first = thinking("rrr", "", tool_calls=calling({"at": [1, True], "text": "two\nlines"})["tool_calls"])
    learned, notes = rendered(QWEN3_5, [user("bbb"), first, tool("ttt"), thinking("sss", "eee")])
    call = "<tool_call>\n<function=add>\n<parameter=at>\n[1, true]\n</parameter>\n<parameter=text>\ntwo\nlines\n"
    assert learned == [
        f"rrr\n</think>\n\n{call}</parameter>\n</function>\n</tool_call>{END}",
        f"sss\n</think>\n\neee{END}",
    ]
    assert "ttt" not in "".join(learned)
    assert notes == 'the chat template does not use "name" of a message'


def test_the_inspector_says_so_of_the_records_that_have_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_MAGI_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    byte_level_tokenizer(special).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(QWEN3_6.strip("\n"))
    records = [{"messages": TWO}, {"messages": PLAIN}, {"messages": PLAIN}]
    records.append({"messages": TWO, "chat_template_kwargs": {"preserve_thinking": True}})
    found = inspect_data(write_jsonl(tmp_path / "data.jsonl", records), folder, read_all=True)
    said = {warning.text.partition(":")[0]: warning.text.rpartition(": in ")[2] for warning in found.warnings}
    assert {warning.level for warning in found.warnings} == {"look"}
    assert [text.split(" of ")[0] for text in said.values()] == ["3 records", "2 records", "1 record"]
    begin = iter(said)
    assert next(begin).startswith("turns are learned without '<think>'")
    assert next(begin).startswith("an answer has no reasoning behind a prompt for it, so the model learns not to think")
    assert next(begin) == "the chat template drops reasoning"
    assert "the model learns not to think" in html_page(found)


def test_a_table_may_give_a_template_a_date():
    assert rendered(QWEN3_5, PLAIN, since=date(2026, 1, 1))[0] == rendered(QWEN3_5, PLAIN)[0]
