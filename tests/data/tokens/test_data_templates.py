"""Chat templates of published models: what is learned, against TRL's own marks, and which are refused."""

import json
import multiprocessing
from datetime import date
from pathlib import Path

import pytest
from support.chat import byte_level_tokenizer
from support.conversations import CONVERSATIONS, REASONING, TOOLS, Q, assistant, calling, system, thinking, tool, user
from support.jsonl import write_jsonl
from transformers import PreTrainedTokenizerFast

from torchtitan_magi.data import ChatTokenizer, PackedSFTDataset, guard
from torchtitan_magi.data.tokens import chat as chat_module
from torchtitan_magi.data.tokens.template import _GENERATION_TAG, ChatTemplate

trl = pytest.importorskip("trl", reason="TRL's own templates are taken from it")
TOKENIZER = byte_level_tokenizer()
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TRANSFORMERS = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, **TOKENS)
SHIPPED = {
    path.stem: path.read_text() for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
}
MARKED = [name for name, source in SHIPPED.items() if _GENERATION_TAG.search(source)]
UNMARKED = [name for name in SHIPPED if name not in MARKED]
MULTIMODAL = {"llava_next", "idefics3", "smolvlm"}  # their content must be a list of parts
REFUSED = {"glm4moe"} | MULTIMODAL | {f"{name}_training" for name in MULTIMODAL}


def template(name):
    return ChatTemplate(SHIPPED[name], TOKENS, date.today(), name)


def learned(rendering):
    return [rendering.text[start:stop] for start, stop in rendering.spans]


