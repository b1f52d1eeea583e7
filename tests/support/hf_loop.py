"""Training by transformers and TRL, to compare with: every document alone, in one process.

Tokens and labels come from transformers' tokenizer and chat template, the steps of DPO from TRL's DPOTrainer. Of the
package they take only which records make a step. The optimizer and its schedule are torchtitan's defaults, said again.
"""

import functools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from support.corpus import text
from support.hf_models import load_hf
from support.jsonl import write_jsonl
from support.preference import flat, scored
from support.runs import new_folder
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer

from torchtitan_magi.data import PackedPairDataset, PackedSFTDataset
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer

STEPS = 5
PACKS = 2  # per step, over all data-parallel ranks
SEQ_LEN = 256
LEARNING_RATE = 3e-3
EPS = 1e-5  # with the usual 1e-8 a gradient that is 0 but for rounding moves its weight by much of the learning rate
FACTORS = (1 / 2, 1, 1, 2 / 3, 1 / 3, 0)  # of the learning rate by step: two of warm-up, then down to 0 after the last
# What the package is told to train in the same way.
ARGUMENTS = ["--training.steps", str(STEPS), "--training.global_batch_size", str(PACKS)]
ARGUMENTS += ["--training.seq_len", str(SEQ_LEN), "--training.mixed_precision_param", "float32"]
ARGUMENTS += ["--optimizer.lr", str(LEARNING_RATE), "--optimizer.eps", str(EPS), "--lr_scheduler.warmup_steps", "2"]

PAIRS_PER_PACK = 2
PAIR_SEQ_LEN = {True: SEQ_LEN, False: 352}  # with the prompt shared or not: two pairs fit, three do not

SMOOTHING = 0.2
# TRL has no smoothed sigmoid loss. With l of a margin m, its "robust" is ((1 - e) l(m) - e l(-m)) / (1 - 2 e); so
# (1 - e) l(m) + e l(-m) is 2 (1 - e) "sigmoid" - (1 - 2 e) "robust".
SMOOTHED = {"loss_type": ["sigmoid", "robust"], "loss_weights": [2 * (1 - SMOOTHING), 2 * SMOOTHING - 1]}
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {  # what the package is told, and TRL
    "sigmoid": ("", {}),
    "hinge": ("--magi.dpo.loss hinge", {"loss_type": "hinge"}),
    "ipo": ("--magi.dpo.loss ipo", {"loss_type": "ipo"}),
    "smoothed": (f"--magi.dpo.label_smoothing {SMOOTHING}", SMOOTHED | {"label_smoothing": SMOOTHING}),
}


@dataclass
class Training:
    """The trained model, and by step the loss and what else TRL logs."""

    model: torch.nn.Module
    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)


Document = tuple[list[int], list[int]]  # tokens, and 1 for those to be predicted


def optimizer_of(model: torch.nn.Module) -> tuple[AdamW, LambdaLR]:
    """The optimizer and the schedule of its learning rate."""
    optimizer = AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)
    return optimizer, LambdaLR(optimizer, FACTORS.__getitem__)


def step(model: torch.nn.Module, optimizer: AdamW, schedule: LambdaLR) -> float:
    """A step with clipped gradients; their norm before that."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    return norm.item()


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(packs: Iterator) -> Iterator[list]:
    """What the package's packs hold, by step."""
    for _ in range(STEPS):
        yield list(islice(packs, PACKS))


# -------------------------------------------------------------------------------------------------------------- SFT


def document(tokenizer, record: dict, seq_len: int) -> Document:
    """A record as transformers sees it, cut to a pack's length."""
    if "text" in record:
        tokens = tokenizer.encode(record["text"], add_special_tokens=False)
        tokens = [tokenizer.bos_token_id, *tokens, tokenizer.eos_token_id]
        mask = [1] * len(tokens)
    else:
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        chat = tokenizer.apply_chat_template(record["messages"], **options)
        tokens, mask = chat["input_ids"], chat["assistant_masks"]
    return tokens[: seq_len + 1], mask[: seq_len + 1]


def summed_loss(model: torch.nn.Module, tokens: list[int], mask: list[int]) -> torch.Tensor:
    """Cross-entropy summed over a document's labels."""
    logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0]
    labels = torch.tensor(tokens).masked_fill(torch.tensor(mask) == 0, -100)[1:]
    return functional.cross_entropy(logits, labels, reduction="sum")


