"""Trains as a TOML file says, on this machine, with as many processes as its parallel degrees multiply to.

usage: torchtitan-magi train FILE.toml [--SECTION.OPTION VALUE ...]

It runs on the CPU where there are fewer GPUs than processes. A run that is
started again continues from its last checkpoint. The last line says why a run
failed. Several machines train by torchrun -m torchtitan_magi.train.

example:
  torchtitan-magi train my.toml --training.steps 100

options:
  --SECTION.OPTION VALUE    any option, instead of its value in the file;
                            true and false are --SECTION.OPTION and
                            --SECTION.no-OPTION
  -h, --help                this text; after FILE.toml, every option with
                            its value in that file
"""

# It imports nothing of the package: scripts/train.sh runs this file by its path. Of texts of ranks it keeps the first
# line, and of that both ends, where `wording` joins the lines and keeps the beginning.

import contextlib
import math
import os
import re
import signal
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

DEGREES = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel")
PRECISION = ("training", "mixed_precision_param")
PATIENCE = 30  # seconds that torchrun gives ranks to end once one has failed, before it kills them
HOOKS = (("job", "custom_config_module"), ("experimental", "custom_import"))


def overridden(config: dict[str, Any], arguments: list[str], section: str, name: str) -> Any:
    """An option as torchtitan will see it: from the command line, else from the file, else None."""
    value = config.get(section, {}).get(name)
    for i, argument in enumerate(arguments):
        flag, equals, given = argument.partition("=")
        if flag.replace("-", "_") == f"__{section}.{name}":
            if not equals and i + 1 == len(arguments):
                raise ValueError(f"{flag} has no value; give it one")
            value = given if equals else arguments[i + 1]
    return value


