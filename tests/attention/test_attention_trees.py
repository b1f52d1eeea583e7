"""Attention over trees on any number of ranks is that of each way from a root to a node by itself, in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loopback import Loopback
from torch.nn.functional import scaled_dot_product_attention

import torchtitan_magi as magi

HEADS, DIM = (4, 2), 8


@st.composite
def trees(draw):
    """Lengths and parents of nodes, up to 12 deep, and the first token of each: nodes lie in any order behind their
    parents."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=14))
    chain = draw(st.booleans())  # deep ones
    parents = [i - 1 if chain and i < 12 else draw(st.integers(-1, i - 1)) for i in range(len(lengths))]
    gaps = draw(st.lists(st.sampled_from([0, 0, 3]), min_size=len(lengths), max_size=len(lengths)))
    starts, end = [], 0
    for length, gap in zip(lengths, gaps, strict=True):
        starts.append(end + gap)
        end += gap + length
    return lengths, parents, starts


def way_to(node, lengths, parents, starts):
    """The tokens from the root to the end of a node."""
    way = []
    while node >= 0:
        way = [*range(starts[node], starts[node] + lengths[node]), *way]
        node = parents[node]
    return way


def each_by_itself(q, k, v, tree, window):
    """out [T, Hq, D]: 0 outside of nodes."""
    out = 0 * q
    for node, length in enumerate(tree[0]):
        if not length:
            continue
        way = way_to(node, *tree)
        distance = torch.arange(len(way))[:, None] - torch.arange(len(way))
        mask = (distance >= 0) & (distance < (window or len(way)))
        x, y, z = (tensor[way].transpose(0, 1)[None] for tensor in (q, k, v))
        found = scaled_dot_product_attention(x, y, z, mask, enable_gqa=True)[0].transpose(0, 1)
        out = out.index_copy(0, torch.tensor(way[-length:]), found[-length:])
    return out


@given(trees(), st.integers(1, 8), st.sampled_from([None, None, 5, 70]), st.integers(0, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_a_tree_is_the_ways_through_it(tree, cp_size, window, stages, seed):
    lengths, _, starts = tree
    total = -(-max(1, starts[-1] + lengths[-1]) // cp_size) * cp_size
    plan = magi.make_plan(magi.tree_causal(*tree, window), total, cp_size, stages)
    generator = torch.Generator().manual_seed(seed)
    q, dout = (torch.randn(total, HEADS[0], DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(total, HEADS[1], DIM, generator=generator, dtype=torch.float64) for _ in range(2))

    def run(mesh):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = magi.cp_varlen_attn(*(magi.dispatch(x, plan, mesh) for x in leaves), plan, mesh)
        out = magi.undispatch(out, plan, mesh)
        return out.detach(), *torch.autograd.grad((out * dout).sum(), leaves)

    results = [run(None)] if cp_size == 1 else Loopback(cp_size).run(run)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = each_by_itself(*leaves, tree, window)
    wanted = out.detach(), *torch.autograd.grad((out * dout).sum(), leaves, allow_unused=True)
    for result in results:
        for ours, want in zip(result, wanted, strict=True):
            torch.testing.assert_close(ours, torch.zeros_like(ours) if want is None else want, rtol=1e-10, atol=1e-11)
