"""Attention layers of gpt-oss, Gemma 2 and DeepSeek V3, with transformers' attention and with our core: forward and
gradients of hidden states and weights."""

import importlib

import numpy as np
import pytest
import torch
from support.masks import dense_mask

from torchtitan_magi import flex_flash_attn, sliding_window, varlen_causal

pytest.importorskip("transformers", reason="its layers are what ours are compared with")

CU, TOKENS, WIDTH = [0, 40, 41, 100], 100, 64
COMMON = {"hidden_size": WIDTH, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 32}
MODELS = {  # its window applies to the first layer
    "gpt_oss": ("GptOss", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 9}),
    "gemma2": ("Gemma2", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "attn_logit_softcapping": 0.5,
        "query_pre_attn_scalar": 16, "sliding_window": 11,
    }),
    "deepseek_v3": ("DeepseekV3", {
        "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "q_lora_rank": 24, "kv_lora_rank": 16,
    }),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_an_attention_layer(model):
    from transformers import AttentionInterface

    name, fields = MODELS[model]
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    configuration = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    config = getattr(configuration, f"{name}Config")(**COMMON, **fields)
    window = fields.get("sliding_window")
    slices = sliding_window(CU, window) if window else varlen_causal(CU)

    def ours(module, q, k, v, mask, scaling, softcap=None, s_aux=None, **options):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out, _ = flex_flash_attn(q, k, v, slices, softmax_scale=scaling, softcap=softcap or 0.0, sinks=s_aux)
        return out[None], None

    AttentionInterface.register("ours", ours)
    torch.manual_seed(1)
    layer = getattr(modeling, f"{name}Attention")(config, layer_idx=0).eval()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    hidden = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    positions = torch.cat([torch.arange(n) for n in np.diff(CU).tolist()])[None]
    rotated = getattr(modeling, f"{name}RotaryEmbedding")(config)(hidden, positions)
    seen = torch.from_numpy(dense_mask(slices.table, TOKENS, TOKENS))
    mask = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~seen, torch.finfo(torch.float32).min)
    results = []
    for attention in ("eager", "ours"):
        config._attn_implementation = attention
        out, _ = layer(hidden, position_embeddings=rotated, attention_mask=mask)
        grads = torch.autograd.grad(out, [hidden, *layer.parameters()], torch.ones_like(out).cumsum(-1) / WIDTH)
        results.append([out.detach(), *grads])
    assert len(results[0]) > 5
    for theirs, our in zip(*results, strict=True):
        largest = theirs.abs().max().item()
        assert largest > 1e-3
        torch.testing.assert_close(our, theirs, rtol=1e-4, atol=1e-5 * largest)
