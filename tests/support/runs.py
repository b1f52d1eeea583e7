"""Runs torchtitan's own entry point in forked processes that have already imported everything: seconds a run.

    run = train(2, ["--parallelism.context_parallel_degree", "2"])
    run.losses, run.grad_norms, run.metrics

The processes come from a fork server that preloads torch, torchtitan and the plugin. Each then does what ``python -m
torchtitan.train`` does with the same arguments and the environment variables of torchrun.
"""

import faulthandler
import functools
import importlib
import importlib.metadata
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, popen_forkserver
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/long", "benchmarks", "docs/_build", "scripts")]
from support.corpus import make_corpus  # noqa: E402
from support.exact_norms import exact_gradient_norms  # noqa: E402

DEBUG_TOML = ROOT / "train_configs" / "debug.toml"
TIMEOUT = 1500  # seconds, below pytest's own
PATIENT = ("--comm.init_timeout_seconds", str(2 * TIMEOUT), "--comm.train_timeout_seconds", str(2 * TIMEOUT))
ON_GPUS = False  # each process on the GPU of its rank; a process that is to use one cannot be forked, so it starts anew
TITAN = importlib.metadata.version("torchtitan")
IS_0_3 = TITAN.startswith("0.3.")
ADAPTER = "torchtitan_magi.titan.v03" if IS_0_3 else "torchtitan_magi.titan.v02"
PRELOAD = ["torch", "torch._dynamo", "torch.nn.attention.flex_attention", "torchtitan.train", "torchtitan_magi.titan"]
PRELOAD += [f"{ADAPTER}.trainer"]
PRELOAD += ["torchtitan_magi.backends.flex", "torchtitan_magi.backends.ffa.block_attn", "torch.distributed.checkpoint"]


class TrainingError(Exception):
    """What a process of the run raised: ``type`` is the name of the exception's class, str() its message."""

    def __init__(self, kind: str, message: str, trace: str, output: str) -> None:
        super().__init__(message)
        self.type = kind
        self.add_note(f"{trace}\nprinted before:\n{output}")


@dataclass
class Run:
    """What the processes of a run reported."""

    events: list[list[tuple]] = field(default_factory=list)  # by rank: (name, ...)
    output: str = ""  # of rank 0

    def of(self, name: str, rank: int = 0) -> list[tuple]:
        """The rest of the rank's events of that name."""
        return [event[1:] for event in self.events[rank] if event[0] == name]

    @property
    def metrics(self) -> list[dict[str, float]]:
        """What torchtitan would have sent to TensorBoard, one dict per step; every rank must have the same loss."""
        logged = [{"step": step, **values} for step, values in self.of("metrics") if "grad_norm" in values]
        for rank in range(1, len(self.events)):
            losses = [v["loss_metrics/global_avg_loss"] for _, v in self.of("metrics", rank) if "grad_norm" in v]
            assert losses == [values["loss_metrics/global_avg_loss"] for values in logged], f"rank {rank}"
        return logged

    @property
    def losses(self) -> list[float]:
        return [values["loss_metrics/global_avg_loss"] for values in self.metrics]

    @property
    def grad_norms(self) -> list[float]:
        return [values["grad_norm"] for values in self.metrics]

    @property
    def validation_losses(self) -> list[float]:
        key = "validation_metrics/loss"
        return [float(values[key]) for _, values in self.of("metrics") if key in values]


# ------------------------------------------------------------------------------------------------- the parent's side


@functools.cache
def _server() -> forkserver.ForkServer:
    """A fork server of our own: other tests use Python's, with other imports and perhaps with GPUs."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(PRELOAD)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""):
        server.ensure_running()
    return server


_STARTING = threading.Lock()  # what starts for one run has not the environment that is set for another's server


class _Popen(popen_forkserver.Popen):
    def _launch(self, process: multiprocessing.process.BaseProcess) -> None:
        with mock.patch.object(forkserver, "connect_to_new_process", _server().connect_to_new_process):
            super()._launch(process)


class _Process(multiprocessing.context.ForkServerProcess):
    _Popen = staticmethod(_Popen)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="torchtitan_magi_")


def new_folder() -> str:
    """A folder that lives as long as this process."""
    return tempfile.mkdtemp(dir=_scratch().name)


@functools.cache
def corpus() -> Path:
    """The folder of the tests' corpus: train.jsonl, validation.jsonl, tokenizer."""
    return make_corpus(Path(new_folder()))


def on_corpus() -> list[str]:
    """Arguments that let the debug configuration train on the corpus."""
    return ["--model.hf_assets_path", f"{corpus()}/tokenizer", "--training.dataset_path", f"{corpus()}/train.jsonl"]


LAYERS = 2  # of the debug models, which have 6 and 8
SMALL = ("--training.seq_len", "256", "--training.mixed_precision_param", "float32", "--training.steps", "3")


