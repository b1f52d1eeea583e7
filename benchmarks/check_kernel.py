"""Checks the FFA kernel against an fp64 dense reference on a Hopper GPU: random slice lists, shapes, dtypes, heads.

    python benchmarks/check_kernel.py --cases 300 --seed 0

Every value of out, lse, dq, dk, dv must be within twice the largest error of a plain implementation in the input
dtype, plus four units in the last place of the largest value; the same for the error's norm. The plain implementation
is the worse of two: torch's autograd in the input dtype, and the textbook backward in fp64 whose delta = rowsum(out *
dout) is taken from the rounded out, as every flash-attention backward does (it matters for rows that see two or three
keys, where torch's error is next to nothing). Uninitialised memory is NaN. All GPUs of the machine share the cases.
"""

import multiprocessing
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from figures import recording_parser, result, save, sources
from torch import Tensor

from torchtitan_magi.backends.ffa.block_attn import FfaBlockAttn
from torchtitan_magi.backends.ffa.params import backward_variants, forward_variant, has_wide_values, padded_dims
from torchtitan_magi.backends.ffa.worklists import DeviceLists, WorkLists, build_worklists
from torchtitan_magi.backends.interface import Gradients, OutGrads, StageInputs, StageMask
from torchtitan_magi.calibrate import facts_of_run
from torchtitan_magi.cuda import jit, launch
from torchtitan_magi.exchange.in_flight import RowShape, RowSums
from torchtitan_magi.masks.builders import block_causal, shared_prompt, sliding_window, varlen_causal, varlen_full
from torchtitan_magi.masks.slices import AttnSlices

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # its dense reference
from support.dense import dense_with_grads
from support.masks import dense_mask

HEADS = [(8, 1), (8, 8), (5, 1), (14, 2), (16, 1), (8, 2), (3, 3), (20, 5), (34, 1), (12, 2)]
FEW_HEADS = [(8, 1), (14, 2), (3, 3), (12, 2)]  # for variants that are compiled besides
HEAD_DIMS = [(128, 128), (64, 64), (128, 128), (64, 64), (96, 96), (32, 32), (40, 40), (8, 8)]
WIDE_HEAD_DIMS = [(192, 128), (256, 256), (192, 192), (256, 256), (192, 128)]
WIDE_HEAD_DIMS += [(144, 96), (208, 208), (240, 128), (96, 64), (128, 64)]
SPAWN = multiprocessing.get_context("spawn")
PROCESSES = 4  # on each GPU: a small case is mostly the host's work


@dataclass
class Case:
    """One call: `stages` slice lists over keys of their own, one set of queries."""

    stages: list[AttnSlices]
    num_q: int
    num_k: list[int]
    num_heads_q: int
    num_heads_kv: int
    head_dims: tuple[int, int]  # of q and k; of v
    dtype: torch.dtype
    deterministic: bool = False
    chunks_per_tile: int | None = None
    backward_heads_per_tile: int | None = None
    blocks_per_chunk: int | None = None
    float_grads: bool = False
    softmax_scale: float = 0.1
    softcap: float = 0.0
    sinks: bool = False
    lse_grad: bool = False
    name: str = "random"


def random_slices(rng: random.Random, num_q: int, num_k: int) -> AttnSlices:
    def cut(n: int) -> tuple[int, int]:
        a, b = sorted((rng.randint(0, n), rng.randint(0, n)))
        return a, b

    rows = []
    for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 9])):
        rows.append([*cut(num_q), *cut(num_k), rng.randint(0, 3)])
    return AttnSlices(rows)


