"""Times the kernels of this tree against those of other folders, in one run: what a change is worth.

    git worktree add /tmp/before HEAD~1
    python benchmarks/compare_kernels.py /tmp/before/kernels --groups masks

Two runs of a benchmark on two GPUs, or on one that has become warm, differ by more than most changes do. Here all
versions take turns of 25 ms on the same inputs, and the table has the other versions' times over those of this tree's
neighbouring bursts, with half of the distance between the quartiles: a second for each direction of a case tells 1%.
The host half is this tree's for all, so all must take the same parameters and work lists. Kernels alone, without
autograd.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from bench_kernel import GROUPS
from figures import parser, thousands
from rivals import Case
from timing import in_bursts
from torch import Tensor

from torchtitan_magi.backends.ffa.block_attn import FfaBlockAttn
from torchtitan_magi.backends.interface import Gradients, OutGrads, StageInputs, StageMask
from torchtitan_magi.cuda import jit, launch
from torchtitan_magi.exchange.in_flight import RowSums

SCALE = 0.1
CLOSE = 5e-3  # relative difference of results, from another order of additions or roundings


class Version:
    """Forward and backward of a case with the kernels of a folder."""

    def __init__(self, folder: Path, case: Case, inputs: tuple[Tensor, ...]) -> None:
        jit.kernel_dir = lambda: folder
        launch.load.cache_clear()
        q, k, v, dout = inputs
        self.attn = FfaBlockAttn("cuda")
        lists = self.attn.prepare(StageMask(case.slices(), case.tokens, case.tokens, *case.heads))
        self.inputs = StageInputs(q, k, v, lists.to(torch.from_numpy(lists.words).cuda()), SCALE)
        out, lse = self.forward()  # now the kernels are compiled and loaded
        dq, delta = torch.empty_like(q, dtype=torch.float32), torch.empty_like(lse)
        self.attn.row_mover().sum(RowSums(out, dout, delta, (dq,)))
        dkv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        self.out_grads, self.grads = OutGrads(dout, lse, delta), Gradients(dq, dkv, zeroed=True)
        self.backward()
        self.results = [x.float().clone() for x in (out, dq, *dkv)]

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.attn.forward(self.inputs)

    def backward(self) -> None:
        self.attn.backward(self.inputs, self.out_grads, self.grads)


def compare(case: Case, folders: dict[str, Path], wanted: float) -> Iterator[str]:
    """A line for each direction."""
    torch.manual_seed(0)
    (heads_q, heads_kv), (dim, value_dim) = case.heads, case.dims
    shapes = (heads_q, dim), (heads_kv, dim), (heads_kv, value_dim), (heads_q, value_dim)
    inputs = tuple(torch.randn(case.tokens, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    versions = {name: Version(folder, case, inputs) for name, folder in folders.items()}
    this, *others = versions.values()
    for other in others:
        for x, y in zip(this.results, other.results, strict=True):
            difference = float((x - y).norm() / x.norm())
            assert difference < CLOSE, f"two versions differ by {difference:.1e} on {case}"
    for direction, columns in (("forward", dim + value_dim), ("backward", 3 * dim + 2 * value_dim)):
        runs = {name: getattr(version, direction) for name, version in versions.items()}
        found = in_bursts(runs, wanted, can_replay=direction == "forward")
        tflops = 2e-9 * case.slices().area * columns * heads_q / found["this"].ms
        ratios = [f"{name} x {time.ratio:.3f} +- {time.spread:.3f}" for name, time in found.items() if name != "this"]
        yield (
            f"{case.name:18s}{thousands(case.tokens):>5s} {heads_q}:{heads_kv} {dim}/{value_dim}  "
            f"{direction:8s} {tflops:4.0f} TFLOP/s   {'   '.join(ratios)}"
        )


def main() -> None:
    command = parser(__doc__)
    command.add_argument("others", type=Path, nargs="+", help="folders of the kernels to compare with")
    command.add_argument("--groups", nargs="+", default=["masks"], choices=GROUPS, help="cases of bench_kernel.py")
    command.add_argument("--ms", type=float, default=250, help="GPU time of each version and direction")
    arguments = command.parse_args()
    folders = {"this": jit.kernel_dir()} | {str(folder): folder for folder in arguments.others}
    for group in arguments.groups:
        for case in GROUPS[group]:
            for line in compare(case, folders, arguments.ms):
                print(line, flush=True)


if __name__ == "__main__":
    main()