def train(
    processes: int,
    arguments: list[str],
    *,
    toml: Path | str = DEBUG_TOML,
    defaults: tuple[str, ...] = SMALL,
    layers: int | None = LAYERS,
    entry: str = "torchtitan.train",
    setup: Callable[[Callable[..., None]], None] | None = None,
    until: Callable[[Run], bool] | None = None,
    on_gpus: bool | None = None,
) -> Run:
    """Trains with the TOML file, ``defaults`` and ``arguments``; CP is 1 unless they say otherwise.

    Args:
        layers: of the debug models; None leaves them as they are.
        entry: the module that torchrun would start, or "torchtitan_magi.train".
        setup: called as setup(report) in each process before torchtitan starts; report(name, ...) makes an event.
        until: after each event, whether to kill all processes at once (SIGKILL).
        on_gpus: None is ON_GPUS.

    Raises:
        TrainingError: a process raised. The others are killed.
        TimeoutError: the run took longer than TIMEOUT seconds. All are killed, and have told where they stood.
    """
    if toml == DEBUG_TOML:
        defaults = (*on_corpus(), "--parallelism.context_parallel_degree", "1", *defaults)
    arguments = ["--job.config_file", str(toml), "--job.dump_folder", new_folder(), *PATIENT, *defaults, *arguments]
    return _run(processes, _train_in_child, (arguments, layers, entry, setup), until, on_gpus)


def call(function: Callable, *arguments: object) -> object:
    """function(*arguments) in a fresh process that has torchtitan and the plugin imported."""
    return _run(1, _call_in_child, (function, arguments)).of("result")[0][0]


def run_script(processes: int, path: Path | str, *arguments: object) -> Run:
    """What torchrun does with a file and its arguments: by it, seconds more of imports for each process."""
    return _run(processes, _run_script_in_child, ([str(path), *map(str, arguments)],))


class GlooError(TrainingError):
    """A rank ended by a signal that C++ code raises."""


def _run(
    processes: int,
    target: Callable,
    arguments: tuple,
    until: Callable | None = None,
    on_gpus: bool | None = None,
) -> Run:
    """Once more where gloo has crashed: rarely, its two threads free the same buffer (docs/internals/robustness.md)."""
    on_gpus = ON_GPUS if on_gpus is None else on_gpus
    try:
        return _run_once(processes, target, arguments, until, on_gpus)
    except GlooError as error:
        if processes == 1 or on_gpus:
            raise
        warnings.warn(f"{error}: started once more", stacklevel=2)
        return _run_once(processes, target, arguments, until, on_gpus)


def _run_once(processes: int, target: Callable, arguments: tuple, until: Callable | None, on_gpus: bool) -> Run:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, processes, is_master=True, wait_for_workers=False)  # any free port
    folder, started, ranks, run = new_folder(), [], {}, Run([[] for _ in range(processes)])
    deadline = time.monotonic() + TIMEOUT
    try:
        for rank in range(processes):
            receive, send = multiprocessing.Pipe(duplex=False)
            log = f"{folder}/rank{rank}.log"
            process = (multiprocessing.get_context("spawn").Process if on_gpus else _Process)(
                target=_child, args=(rank, processes, store.port, log, send, target, arguments, on_gpus), daemon=True
            )
            with _STARTING:
                process.start()
            send.close()
            started.append(process)
            ranks[receive] = rank
        while ranks:
            ready = connection.wait(list(ranks), timeout=deadline - time.monotonic())
            if not ready:
                said = [f"rank {rank} printed\n{_tail(f'{folder}/rank{rank}.log')}" for rank in ranks.values()]
                raise TimeoutError("\n".join([f"no end after {TIMEOUT} s", *said]))
            for pipe in ready:
                rank = ranks[pipe]
                try:
                    event = pipe.recv()
                except EOFError:
                    started[rank].join(5)
                    code = started[rank].exitcode  # negative: the number of a signal
                    event = ("error", "EOFError", f"rank {rank} died without a word, exit code {code}", "")
                if event[0] == "error":
                    crashed = started[rank].exitcode in (-signal.SIGABRT, -signal.SIGSEGV)
                    raise (GlooError if crashed else TrainingError)(*event[1:], _tail(f"{folder}/rank{rank}.log"))
                if event[0] == "end":
                    del ranks[pipe]
                    continue
                run.events[rank].append(event)
                if until is not None and until(run):
                    return run
        for process in started:
            process.join(max(0, deadline - time.monotonic()))
    finally:
        for process in started:
            if process.is_alive():  # else its id, which the fork server gave back, may be that of any other by now
                process.kill()
        for process in started:
            process.join()
    run.output = Path(f"{folder}/rank0.log").read_text()
    return run


def _tail(path: str) -> str:
    return Path(path).read_text()[-4000:] if Path(path).exists() else ""


