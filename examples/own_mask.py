#!/usr/bin/env python3
"""A mask of one's own: one prompt, three answers, and a picture of what each token sees.

    python examples/own_mask.py

The prompt is read both ways, as an encoder would; each answer sees the prompt and its own earlier tokens, and no other
answer. So the prompt is computed once for all answers. Such a mask is a handful of slices. Each slice is
(q_start, q_end, k_start, k_end, type): a range of queries, a range of keys, and how the rows see the keys.

    0 FULL        every row sees every key of the slice
    1 CAUSAL      the last row sees all keys, the row before it one less, and so on
    2 INV_CAUSAL  the first row sees all keys, the next one not the first, and so on
    3 BI_CAUSAL   a band: both ends move
"""

import torch

from torchtitan_magi import AttnSlices, flex_flash_attn, make_plan

FULL, CAUSAL = 0, 1
PROMPT, ANSWERS = 10, (6, 3, 8)  # tokens
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
CP = 4


def prompt_and_answers(prompt: int, answers: tuple[int, ...]) -> tuple[AttnSlices, int]:
    """The mask, and the number of its tokens."""
    slices, start = [(0, prompt, 0, prompt, FULL)], prompt
    for length in answers:
        end = start + length
        slices.append((start, end, 0, prompt, FULL))  # an answer sees the prompt ...
        slices.append((start, end, start, end, CAUSAL))  # ... and its own tokens so far
        start = end
    return AttnSlices(slices), start


def as_matrix(prompt: int, answers: tuple[int, ...]) -> torch.Tensor:
    """The same mask written down pair by pair: bool [tokens, tokens], true where the row sees the column."""
    tokens = torch.arange(prompt + sum(answers))
    answer = torch.repeat_interleave(torch.arange(len(answers) + 1), torch.tensor([prompt, *answers]))  # 0: the prompt
    is_own_past = (answer[:, None] == answer) & (tokens[:, None] >= tokens)
    return (answer == 0) | is_own_past


def main() -> None:
    slices, total = prompt_and_answers(PROMPT, ANSWERS)
    matrix = as_matrix(PROMPT, ANSWERS)
    print(f"{len(slices)} slices, {slices.area} of {total**2} pairs\n")
    for row in matrix:
        print(" ".join("#" if sees else "." for sees in row))

    # The attention of the mask, forward and backward, beside the same with the matrix.
    torch.manual_seed(0)
    q, k, v = (torch.randn(total, heads, HEAD_DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, _ = flex_flash_attn(q, k, v, slices)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=matrix, enable_gqa=True
    ).transpose(0, 1)
    grads, expected_grads = (torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (out, expected))
    pairs = zip((out, *grads), (expected, *expected_grads), strict=True)
    error = max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)
    print(f"\nlargest difference from dense attention, relative: {error:.0e}")
    assert error < 1e-5

    # Over several GPUs: nothing else to do. Each rank receives the K/V rows its queries see, and no others.
    plan = make_plan(slices, total, CP)
    print(f"\non {CP} ranks, {plan.tokens_per_rank} tokens each:")
    for rank, share in enumerate(plan.ranks):
        own = set(share.tokens.tolist())
        needs = set(matrix[[t for t in own if t < total]].any(0).nonzero().flatten().tolist())
        print(f"rank {rank} has tokens {sorted(own)} and receives K/V of {len(needs - own):2} others")


if __name__ == "__main__":
    main()