def num_processes(config: dict[str, Any], arguments: list[str], num_gpus: int) -> int:
    """The product of the degrees. A data_parallel_shard_degree of -1 (the default) takes what GPUs are left over.

    Raises:
        ValueError: a degree is no positive number; names it.
    """
    degrees = {}
    for name in DEGREES:
        default = -1 if name == "data_parallel_shard" else 1
        value = overridden(config, arguments, "parallelism", f"{name}_degree")
        text = value if isinstance(value, str) else shown(default if value is None else value)
        if not re.fullmatch(r"[1-9]\d*", text) and text != str(default):
            left = ", or -1 for the GPUs that are left" if default == -1 else ""
            raise ValueError(f"parallelism.{name}_degree is {shown(value)}; use a whole number of at least 1{left}")
        degrees[name] = int(text)
    shard = degrees.pop("data_parallel_shard")
    others = math.prod(degrees.values())
    return others * (max(1, num_gpus // others) if shard == -1 else shard)


def check_hooks(config: dict[str, Any], arguments: list[str]) -> None:
    """Checks that a [magi] section comes with the two lines that make torchtitan load us.

    Raises:
        ValueError: one is missing; names it.
    """
    for section, name in HOOKS:
        if "magi" in config and not overridden(config, arguments, section, name):
            raise ValueError(
                f'the file has [magi] but no {section}.{name}; add {name} = "torchtitan_magi.titan" to [{section}]'
            )


def read(path: Path) -> dict[str, Any]:
    """The TOML file. Raises ValueError where it is none."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError("it is no regular file but a pipe, socket or device; give a TOML file")
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))  # a byte order mark is let in
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror}); give a TOML file as in train_configs/") from None
    except RecursionError:
        raise ValueError("values are nested too deeply; is this a TOML file?") from None


def check_file(config: dict[str, Any]) -> None:
    """Checks the sections that are read here before torchtitan reads them.

    Raises:
        ValueError: a section is none; names it.
    """
    for name in ("job", "experimental", "parallelism", "training"):
        if not isinstance(config.get(name, {}), dict):
            raise ValueError(
                f"{name} is {shown(config[name])}, but it is a section; write [{name}] and its options below"
            )


def shown(value: Any) -> str:
    """A value of the file, shortened."""
    try:
        text = repr(value)
    except ValueError:
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def first_failure(failures: Iterable[Any]) -> Any:
    """The one that the others follow from. torchrun dates a rank that was killed by when it looks, which may be after
    another rank has missed it; what it has killed itself, since it did not end, is none."""
    failures = list(failures)
    begun = min(failure.timestamp for failure in failures)
    killed = [
        failure
        for failure in failures
        if failure.exitcode == -signal.SIGKILL and failure.timestamp < begun + PATIENCE / 2
    ]
    return min(killed or failures, key=lambda failure: failure.timestamp)


def reason(failure: Any) -> str:
    """What torchrun knows of a process's end, in one line: the exception, the signal, or no more than the exit code."""
    recorded = failure.error_file_data["message"] if os.path.exists(failure.error_file) else ""
    if isinstance(recorded, dict):
        recorded = recorded.get("message")
    if recorded:
        return in_one_line(recorded)
    if failure.exitcode > 0:
        return f"exit code {failure.exitcode}"
    return f"Signal {-failure.exitcode} ({failure.signal_name()}) received by PID {failure.pid}"


def in_one_line(text: Any) -> str:
    """The first line of it, of which little is needed of a value that it quotes; and what follows where it ends in a
    colon."""
    first, *others = str(text).strip().splitlines() or ["no reason given"]
    line = f"{first} {others[0].strip()}" if first.endswith(":") and others else first
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= 1500 else f"{line[:1000]}...{line[-400:]}"


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Ends the process with one line where torch cannot be imported; a broken package can raise anything."""
    try:
        yield
    except Exception as error:
        sys.exit(
            f"torch cannot be imported ({type(error).__name__}: {in_one_line(error)}); ./scripts/train.sh sets up an "
            "environment that has all that is needed"
        )


def count_gpus() -> int:
    """The GPUs that torch sees here."""
    with importing():
        import torch

    return torch.cuda.device_count()


def launch(options: list[str]) -> None:
    """Runs torchrun in this process; ends it with one line that says why the run ended, if it failed."""
    with importing():
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing import errors
        from torch.distributed.elastic.multiprocessing.api import SignalException

    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup has it, which torchrun would undo
        options = ["--signals-to-handle=SIGTERM,SIGINT,SIGQUIT", *options]
    try:
        run.run(run.parse_args(options))
    except errors.ChildFailedError as error:
        failure = first_failure(error.failures.values())
        sys.exit(f"rank {failure.local_rank} failed: {reason(failure)}")
    except SignalException as error:
        sys.exit(f"ended by {error.sigval.name}")
    except Exception as error:
        if any(frame.f_globals["__name__"] == errors.__name__ for frame, _ in traceback.walk_tb(error.__traceback__)):
            sys.exit(  # torchrun reads what ranks wrote about their end
                "a rank failed and could not write why: its error file is empty or broken; make room on the disk of "
                f"{tempfile.gettempdir()}, and see what rank 0 printed above"
            )
        sys.exit(f"torchrun failed: {type(error).__name__}: {in_one_line(error)}")


def main() -> None:
    """Starts the run; ends with one line, whatever happens."""
    try:
        start()
    except KeyboardInterrupt:
        sys.exit("ended by SIGINT")


def start() -> None:
    """Reads the file and the command line, and launches. Ends the process with one line where they are wrong."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        program = Path(sys.argv[0]).name
        sys.exit(
            f"no TOML file; use {program} FILE.toml [--SECTION.OPTION VALUE ...], see torchtitan-magi configs list"
        )
    path, *arguments = sys.argv[1:]
    try:
        config = read(Path(path))
        check_file(config)
        check_hooks(config, arguments)
        num_gpus = count_gpus()
        processes = num_processes(config, arguments, num_gpus)
    except ValueError as error:
        sys.exit(f"{in_one_line(path)}: {in_one_line(error)}")
    if num_gpus < processes:
        where = "on CPU with gloo"
        if overridden(config, arguments, *PRECISION) is None:
            where += " in float32, as most CPUs take several times as long for bfloat16"
            arguments.append(f"--{'.'.join(PRECISION)}=float32")
        print(f"{processes} process{'es' * (processes != 1)}, {num_gpus} GPUs: running {where}", flush=True)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if processes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun has it, which would warn of it
    options = ["--standalone", f"--nproc-per-node={processes}", "--local-ranks-filter=0", "--role=rank", "--tee=3"]
    launch([*options, "-m", "torchtitan_magi.train", "--job.config_file", path, *arguments])


if __name__ == "__main__":
    main()
