"""Feeds mutated inputs to what reads people's files and arguments, and keeps those that end badly.

    python tests/long/fuzz.py --minutes 10 --seed 0 --targets records toml
    python tests/long/fuzz.py --replay outputs/fuzz/records-1f0c2a7b

A target (`fuzz_targets.py`) is a function of bytes. It must return, or raise a ValueError of one printable line that
names a remedy. All else is a finding: another exception, a message of several lines, more CPU time or memory than an
input may take, a process that dies or waits. The inputs of findings are kept in a folder, to be replayed.

Each target runs in a process of its own. Mutations start from the target's seeds, and from inputs that were refused for
a new reason. The same seed and number of cases give the same inputs.
"""

import argparse
import contextlib
import copy
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import random
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

CPU_SECONDS = 10  # that an input may take
MEMORY_BYTES = 4 * 2**30  # of address space that a target's process may add
WAIT_SECONDS = 300  # without an end, on any machine
MAX_INPUT = 2**18  # bytes
MAX_FOUND = 2**13  # bytes of an input that mutations start from
MAX_MESSAGE = 2000  # characters
MAX_KINDS_SHOWN = 30

Check = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """make: called once, with a folder for files -> the check of an input. words: what mutations may put in."""

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


# ----------------------------------------------------------------------------------------------------------- mutations

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

Tokens = list[bytes]


def mutated(rng: random.Random, seeds: tuple[bytes, ...], found: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """A seed or an input found later, after one or a few mutations."""
    data = rng.choice(rng.choice((seeds, found)) or seeds)
    for _ in range(1 + int(rng.expovariate(0.8))):
        how = rng.random()
        changed = None
        if how < 0.5:
            with contextlib.suppress(RecursionError):  # too deep for json and copy
                changed = _mutated_json(rng, data, words)
        if changed is not None:
            data = changed
        elif how < 0.6:
            data = _mutated_bytes(rng, data)
        else:
            data = b"".join(_mutated_tokens(rng, _TOKEN.findall(data), _TOKEN.findall(rng.choice(seeds)), words))
    return data[:MAX_INPUT]


def _mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    start, stop = sorted(rng.choices(range(len(data) + 1), k=2))
    kind = rng.randrange(5)
    if kind == 0:
        return data[:start]
    if kind == 1:
        return data[:start] + data[stop:]
    if kind == 2:
        return data[:start] + rng.randbytes(rng.randint(1, 4)) + data[start:]
    if kind == 3:
        return data[:stop] + data[start:stop] + data[stop:]
    flipped = bytearray(data)
    if flipped:
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _mutated_json(rng: random.Random, data: bytes, words: tuple[bytes, ...]) -> bytes | None:
    """One line with one value or key of its JSON changed; None if it is no JSON or no container."""
    rows = data.split(b"\n")
    number = rng.randrange(len(rows))
    places: list[tuple[Any, Any]] = []  # container, key
    try:
        root = json.loads(rows[number])
        _find_places(root, places)
        words = (*_WORDS, *words)
        new = [place[0][place[1]] for place in places] + [_value(rng.choice(words)) for _ in range(4)]
        container, key = rng.choice(places)
    except (ValueError, IndexError):
        return None
    kind = rng.randrange(4)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[str(_value(rng.choice(words)))] = container.pop(key)
    elif kind == 2 and isinstance(container, list):
        container.insert(key, copy.deepcopy(rng.choice(new)))
    else:
        container[key] = copy.deepcopy(rng.choice(new))
    rows[number] = json.dumps(root, ensure_ascii=rng.random() < 0.8).encode(errors="surrogatepass")
    return b"\n".join(rows)


def _find_places(value: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            _find_places(value[key], places)


def _value(word: bytes) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word.decode(errors="replace")


def _mutated_tokens(rng: random.Random, tokens: Tokens, others: Tokens, words: tuple[bytes, ...]) -> Tokens:
    """One token, or all between two brackets, changed."""
    start, stop = _span(rng, tokens)
    before, span, after = tokens[:start], tokens[start:stop], tokens[stop:]
    kind = rng.randrange(7)
    if kind == 0:
        return before + after
    if kind == 1:
        return before + span * rng.choice((2, 2, 3, 100)) + after
    if kind == 2:
        begin, end = _span(rng, others)
        return before + others[begin:end] + after
    if kind == 3:
        opening = rng.choice(list(_CLOSING))
        depth = rng.choice((1, 1, 1, 2, 2, 3, 1000, 50_000))
        return [*before, opening * depth, *span, _CLOSING[opening] * depth, *after]
    if kind == 4:
        begin, end = _span(rng, tokens)
        if begin >= stop:
            return before + tokens[begin:end] + tokens[stop:begin] + span + tokens[end:]
    return [*before, rng.choice(_WORDS + words), *(span if kind == 5 else []), *after]


def _span(rng: random.Random, tokens: Tokens) -> tuple[int, int]:
    """A token that is no space, or if it is an opening bracket all to its end."""
    places = [i for i, token in enumerate(tokens) if not token.isspace()]
    if not places:
        return 0, len(tokens)
    start = rng.choice(places)
    opening, depth = tokens[start], 0
    if opening not in _CLOSING or rng.random() < 0.2:
        return start, start + 1
    for stop, token in enumerate(tokens[start:], start + 1):
        depth += (token == opening) - (token == _CLOSING[opening])
        if depth == 0:
            return start, stop
    return start, start + 1


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


def inputs(target: Target, seed: int, first: int, found: list[bytes]) -> Iterator[bytes]:
    """The target's inputs from number `first` on. found: what was refused for a new reason, which grows meanwhile."""
    yield from target.seeds[first:]
    number = max(first, len(target.seeds))
    while True:
        yield mutated(random.Random(f"{seed} {target.name} {number}"), target.seeds, found, target.words)
        number += 1


def _work(
    target: Target, folder: Path, seed: int, first: int, again: bytes | None, receiver: Connection, sender: Connection
) -> None:
    """Sends each input before it is checked, and then its outcome, until it is killed.

    Args:
        again: checked before the inputs from number `first` on, if any.
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
    found: list[bytes] = []
    kinds: set[str] = set()
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        for data in itertools.chain([] if again is None else [again], inputs(target, seed, first, found)):
            sender.send_bytes(data)
            limit = int(time.process_time()) + CPU_SECONDS + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            outcome = judged(check, data)
            if outcome.kind not in kinds and len(data) <= MAX_FOUND:
                kinds.add(outcome.kind)
                found.append(data)
            sender.send(outcome)


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
    parser.add_argument(
        "--targets",
        nargs="+",
        choices=TARGETS,
        default=list(TARGETS),
        help="readers to feed, see fuzz_targets.py (default: %(default)s)",
    )
    parser.add_argument("--minutes", type=float, default=1, help="for each target (default: %(default)s)")
    parser.add_argument("--cases", type=int, help="for each target, instead of minutes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/fuzz"), help="for the inputs of findings (default: %(default)s)"
    )
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
