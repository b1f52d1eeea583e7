"""Chat templates: tokens, assistant mask, where the template comes from, what is refused."""

import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat import (
    CHATML_UNMARKED,
    LLAMA3_TEMPLATE,
    SPECIAL,
    TOKENIZER,
    TOOL,
    TURN_ENDS,
    byte_level_tokenizer,
    chat,
    learned,
    texts,
)
from support.conversations import assistant, user
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from torchtitan_magi.data import ChatTokenizer
from torchtitan_magi.data.tokens.chat import (
    CHATML_TEMPLATE,
    PLAIN_TEMPLATE,
    _Text,
    _tokens_in_spans,
    default_template,
    load_chat_template,
)

SYSTEM = {"role": "system", "content": "be brief"}
CONVERSATION = [SYSTEM, user("the cat"), assistant("the hat 🎩"), TOOL, assistant(" a dog")]
turns = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts})
messages_of = st.lists(turns, min_size=1, max_size=6)
MARKED, UNMARKED = chat(CHATML_TEMPLATE), chat(CHATML_UNMARKED)
TRIMMING, NOT_TRIMMING = (chat(CHATML_TEMPLATE, byte_level_tokenizer(trim_offsets=trim)) for trim in (True, False))


def test_labels_by_hand_on_a_small_conversation():
    """One token per character: the mask can be read off the text."""
    characters = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("abehirsuy:\n")}, merges=[]))
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}a:{% endif %}"
    conversation = [user("hi"), assistant("yes"), user("bye"), assistant("rah")]
    document = chat(template, characters, None, None)({"messages": conversation})
    text = "".join(characters.id_to_token(i) for i in document.tokens.tolist())
    mask = "".join("^" if m else "." for m in document.loss_mask)
    assert text == "u:hi\na:yes\nu:bye\na:rah\n"
    assert mask == ".......^^^^........^^^^"
    assert document.tokens.dtype == np.int32
    assert document.loss_mask.dtype == bool


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML_TEMPLATE, "the hat 🎩<|im_end|>\n a dog<|im_end|>\n"),
        (CHATML_UNMARKED, "the hat 🎩<|im_end|>\n a dog<|im_end|>\n"),
        (PLAIN_TEMPLATE, " the hat 🎩</s>\n  a dog</s>\n"),
        (LLAMA3_TEMPLATE, "the hat 🎩<|eot_id|>a dog<|eot_id|>"),
    ],
)
def test_loss_is_on_assistant_turns_and_their_end_token(template, expected):
    document = chat(template)({"messages": CONVERSATION})
    assert learned(document) == expected
    text, _ = chat(template).render(CONVERSATION)
    assert document.tokens.tolist() == TOKENIZER.encode(text, add_special_tokens=False).ids
    assert document.tokens.tolist().count(0) == 1  # BOS once


def test_default_templates_render_as_documented():
    assert chat(CHATML_TEMPLATE).render(CONVERSATION)[0] == (
        "<s><|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nthe cat<|im_end|>\n"
        "<|im_start|>assistant\nthe hat 🎩<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n"
        "<|im_start|>assistant\n a dog<|im_end|>\n"
    )
    assert chat(PLAIN_TEMPLATE).render(CONVERSATION)[0] == (
        "<s>System: be brief\nUser: the cat\nAssistant: the hat 🎩</s>\nTool: 42\nAssistant:  a dog</s>\n"
    )
    without_bos = chat(PLAIN_TEMPLATE, bos=None, eos=None)
    assert without_bos.render(CONVERSATION[1:3])[0] == "User: the cat\nAssistant: the hat 🎩\n"


@settings(max_examples=60, deadline=None)
@given(messages_of)
def test_generation_markers_and_prefix_method_agree(messages):
    assert MARKED.render(messages) == UNMARKED.render(messages)
    one, two = MARKED({"messages": messages}), UNMARKED({"messages": messages})
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_array_equal(one.loss_mask, two.loss_mask)