def masks_of_transformers(source, messages):
    """Token ids and what of them is learned; None if the template refuses the messages."""
    try:
        encoding = TRANSFORMERS.apply_chat_template(
            messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception:  # a template is a program
        return None
    return encoding["input_ids"], [bool(bit) for bit in encoding["assistant_masks"]]


def differs(name, conversation):
    """Why a mask is not that of transformers, or None."""
    if "tool_calls" not in SHIPPED[name] and any("tool_calls" in m for m in CONVERSATIONS[conversation]):
        return "the template would drop the calls, so the record is refused"
    if name == "deepseek_r1_distill_training" and conversation in TOOLS and conversation != "a call with words":
        return "the template writes calls only beside content that is null, which it is given here"
    if (name, conversation) == ("diffusion_gemma_training", "other scripts"):
        return "two marks touch within a letter of two tokens: transformers learns the first token of it only"
    return None


@pytest.mark.parametrize("name", [name for name in MARKED if not name.startswith("llava_next")])
def test_masks_are_those_of_transformers(name):
    """On TRL's training templates and those that their makers marked."""
    chat, compared = ChatTokenizer(TOKENIZER, 0, 1, SHIPPED[name]), 0
    for conversation, messages in CONVERSATIONS.items():
        try:
            document = chat({"messages": messages})
            ours = document.tokens.tolist(), document.loss_mask.tolist()
        except ValueError:
            ours = None
        theirs = masks_of_transformers(SHIPPED[name], messages)
        if differs(name, conversation):
            assert ours != theirs or ours is None, conversation
        else:
            assert ours == theirs, conversation
            compared += ours is not None
    assert compared >= 20


@pytest.mark.parametrize("name", [name for name in UNMARKED if f"{name}_training" in SHIPPED and name not in REFUSED])
def test_without_marks_the_same_is_learned_but_for_what_the_prompt_writes(name):
    """Against TRL's marked variant, where both write the same text."""
    plain, marked, compared = template(name), template(f"{name}_training"), 0
    for conversation, messages in CONVERSATIONS.items():
        try:
            ours, theirs = plain.render(messages), marked.render(messages)
        except ValueError:
            continue
        if ours.text != theirs.text:
            continue
        compared += 1
        assert len(ours.spans) == len(theirs.spans), conversation
        prompts = "".join(frame.prompt for frame in plain._frames.values())
        for (start, stop), (their_start, their_stop) in zip(ours.spans, theirs.spans, strict=True):
            assert stop == their_stop, conversation
            assert their_start <= start, conversation
            assert ours.text[their_start:start].strip() in prompts, conversation
    assert compared or name.startswith("qwen3") or name == "deepseek_r1_distill"


# every word is in one message
WORDS = {
    "turns": [system("aaa"), user("bbb"), assistant("ccc"), user("ddd"), assistant("eee")],
    "reasoning": [user("bbb"), thinking("rrr", "ccc"), user("ddd"), thinking("sss", "eee")],
    "tools": [user("bbb"), calling({"x": 7}), tool("ttt"), assistant("ccc"), user("ddd"), assistant("eee")],
    "words and tools": [user("bbb"), calling({"x": 7}, content="ccc"), tool("ttt"), assistant("eee")],
}


@pytest.mark.parametrize("name", [name for name in SHIPPED if name not in REFUSED])
def test_what_the_assistant_says_is_learned_and_nothing_else(name):
    shipped, rendered = template(name), []
    shipped.check()
    for kind, messages in WORDS.items():
        try:
            rendering = shipped.render(messages)
        except ValueError:
            continue
        rendered.append(kind)
        text, notes = "".join(learned(rendering)), " ".join(rendering.notes)
        for message in messages:
            if message["role"] != "assistant":
                assert message["content"] not in text, kind
                continue
            assert message["content"] in text or "drops or changes" in notes, kind
            assert message.get("reasoning_content", "") in text or "drops reasoning" in notes, kind
            assert "tool_calls" not in message or "add" in text or "drops tool calls" in notes, kind
        if name in UNMARKED:
            assert all(turn.strip()[-3:] not in ("ccc", "eee") for turn in learned(rendering)), "its end is learned"
    assert "reasoning" in rendered


NO_TOOLS = [name for name in UNMARKED if name not in REFUSED and "tool_calls" not in SHIPPED[name]]
LOOKING_AHEAD = ["gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"]


@pytest.mark.parametrize("name", [name for name in UNMARKED if name not in REFUSED])
def test_tools_are_learned_or_refused(name):
    if name in NO_TOOLS or name in LOOKING_AHEAD:  # the latter write a tool's answer into the assistant's turn
        reason = 'no place for "tool_calls"' if name in NO_TOOLS else "of role 'tool' says where its loop comes to it"
        with pytest.raises(ValueError, match=reason):
            template(name).render(WORDS["tools"])
    else:
        call, answer, last = learned(template(name).render(WORDS["tools"]))
        assert "add" in call
        assert "ccc" in answer
        assert "eee" in last


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_template_of_no_use_is_refused_by_its_name(name):
    with pytest.raises(ValueError, match=f"^{name}: .*(; put|change the record)") as error:
        template(name).check()
    assert "\n" not in str(error.value)


MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{{- bos_token }}{% for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (first + '\n\n' if first and loop.last else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}{{ call.function | tojson }}{% if not loop.last %}, {% endif %}
{%- endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}{% endfor %}"""
PHI4 = """\
{% for m in messages %}{% if m.role == 'system' %}{{ '<|im_start|>system<|im_sep|>' + m.content + '<|im_end|>' }}
{%- elif m.role == 'user' %}{{ '<|im_start|>user<|im_sep|>' + m.content + '<|im_end|>' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant<|im_sep|>' + m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""
SMOLLM3 = """\
{%- set thinks = enable_thinking if enable_thinking is defined else true %}
{{- '<|im_start|>system\nToday is ' + strftime_now('%d %B %Y') + '. Mode: ' + ('/think' if thinks else '/no_think') }}
{%- if messages[0].role == 'system' %}{{ '\n' + messages[0].content }}{% endif %}{{ '<|im_end|>\n' }}
{%- for m in messages %}{% set content = m.content if m.content is string else '' %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{% if thinks %}
{{- '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' }}{% else %}
{{- '<|im_start|>assistant\n<think>\n\n</think>\n' + content.lstrip('\n') + '<|im_end|>\n' }}{% endif %}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if not thinks %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}"""


@pytest.mark.parametrize(
    ("source", "kind", "kwargs", "expected"),
    [
        (MISTRAL, "turns", {}, [" ccc</s>", " eee</s>"]),
        (
            MISTRAL,
            "tools",
            {},
            ['[TOOL_CALLS] [{"name": "add", "arguments": {"x": 7}}]</s>', " ccc</s>", " eee</s>"],
        ),
        (PHI4, "turns", {}, ["ccc<|im_end|>", "eee<|im_end|>"]),
        (SMOLLM3, "turns", {}, ["ccc<|im_end|>\n", "eee<|im_end|>\n"]),
        (SMOLLM3, "turns", {"enable_thinking": False}, ["ccc<|im_end|>\n", "eee<|im_end|>\n"]),
    ],
)
def test_shapes_of_other_models(source, kind, kwargs, expected):
    shape = ChatTemplate(source, TOKENS, date.today(), "shape")
    shape.check()
    assert learned(shape.render(WORDS[kind], kwargs=kwargs)) == expected


TURN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{{ '\n' }}"
BARE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ '\n' }}"
ASK, BOTH = "{% if add_generation_prompt and loop.last %}", ["ccc</s>\n", "eee</s>\n"]
# what each writes is in one place only; what is learned of it
SHAPES = {
    "in the loop": (TURN + ASK + "[assistant] {% endif %}{% endfor %}", BOTH),
    "in the loop, and thinks": (TURN + ASK + "[assistant] <think>{% endif %}{% endfor %}", BOTH),
    "in the loop, with other white space": (TURN + ASK + "[assistant]{{ '\n' }}{% endif %}{% endfor %}", BOTH),
    "in the loop, as part of the header": (
        TURN + ASK + "[assistant]{% endif %}{% endfor %}",
        [" ccc</s>\n", " eee</s>\n"],
    ),
    "in the loop and behind it": (
        TURN + ASK + "[assistant] {% endif %}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}",
        BOTH,
    ),
    "instead of a line break": (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}" + ASK + "[assistant] {% else %}"
        "{{ '\n' }}{% endif %}{% endfor %}",
        BOTH,
    ),
    "instead of the end of a message": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + ASK + "<assistant>{% else %}<end>{% endif %}"
        "{% endfor %}",
        ["ccc<end>", "eee<end>"],
    ),
    "before messages, but for the first": (
        "{% for m in messages %}{{ '\n\n' if not loop.first }}{{ m.role | title }}: {{ m.content }}{{ eos_token }}"
        + ASK
        + "Assistant:{% endif %}{% endfor %}",
        [" ccc</s>", " eee</s>"],
    ),
    "or the end of the conversation": (
        BARE + ASK + "[assistant] {% elif loop.last %}<over>{% endif %}{% endfor %}",
        ["ccc\n", "eee\n<over>"],
    ),
    "behind the loop, or the end": (
        BARE + "{% endfor %}{% if add_generation_prompt %}[assistant] {% else %}{{ eos_token }}{% endif %}",
        ["ccc\n", "eee\n</s>"],
    ),
    "before a sentence that it lacks": (
        "{% for m in messages %}[{{ m.role }}] Answer in words: {{ m.content }}{{ eos_token }}{{ '\n' }}"
        + ASK
        + "[assistant] <think>{% endif %}{% endfor %}",
        BOTH,
    ),
    "before a sentence on its line": (
        "{% for m in messages %}[{{ m.role }}]{{ '\n' }}Answer in words: {{ m.content }}{{ eos_token }}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{{ '\n' }}<think>{% endif %}",
        BOTH,
    ),
    "before no reasoning": (
        "{% for m in messages %}[{{ m.role }}]{{ '\n' }}{% if m.role == 'assistant' %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{{ eos_token }}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{{ '\n' }}<think>{{ '\n' }}{% endif %}",
        ["<think></think>ccc</s>\n", "<think></think>eee</s>\n"],
    ),
    "always, behind the loop": (TURN + "{% endfor %}[assistant] ", BOTH),
    "always, in the loop": (TURN + "{% if loop.last %}[assistant] {% endif %}{% endfor %}", BOTH),
    "always, with a blank line": (TURN + "{% endfor %}{{ '\n' }}[assistant] ", ["ccc</s>\n", "eee</s>\n\n"]),
    "always, and thinks if asked": (
        TURN + "{% endfor %}[assistant] {% if add_generation_prompt %}<think>{% endif %}",
        BOTH,
    ),
    "always, the rest if asked": (
        "{% for m in messages %}[{{ m.role }}]<says>{{ m.content }}{{ eos_token }}{% endfor %}[assistant]"
        "{% if add_generation_prompt %}<says>{% endif %}",
        ["ccc</s>", "eee</s>"],
    ),
    "always, behind an end": (BARE + "{% endfor %}{{ eos_token }}[assistant] ", ["ccc\n", "eee\n</s>"]),
    "always, behind another end": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '<end>' if not loop.last else '<over>' }}{% endfor %}"
        "<assistant>",
        ["ccc<end>", "eee<over>"],
    ),
    "as the end of a turn": (
        "{% for m in messages %}|{{ m.content }}|{% endfor %}{% if add_generation_prompt %}|{% endif %}",
        ["ccc|", "eee|"],
    ),
    "nowhere, without headers": (
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
        ["ccc</s>", "eee</s>"],
    ),
}


