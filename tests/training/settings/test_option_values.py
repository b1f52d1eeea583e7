"""A wrong value in a TOML file or on the command line is one line, told before any process group is made."""

import importlib
import os
import re
from dataclasses import fields, is_dataclass

import pytest
from support.adapter import check_layout, read_job, read_settings
from support.errors import value_errors
from support.runs import ADAPTER, IS_0_3, TITAN, call

from torchtitan_magi.sizing.run_file import OPTIONS

HOOKS = '[job]\ncustom_config_module = "torchtitan_magi.titan"\n'


def read(cases):
    """What is said to each (path, arguments): None, or the class and the text of an exception."""
    said = []
    for path, arguments in cases:
        try:
            read_settings(path, *arguments)
            said.append(None)
        except BaseException as error:
            said.append((type(error).__name__, str(error)))
    return said


NO_OPTION = f"is no option of torchtitan {TITAN} with torchtitan_magi"
NO_MODEL = "has no varlen attention" if IS_0_3 else "is no model of torchtitan 0.2.2"
IN_FILE = {
    "magi = 3": "magi is 3, but it is a section; write [magi] and its options below",
    "training = 3": "training is 3, but it is a section; write [training]",
    "[magi]\ndpo = 3": "magi.dpo is 3, but it is a section; write [magi.dpo]",
    "[training]\nsteps = 2.5": "training.steps is 2.5; use a whole number",
    "[validation]\nsteps = 0": "validation steps must be positive or -1; correct the TOML file or the command line",
    f"[training]\nsteps = 0x{'f' * 5000}": "training.steps is <a int too large to show>; use a number of at most 64",
    '[training]\ndataset_path = ["a.jsonl"]': "training.dataset_path is ['a.jsonl']; use a string",
    "[training]\ndataset_path = 3": "training.dataset_path is 3; use a string",
    "[magi]\nepochs = 9223372036854775808": "magi.epochs is 9223372036854775808; use a number of at most 64 bits",
    '[checkpoint]\nfolder = "a\\u0000b"': r"checkpoint.folder is 'a\x00b'; leave the NUL out",
    '[magi.dpo]\nreference_path = "a\\u0000b"': r"magi.dpo.reference_path is 'a\x00b'; leave the NUL out",
    r'"a\n\u001b" = 3': rf"'a\n\x1b' {NO_OPTION}; use one of",
    f"[training]\n{'a' * 5000} = 3": f"'training.{'a' * 67}... {NO_OPTION}",
    f"magi = '{'a' * 5000}'": f"magi is '{'a' * 76}..., but it is a section; write [magi] and its options below",
    f"a = {'[' * 5000}{']' * 5000}": ".toml', which cannot be read (maximum recursion depth exceeded",
    '[model]\nname = "mistral"': f"model.name is 'mistral', which {NO_MODEL}; use one of llama3",
    "\ufeff[training]\nsteps = 2.5": "training.steps is 2.5; use a whole number",
    "[training]\nsteps = true": "training.steps is True; use a whole number",
    '[parallelism]\ncontext_parallel_degree = "2"': "parallelism.context_parallel_degree is '2'; use a whole number",
    '[checkpoint]\nenable = "yes"': "checkpoint.enable is 'yes'; use true or false",
    '[checkpoint]\nasync_mode = "on"': "checkpoint.async_mode is 'on'; use one of 'disabled', 'async'",
    "[model]\nflavor = 8": "model.flavor is 8; use a string",
    '[model]\nconverters = ["a", 3]': "model.converters is ['a', 3]; use a list, each of it a string",
    "[training]\nmax_norm = -1": "training.max_norm is -1; use a number above 0; inf leaves gradients as they are",
    '[debug]\nseed = "x"': "debug.seed is 'x'; use a whole number",
    "[training]\nfoo = 3": f"training.foo {NO_OPTION}; use one of ",
    "[training]\nsequence_len = 3": f"training.sequence_len {NO_OPTION}; did ",
    "[trainning]\nsteps = 3": f"trainning {NO_OPTION}; did you mean training?",
}
ON_LINE = {
    "--validation.freq 0": "validation.freq is 0; use a whole number of at least 1",
    "--checkpoint.interval 0": "checkpoint.interval is 0; use a whole number of at least 1",
    "--checkpoint.keep_latest_k 1": "checkpoint.keep_latest_k is 1; use a whole number of at least 2, or 0",
    "--metrics.log_freq 0": "metrics.log_freq is 0; use",
    "--activation_checkpoint.determinism_check on": "determinism_check is 'on'; use one of 'default', 'none'",
    "--optimizer.name SGD": "'--optimizer.name'" if IS_0_3 else "optimizer.name is 'SGD'; use one of 'AdamW', 'Adam'",
    "--profiling.profiler_active 0": "profiling.profiler_active is 0; use a whole number of at least 1",
    "--profiling.profiler_warmup -1": "profiling.profiler_warmup is -1; use a whole number of at least 0",
    "--training.dataloader.num_workers -1": "training.dataloader.num_workers is -1; use",
    "--validation.dataloader.prefetch_factor 0": "validation.dataloader.prefetch_factor is 0; use",
    "--training.dataloader.prefetch_factor 2": "prefetch_factor is 2, but num_workers is 0; give a number, or leave",
    "--validation.dataloader.persistent_workers": "validation.dataloader.persistent_workers is True, but num_workers",
    f"--training.dataloader.num_workers {10**9}": f"num_workers is {10**9}; use a whole number of at most 1024",
    f"--validation.dataloader.num_workers 1 --validation.dataloader.prefetch_factor {10**9}": "use a whole number of",
    "--parallelism.pipeline_parallel_layers_per_stage 0": "parallelism.pipeline_parallel_layers_per_stage is 0; use",
    "--parallelism.pipeline_parallel_microbatch_size 0": "parallelism.pipeline_parallel_microbatch_size is 0; use",
    "--comm.train_timeout_seconds 1000000001": "comm.train_timeout_seconds is 1000000001; use a whole number of at",
    f"--training.seq_len {2**40}": f"training.seq_len is {2**40}; use a whole number of at most {2**27}",
    f"--comm.trace_buf_size {2**31}": f"comm.trace_buf_size is {2**31}; use a whole number of at most {2**31 - 1}",
    "--training.local_batch_size -1": "training.local_batch_size is -1; use",
    "--training.local_batch_size 0": "training.local_batch_size is 0; use a whole number of at least 1",
    "--training.global_batch_size -8": "training.global_batch_size is -8; use a whole number of at least 1, or -1",
    "--training.global_batch_size 0": "training.global_batch_size is 0; use",
    "--validation.local_batch_size 0": "validation.local_batch_size is 0; use",
    "--training.gc_freq 0": "training.gc_freq is 0; use",
    "--parallelism.context_parallel_degree 0": "parallelism.context_parallel_degree is 0; use",
    "--parallelism.tensor_parallel_degree -2": "parallelism.tensor_parallel_degree is -2; use",
    "--parallelism.data_parallel_shard_degree 0": "parallelism.data_parallel_shard_degree is 0; use",
    "--parallelism.expert_parallel_degree 0": "parallelism.expert_parallel_degree is 0; use",
    "--job.dump_folder /dev/null/x": "job.dump_folder is '/dev/null/x', which cannot be written",
    "--checkpoint.enable --job.dump_folder a\0b": r"job.dump_folder is 'a\x00b', which cannot be written (embedded",
    "--checkpoint.enable --job.dump_folder /proc/x": "job.dump_folder is '/proc/x', which cannot be written",
    "--validation.steps 0": "validation steps must be positive or -1",
    "--optimizer.lr inf": "optimizer.lr is inf; use a finite number",
    "--optimizer.lr nan": "optimizer.lr is nan; use a finite number",
    "--lr_scheduler.min_lr_factor nan": "lr_scheduler.min_lr_factor is nan; use a finite number",
    "--training.max_norm nan": "training.max_norm is nan; use a finite number",
    "--training.max_norm 0": "training.max_norm is 0.0; use a number above 0; inf leaves gradients as they are",
    "--training.max_norm -1": "training.max_norm is -1.0; use a number above 0",
    "--training.max_norm -0.5": "training.max_norm is -0.5; use a number above 0",
    "--optimizer.lr -1e-5": "optimizer.lr is -1e-05; use a number of at least 0",
    "--optimizer.beta1 1": "optimizer.beta1 is 1.0; use a number of at least 0 and below 1",
    "--optimizer.beta2 -0.1": "optimizer.beta2 is -0.1; use",
    "--optimizer.eps 0": "optimizer.eps is 0.0; use a number above 0",
    "--optimizer.weight_decay -0.1": "optimizer.weight_decay is -0.1; use",
    "--lr_scheduler.min_lr_factor -0.1": "lr_scheduler.min_lr_factor is -0.1; use a number from 0 to 1",
    "--lr_scheduler.min_lr_factor 10": "lr_scheduler.min_lr_factor is 10.0; use",
    "--lr_scheduler.decay_ratio 1.5": "lr_scheduler.decay_ratio is 1.5; use",
    "--job.dump_folder s3://b/run": "job.dump_folder is 's3://b/run', an address; mount what it names, and give the",
    "--checkpoint.folder file:///x": "checkpoint.folder is 'file:///x', an address; mount what it names",
    "--comm.save_traces_folder /dev/null": "comm.save_traces_folder is '/dev/null', which cannot be written",
    "--profiling.enable_profiling --profiling.save_traces_folder /dev/null/x": "traces_folder is '/dev/null/x', which",
    "--profiling.enable_memory_snapshot --profiling.save_memory_snapshot_folder /dev/null": (
        "profiling.save_memory_snapshot_folder is '/dev/null', which cannot be written"
    ),
    "--metrics.enable_tensorboard --metrics.save_tb_folder /dev/null": "metrics.save_tb_folder is '/dev/null', which",
    "--job.save_config_file /": "save_config_file is '/', which cannot be written (Is a directory); name a file of",
    "--job.save_config_file /dev/null/x": "save_config_file is '/dev/null', which cannot be written",
    "--checkpoint.initial_load_path gs://b/step-1": "checkpoint.initial_load_path is 'gs://b/step-1', an address",
    "--activation_checkpoint.memory_budget 0.3": "memory_budget is 0.3, but mode is 'selective'; leave it out, or set",
    "--activation_checkpoint.mode full --activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns wq": (
        "per_op_sac_force_recompute_mm_shapes_by_fqns is ['wq'], but mode is 'full'; leave it out, or set mode to 'sel"
    ),
    "--activation_checkpoint.mode none --activation_checkpoint.no-preserve_rng_state": (
        "activation_checkpoint.preserve_rng_state is False, but mode is 'none'; leave it out, or set mode to 'full'"
    ),
    "--activation_checkpoint.mode none --activation_checkpoint.debug": "debug is True, but mode is 'none'; leave it",
    "--activation_checkpoint.mode none --activation_checkpoint.determinism_check none": "determinism_check is 'none', ",
    "--activation_checkpoint.memory_budget 2": "activation_checkpoint.memory_budget is 2.0; use",
    "--magi.lora.alpha 0": "magi.lora.alpha is 0.0; use a number above 0, such as twice the rank",
    "--debug.seed -1": "debug.seed is -1; use a whole number of 0 to 2**64 - 1, or leave it out",
    f"--debug.seed {2**64}": f"debug.seed is {2**64}; use",
    "--magi.lora.alpha inf": "magi.lora.alpha is inf; use a finite number",
    "--training.steps 2.5": "--training.steps",
    "--training.stepz 2": "--training.stepz",
    "--training.stepz 3": "Unrecognized options: --training.stepz, 3; Perhaps you meant: --training.steps INT",
    "--checkpoint.interval": "--checkpoint.interval",
}
ACCEPTED = ["--training.global_batch_size -1", "--validation.steps -1", "--checkpoint.keep_latest_k 0"]
ACCEPTED += [
    f"--debug.seed {2**64 - 1}",
    "--training.max_norm 1",
    "--training.max_norm inf",
    "--optimizer.lr 0",
    "--lr_scheduler.decay_ratio 1 --lr_scheduler.min_lr_factor 0",
]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What is said to each case, from one process."""
    folder, cases = tmp_path_factory.mktemp("files"), []
    plain = folder / "plain.toml"
    plain.write_text(HOOKS)
    for number, text in enumerate(IN_FILE):
        path = folder / f"{number}.toml"
        path.write_text(f"{text}\n{HOOKS}" if text[0] != "[" else f"{HOOKS}{text}\n", encoding="utf-8")
        cases.append((str(path), ["--job.dump_folder", f"{folder}/run"]))
    lines = [*ON_LINE, *ACCEPTED]
    cases += [(str(plain), ["--job.dump_folder", f"{folder}/run", *line.split()]) for line in lines]
    return dict(zip([*IN_FILE, *lines], call(read, cases), strict=True))


@pytest.mark.parametrize("case", [*IN_FILE, *ON_LINE])
def test_a_wrong_value_is_one_line(case, said):
    kind, text = said[case]
    assert kind == "ValueError"
    assert text.isprintable()
    assert len(text) < 1000
    assert text.count("Unrecognized") < 2
    assert ".py" not in text
    assert {**IN_FILE, **ON_LINE}[case] in text


@pytest.mark.parametrize("case", ACCEPTED)
def test_values_with_a_meaning_are_accepted(case, said):
    assert said[case] is None


def read_without_wandb(cases):
    from torchtitan_magi.training.settings import values

    values.find_spec = lambda name: None
    return read(cases)


def test_wandb_that_is_asked_for_and_not_there_is_named(tmp_path):
    (tmp_path / "config.toml").write_text(HOOKS)
    (error,) = call(read_without_wandb, [(f"{tmp_path}/config.toml", ["--metrics.enable_wandb"])])
    said = "metrics.enable_wandb is true, but the package wandb is not installed; install it, or set it to false"
    assert error == ("ValueError", said)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    """A pipe is not waited for."""
    why = dict.fromkeys(("missing", "folder", "binary"), r"\(.*\)")
    why |= {"pipe": r"\(it is no regular file but a pipe, socket or device\)"}
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "pipe")
    for (kind, text), name in zip(call(read, [(f"{tmp_path}/{name}", []) for name in why]), why, strict=True):
        assert kind == "ValueError"
        said = rf"job.config_file is '{tmp_path}/{name}', which cannot be read {why[name]}; give a TOML file"
        assert re.fullmatch(said, text)


def option_names(path):
    """(section, option) of all that a file may have, sections of sections too."""
    left, found = [("", read_job(path))], []
    while left:
        name, section = left.pop()
        found += [(name, option.name) for option in fields(section)]
        parts = [(f"{name}.{option.name}".lstrip("."), getattr(section, option.name)) for option in fields(section)]
        left += [(name, part) for name, part in parts if is_dataclass(part)]
    return found


def test_sizing_knows_the_options_of_torchtitan(tmp_path):
    (tmp_path / "config.toml").write_text(HOOKS)
    found = call(option_names, f"{tmp_path}/config.toml")
    assert ("optimizer", "lr") in found
    assert not [f"{section}.{name}" for section, name in found if name not in OPTIONS.get(section, [name])]


def lay_out(path, arguments):
    """What is checked of the layout, with six processes."""
    from torchtitan_magi.training.settings.sections import check_sections

    job = read_job(path, *arguments, "--training.dataset", "c4", "--comm.trace_buf_size", "0")
    check_layout(job.parallelism, 6)
    check_sections(job, ["c4"], False)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--parallelism.context_parallel_degree 4",
            "shard -1, context 4, tensor 1, pipeline 1, but torchrun started 6",
        ),
        (
            "--parallelism.data_parallel_shard_degree 4",
            "shard 4, context 1, tensor 1, pipeline 1, but torchrun started",
        ),
        ("--parallelism.data_parallel_replicate_degree 7", "replicate 7, data_parallel_shard -1, context 1, tensor 1"),
        (
            f"--training.global_batch_size {10**12}",
            f"training.global_batch_size is {10**12}, but it counts packs, each of 2048 tokens; use at most 524288",
        ),
        (
            f"--training.local_batch_size {10**8} --training.seq_len {2**20}",
            f"training.local_batch_size is {10**8}, but it counts packs, each of {2**20} tokens; use at most 1024",
        ),
        (
            f"--validation.enable --validation.dataset c4 --validation.local_batch_size {10**8}",
            f"validation.local_batch_size is {10**8}, but it counts packs, each of 2048 tokens",
        ),
        ("--parallelism.enable_async_tensor_parallel", "enable_async_tensor_parallel is true, but the model is not c"),
        ("--compile.components=", "compile.components has ''; use one or both of 'model' and 'loss'"),
        (
            "--training.local_batch_size 2 --training.global_batch_size 3",
            "training.global_batch_size is 3; use a multiple of 2, which is training.local_batch_size times 1 data-",
        ),
    ],
)
def test_a_layout_that_does_not_fit_the_processes_is_named(line, message, tmp_path):
    (tmp_path / "config.toml").write_text(HOOKS)
    (said,) = call(value_errors, lay_out, [(f"{tmp_path}/config.toml", line.split())])
    assert message in said


def warnings_of(path, arguments):
    from torchtitan_magi.training.settings import sections

    said = []
    sections.logger.warning = said.append
    sections.check_sections(read_job(path, "--training.dataset", "c4", *arguments), ["c4"], False)
    return said


def test_a_validation_that_is_not_switched_on_is_said(tmp_path):
    (tmp_path / "config.toml").write_text(HOOKS)
    some = ["--validation.dataset", "sft", "--validation.dataset_path", "no.jsonl"]
    line = "This run validates nothing: validation.enable is false, so dataset_path has no effect"
    assert call(warnings_of, f"{tmp_path}/config.toml", some) == [line]
    assert call(warnings_of, f"{tmp_path}/config.toml", []) == []


def test_an_option_without_effect_is_said(tmp_path):
    (tmp_path / "config.toml").write_text(HOOKS)
    some = ["--debug.deterministic_warn_only", "--parallelism.context_parallel_load_balancer", "ptrr"]
    some += ["--checkpoint.enable", "--checkpoint.no-last_save_model_only", "--checkpoint.export_dtype", "bfloat16"]
    some += ["--comm.trace_buf_size", "0", "--comm.save_traces_folder", "traces", "--magi.fp32_reduce"]
    some += ["--parallelism.pipeline_parallel_schedule", "GPipe", "--parallelism.module_fqns_per_model_part", "layers"]
    some += ["--training.dataset", "sft", "--training.dataset_path", "x"]
    some += ["--training.dataloader.num_workers", "1", "--training.dataloader.persistent_workers"]
    some += ["--debug.spmd_typechecking"] if IS_0_3 else ["--parallelism.context_parallel_rotate_method", "alltoall"]
    planned = "which has no effect: rows travel as planned, and the plan balances"
    lines = ["debug.deterministic_warn_only is True, which has no effect: debug.deterministic is false"]
    lines += [f"parallelism.context_parallel_load_balancer is 'ptrr', {planned}"]
    lines += ["comm.save_traces_folder is 'traces', which has no effect: comm.trace_buf_size is 0"]
    lines += ["magi.fp32_reduce is True, which has no effect: parallelism.context_parallel_degree is 1"]
    lines += [
        f"parallelism.{option}, which has no effect: parallelism.pipeline_parallel_degree is 1"
        for option in ("pipeline_parallel_schedule is 'GPipe'", "module_fqns_per_model_part is [['layers']]")
    ]
    workers = "workers live for one pass over the data"
    lines += [f"training.dataloader.persistent_workers is True, which has no effect: {workers}"]
    lines += ["checkpoint.export_dtype is 'bfloat16', which has no effect: checkpoint.last_save_model_only is false"]
    if IS_0_3:
        lines += [
            'debug.spmd_typechecking is True, which has no effect: it is for parallelism.spmd_backend "spmd_types"'
        ]
    else:
        lines += [f"parallelism.context_parallel_rotate_method is 'alltoall', {planned}"]
    assert sorted(call(warnings_of, f"{tmp_path}/config.toml", some)) == sorted(lines)


def start_without_torchrun():
    del os.environ["LOCAL_RANK"]
    importlib.import_module(f"{ADAPTER}.trainer").MagiTrainer(None)


def test_a_start_without_torchrun_is_named():
    message = "LOCAL_RANK is not set, as torchrun sets it; start it with torchrun, as in torchrun -m"
    assert call(value_errors, start_without_torchrun, [()]) == [f"{message} torchtitan_magi.train"]
