"""Forms of document records, and what of them reaches the chat template."""

import json
import re

import numpy as np
import pytest
from support.chat import CHATML_UNMARKED, LLAMA3_TEMPLATE, TOKENIZER, TOOL, TURN_ENDS, chat, learned
from support.conversations import assistant, user

from torchtitan_magi.data.records.formats import parse_document, parse_pair
from torchtitan_magi.data.tokens.chat import CHATML_TEMPLATE, PLAIN_TEMPLATE

USER, ASSISTANT, SYSTEM = user("q"), assistant("a"), {"role": "system", "content": "s"}
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
CALLER = {"role": "assistant", "tool_calls": CALLS}
PARTS = [{"type": "text", "text": "q"}, {"type": "text", "text": "!"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def sharegpt(**turns):
    return [{"from": speaker, "value": text} for speaker, text in turns.items()]


# as templates with tools do it: the tools in the first turn, calls as JSON, content that may be null
TOOL_TEMPLATE = (
    "{% if tools %}[tools {{ tools | tojson }}]{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% generation %}{% if m.content is not none %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endgeneration %}{% endfor %}"
)
UNMARKED_TOOL_TEMPLATE = TOOL_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "") + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [USER, ASSISTANT], "source": "x"}, [USER, ASSISTANT]),
        ({"conversations": sharegpt(human="q", gpt="a")}, [USER, ASSISTANT]),
        ({"conversations": sharegpt(system="s", user="q", tool="42", assistant="a")}, [SYSTEM, USER, TOOL, ASSISTANT]),
        ({"conversations": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        ({"system": "s", "conversations": sharegpt(human="q", gpt="a")}, [SYSTEM, USER, ASSISTANT]),
        ({"prompt": "q", "completion": "a"}, [USER, ASSISTANT]),
        ({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, [SYSTEM, USER, ASSISTANT]),
        ({"prompt": [USER], "completion": ASSISTANT}, [USER, ASSISTANT]),
        ({"instruction": "q", "output": "a"}, [USER, ASSISTANT]),
        ({"instruction": "q", "input": "", "output": "a", "system": ""}, [USER, ASSISTANT]),
        ({"instruction": "q", "input": "i", "output": "a"}, [{**USER, "content": "q\n\ni"}, ASSISTANT]),
        ({"messages": [SYSTEM, USER, ASSISTANT], "system": "s"}, [SYSTEM, USER, ASSISTANT]),
        ({"messages": [{**USER, "content": PARTS}, ASSISTANT]}, [{**USER, "content": "q!"}, ASSISTANT]),
        ({"messages": [USER, CALLER, TOOL]}, [USER, {**CALLER, "content": None}, TOOL]),
    ],
)
def test_every_form_of_a_conversation(record, messages):
    assert parse_document(record) == {"messages": messages}


@pytest.mark.parametrize(
    ("said", "weight"),
    [
        ({"loss": False}, 0),
        ({"train": False}, 0),
        ({"loss_mask": 0}, 0),
        ({"weight": 0, "loss": False}, 0),
        ({"loss": True, "loss_mask": 1}, 1),
    ],
)
def test_other_names_of_a_turns_weight_mean_what_they_say(said, weight):
    (message,) = parse_document({"messages": [ASSISTANT | said]})["messages"]
    assert message == ASSISTANT | {"weight": weight}
    turn = {"from": "gpt", "value": "a"} | said
    assert parse_document({"conversations": [turn]}) == {"messages": [message]}
    (document,) = chat(CHATML_TEMPLATE).documents([parse_document({"messages": [USER, ASSISTANT | said]})])
    assert document.loss_mask.any() == bool(weight)
    assert document.notes == ()


@pytest.mark.parametrize("arguments", ["", " \n"])
def test_a_call_with_empty_text_for_arguments_has_none(arguments):
    calls = [{"type": "function", "function": {"name": "now", "arguments": arguments}}]
    record = parse_document({"messages": [USER, {"role": "assistant", "tool_calls": calls}]})
    assert record["messages"][1]["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}
    assert '<call>{"name": "now", "arguments": {}}</call>' in chat(UNMARKED_TOOL_TEMPLATE).render(record["messages"])[0]


def test_arguments_that_are_no_object_are_noted():
    calls = [{"type": "function", "function": {"name": "f", "arguments": "x = 1"}}]
    record = parse_document({"messages": [USER, {"role": "assistant", "tool_calls": calls}]})
    (document,) = chat(UNMARKED_TOOL_TEMPLATE).documents([record])
    assert document.notes == ("the arguments of a tool call are no JSON object and reach the chat template as text",)


def test_a_weight_of_another_than_the_assistant_is_noted():
    (document,) = chat(CHATML_TEMPLATE).documents([parse_document({"messages": [USER | {"loss": True}, ASSISTANT]})])
    assert document.notes == ("only what the assistant says is learned, though a message of role 'user' has weight 1",)


def test_what_exporters_fill_in_is_left_out():
    """Templates ask whether a message has "tool_calls"."""
    for nothing in (None, []):
        empty = {"tool_calls": nothing, "name": None, "tool_call_id": None}
        assert parse_document({"messages": [USER | empty, ASSISTANT | empty]}) == {"messages": [USER, ASSISTANT]}


def test_arguments_of_calls_may_be_json_text():
    for arguments in ('{"x": 1}', {"x": 1}):
        for call in ({"function": {"name": "f", "arguments": arguments}}, {"name": "f", "arguments": arguments}):
            (message,) = parse_document({"messages": [{"role": "assistant", "tool_calls": [call]}]})["messages"]
            (parsed,) = message["tool_calls"]
            assert parsed.get("function", parsed)["arguments"] == {"x": 1}
    for other in ("x = 1", "[1]", None):
        message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": other}]}
        assert parse_document({"messages": [message]}) == {"messages": [message | {"content": None}]}


def test_rows_of_alpaca_may_repeat_themselves_as_text():
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "text": "Below is an instruction ... 3"}
    assert parse_document(row) == parse_document({name: row[name] for name in ("instruction", "input", "output")})


def test_text_and_tools():
    assert parse_document({"text": "x", "id": 1}) == {"text": "x"}
    for tools in (TOOLS, json.dumps(TOOLS)):
        assert parse_document({"messages": [USER], "tools": tools}) == {"messages": [USER], "tools": TOOLS}
    for tools in (None, [], ""):
        assert parse_document({"messages": [USER], "tools": tools}) == {"messages": [USER]}


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, UNMARKED_TOOL_TEMPLATE])
def test_tools_and_calls_reach_the_template_and_calls_are_learned(template):
    if template == TOOL_TEMPLATE:  # only the assistant's turns are marked
        template = template.replace("{% generation %}", "{% if m.role == 'assistant' %}{% generation %}", 1).replace(
            "{% endgeneration %}", "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
        )
    record = {"tools": TOOLS, "messages": [SYSTEM, USER, assistant(None, tool_calls=CALLS), TOOL, ASSISTANT]}
    tokenizer = chat(template)
    text, _ = tokenizer.render(**parse_document(record))
    assert text == (
        f"[tools {json.dumps(TOOLS)}]<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        '<|im_start|>assistant\n<call>{"name": "f", "arguments": {"x": 1}}</call><|im_end|>\n'
        "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )
    assert learned(tokenizer(parse_document(record))) == (
        '<call>{"name": "f", "arguments": {"x": 1}}</call><|im_end|>\na<|im_end|>\n'
    )


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, CHATML_UNMARKED, PLAIN_TEMPLATE, LLAMA3_TEMPLATE])
def test_a_template_without_a_place_for_tools_refuses_them(template):
    """They would be lost in silence."""
    with pytest.raises(ValueError, match='no place for "tools"; give the assets one that has'):
        chat(template)({"messages": [USER, ASSISTANT], "tools": TOOLS})
    with pytest.raises(ValueError, match='no place for "tool_calls"'):
        chat(template)({"messages": [USER, assistant(None, tool_calls=CALLS)]})


