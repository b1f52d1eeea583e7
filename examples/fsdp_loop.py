#!/usr/bin/env python3
"""A plain training loop with FSDP2 and context parallelism over the same ranks, without torchtitan.

    torchrun --nproc-per-node 2 examples/fsdp_loop.py [--steps 36]     # on the CPU, or with --device cuda on GPUs

Documents of mixed lengths are packed end to end. Each token is to name the first token of its document, which attention
alone can see: the loss falls from ln 64 to nothing, and is the same with any number of ranks.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchtitan_magi import AttnPlan, cp_varlen_attn, dispatch, make_plan, varlen_causal

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS = 64, 256, 4, 2, 2
IGNORE = -100


def documents(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and labels [T], and the lengths of the documents: the same on every rank."""
    random = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, 100, (16,), generator=random)
    tokens = torch.randint(VOCABULARY, (int(lengths.sum()),), generator=random)
    first = lengths.cumsum(0) - lengths
    labels = tokens[first].repeat_interleave(lengths)
    labels[first] = IGNORE  # a document's first token is no riddle
    return tokens, labels, lengths


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dim = WIDTH // HEADS
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * dim, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, plan: AttnPlan, cp: DeviceMesh) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, WIDTH // HEADS)).split([HEADS, KV_HEADS, KV_HEADS], 1)
        x = x + self.out(cp_varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), plan, cp).flatten(1))
        return x + self.ffn(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, plan: AttnPlan, cp: DeviceMesh) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, plan, cp)  # all layers share the plan, and what it has put on the device
        return self.head(x)


def train(steps: int, device: str) -> list[float]:
    cp = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Model().to(device, dtype)
    for block in model.blocks:
        fully_shard(block, mesh=cp)
    fully_shard(model, mesh=cp)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        tokens, labels, lengths = documents(step)
        positions = torch.cat([torch.arange(int(length)) for length in lengths])  # from 0 in each document
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
        plan = make_plan(varlen_causal(cu_seqlens), len(tokens), cp.size())
        # Each rank's tokens. Shift labels before this, where that is to be done: a neighbour may be on another rank.
        mine = [dispatch(x.to(device), plan, cp, pad) for x, pad in ((tokens, 0), (labels, IGNORE), (positions, 0))]
        logits = model(mine[0], mine[2], plan, cp)
        # FSDP takes the mean of the ranks' gradients, and the loss is a mean over the labels of all ranks.
        total = F.cross_entropy(logits.float(), mine[1], ignore_index=IGNORE, reduction="sum")
        loss = total / int((labels != IGNORE).sum())
        (loss * cp.size()).backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach()
        dist.all_reduce(shown)
        losses.append(float(shown))
        if dist.get_rank() == 0 and (step % 10 == 0 or step == steps - 1):
            print(f"step {step:3}  loss {losses[-1]:.4f}  {len(tokens):,} tokens on {cp.size()} ranks", flush=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    train(arguments.steps, arguments.device)
    dist.destroy_process_group()