def random_case(rng: random.Random) -> Case:
    """Odd lengths, all mask types, overlaps, empty rows, one to three stages."""
    num_q = rng.choice([1, 2, 17, 64, rng.randint(1, 130), rng.randint(1, 600)])
    is_wide, softcap, sinks = (rng.random() < chance for chance in (0.4, 0.3, 0.3))
    heads_q, heads_kv = rng.choice(FEW_HEADS if is_wide or softcap or sinks else HEADS)
    num_stages = rng.choice([1, 1, 1, 2, 3])
    num_k = [rng.choice([1, 5, 128, rng.randint(1, 300), rng.randint(1, 900)]) for _ in range(num_stages)]
    stages = [random_slices(rng, num_q, n) for n in num_k]
    if rng.random() < 0.3:  # documents
        cuts = sorted(rng.randint(0, num_q) for _ in range(rng.randint(0, 6)))
        cu = [0, *cuts, num_q]
        build = rng.choice([varlen_causal, varlen_full, lambda c: sliding_window(c, 37), lambda c: block_causal(c, 50)])
        stages[0], num_k[0] = build(cu), num_q
    group = heads_q // heads_kv
    heads_per_tile = rng.choice([d for d in range(1, min(group, 16) + 1) if group % d == 0])
    return Case(
        stages, num_q, num_k, heads_q, heads_kv, rng.choice(WIDE_HEAD_DIMS if is_wide else HEAD_DIMS),
        rng.choice([torch.bfloat16, torch.bfloat16, torch.float16]),
        deterministic=rng.random() < 0.4, chunks_per_tile=rng.choice([None, 2, 3, 5]),
        backward_heads_per_tile=heads_per_tile, blocks_per_chunk=rng.choice([None, None, 1, 2, 7]),
        float_grads=rng.random() < 0.5,
        softmax_scale=rng.choice([0.05, 0.125, 0.3]),
        softcap=rng.choice([0.5, 5.0, 50.0, 64.0, 100.0]) if softcap else 0.0,
        sinks=sinks, lse_grad=rng.random() < 0.3,
    )  # fmt: skip


def named_cases() -> list[Case]:
    """Masks users have, at sizes that fill several tiles and CTAs."""
    cu = [0, 3, 450, 451, 1100, 2048]
    masks = {
        "varlen causal": varlen_causal(cu),
        "varlen full": varlen_full(cu),
        "sliding window": sliding_window(cu, 200),
        "block causal": block_causal(cu, 100),
        "shared prompt": shared_prompt([[500, 300, 200], [600, 100, 348]]),
        "causal": varlen_causal([0, 2048]),
    }
    cases = []
    for name, slices in masks.items():
        for heads, head_dim in (((16, 2), 128), ((16, 2), 64), ((7, 1), 128), ((4, 4), 128)):
            for deterministic in (False, True):
                dims = head_dim, head_dim
                cases.append(Case([slices], 2048, [2048], *heads, dims, torch.bfloat16, deterministic, name=name))
        for dims, options in (
            ((128, 128), {"sinks": True}), ((128, 128), {"softcap": 20.0}), ((256, 256), {}), ((192, 128), {}),
            ((256, 256), {"softcap": 20.0, "sinks": True, "lse_grad": True, "deterministic": True}),
        ):  # fmt: skip
            cases.append(Case([slices], 2048, [2048], 14, 2, dims, torch.bfloat16, name=name, **options))
    return cases


@dataclass
class Extras:
    """What changes the scores, and the gradient of lse; see `flex_flash_attn`."""

    softcap: float
    sinks: Tensor | None
    dlse: Tensor | None


