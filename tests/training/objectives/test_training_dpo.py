"""Preference training is the same under every layout, however pairs are laid out, and wherever the reference is from.

One step takes all pairs of a small data set, so that runs with other packs have the same losses and gradients.
"""

import functools
import json
import math
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.errors import run_ends
from support.faults import report_saved
from support.marks import marked_long
from support.preference import DPO_TOML, NUM_PAIRS, STEPS, answers_data, arguments, copy_of_data, write_pairs
from support.runs import TrainingError, new_folder, train, watch

from layouts import max_relative_difference  # isort: skip

METRICS = ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"]
METRICS += ["logps/chosen", "logps/rejected"]


@functools.cache
def seed_checkpoint():
    folder = new_folder()
    create = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint", "--job.dump_folder", folder]
    train(1, [*arguments({}), *create], toml=DPO_TOML, defaults=(), entry="torchtitan_magi.train")
    return f"{folder}/checkpoint/step-0"


def dpo(processes, options, *, load=True, setup=None, **kwargs):
    initial = ["--checkpoint.initial_load_path", seed_checkpoint()] if load else []
    options = [*options, "--checkpoint.enable", *initial]
    return train(processes, options, toml=DPO_TOML, defaults=(), entry="torchtitan_magi.train", setup=setup, **kwargs)


def report_pairs(report):
    """The log-probabilities of each pair in training."""
    from torchtitan_magi.training.objectives import dpo

    seen = []

    def report_losses(_, policy, reference, *args):
        if policy.requires_grad:
            report("pairs", seen[-1], policy.tolist(), reference.tolist())

    watch(dpo, "read_pairs", lambda batch, *_: seen.append(batch.pair_ids.tolist()))
    watch(dpo, "preference_losses", report_losses)


VARIANTS = {
    "cp1": ({}, {}, ""),
    "cp2": ({"cp": 2}, {}, ""),
    "cp4": ({"cp": 4}, {}, ""),
    "tp2": ({"tp": 2}, {}, ""),
    "dp2": ({"dp": 2}, {}, ""),
    "ddp2": ({"ddp": 2}, {}, ""),
    "dp2_cp2": ({"dp": 2, "cp": 2}, {}, ""),
    "one_pair_per_pack": ({}, {"seq_len": 128, "local_batch_size": 1, "global_batch_size": 8}, ""),
    "separate_documents": ({"cp": 2}, {}, "--magi.dpo.no-shared_prompt"),
    "reference_file": ({"dp": 2}, {}, "--magi.dpo.reference file"),
}


@functools.cache
def trained(name):
    degrees, batch, options = VARIANTS[name]
    options = [*arguments(degrees, **batch), *options.split(), "--checkpoint.load_only"]
    return dpo(math.prod(degrees.values()), options, setup=report_pairs)


def first_step(name):
    """(policy, reference) of each record in the first step: float [NUM_PAIRS, 2]; all ranks agree."""
    run, found = trained(name), {}
    for rank in range(len(run.events)):
        seen = set()
        for ids, policy, reference in run.of("pairs", rank):
            if seen & set(ids):
                break  # the second step
            seen |= set(ids)
            for record, *logprobs in zip(ids, policy, reference, strict=True):
                assert found.setdefault(record, logprobs) == logprobs
    assert sorted(found) == list(range(NUM_PAIRS))
    return np.array([found[record] for record in range(NUM_PAIRS)]).transpose(1, 0, 2)


LONG = {"cp4", "dp2", "ddp2"}


@pytest.mark.parametrize("name", marked_long(VARIANTS, LONG))
def test_the_first_loss_is_ln_2_and_the_policy_the_reference(name):
    assert trained(name).losses[0] == pytest.approx(math.log(2), abs=1e-6)
    policy, reference = first_step(name)
    if name == "reference_file":
        np.testing.assert_allclose(policy, reference, rtol=1e-6)
    else:
        assert (policy == reference).all()
    assert len(np.unique(policy)) == 2 * NUM_PAIRS


