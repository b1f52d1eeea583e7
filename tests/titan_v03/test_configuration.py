"""A TOML file becomes torchtitan 0.3's configuration; what has no counterpart is one line with the remedy."""

import json
import tomllib
from pathlib import Path

import pytest
from support.errors import assert_says, value_errors
from support.published import shipped_model
from support.runs import DEBUG_TOML, call

from torchtitan_magi.models.model_config import Experts
from torchtitan_magi.training.settings.degrees import check_adapters_of_experts
from torchtitan_magi.training.settings.options import LoRA

CONFIGS = sorted((Path(__file__).parents[2] / "train_configs").glob("*.toml"))


def options_of(toml, *overrides):
    """The fields of the Trainer's configuration that the file and the overrides make."""
    from torchtitan_magi.titan.v03.config import trainer_options
    from torchtitan_magi.titan.v03.toml_sections import read_job_config

    return trainer_options(read_job_config(str(toml), list(overrides)))


def summary_of(toml, *overrides):
    """What the tests look at in these fields."""
    from torchtitan_magi.titan.v03.config import job_of
    from torchtitan_magi.titan.v03.trainer import MagiTrainer

    config = MagiTrainer.Config(**options_of(toml, *overrides))
    job = job_of(config)
    return {
        "checkpointing": type(config.activation_checkpoint).__qualname__,
        "optimizer": config.optimizer.param_groups[0].optimizer_kwargs,
        "backend": config.parallelism.spmd_backend,
        "load": config.checkpoint.initial_load_path,
        "compile": config.compile,
        "rank": config.magi.lora.rank,
        **{f"training.{name}": value for name, value in vars(job.training).items()},
        **{f"validation.{name}": value for name, value in vars(job.validation).items()},
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_is_one_of_torchtitan_0_3(path, tmp_path):
    values = tomllib.loads(path.read_text())
    overrides = ["--job.dump_folder", str(tmp_path)]
    if published := shipped_model(values):
        (tmp_path / "config.json").write_text(json.dumps(published))
        overrides += ["--model.hf_assets_path", str(tmp_path)]
    found = call(summary_of, path, *overrides)
    for name in ("dataset", "dataset_path", "seq_len", "steps", "local_batch_size"):
        assert found[f"training.{name}"] == values["training"][name]
    assert found["optimizer"]["lr"] == values["optimizer"]["lr"]
    assert found["backend"] == "partial_dtensor"


def test_overrides_and_defaults_are_those_of_the_toml_file(tmp_path):
    arguments = "--training.steps 7 --activation_checkpoint.mode full --validation.enable --validation.steps 3"
    arguments += " --validation.dataset sft --validation.dataset_path v.jsonl --validation.seq_len 512 --compile.enable"
    arguments += " --parallelism.enable_async_tensor_parallel --magi.lora.rank 4 --optimizer.beta2 0.9"
    arguments += f" --checkpoint.initial_load_path there --job.dump_folder {tmp_path}"
    found = call(summary_of, DEBUG_TOML, *arguments.split())
    assert found["training.steps"] == 7
    assert found["checkpointing"] == "FullAC.Config"
    assert found["optimizer"] == {"lr": 3e-3, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.1}
    assert (found["validation.enable"], found["validation.steps"], found["validation.seq_len"]) == (True, 3, 512)
    assert found["validation.local_batch_size"] == 8  # the section's own default
    assert found["load"] == str(Path("there").absolute())
    assert found["compile"].enable
    assert found["compile"].enable_async_tensor_parallel
    assert found["rank"] == 4


REFUSED = {
    "--parallelism.expert_tensor_parallel_degree 2": "expert_tensor_parallel_degree is 2, which has no counterpart in",
    "--optimizer.lr inf": "optimizer.lr is inf; use a finite number",
    "--parallelism.disable_loss_parallel": "disable_loss_parallel is True, which has no counterpart in torchtitan 0.3",
    "--optimizer.early_step_in_backward": "early_step_in_backward is True, which has no counterpart in torchtitan 0.3",
    "--parallelism.context_parallel_rotate_method alltoall": "rotate_method is 'alltoall', which has no counterpart",
    "--activation_checkpoint.selective_ac_option 2": "selective_ac_option is '2', which has no counterpart",
    "--job.custom_config_module mine": "custom_config_module is 'mine', which has no counterpart in torchtitan 0.3",
    "--experimental.custom_import mine": "custom_import is 'mine', which has no counterpart in torchtitan 0.3",
    "--model.name llama4": "model.name is 'llama4', which has no varlen attention; use one of llama3, qwen3, gpt_oss,",
    "--model.name qwen3_5 --model.flavor 9B": "model.flavor '9B' is unknown; use one of hf",
    "--model.name muse_glimmer --model.flavor 30B": "model.flavor '30B' is unknown; use one of hf",
    "--model.name kimi_k2_7 --model.flavor Kimi-K2.5": "model.flavor 'Kimi-K2.5' is unknown; use one of hf",
    "--model.name gpt_oss --model.flavor 8B": "model.flavor '8B' is unknown; use one of hf, debugmodel, 20b, 120b",
    "--model.flavor 9B": "model.flavor '9B' is unknown; use one of hf, debugmodel, 1B, ",
    "--model.converters float8": "model.converters is ['float8']",
    "--training.seq_len 0": "training.seq_len is 0; use a whole number of at least 1",
    "--model.name mistral": "model.name is 'mistral', which has no varlen attention; use one of llama3, qwen3",
    "--training.no_such 1": "Unrecognized options: --training.no_such",
}


def test_what_has_no_counterpart_is_one_line_with_the_remedy():
    found = call(value_errors, options_of, [(DEBUG_TOML, *case.split()) for case in REFUSED])
    for message, part in zip(found, REFUSED.values(), strict=True):
        assert_says(message, [part])


def test_an_unknown_option_or_section_of_the_file_is_named(tmp_path):
    for text, message in (
        ("[quantize.linear.float8]\nemulate = true", "[quantize] has no counterpart in torchtitan 0.3"),
        ("[training]\nseqlen = 1", "did you mean training.seq_len?"),
        ('[training]\nsteps = "1"', "training.steps is '1'; use a whole number"),
        ("[training", "cannot be read"),
        ('\ufeff[training]\nsteps = "2"', "training.steps is '2'; use a whole number"),
    ):
        path = tmp_path / "my.toml"
        path.write_text(text)
        (found,) = call(value_errors, options_of, [(path,)])
        assert message in found


def own_configuration():
    """What a function for --module and --config returns, as a user would write it."""
    import torchtitan_magi.titan
    from torchtitan_magi.titan.v03.trainer import MagiTrainer

    config = torchtitan_magi.titan.llama3_debug()
    assert isinstance(config, MagiTrainer.Config)
    config.dataloader.dataset, config.dataloader.dataset_path = "sft", "train.jsonl"
    return config.parallelism.spmd_backend, type(config.activation_checkpoint).__qualname__, config.loss.to_dict()


def test_torchtitans_own_way_gives_our_trainer():
    assert call(own_configuration) == ("partial_dtensor", "MagiSelectiveAC.Config", {})


def assert_says_or_nothing(message, part):
    """An error of one line with this part; no error where there is none."""
    if part is None:
        assert message is None
    else:
        assert_says(message, [part])


def check_degrees(world_size, arguments):
    from torchtitan_magi.titan.v03.toml_sections import read_job_config
    from torchtitan_magi.training.settings.degrees import check_parallelism

    check_parallelism(read_job_config(str(DEBUG_TOML), arguments.split()).parallelism, world_size)


def test_backends_and_degrees_that_cannot_work_are_named():
    backend, product = (
        "--parallelism.spmd_backend ",
        "does not divide the product of data_parallel_shard_degree, context_",
    )
    experts, copies = "--parallelism.expert_parallel_degree ", " --parallelism.data_parallel_replicate_degree 2"
    cases = {
        (1, backend + "full_dtensor"): "parallelism.spmd_backend is 'full_dtensor', which is not for the torch and",
        (1, backend + "spmd_types"): "use 'partial_dtensor'",
        (6, experts + "4"): f"parallelism.expert_parallel_degree is 4, which {product}",
        (4, experts + "4" + copies): "tensor_parallel_degree, 2; use a degree that does",
        (4, experts + "2" + copies): None,
        (2, backend + "partial_dtensor"): None,
        (3, "--parallelism.context_parallel_degree 2"): "but torchrun started 3 processes",
    }
    for message, part in zip(call(value_errors, check_degrees, list(cases)), cases.values(), strict=True):
        assert_says_or_nothing(message, part)


def check_shares(name, num_experts, degrees, option):
    from types import SimpleNamespace

    from torchtitan_magi.models.model_config import Experts
    from torchtitan_magi.titan.v03.trainer import ranks_of_experts
    from torchtitan_magi.training.settings.degrees import check_experts

    checkpoint = {"enable": True, "initial_load_in_hf": False, "last_save_in_hf": False, option: True}
    dims = SimpleNamespace(**{"dp_shard": 1, "cp": 1, "tp": 1, "ep": 1} | degrees)
    job = SimpleNamespace(
        model=SimpleNamespace(name=name, flavor="hf"),
        checkpoint=SimpleNamespace(**checkpoint),
        parallelism=SimpleNamespace(expert_parallel_degree=dims.ep, tensor_parallel_degree=dims.tp),
    )
    experts = Experts(num_experts, 2, 48, True)
    check_experts(job, experts, ranks_of_experts(job, dims, experts))


def test_adapters_of_experts_on_more_ranks_than_experts_are_refused():
    lora, experts = LoRA(rank=4, target_modules=["wo", "experts"]), Experts(4, 2, 48, True)
    check_adapters_of_experts(lora, experts, 4)
    check_adapters_of_experts(LoRA(rank=4), experts, 5)
    with pytest.raises(ValueError, match=r"target_modules has experts, but 5 ranks share 4 experts; leave it out, or"):
        check_adapters_of_experts(lora, experts, 5)


def test_experts_that_ranks_do_not_share_alike_are_named_before_files_are_read():
    load, save = "initial_load_in_hf", "last_save_in_hf"
    cases = [
        (
            ("qwen3", 4, {"dp_shard": 3}, load),
            "checkpoint.initial_load_in_hf is true, but 3 ranks share 4 experts, not",
        ),
        (("deepseek_v3", 8, {"dp_shard": 3, "cp": 2, "tp": 2}, save), "last_save_in_hf is true, but 6 ranks share 8"),
        (("qwen3", 8, {"dp_shard": 3, "tp": 2, "ep": 2}, load), "but 6 ranks share 8 experts, not as many each; use a"),
        (
            ("qwen3", 4, {"dp_shard": 3, "ep": 3}, load),
            "expert_parallel_degree is 3, which does not divide the 4 experts",
        ),
        (("qwen3", 4, {"dp_shard": 3, "cp": 2}, load), None),  # each expert's rows are shared
        (("gpt_oss", 4, {"dp_shard": 3}, load), None),
        (("qwen3", 4, {"dp_shard": 3}, "load_only"), None),
        (("qwen3", 4, {"dp_shard": 2, "tp": 3}, load), None),
        (
            ("gpt_oss", 4, {"tp": 5}, load),
            "tensor_parallel_degree is 5, which does not divide the width of the experts",
        ),
        (("gpt_oss", 5, {"tp": 5, "ep": 5}, load), None),
    ]
    found = call(value_errors, check_shares, [case for case, _ in cases])
    for message, (_, part) in zip(found, cases, strict=True):
        assert_says_or_nothing(message, part)
