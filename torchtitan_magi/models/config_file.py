"""The fields of a Hugging Face ``config.json``, each checked as it is read."""

import json
import math
from pathlib import Path
from typing import Any

from torchtitan_magi.files import read_text
from torchtitan_magi.machine import cause, lack
from torchtitan_magi.wording import one_line, quoted, shown

COPY = "use a bf16 copy of the checkpoint; transformers makes one of"
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
# The same for some model_type only.
PLAIN_OF: dict[str, dict[str, tuple[Any, str]]] = {
    "gpt_oss": {
        "attention_bias": (True, "use a checkpoint whose projections have biases"),
        "swiglu_limit": (7, "use a checkpoint with 7.0"),
        "swiglu_alpha": (1.702, "use a checkpoint with 1.702"),
        "quantization_config": (None, f"{COPY} MXFP4 weights with Mxfp4Config(dequantize=True)"),
    },
    "deepseek_v3": {
        "scoring_func": ("sigmoid", 'use a checkpoint with "sigmoid"'),
        "topk_method": ("noaux_tc", 'use a checkpoint with "noaux_tc"'),
        "moe_layer_freq": (1, "use a checkpoint with experts in every layer after the first dense ones"),
        "rope_interleave": (True, "use a checkpoint that rotates adjacent elements"),
        "quantization_config": (None, f"{COPY} FP8 weights with FineGrainedFP8Config(dequantize=True)"),
    },
}
PLAIN_OF |= {
    "kimi_k2": PLAIN_OF["deepseek_v3"] | {"quantization_config": (None, "use a bf16 copy of the checkpoint")},
    "muse_glimmer_text": {"hidden_activation": ("silu", 'use a checkpoint with "silu"')},
    "qwen3_5_text": {
        "partial_rotary_factor": (0.25, "use a checkpoint that rotates a quarter of each head"),
        "attn_output_gate": (True, "use a checkpoint whose attention has a gate"),
    },
}
PLAIN_OF["qwen3_5_moe_text"] = PLAIN_OF["qwen3_5_text"]
# Code of its own that computes what transformers computes.
OWN_CODE = ("modeling_deepseek.DeepseekV3ForCausalLM", "modeling_kimi_k25.KimiK25ForConditionalGeneration")
# Architectures that transformers' own files name otherwise than the published ones.
IN_TRANSFORMERS = {"KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration"}


class ConfigFile:
    """A config.json; null is the same as missing, but where ``check_not_null`` refuses it."""

    def __init__(self, path: Path, values: Any = None, part: str = "") -> None:
        """values: read from the file unless given. part: the field that they are in, with a dot behind it."""
        self.path, self.part = path, part
        if values is None:
            try:
                values = json.loads(read_text(path))
            except OSError as error:
                remedy = f"{shown(path)}: {cause(error)}; put the config.json of the weights there"
                raise ValueError(lack(error, shown(path)) or remedy) from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{shown(path)} is no JSON ({one_line(error)}); download it again") from None
            if not isinstance(values, dict):
                raise ValueError(f"{shown(path)} holds no JSON object; download it again")
        self.values: dict[str, Any] = values

    def get(self, name: str, kind: type, default: Any = None, least: int = 1) -> Any:
        """A field of that type: at least ``least`` and below 2**31 if int, positive and finite if float.

        Args:
            kind: int, float, bool or str.
            default: for a field that is missing; None: it must be there.
        """
        value: Any = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ValueError(
                f"{shown(self.path)} has no {self.part}{name}; use the config.json that came with the weights"
            )
        if kind is float and type(value) is int and value.bit_length() <= 64:  # a float holds it
            value = float(value)
        usable = type(value) is kind
        if usable and kind is int:
            usable = least <= value < 2**31
        elif usable and kind is float:
            usable = 0 < value < math.inf
        if not usable:
            need = {
                int: "a positive integer below 2**31" if least else "an integer from 0 to 2**31 - 1",
                float: "a positive number",
                bool: "true or false",
                str: "a string",
            }
            raise self.refusal(name, value, f"use {need[kind]}, as in the config.json that came with the weights")
        return value

    def check_plain(self, model_type: str, architecture: str) -> None:
        """Refuses what would make another model than the architecture's plain one."""
        for name in PLAIN | PLAIN_OF.get(model_type, {}):
            self.check_field(name, model_type)
        base = f"{architecture.removesuffix('ForCausalLM')}Model"  # saved without the output layer
        known = architecture, base, IN_TRANSFORMERS.get(architecture)
        if (found := self.values.get("architectures") or [architecture]) not in [[name] for name in known]:
            raise self.refusal("architectures", found, f"use a checkpoint of {architecture}")
        found = self.values.get("auto_map")
        if "AutoModelForCausalLM" in str(found) and not (
            isinstance(found, dict) and found.get("AutoModelForCausalLM") in OWN_CODE
        ):
            raise self.refusal("auto_map", found, f"use a checkpoint of transformers' own {architecture}")

    def text(self) -> "ConfigFile":
        """What the config.json of a model of text and pictures says of its part for text."""
        values = self.values.get("text_config")
        if not isinstance(values, dict):
            raise self.refusal("text_config", values, "use the config.json that came with the weights")
        return ConfigFile(self.path, values, "text_config.")

    def layer_types(self, allowed: tuple[str, ...], remedy: str) -> list[str]:
        """The kind of each layer; empty if the file does not say.

        Raises:
            ValueError: a kind that is not allowed, or not one for each layer; with the remedy.
        """
        found, num_layers = self.values.get("layer_types"), self.get("num_hidden_layers", int)
        if not found:
            return []
        if not isinstance(found, list) or len(found) != num_layers or not all(kind in allowed for kind in found):
            raise self.refusal("layer_types", found, remedy)
        return found

    def check_field(self, name: str, model_type: str = "") -> None:
        """Refuses another value than the plain one."""
        plain, remedy = (PLAIN | PLAIN_OF.get(model_type, {}))[name]
        value = self.values.get(name)
        if value is not None and value != plain:
            raise self.refusal(name, value, remedy)

    def check_not_null(self, *names: str) -> None:
        """Refuses null in fields that are true where they are missing: transformers takes it for false."""
        for name in names:
            if self.values.get(name, True) is None:
                raise self.refusal(name, None, "use true or false, as transformers takes null for false")

    def refusal(self, name: str, value: Any, remedy: str) -> ValueError:
        """The error that names the file, a field, its value and the remedy."""
        return ValueError(f"{shown(self.path)}: {self.part}{name} is {quoted(value)}; {remedy}")