@pytest.mark.parametrize("name", marked_long([name for name in VARIANTS if name != "cp1"], LONG))
def test_it_is_the_training_of_one_process(name):
    ours, one = trained(name), trained("cp1")
    np.testing.assert_allclose(first_step(name)[0], first_step("cp1")[0], rtol=1e-5)
    differences = {
        "loss": max_relative_difference(ours.losses, one.losses),
        "grad_norm": max_relative_difference(ours.grad_norms, one.grad_norms),
        "validation": max_relative_difference(ours.validation_losses, one.validation_losses),
    }
    print(f"{name}: {differences}")
    assert max(differences.values()) <= 1e-4
    assert len(ours.losses) == STEPS
    assert len(ours.validation_losses) == 2


@pytest.mark.parametrize("name", ["cp2", "tp2", "dp2_cp2", "one_pair_per_pack"])
def test_its_metrics_are_those_of_one_process(name):
    ours, one = ([values for _, values in trained(n).of("metrics")] for n in (name, "cp1"))
    assert len(ours) == STEPS + 2
    for step, reference in zip(ours, one, strict=True):
        keys = [key for key in reference if "rewards/" in key or "logps/" in key]
        assert [key.removeprefix("validation_metrics/") for key in keys] == METRICS
        for key in keys:
            assert step[key] == pytest.approx(reference[key], rel=1e-4, abs=1e-5), key
        assert step.get("learned_tokens(%)") == reference.get("learned_tokens(%)")
    assert 0 < one[0]["learned_tokens(%)"] < 100
    assert one[0]["rewards/accuracies"] == 0  # a tie is no success
    if "dp" not in name:
        largest = [values["loss_metrics/global_max_loss"] for values in trained(name).metrics]
        assert largest == pytest.approx(trained(name).losses)


@pytest.mark.either
def test_accuracy_grows_on_a_toy_preference_set():
    run = dpo(1, [*arguments({}, steps=12), "--optimizer.lr", "2e-3", "--checkpoint.load_only"])
    accuracy = [values["rewards/accuracies"] for values in run.metrics]
    assert accuracy[0] == 0
    assert accuracy[-1] > 0.9
    held_out = [values for _, values in run.of("metrics") if "grad_norm" not in values]
    assert held_out[-1]["validation_metrics/rewards/accuracies"] > 0.9
    assert run.metrics[-1]["rewards/margins"] > run.metrics[1]["rewards/margins"]
    last = run.metrics[-1]
    assert f"rewards/chosen: {last['rewards/chosen']:.4f}" in run.output
    assert f"logps/chosen: {last['logps/chosen']:.4f}" in run.output


# -------------------------------------------------------------------------------------------- resume, reference file


def saved(run):
    return bool(run.of("saved"))


@pytest.mark.parametrize("reference", ["model", "file"])
def test_a_killed_run_continues(reference):
    folder = copy_of_data()
    options = [*arguments({}, folder=folder, steps=4), "--checkpoint.interval", "2", "--magi.dpo.reference", reference]
    options += ["--validation.no-enable"]
    whole = dpo(1, options)
    killed = new_folder()
    dpo(1, [*options, "--job.dump_folder", killed], setup=report_saved, until=saved)
    again = shutil.copytree(killed, f"{killed}/again")
    resumed = dpo(1, [*options, "--job.dump_folder", killed])
    assert resumed.losses == whole.losses[2:]
    assert resumed.grad_norms == whole.grad_norms[2:]
    other = ["--magi.dpo.reference", "model" if reference == "file" else "file"]
    refused = [(other, True, rf'reference is "{other[1]}", but .*step-2 is of a run with "{reference}"; set it')]
    refused.append((["--checkpoint.exclude_from_loading", "dataloader", *other], True, refused[0][2]))
    if reference == "file":
        (folder / "pairs.jsonl.reference.npz").unlink()
        refused.append(([], False, "does not exist, and a run resumed at step 2 cannot make it; put it back"))
    else:
        refused.append(([], False, r"checkpoint\.initial_load_path is None.* resumes at step 2 .* set it to"))
        trained = ["--checkpoint.initial_load_path", f"{again}/checkpoint/step-2"]
        message = r"step-2' has the weights \[.*\], but the reference of the run that resumes at step 2 has \[.*\]; set"
        refused.append((trained, False, message))
    for more, load, message in refused:
        with run_ends(message):
            dpo(1, [*options, *more, "--job.dump_folder", again], load=load)
    if reference == "model":
        as_of_an_earlier_version(Path(again, "checkpoint", "step-2"))
        older = dpo(1, [*options, "--job.dump_folder", again])
        assert older.losses == resumed.losses
        assert older.output.count("of an earlier version, which did not keep the fingerprint") == 1
        assert "of an earlier version" not in resumed.output


