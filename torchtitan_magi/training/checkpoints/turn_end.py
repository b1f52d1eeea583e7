"""The token at which generation must stop after training on conversations."""

import logging
from typing import Any

from torchtitan_magi.data import guard
from torchtitan_magi.data.inspection.examine import PROBE
from torchtitan_magi.data.inspection.spelling import Speller
from torchtitan_magi.data.records.corpus import Corpus
from torchtitan_magi.data.tokens.chat import ChatTokenizer
from torchtitan_magi.training.checkpoints.export import CONFIG, GENERATION_CONFIG, json_file, parsed

logger = logging.getLogger(__name__)


def add_turn_end(files: dict[str, bytes], dataset: Any, has_adapters: bool) -> None:
    """Adds the token that the model learns to end its turns with to ``eos_token_id`` of an export, and says so.

    transformers and vLLM stop at the tokens of generation_config.json; without that file, at those of config.json.

    Args:
        files: of the export, to be changed; empty without an export.
        dataset: the records of training, a ``PackedDataset``.
        has_adapters: whether adapters are exported, which have neither of the two files.
    """
    end = learned_end(dataset.tokenizer) if files and _has_conversations(dataset.records) else None
    config, generation = (parsed(files.get(name, b"null")) for name in (CONFIG, GENERATION_CONFIG))
    known = _ids(config if generation is None else generation)
    if end is None or end in known:
        return
    token = dataset.tokenizer.tokenizer.id_to_token(end)
    if has_adapters:
        logger.warning(f"Turns end with {token}, which is no EOS of the model: give generation eos_token_id={end}")
        return
    others = known or _ids(config)
    ids = [*others, end] if others else end
    logger.info(f"Turns end with {token}, so generation must stop there: the export has eos_token_id {ids}")
    for name, fields in ((CONFIG, config), (GENERATION_CONFIG, generation)):
        if isinstance(fields, dict):
            files[name] = json_file(fields | {"eos_token_id": ids})


def learned_end(chat: ChatTokenizer) -> int | None:
    """The special token that ends an answer as it is learned, before white space. None without one, or if the template
    refuses a plain conversation."""
    try:
        text, spans = guard.run_limited(chat.render, PROBE)
    except ValueError:
        return None
    start, stop = spans[-1]
    return Speller(chat).last_special(chat.tokenizer.encode(text[start:stop], add_special_tokens=False).ids)


def _has_conversations(records: Corpus) -> bool:
    """Whether some source has conversations, by its first record; one that is malformed tells nothing."""
    return any("text" not in _record(records, source.first) for source in records.sources)


def _record(records: Corpus, number: int) -> dict[str, Any]:
    try:
        return records[number]
    except ValueError:
        return {}


def _ids(fields: Any) -> list[int]:
    """Those of a configuration, or else of its text part, where transformers finds them."""
    if not isinstance(fields, dict):
        return []
    found = fields.get("eos_token_id")
    if found is None:
        return _ids(fields.get("text_config"))
    return list(found) if isinstance(found, list) else [found]