@pytest.mark.parametrize(("template", "end"), [*TURN_ENDS.items(), (PLAIN_TEMPLATE, "</s>\n")])
def test_every_form_is_learned_where_the_assistant_speaks(template, end):
    space = " " if template == PLAIN_TEMPLATE else ""
    turns = sharegpt(system="be brief", human="the cat", gpt="the hat", tool="42") + sharegpt(gpt="a dog")
    alpaca = {"instruction": "the cat", "input": "and", "output": "a dog"}
    assert learned(chat(template)(parse_document({"conversations": turns}))) == f"{space}the hat{end}{space}a dog{end}"
    assert learned(chat(template)(parse_document(alpaca))) == f"{space}a dog{end}"


def test_reasoning_has_one_name():
    for name in ("reasoning", "thinking", "reasoning_content"):
        thought = ASSISTANT | {name: "so"}
        assert parse_document({"messages": [USER, thought]})["messages"][1] == ASSISTANT | {"reasoning_content": "so"}
        assert parse_document({"messages": [USER, ASSISTANT | {name: ""}]})["messages"][1] == ASSISTANT
    twice = ASSISTANT | {"reasoning": "so", "reasoning_content": "so"}
    assert parse_document({"messages": [USER, twice]})["messages"][1] == ASSISTANT | {"reasoning_content": "so"}


