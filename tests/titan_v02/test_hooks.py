"""The names by which torchtitan 0.2.2 finds us: one that is missing is one line, and its own Trainer stays its own."""

import pytest
from support.adapter import check, read_job
from support.errors import assert_one_line, assert_says, changed, error_of, value_errors
from support.runs import DEBUG_TOML, OnPath, call, on_corpus


def check_without_a_file():
    from torchtitan.config import ConfigManager

    from torchtitan_magi.titan.v02.config import check_job_config

    config = ConfigManager().parse_args(["--comm.trace_buf_size", "0"])
    check_job_config(config, {}, True)


def test_a_missing_config_file_is_named():
    (said,) = call(value_errors, check_without_a_file, [()])
    assert said == "--job.config_file is missing; give the path of a TOML file"


HOOKS = '[job]\ncustom_config_module = "torchtitan_magi.titan"\n'
MODULES = {
    '[job]\ncustom_config_module = "torchtitan_-agi"\n': "job.custom_config_module cannot be used (No module named",
    "[job]\ncustom_config_module = 3\n": "job.custom_config_module cannot be used (",
    '[job]\ncustom_config_module = "json"\n': "job.custom_config_module cannot be used (module 'json' has",
    f'{HOOKS}[experimental]\ncustom_import = "no_such"\n': "experimental.custom_import cannot be used (No module named",
    f'{HOOKS}[experimental]\ncustom_import = ".titan"\n': "experimental.custom_import cannot be used (",
}


def test_a_module_that_is_missing_is_one_line_with_the_remedy(tmp_path):
    paths = [tmp_path / f"{number}.toml" for number in range(len(MODULES))]
    for path, text in zip(paths, MODULES, strict=True):
        path.write_text(text)
    for text, start in zip(call(value_errors, read_job, [(path,) for path in paths]), MODULES.values(), strict=True):
        assert text.startswith(start)
        assert text.endswith('); set it to "torchtitan_magi.titan"')


def trainers_in_turn():
    """Whether the spec's functions knew of objectives while our Trainer was built, and after that."""
    from unittest import mock

    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    from torchtitan_magi.titan.v02.spec import MagiSpec
    from torchtitan_magi.titan.v02.trainer import MagiTrainer

    def built(self, job_config):
        known.append(MagiSpec.has_objectives)
        raise SystemExit

    known = []
    with mock.patch.object(Trainer, "__init__", built), pytest.raises(SystemExit):
        MagiTrainer(ConfigManager().parse_args(["--job.config_file", str(DEBUG_TOML)]))
    return [*known, MagiSpec.has_objectives]


def test_a_stock_trainer_after_ours_in_one_process_is_stock():
    assert call(trainers_in_turn) == [True, False]


def what_a_second_trainer_finds():
    """With one spec: what is left of the first run, and what heads that tensor parallelism cannot divide lead to."""
    from types import SimpleNamespace

    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec

    spec = get_train_spec("llama3").build_tokenizer_fn.__self__
    config = ConfigManager().parse_args(["--job.config_file", str(DEBUG_TOML), *on_corpus()])
    spec.runtime, spec.count.tokens = "of the first run", 7
    spec.build_tokenizer(config)
    try:
        spec.make_runtime(spec.model_args["8B_varlen"], SimpleNamespace(tp=3), config)
    except ValueError as error:
        return spec.runtime, spec.count.tokens, str(error)


def test_a_second_trainer_begins_anew_and_heads_must_divide():
    runtime, tokens, said = call(what_a_second_trainer_finds)
    assert (runtime, tokens) == (None, 0)
    assert said.startswith("parallelism.tensor_parallel_degree is 3, but the model has 32 query heads and 8 K/V heads")


def check_for_stock(*arguments):
    check(DEBUG_TOML, *arguments, has_objectives=False)


def test_the_stock_entry_point_names_ours():
    cases = [[], ["--training.dataset", "dpo"], ["--magi.loss_per", "document"], ["--magi.share_prefixes"]]
    sft, pairs, documents, trees = call(value_errors, check_for_stock, cases)
    assert sft is None
    remedy = "start it with torchrun -m torchtitan_magi.train"
    assert pairs == f"training.dataset is 'dpo', which torchtitan's own entry point does not know; {remedy}"
    assert documents.startswith('magi.loss_per is "document"')
    assert documents.endswith(remedy)
    assert trees == f"magi.share_prefixes is true, which torchtitan's own entry point does not know; {remedy}"


def test_the_stock_entry_point_refuses_copies_without_fsdp():
    """Its gradients, of a loss per token of all ranks, would be those of one process divided by the copies."""
    copies = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"]
    messages = ["replicate_degree is 2, but without FSDP", "start it with torchrun -m torchtitan_magi.train, or use"]
    assert_one_line(error_of(copies, 2), messages)


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ("--parallelism.pipeline_parallel_degree 2", ["pipeline_parallel_degree is 2", "set it to 1"]),
        ("--model.flavor debugmodel", ["'debugmodel' has sdpa attention", "use one", "debugmodel_varlen_attn"]),
        ("--model.flavor debugmodel_flex_attn", ["'debugmodel_flex_attn' has flex", "debugmodel_varlen_attn"]),
        ("--model.flavor 9B", ["'9B' is unknown", "use one with varlen attention", "8B_varlen"]),
        (
            "--model.name gpt_oss --model.flavor hf",
            ["'gpt_oss', which needs torchtitan 0.3; pip install torchtitan==0.3.0"],
        ),
        ("--model.name qwen3_5 --model.flavor hf", ["'qwen3_5', which needs torchtitan 0.3"]),
        ("--magi.lora.rank 4", ["magi.lora.rank is 4", "set it to 0", "install torchtitan 0.3"]),
        ("--fault_tolerance.enable", ["fault_tolerance.enable is true, but this Trainer does without torchft; leave"]),
        ("--memory_estimation.enable", ["memory_estimation.enable is true", "ask torchtitan-magi size"]),
        ("--optimizer.early_step_in_backward", ["before gradients are clipped; leave it out"]),
        (
            "--quantize.linear.float8.recipe_name rowwise",
            ["[quantize.linear.float8] is set", "nothing is quantized: model.converters is []; add", "or leave"],
        ),
        (
            "--quantize.grouped_mm.mx.fqns experts --model.converters quantize.linear.float8",
            ["[quantize.grouped_mm.mx] is set", "is ['quantize.linear.float8']; add \"quantize.grouped_mm.mx\""],
        ),
        (
            "--model.converters quantize.grouped_mm.float8",
            ["quantize.grouped_mm.float8.fqns is []", "take it out of model.converters"],
        ),
    ],
)
def test_what_only_torchtitan_0_3_has_is_named(arguments, messages):
    processes = 2 if "pipeline" in arguments else 1
    assert_one_line(error_of(arguments.split(), processes), messages)


