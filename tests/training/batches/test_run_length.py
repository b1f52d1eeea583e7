"""How many steps a run has: what is counted is what training iterates; the schedule, its words, and resumed runs."""

import json
import logging
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from support.corpus import chat_tokenizer, make_corpus
from support.streams import resume, take, with_small_blocks
from torch.optim.lr_scheduler import LambdaLR

from torchtitan_magi.data import PackedPairDataset, PackedSFTDataset, TokenizedDocument, TokenizedPairs
from torchtitan_magi.data.packs import prefix_trees, stream
from torchtitan_magi.training.batches.pack_loader import PackLoader
from torchtitan_magi.training.batches.run_length import DEFAULT_STEPS, DEFAULT_WARMUP, RunLength

blocks = with_small_blocks(400)
SEQ_LEN = 64


def learned(length):
    return TokenizedDocument(np.arange(length, dtype=np.int32), np.ones(length, dtype=bool))


def tokenize(record):
    """The text is the number of tokens."""
    return learned(int(record["text"]))


def tokenize_pair(record):
    _, rejected = record["answers"]
    return TokenizedPairs(np.arange(7, dtype=np.int32), (learned(5), learned(int(rejected[0]["content"]))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"text": f"{3 + 11 * number % 90}"}) for number in range(150)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "other.jsonl").write_text("\n".join(lines[:60]))
    (folder / "bad.jsonl").write_text("\n".join([*lines[:9], '{"text": ', *lines[9:90]]))
    pairs = [{"prompt": "p", "chosen": "c", "rejected": f"{3 + 7 * number % 40}"} for number in range(90)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def loader_of(folder, names="train.jsonl", ranks=1, batch=1, per_step=1, **options):
    paths = ", ".join(f"{folder}/{name}" for name in names.split())
    kind, tokens = (PackedPairDataset, tokenize_pair) if "pairs" in names else (PackedSFTDataset, tokenize)
    packs = kind(
        paths, tokens, **{"seq_len": SEQ_LEN, "dp_world_size": ranks, "window_blocks": 2, "epochs": 2} | options
    )
    return PackLoader(packs, batch, per_step)


def sections(steps=DEFAULT_STEPS, warmup=2, total_steps=None):
    scheduler = SimpleNamespace(warmup_steps=warmup, total_steps=total_steps)
    return SimpleNamespace(training=SimpleNamespace(steps=steps), lr_scheduler=scheduler)


def begun(loader, epochs=2, continues=False, **options):
    """The sections, and the loader with its length."""
    found = sections(**options)
    loader.run_length = RunLength(found, epochs, loader)
    loader.run_length.begin(continues)
    return found, loader


def schedulers(steps):
    """A container as torchtitan's: the factor of a step is its fraction of the run."""
    return build([torch.optim.SGD([torch.zeros(1)], lr=2.0)], steps)


def build(optimizers, steps):
    return [LambdaLR(optimizer, lambda step: step / steps) for optimizer in optimizers]


CASES = {
    "unshuffled": {"shuffle": False},
    "ranks and batches": {"ranks": 3, "batch": 2, "per_step": 2},
    "split": {"long_documents": "split", "ranks": 2},
    "weights": {"names": "train.jsonl=0.7 other.jsonl=1.5", "epochs": 3, "ranks": 2},
    "pairs": {"names": "pairs.jsonl", "batch": 3, "epochs": 4},
    "bad records": {"names": "bad.jsonl", "bad_records": "skip", "epochs": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_that_are_iterated(folder, name):
    """From the beginning, and from states of a run with other batches. Epochs count the packs that were given out."""
    case = {"epochs": 2} | CASES[name]
    found, loader = begun(loader_of(folder, **case), case["epochs"])
    number_of_batches = 0
    states = []
    for number_of_batches, _ in enumerate(loader, 1):  # noqa: B007
        states.append(loader.state_dict())
    assert number_of_batches == found.training.steps * loader.batches_per_step > 20
    assert states[-1]["exhausted"]
    assert json.loads(states[0]["state"])["schedule"] == {"steps": found.training.steps, "warmup": 2}
    assert loader.run_length.epoch_at(found.training.steps) == case["epochs"]
    for step in (1, found.training.steps // 2, found.training.steps - 1):
        other, rest = begun(loader_of(folder, **case | {"batch": 4, "per_step": 1}), case["epochs"])
        resume(rest, states[step * loader.batches_per_step - 1])
        rest.run_length.resume(step, schedulers(9), build)
        assert rest.run_length.epoch_at(step) == loader.run_length.epoch_at(step) > 0
        assert rest.run_length.epoch_at(other.training.steps) == case["epochs"]
        assert other.training.steps == step + len(list(rest))


def test_counting_makes_the_plans_that_training_uses(tmp_path, monkeypatch):
    """And the tokens, of all ranks."""
    corpus = make_corpus(tmp_path)
    options = {"epochs": 2, "window_blocks": 2, "token_cache": tmp_path / "tokens"}
    monkeypatch.setattr("torchtitan_magi.data.records.record_file.BLOCK_BYTES", 20_000)
    packs = PackedSFTDataset(corpus / "validation.jsonl", chat_tokenizer(corpus), 512, **options)
    assert not packs.has_tokens
    found, loader = begun(PackLoader(packs, 2))
    assert packs.has_tokens
    monkeypatch.setattr(stream, "plan_window", None)
    assert len(list(loader)) == found.training.steps > 4


def test_lower_steps_end_the_run_and_only_their_packs_are_counted(folder, caplog):
    caplog.set_level(logging.INFO)
    steps = begun(loader_of(folder))[0].training.steps
    assert begun(loader_of(folder), steps=steps - 1)[0].training.steps == steps - 1
    assert begun(loader_of(folder), steps=steps + 1)[0].training.steps == steps
    assert begun(loader_of(folder, epochs=10**9), 10**9, steps=3)[0].training.steps == 3
    said = [record.message for record in caplog.records if record.message.startswith("The data are ")]
    packs = said[0].split()[3]
    assert said[0] == (
        f"The data are {packs} packs and {packs} steps per epoch; {steps} steps are 2 epochs: as magi.epochs says, "
        "with training.steps left at 10,000"
    )
    assert said[1].endswith("epochs: training.steps ends the run, within magi.epochs = 2")
    assert said[2].endswith(f" are 2 epochs: magi.epochs = 2 ends the run before training.steps = {steps + 1}")
    assert re.fullmatch(
        r"The data are about \d+ packs and .* 3 steps are about 0.0\d+ epochs: training.steps ends the run, within "
        r"magi.epochs = 1000000000",
        said[3],
    )


def test_a_record_that_is_found_bad_while_counting_ends_the_run(folder):
    with pytest.raises(ValueError, match=r"bad.jsonl:10: not JSON"):
        begun(loader_of(folder, names="bad.jsonl", check=False))


@pytest.mark.parametrize(
    ("options", "warmup", "said"),
    [
        ({"steps": 150, "warmup": DEFAULT_WARMUP}, 30, "Warm-up takes 30 steps, a fifth of the run: lr_scheduler"),
        ({"steps": 200, "warmup": DEFAULT_WARMUP}, 40, "Warm-up takes 40 steps, a fifth of the run"),
        ({"steps": 201, "warmup": DEFAULT_WARMUP}, 200, ""),
        ({"steps": 150, "warmup": DEFAULT_WARMUP, "total_steps": 1000}, 200, ""),
        ({"steps": 150, "warmup": 149}, 149, ""),
        ({"steps": 150, "warmup": 150}, 150, "lr_scheduler.warmup_steps is 150, but the learning rate follows 150 st"),
    ],
)
def test_warm_up_ends_before_the_run(folder, caplog, options, warmup, said):
    caplog.set_level(logging.INFO)
    found, loader = begun(loader_of(folder, epochs=-1), -1, **options)
    assert found.lr_scheduler.warmup_steps == warmup
    assert found.training.steps == options["steps"]
    assert loader.schedule == {"steps": options.get("total_steps") or options["steps"], "warmup": warmup}
    assert said in caplog.text
    assert ("arm-up" in caplog.text) == bool(said)


def test_a_learning_rate_that_is_planned_for_fewer_steps_is_named(folder):
    """Behind them torchtitan's is negative."""
    begun(loader_of(folder), total_steps=1000)
    with pytest.raises(
        ValueError, match=r"total_steps is 7, but the run has \d+ steps; use at least as many, or leave"
    ):
        begun(loader_of(folder), total_steps=7)


def test_a_resumed_run_fits_if_what_is_left_of_it_does(folder):
    """Late in the data with fewer packs per step: it would have more steps from the beginning."""
    found, loader = begun(loader_of(folder, batch=4))
    planned, late = found.training.steps + 3, found.training.steps - 1
    take(batches := iter(loader), late)
    batches.close()

    def resumed(total):
        rest, more = begun(resume(loader_of(folder), loader.state_dict()), continues=True, total_steps=total)
        assert rest.training.steps > total
        more.run_length.resume(late, schedulers(9), build)
        return rest.training.steps

    assert late < resumed(planned) <= planned
    with pytest.raises(ValueError, match=f"total_steps is {late}, but the run has"):
        resumed(late)


def test_a_run_without_epochs_says_how_many_it_has(folder, caplog, monkeypatch):
    """Exactly where tokens are there, else about when the first batch is; and it warns of many."""
    caplog.set_level(logging.INFO)
    packs = len(list(loader_of(folder, epochs=1)))
    options = {"epochs": -1, "batch": 4}
    _, loader = begun(loader_of(folder, **options), -1, steps=20)
    assert "The data are" not in caplog.text
    take(loader, 1)
    (about,) = re.findall(
        r"The data are about (\d+) packs and [\d.]+ steps per epoch; 20 steps are about ", caplog.text
    )
    assert int(about) == pytest.approx(packs, rel=0.15)
    monkeypatch.setattr(PackedSFTDataset, "has_tokens", True)
    for steps, level, end in ((20, "INFO", ""), (1000, "WARNING", ": set magi.epochs for fewer")):
        caplog.clear()
        begun(loader_of(folder, **options), -1, steps=steps)
        (record,) = [record for record in caplog.records if record.message.startswith("The data are")]
        epochs = f"{4 * steps / packs:.3g} epochs"
        assert record.message == (
            f"The data are {packs} packs and {packs / 4:.3g} steps per epoch; {steps:,} steps are {epochs}{end}"
        )
        assert record.levelname == level


def test_one_pack_is_many_epochs(tmp_path, caplog, monkeypatch):
    (tmp_path / "one.jsonl").write_text('{"text": "50"}\n')
    monkeypatch.setattr(PackedSFTDataset, "has_tokens", True)
    begun(loader_of(tmp_path, names="one.jsonl", epochs=-1, ranks=4), -1, steps=1000)
    assert "The data are 1 pack and 0.25 steps per epoch; 1,000 steps are 4,000 epochs: set magi.ep" in caplog.text


def test_a_resumed_run_says_that_its_schedule_is_another_and_follows_it(folder, caplog):
    caplog.set_level(logging.INFO)
    _, loader = begun(loader_of(folder, epochs=-1), -1, steps=20)
    batches = iter(loader)
    take(batches, 5)
    state = loader.state_dict()

    def resumed(state, **options):
        caplog.clear()
        _, rest = begun(loader_of(folder, epochs=-1), -1, **options)
        resume(rest, state)
        before = schedulers(20)
        for _ in range(5):
            before[0].optimizer.step()
            before[0].step()
        rest.run_length.resume(5, before, build)
        return before[0].optimizer.param_groups[0]["lr"], before[0]

    lr, _ = resumed(state, steps=20)
    assert lr == 2.0 * 5 / 20
    assert "learning rate follows" not in caplog.text
    lr, scheduler = resumed(state, steps=40, warmup=3)
    assert lr == 2.0 * 5 / 40
    assert scheduler.get_last_lr() == [lr]
    scheduler.step()
    assert scheduler.get_last_lr() == [2.0 * 6 / 40]
    assert "From step 6 on the learning rate follows 40 steps with 3 of warm-up, before it foll" in caplog.text
    assert "it followed 20 steps with 2 of warm-up; set training.steps and lr_scheduler.warmup_steps to " in caplog.text

    older = {"state": json.dumps({k: v for k, v in json.loads(state["state"]).items() if k != "schedule"})}
    lr, _ = resumed(older, steps=40)
    assert lr == 2.0 * 5 / 20  # as its optimizer has it
    assert "learning rate follows" not in caplog.text


def test_what_common_beginnings_save_is_said(tmp_path, caplog):
    """Twelve records of 40 positions, 30 of them common to six; a pack has 64."""

    def branches(record):
        number = int(record["text"])
        tokens = np.arange(41, dtype=np.int32) + 1000 * (number % 2)
        tokens[31:] += 100 * number
        return TokenizedDocument(tokens, np.ones(41, dtype=bool))

    def said(tokenizer, **options):
        packs = PackedSFTDataset(path, tokenizer, 90, window_blocks=9, **options)
        caplog.clear()
        _, loader = begun(PackLoader(packs, 1, 1), steps=20, epochs=options.get("epochs", -1))
        take(loader, 1)
        return [line for line in caplog.messages if line.startswith("magi.share_prefixes: ")]

    path = tmp_path / "train.jsonl"
    path.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(12)))
    caplog.set_level(logging.INFO)
    with mock.patch.object(prefix_trees, "SHORTEST", 16):
        for options in ({"epochs": 1}, {}):
            assert said(branches, share_prefixes=True, **options) == [
                "magi.share_prefixes: 180 tokens in place of 480 in 12 records; a step takes about 6 records in place "
                "of 2.25, an epoch about 2 steps in place of 5.33, and training.steps and the learning rate count such "
                "steps"
            ]
            assert not said(branches, **options)
        assert said(lambda record: learned(5 + int(record["text"])), share_prefixes=True) == [
            "magi.share_prefixes: no two of 12 records that are packed together begin with the same tokens"
        ]
