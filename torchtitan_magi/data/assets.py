"""A tokenizer and its chat template from a folder in Hugging Face's layout."""

import json
import os
from pathlib import Path

from tokenizers import Tokenizer

from torchtitan_magi.data.chat import ChatTokenizer
from torchtitan_magi.wording import one_line


def load_chat_tokenizer(folder: str | os.PathLike[str]) -> ChatTokenizer:
    """The tokenizer of tokenizer.json, with the BOS, EOS and chat template of the files beside it.

    Raises ValueError for files that are missing or malformed, and for a template that is of no use.
    """
    return ChatTokenizer.from_assets(*load_tokenizer(folder), folder)


def load_tokenizer(folder: str | os.PathLike[str]) -> tuple[Tokenizer, int | None, int | None]:
    """The tokenizer of tokenizer.json, and the ids of BOS and EOS; None for one that it has not.

    Raises ValueError for files that are missing or malformed.
    """
    path = Path(folder, "tokenizer.json")
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the directory of a Hugging Face tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer ({one_line(error)}); download it again") from None
    return tokenizer, *_bos_and_eos(tokenizer, Path(folder))


def _bos_and_eos(tokenizer: Tokenizer, folder: Path) -> tuple[int | None, int | None]:
    """Ids of the two tokens that tokenizer_config.json names, as text or as {"content": text}; None for no such."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text()) if path.exists() else {}
        names = [config.get("bos_token"), config.get("eos_token")]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object ({error}); download the tokenizer's files again") from None
    texts = [name.get("content") if isinstance(name, dict) else name for name in names]
    bos, eos = (None if text is None else tokenizer.token_to_id(str(text)) for text in texts)
    return bos, eos