@pytest.mark.parametrize("where", SHAPES)
def test_the_prompt_of_a_template_is_not_learned_wherever_it_writes_it(where):
    source, expected = SHAPES[where]
    shape = ChatTemplate(source, TOKENS, date.today(), "shape")
    shape._check()
    assert learned(shape.render(WORDS["turns"][1:])) == expected
    assert learned(shape.render(WORDS["turns"][1:], first=2)) == expected[1:]
    assert learned(shape.render(WORDS["turns"][1:4])) == expected[:1]


def refusal(source, messages=WORDS["turns"], **options):
    with pytest.raises(ValueError) as error:
        ChatTemplate(source, TOKENS, date.today(), "shape").render(messages, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("behind", ["", "{{ eos_token }}", "{% if add_generation_prompt %}<think>{% endif %}"])
def test_a_template_that_writes_no_header_to_prompt_with_is_refused(behind):
    assert "writes no generation prompt; add one, or put" in refusal(TURN + "{% endfor %}" + behind)


def test_text_of_others_in_an_assistants_turn_is_refused():
    """A system message that goes into the first message after it, and tools behind the loop."""
    merging = (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
        "{% else %}[{{ m.role }}] {{ ns.s }}{{ m.content }}{% set ns.s = '' %}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    assert "writes a system message into the assistant's turn; put" in refusal(
        merging, [system("aaa"), assistant("ccc")]
    )
    shape = ChatTemplate(merging, TOKENS, date.today(), "shape")
    assert learned(shape.render(WORDS["turns"])) == ["ccc<end>", "eee<end>"]
    showing = SHAPES["in the loop"][0] + "{% if tools %}Use {{ tools }}{% endif %}"
    assert learned(ChatTemplate(showing, TOKENS, date.today(), "shape").render(WORDS["turns"])) == BOTH
    assert "behind its loop depends on the record; put" in refusal(showing, tools=[{"name": "add"}])


MARKED_TURN = "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
CAPTURED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% set c %}" + MARKED_TURN + "{% endset %}"
)
REST = "{% else %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    "use",
    [
        "{{ c[:5] }}",
        "{{ c[:-1] }}",
        "{{ c[1:] }}",
        "{{ c | upper }}",
        "{{ c | replace('e', 'x') }}",
        "{{ c }}{{ c }}",
        "{{ c | reverse }}",
        "{{ c | truncate(4, True, '', 0) }}",
        "{{ c | length }}{{ c }}",
        "{% if loop.last %}{{ c }}{% endif %}",
        "{% set d %}{% generation %}{{ c }}{% endgeneration %}{% endset %}{{ d }}",
    ],
)
def test_marks_that_do_not_hold_what_they_held_are_refused(use):
    assert "changes or moves text after {% generation %} has marked it; mark it" in refusal(CAPTURED + use + REST)


