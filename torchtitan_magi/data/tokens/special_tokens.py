"""The special tokens of a folder in Hugging Face's layout, by the rules of transformers 5.

`tokenizer_config.json` names tokens ("bos_token"), lists others ("additional_special_tokens", newer
"extra_special_tokens") and declares them ("added_tokens_decoder"). Where it declares none, two files of older versions
count as well: `special_tokens_map.json` names tokens, before the configuration, and `added_tokens.json` declares them.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from torchtitan_magi.files import read_text
from torchtitan_magi.machine import lack
from torchtitan_magi.wording import one_line, quoted, shown

CONFIG, OLD_NAMES, OLD_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
DECLARED, EXTRA, ADDITIONAL = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer.

    named: "bos_token" -> token; listed: those without a name; declared: number -> token, for the order in which they
    are added; is_old: whether the tokenizer's own tokens are declared as well.
    """

    named: dict[str, AddedToken]
    listed: list[AddedToken]
    declared: dict[int, AddedToken]
    is_old: bool

    @property
    def texts(self) -> dict[str, str]:
        """Texts of the tokens that have a name, which chat templates see: {"bos_token": "<s>"}."""
        return {name: token.content for name, token in self.named.items()}

    def add_to(self, tokenizer: Tokenizer) -> None:
        """Adds the tokens to a tokenizer that may have some of them. A new one gets the next number."""
        own = tokenizer.get_added_tokens_decoder()
        declared = self.declared | own if self.is_old else self.declared
        tokens = [token for _, token in sorted(declared.items(), key=lambda item: item[0])]
        known = {token.content for token in (*own.values(), *tokens)}
        tokens += [token for token in (*self.named.values(), *self.listed) if token.content not in known]
        for token in tokens:
            token.special |= token.content in self.texts.values()
        tokenizer.add_tokens(tokens)


def read_special_tokens(folder: str | os.PathLike[str]) -> SpecialTokens:
    """The special tokens that the files beside `tokenizer.json` tell of; none without such files.

    Raises ValueError for a malformed file.
    """
    path = Path(folder, CONFIG)
    config = read_object(path)
    named, listed = _named(path, config), _listed(path, config)
    if DECLARED not in config:
        has_list = ADDITIONAL in config or isinstance(config.get(EXTRA), list)
        return _with_old_files(Path(folder), named, listed, has_list)
    numbered = _entries(path, config, DECLARED, dict).items()
    declared = {_number(path, number): _token(path, DECLARED, token, False) for number, token in numbered}
    return SpecialTokens(_in_order(named, {}), listed, declared, False)


def _with_old_files(
    folder: Path, named: dict[str, AddedToken], listed: list[AddedToken], has_list: bool
) -> SpecialTokens:
    """The special tokens with those of the files of older versions. has_list: whether the configuration lists some."""
    path, names = folder / OLD_NAMES, read_object(folder / OLD_NAMES)
    named = _in_order(_named(path, names, True), named)
    listed = listed + _listed(path, {EXTRA: names.get(EXTRA)}, True)
    special = {token.content for token in listed} | {named[name].content for name in STANDARD if name in named}
    if not has_list and EXTRA not in names:
        listed = _listed(path, names)
    path = folder / OLD_TOKENS
    declared = {
        _number(path, number): AddedToken(text, normalized=text not in special, special=text in special)
        for text, number in read_object(path).items()
    }
    return SpecialTokens(named, listed, declared, True)


def _in_order(first: dict[str, AddedToken], second: dict[str, AddedToken]) -> dict[str, AddedToken]:
    """Both together, those of `first` before others of the same name; in the order in which they are added."""
    named = second | first
    return {name: named[name] for name in dict.fromkeys((*STANDARD, *first, *second)) if name in named}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file; {} without the file. Raises ValueError for another content."""
    try:
        value = json.loads(read_text(path)) if path.exists() else {}
        if not isinstance(value, dict):
            raise ValueError(f"it is a {type(value).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        other = f"{shown(path)} is not a JSON object ({one_line(error)}); download the tokenizer's files again"
        raise ValueError(lack(error, shown(path)) or other) from None
    return value


def _named(path: Path, config: dict[str, Any], is_special: bool = False) -> dict[str, AddedToken]:
    """The tokens under keys such as "bos_token", and those of an object under "extra_special_tokens"."""
    given = {key: value for key, value in config.items() if key in STANDARD and value is not None}
    given |= {key: value for key, value in config.items() if key.endswith("_token") and _is_token(value)}
    if isinstance(config.get(EXTRA), dict):
        given |= config[EXTRA]
    return {key: _token(path, key, value, is_special) for key, value in given.items()}


def _listed(path: Path, config: dict[str, Any], is_special: bool = False) -> list[AddedToken]:
    """The tokens of a list under "extra_special_tokens", else of that under its older name."""
    key = EXTRA if config.get(EXTRA) and not isinstance(config[EXTRA], dict) else ADDITIONAL
    return [_token(path, key, value, is_special) for value in _entries(path, config, key, list)]


def _entries(path: Path, config: dict[str, Any], key: str, kind: type) -> Any:
    value = config.get(key)
    if value is not None and not isinstance(value, kind):
        form = "an object" if kind is dict else "a list"
        raise ValueError(f'{shown(path)}: "{key}" is {quoted(value)}; write {form} of tokens')
    return kind() if value is None else value


def _is_token(value: Any) -> bool:
    return isinstance(value.get("content") if isinstance(value, dict) else value, str)


def _token(path: Path, key: str, value: Any, is_special: bool) -> AddedToken:
    """A token given as text, which is special, or as {"content": text}, which is if it or `is_special` says so."""
    if not _is_token(value):
        raise ValueError(f'{shown(path)}: "{key}" has {quoted(value)}; write the text of a token')
    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
    return AddedToken(value["content"], **({"special": is_special} | flags))


def _number(path: Path, number: Any) -> int:
    try:
        return int(number)
    except (TypeError, ValueError):
        raise ValueError(f"{shown(path)}: {quoted(number)} is no number of a token; write an integer") from None
