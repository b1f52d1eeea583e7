"""Packs of rollouts: each answer once, with the tokens, labels, advantage and log-probabilities that it has alone."""

import functools
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jsonl import write_jsonl
from support.rollouts import rollouts_file
from support.runs import corpus

from torchtitan_magi.data import Corpus, PackedRolloutDataset, group_advantages
from torchtitan_magi.data.packs.prefix_trees import SHORTEST, paths_of
from torchtitan_magi.data.records.rollout_format import parse_rollouts
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer


def test_advantages_by_hand():
    np.testing.assert_allclose(group_advantages([1, 0, 0, 1], scale=False), [0.5, -0.5, -0.5, 0.5])
    deviation = (1 / 3) ** 0.5
    np.testing.assert_allclose(group_advantages([1, 0, 0, 1])[0], 0.5 / (deviation + 1e-4))
    assert group_advantages([3.0]).tolist() == [0.0]
    assert group_advantages([2.0] * 3).tolist() == [0.0] * 3


@functools.cache
def chat():
    return load_chat_tokenizer(corpus() / "tokenizer")


def packed(records, seq_len, **options):
    given = Corpus.of_records("rollouts", records, parse_rollouts)
    return PackedRolloutDataset(given, chat(), seq_len, epochs=1, **options)


def answers_of(item):
    """(record, tokens, labels, behaviour, advantage, positions) of each answer of a pack, whole."""
    inputs, labels = item
    documents = inputs["documents"]
    paths = paths_of(documents[:, 2].tolist(), documents[:, 0].tolist())
    for number, path in enumerate(paths):
        length = documents[number, 2] + documents[number, 1] - documents[number, 0]
        ends = [*(first for first, _ in path[1:]), length]
        where = np.concatenate(
            [np.arange(place, place + end - first) for (first, place), end in zip(path, ends, strict=True)]
        )
        columns = (x[where].numpy() for x in (inputs["input"], labels, inputs["behaviour"], inputs["positions"]))
        yield int(inputs["records"][number]), float(inputs["advantages"][number]), *columns


ANSWERS = st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300), ANSWERS), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_every_answer_is_there_once_with_what_it_has_alone(groups, dp_world_size, seed):
    rng = np.random.default_rng(seed)
    common = rng.integers(1, 50, size=(3, 2 * SHORTEST)).tolist()
    records, wanted = [], []
    for kind, own, answers in groups:
        prompt = common[kind] + rng.integers(1, 50, size=own).tolist()
        completions = []
        for size, is_masked in answers:
            ids, logprobs = rng.integers(1, 50, size=size).tolist(), np.float32(-rng.random(size)).tolist()
            mask = [1, *rng.integers(0, 2, size=size - 1).tolist()] if is_masked else [1] * size
            advantage = float(np.float32(rng.normal()))
            completions.append({"completion_ids": ids, "logprobs": logprobs, "advantage": advantage})
            completions[-1] |= {"completion_mask": mask} if is_masked else {}
            tokens, learned = prompt + ids, np.array([0] * len(prompt) + mask)[1:] == 1
            whole = np.array([np.nan] * len(prompt) + logprobs)[1:]
            wanted.append((len(records), advantage, tokens[:-1], np.where(learned, tokens[1:], -100).tolist()))
            wanted[-1] += (np.where(learned, whole, np.nan).astype(np.float32).tolist(),)
        records.append({"prompt_ids": prompt, "completions": completions})
    found = []
    for rank in range(dp_world_size):
        for item in packed(records, 1024, dp_rank=rank, dp_world_size=dp_world_size):
            for record, advantage, tokens, labels, behaviour, positions in answers_of(item):
                found.append((record, advantage, tokens.tolist(), labels.tolist(), behaviour.tolist()))
                assert positions.tolist() == list(range(len(tokens)))
            shares_labels = torch.tensor([start < end for start, end, _ in item[0]["documents"].tolist()])
            assert shares_labels.all()  # each answer has tokens of its own

    def text(rows):
        return sorted(map(repr, rows))

    assert text(found) == text(wanted)


def test_prompts_are_computed_once():
    packs = list(PackedRolloutDataset(rollouts_file(), chat(), 2048, epochs=1))
    shared = sum(int(pack["documents"][:, 2].sum()) for pack, _ in packs)
    own = sum(int((pack["documents"][:, 1] - pack["documents"][:, 0]).sum()) for pack, _ in packs)
    assert shared > 1.5 * own