def test_white_space_that_a_filter_cannot_reach_behind_a_mark_is_found():
    messages = [user("bbb"), assistant("  ccc")]
    assert "changes or moves text after {% generation %}" in refusal(CAPTURED + "{{ c | trim }}" + REST, messages)
    shape = ChatTemplate(CAPTURED + "{{ c | trim }}" + REST, TOKENS, date.today(), "shape")
    assert learned(shape.render(WORDS["turns"])) == ["ccc</s>", "eee</s>"]


def test_marks_of_text_that_is_captured_and_written_as_it_is_hold():
    macro = "{% macro say(m) %}" + MARKED_TURN + "{% endmacro %}{% for m in messages %}[{{ m.role }}]"
    macro += "{% if m.role == 'assistant' %}{{ say(m) }}" + REST
    for source in (
        CAPTURED + "{{ c }}" + REST,
        macro,
        "{% set t %}" + CAPTURED + "{{ c }}" + REST + "{% endset %}{{ t }}",
    ):
        shape = ChatTemplate(source, TOKENS, date.today(), "shape")
        assert learned(shape.render(WORDS["turns"])) == ["ccc</s>", "eee</s>"]
        assert learned(shape.render(WORDS["turns"], first=3)) == ["eee</s>"]


def test_marks_of_messages_in_another_order_are_those_of_the_assistants():
    """Where it cannot be seen whose they are, they are refused."""
    turn = "[{{ m.role }}]{% if m.role == 'assistant' %}" + MARKED_TURN + "{% else %}{{ m.content }}{% endif %}"
    backwards = "{% for m in messages | reverse %}" + turn + "{% endfor %}"
    grouped = "{% for g in messages | groupby('role') %}{% for m in g.list %}" + turn + "{% endfor %}{% endfor %}"
    for source, order in ((backwards, ["eee</s>", "ccc</s>"]), (grouped, ["ccc</s>", "eee</s>"])):
        shape = ChatTemplate(source, TOKENS, date.today(), "shape")
        assert learned(shape.render(WORDS["turns"])) == order
        assert learned(shape.render(WORDS["turns"], first=3)) == ["eee</s>"]
    hidden = "{% set t %}" + backwards + "{% endset %}{{ t }}"
    assert "not clear which {% generation %}" in refusal(hidden, first=3)


