"""The gated delta rule and the short convolution of whole documents, from their definitions, and any placements of
documents and trees."""

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from support.loopback import Loopback

import torchtitan_magi as magi
from torchtitan_magi.masks.builders import tree_causal, varlen_causal
from torchtitan_magi.planning.plan import plan_ownership


def recurrence(q, k, v, g, beta, cu_seqlens, scale):
    """out [T, H, V] of documents one after another; zeros for tokens behind them."""
    group = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    out = [0 * v[:0]]
    for first, end in itertools.pairwise(cu_seqlens):
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        for t in range(first, end):
            state = g[t].exp()[:, None, None] * state
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + beta[t][:, None, None] * k[t][:, :, None] * error[:, None]
            out.append(scale * torch.einsum("hkv,hk->hv", state, q[t])[None])
    return F.pad(torch.cat(out), (0, 0, 0, 0, 0, len(v) - cu_seqlens[-1]))


def convolution(x, weight, cu_seqlens):
    """out [T, C] before any activation: torch's own convolution of each document by itself."""
    out = [0 * x[:0]]
    for first, end in itertools.pairwise(cu_seqlens):
        if first < end:
            padded = F.pad(x[first:end].T[None], (weight.shape[1] - 1, 0))
            out.append(F.conv1d(padded, weight[:, None], groups=len(weight))[0].T)
    return F.pad(torch.cat(out), (0, 0, 0, len(x) - cu_seqlens[-1]))


def on_trees(layer, inputs, nodes):
    """out [T, ...] of a layer of flat documents, ``layer(*inputs, cu_seqlens)``; each node's of the flat way from its
    root. The last input has the shape of out.

    Args:
        nodes: from ``flat_ways``.
    """
    out = torch.zeros_like(inputs[-1])
    for own, way in nodes:
        rows = layer(*(x[way] for x in inputs), [0, len(way)])
        out = out.index_copy(0, torch.tensor(own, dtype=torch.int64), rows[len(way) - len(own) :])
    return out


def flat_ways(lengths, parents, starts=None):
    """The tokens of each node of trees, and the tokens from its root up to its end."""
    starts = np.cumsum([0, *lengths[:-1]]) if starts is None else starts
    ways = []
    for length, parent, start in zip(lengths, parents, starts, strict=True):
        own = list(range(start, start + length))
        ways.append((own, [*ways[parent][1], *own] if parent >= 0 else own))
    return ways


def layer_inputs(tokens, heads=(2, 4), dims=(5, 3), seed=0, dtype=torch.float64):
    """q, k, v, g, beta, dout of so many tokens; keys of length 1."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(tokens, *shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(drawn(heads[0], dims[0]), dim=-1) for _ in range(2))
    v, dout = drawn(heads[1], dims[1]), drawn(heads[1], dims[1])
    g, beta = -F.softplus(drawn(heads[1])), drawn(heads[1]).sigmoid()
    return [x.to(dtype) for x in (q, k, v, g, beta, dout)]


def with_gradients(function, inputs, dout):
    """What a function returns for inputs, and their gradients; zeros of those that it does not depend on."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True)]


def conv_of_ranks(plan, mesh, x, weight, dout, **options):
    """out and dx of the whole pack, and this rank's dweight."""
    x, dout = (magi.dispatch(y, plan, mesh) for y in (x, dout))
    *found, dweight = with_gradients(lambda x, w: magi.cp_causal_conv1d(x, w, plan, mesh, **options), (x, weight), dout)
    return [*(magi.undispatch(y, plan, mesh) for y in found), dweight]


def of_all_ranks(plan, function):
    """What the function returns on each rank, called with its mesh; with None where there is one rank."""
    return [function(None)] if plan.cp_size == 1 else Loopback(plan.cp_size).run(function)


@st.composite
def placements(draw, most_tokens=40):
    """Documents, and a plan that gives each of 1 to 8 ranks equally many of their tokens: in stretches of any lengths,
    down to one token, in any order."""
    cp_size = draw(st.integers(1, 8))
    per_rank = draw(st.integers(1, max(1, most_tokens // cp_size)))
    ends = draw(st.lists(st.integers(0, cp_size * per_rank), max_size=4))
    cu_seqlens = [0, *sorted(ends)]
    return cu_seqlens, plan_of(cu_seqlens, draw(owners(cp_size, per_rank)))


@st.composite
def tree_placements(draw):
    """Trees up to 12 deep, as ``flat_ways``, and a plan of their mask, as in ``placements``."""
    cp_size, lengths = draw(st.integers(1, 8)), draw(st.lists(st.integers(0, 6), min_size=1, max_size=12))
    parents = [draw(st.integers(max(-1, i - 3), i - 1)) for i in range(len(lengths))]
    gaps = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=len(lengths), max_size=len(lengths)))
    starts = np.cumsum(gaps) + np.cumsum([0, *lengths[:-1]])
    per_rank = max(1, -(-(sum(lengths) + sum(gaps)) // cp_size))
    mask = tree_causal(lengths, parents, starts)
    return flat_ways(lengths, parents, starts), plan_of_mask(mask, draw(owners(cp_size, per_rank)))


@st.composite
def owners(draw, cp_size, per_rank):
    """The rank of each token, in stretches."""
    stretch = draw(st.sampled_from([1, 2, 3, 5, per_rank]))
    owner = np.repeat(np.arange(cp_size), per_rank)
    pieces = [owner[i : i + stretch] for i in range(0, len(owner), stretch)]
    return np.concatenate(draw(st.permutations(pieces)))


def plan_of(cu_seqlens, owner):
    """The plan of causal documents in which rank owner[t] owns token t."""
    return plan_of_mask(varlen_causal(cu_seqlens), owner)


def plan_of_mask(mask, owner):
    """The plan of a mask in which rank owner[t] owns token t."""
    owner = np.asarray(owner)
    tokens = [np.flatnonzero(owner == rank) for rank in range(owner.max() + 1)]
    owned = tuple(np.stack([t, t + 1], 1) for t in tokens)
    return plan_ownership(mask.canonical(), len(owner), owned, 0)
