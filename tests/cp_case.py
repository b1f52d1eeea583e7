"""One context-parallel attention case, on any transport, against the dense fp64 reference."""

from dataclasses import dataclass

import numpy as np
import torch
from dense import assert_within_budget
from masks import dense_mask, document_masks

from torchtitan_magi import dispatch, make_plan, undispatch
from torchtitan_magi.attention import attention_op, make_handle
from torchtitan_magi.backends import choose_block_attn
from torchtitan_magi.bound_plan import bind_plan
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.cost_model import H200, CostModel, Heads


@dataclass(frozen=True)
class Case:
    slices: AttnSlices
    mask: torch.Tensor  # bool [total, total]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    stages: int = 1
    gpus_per_node: int | None = None
    cost: CostModel = H200
    seed: int = 0
    dtype: torch.dtype = torch.float32
    fp32_reduce: bool = False


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


def run_case(case, cp_size, mesh, device="cpu", backend="auto"):
    """out, lse, dq, dk, dv of the whole pack (replicated), computed by the ranks of ``mesh``."""
    total = len(case.mask)
    q, k, v, dout = inputs(case, device)
    plan = make_plan(
        case.slices, total, cp_size, case.stages, heads=Heads(*case.heads, case.head_dim),
        gpus_per_node=case.gpus_per_node, cost=case.cost,
    )  # fmt: skip
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    q_local, k_local, v_local = (dispatch(x, plan, mesh) for x in (q, k, v))
    block_attn = choose_block_attn(backend, q.device)
    bound = bind_plan(plan, mesh, block_attn, *case.heads, q.device, fp32_reduce=case.fp32_reduce)
    out, lse = attention_op(q_local, k_local, v_local, make_handle(bound), case.head_dim**-0.5)
    out = undispatch(out, plan, mesh)
    out.backward(dout)
    return {"out": out.detach(), "lse": undispatch(lse.detach(), plan, mesh), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def inputs(case, device="cpu"):
    generator = torch.Generator().manual_seed(case.seed)
    shapes = [(len(case.mask), heads, case.head_dim) for heads in (*case.heads, case.heads[1], case.heads[0])]
    return [torch.randn(shape, generator=generator).to(case.dtype).to(device) for shape in shapes]


def check(case, results, device="cpu"):
    """The results of all ranks: the same bits on each, and within the budget."""
    for result in results[1:]:
        assert all(torch.equal(result[name], results[0][name]) for name in result), case
    q, k, v, dout = inputs(case, device)
    ours = {name: value.to(device) for name, value in results[0].items()}
    assert_within_budget(ours, q, k, v, dout, case.mask.to(device), case.head_dim**-0.5)