@pytest.mark.parametrize("role", ["system", "tool"])
def test_marks_around_what_others_say_are_refused(role):
    source = "{% for m in messages %}{% if m.role != 'user' %}" + MARKED_TURN + "{% else %}{{ m.content }}{% endif %}"
    source += "{% endfor %}"
    ChatTemplate(source, TOKENS, date.today(), "shape")._check()
    messages = [user("bbb"), {"role": role, "content": "ttt"}, assistant("ccc")]
    assert f"marks what a message of role '{role}' says; let {{% generation %}} hold" in refusal(source, messages)


def test_a_mark_in_the_text_of_a_call_is_no_mark():
    source = "{% for m in messages %}{% generation %}{{ m.tool_calls }}{% endgeneration %}{% endfor %}"
    assert "changes or moves text" in refusal(source, [calling({"x": 1}) | {"tool_calls": "\ufdd0 \ufdd1"}])


def test_the_prompt_of_a_thinking_model_is_not_learned():
    """Qwen3.5 writes "<think>\n" for the model; where a turn was written without it, the turn is learned whole."""
    rendering = template("qwen3_5_think").render(REASONING["reasoning of the last turn"])
    assert learned(rendering) == ["a dog.<|im_end|>\n", "the hat\n</think>\n\nthe end<|im_end|>\n"]


def test_notes_say_what_a_template_leaves_out():
    def notes(name, messages, **options):
        return set(template(name).render(messages, **options).notes)

    assert notes("qwen3", REASONING["reasoning of the last turn"]) == set()
    assert notes("qwen3", REASONING["reasoning of two turns"]) == {"the chat template drops reasoning"}
    assert notes("qwen3", REASONING["reasoning in the content"]) == {"the chat template drops reasoning"}
    assert notes("llama3", REASONING["reasoning"]) == {"the chat template drops reasoning"}
    assert notes("deepseek_r1_distill", WORDS["words and tools"]) == {
        "the chat template drops tool calls",
        'the chat template does not use "name" of a message',
        "turns are learned without '<think>', with which the chat template prompts the model; give them weight 0",
    }
    assert notes("smolvlm_training", [user("qqq"), assistant("zzz")]) == {
        "the chat template drops or changes what a message of role 'user' says",
        "the chat template drops or changes what a message of role 'assistant' says",
    }
    odd = [user("q") | {"mood": "good", "name": "me"}, assistant("a")]
    assert notes("qwen3", odd) == {f'the chat template does not use "{name}" of a message' for name in ("mood", "name")}
    assert notes("qwen3", [user("q"), assistant("a")], kwargs={"enable_thinking": True, "thinking": 1}) == {
        'the chat template does not use "thinking" of chat_template_kwargs'
    }


