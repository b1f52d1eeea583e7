"""Steps on rollouts that a program gives are those of a run that reads them from a file."""

import json
import re
from types import SimpleNamespace

import pytest
from support.degrees import degree_arguments
from support.errors import one_line
from support.hf_loop import ARGUMENTS
from support.hf_models import hf_arguments, make_hf_folder, tensors_of
from support.jsonl import write_jsonl
from support.rollouts import rollouts_file
from support.runs import DEBUG_TOML, IS_0_3, TrainingError, new_folder, run_script, train

from torchtitan_magi import open_trainer
from torchtitan_magi.training.rollout_trainer import RolloutTrainer

PROGRAM = """
import json, sys
from torchtitan_magi import open_trainer

records = [json.loads(line) for line in open(sys.argv[1])]
with open_trainer(sys.argv[2:]) as trainer:
    names = {name: [*tensor.shape, tensor.double().sum().item()] for name, tensor in trainer.weights()}
    for wrong in ([], [{}], [records[0], {"prompt_ids": [1], "completions": []}], None, records[0], 3):
        try:
            trainer.train_step(wrong)
        except ValueError as error:
            print("REFUSED", error)
    assert trainer.step == 0
    while trainer.step < trainer.num_steps:
        given = records if trainer.is_first_rank else None
        print("LOSS", trainer.step, trainer.train_step(given)["loss_metrics/global_avg_loss"])
    try:
        trainer.train_step(records)
    except ValueError as error:
        print("REFUSED", error)
    print("NAMES", json.dumps(names), flush=True)
"""
REFUSED = (
    "rollouts is empty; give a step at least one record",
    'rollouts[0]: the record has no "completions", only the keys []; write a list of objects',
    'rollouts[1]: "completions" is []; write a list of objects',
    "rollouts is None on rank 0; give a list of records there",
    "rollouts is {'prompt': ",
    "rollouts is 3 on rank 0; give a list of records there",
    "training.steps is 5, and all of them are done; set it to more",
)


class Unprinted(list):
    def __repr__(self):
        raise AssertionError("seconds for the numbers of many answers")


def test_rollouts_are_written_out_only_to_be_refused():
    steps, run = [], SimpleNamespace(step=0, last_words=SimpleNamespace(note_step=lambda step: None))
    RolloutTrainer(run, lambda given: steps.append(given) or {}).train_step(Unprinted([{"prompt_ids": [1]}]))
    assert steps == [[{"prompt_ids": [1]}]]


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        pytest.param("llama", {"dp": 2}, marks=pytest.mark.either),
        ("llama", {"cp": 2, "tp": 2}),
        pytest.param("qwen3_moe", {"dp": 2}, marks=pytest.mark.either),
        ("qwen3_moe", {"dp": 2, "ep": 2}),
    ],
)
def test_given_steps_are_those_of_a_file(kind, degrees, tmp_path):
    folder, path = make_hf_folder(kind, initializer_range=0.1), rollouts_file()
    options = [*hf_arguments(folder, kind), *ARGUMENTS, "--training.dataset", "rollouts", "--training.seq_len", "1024"]
    options += ["--training.local_batch_size", "1", "--checkpoint.enable", "--checkpoint.initial_load_in_hf"]
    options += degree_arguments({"cp": 1} | degrees)
    processes = 2 if "dp" in degrees else 4
    (program := tmp_path / "program.py").write_text(PROGRAM)
    given = ["--job.config_file", DEBUG_TOML, "--job.dump_folder", new_folder(), "--training.dataset_path="]
    printed = run_script(processes, program, path, *given, *options, "--training.global_batch_size=-1").output
    from_file = train(
        processes, [*options, "--training.dataset_path", str(path)], layers=None, entry="torchtitan_magi.train"
    )
    losses = [float(loss) for loss in re.findall(r"^LOSS \d+ (\S+)", printed, re.M)]
    assert losses == pytest.approx(from_file.losses, abs=1e-5)
    refused = re.findall(r"^REFUSED (.*)", printed, re.M)
    assert len(refused) == len(REFUSED)
    assert all(said.startswith(wanted) for said, wanted in zip(refused, REFUSED, strict=True))
    names = json.loads(re.search(r"^NAMES (.*)", printed, re.M)[1])
    expected = {name: [*tensor.shape, tensor.double().sum().item()] for name, tensor in tensors_of(folder).items()}
    assert names.keys() == expected.keys()
    assert all(values == pytest.approx(expected[name], abs=1e-4) for name, values in names.items())


LED = """
import json, sys, time
from torch.distributed.checkpoint.filesystem import _FileSystemWriter
from torchtitan_magi import open_trainer

def write_late(*arguments, stock=_FileSystemWriter.write_data):
    time.sleep(1)  # while the program ends
    return stock(*arguments)

_FileSystemWriter.write_data = write_late

records = [json.loads(line) for line in open(sys.argv[1])]
with open_trainer(sys.argv[2:]) as trainer:
    for _ in range(3):
        loss = trainer.train_step(records)["loss_metrics/global_avg_loss"]
        print("LOSS", trainer.step, loss, flush=True)
"""