def train_sft(folder: Path, path: Path, per: str = "token", seq_len: int = SEQ_LEN, **options: Any) -> Training:
    """The loss: cross-entropy summed over all labels / number of labels, or the mean over documents of their means.

    options: of the packs, which say which records make a step.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load_hf(folder)
    documents = [document(tokenizer, record, seq_len) for record in records(path)]
    optimizer, schedule = optimizer_of(model)
    training = Training(model)
    for packs in steps_of(
        iter(PackedSFTDataset(path, load_chat_tokenizer(folder), seq_len, packs_per_step=PACKS, **options))
    ):
        chosen = [documents[record] for pack, _ in packs for record in pack["records"]]
        num_labels = sum(sum(mask[1:]) for _, mask in chosen)
        loss = 0.0
        for tokens, mask in chosen:
            divisor = num_labels if per == "token" else sum(mask[1:]) * len(chosen)
            part = summed_loss(model, tokens, mask) / divisor
            part.backward()
            loss += part.item()
        step(model, optimizer, schedule)
        training.losses.append(loss)
    return training


# -------------------------------------------------------------------------------------------------------------- DPO


def turn(rng: random.Random, role: str, low: int, high: int) -> list[dict]:
    """A message of ``low`` to ``high`` words."""
    return [{"role": role, "content": text(rng, rng.randint(low, high))}]


@functools.cache
def pairs_file() -> Path:
    """Preference pairs of which two fit a pack and three do not, so that every step has the same number."""
    rng, pairs = random.Random(3), []
    for _ in range(2 * STEPS * PACKS * PAIRS_PER_PACK):
        pairs.append({"prompt": turn(rng, "user", 18, 26), "chosen": turn(rng, "assistant", 28, 38)})
        pairs[-1]["rejected"] = turn(rng, "assistant", 24, 36)
    write_jsonl(path := Path(new_folder(), "pairs.jsonl"), pairs)
    return path


@functools.cache
def answers_file(num_answers: int) -> Path:
    """Prompts with so many answers, one of which fills more than half of a pack."""
    rng, words = random.Random(4), 120 // num_answers
    groups = []
    for _ in range(2 * STEPS * PACKS):
        prompt = turn(rng, "user", 18, 26)
        groups.append(scored(prompt, [turn(rng, "assistant", words - 4, words + 4) for _ in range(num_answers)]))
    write_jsonl(path := Path(new_folder(), "answers.jsonl"), groups)
    return path


def end_with_the_turn(folder: Path) -> None:
    """Takes the line feed after an assistant's turn from the chat template: for TRL it belongs to the completion, while
    the package's loss is on the text that the template marks."""
    template = AutoTokenizer.from_pretrained(folder).chat_template
    line_feed = "{{ '\\n' }}\n{%- endfor %}"
    assert line_feed in template
    (folder / "chat_template.jinja").write_text(template.replace(line_feed, "\n{%- endfor %}"))


def train_dpo(folder: Path, path: Path, loss: str, shared_prompt: bool) -> Training:
    """By TRL's trainer. loss: of LOSSES. shared_prompt: the package's option; its packs say which pairs make a step."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    seq_len = PAIR_SEQ_LEN[shared_prompt]
    dataset = PackedPairDataset(
        path, load_chat_tokenizer(folder).pair, seq_len, shared_prompt=shared_prompt, packs_per_step=PACKS
    )
    steps = [
        [place for pack, _ in packs for place in zip(pack["pair_ids"], pack["pair_numbers"], strict=True)]
        for packs in steps_of(iter(dataset))
    ]
    (pairs_per_step,) = {len(places) for places in steps}
    pairs = [flat(record) for record in records(path)]
    training = Training(load_hf(folder))

    class Trainer(DPOTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            training.losses.append(loss.item())
            return loss

        def log(self, logs, *args):
            super().log(logs, *args)
            if "rewards/chosen" in logs:  # not in the summary at the end
                training.metrics.append(logs)

    options = DPOConfig(
        output_dir=f"{folder}/trl",
        max_steps=STEPS,
        per_device_train_batch_size=pairs_per_step,
        train_sampling_strategy="sequential",
        max_grad_norm=1.0,
        router_aux_loss_coef=0.0,  # else TRL adds the configuration's 0.001 times a loss that balances experts
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **LOSSES[loss][1],
    )
    Trainer(
        training.model,
        load_hf(folder),
        options,
        train_dataset=Dataset.from_list([pairs[record][number] for places in steps for record, number in places]),
        processing_class=AutoTokenizer.from_pretrained(folder),
        optimizers=optimizer_of(training.model),
    ).train()
    return training