# strings of arguments that templates write as they are or escaped; the second call is to the same function
ARGUMENTS = [
    {"x": 'Paris "é"\n\tC:\\new', "y": {"z": ["a b", " ☃c\x1b"]}},
    {"x": "London's 🎩", "y": {"z": ["</x>", "-"]}},
]


@pytest.mark.parametrize("name", [name for name in SHIPPED if name not in REFUSED and "tool_calls" in SHIPPED[name]])
def test_calls_that_a_template_drops_are_noted_and_no_others(name):
    compared = 0
    for calls in (ARGUMENTS[:1], ARGUMENTS, [{"x": "Paris"}, {"x": "London"}]):
        messages = [user("q"), calling(*calls), tool("ttt"), assistant("ccc")]
        try:
            rendering = template(name).render(messages)
        except ValueError:
            continue
        compared += 1
        is_whole = all(word in rendering.text for word in ("Paris", "London")[: len(calls)])
        assert ("the chat template drops tool calls" in rendering.notes) == (not is_whole), calls
    assert compared or name in LOOKING_AHEAD


def test_the_second_of_two_calls_is_noted_where_a_template_writes_one():
    """Also where they have the same arguments, or where it writes both names."""
    note, rest = "the chat template drops tool calls", [tool("ttt"), assistant("ccc")]
    for calls in (ARGUMENTS, [{"x": 1}, {"x": 1}]):
        assert note in template("gptoss").render([user("q"), calling(*calls), *rest]).notes
        assert note not in template("qwen3").render([user("q"), calling(*calls), *rest]).notes
    source = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}{{ call.function.arguments if loop.first }}{% endfor %}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    shape = ChatTemplate(source, TOKENS, date.today(), "shape")
    assert shape.render([user("q"), calling(*ARGUMENTS[:1])]).notes == ()
    assert shape.render([user("q"), calling(*ARGUMENTS)]).notes == (note,)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gptoss", "deepseekv3"])
def test_fields_that_have_the_name_of_something_else_in_the_template_are_named(name):
    """Such as `loop.index`, `tool_call.id`, or a word of its text."""
    fields = ["training", "id", "prompt", "index", "name", "type", "arguments"]
    found = template(name).render([user("q"), assistant("a") | dict.fromkeys(fields, "zzz")])
    assert "zzz" not in found.text
    assert {*found.notes} >= {f'the chat template does not use "{field}" of a message' for field in fields}


def test_a_field_that_a_template_reads_in_any_way_is_not_named():
    reads = ("m.mood", "m['mood']", "m.get('mood')", "m | tojson", "m.values() | list", "dict(m).mood", "dict(m, x=1)")
    for read in reads:
        source = f"{{% for m in messages %}}{{{{ m.content }}}}{{{{ {read} }}}}{{% endfor %}}"
        rendering = ChatTemplate(source, TOKENS, date.today(), "t").render([user("q") | {"mood": "good"}])
        assert "good" in rendering.text
        assert rendering.notes == ()


def test_a_template_may_write_a_multiple_of_its_record_and_no_more():
    source = "{% for m in messages %}{{ m.content }}{% if 'boom' in m.content %}{{ 'x y ' * 100000 }}{% endif %}|"
    source += "{% endfor %}{% if add_generation_prompt %}|{% endif %}"
    shape = ChatTemplate(source, TOKENS, date.today(), "shape")
    long = shape.render([user("long " * 400_000), assistant("a")])
    assert len(long.text) > 2_000_000
    with pytest.raises(
        ValueError, match=r"\(it writes more than 262,\d+ characters, too many for .*\); change the rec"
    ):
        shape.render([user("boom"), assistant("a")])


