"""Every command and snippet of README.md and docs/ holds: it is run, or parsed by what it is meant for.

A fenced block says its language. What is done with each:

- python: the blocks of a page run one after the other, in one namespace that begins with GIVEN; what is generated from
  the code is compiled only.
- toml: read by the loader of options, with names, types and values.
- json, jsonl: parsed.
- bash: arguments go to the parser of the command; files of the repository exist; heredocs are checked by the name of
  the file that they write.
- text, or no language: output. A line that begins with a command of ours is checked like bash, and so are commands in
  `inline code`.

What none of this can check has one of these lines above the fence:

    <!-- ran: 2026-11-22 on two H200, torchtitan_magi 0.1.0 -->
    <!-- not run: the reason -->
"""

import argparse
import contextlib
import glob
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement
from support.adapter import read_job
from support.runs import DEBUG_TOML, ROOT, call

from torchtitan_magi.__main__ import MODULES

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = re.compile(r"<!-- (?:ran: (\d{4}-\d\d-\d\d) on .+, torchtitan_magi \d+\.\d+\S*|not run: .+) -->")
# A line of output, or inline code, that is a command of ours.
OURS = re.compile(
    r"(?:\w+=\S+ )*(?:python3? (?:-m torchtitan_magi|(?:scripts|benchmarks|docs/_build|tests/long|examples)/)|"
    r"torchrun |torchtitan-magi |\./scripts/)"
)
HARMLESS = {"cd", "source", "export", "mkdir", "ls", "cat", "cp", "mv", "rm", "head", "tail", "echo", "wc", "git"}
HARMLESS |= {"sha256sum", "sbatch", "ruff", "mypy", "pytest", "for", "done", "fi"}
KEYWORDS = {"do", "then", "else", "if", "while", "!"}  # a command follows
HOOKS = ["--job.custom_config_module", "torchtitan_magi.titan", "--experimental.custom_import", "torchtitan_magi.titan"]
GIVEN = """
import torch
cu_seqlens, total_tokens, cp_size, mesh = [0, 40, 100], 100, 1, {"cp": None}
x, q, k, v = torch.randn(100, 8), torch.randn(100, 4, 16), torch.randn(100, 2, 16), torch.randn(100, 2, 16)
q0, q1, k0, k1, mask_type = 0, 50, 0, 100, 1
"""


