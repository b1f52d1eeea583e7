#!/usr/bin/env python3
"""Reinforcement learning with any sampler: transformers samples answers on the CPU, a rule rewards them, we train.

    torchrun --nproc-per-node 2 examples/rl_loop.py --job.config_file examples/rl_loop.toml \\
        --parallelism.context_parallel_degree 2 [--SECTION.OPTION VALUE ...]

Rank 0 samples answers to a few questions with the weights of the last step, and keeps their log-probabilities. The rule
asks for short sentences: the reward is the share of an answer's characters that are full stops or blanks. A step trains
on all answers at once, each prompt computed once, over all ranks.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from torchtitan_magi import open_trainer

ANSWERS, NEW_TOKENS = 8, 32
QUESTIONS = ("What is the sea?", "Who was Ada Lovelace?", "Why is the sky blue?", "How does bread rise?")


class Sampler:
    """A model of transformers that samples answers."""

    def __init__(self, folder: str) -> None:
        self.tokenizer, self.model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        end = self.model.generation_config.eos_token_id  # one or several
        self.ends = torch.tensor(self.tokenizer.eos_token_id if end is None else end).flatten()

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Takes the trainer's weights, whose names are those in files: transformers may have other ones in memory."""
        whole = {name: tensor.to("cpu", copy=True) for name, tensor in weights}
        self.model = type(self.model).from_pretrained(None, config=self.model.config, state_dict=whole)

    @torch.no_grad()
    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """A record for each question, see docs/how-to/rollouts.md; a run that goes on samples as it would have."""
        torch.manual_seed(step)
        return [self.answered(question) for question in QUESTIONS]

    def answered(self, question: str) -> dict[str, Any]:
        chat = [{"role": "user", "content": question}]
        prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        found = self.model.generate(
            torch.tensor([prompt] * ANSWERS), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=NEW_TOKENS, output_logits=True, return_dict_in_generate=True,
            eos_token_id=self.ends.tolist(), pad_token_id=int(self.ends[0]),
        )  # fmt: skip
        logprobs = torch.stack(found.logits, 1).log_softmax(-1)
        completions = []
        for tokens, of_vocabulary in zip(found.sequences[:, len(prompt) :], logprobs, strict=True):
            ends = torch.isin(tokens, self.ends).nonzero().flatten().tolist()
            ids = tokens[: ends[0] + 1 if ends else None]
            chosen = of_vocabulary[: len(ids)].gather(1, ids[:, None])[:, 0]
            reward = rule(self.tokenizer.decode(ids, skip_special_tokens=True))
            completions.append({"completion_ids": ids.tolist(), "logprobs": chosen.tolist(), "reward": reward})
        return {"prompt_ids": list(prompt), "completions": completions}


def rule(answer: str) -> float:
    """The share of its characters that are full stops or blanks."""
    return sum(letter in ". \n" for letter in answer) / max(1, len(answer))


def main() -> None:
    disable_progress_bar()
    with open_trainer(sys.argv[1:]) as trainer:
        sampler = Sampler(trainer.folder) if trainer.is_first_rank else None
        while trainer.step < trainer.num_steps:
            weights = trainer.weights()
            if sampler is None:
                for _ in weights:  # all ranks gather them
                    pass
                trainer.train_step(None)
                continue
            sampler.load(weights)
            rollouts = sampler.rollouts(trainer.step)
            rewards = [answer["reward"] for record in rollouts for answer in record["completions"]]
            metrics = trainer.train_step(rollouts)
            print(
                f"step {trainer.step}: reward {sum(rewards) / len(rewards):.4f}, "
                f"loss {metrics['loss_metrics/global_avg_loss']:.5f}, ratio {metrics['policy/ratio']:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
