"""FlashQLA's stages in plain torch: what each takes and gives, for tests of how we put them together."""

import functools
import itertools
import sys
from types import ModuleType, SimpleNamespace

import torch

from torchtitan_magi.linear import kernels
from torchtitan_magi.linear.backend import Tokens
from torchtitan_magi.linear.chunked import run

CHUNK_SIZE, LONGEST = 4, 2  # tokens of a chunk, chunks of a fragment
THRESHOLD = -40.0  # a gate that forgets what is left of e^-40


def stand_in(monkeypatch):
    """Takes FlashQLA's place; a mapped sequence is cut that has more than 10 tokens."""
    monkeypatch.setattr(kernels, "_library", lambda: sys.modules[__name__])
    for name, value in (("LONG", 10), ("SHORTEST", 1), ("BLOCKS", 16)):
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(kernels, "_fragments", functools.cache(kernels._fragments.__wrapped__))
    for name in ("flash_qla", "flash_qla.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_qla.utils.index", sys.modules[__name__])


def prepare_varlen_metadata(cu_seqlens, _):
    return cu_seqlens


def build_cp_context(cu_seqlens, *, force_intra_cp, **_):
    pairs = list(itertools.pairwise(cu_seqlens.tolist()))
    if not force_intra_cp and max(end - start for start, end in pairs) <= 4 * CHUNK_SIZE:
        return SimpleNamespace(is_intra=False)
    starts = [range(start, end, LONGEST * CHUNK_SIZE) for start, end in pairs]
    fragments = [*itertools.chain(*starts), pairs[-1][1]]
    first = torch.tensor([0, *map(len, starts)]).cumsum(0).int()
    return SimpleNamespace(is_intra=True, intra_cp_cu_seqlens=torch.tensor(fragments).int(), seq_map_r2c=first)


def chunks_of(cu_seqlens):
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        for first in range(start, end, CHUNK_SIZE):
            yield slice(first, min(first + CHUNK_SIZE, end))


def chunk_local_cumsum(g, chunk_size=CHUNK_SIZE, cu_seqlens=None, reverse=False, **_):
    """In the backward the stage before it gives gradients of g itself."""
    return g if reverse else torch.cat([g[:, chunk].cumsum(1) for chunk in chunks_of(cu_seqlens)], 1)


def kkt_solve(k, b, **_):
    return b.new_zeros(*b.shape, CHUNK_SIZE)


def rule(q, k, v, gates, b, scale, first, end, state, head=slice(None)):
    """out and the last state of some tokens, whose gates are summed inside chunks from the first one on."""
    sums = gates[0, first:end, head].double()
    is_start = (torch.arange(end - first) % CHUNK_SIZE == 0)[:, None]
    g = sums - torch.where(is_start, 0.0, sums.roll(1, 0))
    group = v.shape[2] // k.shape[2]
    wide = [x.repeat_interleave(group, 2)[0, first:end, head].double() for x in (q, k)]
    tokens = Tokens(*wide, *(x[0, first:end, head].double() for x in (v,)), g, b[0, first:end, head].double())
    return run(tokens, [end - first], scale, state)


