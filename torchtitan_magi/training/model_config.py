"""What a Hugging Face ``config.json`` says of its model, and how that differs from another model."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_magi.wording import quoted

# model_type in the file -> its class of language models, torchtitan's model.name
MODEL_TYPES = {
    "llama": ("LlamaForCausalLM", "llama3"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3"),
}
# Fields that would change the model -> the one value that this package's models have, what to do about another.
# Fields that are in no list here are ones that transformers' models of these types do not compute with.
PLAIN: dict[str, tuple[Any, str]] = {
    "attention_bias": (False, "use a checkpoint whose projections have no biases"),
    "mlp_bias": (False, "use a checkpoint whose projections have no biases"),
    "attention_dropout": (0, "set it to 0.0, as attention runs without dropout here"),
    "hidden_act": ("silu", 'use a checkpoint with "silu"'),
    "use_sliding_window": (False, "use a checkpoint with full attention in every layer"),
    "partial_rotary_factor": (1, "use a checkpoint that rotates whole heads"),
    "quantization_config": (None, "use the checkpoint from before its quantization"),
    "decoder_sparse_step": (1, "use a checkpoint with experts in every layer"),
    "mlp_only_layers": ([], "use a checkpoint with experts in every layer"),
    "output_router_logits": (False, "set it to false, as the loss has no term for the router here"),
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ROPE_FIELDS = {"rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"}
ROPE_FIELDS |= {"original_max_position_embeddings", "partial_rotary_factor"}
YARN_FIELDS = {"beta_fast", "beta_slow", "truncate", "attention_factor"}


@dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Args:
        theta: base of the wavelengths.
        type: "default", "linear" (every frequency divided by ``factor``), "llama3" (Llama 3.1's: only the low ones) or
            "yarn" (arXiv 2309.00071).
        factor: the divisor, for all but "default".
        low_freq_factor, high_freq_factor: where the low frequencies begin, for "llama3".
        original_max_positions: for which the model was first trained, for "llama3" and "yarn".
        beta_fast, beta_slow: rotations over these positions above which a frequency stays, and below which it is
            divided, for "yarn".
        truncate: whether to round these bounds to whole frequencies, for "yarn".
        attention_factor: of rotated queries and keys, for "yarn".
    """

    theta: float
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = True
    attention_factor: float = 1.0

    def scaling_to_hf(self) -> dict[str, Any] | None:
        """Field rope_scaling of a config.json."""
        if self.type == "default":
            return None
        fields = {"rope_type": self.type, "factor": self.factor}
        if self.type == "linear":
            return fields
        if self.type == "yarn":
            betas = {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
            fields |= betas | {"attention_factor": self.attention_factor}
            return fields | {"original_max_position_embeddings": self.original_max_positions}
        limits = {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        return fields | limits | {"original_max_position_embeddings": self.original_max_positions}


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in every layer.

    Args:
        num_experts: experts in a layer.
        top_k: experts that each token goes to.
        hidden_dim: width of each expert's feed-forward.
        norm_topk_prob: whether the probabilities of a token's experts are scaled to a sum of 1.
    """

    num_experts: int
    top_k: int
    hidden_dim: int
    norm_topk_prob: bool

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json that say this."""
        return {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.hidden_dim,
            "norm_topk_prob": self.norm_topk_prob,
        }


@dataclass(frozen=True)
class ModelConfig:
    """A decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU, in neutral terms.

    Args:
        model: torchtitan's name of the architecture, "llama3" or "qwen3" (normalized queries and keys).
        dim: width of the residual stream.
        hidden_dim: width of a dense feed-forward; no layer has one where there are experts.
        norm_eps: epsilon of each RMSNorm.
        tied: whether the output layer is the embedding.
        experts: None for a dense model.
        other: what else a flavor computes with, in words; no config.json can say it, so a file's model has none.
        max_positions: positions for which the model was trained; no part of the computation, so it is not compared.
    """

    model: str
    dim: int
    num_layers: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    tied: bool = False
    experts: Experts | None = None
    other: tuple[str, ...] = ()
    max_positions: int = field(default=0, compare=False)

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json of this model, in the spelling that transformers 4 and 5 read.

        Raises:
            ValueError: the model has what none can say; one line.
        """
        if self.other:
            raise ValueError(
                f"model.flavor has {', '.join(self.other)}, which no config.json can say; use a flavor of a published "
                "model, or set checkpoint.last_save_in_hf to false"
            )
        model_type = {"llama3": "llama", "qwen3": "qwen3" if self.experts is None else "qwen3_moe"}[self.model]
        fields = {
            "architectures": [MODEL_TYPES[model_type][0]],
            "model_type": model_type,
            "hidden_size": self.dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads_q,
            "num_key_value_heads": self.num_heads_kv,
            "head_dim": self.head_dim,
            "intermediate_size": self.hidden_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.scaling_to_hf(),
            "tie_word_embeddings": self.tied,
        }
        return fields if self.experts is None else fields | self.experts.to_hf()


def read_model_config(folder: str | Path) -> ModelConfig:
    """The model of ``folder/config.json``, in the spelling of transformers 4 or 5.

    Raises:
        ValueError: the file is missing or broken, or says something that no ``ModelConfig`` can; one line with the
            field, its value and the remedy.
    """
    file = _ConfigFile(Path(folder) / "config.json")
    model_type = file.get("model_type", str)
    if model_type not in MODEL_TYPES:
        raise file.refusal("model_type", model_type, f"use a checkpoint of {', '.join(MODEL_TYPES)}")
    architecture, model = MODEL_TYPES[model_type]
    file.check_plain(architecture)

    dim, num_heads_q = file.get("hidden_size", int), file.get("num_attention_heads", int)
    num_heads_kv = file.get("num_key_value_heads", int, num_heads_q if model_type == "llama" else None)
    head_dim = file.get("head_dim", int, 128 if model_type == "qwen3" else dim // num_heads_q)
    if num_heads_q % num_heads_kv:
        raise file.refusal("num_key_value_heads", num_heads_kv, f"use a divisor of num_attention_heads, {num_heads_q}")
    if head_dim % 2:
        raise file.refusal("head_dim", head_dim, "rotary positions need an even number")
    max_positions = file.get("max_position_embeddings", int)
    return ModelConfig(
        model=model,
        dim=dim,
        num_layers=file.get("num_hidden_layers", int),
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        hidden_dim=file.get("intermediate_size", int),
        vocab_size=file.get("vocab_size", int),
        norm_eps=file.get("rms_norm_eps", float),
        rope=_rope(file, max_positions),
        tied=file.get("tie_word_embeddings", bool, False),
        experts=_experts(file) if model_type == "qwen3_moe" else None,
        max_positions=max_positions,
    )


def differences(file: ModelConfig, flavor: ModelConfig) -> list[str]:
    """Each field in which a flavor differs from the file's model, with both values; empty if they are one model."""
    ours, theirs = dict(_flat(flavor)), dict(_flat(file))
    names = dict.fromkeys([*theirs, *ours])
    return [
        f"{name} {theirs.get(name)} in the file, {ours.get(name)} in the flavor"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


def _flat(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    for name, value in asdict(config).items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", inner_value) for inner, inner_value in value.items())
        elif name != "max_positions":
            yield name, value


def _rope(file: "_ConfigFile", max_positions: int) -> Rope:
    # as transformers reads them: the older spelling wins, and a theta among the parameters over one beside them
    key = "rope_scaling" if file.values.get("rope_scaling") else "rope_parameters"
    parameters = file.values.get(key) or {}
    if not isinstance(parameters, dict):
        raise file.refusal(key, parameters, "use a table of parameters, or null")
    rope = _ConfigFile(file.path, file.values | parameters)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_TYPES:
        remedy = f"use a checkpoint with one of {', '.join(ROPE_TYPES)}, or take out {key} if it was added by hand"
        raise file.refusal(f"{key}.rope_type", kind, remedy)
    for name, value in parameters.items():
        if name not in ROPE_FIELDS | (YARN_FIELDS if kind == "yarn" else set()) and value is not None:
            raise file.refusal(f"{key}.{name}", value, f"use a checkpoint with plain {kind!r} positions")
    rope.check_field("partial_rotary_factor")

    theta = rope.get("rope_theta", float, 10000.0)
    if kind == "default":
        return Rope(theta)
    factor = rope.get("factor", float)
    if kind == "linear":
        return Rope(theta, kind, factor)
    if kind == "yarn":
        return Rope(
            theta,
            kind,
            factor,
            original_max_positions=rope.get("original_max_position_embeddings", int, max_positions),
            beta_fast=rope.get("beta_fast", float, 32.0),
            beta_slow=rope.get("beta_slow", float, 1.0),
            truncate=rope.get("truncate", bool, True),
            attention_factor=rope.get("attention_factor", float, 0.1 * math.log(max(factor, 1.0)) + 1.0),
        )
    low, high = rope.get("low_freq_factor", float), rope.get("high_freq_factor", float)
    if low >= high:
        raise file.refusal(f"{key}.low_freq_factor", low, f"use less than high_freq_factor, {high}")
    original = rope.get("original_max_position_embeddings", int, max_positions)
    return Rope(theta, kind, factor, low, high, original)


def _experts(file: "_ConfigFile") -> Experts:
    name = "num_local_experts" if "num_local_experts" in file.values else "num_experts"  # transformers 5, 4
    num_experts, top_k = file.get(name, int), file.get("num_experts_per_tok", int)
    if top_k > num_experts:
        raise file.refusal("num_experts_per_tok", top_k, f"use at most {name}, {num_experts}")
    norm_topk_prob = file.get("norm_topk_prob", bool, False)
    return Experts(num_experts, top_k, file.get("moe_intermediate_size", int), norm_topk_prob)


class _ConfigFile:
    """The fields of a config.json, each checked as it is read; null is the same as missing."""

    def __init__(self, path: Path, values: Any = None) -> None:
        """values: read from the file unless given."""
        self.path = path
        if values is None:
            try:
                values = json.loads(path.read_text())
            except OSError as error:
                raise ValueError(f"{path}: {error.strerror}; put the config.json of the weights there") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path} is no JSON ({error}); download it again") from None
            if not isinstance(values, dict):
                raise ValueError(f"{path} holds no JSON object; download it again")
        self.values: dict[str, Any] = values

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of that type: positive and below 2**31 if int, positive and finite if float.

        Args:
            kind: int, float, bool or str.
            default: for a field that is missing; None: it must be there.
        """
        value: Any = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.path} has no {name}; use the config.json that came with the weights")
        if kind is float and type(value) is int and value.bit_length() <= 64:  # a float holds it
            value = float(value)
        usable = type(value) is kind
        if not usable or (kind in (int, float) and not 0 < value < (2**31 if kind is int else math.inf)):
            need = {
                int: "a positive integer below 2**31",
                float: "a positive number",
                bool: "true or false",
                str: "a string",
            }
            raise self.refusal(name, value, f"use {need[kind]}, as in the config.json that came with the weights")
        return value

    def check_plain(self, architecture: str) -> None:
        """Refuses what would make another model than the architecture's plain one."""
        for name in PLAIN:
            self.check_field(name)
        if (found := self.values.get("architectures") or [architecture]) != [architecture]:
            raise self.refusal("architectures", found, f"use a checkpoint of {architecture}")
        if "AutoModelForCausalLM" in str(found := self.values.get("auto_map")):
            raise self.refusal("auto_map", found, f"use a checkpoint of transformers' own {architecture}")
        found, num_layers = self.values.get("layer_types"), self.get("num_hidden_layers", int)
        full = isinstance(found, list) and len(found) == num_layers and all(kind == "full_attention" for kind in found)
        if found and not full:
            raise self.refusal("layer_types", found, "use a checkpoint with full attention in every layer")

    def check_field(self, name: str) -> None:
        """Refuses another value than that of ``PLAIN``."""
        plain, remedy = PLAIN[name]
        value = self.values.get(name)
        if value is not None and value != plain:
            raise self.refusal(name, value, remedy)

    def refusal(self, name: str, value: Any, remedy: str) -> ValueError:
        return ValueError(f"{self.path}: {name} is {quoted(value)}; {remedy}")
