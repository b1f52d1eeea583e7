"""Parts of the docs that are made from the code: options, commands, functions. See write_docs.py."""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import os
import re
import runpy
import subprocess
import sys
import textwrap
import tomllib
import types
import warnings
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]

# ------------------------------------------------------------------------------------------------------------- options

OPTIONS = Path(__file__).with_name("torchtitan_options.toml")  # what torchtitan's options mean here
TORCHTITAN: dict[str, dict[str, str]] = tomllib.loads(OPTIONS.read_text())


def option_docs(options: type) -> dict[str, str]:
    """The text under each field of a dataclass, on one line. Raises ValueError for a field that has none."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
            docs[ast.unparse(statement.target)] = " ".join(str(ast.literal_eval(after.value)).split())
    for option in fields(options):
        if option.name not in docs and not is_dataclass(option.type):
            raise ValueError(f"{options.__name__}.{option.name} has no text; write a docstring under it")
    return docs


def in_code(text: str) -> str:
    """Markdown of a text in which `"values"`, `section.option` and ``code`` are code."""
    text = re.sub(r"``(.+?)``", r"`\1`", text).replace("|", "\\|")
    names = (
        rf"\b(?:{'|'.join(['magi', *TORCHTITAN])})\.\w+|\b[a-z]+(?:_[a-z]+)+(?:\.\w+)?|\btorch\.compile|\bconfig\.json"
    )
    words = r'"[^" ]*"|\$\w+|~/[\w./]+\w|\[magi\]|hf://\w+/\w+|\bscripts/\w+\.py'
    return re.sub(rf"(`[^`]*`)|({words}|{names})", lambda found: found[1] or f"`{found[2]}`", text)


def type_of(option: Field[Any]) -> str:
    """A field's type in a TOML file's words."""
    kinds = [kind for kind in get_args(option.type) if kind is not types.NoneType]
    if get_origin(option.type) is Literal:
        return ", ".join(f'`"{kind}"`' for kind in kinds)
    kind = kinds[0] if get_origin(option.type) is types.UnionType else option.type
    words = {str: "string", bool: "boolean", int: "integer", float: "float"}
    return "list of strings" if get_origin(kind) is list else words[kind]


def default_of(option: Field[Any]) -> str:
    """A field's default as a TOML file has it."""
    value: Any = option.default if option.default is not MISSING else option.default_factory()  # type: ignore[misc]
    if value is None:
        return "unset"
    return f'`"{value}"`' if isinstance(value, str) else f"`{str(value).lower()}`"


def options_of(owner: type) -> list[Field[Any]]:
    """The options of a section, without the sections in it."""
    return [option for option in fields(owner) if not is_dataclass(option.type)]


def magi_options(section: str) -> str:
    """A table of [magi], [magi.dpo], [magi.rollouts] or [magi.lora]."""
    from torchtitan_magi.training.settings import options

    owners = {"magi": options.Magi, "magi.dpo": options.DPO, "magi.lora": options.LoRA}
    owner = (owners | {"magi.rollouts": options.Rollouts})[section]
    docs = option_docs(owner)
    rows = [(f"`{found.name}`", type_of(found), default_of(found), docs[found.name]) for found in options_of(owner)]
    return table(["option", "type", "default", "meaning"], rows)


def torchtitan_options() -> str:
    """Tables of torchtitan's options that matter here, one for each section. Raises KeyError for one it has not."""
    from torchtitan_magi.titan.v03.toml_sections import JobConfig

    sections = {section.name: section.type for section in fields(JobConfig)}
    parts = []
    for section, meanings in TORCHTITAN.items():
        options = {option.name: option for option in fields(sections[section])}  # type: ignore[arg-type]
        rows = [
            (f"`{name}`", type_of(options[name]), default_of(options[name]), text) for name, text in meanings.items()
        ]
        parts += [f"### [{section}]", table(["option", "type", "torchtitan's default", "meaning here"], rows)]
    return "\n\n".join(parts)


