"""What blocks of Qwen3.5 in torchtitan 0.3 save, and how many operations a token counts for, is what sizing says."""

from dataclasses import replace

import pytest
import torch
from support.runs import call
from support.saved_bytes import bytes_saved

from torchtitan_magi.models.model_config import Experts, LinearAttention, ModelConfig, Rope
from torchtitan_magi.models.shapes import block_of
from torchtitan_magi.sizing.activations import kept_activations
from torchtitan_magi.sizing.run_setup import Setup

TOKENS, DIM = 256, 128
LINEAR = LinearAttention((0, 1, 2), 4, 8, 16, 16, 4)
DENSE = ModelConfig("qwen3_5", DIM, 4, 8, 2, 32, 448, 512, 1e-6, Rope(1e4), linear=LINEAR, max_positions=TOKENS)
MOE = replace(DENSE, hidden_dim=0, experts=Experts(8, 2, 48, True, num_shared=1))
CASES = [  # model, number of the block, checkpointing, whether it is compiled
    (DENSE, 0, "none", False),
    (DENSE, 0, "none", True),
    (DENSE, 0, "selective", True),
    (DENSE, 0, "full", True),
    (DENSE, 3, "none", False),
    (DENSE, 3, "none", True),
    (DENSE, 3, "selective", True),
    (MOE, 0, "none", False),
    (MOE, 0, "selective", True),
    (MOE, 3, "none", True),
    (MOE, 3, "selective", True),
]


def saved_by_blocks():
    """Bytes that each block saves for its backward beside its parameters."""
    from torch import nn
    from torchtitan.distributed.activation_checkpoint import FullAC

    from torchtitan_magi import make_plan, varlen_causal
    from torchtitan_magi.attention.bound_plan import bind_plan
    from torchtitan_magi.attention.op import PlanHandle, attend
    from torchtitan_magi.backends.choose import choose_block_attn
    from torchtitan_magi.titan.v03.components import MagiSelectiveAC
    from torchtitan_magi.titan.v03.models import model_spec

    class Attention(nn.Module):
        def forward(self, q, k, v, attention_masks, scale, enable_gqa):
            out, _ = attend(*(x.flatten(0, 1) for x in (q, k, v)), attention_masks, scale)
            return out.unflatten(0, q.shape[:2])

    plan, cpu = make_plan(varlen_causal([0, TOKENS]), TOKENS, 1), torch.device("cpu")
    bound = bind_plan(plan, None, choose_block_attn("flex", cpu), 8, 2, cpu, head_dims=(32, 32))
    handle = PlanHandle(bound, recurs=True)
    positions = torch.arange(TOKENS)[None]
    x = torch.randn(1, TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)
    wrap = {"selective": MagiSelectiveAC, "full": FullAC}

    def saved(model, number, mode, compiled):
        block = model_spec("qwen3_5", "hf", model).model.build().bfloat16().layers[str(number)]
        if number == 3:
            block.attn.inner_attention = Attention()
        not_counted = [*block.parameters(), *block.buffers(), positions]
        if mode != "none":
            block = wrap[mode].Config().build()._wrap_block(block, base_fqn=f"layers.{number}")
        if compiled:
            block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
            block(x, handle, positions)  # compiles
        return bytes_saved(block, (x, handle, positions), not_counted)

    return [saved(*case) for case in CASES]


def test_blocks_save_for_the_backward_what_is_predicted():
    for (model, number, mode, compiled), theirs in zip(CASES, call(saved_by_blocks), strict=True):
        linear = None if number == 3 else replace(LINEAR, layers=(0,))
        setup = Setup(
            replace(model, num_layers=1, linear=linear), TOKENS, checkpointing=mode, compiled=compiled, gpu=False
        )
        assert kept_activations(setup) == pytest.approx(theirs, rel=0.07 if model is MOE else 0.02), (
            number,
            mode,
            compiled,
        )


def operations_for_a_token(config):
    """What torchtitan's Trainer counts, for a dense pack of so many tokens."""
    from torchtitan_magi.titan.v03.models import model_spec

    spec = model_spec("qwen3_5", "hf", config)
    with torch.device("meta"):
        model = spec.model.build()
    return spec.model.get_nparams_and_flops(model, TOKENS)[1]


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_operations_are_those_of_products_attention_and_recurrences(model):
    products = sum(block_of(model, number).used for number in range(4)) + model.vocab_size * DIM + DIM
    counted = call(operations_for_a_token, model) - model.attention_flops * TOKENS
    assert model.attention_flops == 6 * 1 * 8 * 2 * 32
    assert model.linear_flops == 3 * 3 * 6 * 8 * 16 * 16
    assert counted == 6 * products + model.linear_flops