def test_arguments_of_the_template_reach_it():
    record = {"messages": [USER, ASSISTANT], "chat_template_kwargs": {"enable_thinking": False, "budget": None}}
    for given in (record, record | {"chat_template_kwargs": json.dumps(record["chat_template_kwargs"])}):
        assert parse_document(given)["chat_template_kwargs"] == {"enable_thinking": False}
    template = "{{ '/think' if enable_thinking else '/no_think' }}" + CHATML_TEMPLATE
    tokenizer = chat(template)
    assert tokenizer.render(**parse_document(record))[0].startswith("/no_think")
    pair = parse_pair(
        {"prompt": "q", "chosen": "a", "rejected": "b", "chat_template_kwargs": {"enable_thinking": True}}
    )
    assert TOKENIZER.decode(tokenizer.pair(pair).prompt.tolist(), skip_special_tokens=False).startswith("/think")
    for nothing in (None, {}, ""):
        assert parse_document(record | {"chat_template_kwargs": nothing}) == {"messages": [USER, ASSISTANT]}


HALF = r'{"x": "\ud83d"}'
DEEP = '{"x":' * 5000 + "1" + "}" * 5000
NESTED = {"x": 1}
for _ in range(5000):
    NESTED = {"x": NESTED}


def calling(arguments):
    return {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    }


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            calling(HALF),
            r"messages\[1\].tool_calls\[0\].function.arguments has the escape \\ud83d, half of a surrogate",
        ),
        (calling(DEEP), r"messages\[1\].tool_calls\[0\].function.arguments is JSON that is nested too deeply; remove"),
        (calling('{"x": 1, "x": 2}'), "arguments has the key 'x' twice; leave it one of them"),
        ({"messages": [USER], "tools": f"[{HALF}]"}, '"tools" has the escape'),
        ({"messages": [USER], "tools": f"[{DEEP}]"}, '"tools" is JSON that is nested too deeply'),
        ({"messages": [USER], "tools": NESTED}, '"tools" is <a dict nested too deeply to show>'),
        (
            {"messages": [USER], "chat_template_kwargs": DEEP},
            '"chat_template_kwargs" is JSON that is nested too deeply',
        ),
        ({"messages": [USER], "chat_template_kwargs": [1]}, '"chat_template_kwargs" is .*; write an object'),
        ({"messages": [USER], "chat_template_kwargs": "x"}, "which is not JSON; write an object"),
        ({"messages": [USER], "chat_template_kwargs": {"tools": []}}, '"tools", which is not the record\'s to give'),
        ({"messages": [ASSISTANT | {"reasoning": "a", "thinking": "b"}]}, "different texts in reasoning and thinking"),
        ({"messages": [ASSISTANT | {"reasoning": ["a"]}]}, r"messages\[0\].reasoning is .*; write a string"),
        ({"messages": [ASSISTANT | {"weight": 0.5}]}, r"messages\[0\].weight is 0.5; use 0"),
        ({"messages": [ASSISTANT | {"weight": []}]}, r"messages\[0\].weight is \[\]; use 0"),
        ({"messages": [ASSISTANT | {"loss": "no"}]}, r"messages\[0\].loss is 'no'; use 0"),
        ({"messages": [ASSISTANT | {"weight": 1, "train": False}]}, "says different things in weight and train; leave"),
        ({"messages": [SYSTEM, USER], "system": "other"}, '"system" and a first message of role "system"; leave it'),
        ({"conversations": [{"from": "human", "value": "q", "role": "system"}]}, 'has "from" and "role"; leave it one'),
        ({"conversations": [{"from": "gpt", "value": "q", "content": "a"}]}, 'has "value" and "content"; leave it one'),
        ({"prompt": "q", "completion": [USER, ASSISTANT]}, '"completion" repeats "prompt"; leave it out there'),
        ({"prompt": "q", "completion": [SYSTEM, USER, ASSISTANT]}, '"completion" repeats "prompt"; leave it out there'),
        ({"messages": [USER], "completions": ["a"]}, 'has "messages" and "completions"; leave it one of them'),
        ({"prompt": "q", "completion": "a", "completions": ["a"]}, 'has "completion" and "completions"; leave it one'),
    ],
)
def test_a_malformed_record_is_one_line(record, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_document(record)
    assert "\n" not in str(error.value)


def test_a_null_counts_as_absent():
    turns = [{"from": "human", "value": "q", "role": None, "content": None}, {"from": "gpt", "value": "a"}]
    assert parse_document({"conversations": turns}) == {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    }
    assert parse_document({"conversations": [{"from": None, "value": None} | USER]}) == {"messages": [USER]}


def parsed(record):
    try:
        return parse_document(record)
    except ValueError as error:
        return error


@pytest.mark.parametrize("depth", [100, 600, 950, 5000])
def test_whatever_is_nested_is_a_record_or_one_malformed_record(depth):
    arguments = '{"x":' * depth + "1" + "}" * depth
    (result,) = chat(UNMARKED_TOOL_TEMPLATE).documents([parsed(calling(arguments))])
    if depth == 5000 or isinstance(result, ValueError):
        assert "nested too deeply" in str(result) or "refuses the messages (maximum recursion" in str(result)
    else:
        assert len(result.tokens) > 5 * depth


# ------------------------------------------------------------------------------------------------------ several answers


def test_every_form_of_an_answer():
    answers = ["a dog", [ASSISTANT], ASSISTANT, {"completion": "a dog", "weight": 0.5}, {"completion": [ASSISTANT]}]
    record = parse_document({"prompt": "the hat", "completions": answers, "system": "be brief", "tools": TOOLS})
    short = [{"role": "assistant", "content": "a dog"}]
    assert record == {
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the hat"}],
        "completions": [short, [ASSISTANT], [ASSISTANT], short, [ASSISTANT]],
        "weights": [1.0, 1.0, 1.0, 0.5, 1.0],
        "tools": TOOLS,
    }


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([], '"completions" is [] (list); write a list of answers, each a string or messages'),
        ("a dog", "\"completions\" is 'a dog' (str); write a list of answers"),
        ([""], '"completions[0]" is empty; remove the line'),
        (["a", {"completion": "b", "weight": -1}], "completions[1].weight is -1; use a number of at least 0"),
        (["a", {"completion": "b", "weight": 1e39}], "weight is 1e+39; use a number of at least 0, below 1e38"),
        (["a", {"completion": "b", "weight": 10**400}], "use a number of at least 0, below 1e38"),
        (["a", {"completion": "b", "weight": True}], "completions[1].weight is True; use a number"),
        ([[USER]], "completions[0] has no assistant message; add one"),
        (["a", {"completion": "b", "score": 1}], 'completions[1] has "score", by which no answer is learned here; use'),
        ([{"completion": "b", "reward": 1}], 'completions[0] has "reward", by which no answer is learned here; use it'),
        ([{"content": "b"}], 'has no "role"'),
        (["b", [user("the hat"), ASSISTANT]], 'completions[1] repeats "prompt"; leave it out there'),
    ],
)
def test_what_is_no_answer_is_one_line(answers, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_document({"prompt": "the hat", "completions": answers})


def test_each_answer_is_tokenized_as_a_record_of_its_own():
    answers = ["the cat", {"completion": "a dog", "weight": 0.5}, "the end"]
    tokenizer, alone = chat(CHATML_TEMPLATE), ({"prompt": "the hat", "completion": "the cat"}, {"text": "the end"})
    whole = {"prompt": "the hat", "completions": answers}
    batch = tokenizer.documents(
        [parse_document(alone[0]), parse_document(whole), ValueError("x"), parse_document(alone[1])]
    )
    first, made, error, text = batch
    assert str(error) == "x"
    assert made.weights == (1.0, 0.5, 1.0)
    assert [learned(document) for document in made.documents] == [
        f"{said}<|im_end|>\n" for said in ("the cat", "a dog", "the end")
    ]
    np.testing.assert_array_equal(made.documents[0].tokens, first.tokens)
    np.testing.assert_array_equal(made.documents[0].loss_mask, first.loss_mask)
    assert learned(text) == "<s>the end</s>"


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, CHATML_UNMARKED, LLAMA3_TEMPLATE])
@pytest.mark.parametrize("said", [{}, {"weight": 1}])
def test_of_a_prompt_nothing_is_learned_though_the_assistant_speaks_in_it(template, said):
    """As `messages` the same tokens are learned in both of its turns."""
    tokenizer, end = chat(template), TURN_ENDS[template]
    prompt = [SYSTEM, USER, assistant("the hat", **said), user("the cat")]
    given = {"completion": "a dog"}, {"completions": ["a dog", "the end"]}, {"messages": [*prompt, assistant("a dog")]}
    one, answers, whole = tokenizer.documents(
        [parse_document(record if "messages" in record else {"prompt": prompt} | record) for record in given]
    )
    assert learned(one) == f"a dog{end}"
    assert [learned(document) for document in answers.documents] == [f"a dog{end}", f"the end{end}"]
    assert learned(whole) == f"the hat{end}a dog{end}"
    for document in (one, answers.documents[0]):
        np.testing.assert_array_equal(document.tokens, whole.tokens)
        assert document.notes == ()