def by_autograd(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, dout: Tensor, extras: Extras
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv and dsinks of plain attention in the dtype of q, but for its softmax; fp64 results."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2)) * scale
    if extras.softcap:
        scores = extras.softcap * torch.tanh(scores / extras.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    wide = scores.float()
    lse, sinks = wide.logsumexp(-1), None
    if extras.sinks is not None:
        sinks = extras.sinks.detach().to(wide.dtype).requires_grad_()
        lse = torch.logaddexp(lse, sinks[:, None])
    p = torch.where(lse.isinf()[..., None], 0.0, (wide - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()).to(
        q.dtype
    )
    out = (p @ values).transpose(0, 1)
    loss = (out * dout.to(out.dtype)).sum()
    if extras.dlse is not None:
        loss = loss + torch.where(lse.isinf(), 0.0, lse * extras.dlse.T).sum()
    loss.backward()
    results = {"out": out, "lse": lse.transpose(0, 1), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    if sinks is not None:
        results["dsinks"] = sinks.grad
    return {name: x.detach().double() for name, x in results.items()}


def on_gpu(lists: WorkLists) -> DeviceLists:
    return lists.to(torch.from_numpy(lists.words).cuda())


def run_ours(
    case: Case, q: Tensor, kvs: list[tuple[Tensor, Tensor]], dout: Tensor, extras: Extras
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv, dsinks; dk and dv of all stages one after another."""
    attn = FfaBlockAttn("cuda", case.deterministic)
    masks, row = [], RowShape(case.num_heads_kv, *case.head_dims)
    for slices, num_k in zip(case.stages, case.num_k, strict=True):
        head_dim, value_dim = case.head_dims
        shape = case.num_q, num_k, case.num_heads_q, case.num_heads_kv
        mask = StageMask(slices, *shape, head_dim=head_dim, value_dim=value_dim)
        lists = build_worklists(
            mask, deterministic=case.deterministic, chunks_per_tile=case.chunks_per_tile,
            backward_heads_per_tile=case.backward_heads_per_tile, blocks_per_chunk=case.blocks_per_chunk,
        )  # fmt: skip
        masks.append(on_gpu(lists))
    result = None
    for i, (mask, kv) in enumerate(zip(masks, kvs, strict=True)):
        inputs = StageInputs(q, *kv, mask, case.softmax_scale, None, case.softcap, extras.sinks)
        result = attn.forward(inputs, result, more=i + 1 < len(masks))
    out, lse = result
    dq, delta = torch.full(q.shape, torch.nan, device="cuda"), torch.empty_like(lse)
    mover, marks = attn.row_mover(), attn.marks(masks[0], *kvs[0])
    mover.sum(RowSums(out, dout, delta, (dq if marks is None else marks,), extras.dlse))
    dks, dvs = [], []
    for mask, kv in zip(masks, kvs, strict=True):
        dtype = torch.float32 if case.float_grads else q.dtype
        dkv = torch.full((len(kv[0]), row.width), torch.nan, dtype=dtype, device="cuda")
        inputs = StageInputs(q, *kv, mask, case.softmax_scale, None, case.softcap)
        attn.backward(inputs, OutGrads(dout, lse, delta), Gradients(dq, dkv, marks=marks))
        marks = None
        dk, dv = row.split(dkv)
        dks.append(dk)
        dvs.append(dv)
    rounded = torch.empty_like(q, memory_format=torch.contiguous_format)
    mover.round(dq, (q, q), row, case.softmax_scale, rounded)  # no sums of dk and dv
    results = {"out": out, "lse": lse, "dq": rounded, "dk": torch.cat(dks), "dv": torch.cat(dvs)}
    if extras.sinks is not None:
        results["dsinks"] = mover.sink_grads(extras.sinks.float(), lse, delta)
    return results


def run_case(case: Case, seed: int) -> tuple[dict[str, float], list[str]]:
    """Error of each output as a fraction of its budget, and what is wrong."""
    torch.manual_seed(seed)
    head_dim, value_dim = case.head_dims
    shape, shape_q = RowShape(case.num_heads_kv, head_dim, value_dim), (case.num_q, case.num_heads_q)
    q = torch.randn(case.num_q, 2, case.num_heads_q, head_dim, device="cuda").to(case.dtype)[:, 1]  # strided
    dout = torch.randn(*shape_q, value_dim, device="cuda").to(case.dtype)
    kvs = [shape.split(torch.randn(n, shape.width, device="cuda").to(case.dtype)) for n in case.num_k]
    sinks = torch.randn(case.num_heads_q, device="cuda") if case.sinks else None
    extras = Extras(case.softcap, sinks, torch.randn(shape_q, device="cuda") if case.lse_grad else None)
    tables = zip((slices.table for slices in case.stages), [case.num_q] * len(case.stages), case.num_k, strict=True)
    mask = torch.cat([torch.from_numpy(dense_mask(*table)) for table in tables], 1).cuda()
    if extras.dlse is not None and sinks is None:
        extras.dlse[~mask.any(1)] = 0  # lse is -inf there
    ours, again = (run_ours(case, q, kvs, dout, extras) for _ in range(2))
    k, v = (torch.cat(x) for x in zip(*kvs, strict=True))
    plain = by_autograd(q, k, v, mask, case.softmax_scale, dout, extras)
    options = q, k, v, dout, mask, case.softmax_scale, torch.float64, case.softcap, extras.sinks, extras.dlse
    exact = dense_with_grads(*options)
    rounded = dense_with_grads(*options, rounded=exact["out"].to(case.dtype).double())
    eps = torch.finfo(case.dtype).eps
    shares, problems = {}, []
    for name, got in ours.items():
        got, want = got.double(), exact[name]
        infinite = want.isinf()
        if not torch.equal(infinite, got.isinf()) or got.isnan().any():
            problems.append(
                f"{name}: {int(got.isnan().sum())} NaN, infinities differ {not torch.equal(infinite, got.isinf())}"
            )
            continue
        lows = [plain[name]] if name in ("out", "lse", "dv") else [plain[name], rounded[name]]
        want, got, *lows = (x.masked_fill(infinite, 0.0) for x in (want, got, *lows))
        size = want.abs().max() if want.numel() else want.new_zeros(())
        low_worst, low_norm = (max(f(low - want) for low in lows) for f in (lambda x: x.abs().max(), Tensor.norm))
        worst_allowed = 2 * low_worst + 4 * eps * size + 5e-5
        norm_allowed = 2 * low_norm + 0.5 * eps * want.norm() + 5e-5 * want.numel() ** 0.5
        terms = rounded.get(name + "_terms")
        if terms is not None and want.numel() and want.norm() <= 1e-9 * terms.norm():
            worst_allowed += 4 * torch.finfo(torch.float32).eps * terms.max()  # rows that see one key: all cancels
        worst, norm = (got - want).abs().max() / worst_allowed, (got - want).norm() / norm_allowed
        shares[name] = max(float(worst), float(norm))
        if shares[name] > 1:
            problems.append(f"{name}: {float(worst):.2f} of the largest error allowed, {float(norm):.2f} of the norm")
        if (name in ("out", "lse") or case.deterministic) and not torch.equal(ours[name], again[name]):
            problems.append(f"{name}: differs between two runs")
    return shares, problems


def variants_of(case: Case) -> set[tuple[str, tuple[tuple[str, int], ...]]]:
    """The kernels that a case runs."""
    found = set()
    for i, (slices, num_k) in enumerate(zip(case.stages, case.num_k, strict=True)):
        mask = StageMask(slices, case.num_q, num_k, case.num_heads_q, case.num_heads_kv)
        sizes = build_worklists(mask, backward_heads_per_tile=case.backward_heads_per_tile).sizes
        dims, more, softcap = padded_dims(*case.head_dims), i + 1 < len(case.stages), case.softcap
        shape = dims, sizes.forward.heads_per_tile, case.dtype
        found.add(
            (
                "ffa_forward.cu",
                forward_variant(*shape, i > 0, more, softcap=softcap, sinks=case.sinks and not more),
            )
        )
        shape = dims, sizes.backward.heads_per_tile, case.dtype
        begins = case.deterministic and sizes.backward.begins_queries and not has_wide_values(dims)
        variants = backward_variants(*shape, case.deterministic, begins, softcap=softcap)
        found |= {("ffa_backward.cu", variant) for variant in variants}
    return found


def compile_ahead(cases: list[Case]) -> None:
    """Fills the disk cache in parallel."""
    variants = sorted(set().union(*(variants_of(case) for case in cases)))
    with ProcessPoolExecutor(mp_context=SPAWN) as pool:
        list(pool.map(jit.cubin, [name for name, _ in variants], [dict(macros) for _, macros in variants]))
    print(f"{len(variants)} kernels compiled", flush=True)


def poison() -> None:
    """From now on torch.empty gives NaN, and products in bf16 are added up in float32."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def begin(gpus: "multiprocessing.Queue[int]") -> None:
    """Begins a process of those that share the cases."""
    torch.cuda.set_device(gpus.get())
    poison()


def processes_on_gpus() -> ProcessPoolExecutor:
    numbers, gpus = list(range(torch.cuda.device_count())) * PROCESSES, SPAWN.Queue()
    for number in numbers:
        gpus.put(number)
    return ProcessPoolExecutor(len(numbers), SPAWN, begin, (gpus,))


def run_alone(rng: random.Random, num_cases: int) -> None:
    """Small calls of our kernels and of nothing else that takes long, built so that race checkers can follow them."""
    plain = launch.variant_of
    launch.variant_of = lambda macros: (*plain(macros), ("EVERY_LANE_ARRIVES", 1))
    for _ in range(num_cases):
        case = replace(random_case(rng), num_q=150, num_k=[200], num_heads_q=8, num_heads_kv=2)
        case = replace(case, stages=[random_slices(rng, 150, 200)], backward_heads_per_tile=rng.choice([1, 4]))
        head_dim, value_dim = case.head_dims
        shapes = (150, 8, head_dim), (200, 2, head_dim), (200, 2, value_dim), (150, 8, value_dim)
        q, k, v, dout = (torch.randn(shape, device="cuda").to(case.dtype) for shape in shapes)
        extras = Extras(case.softcap, torch.randn(8, device="cuda") if case.sinks else None, None)
        run_ours(case, q, [(k, v)], dout, extras)
        torch.cuda.synchronize()
    print(f"ran {num_cases} cases")


def summary_of_run() -> str:
    """For the docs."""
    found = result("check_kernel_h200")
    worst = max(found["worst_share_of_budget"].values())
    counts = f"{found['cases']:,} random cases, {found['failed']} failed; the worst error is {worst:.2f} of its budget."
    return f"{counts}\n\n{sources('check_kernel_h200')}"


PARTS = {"kernel-check": summary_of_run}


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--cases", type=int, default=300, help="random cases")
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    parser.add_argument("--seconds", type=float, default=500, help="stop starting cases after this long")
    parser.add_argument("--only-ours", action="store_true", help="run the kernels alone, small: for compute-sanitizer")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    if arguments.only_ours:
        poison()
        run_alone(rng, arguments.cases)
        return
    cases = named_cases() + [random_case(rng) for _ in range(arguments.cases)]
    compile_ahead(cases)
    start, done, failed, worst = time.time(), 0, 0, {}
    with processes_on_gpus() as pool:
        seeds = range(arguments.seed, arguments.seed + len(cases))
        for i, (case, (shares, problems)) in enumerate(zip(cases, pool.map(run_case, cases, seeds), strict=True)):
            done += 1
            for name, share in shares.items():
                worst[name] = max(worst.get(name, 0.0), share)
            if problems:
                failed += 1
                if failed <= 12:
                    tables = [s.table.tolist() for s in case.stages] if case.name == "random" else case.name
                    print(f"case {i} FAILED {problems}\n  {replace(case, stages=[])} {str(tables)[:300]}", flush=True)
            if time.time() - start > arguments.seconds:
                pool.shutdown(cancel_futures=True)
                break
    summary = {"cases": done, "failed": failed, "worst_share_of_budget": {k: round(v, 3) for k, v in worst.items()},
               "seconds": round(time.time() - start, 1), "seed": arguments.seed}  # fmt: skip
    print(summary)
    save(facts_of_run(arguments.commit) | summary, arguments.output)
    np.testing.assert_equal(failed, 0)


if __name__ == "__main__":
    main()