@dataclass(frozen=True)
class Block:
    """What is to be checked. place: "README.md:15", the line of the fence or of the inline code."""

    place: str
    language: str
    text: str
    mark: str = ""
    generated: bool = False


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, and its commands in inline code."""
    name, prose = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name, []
    mark, generated, fence, opened, inside = "", False, "", None, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        found = re.match(r"\s*(`{3,})\s*(\w*)", line)
        if opened:
            if line.strip() == fence:
                yield replace(opened, text="\n".join(inside))
                mark, opened, inside = "", None, []
            else:
                inside.append(line)
        elif found:
            fence, opened = found[1], Block(f"{name}:{number}", found[2], "", mark, generated)
        else:
            generated = "<!-- generated:" in line or (generated and "<!-- end -->" not in line)
            mark = line if line.startswith(("<!-- ran", "<!-- not run")) else mark if not line else ""
            if "benchmarks/results/" not in line:  # the command beside a result is as it was at its commit
                prose.append((number, line))
    if opened:
        yield replace(opened, language="a fence without an end")
    for number, line in prose:
        for code in re.findall(r"`([^`]+)`", line):
            if OURS.match(code) and len(code.split()) > words_of_a_name(code):
                yield Block(f"{name}:{number}", "inline", code)


def words_of_a_name(command: str) -> int:
    """How many words name a command without its arguments: `torchtitan-magi data`, `python -m torchtitan_magi.data`."""
    return 3 if "-m" in command.split() else 2 if command.startswith("torchtitan-magi ") else 1


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


# ---------------------------------------------------------------------------------------------- commands, in a process


def check(block: Block) -> None:
    """Raises ValueError with what is wrong with a block, Python code apart."""
    if block.mark:
        found = MARK.fullmatch(block.mark)
        if not found:
            raise ValueError(f"{block.mark} is none of the marks in tests/docs/test_snippets.py")
        if found[1] and date.fromisoformat(found[1]) > date.today():
            raise ValueError(f"{block.mark} is in the future")
    match block.language:
        case "toml":
            check_toml(block.text)
        case "json" | "jsonl":
            check_json(block.text)
        case "bash":
            check_bash(block.text, bool(block.mark))
        case "inline":
            check_commands(block.text, False)
        case "text" | "":
            joined = block.text.replace("\\\n", " ").splitlines()
            check_commands("\n".join(line for line in joined if OURS.match(line.strip())), False)
        case _ if not block.mark:
            raise ValueError(f"language {block.language!r}; use bash, toml, python, json, or text for output")


def check_toml(text: str) -> None:
    from torchtitan.tools import utils

    from torchtitan_magi.training.settings.magi_section import check_options, check_options_for_pairs

    for module in tomllib.loads(text).get("magi", {}).get("imports", []):  # the reader's own
        sys.modules.setdefault(module, types.ModuleType(module))
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(utils, "device_type", "cuda"):
        path = Path(folder) / "page.toml"
        path.write_text(text)
        config = read_job(path, "--job.dump_folder", folder, *HOOKS)
    check_options(replace(config.magi, cost_model=""))
    if config.model.flavor == "hf":
        check_what_becomes_of_the_weights(tomllib.loads(text))
    if config.training.dataset == "dpo":
        check_options_for_pairs(config.magi)


def check_what_becomes_of_the_weights(sections: dict) -> None:
    """A snippet that trains a model's folder loads its weights and saves; a whole one says how fast and how long."""
    needed = [["checkpoint", name] for name in ("enable", "initial_load_in_hf", "last_save_in_hf")]
    if "dataset_path" in sections.get("training", {}):
        needed.append(["optimizer", "lr"])
        if "epochs" not in sections.get("magi", {}):
            needed.append(["training", "steps"])
    for section, name in needed:
        if not sections.get(section, {}).get(name):
            raise ValueError(f'{section}.{name} is not set, with model.flavor = "hf"')


def check_json(text: str) -> None:
    """One value, or one in each line."""
    try:
        json.loads(text)
    except ValueError:
        for line in filter(None, text.splitlines()):
            json.loads(line)


def check_bash(text: str, marked: bool) -> None:
    syntax = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    if syntax.returncode:
        raise ValueError(syntax.stderr.strip())
    heredoc = re.compile(r"^(.*)<<-?\s*(['\"]?)(\w+)\2(.*)\n((?:.*\n)*?)\3$", re.MULTILINE)
    for command, _, _, rest, body in heredoc.findall(text + "\n"):
        check_heredoc(command + rest, body)
    check_commands(heredoc.sub(r"\1 \4", text + "\n"), marked)


def check_heredoc(command: str, body: str) -> None:
    """By the file that it is written to, or the interpreter that it is given to."""
    target = re.search(r"\.(toml|jsonl?|py)\b", command)
    kind = target[1] if target else "py" if command.startswith("python") else ""
    if kind == "toml":
        check_toml(body)
    elif kind == "py":
        compile(body, "heredoc", "exec")
    elif kind:
        check_json(body)


def check_commands(text: str, marked: bool) -> None:
    """Raises ValueError, with the command. marked: whether there may be commands that this cannot check."""
    for line in text.replace("\\\n", " ").splitlines():
        for words in commands_of(line):
            try:
                check_command(words, marked)
            except (Exception, SystemExit) as error:
                raise ValueError(f"{shlex.join(words)}: {type(error).__name__}: {error}") from error


