"""Sizes of published models, for a run whose config.json is not there yet."""

from dataclasses import replace
from pathlib import Path

from torchtitan_magi.models.model_config import Experts, LinearAttention, ModelConfig, Rope

LLAMA_8B = ModelConfig("llama3", 4096, 32, 32, 8, 128, 14336, 128256, 1e-5, Rope(5e5))
QWEN_8B = ModelConfig("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, 1e-6, Rope(1e6))
GPT_OSS_20B = ModelConfig("gpt_oss", 2880, 24, 64, 8, 64, 0, 201088, 1e-5, Rope(1.5e5), windows=(128, 0) * 12)


def _qwen3_5(dim: int, num_layers: int, heads: tuple[int, int], hidden_dim: int, heads_v: int) -> ModelConfig:
    """A Qwen3.5 model, in which three of every four layers have linear attention."""
    layers = tuple(number for number in range(num_layers) if number % 4 != 3)
    linear = LinearAttention(layers, 16, heads_v, 128, 128, 4)
    return ModelConfig(
        "qwen3_5", dim, num_layers, *heads, 256, hidden_dim, 248320, 1e-6, Rope(1e7), linear=linear
    )  # fmt: skip


QWEN3_5_27B = _qwen3_5(5120, 64, (24, 4), 17408, 48)
QWEN3_5_35B = replace(_qwen3_5(2048, 40, (16, 2), 0, 32), experts=Experts(256, 8, 512, True, num_shared=1))
# By how the name of their folder begins; positions are not those of the published files.
SIZES = {
    "Llama-3.1-8B": LLAMA_8B,
    "Llama-3.1-70B": replace(LLAMA_8B, dim=8192, num_layers=80, num_heads_q=64, hidden_dim=28672),
    "Qwen3-8B": QWEN_8B,
    "Qwen3-32B": replace(QWEN_8B, dim=5120, num_layers=64, num_heads_q=64, hidden_dim=25600),
    "Qwen3-30B-A3B": replace(
        QWEN_8B, dim=2048, num_layers=48, num_heads_kv=4, hidden_dim=6144, experts=Experts(128, 8, 768, True)
    ),
    "Qwen3.5-9B": _qwen3_5(4096, 32, (16, 4), 12288, 32),
    **dict.fromkeys(("Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.8-27B"), QWEN3_5_27B),
    **dict.fromkeys(("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"), QWEN3_5_35B),
    "gpt-oss-20b": replace(GPT_OSS_20B, experts=Experts(32, 4, 2880, True)),
}


def published_sizes(folder: str | Path) -> ModelConfig | None:
    """The sizes of the published model that a folder is named after; None for another name."""
    name = Path(folder).name.lower()
    return next((model for start, model in SIZES.items() if name.startswith(start.lower())), None)