def table(heads: list[str], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ["---"] * len(heads), *([*row[:-1], in_code(row[-1])] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ----------------------------------------------------------------------------------------------------------- run files


def recipes() -> str:
    """What the files of train_configs/ that train a published model take."""
    from torchtitan_magi.launch import num_processes

    rows = []
    for path in sorted((ROOT / "train_configs").glob("*.toml")):
        run = tomllib.loads(path.read_text())
        if run["model"]["flavor"] == "hf":
            training, rate = run["training"], f"{run['optimizer']['lr']:.0e}".replace("e-0", "e-")
            tokens, warmup = training["seq_len"], run["lr_scheduler"]["warmup_steps"]
            counts = training["global_batch_size"] * tokens, tokens, warmup
            rows.append((f"`{path.name}`", str(num_processes(run, [], 0)), rate, *(f"{count:,}" for count in counts)))
    return table(["file", "GPUs", "lr", "tokens per step", "tokens per pack", "steps of warm-up"], rows)


# ------------------------------------------------------------------------------------------------------------ commands

COMMANDS = ("configs", "data", "size", "train", "verify", "calibrate")  # of torchtitan-magi
SCRIPTS = ("scripts", "benchmarks", "docs/_build", "tests/long")
SHELL = ("train.sh", "test.sh", "test_gpu.sh")
COLUMNS = 100  # characters


def commands() -> str:
    """What each command prints for --help."""
    from torchtitan_magi import __main__ as front

    helps: dict[str, Callable[[], str]] = {"torchtitan-magi": lambda: front.__doc__}
    helps |= {f"torchtitan-magi {name}": functools.partial(command_help, name) for name in COMMANDS}
    helps["torchrun -m torchtitan_magi.train"] = functools.partial(command_help, "train", "train")
    helps |= {f"./scripts/{name}": functools.partial(shell_help, name) for name in SHELL}
    return "\n\n".join(f"## {command}\n\n```text\n{text().strip()}\n```" for command, text in helps.items())


def command_help(name: str, module: str = "") -> str:
    """Of ``torchtitan-magi NAME``, or of another module."""
    from torchtitan_magi.__main__ import MODULES

    module, printed = f"torchtitan_magi.{module or MODULES[name]}", io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS=str(COLUMNS)),
        mock.patch.object(sys, "argv", [f"torchtitan-magi {name}", "--help"]),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
        warnings.catch_warnings(action="ignore"),  # runpy's, of a module that others have imported
    ):
        runpy.run_module(module, run_name="__main__")
    return printed.getvalue()


def shell_help(name: str) -> str:
    return subprocess.run([ROOT / "scripts" / name, "--help"], check=True, capture_output=True, text=True).stdout


def scripts() -> str:
    """The other scripts, each with the first sentence of its docstring."""
    rows = []
    for path in sorted(path for folder in SCRIPTS for path in (ROOT / folder).glob("*.py")):
        tree = ast.parse(path.read_text())
        doc = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
        if any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body):
            rows.append(
                (f"`{path.relative_to(ROOT)}`", re.split(r"(?<=\w)[.:]? +python3? [\w/]+/|\. ", doc)[0].rstrip(".:"))
            )
    return table(["script", "what it does"], rows)


# ----------------------------------------------------------------------------------------------------------- functions


def public_names(module_name: str) -> str:
    """A table of the names in a module's __all__, each with the first sentence of its docstring."""
    module = importlib.import_module(module_name)
    rows = [(f"`{name}`", first_sentence(getattr(module, name))) for name in sorted(module.__all__, key=str.lower)]
    return table(["name", "what it is or does"], rows)


def first_sentence(thing: Any) -> str:
    """The first sentence of the docstring of a function or class; a value of another kind is shown."""
    if not callable(thing):
        return f"the constant {thing!r}"
    paragraph = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[\w)])\. ", paragraph)[0].rstrip(".")


PARTS: dict[str, Callable[[], str]] = {
    "options-magi": functools.partial(magi_options, "magi"),
    "options-dpo": functools.partial(magi_options, "magi.dpo"),
    "options-rollouts": functools.partial(magi_options, "magi.rollouts"),
    "options-lora": functools.partial(magi_options, "magi.lora"),
    "options-torchtitan": torchtitan_options,
    "recipes": recipes,
    "commands": commands,
    "scripts": scripts,
    "api-core": functools.partial(public_names, "torchtitan_magi"),
    "api-data": functools.partial(public_names, "torchtitan_magi.data"),
}