def commands_of(line: str) -> Iterator[list[str]]:
    """The words of each command in a line, without assignments, redirections and keywords before and after it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    skipped = False
    for word in [*lexer, ";"]:
        if set(word) <= set("();&|"):
            if words:
                yield words
            words = []
        elif set(word) <= set("<>"):
            skipped = True
        elif skipped:
            skipped = False
        elif words or not (word in KEYWORDS or re.match(r"\w+=", word)):
            words.append(word)


def check_command(words: list[str], marked: bool) -> None:
    for word in words:
        if re.match(r"(\./)?(scripts|examples|train_configs|tests)/", word) and not glob.glob(str(ROOT / word)):
            raise ValueError(f"there is no {word}")
    words = [word for word in words if word != "..."]
    is_usage = any(word.startswith("[") for word in words)
    match words:
        case _ if is_usage or words[0] in HARMLESS:
            pass
        case ["python" | "python3", "-m", module, *arguments]:
            check_module(module, arguments)
        case ["python" | "python3", "-c", code]:
            compile(code, "command line", "exec")
        case ["python" | "python3", script, *arguments] if script.endswith(".py"):
            check_script(script, arguments)
        case ["python" | "python3"] | ["python" | "python3", "-"]:
            pass  # of a heredoc
        case ["torchrun", *arguments]:
            check_torchrun(arguments)
        case ["torchtitan-magi", "train", path, *arguments]:
            check_training(path, arguments)
        case ["torchtitan-magi", command, *arguments] if command in MODULES:
            check_module(f"torchtitan_magi.{MODULES[command].removesuffix('.__main__')}", arguments)
        case ["./scripts/train.sh", *arguments]:
            is_file = bool(arguments) and arguments[0].endswith(".toml")
            check_training(arguments[0] if is_file else "", arguments[is_file:])
        case ["pip", *arguments]:
            check_pip(arguments)
        case [script, *_] if re.fullmatch(r"\./scripts/\w+\.sh", script):
            pass
        case _ if not marked:
            raise ValueError("cannot be checked; write when it ran above the fence, <!-- ran: ... --> or <!-- not run")


def check_module(module: str, arguments: list[str]) -> None:
    if module == "pip":
        check_pip(arguments)
    elif module in ("torchtitan_magi.train", "torchtitan.train"):
        with_file = re.fullmatch(r"--job\.config[_-]file[= ](\S+)\s*(.*)", " ".join(arguments))
        check_training(with_file[1] if with_file else "", with_file[2].split() if with_file else arguments)
    elif module.startswith("torchtitan_magi"):
        parser_of(lambda: runpy.run_module(module, run_name="__main__"), [module, *arguments], True)
    elif module not in ("venv", "pytest"):
        raise ValueError(f"cannot check module {module}")


def check_script(script: str, arguments: list[str]) -> None:
    if not (ROOT / script).is_file():
        raise ValueError(f"there is no {script}")
    if "argparse" in (ROOT / script).read_text():
        parser_of(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"), [script, *arguments], True)


def check_torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    with contextlib.redirect_stderr(printed := io.StringIO()):
        try:
            options = get_args_parser().parse_args(arguments)
        except SystemExit:
            raise ValueError(printed.getvalue()) from None
    (check_module if options.module else check_script)(options.training_script, options.training_script_args)


def check_training(path: str, overrides: list[str]) -> None:
    """Checks the overrides alone where the file is not in the repository."""
    from torchtitan_magi.launch import num_processes

    file = ROOT / path if path and (ROOT / path).is_file() else DEBUG_TOML
    num_processes(tomllib.loads(file.read_text()), overrides, 0)
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        try:
            read_job(file, *HOOKS, *overrides, "--job.dump_folder", folder)
        except SystemExit as end:
            if end.code:
                raise


def check_pip(arguments: list[str]) -> None:
    """Versions must be among those that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = {Requirement(line).name: Requirement(line).specifier for line in project["dependencies"]}
    for word in arguments[1:]:
        extra = re.match(r"(?:\.|torchtitan_magi)\[(\w+)\]", word)
        if extra and extra[1] not in project["optional-dependencies"]:
            raise ValueError(f"there is no extra {extra[1]}")
        pinned = re.fullmatch(r"([\w-]+)==([\d.]+)", word)
        if pinned and pinned[1] in allowed and not allowed[pinned[1]].contains(pinned[2]):
            raise ValueError(f"pyproject.toml wants {pinned[1]}{allowed[pinned[1]]}")


