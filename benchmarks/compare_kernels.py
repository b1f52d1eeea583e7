"""Times this tree's attention against that of other trees, in one run: what a change is worth.

    git worktree add /tmp/before HEAD~1
    python benchmarks/compare_kernels.py /tmp/before --groups masks

Two runs of a benchmark on two GPUs, or on one that has become warm, differ by more than most changes do. Here each tree
has a process of its own, and they take turns of 25 ms on the same inputs. The table has the other trees' times over
those of this tree's neighbouring bursts, with half of the distance between the quartiles: above 1, this tree is faster.
A second for each direction of a case tells 1%. A backward is a whole one of autograd.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_kernel import GROUPS, Inputs
from figures import parser, thousands
from rivals import Case, ours
from timing import REPLAYED, SHORT_MS, as_graph, burst_times, compared

import torchtitan_magi

CLOSE = 5e-3  # relative difference of results, from another order of additions or roundings
WAYS = {"fwd": "forward", "bwd": "backward"}


# ------------------------------------------------------------------------------------------------ in a tree's process


class Served:
    """What a tree's process does when it is asked; a case at a time."""

    def __init__(self, deterministic: bool) -> None:
        self.deterministic = deterministic
        self.runs: dict[str, Callable[[], object]] = {}

    def prepare(self, group: str, index: int) -> list[list[float]]:
        """For out and each gradient: the sum of its elements with random signs, and its norm."""
        self.runs.clear()
        gc.collect()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        case = GROUPS[group][index]
        results, self.runs = Inputs(case).runs(ours(case, self.deterministic))
        found = []
        for x in results:
            signs = torch.randint(2, x.shape, device="cuda", dtype=torch.int8) * 2 - 1
            found.append([float((x.float() * signs).sum()), float(x.float().norm())])
        return found

    def burst(self, way: str, replayed: bool, count: int) -> float:
        """ms of each of so many calls, or of REPLAYED calls where they are replayed."""
        name = way + " replayed" * replayed
        if replayed and name not in self.runs:
            self.runs[name] = as_graph(self.runs[way])
        return burst_times(self.runs, {name: count}, [name])[0]


def serve(deterministic: bool) -> None:
    """Answers lines of JSON, [method, arguments of it...], until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed is no answer
    served = Served(deterministic)
    print(json.dumps(str(Path(torchtitan_magi.__file__).parents[1])), file=answers, flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(served, method)(*arguments)), file=answers, flush=True)


# ---------------------------------------------------------------------------------------------------- the one that asks


class Tree:
    """A process with the package of a tree."""

    def __init__(self, folder: Path, deterministic: bool) -> None:
        self.folder = folder
        command = [sys.executable, __file__, "--serve", *["--deterministic"] * deterministic]
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **pipes)
        found = self._answer()
        assert Path(found).resolve() == folder, f"{found} is in place of {folder}"

    def ask(self, *request: Any) -> Any:
        """What the method of `Served` returns."""
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.folder} has ended")
        return json.loads(line)


def compare(trees: dict[str, Tree], group: str, index: int, wanted: float) -> Iterator[str]:
    """A line for each direction."""
    case = GROUPS[group][index]
    this, *others = (tree.ask("prepare", group, index) for tree in trees.values())
    for other in others:
        for (x, norm), (y, _) in zip(this, other, strict=True):
            if not abs(x - y) < 5 * CLOSE * norm:
                yield f"{described(case)} results of two trees differ by {abs(x - y) / norm:.1e}"
                return
    for way, label in WAYS.items():
        of_call = {name: min(tree.ask("burst", way, False, 3) for _ in range(2)) for name, tree in trees.items()}
        replayed = way == "fwd" and min(of_call.values()) < SHORT_MS
        if replayed:
            of_call = {name: tree.ask("burst", way, True, 3) for name, tree in trees.items()}

        def times_of(counts: Any, turns: list[str], way: str = way, replayed: bool = replayed) -> list[float]:
            return [trees[name].ask("burst", way, replayed, counts[name]) for name in turns]

        found = compared(of_call, wanted, times_of)
        ratios = [f"{name} x {time.ratio:.3f} +- {time.spread:.3f}" for name, time in found.items() if name != "this"]
        ms = found["this"].ms / (REPLAYED if replayed else 1)
        yield f"{described(case)} {label:8s} {speed(case, way, ms)}   {'   '.join(ratios)}"


def described(case: Case) -> str:
    (heads_q, heads_kv), (dim, value_dim) = case.heads, case.dims
    return f"{case.name:18s}{thousands(case.tokens):>5s} {heads_q}:{heads_kv} {dim}/{value_dim}"


def speed(case: Case, way: str, ms: float) -> str:
    dim, value_dim = case.dims
    columns = dim + value_dim if way == "fwd" else 3 * dim + 2 * value_dim
    return f"{2e-9 * case.slices().area * columns * case.heads[0] / ms:5.0f} TFLOP/s"


def main() -> None:
    command = parser(__doc__)
    command.add_argument("others", type=Path, nargs="*", help="folders of the trees to compare with")
    command.add_argument("--groups", nargs="+", default=["masks"], choices=GROUPS, help="cases of bench_kernel.py")
    command.add_argument("--ms", type=float, default=250, help="GPU time of each tree and direction")
    command.add_argument("--deterministic", action="store_true", help="the backward that repeats bit for bit")
    command.add_argument("--serve", action="store_true", help="be the process of a tree")
    arguments = command.parse_args()
    if arguments.serve:
        return serve(arguments.deterministic)
    others = {folder.name: folder.resolve() for folder in arguments.others}
    folders = {"this": Path(__file__).resolve().parents[1], **others}
    trees = {name: Tree(folder, arguments.deterministic) for name, folder in folders.items()}
    for group in arguments.groups:
        for index in range(len(GROUPS[group])):
            for line in compare(trees, group, index, arguments.ms):
                print(line, flush=True)


if __name__ == "__main__":
    main()
