"""What a user can get wrong is one line before the first step; and what --help says."""

import shutil

import pytest
from support.errors import assert_one_line, changed, error_of
from support.processes import python
from support.runs import DEBUG_TOML, IS_0_3, corpus

from torchtitan_magi.training.settings.sections import NEED_A_GPU


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ("--model.name llama4 --model.flavor debugmodel", ["'llama4'", "no varlen attention", "llama3, qwen3"]),
        ("--magi.lora.rank -1", ["magi.lora.rank is -1", "a rank such as 16"]),
        ("--training.dataset c4_test --magi.epochs 2", ["epochs is 2, but training.dataset 'c4_test' has none"]),
        (
            "--training.dataset c4_test --magi.no-shuffle",
            ["shuffle is False, but training.dataset is 'c4_test', which"],
        ),
        ("--magi.cost_model no.json", ["no.json is no cost model", "No such file", "torchtitan_magi.calibrate"]),
        *(
            (f"--{option}", [f"{option} is true", "no GPU, which it needs", "set it to false"])
            for option in NEED_A_GPU
            if not (IS_0_3 and option == "profiling.enable_profiling")
        ),
        (
            "--activation_checkpoint.mode auto --activation_checkpoint.debug",
            ["debug is true, but mode 'auto'", '"full"'],
        ),
        ("--activation_checkpoint.mode memory_budget", ["compile.enable", "'model'" if IS_0_3 else '"model"']),
        (
            "--activation_checkpoint.mode memory_budget --compile.enable --compile.backend eager",
            ['mode is "memory_budget"', '"inductor" as compile.backend'],
        ),
        (
            "--compile.enable --compile.components models",
            ["compile.components has 'models'", "'model' and 'loss'"],
        ),
        ("--compile.enable --compile.backend inductr", ["backend is 'inductr'; use 'inductor', or another of 'cudagr"]),
        ("--job.config-file=b.toml", ["--job.config_file is given as ", " and as 'b.toml'; give one file"]),
        ("--comm.mode fake_backend", ["comm.mode is 'fake_backend', but here ranks exchange rows", "leave it out"]),
        *(
            [
                (
                    "--profiling.enable_profiling --profiling.profile_freq 3",
                    ["profile_freq is 3; use at least 4, profiler_warmup plus profiler_active"],
                ),
                (
                    "--magi.lora.rank 100000000",
                    ["magi.lora.rank is 100000000; use at most 256, the model's width, such as 16"],
                ),
            ]
            if IS_0_3  # in which the CPU has profiles, and models have adapters
            else []
        ),
        ("--magi.dpo.loss ipo", ["magi.dpo.loss is 'ipo', but training.dataset is 'sft'; set that to 'dpo', or leave"]),
        ("--magi.rollouts.on_policy", ["rollouts.on_policy is True, but training.dataset is 'sft'; set that to"]),
        (
            "--magi.lora.alpha 32",
            ["magi.lora.alpha is 32.0, but magi.lora.rank is 0; give a rank such as 16, or leave"],
        ),
        (
            "--lr_scheduler.total_steps 99 --training.steps 100",
            ["lr_scheduler.total_steps is 99, but the run has 100 steps; use at least as many, or leave it out"],
        ),
        ("--training.dataset_path=", ["training.dataset_path is ''", "give the JSONL file of dataset 'sft'"]),
        ("--training.dataset_path no.jsonl", ["'no.jsonl': No such file", "check the path"]),
        ("--validation.enable --validation.dataset sft", ["validation.dataset_path is None", "give the JSONL file"]),
    ],
)
def test_a_wrong_value_on_the_command_line(arguments, messages):
    assert_one_line(error_of(arguments.split()), messages)