# --------------------------------------------------------------------------------------------------- the child's side


def watch(owner: object, name: str, see: Callable = lambda *_, **__: None, before: Callable = lambda: None) -> None:
    """Calls before(), and then see(result, *args, **kwargs) after each owner.name(*args, **kwargs); for ``setup``."""
    stock = getattr(owner, name)

    def call_and_see(*args: object, **kwargs: object) -> object:
        before()
        result = stock(*args, **kwargs)
        see(result, *args, **kwargs)
        return result

    setattr(owner, name, call_and_see)


class OnPath:
    """Makes a folder importable in the processes of a run."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __call__(self, report):
        sys.path.insert(0, self.folder)


def _child(
    rank: int, processes: int, port: int, log: str, send: connection.Connection, target: Callable, arguments: tuple,
    on_gpus: bool,
) -> None:  # fmt: skip
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(0.9 * TIMEOUT, file=2)
    local = rank
    if on_gpus:
        from support.gpus import take_gpu

        local = take_gpu(rank, processes)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1",
    )  # fmt: skip
    one_at_a_time = threading.Lock()  # a checkpoint may be written in a thread

    def report(*event: object) -> None:
        with one_at_a_time:
            send.send(event)

    try:
        target(*arguments, report=report)
        send.send(("end",))
    except BaseException as error:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        send.send(("error", type(error).__name__, str(error), traceback.format_exc()))


def _call_in_child(function: Callable, arguments: tuple, report: Callable[..., None]) -> None:
    report("result", function(*arguments))


def _run_script_in_child(command: list[str], report: Callable[..., None]) -> None:
    from torchtitan.config import ConfigManager

    sys.argv[:] = command
    parse = ConfigManager.parse_args
    # Not sys.argv as it was at import time.
    ConfigManager.parse_args = lambda manager, arguments=None: parse(manager, arguments or sys.argv[1:])
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
    sys.stdout.flush()


def _reporter(report: Callable[..., None]) -> Callable:
    """What makes torchtitan's logger of metrics: one that makes events of them."""
    from torchtitan.components.metrics import BaseLogger

    class Report(BaseLogger):
        def log(self, metrics: dict, step: int) -> None:
            report("metrics", step, metrics)

    return lambda *_, **__: Report()


def _train_in_child(
    arguments: list[str], layers: int | None, entry: str, setup: Callable | None, report: Callable[..., None]
) -> None:
    if IS_0_3:
        _train_by_0_3(arguments, layers, setup, report)
        return

    import torch.distributed as dist
    import torchtitan.train
    from torchtitan.components import metrics
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec

    import torchtitan_magi.titan.v02.trainer

    metrics._build_metric_logger = _reporter(report)
    # Rank 0 waits two seconds for the others at the end of a run; wait for them instead.
    torchtitan.train.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
    ConfigManager.parse_args.__defaults__ = (arguments,)  # otherwise sys.argv at import time
    _leave_help_texts_out()
    exact_gradient_norms()
    if layers is not None:
        for name in ("llama3", "qwen3"):
            stock = importlib.import_module(f"torchtitan.models.{name}").get_train_spec()
            for args in (*stock.model_args.values(), *get_train_spec(name).model_args.values()):
                args.n_layers = layers
    if setup is not None:
        setup(report)
    if entry == "torchtitan_magi.train":
        torchtitan_magi.titan.v02.trainer.main()
    else:
        torchtitan.train.main(torchtitan.train.Trainer)
    assert not dist.is_initialized()


def _train_by_0_3(
    arguments: list[str], layers: int | None, setup: Callable | None, report: Callable[..., None]
) -> None:
    """The same with torchtitan 0.3, whose own entry point takes no TOML file: always by ours."""
    import torch.distributed as dist
    import torchtitan.trainer
    from torchtitan.components import metrics

    import torchtitan_magi.titan.v03.trainer

    metrics.MetricsProcessor._build_metric_logger = _reporter(report)
    torchtitan.trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
    _leave_help_texts_out()
    exact_gradient_norms()
    if layers is not None:
        for name in ("llama3", "qwen3"):
            flavors = getattr(importlib.import_module(f"torchtitan.models.{name}"), f"{name}_configs")
            flavors.update({flavor: functools.partial(_cut, make, layers) for flavor, make in flavors.items()})
    if setup is not None:
        setup(report)
    torchtitan_magi.titan.v03.trainer.main(arguments)
    assert not dist.is_initialized()


def _leave_help_texts_out() -> None:
    """tyro parses sources for those of all options: a third of the CPU time of a small run."""
    import tyro

    tyro._docstrings.get_field_docstring = lambda *_: None


def _cut(make: Callable, layers: int, **options: object) -> object:
    """A flavor of torchtitan 0.3 with its first layers only."""
    config = make(**options)
    config.layers = config.layers[:layers]
    return config
