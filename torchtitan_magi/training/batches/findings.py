"""The inspector's judgement of a run's data, before the first step."""

import logging

from torchtitan_magi.data import ChatTokenizer
from torchtitan_magi.data.guard import Died, describe_exit
from torchtitan_magi.data.inspection.judgement import Warning, first_look, without_template
from torchtitan_magi.data.records.corpus import Corpus
from torchtitan_magi.wording import one_line, quoted_path

logger = logging.getLogger(__name__)

_OF_A_KIND = 3  # lines
_SAID_ELSEWHERE = {"refused", "template"}  # of every record, as it is tokenized


def check_findings(corpus: Corpus, chat: ChatTokenizer, kind: str, folder: str, goes_on: bool) -> None:
    """Logs what looks wrong in a few records and in the template of ``folder``.

    Args:
        corpus: of parsed records.
        kind: of these: "documents", "pairs" or "rollouts".
        goes_on: whether what is surely wrong is logged as well.

    Raises:
        ValueError: one line: something is surely wrong, or a file has changed since it was opened.
    """
    try:
        warnings, number = first_look(corpus, chat, kind, without_template(folder, chat.tokenizer))
    except Died as end:
        logger.warning(
            f"The first look at {quoted_path(corpus.paths)} ended early: its process {describe_exit(end.exitcode)}"
        )
        return
    lines = [(warning, _line(warning, corpus, chat, number)) for warning in _some(warnings)]
    for warning, line in lines:
        if warning.is_sure and not goes_on:
            raise ValueError(f'{line}; or set magi.findings to "warn" to train all the same')
    for warning, line in lines:
        (logger.warning if warning.level == "wrong" else logger.info)(line)


def _some(warnings: list[Warning]) -> list[Warning]:
    """The warnings that are not said elsewhere, of each kind only some."""
    kinds = [warning.kind for warning in warnings]
    return [
        warning
        for place, warning in enumerate(warnings)
        if warning.level != "note" and warning.kind not in _SAID_ELSEWHERE
        if kinds[:place].count(warning.kind) < _OF_A_KIND
    ]


def _line(warning: Warning, corpus: Corpus, chat: ChatTokenizer, number: int) -> str:
    where = f" (e.g. {warning.where})" if warning.where else ""
    of_data = f"{number:,} of the {len(corpus):,} records of {quoted_path(corpus.paths)}"
    return one_line(f"{chat.name if warning.of_template else of_data}: {warning.text}{where}", 1000)