def test_an_answer_that_the_template_refuses_is_the_records_error():
    template = (
        "{% for m in messages %}{% if 'cat' in m.content %}{{ raise_exception('no cats') }}{% endif %}{% endfor %}"
    )
    tokenizer = chat(template + CHATML_TEMPLATE)
    good, bad = ({"prompt": "the hat", "completions": ["a dog", other]} for other in ("the end", "the cat"))
    made, error, more = tokenizer.documents([parse_document(record) for record in (good, bad, good)])
    assert "no cats" in str(error)
    assert [learned(document) for document in more.documents] == [learned(document) for document in made.documents]


# --------------------------------------------------------------------------------------------------- answers in pairs


def said(*texts):
    return [[assistant(text)] for text in texts]


def scored(*scores):
    return [{"completion": f"answer {number}", "score": score} for number, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("record", "answers", "pairs"),
    [
        ({"completions": ["a", "b", "c"], "pairs": [[0, 2], [1, 2]]}, said("a", "b", "c"), [(0, 2), (1, 2)]),
        ({"completions": ["a", "b", "c", "d"], "pairs": [[3, 1]]}, said("b", "d"), [(1, 0)]),
        ({"completions": ["a", "b"], "pairs": [[0, 1], [1, 0]]}, said("a", "b"), [(0, 1), (1, 0)]),
        ({"completions": [[ASSISTANT], {"completion": "b"}, ASSISTANT], "pairs": [[1, 0]]}, said("a", "b"), [(1, 0)]),
        ({"completions": scored(1, 2.5)}, said("answer 0", "answer 1"), [(1, 0)]),
        ({"completions": scored(-1, 0, -3)}, said("answer 0", "answer 1", "answer 2"), [(1, 0), (1, 2)]),
        ({"completions": scored(2, 1, 2)}, said("answer 0", "answer 1"), [(0, 1)]),
        ({"completions": scored(0, 1), "pairs": None}, said("answer 0", "answer 1"), [(1, 0)]),
    ],
)
def test_pairs_of_answers_are_given_or_the_best_against_each_that_is_worse(record, answers, pairs):
    expected = {"prompt": [USER], "answers": answers, "pairs": pairs}
    assert parse_pair({"prompt": "q", "more": 1} | record) == expected
    more = {"system": "s", "tools": TOOLS, "chat_template_kwargs": {"x": 1}}
    expected |= {"prompt": [SYSTEM, USER], "tools": TOOLS, "chat_template_kwargs": {"x": 1}}
    assert parse_pair({"prompt": [USER]} | record | more) == expected


