"""Times the kernels of this tree against those of another folder, in one run: what a change is worth.

    git worktree add /tmp/before HEAD~1
    python benchmarks/compare_kernels.py /tmp/before/kernels --groups masks

Two runs of a benchmark on two GPUs, or on one that has become warm, differ by more than most changes do. Here both
versions take turns on the same inputs, in a new order every round, and the table has the medians' ratio. The host half
is this tree's for both, so both must take the same parameters and work lists. Kernels alone, without autograd.
"""

from pathlib import Path

import torch
from bench_kernel import GROUPS
from figures import parser
from rivals import Case
from timing import Sustained, sustained, take_turns
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


def compare(case: Case, folders: dict[str, Path], wanted: float, is_sustained: bool) -> str:
    torch.manual_seed(0)
    (heads_q, heads_kv), (dim, value_dim) = case.heads, case.dims
    shapes = (heads_q, dim), (heads_kv, dim), (heads_kv, value_dim), (heads_q, value_dim)
    inputs = tuple(torch.randn(case.tokens, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    versions = {name: Version(folder, case, inputs) for name, folder in folders.items()}
    for ours, theirs in zip(*(version.results for version in versions.values()), strict=True):
        difference = float((ours - theirs).norm() / theirs.norm())
        assert difference < CLOSE, f"the two versions differ by {difference:.1e} on {case}"
    cells = []
    for direction, columns in (("forward", dim + value_dim), ("backward", 3 * dim + 2 * value_dim)):
        runs = {name: getattr(version, direction) for name, version in versions.items()}
        times = sustained(runs, wanted) if is_sustained else take_turns(runs, wanted)
        this, other = (x.ms if isinstance(x, Sustained) else x for x in times.values())
        tflops = 2e-9 * case.slices().area * columns * heads_q / this
        cells.append(f"{direction} {tflops:4.0f} TFLOP/s, x {other / this:.3f}")
    return f"{case.name:18s}{case.tokens:>8d} {heads_q}:{heads_kv} {dim}/{value_dim}  " + "   ".join(cells)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("other", type=Path, help="folder of the kernels to compare with")
    command.add_argument("--groups", nargs="+", default=["masks"], choices=GROUPS, help="cases of bench_kernel.py")
    command.add_argument("--ms", type=float, default=160, help="GPU time of each measurement")
    command.add_argument("--sustained", action="store_true", help="each without a pause, as in training")
    arguments = command.parse_args()
    folders = {"this": jit.kernel_dir(), "other": arguments.other}
    for group in arguments.groups:
        for case in GROUPS[group]:
            print(compare(case, folders, arguments.ms, arguments.sustained), flush=True)


if __name__ == "__main__":
    main()
