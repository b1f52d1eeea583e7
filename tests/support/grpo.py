"""The policy gradient as TRL's GRPOTrainer computes it: of numbers, and as the training of a model of transformers."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.hf_loop import STEPS, Training, document, optimizer_of, records, step
from support.hf_models import load_hf
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from torchtitan_magi.data import group_advantages

LOW, HIGH = 0.2, 0.28


def grpo_loss(
    policy: Tensor,
    behaviour: Tensor | None,
    reference: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    normalization: str,
    beta: float = 0.0,
    max_length: int = 0,
) -> Tensor:
    """TRL's loss of log-probabilities [answers, length] and advantages [answers]. mask: which tokens there are."""
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="the reference")
    trainer = grpo_trainer.GRPOTrainer.__new__(grpo_trainer.GRPOTrainer)
    trainer.__dict__ |= {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (policy, torch.zeros_like(policy), None),
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "importance_sampling_level": "token",
        "beta": beta, "loss_type": normalization, "epsilon_low": LOW, "epsilon_high": HIGH, "use_vllm": False,
        "max_completion_length": max_length, "current_gradient_accumulation_steps": 1, "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False, "tools": None,
    }  # fmt: skip
    inputs: dict[str, Any] = {"prompt_ids": torch.zeros(len(mask), 1), "prompt_mask": torch.ones(len(mask), 1)}
    inputs |= {"completion_ids": mask.long(), "completion_mask": mask.long(), "advantages": advantages}
    inputs |= {"ref_per_token_logps": reference, "num_items_in_batch": mask.sum()}
    if behaviour is not None:
        inputs["old_per_token_logps"] = behaviour
    return trainer._compute_loss(trainer.model, inputs)


def train_grpo(
    folder: Path, path: Path, normalization: str = "dapo", beta: float = 0.0, max_length: int = 0, behaves: bool = True
) -> Training:
    """A step on all rollouts of a file, each answer by itself, STEPS times. behaves: whether their policy is known."""
    tokenizer, model, first = AutoTokenizer.from_pretrained(folder), load_hf(folder), load_hf(folder)
    answers, advantages, behaviour = [], [], []
    for record in records(path):
        those = record["completions"]
        values = torch.tensor(
            [answer["advantage"] for answer in those]
            if "advantage" in those[0]
            else group_advantages([answer["reward"] for answer in those], normalization != "dr_grpo")
        ).float()
        advantages.append(values)
        for answer in those:
            messages = [*record["prompt"], {"role": "assistant", "content": answer["completion"]}]
            answers.append(document(tokenizer, {"messages": messages}, 10**6))
            behaviour.append(torch.tensor(answer["logprobs"]) if behaves else torch.zeros(0))
    optimizer, schedule = optimizer_of(model)
    training = Training(model)
    for _ in range(STEPS):
        found, refs = [], []
        for tokens, learned in answers:
            found.append(_logprobs(model, tokens, learned))
            with torch.no_grad():
                refs.append(_logprobs(first, tokens, learned))
        policy = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
        mask = torch.arange(policy.shape[1]) < torch.tensor([len(one) for one in found])[:, None]
        padded = [torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (behaviour, refs)]
        loss = grpo_loss(
            policy, padded[0] if behaves else None, padded[1], torch.cat(advantages), mask, normalization, beta,
            max_length,
        )  # fmt: skip
        loss.backward()
        training.losses.append(loss.item())
        training.metrics.append({"grad_norm": step(model, optimizer, schedule)})
    return training


def _logprobs(model: torch.nn.Module, tokens: list[int], learned: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0]
    of_labels = functional.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    return of_labels[torch.tensor(learned[1:]) == 1]