CONFIG, IMPORT = ('custom_config_module = "torchtitan_magi.titan"', 'custom_import = "torchtitan_magi.titan"')


@pytest.mark.parametrize(
    ("missing", "messages"),
    [
        ([IMPORT], ["experimental.custom_import is ''", '"torchtitan_magi.titan"']),
        ([CONFIG, "[magi]"], ["job.custom_config_module is ''", '"torchtitan_magi.titan"']),
        ([CONFIG], ["[magi] is unknown; add custom_config_module"]),
        ([CONFIG, IMPORT], ["[magi] is unknown; add custom_config_module"]),
    ],
)
def test_a_missing_line_is_named(missing, messages, tmp_path):
    """Without the hook of the configuration that is [magi], where our entry point reads the file."""
    assert_one_line(error_of([], toml=changed(tmp_path, *((line, "") for line in missing))), messages)


def test_what_no_module_registered_is_one_line():
    error = error_of(["--model.converters", "frozen"])
    assert_one_line(error, ["model.converters has 'frozen'", "quantize.linear.float8", "magi.imports"])


PLAIN = """
from dataclasses import replace
from torchtitan.models import llama3
from torchtitan.protocols.train_spec import register_train_spec

register_train_spec("plain", replace(llama3.get_train_spec(), build_dataloader_fn=None))
"""


def test_a_train_spec_that_is_not_ours_is_left_to_torchtitan(tmp_path):
    (tmp_path / "my_module.py").write_text(PLAIN)
    arguments = ["--magi.imports", "my_module", "--model.name", "plain", "--model.flavor", "debugmodel"]
    error = error_of(arguments, setup=OnPath(tmp_path), entry="torchtitan_magi.train")
    assert_one_line(error, ["model.name is 'plain'", "torchrun -m torchtitan.train", "add a flavor to llama3"])


def checkpoint_by_a_spec_of_ones_own():
    from types import SimpleNamespace

    from torch import nn

    from torchtitan_magi.titan.v02.hooks import _apply_ac

    _apply_ac(lambda *_, **__: None, nn.Module(), SimpleNamespace(mode="auto"))


def test_such_a_train_spec_cannot_let_us_decide_what_layers_keep():
    (said,) = call(value_errors, checkpoint_by_a_spec_of_ones_own, [()])
    assert said.startswith('activation_checkpoint.mode is "auto", which a train spec that is not ours does not decide')
    assert said.endswith('set it to "selective", "full" or "none"')


def lay_out(world_size, degrees):
    from torchtitan.distributed import ParallelDims

    ones = dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep", "etp"), 1) | {"dp_shard": -1}
    ParallelDims(**ones | degrees, world_size=world_size)


def test_degrees_that_torchtitan_ignores_or_ends_in_assertions():
    fine = [(8, {"ep": 8}), (4, {"tp": 2, "ep": 4}), (4, {"tp": 2, "ep": 2, "etp": 2}), (2, {"tp": 2, "ep": 2})]
    wrong = {
        (2, "ep=4"): ["expert_parallel_degree is 4", "product of data_parallel_shard_degree, context_", "degree, 2;"],
        (4, "tp=2 ep=4 etp=2"): ["expert_parallel_degree is 4", "data_parallel_shard_degree, context_", "degree, 2;"],
        (4, "dp_replicate=2 dp_shard=2 ep=4"): ["expert_parallel_degree is 4", ", 2; use a degree that does"],
        (4, "tp=4 ep=2 etp=2"): ["expert_tensor_parallel_degree is 2; use 1 or tensor_parallel_degree, which is 4"],
        (4, "tp=2 etp=2"): ["expert_tensor_parallel_degree is 2", "no effect", "set it to 1"],
        (4, "tp=4 ep=2"): ["expert_parallel_degree is 2 and each expert on 2 ranks", "FSDP is off", "of 4"],
        (4, "dp_replicate=2 dp_shard=1 tp=2 ep=2"): ["each expert on 2 ranks", "use data_parallel_shard_degree or"],
        (4, "dp_replicate=2 dp_shard=1 tp=2"): ["replicate_degree is 2 and tensor_parallel_degree 2", "use data_par"],
    }
    cases = [(size, {k: int(v) for k, v in (pair.split("=") for pair in text.split())}) for size, text in wrong]
    said = call(value_errors, lay_out, [*fine, *cases])
    assert said[: len(fine)] == [None] * len(fine)
    for error, messages in zip(said[len(fine) :], wrong.values(), strict=True):
        assert_says(error, messages)