def test_a_led_run_goes_on(tmp_path):
    folder, path = make_hf_folder("llama", initializer_range=0.1), rollouts_file()
    options = ["--job.config_file", DEBUG_TOML, *hf_arguments(folder), *ARGUMENTS, "--training.dataset", "rollouts"]
    options += ["--training.dataset_path=", "--training.seq_len", "1024", "--training.local_batch_size", "1"]
    options += ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--checkpoint.interval", "3"]
    options += ["--parallelism.context_parallel_degree", "1", "--training.global_batch_size=-1"]
    options += ["--training.steps", "6", "--checkpoint.async_mode", "async"]
    (program := tmp_path / "program.py").write_text(LED)

    def losses(dump):
        printed = run_script(1, program, path, *options, "--job.dump_folder", dump).output
        assert "epoch" not in printed
        assert "truncated" not in printed
        return re.findall(r"^LOSS (\d) (\S+)", printed, re.M)

    first, rest = losses(tmp_path / "run"), losses(tmp_path / "run")
    assert [step for step, _ in first + rest] == [*"123456"]
    assert int((tmp_path / "run" / "checkpoint" / "trained_length").read_text()) > 200  # for config.json of an export
    whole = run_script(1, program, path, *options, "--job.dump_folder", tmp_path / "whole").output
    assert re.findall(r"^LOSS (\d) (\S+)", whole, re.M) == first


def test_a_led_step_names_its_rollouts(tmp_path):
    """Those that lose tokens in the log, those whose loss is not finite in the error."""
    options = ["--job.config_file", DEBUG_TOML, *hf_arguments(make_hf_folder("llama")), *ARGUMENTS]
    options += ["--training.dataset", "rollouts", "--training.dataset_path=", "--training.seq_len", "256"]
    options += ["--training.global_batch_size=-1", "--training.steps", "3", "--training.local_batch_size", "1"]
    options += ["--parallelism.context_parallel_degree", "1", "--magi.random_weights", "--job.dump_folder", tmp_path]
    records = [json.loads(line) for line in rollouts_file().read_text().splitlines()]
    records[2]["completions"] = [{"completion": "bada", "advantage": -9e37, "logprobs": [-80.0] * 3}]
    write_jsonl(path := tmp_path / "rollouts.jsonl", records)
    (program := tmp_path / "program.py").write_text(LED)
    with pytest.raises(TrainingError) as caught:
        run_script(1, program, path, *options)
    assert caught.value.type == "FloatingPointError"
    assert str(caught.value).startswith("step 1: the loss is not finite in 1 of 5 documents: rollouts[2]; nothing of")
    assert "step 1: 5 documents, " in caught.value.__notes__[0]


@pytest.mark.skipif(not IS_0_3, reason="torchtitan 0.3 has pipelines here")
def test_rank_0_has_the_metrics_of_a_pipeline(tmp_path):
    """Which only the ranks of the last stage know."""
    options = ["--job.config_file", DEBUG_TOML, *hf_arguments(make_hf_folder("llama")), *ARGUMENTS]
    options += ["--training.dataset", "rollouts", "--training.dataset_path=", "--training.seq_len", "1024"]
    options += ["--training.global_batch_size=-1", "--training.steps", "3", "--training.local_batch_size", "2"]
    options += ["--parallelism.context_parallel_degree", "1", "--checkpoint.enable", "--checkpoint.initial_load_in_hf"]
    (program := tmp_path / "program.py").write_text(LED)

    def losses(stages):
        more = ["--parallelism.pipeline_parallel_degree", stages, "--job.dump_folder", tmp_path / f"{stages}"]
        printed = run_script(stages, program, rollouts_file(), *options, *more).output
        return [float(loss) for loss in re.findall(r"^LOSS \d (\S+)", printed, re.M)]

    assert losses(2) == pytest.approx(losses(1), abs=1e-5)


@pytest.mark.parametrize("arguments", [None, 3, "rl.toml", [1], ["--job.config_file", None]])
def test_what_is_no_list_of_arguments_is_refused(arguments):
    with one_line(r"open_trainer got .*; give a list of the command line's arguments, each a string, such as"):
        open_trainer(arguments).__enter__()


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("--training.dataset_path=ROLLOUTS", "but the rollouts of each step are given; leave it out"),
        ("--training.global_batch_size=4", "training.global_batch_size is 4, but a program leads this run"),
        ("--magi.epochs=2", "magi.epochs is 2, but a program leads this run and gives each step its rollouts"),
        ("--magi.no-shuffle", "magi.shuffle is False, but a program leads this run"),
        ("--checkpoint.no-enable", "weights are given by the names of checkpoints, and checkpoint.enable is false"),
    ],
)
def test_what_a_led_run_would_not_do_is_refused(option, what, tmp_path):
    folder = make_hf_folder("llama")
    arguments = ["--job.config_file", DEBUG_TOML, *hf_arguments(folder), "--job.dump_folder", new_folder()]
    arguments += ["--training.dataset", "rollouts", "--training.dataset_path=", "--training.seq_len", "1024"]
    arguments += ["--parallelism.context_parallel_degree", "1", "--magi.random_weights"]
    arguments.append(option.replace("ROLLOUTS", str(rollouts_file())))
    (program := tmp_path / "program.py").write_text(PROGRAM)
    with pytest.raises(TrainingError, match=what):
        run_script(1, program, rollouts_file(), *arguments)