@settings(max_examples=60, deadline=None)
@given(messages_of)
def test_mask_is_the_tokens_that_hold_assistant_bytes(messages):
    """Against bytes: byte-level tokens spell the text's bytes. Tokenizers that trim spaces off the offsets agree."""
    text, spans = MARKED.render(messages)
    wanted = np.zeros(len(text.encode()), dtype=bool)
    for start, stop in spans:
        wanted[len(text[:start].encode()) : len(text[:stop].encode())] = True
    # a character whose bytes are in several tokens: each of them holds it
    document = MARKED({"messages": messages})
    sizes = [
        len(token) if token not in SPECIAL else len(token.encode())
        for token in map(TOKENIZER.id_to_token, document.tokens.tolist())
    ]
    ends = np.cumsum(sizes)
    assert ends[-1] == len(wanted)
    expected = [bool(wanted[end - size : end].any()) for size, end in zip(sizes, ends.tolist(), strict=True)]
    assert document.loss_mask.tolist() == expected
    for other in (TRIMMING, NOT_TRIMMING):
        assert other({"messages": messages}).loss_mask.tolist() == expected


def test_text_records_get_bos_and_eos_and_loss_everywhere():
    document = chat(CHATML_TEMPLATE)({"text": "the cat"})
    assert document.tokens.tolist() == [0, *TOKENIZER.encode("the cat").ids, 1]
    assert document.loss_mask.all()
    bare = chat(CHATML_TEMPLATE, bos=None, eos=None)({"text": "the cat"})
    assert bare.tokens.tolist() == TOKENIZER.encode("the cat").ids


def test_special_tokens_are_not_added_a_second_time_nor_truncated():
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=500)
    for record in ({"messages": CONVERSATION}, {"text": "the cat and the hat"}):
        np.testing.assert_array_equal(
            chat(PLAIN_TEMPLATE, tokenizer)(record).tokens, chat(PLAIN_TEMPLATE)(record).tokens
        )
    assert tokenizer.truncation["max_length"] == 4  # the caller's tokenizer is as it was


def test_what_hub_templates_use_is_there():
    template = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.content | tojson }}{% endfor %}"
        "{% if tools is none and documents is none %}!{% endif %}{{ strftime_now('%d %b %Y') }}{{ pad_token }}"
        "{% generation %}{{ namespace(a=1).a }}{% endgeneration %}"
    )
    text, spans = chat(template, day=date(2024, 7, 26)).render([user("<é> 'q'"), user("no")])
    assert text == "\"<é> 'q'\"!26 Jul 20241"
    assert [text[slice(*span)] for span in spans] == ["1"]


@pytest.mark.parametrize("escape", ["messages.__class__.__mro__[1].__subclasses__()", "messages.append(1)"])
def test_template_cannot_reach_the_interpreter(escape):
    with pytest.raises(ValueError, match="the chat template refuses the messages"):
        chat("{{" + escape + "}}")({"messages": CONVERSATION})


# Like Qwen3's: reasoning is dropped from all turns before the last question and made up, empty, for the last turn.
REASONING_TEMPLATE = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% set text = m.content or '' %}"
    "{% if m.role == 'assistant' %}{% set thought = text.split('</think>')[0] if '</think>' in text else '' %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>{{ thought.split('<think>')[-1] }}</think>"
    "{% endif %}"
    "{{ text.split('</think>')[-1] }}{% for call in m.tool_calls or [] %}({{ call.name }}){% endfor %}{% else %}"
    "{{ text }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user("a"), assistant("<think>b</think>c")], "<think>b</think>c<|im_end|>\n"),
        ([user("a"), assistant("c")], "<think></think>c<|im_end|>\n"),
        (
            [user("a"), assistant("<think>b</think>c"), user("d"), assistant("<think>e</think>f")],
            "c<|im_end|>\n<think>e</think>f<|im_end|>\n",
        ),
        (
            [user("a"), assistant("b"), user("c"), assistant("d"), user("e"), assistant("f")],
            "b<|im_end|>\nd<|im_end|>\n<think></think>f<|im_end|>\n",
        ),
        ([user("a"), assistant("c  "), user("d"), assistant("f\n")], "c  <|im_end|>\n<think></think>f\n<|im_end|>\n"),
        (
            [user("a"), assistant(None, tool_calls=[{"name": "f"}]), TOOL, assistant("g")],
            "(f)<|im_end|>\n<think></think>g<|im_end|>\n",
        ),
        # what a user or the assistant writes is not taken for the template's own text
        (
            [user("<|im_start|>assistant\n"), assistant("b"), user("c"), assistant("d")],
            "b<|im_end|>\n<think></think>d<|im_end|>\n",
        ),
        (
            [user("a"), assistant("b<|im_end|>\n<|im_start|>assistant\nc"), user("d"), assistant("e")],
            "b<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n<think></think>e<|im_end|>\n",
        ),
    ],
)
def test_turns_are_found_where_the_template_rewrites_earlier_ones(messages, expected):
    tokenizer = chat(REASONING_TEMPLATE)
    assert learned(tokenizer({"messages": messages})) == expected
    text, spans = tokenizer.render(messages, first=0)
    for first, message in enumerate(messages):
        assert tokenizer.render(messages, first=first) == (text, spans)
        spans = spans[message["role"] == "assistant" :]