class Parsed(BaseException):
    """Carries the parser out of a command that was about to begin."""


def parser_of(run, argv: list[str], parses: bool) -> argparse.ArgumentParser:
    """The parser of a command. parses: raises ValueError for wrong arguments."""
    stock_known, stock_error = argparse.ArgumentParser.parse_known_args, argparse.ArgumentParser.error

    def parse_args(self, args=None, namespace=None):
        if parses and (rest := stock_known(self, args, namespace)[1]):
            stock_error(self, f"unrecognized arguments: {' '.join(rest)}")
        raise Parsed(self)

    def parse_known_args(self, args=None, namespace=None):
        if parses:
            stock_known(self, args, namespace)
        raise Parsed(self)

    patches = mock.patch.multiple(argparse.ArgumentParser, parse_args=parse_args, parse_known_args=parse_known_args)
    folder = str(Path(argv[0]).parent) if argv[0].endswith(".py") else ""
    try:
        with (
            patches,
            mock.patch.object(sys, "argv", argv),
            mock.patch.object(sys, "path", [str(ROOT / folder), *sys.path]),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(printed := io.StringIO()),
        ):
            run()
    except Parsed as parsed:
        return parsed.args[0]
    except SystemExit as end:
        if not end.code:  # --help
            return None
        said = printed.getvalue().strip().splitlines()
        raise ValueError(said[-1] if said else end.code) from None
    raise ValueError("it parses no arguments")


def problems(blocks: list[Block]) -> list[str]:
    """For each block what is wrong with it, or ""."""
    found = []
    os.chdir(ROOT)
    for block in blocks:
        try:
            check(block)
            found.append("")
        except Exception as error:
            found.append(f"{block.place}: {error}")
    return found


def run_page(blocks: list[Block]) -> str:
    """Runs the Python code of a page; what went wrong, or ""."""
    namespace: dict[str, object] = {"__name__": "page"}
    exec(GIVEN, namespace)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for block in blocks:
            page, _, line = block.place.rpartition(":")
            try:
                code = compile("\n" * int(line) + block.text, page, "exec")
                if not block.generated and not block.mark:
                    exec(code, namespace)
            except Exception as error:
                trace = error.__traceback__
                lines = []
                while trace:
                    lines += [trace.tb_lineno] if trace.tb_frame.f_code.co_filename == page else []
                    trace = trace.tb_next
                at = lines[-1] if lines else getattr(error, "lineno", line)
                return f"{page}:{at}: {type(error).__name__}: {error}"
    return ""


