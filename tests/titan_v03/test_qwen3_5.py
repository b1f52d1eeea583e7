"""Qwen3.5 on torchtitan 0.3: layouts and options beside those of ``test_training_transformers``; what is refused."""

import shutil

import pytest
from support.errors import run_ends
from support.hf_models import hf_arguments, make_hf_folder
from support.runs import corpus, new_folder, train

from test_pipeline import alone, check, folder, run, with_validation  # isort: skip

COMPILED = "--compile.enable --compile.backend aot_eager"
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("kind", "degrees", "options"),
    [
        pytest.param("qwen3_5", {"ddp": 2, "cp": 2}, "--activation_checkpoint.mode full", marks=LONG),
        ("qwen3_5", {"cp": 4}, "--activation_checkpoint.mode auto --magi.keep attention"),
        pytest.param("qwen3_5", {"tp": 2, "cp": 2}, "--activation_checkpoint.mode selective", marks=LONG),
        ("qwen3_5", {"cp": 2}, f"{COMPILED} --activation_checkpoint.mode none"),
        pytest.param("qwen3_5", {"tp": 2, "cp": 2}, f"{COMPILED} --activation_checkpoint.mode selective", marks=LONG),
        ("qwen3_5_moe", {"ddp": 2, "dp": 2, "ep": 2}, "--activation_checkpoint.mode full"),
    ],
)
def test_a_step_is_that_of_one_process(kind, degrees, options):
    check(run(degrees, *options.split(), *with_validation(), kind=kind), alone(kind))


def test_a_resumed_run_goes_on_as_it_would_have():
    arguments = [*hf_arguments(folder("qwen3_5"), "qwen3_5"), "--parallelism.context_parallel_degree=2"]
    arguments += ["--training.dataset_path", f"{corpus()}/train.jsonl", "--training.steps", "4"]
    arguments += ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--checkpoint.interval", "2"]
    dump = new_folder()
    whole = train(2, [*arguments, "--job.dump_folder", dump], layers=None)
    shutil.rmtree(f"{dump}/checkpoint/step-4")
    resumed = train(2, [*arguments, "--job.dump_folder", dump], layers=None)
    assert resumed.losses == whole.losses[2:]


def test_a_degree_that_does_not_divide_the_heads_that_recur_is_named():
    model = make_hf_folder("qwen3_5", num_key_value_heads=4)
    arguments = [*hf_arguments(model, "qwen3_5"), "--parallelism.tensor_parallel_degree=4", "--magi.random_weights"]
    with run_ends("tensor_parallel_degree is 4, but linear attention has 2 heads of queries and keys; use a degree"):
        train(4, [*arguments, "--training.dataset_path", f"{corpus()}/train.jsonl"], layers=None)
