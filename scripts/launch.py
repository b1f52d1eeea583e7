"""Starts torchtitan for a TOML file with as many processes as its parallel degrees multiply to.

    python scripts/launch.py config.toml [torchtitan overrides ...]

It does what ``torchrun -m torchtitan_magi.train`` does on this machine, and says last what went wrong first. For
several machines call torchrun.
"""

import math
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

DEGREES = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel")
HOOKS = (("job", "custom_config_module"), ("experimental", "custom_import"))


def overridden(config: dict[str, Any], arguments: list[str], section: str, name: str) -> Any:
    """An option as torchtitan will see it: from the command line, else from the file, else None."""
    flags = {f"--{section}.{name}", f"--{section}.{name.replace('_', '-')}"}
    value = config.get(section, {}).get(name)
    for i, argument in enumerate(arguments):
        flag, equals, given = argument.partition("=")
        if flag in flags:
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
        text = str(default if value is None else value)
        if not re.fullmatch(r"[1-9]\d*", text) and text != str(default):
            left = ", or -1 for the GPUs that are left" if default == -1 else ""
            raise ValueError(f"parallelism.{name}_degree is {value!r}; use a whole number of at least 1{left}")
        degrees[name] = int(text)
    shard = degrees.pop("data_parallel_shard")
    others = math.prod(degrees.values())
    return others * (max(1, num_gpus // others) if shard == -1 else shard)


def check_hooks(config: dict[str, Any], arguments: list[str]) -> None:
    """A [magi] section needs the two lines that make torchtitan load us.

    Raises:
        ValueError: one is missing; names it.
    """
    for section, name in HOOKS:
        if "magi" in config and not overridden(config, arguments, section, name):
            raise ValueError(
                f'the file has [magi] but no {section}.{name}; add {name} = "torchtitan_magi.titan" to [{section}]'
            )


def reason(failure: Any) -> str:
    """What torchrun knows of a process's end: the exception, the signal, or no more than the exit code."""
    if isinstance(failure.message, dict):
        return str(failure.message["message"])
    return f"exit code {failure.exitcode}" if failure.exitcode > 0 else str(failure.message)


def main() -> None:
    import torch

    path, *arguments = sys.argv[1:]
    num_gpus = torch.cuda.device_count()
    try:
        config = tomllib.loads(Path(path).read_text())
        check_hooks(config, arguments)
        processes = num_processes(config, arguments, num_gpus)
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: {error}")
    if num_gpus < processes:
        print(f"{processes} processes, {num_gpus} GPUs: running on CPU with gloo", flush=True)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--standalone", f"--nproc-per-node={processes}", "--local-ranks-filter=0", "--role=rank", "--tee=3"]
    command = ["-m", "torchtitan_magi.train", "--job.config_file", path, *arguments]
    try:
        run.run(run.parse_args(options + command))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        sys.exit(f"rank {failure.local_rank} failed: {reason(failure)}")


if __name__ == "__main__":
    main()
