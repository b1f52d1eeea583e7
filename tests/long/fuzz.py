"""Feeds inputs that hypothesis draws to what reads people's files and arguments, and keeps those that end badly.

    python tests/long/fuzz.py --minutes 10 --seed 0 --targets records toml
    python tests/long/fuzz.py --replay outputs/fuzz/records-1f0c2a7b

A target (`fuzz_targets.py`) is a function of bytes. It must return, or raise a ValueError of one printable line that
names a remedy. All else is a finding: another exception, a message of several lines, more CPU time or memory than an
input may take, a process that dies or waits. The inputs of findings are kept in a folder, to be replayed.

Each target runs in a process of its own. Inputs are the target's seeds, and these with some of their parts replaced.
The same seed and number of cases give the same inputs.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import hypothesis
from hypothesis import strategies as st

CPU_SECONDS = 10  # that an input may take
MEMORY_BYTES = 4 * 2**30  # of address space that a target's process may add
WAIT_SECONDS = 300  # without an end, on any machine
MAX_INPUT = 2**18  # bytes
MAX_MESSAGE = 2000  # characters
CASES_OF_A_RUN = 1000  # of hypothesis, which remembers them all
MAX_KINDS_SHOWN = 30

Check = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """make: called once, with a folder for files -> the check of an input. words: what may be put in."""

    name: str
    make: Callable[[Path], Check]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()


class Outcome(NamedTuple):
    """kind: of the refusal or the finding."""

    end: Literal["success", "refused", "finding"]
    kind: str = ""


@dataclass
class Report:
    """What became of the inputs of a target. findings: an input of each kind."""

    ends: Counter[str] = field(default_factory=Counter)
    kinds: Counter[Outcome] = field(default_factory=Counter)
    findings: dict[str, bytes] = field(default_factory=dict)

    @property
    def cases(self) -> int:
        return sum(self.ends.values())

    def add(self, data: bytes, outcome: Outcome) -> None:
        self.ends[outcome.end] += 1
        self.kinds[outcome] += 1
        if outcome.end == "finding":
            self.findings[outcome.kind] = min(data, self.findings.get(outcome.kind, data), key=len)


# -------------------------------------------------------------------------------------------------------------- inputs

_TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.)*"|[\w.+-]+|\s+|.', re.DOTALL)
_CLOSING = {b"[": b"]", b"{": b"}", b"(": b")"}
_WORDS = (
    *(b"null true false NaN -Infinity 0 -1 1 2 3 0.5 -0.0 1e999 1e-999 2147483647 2147483648 -2147483649".split()),
    *(b"9223372036854775808 18446744073709551616 0x7f 1_000 [] {} () , : = . # %".split()),
    *(b'"" "x" "\\ud83d" "\\u0000" "\\ufdd0" "\\n" "\xf0\x9f\x98\x80" \xff \xef\xbb\xbf \x00 \r\n'.split(b" ")),
    b"9" * 5000,
    b'"' + b"a" * 20_000 + b'"',
    b'"\\u001b[31m\\u2028"',
)


@st.composite
def inputs(draw: st.DrawFn, target: Target) -> bytes:
    """A seed after one or a few edits."""
    data = draw(st.sampled_from(target.seeds))
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 2, 3, 4)))):
        edit = draw(st.sampled_from((edited_json, edited_json, edited_tokens)))
        data = draw(edit(data, target))
    return data[:MAX_INPUT]


@st.composite
def edited_json(draw: st.DrawFn, data: bytes, target: Target) -> bytes:
    """One line with one value or key of its JSON changed; if it is no JSON or no container, a token."""
    rows = data.split(b"\n")
    number = draw(st.integers(0, len(rows) - 1))
    with contextlib.suppress(ValueError, RecursionError):
        root = json.loads(rows[number])
        if not (places := list(places_in(root))):
            return draw(edited_tokens(data, target))
        container, key = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(("replace", "replace", "other key", "insert", "delete")))
        if kind != "delete":
            others = st.sampled_from([owner[name] for owner, name in places])
            words = st.sampled_from((*_WORDS, *target.words)).map(value_of)
            new = json.loads(json.dumps(draw(words | others)))  # a copy
        if kind == "delete":
            del container[key]
        elif kind == "other key" and isinstance(container, dict):
            container[str(new)] = container.pop(key)
        elif kind == "insert" and isinstance(container, list):
            container.insert(key, new)
        else:
            container[key] = new
        rows[number] = json.dumps(root, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
        return b"\n".join(rows)
    return draw(edited_tokens(data, target))


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Containers and keys of all values in a value."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places_in(value[key])


def value_of(word: bytes) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word.decode(errors="replace")


@st.composite
def edited_tokens(draw: st.DrawFn, data: bytes, target: Target) -> bytes:
    """A token, or all between two brackets, replaced."""
    tokens, others = (_TOKEN.findall(text) for text in (data, draw(st.sampled_from(target.seeds))))
    start, stop = draw(spans(tokens))
    part = b"".join(tokens[start:stop])

    def nested(opening: bytes, depth: int) -> bytes:
        return opening * depth + part + _CLOSING[opening] * depth

    new = draw(
        st.sampled_from((b"", part * 2, part * 100, *_WORDS, *target.words))
        | spans(others).map(lambda span: b"".join(others[slice(*span)]))
        | spans(others).map(lambda span: part + b"".join(others[slice(*span)]))
        | st.builds(nested, st.sampled_from(list(_CLOSING)), st.sampled_from((1, 2, 3, 1000, 50_000)))
        | st.binary(max_size=4)
    )
    return b"".join([*tokens[:start], new, *tokens[stop:]])


@st.composite
def spans(draw: st.DrawFn, tokens: list[bytes]) -> tuple[int, int]:
    """A token that is no space, or if it is an opening bracket perhaps all to its end."""
    places = [i for i, token in enumerate(tokens) if not token.isspace()]
    if not places:
        return 0, len(tokens)
    start = draw(st.sampled_from(places))
    opening, depth = tokens[start], 0
    if opening in _CLOSING and draw(st.booleans()):
        for stop, token in enumerate(tokens[start:], start + 1):
            depth += (token == opening) - (token == _CLOSING[opening])
            if depth == 0:
                return start, stop
    return start, start + 1


def feed(target: Target, seed: str, cases: int, see: Callable[[bytes], None]) -> None:
    """Calls see(input) with so many inputs, less those that came before."""
    seen: set[bytes] = set()

    def see_new(data: bytes) -> None:
        if data not in seen:
            seen.add(data)
            see(data)

    run = hypothesis.given(inputs(target))(see_new)
    settings = hypothesis.settings(
        max_examples=cases, deadline=None, database=None, derandomize=False, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    hypothesis.seed(seed)(settings(run))()


# -------------------------------------------------------------------------------------------------------------- verdict


def judged(check: Check, data: bytes) -> Outcome:
    """How the check of an input ends."""
    try:
        check(data)
    except ValueError as error:
        fault, kind = fault_of(str(error)), f"{_place(error)}: {kind_of(str(error))}"
        return Outcome("finding", f"{fault} in {kind}") if fault else Outcome("refused", kind)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Outcome("finding", f"{type(error).__name__} in {_place(error)}")
    return Outcome("success")


# A quoted word in double quotes is a name of ours, not a value.
_FIRST_VALUE = re.compile(r"""(?:^|(?<=[\s(]))(?!"\w+")['"\[({\d.+-].*""", re.DOTALL)


def fault_of(message: str) -> str:
    """What is wrong with the text of an error; empty if nothing is."""
    if len(message.splitlines()) != 1:
        return "not one line"
    if not message.isprintable():
        return "not printable"
    if len(message) > MAX_MESSAGE:
        return "too long"
    return "" if "; " in message else "no remedy"


def kind_of(message: str) -> str:
    """An error's text without paths, and without what follows the first value in the fault and in the remedy."""
    line = re.sub(r"\S*/\S*", "_", " ".join(f"{message[:MAX_MESSAGE]} {message[MAX_MESSAGE:][-MAX_MESSAGE:]}".split()))
    parts = (re.sub(r"\[\d+]", "[_]", part) for part in line.rpartition("; "))
    return "".join(re.sub(_FIRST_VALUE, "_", part, count=1) for part in parts)[:120]


def _place(error: BaseException) -> str:
    """The package's innermost line that raised."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    file, line = next((at for at in reversed(lines) if "torchtitan_magi" in at[0]), lines[-1])
    return f"{Path(file).name}:{line}"


# ------------------------------------------------------------------------------------------------------------ processes


def _work(
    target: Target, folder: Path, seed: int, first: int, again: bytes | None, receiver: Connection, sender: Connection
) -> None:
    """Sends each input before it is checked, and then its outcome, until it is killed.

    Args:
        first: the number of inputs before; what is drawn depends on it.
        again: checked before these, if any.
    """
    receiver.close()  # the child's copy of it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    logging.disable()
    check = target.make(folder)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)

    def see(data: bytes) -> None:
        sender.send_bytes(data)
        limit = int(time.process_time()) + CPU_SECONDS + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        sender.send(judged(check, data))

    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        for data in ([] if again is None else [again]) + list(target.seeds[first:]):
            see(data)
        for number in itertools.count(first):
            feed(target, f"{seed} {target.name} {number}", CASES_OF_A_RUN, see)


def fuzz(target: Target, seed: int, is_enough: Callable[[Report], bool]) -> Report:
    """Runs a target until is_enough(report)."""
    report, again = Report(), None
    while not is_enough(report):
        with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
            last, exitcode = _run(target, Path(folder), seed, again, report, is_enough)
        took_long = exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        if exitcode is not None and (not took_long or last == again):
            report.add(last, Outcome("finding", _death(exitcode)))
        again = last if took_long and last != again else None  # a loaded machine may have caused it
    return report


def _run(
    target: Target,
    folder: Path,
    seed: int,
    again: bytes | None,
    report: Report,
    is_enough: Callable[[Report], bool],
) -> tuple[bytes, int | None]:
    """Runs one process of the target until its end or is_enough(report).

    Returns:
        the last input, and how the process ended while it was checked: its exit code, or None if it did not.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(target, folder, seed, report.cases, again, receiver, sender))
    process.start()
    sender.close()
    data = b""

    def wait() -> None:
        if not receiver.poll(WAIT_SECONDS):
            process.kill()

    try:
        while not is_enough(report):
            wait()
            data = receiver.recv_bytes()
            wait()
            report.add(data, receiver.recv())
        return data, None
    except EOFError:
        process.join()
        return data, process.exitcode
    finally:
        process.kill()  # it may wait for something
        process.join()
        receiver.close()


def _death(exitcode: int | None) -> str:
    if exitcode == -signal.SIGXCPU:
        return f"more than {CPU_SECONDS} s of CPU time, twice"
    if exitcode == -signal.SIGKILL:
        return f"no end after {WAIT_SECONDS} s, twice"
    return f"the process died, exit code {exitcode}"


# -------------------------------------------------------------------------------------------------------------- command


def show(name: str, report: Report, folder: Path) -> None:
    """Prints what became of a target's inputs, and keeps those of its findings."""
    ends = ", ".join(f"{report.ends[end]:,} {end}" for end in ("success", "refused", "finding"))
    print(f"\n{name}: {report.cases:,} cases: {ends}")
    refusals = [(count, outcome.kind) for outcome, count in report.kinds.most_common() if outcome.end == "refused"]
    for count, kind in refusals[:MAX_KINDS_SHOWN]:
        print(f"  {count:9,}  {kind}")
    if len(refusals) > MAX_KINDS_SHOWN:
        rest = refusals[MAX_KINDS_SHOWN:]
        print(f"  {sum(count for count, _ in rest):9,}  {len(rest)} other reasons")
    for kind, data in report.findings.items():
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:8]}"
        path.write_bytes(data)
        print(f"  FINDING {report.kinds[Outcome('finding', kind)]:,} times: {ascii(kind)[1:-1]}; kept in {path}")


def replay(path: Path, targets: dict[str, Target]) -> None:
    """Checks one kept input in this process; what it raises passes through."""
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        targets[path.name.rpartition("-")[0]].make(Path(folder))(path.read_bytes())
    print("success")


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from fuzz_targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, help="readers to feed (default: all)")
    parser.add_argument("--minutes", type=float, default=1, help="for each target (default: %(default)s)")
    parser.add_argument("--cases", type=int, help="for each target, instead of minutes")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("outputs/fuzz"), help="of findings (default: %(default)s)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one kept input again, nothing else")
    arguments = parser.parse_args()
    if arguments.replay:
        return replay(arguments.replay, TARGETS)
    has_findings = False
    for name in arguments.targets:
        end = time.monotonic() + 60 * arguments.minutes

        def is_enough(report: Report, end: float = end) -> bool:
            return time.monotonic() >= end if arguments.cases is None else report.cases >= arguments.cases

        report = fuzz(TARGETS[name], arguments.seed, is_enough)
        show(name, report, arguments.folder)
        has_findings |= bool(report.findings)
    sys.exit(has_findings)


if __name__ == "__main__":
    main()