# Like Qwen3's: a line break between content and calls, which a mark behind content that is dropped would bring forth.
CALLING_TEMPLATE = REASONING_TEMPLATE.replace("<|im_end|>", "{% if m.tool_calls %}!{% endif %}<|im_end|>").replace(
    "({{ call.name }})", "{% if text.split('</think>')[-1] %}{{ '\n' }}{% endif %}({{ call }})"
)


def test_calls_after_reasoning_that_the_template_drops_are_found():
    call = assistant("<think>b</think>", tool_calls=[{"name": "f"}])
    messages = [user("a"), call, TOOL, assistant("c"), user("d"), assistant("e")]
    tokenizer = chat(CALLING_TEMPLATE)
    assert learned(tokenizer({"messages": messages})) == (
        "({'name': 'f'})!<|im_end|>\nc<|im_end|>\n<think></think>e<|im_end|>\n"
    )
    strange = call | {"content": "<think>b<|im_end|></think>", "tool_calls": [{"name": "<|im_end|>\n"}]}
    assert learned(tokenizer({"messages": [user("a"), strange, *messages[2:]]})) == (
        "({'name': '<|im_end|>\\n'})!<|im_end|>\nc<|im_end|>\n<think></think>e<|im_end|>\n"
    )


LINES_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(("template", "end"), [*TURN_ENDS.items(), (LINES_TEMPLATE, "\n")])
def test_a_conversation_may_begin_with_the_assistant(template, end):
    """Templates refuse to render no message at all."""
    strict = "{% if not messages[0].role %}{% endif %}" + template
    assert learned(chat(strict)({"messages": [assistant("a"), user("b"), assistant("c")]})) == f"a{end}c{end}"


def test_turns_are_found_in_other_words_and_with_other_ends():
    other_words = REASONING_TEMPLATE.replace("{{ text.split('</think>')[-1] }}", "{{ text | replace('c', 'C') }}")
    messages = [user("a"), assistant("abc"), user("d"), assistant("e")]
    assert learned(chat(other_words)({"messages": messages})) == "abC<|im_end|>\n<think></think>e<|im_end|>\n"

    other_end = REASONING_TEMPLATE.replace("<|im_end|>", "{% if not m.tool_calls %}<|im_end|>{% endif %}")
    messages = [user("a"), assistant("x", tool_calls=[{"name": "f"}]), TOOL, assistant("g")]
    assert learned(chat(other_end)({"messages": messages})) == "x(f)<think></think>g<|im_end|>"


@settings(max_examples=60, deadline=None)
@given(messages_of)
def test_turns_are_what_a_message_adds_to_those_before_it(messages):
    for template in (CHATML_UNMARKED, LLAMA3_TEMPLATE):
        tokenizer = chat(template)
        _, spans = tokenizer.render(messages)
        source, tokens = tokenizer._template._compiled[0], tokenizer._template.special_tokens
        expected = []
        for index, message in enumerate(messages):
            before = source.render(messages=messages[:index], add_generation_prompt=True, **tokens)
            if message["role"] == "assistant" and (index or template == CHATML_UNMARKED):
                expected.append((len(before), len(source.render(messages=messages[: index + 1], **tokens))))
        assert spans[len(spans) - len(expected) :] == expected


def test_refusals_are_one_line_with_a_remedy():
    with pytest.raises(ValueError, match=r"refuses the messages \(roles must alternate\); change the record"):
        chat("{{ raise_exception('roles\nmust alternate') }}")({"messages": CONVERSATION})
    with pytest.raises(ValueError, match=r"refuses the messages .*; change the record"):
        chat("{{ messages[0].content + 1 }}")({"messages": CONVERSATION})
    with pytest.raises(ValueError, match=r"the chat template is not valid \(.*endfor.*\); correct it"):
        chat("{% for m in messages %}")({"messages": CONVERSATION})
    with pytest.raises(ValueError, match="bos_id is 9999, not in the vocabulary"):
        chat(PLAIN_TEMPLATE, bos=9999)
    with pytest.raises(ValueError, match=r"U\+FDD0.*remove it"):
        chat(CHATML_TEMPLATE)({"messages": [user("a\ufdd0")]})


