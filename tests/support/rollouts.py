"""Rollouts: prompts with answers, advantages or rewards, and the log-probabilities of the policy that sampled them."""

import functools
import random
from pathlib import Path

from support.corpus import text
from support.jsonl import write_jsonl
from support.runs import corpus, new_folder

from torchtitan_magi.data.records.rollout_format import parse_rollouts
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer

NUM_PROMPTS, NUM_ANSWERS = 5, 4


def sampled_tokens(record):
    """The number of learned tokens of each answer, by the demo's tokenizer."""
    unknown = [answer | {"logprobs": None} for answer in record["completions"]]
    made = load_chat_tokenizer(corpus() / "tokenizer").rollouts([parse_rollouts(record | {"completions": unknown})])
    return [int(document.loss_mask.sum()) for document in made[0].documents]


@functools.cache
def rollouts_file(kind: str = "advantage", has_logprobs: bool = True) -> Path:
    """Prompts of some 200 tokens, each with answers. kind: "advantage" or "reward"."""
    rng, records = random.Random(11), []
    for _ in range(NUM_PROMPTS):
        prompt = [{"role": role, "content": text(rng, words)} for role, words in (("system", 90), ("user", 90))]
        answers = [{"completion": text(rng, rng.randint(3, 60)), kind: rng.gauss(0, 1)} for _ in range(NUM_ANSWERS)]
        record = {"prompt": prompt, "completions": answers}
        if has_logprobs:
            for answer, number in zip(answers, sampled_tokens(record), strict=True):
                answer["logprobs"] = [-abs(rng.gauss(7.6, 0.3)) for _ in range(number)]
        records.append(record)
    write_jsonl(path := Path(new_folder(), "rollouts.jsonl"), records)
    return path
