"""A tokenizer and its chat template from a folder in Hugging Face's layout: for runs, the inspector and the report."""

import json
import logging
import os
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel

from torchtitan_magi.data.tokens.chat import ChatTokenizer
from torchtitan_magi.data.tokens.special_tokens import read_special_tokens
from torchtitan_magi.files import read_text
from torchtitan_magi.machine import lack
from torchtitan_magi.wording import one_line, quoted, shown

logger = logging.getLogger(__name__)

_VOCABULARIES, _MERGES = ("vocab.json", "vocab.txt"), "merges.txt"


class LoadedTokenizer(NamedTuple):
    """A tokenizer and two of its token ids; None for a token that the folder does not name."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None


def load_chat_tokenizer(folder: str | os.PathLike[str]) -> ChatTokenizer:
    """The tokenizer of a folder with its chat template.

    Raises ValueError for files that are missing or malformed, and for a template that is of no use.
    """
    return ChatTokenizer.from_assets(*load_tokenizer(folder), folder)


def load_tokenizer(folder: str | os.PathLike[str]) -> LoadedTokenizer:
    """The tokenizer of tokenizer.json with the special tokens of the files beside it, see `special_tokens`.

    Without tokenizer.json it is made of vocab.json or vocab.txt as torchtitan makes it: a byte-level BPE with the
    merges of merges.txt, else whole words.

    Raises ValueError for files that are missing or malformed.
    """
    path = Path(folder, "tokenizer.json")
    if not path.is_file():
        path = next((found for name in _VOCABULARIES if (found := Path(folder, name)).is_file()), path)
    if not path.is_file():
        raise ValueError(f"{shown(path)} does not exist; give the directory of a Hugging Face tokenizer")
    try:
        tokenizer = _of_vocabulary(path) if path.name in _VOCABULARIES else Tokenizer.from_str(read_text(path))
    except Exception as error:  # the library raises nothing narrower
        other = f"{shown(path)} is not a tokenizer ({one_line(error)}); download it again"
        raise ValueError(lack(error, shown(path)) or other) from None
    special = read_special_tokens(folder)
    special.add_to(tokenizer)
    texts = [special.texts.get(name, "") for name in ("bos_token", "eos_token")]
    return LoadedTokenizer(tokenizer, *(tokenizer.token_to_id(text) for text in texts))


def _of_vocabulary(path: Path) -> Tokenizer:
    """The tokenizer of a folder without tokenizer.json."""
    text = path.read_text(encoding="utf-8")
    lines = {line.strip(): number for number, line in enumerate(text.split("\n")) if line.strip()}
    vocabulary = json.loads(text) if path.suffix == ".json" else lines
    merges = path.with_name(_MERGES)
    kind = f"with {_MERGES} as GPT-2's byte-level BPE" if merges.is_file() else "as whole words"
    logger.warning(
        f"{shown(path.parent)} has no tokenizer.json: {path.name} is read {kind}; save the model's tokenizer anew"
    )
    if not merges.is_file():
        return Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    written = merges.read_text(encoding="utf-8").split("\n")
    lines_of_two = [line.split() for line in written if not line.startswith("#version")]
    pairs = [(pair[0], pair[1]) for pair in lines_of_two if len(pair) == 2]
    for pair in pairs:  # of some the library does not say it but panics, which is no Exception
        if not {*pair, "".join(pair)} <= vocabulary.keys():
            raise ValueError(f"{_MERGES} has {quoted(' '.join(pair))}, but not all of it is in {path.name}")
    tokenizer = Tokenizer(BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return tokenizer