def test_rewards_are_compared_in_their_group_also_where_it_is_cut():
    rewards = [1.0, 0.0, 0.0, 3.0]
    answers = [{"completion_ids": [7 + i] * 90, "logprobs": [-1.0] * 90, "reward": r} for i, r in enumerate(rewards)]
    records = [{"prompt_ids": [5] * 150, "completions": answers}]
    for scale in (True, False):
        packs = list(packed(records, 256, scale_rewards=scale))
        assert len(packs) == 4  # an answer each
        found = {int(pack["input"][151]) - 7: float(pack["advantages"][0]) for pack, _ in packs}
        assert [found[i] for i in range(4)] == pytest.approx(group_advantages(rewards, scale).tolist())


def test_a_record_is_compared_with_its_checksum_once_for_all_its_answers(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "torchtitan_magi.data.tokens.token_block.zlib",
        SimpleNamespace(crc32=lambda data: compared.append(len(data)) or zlib.crc32(data)),
    )
    answers = [{"completion_ids": [7 + i], "logprobs": [-1.0], "advantage": 1} for i in range(50)]
    assert len(list(packed([{"prompt_ids": [5] * 150, "completions": answers}], 1024))) == 1
    assert compared == [50 * 151] * 3  # when it is made, packed and laid out


def test_a_long_answer_loses_its_end():
    answer = {"completion_ids": list(range(1, 201)), "logprobs": [-1.0] * 200, "advantage": 1.0}
    dataset = packed([{"prompt_ids": [5] * 10} | answer], 128)
    ((inputs, labels),) = dataset
    assert inputs["documents"].tolist() == [[0, 128, 0]]
    assert (labels != -100).sum() == 128 - 9
    assert dataset.counts.truncated == 1


def test_answers_whose_policy_is_not_known(tmp_path):
    answer = {"completion_ids": [1, 2], "advantage": 1.0}
    records = [{"prompt_ids": [5]} | answer]
    with pytest.raises(ValueError, match='has answers without "logprobs"; add those of the policy'):
        list(packed(records, 128))
    known = [*records, {"prompt_ids": [5], "logprobs": [-1.0, -1.0]} | answer]
    with pytest.raises(ValueError, match='without "logprobs"'):
        list(packed(known, 128))
    ((inputs, _),) = packed(known, 128, on_policy=True)
    assert inputs["behaviour"].isnan().all()


def test_logprobs_are_of_the_tokens_that_are_learned(tmp_path):
    records = [{"prompt": "q", "completion": "a b c", "advantage": 1.0, "logprobs": [-1.0]}]
    with pytest.raises(ValueError, match=r"rollouts\[0\]: completions\[0\] has 1 logprobs for \d+ tokens; give one"):
        list(packed(records, 128))
    with pytest.raises(ValueError, match=r"rollouts\[0\]: .*2 logprobs for 1 tokens"):
        list(packed([{"prompt_ids": [1], "completion_ids": [2], "advantage": 1, "logprobs": [-1, -1]}], 128))


def test_logprobs_that_no_sampled_token_has():
    record = {"prompt_ids": [1], "completion_ids": [2, 3], "advantage": 1, "logprobs": [-1, -9999.0]}
    with pytest.raises(ValueError, match=r"rollouts\[0\]: completions\[0\].logprobs has -9999, and no policy samples"):
        list(packed([record], 128))
    ((inputs, _),) = packed([record | {"completion_mask": [1, 0]}], 128)
    assert inputs["behaviour"][0] == -1
    assert inputs["behaviour"][1:].isnan().all()


@pytest.mark.parametrize("value", [{(1, 2): 3}, {"x": {}}], ids=["a key that is no text", "an object in itself"])
def test_records_that_are_no_json(value):
    if "x" in value:
        value["x"]["y"] = value
    with pytest.raises(ValueError, match=r"^rollouts cannot be written as JSON \(.*\); give plain values$"):
        packed([value | {"prompt_ids": [1], "completion_ids": [2], "advantage": 1}], 128)


def test_a_file_and_a_list_have_the_same_packs(tmp_path):
    answers = [{"completion": f"answer {i}", "reward": i} for i in range(4)]
    records = [{"prompt": f"question {i}", "completions": answers} for i in range(9)]
    write_jsonl(path := tmp_path / "rollouts.jsonl", records)
    options = {"epochs": 1, "on_policy": True}
    one, kept = (
        list(PackedRolloutDataset(path, chat(), 128, token_cache=c, **options)) for c in (None, tmp_path / "c")
    )
    for (inputs, labels), (same, as_labels), (third, _) in zip(
        one, packed(records, 128, on_policy=True), kept, strict=True
    ):
        assert (labels == as_labels).all()
        assert all((inputs[name] == same[name]).all() for name in ("input", "documents", "records", "advantages"))
        assert all((inputs[name] == third[name]).all() for name in ("input", "documents", "records", "advantages"))