def test_a_record_with_chosen_and_rejected_is_that_pair_whatever_else_it_has():
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert parse_pair(pair | {"completions": scored(0, 1), "pairs": [[1, 0]]}) == parse_pair(pair)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"completions": ["a", "b"]}, 'the completions have no "score"; give each one, or the record "pairs"'),
        ({"completions": scored(0, 1), "pairs": [[0, 1]]}, 'the record has "pairs" and scores; leave it one of them'),
        ({"completions": [*scored(0), "b"]}, "completions[1].score is null; give each completion a finite number"),
        (
            {"completions": scored(0, float("nan"))},
            "completions[1].score is nan (float); give each completion a finite",
        ),
        (
            {"completions": scored(float("inf"), 0)},
            "completions[0].score is inf (float); give each completion a finite",
        ),
        ({"completions": scored(0, 10**400)}, "completions[1].score is 1000"),
        ({"completions": scored(0, "1")}, "completions[1].score is '1' (str); give each completion a finite number"),
        ({"completions": scored(True, 0)}, "completions[0].score is True (bool); give each completion a finite number"),
        ({"completions": scored(1.5, 1.5)}, "no completion has a score below the best, 1.5; remove the record"),
        ({"completions": scored(1)}, "no completion has a score below the best, 1; remove the record"),
        ({"completions": "ab", "pairs": [[0, 1]]}, "\"completions\" is 'ab' (str); write a list of answers"),
        ({"completions": ["a", "b"], "pairs": []}, '"pairs" is [] (list); write a list of [chosen, rejected], numbers'),
        ({"completions": ["a", "b"], "pairs": "01"}, "\"pairs\" is '01' (str); write a list of [chosen, rejected]"),
        ({"completions": ["a", "b"], "pairs": [0, 1]}, "pairs[0] is 0 (int); write [chosen, rejected], numbers of"),
        ({"completions": ["a", "b"], "pairs": [[0]]}, "pairs[0] is [0] (list); write [chosen, rejected], numbers of"),
        ({"completions": ["a", "b"], "pairs": [[0, True]]}, "pairs[0] is [0, True] (list); write [chosen, rejected]"),
        (
            {"completions": ["a", "b"], "pairs": [[0, 1], [0, 2]]},
            "pairs[1] is [0, 2]; completions have the numbers 0 to 1",
        ),
        ({"completions": ["a", "b"], "pairs": [[-1, 0]]}, "pairs[0] is [-1, 0]; completions have the numbers 0 to 1"),
        ({"completions": ["a", "b"], "pairs": [[1, 1]]}, "pairs[0] is [1, 1]; name two completions"),
        ({"completions": ["a", "b"], "pairs": [[0, 1], [0, 1]]}, "pairs[1] is [0, 1] once more; remove it"),
        ({"completions": ["a", [USER]], "pairs": [[0, 1]]}, "completions[1] has no assistant message; add one"),
        (
            {"completions": ["a", [USER, ASSISTANT]], "pairs": [[0, 1]]},
            'completions[1] repeats "prompt"; leave it out there',
        ),
        ({"completions": ["a", "b"], "pairs": [[0, 1]], "images": ["x"]}, 'the record has "images"'),
    ],
)
def test_what_makes_no_pairs_is_one_line(record, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_pair({"prompt": "q"} | record)
    assert "\n" not in str(caught.value)


def test_answers_without_a_prompt_are_one_line():
    with pytest.raises(ValueError, match='has no "prompt"'):
        parse_pair({"completions": scored(0, 1)})


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, LLAMA3_TEMPLATE])
def test_answers_in_pairs_have_the_tokens_of_pairs_by_themselves(template):
    tokenizer, answers, pairs = chat(template), ["the cat and", "the hat", "a dog"], [[0, 2], [1, 2], [2, 1]]
    whole = parse_pair({"prompt": "the hat", "completions": answers, "pairs": pairs})
    refused = parse_pair({"prompt": "the hat", "completions": ["a", "\ud83d"], "pairs": [[0, 1]]})
    one, error, two, wrong = tokenizer.pairs([whole, refused, whole, ValueError("wrong")])
    assert (type(error), str(wrong)) == (ValueError, "wrong")
    assert one.pairs == two.pairs == ((0, 2), (1, 2), (2, 1))
    for chosen, rejected in pairs:
        pair = {"prompt": "the hat", "chosen": answers[chosen], "rejected": answers[rejected]}
        alone = tokenizer.pair(parse_pair(pair))
        for mine, its in zip((chosen, rejected), alone.answers, strict=True):
            for found in (one, two):
                tokens = [*found.prompt.tolist(), *found.answers[mine].tokens.tolist()]
                assert tokens == [*alone.prompt.tolist(), *its.tokens.tolist()]
                assert learned(found.answers[mine]) == learned(its)


def test_the_prompt_of_answers_is_what_all_of_them_begin_with():
    """The third answer's text changes how the template writes the prompt, so its last token belongs to the answers."""
    template = "{{ '<s>' }}{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}{{ '!' if 'hat' in "
    template += "messages[-1].content else '?' }}{% endif %}{% endfor %}"
    record = {"prompt": "q", "completions": ["a", "b", "hat"], "pairs": [[0, 1], [0, 2]]}
    tokenizer = chat(template)
    made, alone = (tokenizer.pair(parse_pair(r)) for r in (record, {"prompt": "q", "chosen": "a", "rejected": "b"}))
    assert len(made.prompt) < len(alone.prompt)
    for answer, its in zip(made.answers, alone.answers, strict=False):
        whole = [*alone.prompt.tolist(), *its.tokens.tolist()]
        assert [*made.prompt.tolist(), *answer.tokens.tolist()] == whole
        assert learned(answer) == learned(its)