def as_of_an_earlier_version(checkpoint):
    """Takes the name of the reference's fingerprint out of the list of what a checkpoint holds."""
    path, name = checkpoint / ".metadata", "train_state.reference_weights"
    metadata = pickle.loads(path.read_bytes())
    del metadata.state_dict_metadata[name]
    path.write_bytes(pickle.dumps(metadata))
    (checkpoint / "SHA256SUMS").unlink()


def test_a_run_that_could_not_continue_says_so_when_it_starts():
    random = dpo(1, [*arguments({}, folder=copy_of_data(), steps=1), "--validation.no-enable"], load=False)
    assert "cannot be resumed" in random.output
    assert "cannot be resumed" not in trained("cp1").output


def count_forwards(report):
    from torchtitan_magi.training.objectives.logprob_model import LogprobModel

    watch(LogprobModel, "__call__", lambda *_, **options: report("forward"))


def test_the_reference_file_is_made_once_and_only_for_its_model_and_data():
    folder = copy_of_data()
    options = [*arguments({}, folder=folder, steps=1), "--checkpoint.load_only", "--magi.dpo.reference", "file"]
    options += ["--validation.no-enable"]
    first, second = (dpo(1, options, setup=count_forwards) for _ in range(2))
    assert (len(first.of("forward")), len(second.of("forward"))) == (1 + 1, 1)
    assert second.losses == first.losses
    table = np.load(folder / "pairs.jsonl.reference.npz")["logprobs"]
    np.testing.assert_allclose(table, first_step("cp1")[1], rtol=1e-5)

    validation = ["--validation.enable", "--validation.dataset_path", str(folder / "pairs.jsonl")]
    validation += ["--validation.dataset", "dpo", "--validation.seq_len", "256", "--validation.steps", "1"]
    dpo(1, [*options[:-1], *validation])  # which has a file of its own, as its packs are others
    (folder / "pairs.jsonl.validation.reference.npz").write_bytes(b"")
    with pytest.raises(TrainingError, match=r"validation\.reference\.npz is damaged .*delete the file"):
        dpo(1, [*options[:-1], *validation])
    with pytest.raises(TrainingError, match=r"was made with the model \[.*\], this run has \[.*delete the file"):
        dpo(1, [*options, "--debug.seed", "1"], load=False)
    own = ["--debug.seed", "1", "--magi.dpo.reference_path", f"{folder}/own/second.npz"]
    dpo(1, [*options[:-1], *validation, *own], load=False)  # another model on the same pairs
    assert sorted(path.name for path in (folder / "own").iterdir()) == ["second.npz", "second.validation.npz"]
    write_pairs(folder / "pairs.jsonl", NUM_PAIRS, seed=2)
    with run_ends(r"was made with the data \[.*\], this run has \[.*delete the file"):
        dpo(1, options)


# ------------------------------------------------------------------------------------------ several answers to a prompt

PACKS = {"whole": 6, "flat": 13, "separate": 20}  # of all pairs


