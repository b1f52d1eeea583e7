"""Tiny Hugging Face models with random weights, written by transformers: what a user would download."""

import json
import shutil
from pathlib import Path
from typing import Any

from support.runs import corpus, new_folder

TITAN_NAMES = {
    "llama": "llama3",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "kimi_k25": "kimi_k2_7",
    "qwen3_5_moe": "qwen3_5",
}  # in model.name, where another
KINDS = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3")
TEXT_PARTS = {  # kinds that see pictures, too
    "muse_glimmer": "muse_glimmer_text",
    "kimi_k25": "deepseek_v3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "original_max_position_embeddings": 64}
OWN: dict[str, dict[str, Any]] = {  # fields of some kinds
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "sliding_window": 24,
        "rope_parameters": YARN | {"rope_theta": 150_000.0, "truncate": False},
    },
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "rope_parameters": YARN | {"rope_theta": 10_000.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "num_mtp_layers": 0,
    },
    "qwen3_5_text": {
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,  # the smaller, the more often norms of what is read enlarge rounding
        "linear_value_head_dim": 48,
    },
    "muse_glimmer_text": {
        "sliding_window": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "qk_scale_factor": 1.7,
        "output_multiplier": 0.3,
        "final_logit_softcapping": 2.5,  # of logits of about 4
        "post_norm_eps": 1e-3,
    },
}
OWN["qwen3_5_moe_text"] = OWN["qwen3_5_text"] | OWN["qwen3_moe"] | {"shared_expert_intermediate_size": 48}
SEES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 2}
OF_PICTURES: dict[str, dict[str, Any]] = {  # what such a kind has beside its text part
    "muse_glimmer": {
        "vision_config": SEES | {"pos_emb_height": 4, "pos_emb_width": 4},
        "out_hidden_size": 128,
        "projector_hidden_size": 32,
    },
    "kimi_k25": {
        "vision_config": SEES | {"pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2},
        "projection_hidden_size": 32,
        "tie_word_embeddings": False,
    },
    "qwen3_5": {
        "vision_config": {
            "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
            "num_position_embeddings": 16, "patch_size": 2,
        }
    },
}  # fmt: skip
OF_PICTURES["qwen3_5_moe"] = OF_PICTURES["qwen3_5"]


def make_hf_folder(
    kind: str,
    *,
    rope: dict[str, Any] | None = None,
    tied: bool = False,
    shards: int = 1,
    seed: int = 0,
    layout: str = "published",
    folder: str | Path | None = None,
    **fields: Any,
) -> Path:
    """A folder with config.json, generation_config.json, float32 safetensors and the corpus' tokenizer.

    The model has 2 layers of width 64, 8 query and 2 K/V heads, and where there are experts 4 or 8 of them, of which
    each token takes 2. No parameter is 0 in all its elements.

    Args:
        kind: one of KINDS, or of TEXT_PARTS.
        rope: rope_parameters; None: "default" with the model's usual theta.
        shards: number of safetensors files at least, with an index if more than one.
        layout: "published"; "fused": the experts of a layer in one tensor, as transformers has them in memory; "base":
            without the output layer and the prefix of names.
        fields: further fields of the configuration, or others than these.
    """
    import torch
    import transformers

    folder = Path(folder or new_folder())
    theta = 500_000.0 if kind == "llama" else 1_000_000.0
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
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, **(rope or {})},
        "tie_word_embeddings": tied,
        "bos_token_id": ids["<|begin_of_text|>"],
        "eos_token_id": ids["<|end_of_text|>"],
        "initializer_range": 0.1,  # with the usual 0.02 attention is so even that positions hardly show in the logits
    }
    text = TEXT_PARTS.get(kind, kind)
    if kind == "llama":
        sizes["rms_norm_eps"] = 1e-5
    elif text != "deepseek_v3":
        sizes["head_dim"] = 16
    sizes.update({**OWN.get(text, {}), **fields})
    if kind in TEXT_PARTS:
        sizes = {"tie_word_embeddings": tied, **OF_PICTURES[kind], "text_config": {"model_type": text, **sizes}}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(seed)
    automatic = transformers.AutoModelForImageTextToText if kind in TEXT_PARTS else transformers.AutoModelForCausalLM
    model = automatic.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(x for name, x in model.named_buffers() if name.endswith("_bias"))]:
            if not tensor.any():  # biases
                tensor.normal_(std=sizes.get("initializer_range", 0.1))
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    saved = model.model if layout == "base" else model
    how = {"max_shard_size": size if shards == 1 else size // shards, "save_original_format": layout != "fused"}
    saved.save_pretrained(folder, **how)
    for path in (corpus() / "tokenizer").iterdir():
        shutil.copy(path, folder)
    return folder


def load_hf(folder: str | Path) -> Any:
    """The model of a folder, as transformers loads it."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    sees = config.model_type in TEXT_PARTS
    automatic = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    return automatic.from_pretrained(folder)


def hf_arguments(folder: str | Path, kind: str = "llama") -> list[str]:
    """Arguments of a run for a folder's model of this kind."""
    name = TITAN_NAMES.get(kind, kind)
    return ["--model.name", name, "--model.flavor", "hf", "--model.hf_assets_path", str(folder)]


def tensors_of(folder: Path) -> dict[str, Any]:
    """All tensors of a folder's safetensors by name."""
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def edit(folder: Path, **fields: Any) -> None:
    """Sets fields of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