def test_a_wrong_option_in_the_file(tmp_path):
    """One of those in test_objectives.py."""
    messages = ["magi.backend is 'fla'", "use one of 'auto', 'ffa', 'flex'"]
    assert_one_line(error_of([], toml=changed(tmp_path, ("[magi]", '[magi]\nbackend = "fla"'))), messages)
    messages = ["compile.enable is true, but compile.components is empty", "add 'model'"]
    compiles = "[compile]\nenable = true\ncomponents = []\n\n[magi]"
    assert_one_line(error_of([], toml=changed(tmp_path, ("[magi]", compiles))), messages)


def test_an_unknown_backend_on_the_command_line_is_a_usage_error():
    messages = ["invalid choice 'fla' for argument '--magi.backend'. Expected one of"]
    assert_one_line(error_of(["--magi.backend", "fla"]), messages)


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        ("dataset_path", "", ["training.dataset_path is None", "give the JSONL file of dataset 'sft'"]),
        ("[magi]", "[magi]\noverlap = 2", ["magi.overlap is no option"]),
    ],
)
def test_a_missing_line_and_an_unknown_name_are_named(old, new, messages, tmp_path):
    assert_one_line(error_of([], toml=changed(tmp_path, (old, new))), messages)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("", ["records.jsonl' holds no record", "write one JSON object per line"]),
        ('{"text": "fine"}\n{"text": \n', ["records.jsonl:2: not JSON", "write one JSON object per line"]),
        (
            '{"chosen": "a", "rejected": "b"}\n',
            ["records.jsonl:1:", "is a preference pair", 'use it with dataset "dpo"'],
        ),
        ('{"text": "fine"}\n\n{"txt": "?"}\n', ["records.jsonl:3:", "only the keys ['txt']", '"messages" or "text"']),
    ],
)
def test_a_wrong_records_file(text, messages, tmp_path):
    (tmp_path / "records.jsonl").write_text(text)
    assert_one_line(error_of(["--training.dataset_path", f"{tmp_path}/records.jsonl"]), messages)


def test_a_template_of_no_use_ends_the_run_before_the_first_step(tmp_path):
    assets = shutil.copytree(corpus() / "tokenizer", tmp_path / "assets")
    (assets / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    error = error_of(["--model.hf_assets_path", str(assets)])
    assert_one_line(error, [f"the chat template in {assets}: the chat template refuses the messages (no)"])
    built = "Building" in "".join(error.__notes__)  # as torchtitan says when it comes to the model
    assert built == IS_0_3  # which reads the data after that


def test_help_shows_each_option_with_its_unit():
    result = python("-m", "torchtitan_magi.train", "--job.config_file", DEBUG_TOML, "--help")
    assert result.returncode == 0, result.stderr[-4000:]
    section = " ".join(result.stdout.split("magi options")[1].split("╰")[0].replace("│", " ").split())
    for option, text in {
        "--magi.backend {auto,ffa,flex}": "Attention kernel",
        "--magi.overlap-stages INT": "Number of stages",
        "--magi.no-deterministic": "bit for bit",
        "--magi.no-fp32-reduce": "between ranks in float32",
        "--magi.positions {auto,document,pack}": "Rotary positions",
        "--magi.long-documents {truncate,split}": "longer than training.seq_len",
    }.items():
        assert option in section
        help_text = section.split(option, 1)[1].split("--magi.", 1)[0]
        assert text in help_text
        assert "(default: " in help_text


EXIT = """
import atexit, gc, time
from pathlib import Path
import torch.distributed as dist

def gloo_threads():
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))

atexit.register(lambda: print(gloo_threads()))  # what is registered first comes last
import torchtitan_magi.titan  # runs on the CPU
gc.disable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
while not gloo_threads():  # they name themselves once they run
    time.sleep(0.01)
cycle = [dist.group.WORLD]
cycle.append(cycle)
del cycle
dist.destroy_process_group()
print(gloo_threads())
"""


def test_groups_that_only_cycles_hold_end_before_the_interpreter():
    """Their threads could end a process that has done all its work with an error."""
    result = python("-c", EXIT)
    assert result.returncode == 0, result.stderr
    before, at_last = map(int, result.stdout.split())
    assert before > at_last == 0
