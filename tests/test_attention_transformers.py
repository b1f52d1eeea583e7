"""Attention of gpt-oss, Gemma 2 and DeepSeek V3 as transformers computes it, and by our core: forward and gradients."""

import importlib

import pytest
import torch
from masks import dense_mask

from torchtitan_magi import flex_flash_attn, sliding_window, varlen_causal

pytest.importorskip("transformers", reason="the attention of its models is what ours is compared with")

CU, TOKENS = [0, 40, 41, 100], 100
MODELS = {
    "gpt_oss": ((8, 2), (16, 16), {"sinks": True, "window": 9}),
    "gemma2": ((4, 2), (32, 32), {"softcap": 0.5}),
    "deepseek_v3": ((4, 4), (24, 16), {}),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_layers_attention_and_its_gradients(model):
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    (heads_q, heads_kv), (dim, value_dim), options = MODELS[model]
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    slices = sliding_window(CU, options["window"]) if "window" in options else varlen_causal(CU)
    q, k, v = random(TOKENS, heads_q, dim), random(TOKENS, heads_kv, dim), random(TOKENS, heads_kv, value_dim)
    dout, sinks, softcap = random(TOKENS, heads_q, value_dim).detach(), None, options.get("softcap", 0.0)
    if "sinks" in options:
        sinks = random(heads_q)
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = heads_q // heads_kv, sinks
    seen = torch.from_numpy(dense_mask(slices.table, TOKENS, TOKENS))
    mask = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~seen, torch.finfo(torch.float32).min)
    more = {"softcap": softcap} if softcap else {}
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    theirs, _ = modeling.eager_attention_forward(module.eval(), *heads_first, mask, scaling=0.3, dropout=0.0, **more)
    ours, _ = flex_flash_attn(q, k, v, slices, softmax_scale=0.3, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=1e-5)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    for got, want in zip(*(torch.autograd.grad(out, inputs, dout) for out in (ours, theirs[0])), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
