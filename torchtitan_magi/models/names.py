"""Names of a model's modules and parameters as a checkpoint has them."""

import re

WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod)[.]")  # of checkpointing and compilers
ADAPTERS = re.compile(r"[.]lora_[ab][.]")  # in names of parameters
ADAPTER = "adapter_model.safetensors"  # PEFT's file, of which no run starts


def plain_name(name: str) -> str:
    """The name without what wrappers add to it."""
    return WRAPPERS.sub("", name)


# Models that are the text part of others: how the others' files begin the names of its tensors, and of further ones.
TEXT_PARTS = {
    "muse_glimmer": (r"^model\.", "model.language_model."),
    "kimi_k2_7": (r"^", "language_model."),
    "qwen3_5": (r"^model\.", "model.language_model."),
}
PICTURES = {  # and, of Qwen3.5, layers that predict tokens further ahead
    "qwen3_5": ("model.visual.", "mtp."),
    "muse_glimmer": ("model.vision_",),
    "kimi_k2_7": ("vision_tower.", "mm_projector.", "model.mm_projector."),  # the last in what transformers writes
}


def name_in_files(model: str, name: str) -> str:
    """The name in published files of a tensor that a text model alone has by ``name``.

    Args:
        model: see ``ModelConfig``.
    """
    return re.sub(*TEXT_PARTS[model], name) if model in TEXT_PARTS else name


def of_pictures(model: str, name: str) -> bool:
    """Whether files of this model have a tensor by that name for parts that are not trained, mostly to see pictures."""
    return name.startswith(PICTURES.get(model, ()))