# ----------------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def problem_of():
    """By block, of one process."""
    blocks = [block for block in BLOCKS if block.language != "python"]
    return dict(zip(blocks, call(problems, blocks), strict=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_hold(page, problem_of):
    found = [problem_of[block] for block in blocks_of(page) if block.language != "python"]
    assert not any(found), "\n".join(filter(None, found))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_runs(page):
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    found = call(run_page, blocks) if blocks else ""
    assert not found, found


WRONG = {
    "```bash\npython -m torchtitan_magi.report dense --totl 512k --cp 8\n```": "unrecognized arguments: --totl",
    "```bash\npython -m torchtitan_magi.reprot\n```": "torchtitan_magi.reprot",
    "```bash\npython scripts/no_such.py\n```": "there is no scripts/no_such.py",
    "```bash\n./scripts/train.sh train_configs/debug.toml --training.stepz 3\n```": "--training.stepz",
    "```bash\ntorchtitan-magi train my.toml --training.stepz 3\n```": "--training.stepz",
    "```bash\ntorchtitan-magi size dense --totl 512k --cp 8\n```": "unrecognized arguments: --totl",
    "see `torchtitan-magi verify --al x`": "unrecognized arguments: --al",
    "```bash\ntorchtitan-magi sise\n```": "cannot be checked",
    "```bash\ncd x && torchrun --nnodes 2 -m torchtitan_magi.train --job.config_file my.toml --a.b 3\n```": "--a.b",
    "```bash\ntorchrun --nproc-per-nodes 2 --no-such -m torchtitan_magi.verify x\n```": "--no-such",
    "```bash\npip install torch==1.13.0\n```": "pyproject.toml wants torch",
    "```bash\npip install .[everything]\n```": "there is no extra everything",
    "```bash\nfrobnicate\n```": "cannot be checked; write when it ran",
    "```bash\nif\n```": "syntax error",
    "```bash\ncat > my.toml <<EOF\n[training]\nstepz = 3\nEOF\n```": "training.stepz is no option",
    "<!-- ran: yesterday -->\n```bash\nfrobnicate\n```": "none of the marks",
    "<!-- ran: 2999-01-01 on two H200, torchtitan_magi 0.1.0 -->\n```bash\nfrobnicate\n```": "in the future",
    "```toml\n[magi]\nbackend = 'cuda'\n```": "magi.backend is 'cuda'",
    "```toml\n[magi]\nstages = 3\n```": "magi.stages is no option",
    "```toml\n[training]\nseq_len = '8k'\n```": "training.seq_len is '8k'",
    "```toml\n[model]\nflavor = 'hf'\n[checkpoint]\nenable = true\n```": "checkpoint.initial_load_in_hf is not set",
    '```json\n{"messages": }\n```': "Expecting value",
    "```rust\n```": "use bash, toml, python, json, or text",
    "```text\npython -m torchtitan_magi.verify\n```": "required: FOLDER",
    "see `./scripts/train.sh --training.stepz 3` there": "--training.stepz",
    "```bash\n": "a fence without an end",
}
RIGHT = [
    "<!-- ran: 2026-11-22 on two H200, torchtitan_magi 0.1.0 -->\n\n```bash\nfrobnicate\n```",
    "<!-- not run: no cluster here -->\n```bash\nsrun x\n```",
    "```bash\nfor n in 1 2; do ./scripts/train.sh my.toml --training.steps 3; done > log 2>&1 | tail\n```",
    "```bash\nX=1 python3 - <<'EOF'\nprint(1)\nEOF\n```",
    '```toml\n[magi]\nimports = ["mine"]\n[training]\nenable_cpu_offload = true\n```',
]


def test_what_is_wrong_is_named_with_page_and_line(tmp_path):
    blocks = []
    for number, text in enumerate([*WRONG, *RIGHT]):
        (tmp_path / f"{number}.md").write_text(f"# Title\n\n{text}\n")
        blocks += list(blocks_of(tmp_path / f"{number}.md"))
    assert len(blocks) == len(WRONG) + len(RIGHT)
    found = call(problems, blocks)
    for number, (expected, said) in enumerate(zip(WRONG.values(), found, strict=False)):
        assert re.match(rf"{number}\.md:[34]: ", said), (number, said)
        assert expected in said
    assert found[len(WRONG) :] == [""] * len(RIGHT)


def test_code_that_fails_is_named_with_page_and_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\na = 1\n```\n\n```python\nassert a == 1\nb = a / 0\n```\n")
    assert call(run_page, list(blocks_of(page))) == "page.md:9: ZeroDivisionError: division by zero"
    page.write_text("```python\na = (\n```\n")
    assert call(run_page, list(blocks_of(page))).startswith("page.md:2: SyntaxError")
    page.write_text("<!-- not run: no GPU -->\n```python\n1 / 0\n```\n")
    assert call(run_page, list(blocks_of(page))) == ""


def unexplained() -> list[str]:
    """Arguments of our commands that have no help text."""
    found = []
    os.chdir(ROOT)
    folders = ("scripts", "benchmarks", "docs/_build", "tests/long", "torchtitan_magi")
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        if "ArgumentParser(" in text and '__name__ == "__main__"' in text:
            parser = parser_of(lambda path=path: runpy.run_path(str(path), run_name="__main__"), [str(path)], False)
            assert parser.description, path
            found += [f"{path.name}: {action.dest}" for action in parser._actions if not action.help]
    return found


def test_each_argument_of_each_command_is_explained():
    assert call(unexplained) == []
