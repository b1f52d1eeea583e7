"""Forms of rollouts."""

import pytest

from torchtitan_magi.data.records.rollout_format import parse_rollouts

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
ANSWER = {"completion": "a", "advantage": 0.5, "logprobs": [-1, -0.5]}
IDS = {"completion_ids": [3, 4], "reward": 1, "completion_mask": [1, 0]}


def test_answers_as_text():
    record = {"prompt": "q", "completions": [ANSWER, {"completion": [ASSISTANT], "advantage": -1, "logprobs": [-2]}]}
    assert parse_rollouts(record | {"tools": [{"name": "f"}], "source": "x"}) == {
        "prompt": [USER],
        "completions": [[ASSISTANT]] * 2,
        "tools": [{"name": "f"}],
        "values": [0.5, -1.0],
        "rewarded": False,
        "logprobs": [[-1.0, -0.5], [-2.0]],
    }


def test_answers_as_token_ids():
    other = {"completion_ids": [5], "reward": 0.25}
    assert parse_rollouts({"prompt_ids": [1, 2], "completions": [IDS, other]}) == {
        "prompt_ids": [1, 2],
        "completions": [[3, 4], [5]],
        "masks": [[1, 0], None],
        "values": [1.0, 0.25],
        "rewarded": True,
        "logprobs": [None, None],
    }


def test_a_single_answer_may_stand_in_the_record():
    assert parse_rollouts({"prompt": "q"} | ANSWER) == parse_rollouts({"prompt": "q", "completions": [ANSWER]})
    ids = {"completion_ids": [3], "advantage": 1}
    assert parse_rollouts({"prompt_ids": [1]} | ids) == parse_rollouts({"prompt_ids": [1], "completions": [ids]})


def test_other_keys_are_ignored():
    others = {"messages": [USER], "text": "t", "output": "o", "pairs": [[0, 1]]}
    assert parse_rollouts({"prompt": "q"} | ANSWER | others) == parse_rollouts({"prompt": "q"} | ANSWER)


REWARDED = {"completion": "a", "reward": 1}


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ([], r"the line is \[\]; write an object"),
        ({"prompt": "q"}, r"the record has no \"completions\", only the keys \['prompt'\]; write a list of objects"),
        ({"prompt": "q", 1: 2}, r"only the keys \[1, 'prompt'\]; write a list"),
        ({"prompt": "q", "completions": ["a"]}, r"\"completions\" is \['a'\]; write a list of objects"),
        ({"prompt": "q", "completions": [{"completion": "a"}]}, 'do not all have one of "advantage" and "reward"'),
        ({"prompt": "q", "completions": [ANSWER, REWARDED]}, 'do not all have one of "advantage" and "reward"'),
        ({"prompt": "q", "completions": [ANSWER | {"reward": 1}]}, 'one of "advantage" and "reward"; give each'),
        ({"prompt": "q", "completions": [REWARDED]}, "no other answer to compare it with; give the answers of"),
        ({"prompt": "q"} | ANSWER | {"advantage": "high"}, "advantage is 'high'; use a finite number"),
        ({"prompt": "q"} | ANSWER | {"advantage": float("nan")}, "advantage is nan; use a finite number"),
        ({"prompt": "q"} | ANSWER | {"advantage": 10**400}, "use a finite number, below 1e38"),
        ({"prompt": "q"} | ANSWER | {"advantage": -1e39}, "advantage is -1e[+]39; use a finite number, below 1e38"),
        ({"prompt": "q", "completions": [REWARDED, REWARDED | {"reward": 1e39}]}, "reward is 1e[+]39; use a finite"),
        ({"prompt": "q"} | ANSWER | {"logprobs": [-1, -1e39]}, "logprobs is -1e[+]39; use a finite number"),
        ({"prompt": "q"} | ANSWER | {"images": ["x"]}, 'the record has "images", and only text is trained here'),
        ({"prompt_ids": [1], "completions": [IDS, IDS], "image": "x"}, 'the record has "image", and only text'),
        ({"prompt": "q"} | ANSWER | {"logprobs": [0.5]}, "logprobs has 0.5; a log-probability is at most 0"),
        ({"prompt": "q"} | ANSWER | {"logprobs": []}, r"logprobs is \[\]; write a list of numbers"),
        (
            {"prompt": "q", "completions": [ANSWER, ANSWER | {"logprobs": None}]},
            'have "logprobs" and others none; give all of them some, or none',
        ),
        ({"prompt": "q"} | ANSWER | {"completion_mask": [1]}, 'has "completion_mask" beside "completion"; use it with'),
        ({"prompt": "q", "completions": [IDS, IDS]}, 'has no "completion", only the keys'),
        ({"prompt_ids": [1], "completions": [ANSWER]}, 'has no "completion_ids", only the keys'),
        ({"prompt_ids": [1], "prompt": "q", "completions": [IDS, IDS]}, 'has "prompt" and "prompt_ids"; leave it one'),
        ({"prompt_ids": [], "completions": [IDS, IDS]}, r'"prompt_ids" is \[\]; write a list of token ids'),
        ({"prompt_ids": [-1], "completions": [IDS, IDS]}, r'"prompt_ids" is \[-1\]; write a list of token ids'),
        ({"prompt_ids": [1], "completions": [IDS, IDS | {"completion_ids": [1.5]}]}, r"completion_ids is \[1.5\]"),
        (
            {"prompt_ids": [1], "completions": [IDS, IDS | {"completion_mask": [1]}]},
            r"completion_mask is \[1\]; write 0 or 1 for each of 2 tokens",
        ),
        (
            {"prompt_ids": [1], "completions": [IDS, IDS | {"completion_mask": ["1", "0"]}]},
            "write 0 or 1 for each of 2 tokens",
        ),
        ({"completions": [ANSWER]}, 'no "prompt"'),
    ],
)
def test_malformed_records(record, what):
    with pytest.raises(ValueError, match=what) as error:
        parse_rollouts(record)
    assert "\n" not in str(error.value)
