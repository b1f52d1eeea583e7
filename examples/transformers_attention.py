#!/usr/bin/env python3
"""Our attention inside any decoder model of transformers, over several ranks.

    torchrun --nproc-per-node 2 examples/transformers_attention.py     # on the CPU

It registers one function. Then a model that was made with attn_implementation="magi" takes packed documents of any
lengths, each rank its share of the tokens, and gives the logits that it gives for each document alone. The models here
are tiny and have random weights; `AutoModelForCausalLM.from_pretrained(..., attn_implementation="magi")` is the same.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from torchtitan_magi import cp_varlen_attn, dispatch, make_plan, undispatch, varlen_causal


def magi_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, magi: Any, **options: Any
) -> tuple[Tensor, None]:
    """query, key, value: [1, heads, T, head_dim], as transformers has them. magi: the plan and the mesh."""
    plan, mesh = magi
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out = cp_varlen_attn(q, k, v, plan, mesh, softmax_scale=options["scaling"])
    return out[None], None


AttentionInterface.register("magi", magi_attention)
AttentionMaskInterface.register("magi", lambda *_, **__: None)  # the plan knows the mask


def tiny(kind: str, attention: str) -> nn.Module:
    """A model with random weights, the same on every rank and with any attention."""
    config = AutoConfig.for_model(
        kind, vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, pad_token_id=0, sliding_window=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def compare(kind: str, lengths: list[int]) -> tuple[float, float]:
    """Largest differences of loss and of gradients, relative, from the same model on each document alone."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 128, (sum(lengths),), generator=random)
    parts = tokens.split(lengths)
    labels = torch.cat([F.pad(part[1:], (0, 1), value=-100) for part in parts])
    positions = torch.cat([torch.arange(length) for length in lengths])

    alone = tiny(kind, "sdpa")
    logits = torch.cat([alone(part[None]).logits[0] for part in parts])
    expected = F.cross_entropy(logits, labels)
    expected.backward()

    # From here on: what a training step does.
    model = tiny(kind, "magi")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    plan = make_plan(varlen_causal(cu_seqlens), len(tokens), mesh.size())
    ids, places = (dispatch(x, plan, mesh)[None] for x in (tokens, positions))
    local = model(ids, position_ids=places, use_cache=False, magi=(plan, mesh)).logits[0]
    mine = dispatch(labels, plan, mesh, pad_value=-100)
    loss = F.cross_entropy(local, mine, ignore_index=-100, reduction="sum") / (labels != -100).sum()
    loss.backward()  # this rank's part; FSDP or DDP would add the parts up
    for x in (loss.data, *(p.grad for p in model.parameters())):
        dist.all_reduce(x)

    torch.testing.assert_close(undispatch(local.detach(), plan, mesh), logits.detach(), rtol=1e-4, atol=1e-4)
    grads = zip(model.parameters(), alone.parameters(), strict=True)
    worst = max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in grads)
    return abs(loss.item() / expected.item() - 1), worst


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for kind in ("llama", "qwen3", "mistral", "granite"):
        loss, grads = compare(kind, [37, 5, 120, 1, 64])
        if dist.get_rank() == 0:
            ranks = dist.get_world_size()
            print(f"{kind:8} on {ranks} ranks: loss differs by {loss:.0e}, gradients by {grads:.0e}", flush=True)
        assert max(loss, grads) < 1e-5
    dist.destroy_process_group()
