"""torchtitan_magi.launch: as many processes as degrees ask for, one line of what went wrong; the Python of set-up."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import packaging
import pytest
import torch.distributed.run
from support.processes import python
from support.runs import ROOT
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from torchtitan_magi.launch import check_hooks, in_one_line, launch, main, num_processes, overridden, read

HOOKED = {"magi": {}, "job": {"custom_config_module": "x"}, "experimental": {"custom_import": "x"}}


@pytest.mark.parametrize(
    ("degrees", "arguments", "num_gpus", "want"),
    [
        ({}, [], 0, 1),
        ({}, [], 8, 8),  # data_parallel_shard_degree is -1 by default: all GPUs
        ({"context_parallel_degree": 2}, [], 0, 2),
        ({"context_parallel_degree": 2}, [], 8, 8),
        ({"context_parallel_degree": 2}, [], 3, 2),
        ({"context_parallel_degree": 2, "data_parallel_shard_degree": 2}, [], 8, 4),
        ({"context_parallel_degree": 2}, ["--parallelism.tensor_parallel_degree", "2"], 0, 4),
        ({"context_parallel_degree": 2}, ["--parallelism.context-parallel-degree=4"], 0, 4),
        ({"data_parallel_replicate_degree": 2}, ["--parallelism.data_parallel_shard_degree", "3"], 0, 6),
    ],
)
def test_the_number_of_processes_follows_from_the_degrees(degrees, arguments, num_gpus, want):
    assert num_processes({"parallelism": degrees}, arguments, num_gpus) == want


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_parallel_degree", 0), ("context_parallel_degree", -1), ("tensor_parallel_degree", "abc"),
        ("data_parallel_shard_degree", 0), ("data_parallel_shard_degree", -2), ("context_parallel_degree", 2.5),
    ],
)  # fmt: skip
def test_a_degree_that_is_no_number_of_processes_is_named(name, value):
    with pytest.raises(ValueError, match=rf"parallelism.{name} is {value!r}; use a whole number of at least 1"):
        num_processes({"parallelism": {name: value}}, [], 8)
    with pytest.raises(ValueError, match=f"{name} has no value"):
        num_processes({}, [f"--parallelism.{name}"], 8)


def test_a_file_may_begin_with_a_byte_order_mark_and_is_no_pipe(tmp_path):
    (tmp_path / "a.toml").write_text("\ufeff[magi]\n", encoding="utf-8")
    assert read(tmp_path / "a.toml") == {"magi": {}}
    os.mkfifo(tmp_path / "b.toml")
    with pytest.raises(ValueError, match="it is no regular file but a pipe, socket or device; give a TOML file"):
        read(tmp_path / "b.toml")


def test_what_others_wrote_is_printable():
    assert in_one_line("a\x1b[31m\udcff\nb") == "a?[31m?"
    assert in_one_line("Failed: backend='inductor' raised:\n  TypeError: x\n\nmore") == (
        "Failed: backend='inductor' raised: TypeError: x"
    )
    assert in_one_line("\n") == "no reason given"
    assert in_one_line("AssertionError:") == "AssertionError:"


def test_the_command_line_goes_before_the_file():
    config = {"job": {"custom_config_module": "from_file"}}
    assert overridden(config, [], "job", "custom_config_module") == "from_file"
    assert overridden(config, ["--job.custom-config-module", "given"], "job", "custom_config_module") == "given"
    assert overridden(config, ["--job.custom-config_module=given"], "job", "custom_config_module") == "given"
    assert overridden(config, [], "experimental", "custom_import") is None


@pytest.mark.parametrize(("section", "name"), [("job", "custom_config_module"), ("experimental", "custom_import")])
def test_a_magi_section_without_a_hook_is_refused_by_name(section, name):
    with pytest.raises(ValueError, match=f"no {section}.{name}"):
        check_hooks({**HOOKED, section: {}}, [])
    check_hooks(HOOKED, [])
    check_hooks({**HOOKED, section: {}}, [f"--{section}.{name}=x"])


BY_PATH = ("-P", ROOT / "torchtitan_magi" / "launch.py")


def failed_launch(*arguments, path="", program=BY_PATH):
    """What a launch that fails says, by lines, with a folder put before all others where Python looks for modules."""
    paths = f"{path}{os.pathsep}{ROOT}".lstrip(os.pathsep)
    result = python(*program, *arguments, PYTHONPATH=paths)
    assert result.returncode == 1
    return result.stderr.strip().splitlines()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[magi]\n", "no job.custom_config_module"), ("[magi\n", "line 1"), (None, "No such file"),
        ("[parallelism]\ncontext_parallel_degree = 0\n", "context_parallel_degree is 0"),
        ("parallelism = 3\n", "parallelism is 3, but it is a section"),
        (f"parallelism = '{'a' * 5000}'\n", "aaa..., but it is a section; write [parallelism]"),
        (f"[parallelism]\ntensor_parallel_degree = 0x{'f' * 5000}\n", "is a number of thousands of digits; use"),
        (f"[{'a' * 5000}]\n" * 2, "aaa...aaa"),
        ("job = 3\n[magi]\n", "job is 3, but it is a section"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_run_ends_in_one_line(tmp_path, text, message):
    path = tmp_path / "config.toml"
    if text is not None:
        path.write_text(text)
    lines = failed_launch(path)
    assert message in lines[-1]
    assert len(lines[-1]) < 2500
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("program", [BY_PATH, ("-m", "torchtitan_magi.launch")])
def test_no_argument_ends_in_one_line(program):
    (line,) = failed_launch(program=program)
    assert line.startswith("no TOML file; use launch.py FILE.toml")


TORCH = "class cuda:\n    def device_count(): return 0\n"
BROKEN = "torch cannot be imported ({}: it is broken); ./scripts/train.sh sets up"


@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        ("torch", "raise ImportError('it is broken')", BROKEN.format("ImportError")),
        ("torch", "raise ValueError('it is broken')", BROKEN.format("ValueError")),
        ("torch", "if", "torch cannot be imported (SyntaxError: invalid syntax (__init__.py, line 1)); ./scripts/"),
        ("torch", "raise KeyboardInterrupt", "ended by SIGINT"),
        ("torch/distributed", "raise RuntimeError('it is broken')", BROKEN.format("RuntimeError")),
        ("torch/distributed", "raise KeyboardInterrupt", "ended by SIGINT"),
    ],
)
def test_a_broken_torch_or_an_interruption_ends_in_one_line(tmp_path, module, code, message):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / module).mkdir(exist_ok=True)
    (tmp_path / module / "__init__.py").write_text(code)
    (line,) = failed_launch(ROOT / "train_configs" / "debug.toml", path=tmp_path)
    assert line.startswith(message)


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (SignalException("", signal.SIGTERM), "ended by SIGTERM"),
        (KeyError("message"), "torchrun failed: KeyError: 'message'"),
        (RuntimeError("no port\nis free"), "torchrun failed: RuntimeError: no port"),
    ],
)
def test_however_torchrun_ends_it_is_one_line(raised, line):
    with mock.patch.object(torch.distributed.run, "run", side_effect=raised), pytest.raises(SystemExit) as caught:
        launch(["--standalone", "script.py"])
    assert re.fullmatch(line, caught.value.code)


@pytest.mark.parametrize(("ignored", "handled"), [(False, True), (True, False)])
def test_a_hangup_that_is_ignored_as_by_nohup_stays_so(ignored, handled):
    given = []
    with mock.patch.object(torch.distributed.run, "run", given.append):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        try:
            launch(["--standalone", "script.py"])
        finally:
            signal.signal(signal.SIGHUP, before)
    (options,) = given
    assert ("SIGHUP" in options.signals_to_handle.split(",")) == handled
    assert "SIGTERM" in options.signals_to_handle


NO_REASON = "a rank failed and could not write why: its error file is empty or broken; make room .*"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "rank 0 failed: exit code 1"),
        ("", NO_REASON),
        ("\x00", NO_REASON),
        ("[]", NO_REASON),
        ('{"message": 3}', NO_REASON),
        ('{"message": {"extraInfo": {}}}', NO_REASON),
        ('{"message": "why", "timestamp": "now"}', NO_REASON),
        ('{"message": {"message": "why", "extraInfo": {"timestamp": "1", "py_callstack": 3}}}', NO_REASON),
        ('{"message": {"extraInfo": {"timestamp": "1"}}}', "rank 0 failed: exit code 1"),
        ('{"message": {"message": {"a": 3}, "extraInfo": {"timestamp": "1"}}}', NO_REASON),
        ('{"message": "why"}', "rank 0 failed: why"),
        ('{"message": {"message": "why", "extraInfo": {"timestamp": "1", "py_callstack": ""}}}', "rank 0 failed: why"),
    ],
)
def test_an_error_file_of_any_shape_is_one_line(tmp_path, content, line):
    def run(_):
        raise ChildFailedError("rank", {0: ProcessFailure(0, 1, 1, str(tmp_path / "error.json"))})

    if content is not None:
        (tmp_path / "error.json").write_text(content)
    with mock.patch.object(torch.distributed.run, "run", run), pytest.raises(SystemExit) as caught:
        launch(["--standalone", "script.py"])
    assert re.fullmatch(line, caught.value.code)


@pytest.mark.parametrize(
    ("before", "line"),
    [(2, r"rank 1 failed: Signal 9 \(SIGKILL\) received by PID 2"), (31, "rank 0 failed: peer is gone")],
    ids=["killed before", "killed by torchrun"],
)
def test_a_killed_rank_is_the_reason_unless_torchrun_killed_it(tmp_path, before, line):
    """torchrun dates what was killed by when it looks, to the second. before: seconds since the other rank's error."""
    extra = {"timestamp": str(int(time.time()) - before), "py_callstack": ""}
    (tmp_path / "error.json").write_text(json.dumps({"message": {"message": "peer is gone", "extraInfo": extra}}))

    def run(_):
        killed = ProcessFailure(1, 2, -signal.SIGKILL, str(tmp_path / "none.json"))
        raise ChildFailedError("rank", {0: ProcessFailure(0, 1, 1, str(tmp_path / "error.json")), 1: killed})

    with mock.patch.object(torch.distributed.run, "run", run), pytest.raises(SystemExit) as caught:
        launch(["--standalone", "script.py"])
    assert re.fullmatch(line, caught.value.code)


