"""Asks an exported model a question through transformers: does it answer, and does it stop by itself?"""

import importlib
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_magi.wording import one_line, quoted_path, shown

QUESTION = "What is the capital of France?"
MAX_NEW_TOKENS = 200
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's
SEES = "ForConditionalGeneration"  # how the class of a model ends that sees pictures, too


class Model(NamedTuple):
    """A model of transformers and its tokenizer."""

    model: Any
    tokenizer: Any

    @property
    def ends(self) -> list[int]:
        """The tokens at which generation stops: ``eos_token_id``."""
        found = self.model.generation_config.eos_token_id
        return [] if found is None else found if isinstance(found, list) else [found]


def answer_of(folder: Path, question: str) -> str:
    """What a folder's model says to a question, greedily, and how it ended; without a chat template it continues it.

    Args:
        folder: of a model, or of adapters over a base model that ``adapter_config.json`` names.

    Raises:
        ValueError: a package is missing, or the folder or the chat template is of no use; one line.
    """
    try:
        base = _base_of(folder)
        tokenizer = _tokenizer_of(base, folder)
        has_turns = bool(tokenizer.chat_template)
        prompt = _chat_prompt(tokenizer, question) if has_turns else tokenizer(question).input_ids
        loaded = Model(_load(base, folder), tokenizer)
        tokens = _generated(loaded, prompt)
    except ModuleNotFoundError as error:
        raise ValueError(f"--generate needs {error.name} for {shown(folder)}; pip install {error.name}") from None
    except Exception as error:  # of files and templates that others wrote, transformers raises of all kinds
        raise ValueError(f"{shown(folder)} gives no answer: {one_line(error) or type(error).__name__}") from None
    text = _printable(loaded.tokenizer.decode(tokens, skip_special_tokens=True)).strip()
    names = ("Question", "Answer") if has_turns else ("Text", "Continued")
    said = f"{names[0]}: {_printable(question)}\n{names[1]}: {text or '(nothing)'}\n"
    return said + _how_it_ended(loaded, tokens, has_turns)


def _base_of(folder: Path) -> Path:
    """The folder of the whole model: that of adapters' base, which adapter_config.json names, or the same."""
    if not (folder / ADAPTER_CONFIG).exists():
        return folder
    importlib.import_module("peft")
    base = json.loads((folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path") or ""
    if not Path(base).is_dir():
        raise ValueError(
            f"its base model is {quoted_path(base)}, which is no folder here; start where it is, or set "
            f"base_model_name_or_path in {ADAPTER_CONFIG}"
        )
    return Path(base)


def _tokenizer_of(base: Path, folder: Path) -> Any:
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    if base != folder and not (base / "config.json").is_file():
        raise ValueError(
            f"its base model, {quoted_path(base)}, has no config.json; adapters need the weights they were made for"
        )
    if not (base / "config.json").is_file():
        raise ValueError("it has no config.json; give the folder that a run with checkpoint.last_save_in_hf ended with")
    return transformers.AutoTokenizer.from_pretrained(base)


def _load(base: Path, folder: Path) -> Any:
    """The model of base, with the adapters of folder if that is another."""
    import transformers

    classes = transformers.AutoConfig.from_pretrained(base).architectures or [""]
    kind = "ImageTextToText" if classes[0].endswith(SEES) else "CausalLM"
    options = {"dtype": "auto", "device_map": _devices(), "output_loading_info": True}
    model, report = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(base, **options)
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise ValueError(f"{shown(base)} lacks {missing[0]}{more}, which would be random; copy or download it again")
    if folder != base:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")  # they would add nothing
            model = importlib.import_module("peft").PeftModel.from_pretrained(model, folder)
    return model.eval()


def _devices() -> str | None:
    """All GPUs, if there are some; transformers needs accelerate for it."""
    import torch

    if torch.cuda.is_available():
        importlib.import_module("accelerate")
        return "auto"
    return None


def _chat_prompt(tokenizer: Any, question: str) -> list[int]:
    turns = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True).input_ids


def _generated(loaded: Model, prompt: list[int]) -> list[int]:
    """The tokens that follow, greedily, with the one that ended them."""
    import torch

    given = torch.tensor([prompt], device=loaded.model.device)
    options = {"attention_mask": torch.ones_like(given), "do_sample": False, "max_new_tokens": MAX_NEW_TOKENS}
    return loaded.model.generate(input_ids=given, **options)[0, len(prompt) :].tolist()


def _how_it_ended(loaded: Model, tokens: list[int], has_turns: bool) -> str:
    if tokens and tokens[-1] in loaded.ends:
        return f"It stopped by itself, with {_name(loaded, tokens[-1])} after {len(tokens):,} tokens."
    stops = f"It did not stop within {MAX_NEW_TOKENS} tokens"
    end = _turn_end(loaded.tokenizer) if has_turns else None
    if end is None or end in loaded.ends:
        return f"{stops}: the answer is longer, or the model has not learned to end it."
    wrote = f", wrote it {tokens.count(end)} times" if end in tokens else ""
    return (
        f"{stops}: turns end with {_name(loaded, end)}{wrote}, but generation stops at eos_token_id "
        f"{loaded.ends}; add {end} to it in generation_config.json, or give it to generate."
    )


def _turn_end(tokenizer: Any) -> int | None:
    """The last special token of a conversation that ends with an answer."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokens = tokenizer.apply_chat_template(turns, return_dict=True).input_ids
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((token for token in reversed(tokens) if token in special), None)


def _name(loaded: Model, token: int) -> str:
    return one_line(loaded.tokenizer.convert_ids_to_tokens(token))


def _printable(text: str) -> str:
    """The text without what would steer a terminal."""
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in text)
