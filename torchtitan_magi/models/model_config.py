"""What a Hugging Face ``config.json`` says of its model, and how that differs from another model."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan_magi.models.config_file import ConfigFile
from torchtitan_magi.models.names import TEXT_PARTS
from torchtitan_magi.wording import one_line, quoted

# model_type in the file -> its class of language models, torchtitan's model.name
MODEL_TYPES = {
    "llama": ("LlamaForCausalLM", "llama3"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3"),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v3"),
    "muse_glimmer": ("MuseGlimmerForConditionalGeneration", "muse_glimmer"),
    "kimi_k25": ("KimiK25ForConditionalGeneration", "kimi_k2_7"),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5"),
}
TEXT_TYPES = {  # of text_config
    "muse_glimmer": ("muse_glimmer_text",),
    "kimi_k25": ("kimi_k2", "deepseek_v3"),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ROPE_FIELDS = {"rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"}
ORIGINAL = "original_max_position_embeddings"
ROPE_FIELDS |= {ORIGINAL, "partial_rotary_factor"}
BESIDE_ROPE = ("rope_theta", "partial_rotary_factor", ORIGINAL)  # may stand beside the table of the others
PICTURE_FIELDS = {"mrope_section", "mrope_interleaved"}  # of positions, alike for tokens of text
YARN_FIELDS = {"beta_fast", "beta_slow", "truncate", "attention_factor"}
MSCALE_FIELDS = {"mscale", "mscale_all_dim"}  # of DeepSeek's YaRN
FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # kinds of layers


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
        names: tuple[str, ...] = ("beta_fast", "beta_slow", "truncate", "attention_factor")
        if self.type == "llama3":
            names = ("low_freq_factor", "high_freq_factor")
        return fields | {name: getattr(self, name) for name in names} | {ORIGINAL: self.original_max_positions}


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in every layer, but in the first ``num_dense_layers``.

    Args:
        num_experts: experts in a layer.
        top_k: experts that each token goes to.
        hidden_dim: width of each expert's feed-forward.
        norm_topk_prob: whether the probabilities of a token's experts are scaled to a sum of 1.
        num_shared: experts of that width that every token goes to as well.
        num_groups, top_groups: the experts of a token are chosen from ``top_groups`` of so many equal groups.
        scale: factor of these probabilities, afterwards.
    """

    num_experts: int
    top_k: int
    hidden_dim: int
    norm_topk_prob: bool
    num_dense_layers: int = 0
    num_shared: int = 0
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434): queries, keys and values come from narrow vectors.

    Args:
        q_rank: width of the vector for queries; 0: they come from the residual stream.
        kv_rank: width of the vector for keys and values.
        rope_dim: of a query's or key's elements, the last ones, which are rotated; all heads have the same of keys.
        mscale: scores are times (0.1 * mscale * ln(rope.factor) + 1) ** 2 where positions are "yarn".
    """

    q_rank: int
    kv_rank: int
    rope_dim: int
    mscale: float


@dataclass(frozen=True)
class LinearAttention:
    """Layers of Gated DeltaNet (arXiv 2412.06464) in place of attention: a document passes a state from token to token.

    Args:
        layers: their numbers, ascending.
        num_heads_qk: heads of queries and keys.
        num_heads_v: heads of values; each has a state [head_dim, value_dim].
        head_dim: of queries and keys.
        value_dim: of values.
        conv_width: tokens that a token's short convolution takes in, with itself.
    """

    layers: tuple[int, ...]
    num_heads_qk: int
    num_heads_v: int
    head_dim: int
    value_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """What the short convolution goes over: all elements of queries, keys and values."""
        return 2 * self.num_heads_qk * self.head_dim + self.num_heads_v * self.value_dim

    def on_rank(self, tensor_parallel: int) -> "LinearAttention":
        """The part of one tensor-parallel rank, which has its share of the heads."""
        heads_qk, heads_v = self.num_heads_qk // tensor_parallel, self.num_heads_v // tensor_parallel
        return replace(self, num_heads_qk=heads_qk, num_heads_v=heads_v)

    def among(self, layers: Sequence[int]) -> "LinearAttention":
        """Those of some of the model's layers, numbered from 0 in their order."""
        return replace(self, layers=tuple(place for place, layer in enumerate(layers) if layer in self.layers))

    @property
    def flops(self) -> int:
        """Operations of one layer's recurrence for each token, forward: what the state holds for the key, what it takes
        in, and what the query reads, two for each of its elements. Chunks take more, see ``step_time``."""
        return 6 * self.num_heads_v * self.head_dim * self.value_dim


