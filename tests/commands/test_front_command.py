"""torchtitan-magi: one command for all of them, without torch until one needs it; the run files that it copies."""

import importlib
import sys
import tomllib
from unittest import mock

import pytest
from support.processes import python
from support.runs import ROOT

from torchtitan_magi import __main__ as front

CONFIGS = sorted(path.stem for path in (ROOT / "train_configs").glob("*.toml"))


def call(*arguments):
    """Runs the command in this process; its exit code."""
    with mock.patch.object(sys, "argv", ["torchtitan-magi", *map(str, arguments)]), pytest.raises(SystemExit) as end:
        front.main()
    return end.value.code


def test_its_help_needs_no_torch_and_names_all_commands():
    code = (
        "import sys, torchtitan_magi.__main__ as front; front.main(); assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    result = python("-c", code, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr
    for name in front.MODULES.keys() - {"report"}:
        assert f"\n  {name} " in result.stdout


@pytest.mark.parametrize("name", ["data", "size", "report", "verify", "configs", "calibrate"])
def test_each_command_is_found_and_has_its_name(name, capsys):
    assert call(name, "--help") == 0
    assert ("torchrun" if name == "calibrate" else f"usage: torchtitan-magi {name} ") in capsys.readouterr().out


def test_train_is_the_launcher(capsys):
    use = "torchtitan-magi train FILE.toml [--SECTION.OPTION VALUE ...]"
    assert call("train") == f"no TOML file; use {use}, see torchtitan-magi configs list"
    remedy = "give a TOML file as in train_configs/"
    assert call("train", "nowhere.toml") == f"nowhere.toml: it cannot be read (No such file or directory); {remedy}"
    assert call("train", "a" * 300).endswith(f": it cannot be read (File name too long); {remedy}")
    assert call("train", "/") == f"/: it cannot be read (Is a directory); {remedy}"


def test_a_wrong_command_ends_in_one_line(capsys):
    assert call("trian") == 2
    assert capsys.readouterr().err == "torchtitan-magi: error: there is no command 'trian'; did you mean train?\n"
    assert call("xyzzy") == 2
    assert capsys.readouterr().err.endswith("there is no command 'xyzzy'; see torchtitan-magi --help\n")


@pytest.mark.parametrize("name", ["size", "verify"])
def test_an_interrupted_command_ends_without_a_traceback(name, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    module = importlib.import_module(f"torchtitan_magi.{front.MODULES[name]}")
    monkeypatch.setattr(module, "main", interrupted)
    assert call(name) == 130


def test_calibrate_without_torchrun_ends_in_one_line(capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert call("calibrate") == 2
    assert capsys.readouterr().err.startswith(
        "torchtitan-magi calibrate: error: calibrate measures communication; start"
    )


@pytest.mark.parametrize("content", [None, "{", "[]", '{"a": 1}', '{"rows": []}', '{"rows": [{"impl": "ours"}, 3]}'])
def test_calibrate_refuses_what_has_no_figures_in_one_line(content, capsys, tmp_path):
    path = tmp_path / "figures.json"
    if content is not None:
        path.write_text(content)
    assert call("calibrate", "--fit", path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"torchtitan-magi calibrate: error: {path} has no figures of benchmarks/bench_kernel.py (")


@pytest.mark.parametrize(
    ("num_gpus", "message"),
    [(0, "torch sees 0 GPUs here; measure where"), (1, "cannot write nowhere/cost.json; give a file")],
)
def test_calibrate_says_before_it_measures_what_cannot_be(num_gpus, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    assert call("calibrate", "--output", "nowhere/cost.json") == 2
    assert capsys.readouterr().err.startswith(f"torchtitan-magi calibrate: error: {message}")


def test_all_run_files_are_listed(capsys):
    call("configs", "list")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == CONFIGS
    assert all(len(line.split()) > 5 for line in lines)


def strings(value, path=()):
    """Each string of a TOML file, by section and option."""
    if isinstance(value, dict):
        return {key: text for name, inner in value.items() for key, text in strings(inner, (*path, name)).items()}
    return {".".join(path): value} if isinstance(value, str) else {}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_copied_run_file_reads_what_is_there_or_says_what_is_not(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    call("configs", "copy", name, "mine")
    said = capsys.readouterr().out
    text = (tmp_path / "mine" / f"{name}.toml").read_text()
    assert "train_configs/" not in text
    assert "scripts/" not in text
    copied, stock = tomllib.loads(text), tomllib.loads((ROOT / "train_configs" / f"{name}.toml").read_text())
    for option, value in strings(stock).items():
        if option.endswith("_path"):
            given = strings(copied)[option]
            is_demo = value.startswith("assets/demo/")
            assert given == (str(ROOT / value) if is_demo else value)
            assert (f"{option} = '{value}'" in said) != is_demo
        else:
            assert strings(copied)[option] == value
    assert said.splitlines()[-1] == f"To train: torchtitan-magi train mine/{name}.toml"
    assert call("configs", "copy", name, "mine") == 2
    assert "is there already; give another folder, or remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["copy"], "NAME is missing; give one of debug, "),
        (["list", "debug"], "list takes no NAME, which is 'debug'; use copy, or leave it out"),
        (["copy", "lama"], "there is no run file 'lama'; there are debug, "),
        (["copy", "debug.toml", "nowhere"], "cannot write nowhere/debug.toml; give a file in a folder that exists"),
    ],
)
def test_a_copy_that_cannot_be_ends_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("configs", *arguments) == 2
    assert capsys.readouterr().err.startswith(f"torchtitan-magi configs: error: {message}")
