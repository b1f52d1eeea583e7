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
from collections.abc import Callable, Iterator
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
    """A table of [magi], [magi.dpo] or [magi.lora]."""
    from torchtitan_magi.training.settings import options

    owner = {"magi": options.Magi, "magi.dpo": options.DPO, "magi.lora": options.LoRA}[section]
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

MODULES = ("train", "data", "report", "verify", "calibrate", "commands.configs")
SCRIPTS = ("scripts", "benchmarks", "docs/_build", "tests/long")
SHELL = ("train.sh", "test.sh", "test_gpu.sh")
COLUMNS = 100  # characters


def commands() -> str:
    """What each command prints for --help."""
    helps = {"torchtitan-magi": functools.partial(module_help, "__main__")}
    helps |= {f"python -m torchtitan_magi.{name}": functools.partial(module_help, name) for name in MODULES}
    helps |= {f"./scripts/{name}": functools.partial(shell_help, name) for name in SHELL}
    return "\n\n".join(f"## {command}\n\n```text\n{text().strip()}\n```" for command, text in helps.items())


def module_help(name: str) -> str:
    module, printed = f"torchtitan_magi.{name}", io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS=str(COLUMNS)),
        mock.patch.object(sys, "argv", [name, "--help"]),
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
    """Signature and docstring of each name in a module's __all__."""
    module, paragraphs = importlib.import_module(module_name), []
    for name in sorted(module.__all__, key=str.lower):
        paragraphs += [f"### {name}", *described(getattr(module, name), name)]
    return "\n\n".join(paragraphs)


def described(thing: Any, name: str) -> Iterator[str]:
    """Markdown paragraphs."""
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        yield f"```python\n{name} = {thing!r}\n```"
        return
    source = textwrap.dedent(inspect.getsource(thing))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef | ast.FunctionDef)
    yield f"```python\n{signature(definition, source)}\n```"
    yield markdown(inspect.getdoc(thing) or "")
    if isinstance(definition, ast.ClassDef) and (members := list(members_of(definition))):
        yield "Members:"
        yield "\n".join(members)


def signature(definition: ast.ClassDef | ast.FunctionDef, source: str) -> str:
    """Python code: a function's line, or a class with what makes it: its constructor, or its fields with comments."""
    if isinstance(definition, ast.FunctionDef):
        return def_line(definition, source)
    made = [m for m in definition.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"]
    fields_of = [source.splitlines()[m.lineno - 1] for m in definition.body if isinstance(m, ast.AnnAssign)]
    lines = [def_line(made[0], source)] if made else [re.sub(r" = field\(.*\)", "", line) for line in fields_of]
    bases = f"({', '.join(map(ast.unparse, definition.bases))})" if definition.bases else ""
    return "\n".join([f"class {definition.name}{bases}:", *lines])


def def_line(function: ast.FunctionDef, source: str) -> str:
    """As in the source, up to the body."""
    lines = source.splitlines()[function.lineno - 1 : function.body[0].lineno - 1]
    return "\n".join(lines) + " ..."


def parameters(arguments: ast.arguments) -> str:
    """Without the first one, self or cls."""
    return re.sub(r"(?<=\S)=(?=\S)", " = ", ", ".join(ast.unparse(arguments).split(", ")[1:]))


def members_of(definition: ast.ClassDef) -> Iterator[str]:
    """A list of the public methods and properties that have a docstring."""
    for member in definition.body:
        if not isinstance(member, ast.FunctionDef) or member.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator) for decorator in member.decorator_list}
        if (doc := ast.get_docstring(member)) and "abstractmethod" not in decorators:
            is_value = decorators & {"property", "functools.cached_property"}
            name = member.name if is_value else f"{member.name}({parameters(member.args)})"
            yield f"- `{name}`: {' '.join(doc.split(chr(10) * 2)[0].split())}".replace("``", "`")


SECTIONS = {"Args:": "Arguments:", **{f"{name}:": f"{name}:" for name in ("Returns", "Raises", "Attributes")}}


def markdown(docstring: str) -> str:
    """A docstring whose sections (arguments, errors, attributes) are lists."""
    lines, section = [], ""
    for line in docstring.replace("``", "`").splitlines():
        if line in SECTIONS:
            section = line
            lines += [SECTIONS[line], ""]
            continue
        section = section if line.startswith(" ") or not line else ""
        entry = re.match(r"    ([\w, ]+): (.*)", line) if section in ("Args:", "Raises:", "Attributes:") else None
        if entry:
            lines.append(f"- {', '.join(f'`{name}`' for name in entry[1].split(', '))}: {entry[2]}")
        else:
            lines.append(line.removeprefix("    ") if section == "Returns:" else line.removeprefix("      "))
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "options-magi": functools.partial(magi_options, "magi"),
    "options-dpo": functools.partial(magi_options, "magi.dpo"),
    "options-lora": functools.partial(magi_options, "magi.lora"),
    "options-torchtitan": torchtitan_options,
    "recipes": recipes,
    "commands": commands,
    "scripts": scripts,
    "api-core": functools.partial(public_names, "torchtitan_magi"),
    "api-data": functools.partial(public_names, "torchtitan_magi.data"),
}
