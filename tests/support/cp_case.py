"""One context-parallel attention case, on any transport, against the dense fp64 reference."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from support.dense import assert_within_budget
from support.masks import dense_mask, document_masks

from torchtitan_magi import dispatch, make_plans, undispatch
from torchtitan_magi.attention.bound_plan import bind_plan
from torchtitan_magi.attention.op import PlanHandle, attention_op
from torchtitan_magi.backends.choose import choose_block_attn
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.cost_model import H200, CostModel, Heads, Link
from torchtitan_magi.planning.plan import plan_ownership

SLOW_NETWORK = replace(H200, across=Link(latency=0.0, bandwidth=1e6))  # so slow that relays pay


@dataclass(frozen=True)
class Case:
    slices: AttnSlices
    mask: torch.Tensor  # bool [total, total]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    value_dim: int | None = None  # default head_dim
    stages: int = 1
    gpus_per_node: int | None = None
    cost: CostModel = H200
    seed: int = 0
    dtype: torch.dtype = torch.float32
    fp32_reduce: bool = False
    softcap: float = 0.0
    sinks: bool = False
    lse_grad: bool = False  # lse takes part in the loss
    beside: AttnSlices | None = None  # mask of other layers, which shares the placement of tokens


def of_slices(slices, total, **options):
    """The case of any slices of `total` tokens."""
    return Case(slices, torch.from_numpy(dense_mask(slices.table, total, total)), **options)


def documents(lengths, kind="causal", size=1, padding=0, **options):
    """The case of documents under a builder, its mask written down from the documents."""
    slices, mask = document_masks(lengths, size, padding)[kind]
    return Case(slices, torch.from_numpy(mask), **options)


def random_slices(seed, total, **options):
    random = np.random.default_rng(seed)
    q, k = (np.sort(random.integers(0, total + 1, (6, 2)), 1) for _ in range(2))
    return of_slices(AttnSlices(np.column_stack([q, k, random.integers(0, 4, 6)])), total, **options)


BF16 = {"dtype": torch.bfloat16, "head_dim": 128}
CASES_ON_GPUS = {
    "GQA 64:8": documents([900, 7, 1, 64, 500, 33, 495], heads=(64, 8), **BF16),
    "no overlap": documents([600, 200, 300], heads=(8, 2), **BF16, stages=0),
    "four stages": documents([600, 200, 301], heads=(8, 2), **BF16, stages=4),
}


def run_case(case, cp_size, mesh, device="cpu", backend="auto"):
    """out, lse, dq, dk, dv, dsinks of the whole pack (replicated), computed by the ranks of ``mesh``.

    The ranks' gradients of sinks are added up as those of a parameter are: here, in the order of the ranks.
    """
    total = len(case.mask)
    q, k, v, dout = inputs(case, device)
    sinks, dlse = extras(case, device)
    masks = [case.slices] if case.beside is None else [case.slices, case.beside]
    plan, *_ = make_plans(
        masks, total, cp_size, case.stages, heads=Heads(*case.heads, case.head_dim, case.value_dim or 0),
        gpus_per_node=case.gpus_per_node, cost=case.cost,
    )  # fmt: skip
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    q_local, k_local, v_local = (dispatch(x, plan, mesh) for x in (q, k, v))
    block_attn = choose_block_attn(backend, q.device)
    bound = bind_plan(plan, mesh, block_attn, *case.heads, q.device, fp32_reduce=case.fp32_reduce)
    local_sinks = None
    if sinks is not None:
        local_sinks = _for_each_rank(sinks.requires_grad_(), plan, mesh)
    out, lse = attention_op(
        q_local, k_local, v_local, PlanHandle(bound).tensor, case.head_dim**-0.5, local_sinks, case.softcap
    )
    out, lse = undispatch(out, plan, mesh), undispatch(lse, plan, mesh)
    loss = (out * dout).sum()
    if dlse is not None:
        loss = loss + torch.where(lse.isinf(), 0.0, lse * dlse).sum()
    loss.backward()
    grads = {"dq": q.grad, "dk": k.grad, "dv": v.grad} | ({} if sinks is None else {"dsinks": sinks.grad})
    return {"out": out.detach(), "lse": lse.detach()} | grads


def _for_each_rank(sinks, plan, mesh):
    """The sinks as each rank's own, through which gradients of all ranks come back: a token each of a pack of ranks."""
    if plan.cp_size == 1:
        return sinks
    one_token_each = plan_ownership(
        AttnSlices([]), plan.cp_size, tuple(np.array([[r, r + 1]]) for r in range(plan.cp_size)), 0
    )
    return dispatch(sinks.expand(plan.cp_size, -1), one_token_each, mesh)[0]


def inputs(case, device="cpu"):
    generator = torch.Generator().manual_seed(case.seed)
    (heads_q, heads_kv), dim, value_dim = case.heads, case.head_dim, case.value_dim or case.head_dim
    shapes = (heads_q, dim), (heads_kv, dim), (heads_kv, value_dim), (heads_q, value_dim)
    return [torch.randn(len(case.mask), *shape, generator=generator).to(case.dtype).to(device) for shape in shapes]


def extras(case, device="cpu"):
    """Sinks [Hq] and the gradient of lse [T, Hq], or None."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    sinks = torch.randn(case.heads[0], generator=generator, dtype=case.dtype).to(device)
    dlse = torch.randn(
        len(case.mask), case.heads[0], generator=generator, dtype=torch.promote_types(case.dtype, torch.float32)
    )
    return sinks if case.sinks else None, dlse.to(device) if case.lse_grad else None


def check(case, results, device="cpu"):
    """The results of all ranks: the same bits on each, and within the budget."""
    for result in results[1:]:
        assert all(torch.equal(result[name], results[0][name]) for name in result), case
    q, k, v, dout = inputs(case, device)
    ours = {name: value.to(device) for name, value in results[0].items()}
    mask, (sinks, dlse) = case.mask.to(device), extras(case, device)
    if dlse is not None and not case.sinks:
        dlse[~mask.any(1)] = 0
    options = {"softcap": case.softcap, "sinks": sinks, "dlse": dlse}
    assert_within_budget(ours, q, k, v, dout, mask, case.head_dim**-0.5, **options)