@functools.cache
def trained_on_answers(packs, *options, **degrees):
    """A step takes all pairs, by prompts with several answers ("separate": prompts not shared) or a record each."""
    folder = copy_of_data(answers_data()[packs == "flat"])
    size = PACKS[packs]
    batch = {"local_batch_size": 2 - size % 2, "global_batch_size": size}
    options = [*arguments(degrees, folder=folder, **batch), *options, "--checkpoint.load_only"]
    options += ["--magi.dpo.no-shared_prompt"] if packs == "separate" else []
    return dpo(math.prod(degrees.values()), options)


FILE = ("--magi.dpo.reference", "file")


@pytest.mark.either
@pytest.mark.parametrize(
    ("packs", "options", "degrees"),
    [
        ("whole", (), {}),
        pytest.param("whole", FILE, {"cp": 2}, marks=pytest.mark.long),
        pytest.param("whole", (), {"dp": 2}, marks=pytest.mark.long),
        ("whole", FILE, {"dp": 2, "cp": 2}),
        ("separate", (), {"cp": 2}),
        pytest.param("whole", ("--magi.dpo.loss", "ipo"), {"cp": 2}, marks=pytest.mark.long),
    ],
)
def test_several_answers_train_as_a_record_for_each_pair(packs, options, degrees):
    """In the first step to the last digit of float32; then training enlarges rounding."""
    flat = trained_on_answers("flat", *(options if "file" not in options else ()))
    run = trained_on_answers(packs, *options, **degrees)
    differences = {
        "first": max_relative_difference([run.losses[0], run.grad_norms[0]], [flat.losses[0], flat.grad_norms[0]]),
        "loss": max_relative_difference(run.losses, flat.losses),
        "grad_norm": max_relative_difference(run.grad_norms, flat.grad_norms),
        "validation": max_relative_difference(run.validation_losses, flat.validation_losses),
    }
    print(f"{packs} {options} {degrees}: {differences}")
    assert differences.pop("first") <= 1e-6
    assert max(differences.values()) <= 1e-4
    for step, (ours, expected) in enumerate(zip(run.metrics, flat.metrics, strict=True)):
        for key in METRICS:
            if step or key != "rewards/accuracies":  # at first all margins are 0 but for rounding
                assert ours[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key


@pytest.mark.either
@pytest.mark.parametrize("reference", marked_long(["model", "file"], ["file"]))
def test_a_killed_run_on_several_answers_continues(reference):
    folder = copy_of_data(answers_data()[0])
    options = [*arguments({}, folder=folder, steps=4), "--checkpoint.interval", "2", "--magi.dpo.reference", reference]
    options += ["--validation.no-enable"]
    whole = dpo(1, options)
    killed = new_folder()
    dpo(1, [*options, "--job.dump_folder", killed], setup=report_saved, until=saved)
    resumed = dpo(1, [*options, "--job.dump_folder", killed])
    assert resumed.losses == whole.losses[2:]
    assert resumed.grad_norms == whole.grad_norms[2:]


@pytest.mark.either
def test_the_reference_file_of_several_answers_has_a_column_for_each_pair():
    """Whoever reads the pairs; those of a record in their order, and zeros behind the last."""
    tables = []
    for degrees in ({}, {"dp": 2}):
        folder = copy_of_data(answers_data()[0])
        options = arguments(degrees, folder=folder, global_batch_size=PACKS["whole"], steps=1)
        options += ["--validation.no-enable", "--checkpoint.load_only", *FILE]
        dpo(math.prod(degrees.values()), options)
        tables.append(np.load(folder / "pairs.jsonl.reference.npz")["logprobs"])
    table, other = tables
    lines = (answers_data()[0] / "pairs.jsonl").read_text().splitlines()
    numbers = [len(json.loads(line)["completions"]) - 1 for line in lines]
    assert table.shape == (len(numbers), 2 * max(numbers))
    np.testing.assert_allclose(other, table, rtol=1e-6)
    for row, count in zip(table, numbers, strict=True):
        assert (row[: 2 * count] < 0).all()
        assert not row[2 * count :].any()
        np.testing.assert_allclose(row[: 2 * count : 2], row[0], rtol=1e-6)  # of each the best is chosen
        assert len(np.unique(row[1 : 2 * count : 2])) == count