@pytest.mark.parametrize("kind", ["documents", "pairs"])
def test_texts_are_encoded_in_batches_of_bounded_size(kind, monkeypatch):
    monkeypatch.setattr(chat_module, "_BATCH_CHARACTERS", 100)
    records = [{"messages": [user("q" * size), assistant("a")]} for size in (5, 200, 5, 40, 40, 40, 5)]
    if kind == "pairs":
        records = [
            {"prompt": record["messages"][:1], "answers": [[assistant("a")], [assistant("b")]], "pairs": [(0, 1)]}
            for record in records
        ]
    records.insert(3, ValueError("malformed"))
    chat, sizes = ChatTokenizer(TOKENIZER, 0, 1, PHI4), []
    expected = [getattr(chat, kind)([record])[0] for record in records]

    def encode(texts, encode_batch=chat._encode_batch):
        sizes.append(sum(map(len, texts)))
        return encode_batch(texts)

    monkeypatch.setattr(chat, "_encode_batch", encode)
    assert str(getattr(chat, kind)(records)) == str(expected)
    assert len(sizes) > 3
    assert max(sizes) < 100 + 400


@pytest.mark.parametrize("name", ["qwen3", "qwen3_training", "gptoss", "phi3_training", "llama3"])
def test_a_turn_of_weight_0_is_not_learned(name):
    messages = [user("q"), assistant("ccc"), user("r"), assistant("eee"), user("s"), assistant("fff")]
    every = template(name).render(messages)
    for index, weights in ((1, (0,)), (3, (0,)), (5, (0, 1))):
        weighted = [m | {"weight": weights[0]} if number == index else m for number, m in enumerate(messages)]
        rendering = template(name).render(weighted)
        assert rendering.text == every.text
        kept = [span for number, span in enumerate(every.spans) if number != index // 2]
        if name == "phi3_training" and index != 5:  # it marks what ends the conversation apart
            assert learned(rendering)[-1].endswith("</s>")
        assert rendering.spans == kept
    assert template(name).render(messages, first=3).spans == every.spans[1:]


def test_the_date_is_todays_or_the_one_that_is_given():
    for day in (date.today(), date(2024, 7, 26)):
        text = ChatTemplate(SMOLLM3, TOKENS, day, "shape").render(WORDS["turns"]).text
        assert f"Today is {day.strftime('%d %B %Y')}." in text
    one, other = (ChatTokenizer(TOKENIZER, 0, 1, SMOLLM3, date(2024, 7, day)) for day in (26, 27))
    assert one.prints_date
    assert one.fingerprint != other.fingerprint
    one, other = (ChatTokenizer(TOKENIZER, 0, 1, PHI4, date(2024, 7, day)) for day in (26, 27))
    assert one.fingerprint == other.fingerprint


SET = "{% set ns = namespace(a=[], b=[]) %}"
NEST = SET + "{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
HOSTILE = {
    "'%2000000000d'": "{{ '%2000000000d' % 1 }}",
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "tojson": "{{ messages | tojson(indent=2000000000) }}",
    "lipsum": "{{ lipsum(n=1000000000) }}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "loops": "{% for a in messages %}" * 50 + "{% endfor %}" * 50,
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a deep list": SET + "{% for i in range(9999) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}",
    "a list that doubles": SET + "{% for i in range(99) %}{% set ns.a = ns.a * 2 + [1] %}{% endfor %}",
    "much text": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "half a character": "{{ '\\ud83d' }}",
    "a text without end": NEST + "{{ ns.a }}",
    "a comparison without end, in C": NEST + "{{ ns.a == ns.b }}",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_template_is_refused_and_its_process_ends(what, monkeypatch):
    monkeypatch.setattr(guard, "SECONDS", 1)
    monkeypatch.setattr(guard, "GRACE", 1)
    with pytest.raises(ValueError, match=r"^a/chat_template\.jinja: .*; (correct|change|free memory)") as error:
        ChatTemplate(HOSTILE[what], TOKENS, date.today(), "a/chat_template.jinja").check()
    assert "\n" not in str(error.value)


def _batch(chat, records):
    return [str(result) if isinstance(result, ValueError) else len(result.tokens) for result in chat.documents(records)]


def test_a_record_that_takes_too_long_is_one_malformed_record(monkeypatch):
    """The records before and after it are tokenized, and the limits do not outlive it."""
    monkeypatch.setattr(guard, "SECONDS", 1)
    slow = "{% for m in messages %}{% if 'loop' in m.content %}{% for a in range(99999) %}{% for b in range(99999) %}"
    slow += "{% endfor %}{% endfor %}{% endif %}{% if 'large' in m.content %}{{ m.content % 1 }}{% endif %}"
    slow += "{{ '|' + m.content + '|' }}{% endfor %}{% if add_generation_prompt %}|{% endif %}"
    contents = ["cat", "loop", "hat", "large %2000000000d", "dog"]
    records = [{"messages": [user(content), assistant("a")]} for content in contents]
    chat = ChatTokenizer(TOKENIZER, 0, 1, slow)
    with multiprocessing.get_context("fork").Pool(1, guard.limit_process) as pool:
        first, loop, third, large, last = pool.apply(_batch, (chat, records))
    assert all(isinstance(result, int) for result in (first, third, last))
    assert loop.startswith("the chat template takes more than 1 s of CPU time; correct the template")
    assert large.startswith("the chat template takes more than 1 GiB of memory; correct the template")


@pytest.fixture
def log_of(tmp_path, caplog):
    """Packs records by Qwen3's template; returns the path of their file and the lines of the log."""

    def log_of(records, weight="", **options):
        path = write_jsonl(tmp_path / "chat.jsonl", records)
        with caplog.at_level("INFO"):
            list(PackedSFTDataset(f"{path}{weight}", ChatTokenizer(TOKENIZER, 0, 1, SHIPPED["qwen3"]), 256, **options))
        return path, [record.getMessage() for record in caplog.records]

    return log_of


def forgetful(count):
    """Records of whose reasoning the template drops some."""
    return [{"messages": [Q, thinking(f"so {number}", "a"), Q, assistant("b")]} for number in range(count)]


def test_what_a_template_leaves_out_is_said_once_with_its_number(log_of):
    others = [{"messages": [Q | {"mood": "good"}, assistant("a")]}, {"messages": [Q, assistant("a")]}]
    path, log = log_of([*forgetful(3), *others], epochs=2)
    assert sorted(line for line in log if "read so far" in line) == [
        f'the chat template does not use "mood" of a message, in 1 of the 5 records read so far, such as {path}:4',
        f"the chat template drops reasoning, in 3 of the 5 records read so far, such as {path}:1",
    ]


@pytest.mark.parametrize(("weight", "number"), [("", 200), ("=0.5", 100), ("=2", 400)])
def test_the_end_of_an_epoch_says_of_how_many_records_something_was_left_out(weight, number, log_of, monkeypatch):
    """Of all windows and blocks, and of those records alone that were read."""
    monkeypatch.setattr("torchtitan_magi.data.records.record_file.BLOCK_BYTES", 2000)
    _, (*_, last) = log_of(forgetful(100), weight, epochs=2, window_blocks=2)
    assert last.endswith(f"left out: none; of {number} records read; the chat template drops reasoning: {number}")


def test_many_unknown_fields_are_counted(log_of):
    path, log = log_of([{"messages": [Q | {f"field{n}": 1 for n in range(30)}, assistant("a")]}], epochs=1)
    assert sum("does not use" in line for line in log[:-1]) == 16
    assert f"the chat template leaves out 14 more things, in 1 of the 1 records read so far, such as {path}:1" in log


def test_a_template_that_refuses_every_record_is_the_error(tmp_path):
    """With "skip", too."""
    path = tmp_path / "chat.jsonl"
    path.write_text((json.dumps({"messages": [system("s"), Q, assistant("a")]}) + "\n") * 20)
    packs = PackedSFTDataset(path, ChatTokenizer(TOKENIZER, 0, 1, SHIPPED["gemma"]), 256, bad_records="skip")
    words = r"no record of .* has a token to train on \(20 doc.*\); the first malformed one read is .*chat.jsonl:\d+: "
    with pytest.raises(
        ValueError, match=words + r"the chat template refuses the messages \(System role not supported\)"
    ):
        list(packs)


def test_a_template_that_refuses_everything_is_the_error_when_it_is_loaded(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(
        ValueError, match=rf"^the chat template in {tmp_path}: the chat template refuses .*\(no\); change"
    ):
        ChatTokenizer.from_assets(TOKENIZER, 0, 1, tmp_path)