def test_template_is_found_in_the_assets(tmp_path):
    def config(content):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        return load_chat_template(tmp_path)

    assert load_chat_template(tmp_path) is None
    assert config({}) is None
    assert config({"chat_template": "one"}) == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    assert config({"chat_template": named}) == "three"
    with pytest.raises(ValueError, match=r"named \['tool_use'\]; name one of them \"default\""):
        config({"chat_template": named[:1]})
    with pytest.raises(ValueError, match=r"named \['a\\n\\x1baaa.*aaa\.\.\.; name one of them \"default\"") as error:
        config({"chat_template": [{"name": "a\n\x1b" + "a" * 5000, "template": "x"}]})
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000
    with pytest.raises(ValueError, match='give each entry a "name"'):
        config({"chat_template": ["three"]})
    with pytest.raises(ValueError, match="is a int; write a string or a list"):
        config({"chat_template": 3})
    with pytest.raises(ValueError, match="is not a JSON object"):
        config([])
    (tmp_path / "chat_template.jinja").write_text("four")
    assert config({"chat_template": "one"}) == "four"
    with pytest.raises(ValueError, match="is not a directory"):
        load_chat_template(tmp_path / "nowhere")


@pytest.mark.parametrize("place", ["files", "config"])
def test_records_with_tools_have_a_template_of_their_own(tmp_path, place):
    with_tools = CHATML_TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ tools | tojson }}\n")
    if place == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
        (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("unused")
        (tmp_path / "chat_template.jinja").write_text(CHATML_TEMPLATE)
    else:
        named = [{"name": "tool_use", "template": with_tools}, {"name": "default", "template": CHATML_TEMPLATE}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    made = ChatTokenizer.from_assets(TOKENIZER, 0, 1, tmp_path)
    plain = ChatTokenizer(TOKENIZER, 0, 1, CHATML_TEMPLATE)
    record = {"messages": [user("q"), assistant("a")]}
    assert made(record).tokens.tolist() == plain(record).tokens.tolist()
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(ValueError, match='has no place for "tools"'):
        plain(record | {"tools": tools})
    text, ((start, stop),) = made.render(record["messages"], tools)
    assert json.dumps(tools) in text
    assert text[start:stop] == "a<|im_end|>\n"
    assert made(record | {"tools": tools}).tokens.tolist() != plain(record).tokens.tolist()
    again = pickle.loads(pickle.dumps(made))
    assert again.render(record["messages"], tools)[0] == text
    assert again.fingerprint == made.fingerprint != plain.fingerprint


def test_default_template_follows_the_vocabulary(tmp_path, caplog):
    caplog.set_level("INFO")
    assert default_template(TOKENIZER) == CHATML_TEMPLATE
    plain = byte_level_tokenizer(["<s>", "</s>"])
    assert default_template(plain) == PLAIN_TEMPLATE
    assert ChatTokenizer.from_assets(plain, 0, 1, tmp_path).template == PLAIN_TEMPLATE
    assert f"no chat template in {tmp_path}: messages are written as plain text" in caplog.text


def by_offsets(encoding, spans):
    """By definition, from the offsets of all tokens: a token reaches from the end of the one before it to its own."""
    ends = [end for _, end in encoding.offsets]
    begins = [min(start, before) for (start, _), before in zip(encoding.offsets, [0, *ends], strict=False)]
    return [any(b < stop and e > start for start, stop in spans) for b, e in zip(begins, ends, strict=True)]


def pre_tokenizers_of_models():
    return [
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Whitespace(),  # leaves spaces out of the offsets
    ]


@pytest.mark.parametrize("number", range(4))
def test_tokens_of_spans_are_those_that_hold_their_characters(number):
    model = Tokenizer(models.BPE(unk_token="?"))
    model.pre_tokenizer = pre_tokenizers_of_models()[number]
    texts = ["the cat sat  on\nthe mat 👩‍👩‍👧 Übergröße", "  a b\n\n c 日本語 and 😀😀 more  "]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["?", "<|end|>"], show_progress=False)
    model.train_from_iterator(texts * 3, trainer)
    for text in texts:
        text += "<|end|>\n" + text
        encoding = model.encode(text, add_special_tokens=False)
        for start in range(len(text)):
            for stop in range(start + 1, len(text) + 1, 3):
                found = _tokens_in_spans(encoding, [(start, stop)]).tolist()
                assert found == by_offsets(encoding, [(start, stop)]), (text, start, stop)


BYTE_LEVEL = {
    "plain": {},
    "NFC": {"normalizer": normalizers.NFC()},
    "empty sequence": {"normalizer": normalizers.Sequence([])},
    "drops": {"normalizer": normalizers.Replace("at", "a")},
    "as long": {"normalizer": normalizers.Replace("the cat", "a kitty")},
    "prefix": {"prefix": True},
    "strips": {"end": AddedToken("<|end|>", rstrip=True, special=True)},
    "some bytes": {"alphabet": []},
}


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_spans_of_byte_level_tokens_are_those_of_their_offsets(name):
    """The bytes of tokens tell where they are, if tokens are the bytes of the text; else the library's offsets do."""
    options = BYTE_LEVEL[name]
    model = Tokenizer(models.BPE(unk_token="?" if name == "some bytes" else None))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space="prefix" in options, trim_offsets=False)
    model.decoder = decoders.ByteLevel()
    alphabet = options.get("alphabet", pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["?"], initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(["the cat sat on the mat"] * 3, trainer)
    model.add_special_tokens([options.get("end", AddedToken("<|end|>", special=True))])
    if "normalizer" in options:
        model.normalizer = options["normalizer"]
    tokenizer = ChatTokenizer(model, None, None, CHATML_TEMPLATE)
    assert (tokenizer._num_bytes is None) == (name in {"prefix", "strips", "some bytes"})
    for text in (
        "the cat  sat<|end|> \n<|end|>on the mat",
        "Übergröße 👩‍👩‍👧 の q  <|end|>",
        "e\u0301 cafe\u0301 the",
        "",
    ):
        encoding = model.encode(text, add_special_tokens=False)
        spans = [(start, stop) for start in range(len(text)) for stop in range(start + 1, len(text) + 1)]
        for each in ([], [(0, 2), (4, 5)], *([span] for span in spans)):
            (batch,) = tokenizer._encode([_Text(text, each)])
            assert batch.tokens.tolist() == encoding.ids
            assert batch.loss_mask.tolist() == by_offsets(encoding, each), (text, each)


def test_a_batch_is_its_records_one_by_one_and_bad_ones_spoil_no_other():
    tokenizer = chat(CHATML_TEMPLATE)
    good = [{"messages": [user("q"), assistant("the cat")]}, {"text": "the cat"}]
    surrogate, refused = {"text": "\ud83d"}, {"messages": [user("q")], "tools": [{"name": "f"}]}
    batch = tokenizer.documents([good[0], ValueError("malformed"), surrogate, good[1], refused])
    assert [str(batch[i]).split(" ")[0] for i in (1, 2, 4)] == ["malformed", "the", "the"]
    assert "the tokenizer refuses the text" in str(batch[2])
    for found, record in zip((batch[0], batch[3]), good, strict=True):
        alone = tokenizer(record)
        assert (found.tokens.tolist(), found.loss_mask.tolist()) == (alone.tokens.tolist(), alone.loss_mask.tolist())
    yes, no = [assistant("yes")], [assistant("no")]
    pair = {"prompt": [user("q")], "answers": [yes, no], "pairs": [(0, 1)]}
    bad = pair | {"answers": [yes, [assistant("\ud83d")]]}
    one, two, three = tokenizer.pairs([bad, pair, ValueError("malformed")])
    assert (type(one), str(three)) == (ValueError, "malformed")
    for found, alone in zip(two.answers, tokenizer.pair(pair).answers, strict=True):
        assert found.tokens.tolist() == alone.tokens.tolist()


@pytest.mark.parametrize("tokenizer", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_threads_render_at_the_same_time(tokenizer):
    """Two data sets of one tokenizer read ahead in a thread each."""
    conversations = [[user("a" * n), assistant("b" * n)] * (1 + n % 7) for n in range(1, 30)]
    wanted = [tokenizer.render(messages) for messages in conversations]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(tokenizer.render, conversations * 10))
    finally:
        sys.setswitchinterval(interval)
    assert found == wanted * 10
