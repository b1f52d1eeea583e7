"""The tokenizer of a run, read as the inspector and the report read it."""

import zlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from torchtitan_magi.data.tokens.assets import LoadedTokenizer, load_tokenizer
from torchtitan_magi.data.tokens.special_tokens import read_object
from torchtitan_magi.training.process.all_ranks import agreed


class AssetsTokenizer:
    """Inherited before torchtitan's HuggingFaceTokenizer: what that reads of a folder is read by ``data.assets``."""

    loaded: LoadedTokenizer
    tokenizer: Tokenizer

    def _load_tokenizer_from_path(self, tokenizer_path: str) -> Tokenizer:
        """A collective of all ranks. Raises ValueError, on all of them, as ``load_tokenizer``."""
        self.loaded = agreed(tokenizer_path, lambda: load_tokenizer(tokenizer_path), _identity)
        return self.loaded.tokenizer

    def _load_config(self, config_path: str) -> dict[str, Any]:
        return read_object(Path(config_path))

    def _infer_special_tokens(self) -> None:
        self.bos_id, self.eos_id = self.loaded.bos_id, self.loaded.eos_id
        texts = [None if number is None else self.tokenizer.id_to_token(number) for number in self.loaded[1:]]
        self.bos_token, self.eos_token = texts


def _identity(loaded: LoadedTokenizer) -> str:
    """What ranks compare, for the error that says that they differ."""
    return f"a tokenizer with checksum {zlib.crc32(loaded.tokenizer.to_str().encode(errors='surrogatepass')):08x}"