def counted(g, cu_seqlens, mask, back):
    """Chunks of each fragment until its gates have forgotten, and whether they never do."""
    counts = torch.zeros(len(mask), g.shape[2], dtype=torch.int32)
    whole = torch.ones(len(mask), g.shape[2], dtype=torch.bool)
    for i, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        if mask[i]:
            continue
        number = -(-(end - start) // CHUNK_SIZE)
        rows = [min(start + (n + 1) * CHUNK_SIZE, end) - 1 if back else end - n * CHUNK_SIZE - 1 for n in range(number)]
        sums = g[0, rows].cumsum(0) < THRESHOLD
        counts[i] = torch.where(sums.any(0), sums.int().argmax(0) + 1, number)
        whole[i] = ~sums.any(0)
    return counts, whole


def get_warmup_chunks(g, cu_seqlens, ht_mask, chunk_size):
    return counted(g, cu_seqlens, ht_mask, back=False)


def get_warmup_chunks_bidi(g, cu_seqlens, ht_mask_fwd, ht_mask_bwd, chunk_size):
    there, whole = counted(g, cu_seqlens, ht_mask_fwd, back=False)
    back, whole_back = counted(g, cu_seqlens, ht_mask_bwd, back=True)
    return torch.maximum(there, back), back, whole, whole_back


def fused_gdr_h(
    k, v, a, g, b, states=None, output_final_state=True, output_h=True, cu_seqlens=None, num_warmup_chunks=None
):
    """Maps; without them the states that fragments begin with, for ``fused_gdr_bwd``."""
    if num_warmup_chunks is None:
        return states, None, None
    ends = torch.zeros(len(cu_seqlens) - 1, v.shape[2], k.shape[3], v.shape[3], dtype=torch.float64)
    matrices, one = ends.new_zeros(*ends.shape[:3], k.shape[3]), torch.eye(k.shape[3], dtype=torch.float64)
    nothing = k.new_zeros(*v.shape[:3], k.shape[3])
    for i, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        for head in range(v.shape[2]):
            count, only = int(num_warmup_chunks[i, head]), slice(head, head + 1)
            first = max(start, end - count * CHUNK_SIZE)
            if count:
                ends[i, head] = rule(k, k, v, g, b, 1.0, first, end, None, only)[1][0, 0]
            if 0 < end - start <= count * CHUNK_SIZE:
                state = rule(k, k, nothing, g, b, 1.0, start, end, one[None, None], only)[1]
                matrices[i, head] = state[0, 0]
    return None, ends, matrices


def folded(states, maps, matrices, is_whole, first, reverse):
    """What comes to each fragment, and what leaves each sequence."""
    before, left = torch.zeros_like(maps), maps.new_zeros(len(first) - 1, *maps.shape[1:])
    for i, (start, end) in enumerate(itertools.pairwise(first.tolist())):
        state = maps.new_zeros(maps.shape[1:]) if states is None else states[i].double()
        for f in range(end - 1, start - 1, -1) if reverse else range(start, end):
            before[f] = state
            matrix = matrices[f].mT if reverse else matrices[f]
            state = maps[f] + torch.where(is_whole[f, :, None, None], matrix @ state, 0.0)
        left[i] = state
    return before, left


def correct_initial_states(states, maps, matrices, is_whole, first):
    return folded(states, maps, matrices, is_whole, first, False)[0]


def correct_terminal_states(states, maps, matrices, is_whole, first):
    return folded(states, maps, matrices, is_whole, first, True)[0]


def aggregate_card_state(maps, matrices, is_whole, first, reverse=False, transpose_m=False, compute_m=True):
    _, left = folded(None, maps, matrices, is_whole, first, reverse)
    if not compute_m:
        return left, None
    one = torch.eye(matrices.shape[-1], dtype=torch.float64).expand(len(first) - 1, *matrices.shape[1:])
    return left, folded(one, torch.zeros_like(matrices), matrices, is_whole, first, reverse)[1]


def fused_gdr_fwd(q, k, v, a, g, b, scale, states, cu_seqlens=None, **_):
    outs = [
        rule(q, k, v, g, b, scale, first, end, None if states is None else states[i : i + 1].double())[0]
        for i, (first, end) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
    ]
    return torch.cat(outs).to(v.dtype)[None], None, None


def fused_gdr_dh(q, k, a, g, b, do, dht, scale=None, cu_seqlens=None, num_warmup_chunks=None, **_):
    grads = torch.zeros(len(cu_seqlens) - 1, do.shape[2], k.shape[3], do.shape[3], dtype=torch.float64)
    for i, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        for head in range(do.shape[2]):
            last, only = min(end, start + int(num_warmup_chunks[i, head]) * CHUNK_SIZE), slice(head, head + 1)
            if last > start:
                with torch.enable_grad():
                    state = grads.new_zeros(1, 1, *grads.shape[2:]).requires_grad_()
                    out, _ = rule(q, k, 0 * do, g, b, scale, start, last, state, only)
                grads[i, head] = torch.autograd.grad(out, state, do[0, start:last, only].double())[0][0, 0]
    return None, grads


def fused_gdr_bwd(q, k, v, a, g, b, do, dends, before, scale, cu_seqlens):
    """Gradients of q and k for each value head, and of g, not of its sums."""
    group = v.shape[2] // k.shape[2]
    wide = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2), v, b
    leaves = [x.detach().double().requires_grad_() for x in wide]
    raw = torch.cat([g[:, c].diff(dim=1, prepend=g.new_zeros(1, 1, g.shape[2])) for c in chunks_of(cu_seqlens)], 1)
    leaves.append(raw.detach().double().requires_grad_())
    pairs, outs, ends = list(itertools.pairwise(cu_seqlens.tolist())), [], []
    with torch.enable_grad():
        for i, (first, end) in enumerate(pairs):
            q_, k_, v_, b_, g_ = (x[0, first:end] for x in leaves)
            state = None if before is None else before[i : i + 1].double()
            out, last = run(Tokens(q_, k_, v_, g_, b_), [end - first], scale, state)
            outs.append(out)
            ends.append(last)
    results = [torch.cat(outs)], [do[0].double()]
    if dends is not None:
        results = [*results[0], torch.cat(ends)], [*results[1], dends.double()]
    dq, dk, dv, db, dg = torch.autograd.grad(results[0], leaves, results[1])
    return dq, dk, dv, dg, db, None


def group_reduce_vector(grad, heads):
    return grad.unflatten(2, (heads, -1)).sum(3)