def test_a_failing_import_of_a_rank_is_the_last_line(tmp_path):
    (tmp_path / "tyro.py").write_text("raise ImportError('tyro is broken')")
    *_, last = failed_launch(ROOT / "train_configs" / "debug.toml", path=tmp_path)
    assert re.fullmatch("rank [01] failed: ImportError: tyro is broken", last)


def test_the_first_failure_is_the_last_line():
    *_, last = failed_launch(ROOT / "train_configs" / "debug.toml", "--magi.epochs", "0")
    assert re.fullmatch(r"rank [01] failed: ValueError: magi.epochs is 0; use .*", last)


# ---------------------------------------------------------------------------------- set-up: which interpreter is used

FAKE_PIP = """
import pathlib, sys
if "install" in sys.argv:
    pathlib.Path(__file__).with_name("torchtitan.dist-info").joinpath("METADATA").write_text("Version: 0.3.1")
"""


def install(folder, version):
    """What torchtitan of a version leaves in a folder, as far as set-up looks."""
    (folder / "torchtitan.dist-info").mkdir(parents=True)
    (folder / "torchtitan.dist-info" / "METADATA").write_text(f"Version: {version}")
    (folder / "torchtitan.py").write_text("")
    return folder


def make_environment(folder, version):
    """An environment with torchtitan, packaging and a pip that repairs torchtitan's version."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (install(site, version) / "torch.py").write_text("class version: cuda = '13'")
    (site / "pip.py").write_text(FAKE_PIP)
    (site / "packaging").symlink_to(Path(packaging.__file__).parent)


def set_up(folder, *, path="0.3.0", venv=None, python_path=None, titan=None):
    """Exit code, interpreter and messages of set-up where python3, .venv and PYTHONPATH have these torchtitans, and the
    environment names one by TITAN."""
    for name in ("setup.sh", "check_python.py", "constraints.txt", "constraints-0.2.2.txt", "../pyproject.toml"):
        (folder / "scripts" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, folder / "scripts" / name)
    make_environment(folder / "on_path", path)
    if venv:
        make_environment(folder / (".venv" if titan is None else f".venv-{titan}"), venv)
    environment = {"PATH": f"{folder}/on_path/bin:/usr/bin:/bin"} | ({"TITAN": titan} if titan else {})
    if python_path:
        environment["PYTHONPATH"] = str(install(folder / "other", python_path))
    code = 'set -euo pipefail; needs="torch torchtitan"; source scripts/setup.sh; echo "$python"'
    result = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=folder, env=environment)
    return result.returncode, result.stdout.strip().removeprefix(f"{folder}/"), result.stderr.strip().splitlines()


def test_set_up_uses_an_interpreter_with_the_right_versions(tmp_path):
    assert set_up(tmp_path / "right") == (0, "python3", [])
    assert set_up(tmp_path / "carried", path="0.2.2", python_path="0.3.0") == (0, "python3", [])
    wrong = r"torchtitan 0\.2\.2 in \S+, but torchtitan==0\.3\.\* is needed"
    code, python, lines = set_up(tmp_path / "wrong", path="0.2.2", venv="0.3.0")
    assert (code, python) == (0, ".venv/bin/python")
    assert re.fullmatch(f"python3 has {wrong}; using .venv", *lines)
    code, python, lines = set_up(tmp_path / "both", path="0.2.2", venv="0.2.2")
    assert (code, python) == (0, ".venv/bin/python")
    assert re.fullmatch(rf"Setting up .venv \(once\) \.\.\. It has {wrong}\.", lines[1])
    code, python, lines = set_up(tmp_path / "forced", python_path="0.2.2")
    assert (code, python) == (1, "")
    assert re.fullmatch(f"PYTHONPATH brings {wrong}; take that folder off PYTHONPATH", *lines)


def test_set_up_uses_the_torchtitan_that_is_named(tmp_path):
    assert set_up(tmp_path / "right", path="0.2.2", titan="0.2.2") == (0, "python3", [])
    code, python, lines = set_up(tmp_path / "wrong", venv="0.2.2", titan="0.2.2")
    assert (code, python) == (0, ".venv-0.2.2/bin/python")
    assert re.fullmatch(
        r"python3 has torchtitan 0\.3\.0 in \S+, but torchtitan==0\.2\.2 is needed; using \.venv-0\.2\.2", *lines
    )
    assert set_up(tmp_path / "unknown", titan="0.4") == (1, "", ["TITAN is 0.4; use 0.3 or 0.2.2"])


@pytest.mark.parametrize(
    ("given", "added"),
    [((), ["--training.mixed_precision_param=float32"]), (("--training.mixed-precision-param=bfloat16",), [])],
)
def test_a_run_on_the_cpu_is_in_float32_unless_told_otherwise(monkeypatch, capsys, given, added):
    started = []
    path = str(ROOT / "train_configs" / "debug.toml")
    monkeypatch.setattr("sys.argv", ["launch.py", path, *given])
    monkeypatch.setattr("torchtitan_magi.launch.count_gpus", lambda: 0)
    monkeypatch.setattr("torchtitan_magi.launch.launch", started.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(os, "environ", {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"})
    main()
    assert os.environ.pop("OMP_NUM_THREADS") == "1"
    assert started[0][started[0].index(path) + 1 :] == [*given, *added]
    assert ("in float32" in (printed := capsys.readouterr().out)) == bool(added)
    assert printed.startswith("2 processes, 0 GPUs: running on CPU with gloo")
    monkeypatch.setattr("sys.argv", [*sys.argv, "--parallelism.context_parallel_degree=1"])
    main()
    assert capsys.readouterr().out.startswith("1 process, 0 GPUs: running on CPU with gloo")
    assert "OMP_NUM_THREADS" not in os.environ  # one process has all cores
