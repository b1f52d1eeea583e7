"""What our entry point does before anything is built, with the adapter of the installed torchtitan."""

from dataclasses import replace

import torch
from support.runs import IS_0_3


def read_job(path, *arguments):
    """The sections of a TOML file, with the options of a command line instead."""
    arguments = ["--job.config_file", str(path), *arguments]
    if IS_0_3:
        from torchtitan_magi.titan.v03.toml_sections import read_job_config

        return read_job_config(str(path), arguments)
    from torchtitan.config import ConfigManager

    return ConfigManager().parse_args(arguments)


def read_settings(path, *arguments):
    """The same as the Trainer gets them: of 0.3, once they are a configuration of its own."""
    return _job_of(_config(path, *arguments)) if IS_0_3 else read_job(path, *arguments)


def check_layout(parallelism, world_size):
    """Checks the section's degrees against a number of processes."""
    if IS_0_3:
        from torchtitan_magi.training.settings.degrees import check_parallelism

        return check_parallelism(parallelism, world_size)
    from torchtitan.distributed import ParallelDims

    axes = ["data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel"]
    axes += ["pipeline_parallel", "expert_parallel", "expert_tensor_parallel"]
    degrees = [getattr(parallelism, f"{axis}_degree") for axis in axes]
    return ParallelDims(*degrees, world_size=world_size)


def check(path, *arguments, has_objectives=True):
    """Checks all that needs neither the model nor its folder. has_objectives: whether the Trainer is ours."""
    _check(read_settings(path, *arguments), has_objectives)


def read_model(path, *arguments):
    """Our ``ModelConfig`` of the run's flavor, or of the config.json in its folder."""
    if IS_0_3:
        from torchtitan_magi.titan.v03.trainer import _facts

        return _facts(_config(path, *arguments))
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_magi.titan.v02.models import args_of, config_of
    from torchtitan_magi.training.settings.model_folder import HF_FLAVOR, read_hf_config

    job = read_job(path, *arguments)
    if job.model.flavor == HF_FLAVOR:
        return read_hf_config(job, args_of)
    return config_of(get_train_spec(job.model.name).model_args[job.model.flavor])


def start(path, *arguments):
    """Our ``ModelConfig`` of a run, with all that is checked before the model is built."""
    if not IS_0_3:
        from torchtitan.protocols.train_spec import get_train_spec

        from torchtitan_magi.titan.v02.models import config_of
        from torchtitan_magi.titan.v02.spec import MagiSpec

        job = read_job(path, *arguments)
        spec = get_train_spec(job.model.name)
        with MagiSpec.with_objectives():
            spec.build_tokenizer_fn(job)
        return config_of(spec.model_args[job.model.flavor])
    from torchtitan_magi.titan.v03.trainer import _facts
    from torchtitan_magi.training.run_parts import RunParts

    config, parts = _config(path, *arguments), RunParts()
    parts.job_config, facts = _job_of(config), _facts(config)
    _check(parts.job_config, True)
    parts.read_model(lambda: facts)
    parts.use_tokenizer(config.tokenizer.build(tokenizer_path=config.hf_assets_path))
    return facts


def there_and_back(config):
    """A ``ModelConfig`` once through torchtitan's description of the model."""
    if IS_0_3:
        from torchtitan_magi.titan.v03.models import config_of, model_of

        return config_of(model_of(config))
    from torchtitan_magi.titan.v02.models import args_of, config_of

    return config_of(args_of(config))


def dense_model(config):
    """torchtitan's model of a ``ModelConfig`` with causal attention over whole rows, and the adapter of its weights."""
    if IS_0_3:
        from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

        from torchtitan_magi.titan.v03.models import model_spec

        spec = model_spec(config.model, "hf", config)
        for _, _, layer, name in list(spec.model.traverse(FlexAttention.Config)):
            setattr(layer, name, ScaledDotProductAttention.Config())
        model, adapter = spec.model.build(), spec.state_dict_adapter(spec.model, None)
    else:
        from torchtitan.protocols.train_spec import get_train_spec

        from torchtitan_magi.titan.v02.models import args_of

        spec = get_train_spec(config.model)
        args = replace(args_of(config), attn_type="sdpa", attn_mask_type="causal")
        model, adapter = spec.model_cls(args), spec.state_dict_adapter(args, None)
    with torch.no_grad():
        model.init_weights()
    return model, adapter


def _check(job, has_objectives):
    if IS_0_3:
        from torchtitan.hf_datasets.text_datasets import DATASETS

        from torchtitan_magi.training.settings.checks import check_settings

        return check_settings(job, DATASETS, has_objectives, lambda _: None)
    from torchtitan_magi.titan.v02.config import check_job_config

    return check_job_config(job, {job.model.flavor: "varlen"}, has_objectives)


def _config(path, *arguments):
    from torchtitan_magi.titan.v03.config import trainer_options
    from torchtitan_magi.titan.v03.trainer import MagiTrainer

    return MagiTrainer.Config(**trainer_options(read_job(path, *arguments)))


def _job_of(config):
    from torchtitan_magi.titan.v03.config import job_of

    return job_of(config)
