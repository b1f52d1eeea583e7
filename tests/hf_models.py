"""Tiny Hugging Face models with random weights, written by transformers: what a user would download."""

import json
import shutil
from pathlib import Path
from typing import Any

from training import corpus, new_folder

KINDS = ("llama", "qwen3", "qwen3_moe")


def make_hf_folder(
    kind: str,
    *,
    rope: dict[str, Any] | None = None,
    tied: bool = False,
    shards: int = 1,
    seed: int = 0,
    folder: str | Path | None = None,
    **fields: Any,
) -> Path:
    """A folder with config.json, generation_config.json, float32 safetensors and the corpus' tokenizer.

    The model has 2 layers of width 64, 8 query and 2 K/V heads, in qwen3_moe 4 experts of which each token takes 2.

    Args:
        kind: one of KINDS.
        rope: rope_parameters; None: "default" with the model's usual theta.
        shards: number of safetensors files at least, with an index if more than one.
        fields: further fields of the configuration, or others than these.
    """
    import torch
    import transformers

    folder = Path(folder or new_folder())
    thetas = {"llama": 500_000.0, "qwen3": 1_000_000.0, "qwen3_moe": 1_000_000.0}
    tokenizer = json.loads((corpus() / "tokenizer" / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer["model"]["vocab"]),
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": thetas[kind], **(rope or {})},
        "tie_word_embeddings": tied,
        "bos_token_id": ids["<|begin_of_text|>"],
        "eos_token_id": ids["<|end_of_text|>"],
        "initializer_range": 0.1,  # with the usual 0.02 attention is so even that positions hardly show in the logits
    }
    if kind == "llama":
        sizes["rms_norm_eps"] = 1e-5
    else:
        sizes["head_dim"] = 16
    if kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
        sizes.update(experts)
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **fields})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=size if shards == 1 else size // shards)
    for path in (corpus() / "tokenizer").iterdir():
        shutil.copy(path, folder)
    return folder