@dataclass(frozen=True)
class MuseGlimmer:
    """What only Muse Glimmer computes, beside gates of attention and norms after both halves of a block.

    Args:
        query_scale: factor of normalized queries.
        unrotated: numbers of the layers without rotary positions.
        post_norm_eps: epsilon of the norms after the halves of a block.
        logit_scale, logit_limit: logits are limit * tanh(scale * x / limit).
    """

    query_scale: float
    unrotated: tuple[int, ...]
    post_norm_eps: float
    logit_scale: float
    logit_limit: float


@dataclass(frozen=True)
class ModelConfig:
    """A decoder with RMSNorm, rotary positions, softmax attention and SwiGLU, in neutral terms.

    Args:
        model: torchtitan's name of the architecture: "llama3"; "qwen3" (normalized queries and keys); "gpt_oss" (sinks,
            biases, a clamped SwiGLU); "deepseek_v3" (scores of experts by sigmoid, with a bias for their choice);
            "kimi_k2_7" (the same, as the text part of a model that sees pictures); "muse_glimmer" (see there);
            "qwen3_5" (gates of attention and of shared experts, norms by 1 + weight, a quarter of each head rotated).
        dim: width of the residual stream.
        num_layers, num_heads_q, num_heads_kv, vocab_size: numbers of layers, of query and K/V heads, of tokens.
        head_dim: of queries and keys.
        hidden_dim: width of a dense feed-forward; no layer has one where there are experts in all.
        rope: rotary positions.
        norm_eps: epsilon of each RMSNorm but those of latent vectors, which have 1e-6.
        tied: whether the output layer is the embedding.
        experts: None for a dense model.
        value_dim: of values; 0: head_dim.
        latent: None for grouped-query attention.
        windows: by layer, how many tokens a row sees at most; 0: all. Empty: all rows see all.
        linear: None where every layer has attention.
        muse: None for other models.
        other: what else a flavor computes with, in words; no config.json can say it, so a file's model has none.
        max_positions: positions for which the model was trained; no part of the computation, so it is not compared.
        left_out: what the file has beside this model, in words; not compared.
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
    value_dim: int = 0
    latent: LatentAttention | None = None
    windows: tuple[int, ...] = ()
    linear: LinearAttention | None = None
    muse: MuseGlimmer | None = None
    other: tuple[str, ...] = ()
    max_positions: int = field(default=0, compare=False)
    left_out: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.value_dim == 0:
            object.__setattr__(self, "value_dim", self.head_dim)

    @property
    def fingerprint(self) -> str:
        """A digest of all that is compared."""
        return hashlib.sha256(repr(replace(self, max_positions=0, left_out="")).encode()).hexdigest()[:16]

    @property
    def num_attention_layers(self) -> int:
        """How many layers have softmax attention."""
        return self.num_layers - (len(self.linear.layers) if self.linear else 0)

    @property
    def rotary_dim(self) -> int:
        """Elements of a query or key that are rotated."""
        if self.latent is not None:
            return self.latent.rope_dim
        return self.head_dim // 4 if self.model == "qwen3_5" else self.head_dim

    @property
    def attention_flops(self) -> int:
        """Operations of all layers' attention for each (query, key) pair: two products forward, four backward."""
        return 6 * self.num_attention_layers * self.num_heads_q * (self.head_dim + self.value_dim)

    @property
    def linear_flops(self) -> int:
        """Operations of all layers' recurrence for each token: a backward takes twice those of its forward."""
        return 3 * len(self.linear.layers) * self.linear.flops if self.linear else 0

    @property
    def num_positions(self) -> int:
        """Positions for which the model was made, by ``max_positions`` or by YaRN, whose factor extends others."""
        extended = self.rope.factor * self.rope.original_max_positions if self.rope.type == "yarn" else 0
        return max(self.max_positions, int(extended))

    def to_hf(self) -> dict[str, Any]:
        """The fields of a config.json of this model, in the spelling that transformers 4 and 5 read.

        Raises:
            ValueError: the model has what none can say; one line.
        """
        if self.model in TEXT_PARTS:
            raise ValueError(
                f"{self.model} is a part of a model that sees pictures; put the config.json of the whole model in "
                "model.hf_assets_path"
            )
        if self.other:
            raise ValueError(
                f"model.flavor has {', '.join(self.other)}, which no config.json can say; use a flavor of a published "
                "model, or set checkpoint.last_save_in_hf to false"
            )
        model_type = {"llama3": "llama", "qwen3": "qwen3" if self.experts is None else "qwen3_moe"}.get(self.model)
        fields = {
            "architectures": [MODEL_TYPES[model_type or self.model][0]],
            "model_type": model_type or self.model,
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
        return fields if self.experts is None else fields | self._to_hf(self.experts)

    def _to_hf(self, experts: Experts) -> dict[str, Any]:
        """The fields that a model with experts has beside, or in place of, the common ones."""
        fields: dict[str, Any] = {"num_experts_per_tok": experts.top_k}
        if self.model == "gpt_oss":
            fields |= {"num_local_experts": experts.num_experts, "intermediate_size": experts.hidden_dim}
            windows = self.windows or (0,) * self.num_layers
            fields |= {"attention_bias": True, "swiglu_limit": 7.0, "sliding_window": max(windows) or None}
            return fields | {"layer_types": [WINDOW if window else FULL for window in windows]}
        fields |= {"moe_intermediate_size": experts.hidden_dim, "norm_topk_prob": experts.norm_topk_prob}
        if self.latent is None:
            return fields | {"num_experts": experts.num_experts}
        rope, latent = self.rope.scaling_to_hf(), self.latent
        return fields | {
            "head_dim": latent.rope_dim,
            "rope_scaling": rope and rope | dict.fromkeys(MSCALE_FIELDS, latent.mscale),
            "q_lora_rank": latent.q_rank or None,
            "kv_lora_rank": latent.kv_rank,
            "qk_rope_head_dim": latent.rope_dim,
            "qk_nope_head_dim": self.head_dim - latent.rope_dim,
            "v_head_dim": self.value_dim,
            "n_routed_experts": experts.num_experts,
            "n_shared_experts": experts.num_shared,
            "first_k_dense_replace": experts.num_dense_layers,
            "n_group": experts.num_groups,
            "topk_group": experts.top_groups,
            "routed_scaling_factor": experts.scale,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 0,
        }


def yarn_factor(factor: float, mscale: float = 1.0) -> float:
    """Factor by which YaRN makes queries and keys longer (arXiv 2309.00071), where nothing else is said."""
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0


def read_model_config(folder: str | Path) -> ModelConfig:
    """The model of ``folder/config.json``, in the spelling of transformers 4 or 5.

    Raises:
        ValueError: the file is missing or broken, or says something that no ``ModelConfig`` can; one line with the
            field, its value and the remedy.
    """
    file = ConfigFile(Path(folder) / "config.json")
    model_type = file.get("model_type", str)
    if model_type not in MODEL_TYPES:
        raise file.refusal("model_type", model_type, f"use a checkpoint of {', '.join(MODEL_TYPES)}")
    architecture, model = MODEL_TYPES[model_type]
    file.check_plain(model_type, architecture)
    return _text_part(file, model_type) if model_type in TEXT_TYPES else _read(file, model_type, model)


def _text_part(file: ConfigFile, model_type: str) -> ModelConfig:
    """The text part of a model that sees pictures."""
    text, model = file.text(), MODEL_TYPES[model_type][1]
    if (found := text.get("model_type", str)) not in TEXT_TYPES[model_type]:
        raise text.refusal("model_type", found, f"use a checkpoint with {' or '.join(TEXT_TYPES[model_type])}")
    kind = TEXT_TYPES[model_type][0]
    text.check_plain(kind, "DeepseekV3ForCausalLM" if kind == "kimi_k2" else MODEL_TYPES[model_type][0])
    tied = file.get("tie_word_embeddings", bool, model_type == "kimi_k25")  # what transformers takes
    others = "see pictures or predict further tokens" if model == "qwen3_5" else "see pictures"
    pictures = f"the parts that {others} are not trained; an export has them as they were"
    return replace(_read(text, kind, model), tied=tied, left_out=pictures)


def _read(file: ConfigFile, model_type: str, model: str) -> ModelConfig:
    """The model of a file, or of the text part of one, whose fields are plain."""
    num_heads_q, num_layers = file.get("num_attention_heads", int), file.get("num_hidden_layers", int)
    max_positions = file.get("max_position_embeddings", int)
    of_model = READERS.get(model, _llama_or_qwen3)
    common = ModelConfig(
        model=model,
        dim=file.get("hidden_size", int),
        num_layers=num_layers,
        num_heads_q=num_heads_q,
        num_heads_kv=file.get("num_key_value_heads", int, None if model_type.startswith("qwen3") else num_heads_q),
        head_dim=1,
        hidden_dim=file.get("intermediate_size", int, 1 if model_type == "qwen3_5_moe_text" else None),
        vocab_size=file.get("vocab_size", int),
        norm_eps=file.get("rms_norm_eps", float),
        rope=_rope(file, model_type, max_positions),
        tied=file.get("tie_word_embeddings", bool, False),
        max_positions=max_positions,
    )
    config = replace(common, **{"value_dim": 0} | of_model(file, common))
    if num_heads_q % config.num_heads_kv:
        remedy = f"use a divisor of num_attention_heads, {num_heads_q}"
        raise file.refusal("num_key_value_heads", config.num_heads_kv, remedy)
    if (rotated := config.rotary_dim) % 2:
        name = "qk_rope_head_dim" if config.latent else "head_dim"
        raise file.refusal(name, rotated, "rotary positions need an even number")
    return config


def _llama_or_qwen3(file: ConfigFile, model: ModelConfig) -> dict[str, Any]:
    model_type = file.get("model_type", str)
    file.layer_types((FULL,), "use a checkpoint with full attention in every layer")
    head_dim = file.get("head_dim", int, 128 if model_type == "qwen3" else model.dim // model.num_heads_q)
    return {"head_dim": head_dim, "experts": _experts(file) if model_type == "qwen3_moe" else None}


def _windows(file: ConfigFile) -> tuple[int, ...]:
    """By layer, how many tokens a row sees at most, as ``ModelConfig`` has it."""
    kinds = file.layer_types((FULL, WINDOW), f"use {FULL} or {WINDOW}, once for each layer")
    if not kinds:
        raise file.refusal("layer_types", None, "use the config.json that came with the weights")
    window = file.get("sliding_window", int) if WINDOW in kinds else 0
    return tuple(window if kind == WINDOW else 0 for kind in kinds) if window else ()


def _gpt_oss(file: ConfigFile, model: ModelConfig) -> dict[str, Any]:
    windows, width = _windows(file), model.hidden_dim
    return {
        "head_dim": file.get("head_dim", int),
        "hidden_dim": 0,
        "windows": windows,
        "experts": replace(_experts(file, width), norm_topk_prob=True),
    }


def _muse_glimmer(file: ConfigFile, model: ModelConfig) -> dict[str, Any]:
    windows, thetas = _windows(file), file.values.get("layer_rope_theta")
    of_all = {0, model.rope.theta}
    if not isinstance(thetas, list) or len(thetas) != model.num_layers or not set(thetas) <= of_all:
        raise file.refusal("layer_rope_theta", thetas, f"use 0 or rope_theta, {model.rope.theta}, for each layer")
    if model.rope.attention_factor != 1 and 0 in thetas:
        remedy = "use a checkpoint with plain positions, as layers without positions would get its attention factor too"
        raise file.refusal(f"{_rope_key(file)}.rope_type", model.rope.type, remedy)
    return {
        "head_dim": file.get("head_dim", int),
        "windows": windows,
        "muse": MuseGlimmer(
            file.get("qk_scale_factor", float),
            tuple(number for number, theta in enumerate(thetas) if not theta),
            file.get("post_norm_eps", float),
            file.get("output_multiplier", float),
            file.get("final_logit_softcapping", float),
        ),
    }


def _deepseek_v3(file: ConfigFile, model: ModelConfig) -> dict[str, Any]:
    if model.num_heads_kv != model.num_heads_q:
        remedy = f"use num_attention_heads, {model.num_heads_q}, as every head has keys of its own"
        raise file.refusal("num_key_value_heads", model.num_heads_kv, remedy)
    if model.rope.attention_factor != 1:
        remedy = "use a checkpoint with mscale and mscale_all_dim alike, as torchtitan's deepseek_v3 has them"
        raise file.refusal(_rope_key(file), file.values.get(_rope_key(file)), remedy)
    file.check_not_null("norm_topk_prob", "rope_interleave")
    groups, top_groups = file.get("n_group", int), file.get("topk_group", int)
    experts = _experts(file)
    if groups > 1 and (experts.num_experts % groups or experts.num_experts < 2 * groups):
        remedy = f"use a divisor of n_routed_experts, {experts.num_experts}, that leaves two or more in a group"
        raise file.refusal("n_group", groups, remedy)
    if top_groups > groups:
        raise file.refusal("topk_group", top_groups, f"use at most n_group, {groups}")
    experts = replace(
        experts,
        norm_topk_prob=file.get("norm_topk_prob", bool, True),
        num_dense_layers=file.get("first_k_dense_replace", int, least=0),
        num_shared=file.get("n_shared_experts", int),
        num_groups=1 if groups == top_groups else groups,
        top_groups=1 if groups == top_groups else top_groups,
        scale=file.get("routed_scaling_factor", float),
    )
    no_q_rank = "q_lora_rank" in file.values and file.values["q_lora_rank"] is None
    rope_dim = file.get("qk_rope_head_dim", int)
    rope = ConfigFile(file.path, file.values.get(_rope_key(file)) or {})
    mscale = rope.get("mscale_all_dim", float) if rope.values.get("mscale_all_dim") else 0.0
    predicted = file.get("num_nextn_predict_layers", int, 0, least=0)
    return {
        "head_dim": rope_dim + file.get("qk_nope_head_dim", int),
        "value_dim": file.get("v_head_dim", int),
        "latent": LatentAttention(
            0 if no_q_rank else file.get("q_lora_rank", int), file.get("kv_lora_rank", int), rope_dim, mscale
        ),
        "experts": experts,
        "left_out": f"num_nextn_predict_layers is {predicted}; these layers are neither trained nor exported"
        if predicted
        else "",
    }


def _qwen3_5(file: ConfigFile, model: ModelConfig) -> dict[str, Any]:
    kinds = file.layer_types((FULL, LINEAR), f"use {FULL} or {LINEAR}, once for each layer")
    if not kinds:
        interval = file.get("full_attention_interval", int, 4)
        kinds = [LINEAR if number % interval else FULL for number in range(1, model.num_layers + 1)]
    if len(set(kinds)) < 2:
        raise file.refusal("layer_types", kinds, f"use a checkpoint that has both {FULL} and {LINEAR}")
    linear = LinearAttention(
        tuple(number for number, kind in enumerate(kinds) if kind == LINEAR),
        num_heads_qk=file.get("linear_num_key_heads", int, 16),
        num_heads_v=file.get("linear_num_value_heads", int, 32),
        head_dim=file.get("linear_key_head_dim", int, 128),
        value_dim=file.get("linear_value_head_dim", int, 128),
        conv_width=file.get("linear_conv_kernel_dim", int, 4),
    )
    if linear.num_heads_v % linear.num_heads_qk:
        remedy = f"use a multiple of linear_num_key_heads, {linear.num_heads_qk}"
        raise file.refusal("linear_num_value_heads", linear.num_heads_v, remedy)
    has_experts = file.get("model_type", str) == "qwen3_5_moe_text"
    experts = _shared_experts(file, _experts(file)) if has_experts else None
    dense = {"hidden_dim": 0} if has_experts else {}
    return {"head_dim": file.get("head_dim", int, 256), "linear": linear, "experts": experts} | dense


def _shared_experts(file: ConfigFile, experts: Experts) -> Experts:
    """The experts with those that every token goes to, as Qwen3.5 has them."""
    shared = file.get("shared_expert_intermediate_size", int)
    if shared % experts.hidden_dim:
        remedy = f"use a multiple of moe_intermediate_size, {experts.hidden_dim}"
        raise file.refusal("shared_expert_intermediate_size", shared, remedy)
    return replace(experts, norm_topk_prob=True, num_shared=shared // experts.hidden_dim)


READERS = {
    "qwen3_5": _qwen3_5,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2_7": _deepseek_v3,
    "muse_glimmer": _muse_glimmer,
}


def differences(file: ModelConfig, flavor: ModelConfig) -> list[str]:
    """Each field in which a flavor differs from the file's model, with both values; empty if they are one model."""
    ours, theirs = dict(_flat(flavor, file)), dict(_flat(file, flavor))
    names = dict.fromkeys([*theirs, *ours])
    return [
        f"{name} {theirs.get(name)} in the file, {ours.get(name)} in the flavor"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


def _flat(config: ModelConfig, other: ModelConfig) -> Iterator[tuple[str, Any]]:
    """The fields of a model by name; of a part that the other model lacks, such as experts, only the first."""
    for name, value in asdict(config).items():
        if isinstance(value, dict):
            some = value.items() if getattr(other, name) else list(value.items())[:1]
            yield from ((f"{name}.{inner}", inner_value) for inner, inner_value in some)
        elif name not in _unused(config) & _unused(other):
            yield name, value


def _unused(config: ModelConfig) -> set[str]:
    """Names of fields that say nothing more of what the model computes."""
    as_wide = config.value_dim == config.head_dim
    all_have_experts = config.experts is not None and not config.experts.num_dense_layers
    names = {"max_positions": True, "left_out": True, "value_dim": as_wide, "hidden_dim": all_have_experts}
    return {name for name, unused in names.items() if unused}


def _rope_key(file: ConfigFile) -> str:
    """The file's field of rotary positions, as transformers reads it: the older spelling wins."""
    return "rope_scaling" if file.values.get("rope_scaling") else "rope_parameters"


def _rope(file: ConfigFile, model_type: str, max_positions: int) -> Rope:
    # as transformers reads them: a theta among the parameters wins over one beside them
    key = _rope_key(file)
    parameters = file.values.get(key) or {}
    if not isinstance(parameters, dict):
        raise file.refusal(key, parameters, "use a table of parameters, or null")
    if model_type == "gpt_oss" and not parameters:  # where transformers would take YaRN
        raise file.refusal(key, parameters, "use the config.json that came with the weights")
    rope = ConfigFile(file.path, {name: file.values.get(name) for name in BESIDE_ROPE} | parameters)
    lengths = [parameters.get(ORIGINAL), file.values.get(ORIGINAL)]
    if None not in lengths and lengths[0] != lengths[1]:  # transformers takes the second, others the first
        raise file.refusal(ORIGINAL, lengths[1], f"use that of {key}, {quoted(lengths[0])}, or leave one of both out")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_TYPES:
        remedy = f"use a checkpoint with one of {', '.join(ROPE_TYPES)}, or take out {key} if it was added by hand"
        raise file.refusal(f"{key}.rope_type", kind, remedy)
    for name, value in parameters.items():
        known = ROPE_FIELDS | (YARN_FIELDS if kind == "yarn" else set())
        known |= MSCALE_FIELDS if kind == "yarn" and model_type in ("deepseek_v3", "kimi_k2") else set()
        known |= PICTURE_FIELDS if model_type.startswith("qwen3_5") else set()
        if name not in known and value is not None:
            raise file.refusal(f"{key}.{one_line(name, 80)}", value, f"use a checkpoint with plain {kind!r} positions")
    rope.check_field("partial_rotary_factor", model_type)

    theta = rope.get("rope_theta", float, 150000.0 if model_type == "gpt_oss" else 10000.0)
    if kind == "default":
        return Rope(theta)
    factor = rope.get("factor", float)
    if kind == "linear":
        return Rope(theta, kind, factor)
    if kind == "yarn":
        rope.check_not_null("truncate")
        if factor < 1:  # torchtitan leaves positions as they are, transformers does not
            raise file.refusal(f"{key}.factor", factor, "use the config.json that came with the weights, or at least 1")
        return Rope(
            theta,
            kind,
            factor,
            original_max_positions=rope.get(ORIGINAL, int, max_positions),
            beta_fast=rope.get("beta_fast", float, 32.0),
            beta_slow=rope.get("beta_slow", float, 1.0),
            truncate=rope.get("truncate", bool, True),
            attention_factor=rope.get("attention_factor", float, _attention_factor(rope, factor)),
        )
    low, high = rope.get("low_freq_factor", float), rope.get("high_freq_factor", float)
    if low >= high:
        raise file.refusal(f"{key}.low_freq_factor", low, f"use less than high_freq_factor, {high}")
    original = rope.get(ORIGINAL, int, max_positions)
    return Rope(theta, kind, factor, low, high, original)


def _attention_factor(rope: ConfigFile, factor: float) -> float:
    """The attention factor where it is not given; with both of ``MSCALE_FIELDS``, what is not in the scores' factor."""
    if not all(rope.values.get(name) for name in MSCALE_FIELDS):
        return yarn_factor(factor)
    mscale, mscale_all_dim = rope.get("mscale", float), rope.get("mscale_all_dim", float)
    return yarn_factor(factor, mscale) / yarn_factor(factor, mscale_all_dim)


def _experts(file: ConfigFile, hidden_dim: int = 0) -> Experts:
    """The experts of one MoE layer; hidden_dim: width of each, 0: the file's moe_intermediate_size."""
    names = ("n_routed_experts", "num_local_experts", "num_experts")  # DeepSeek, transformers 5, transformers 4
    name = next((name for name in names if name in file.values), names[-1])
    num_experts, top_k = file.get(name, int), file.get("num_experts_per_tok", int)
    if top_k > num_experts:
        raise file.refusal("num_experts_per_tok", top_k, f"use at most {name}, {num_experts}")
    norm_topk_prob = file.get("norm_topk_prob", bool, False)
    return Experts(num_experts, top_k, hidden_dim or file.get("moe_intermediate_size", int), norm_topk_prob)
