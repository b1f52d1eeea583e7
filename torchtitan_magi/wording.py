"""What errors quote: values and texts that others wrote, each in one short printable line; and amounts in words."""

import difflib
import os
import re
from collections.abc import Sequence


def quoted(value: object, limit: int = 80) -> str:
    """`repr(value)` in one printable line of at most `limit` characters; what is longer ends in "..."."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"<a {type(value).__name__} too large to show>"
    except RecursionError:
        text = f"<a {type(value).__name__} nested too deeply to show>"
    return one_line(text, limit)


def quoted_path(path: object) -> str:
    """A path in quotes, whole unless it is longer than the paths that people use; or what was given instead of one."""
    return quoted(os.fspath(path) if isinstance(path, os.PathLike) else path, 500)


def shown(path: object) -> str:
    """A path as it is, or as `quoted_path` where it holds what would not be seen or would steer a terminal."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    return text if isinstance(text, str) and text.isprintable() and len(text) <= 500 else quoted_path(path)


def one_line(text: object, limit: int = 300) -> str:
    """Another's text, such as an error of a library, in one printable line of at most `limit` characters."""
    line = " ".join(filter(None, (part.strip() for part in str(text).splitlines())))
    if len(line) > limit:
        line = line[: limit - 3] + "..."
    return "".join(character if character.isprintable() else "?" for character in line)


def unknown(option: str, of: str, known: Sequence[str]) -> str:
    """What to say of "section.option", of whose section only the options ``known`` are there."""
    section, dot, name = option.rpartition(".")
    close = difflib.get_close_matches(name, known, 1)
    instead = f"did you mean {section}{dot}{close[0]}?" if close else f"use one of {', '.join(known)}"
    option = option if re.fullmatch(r"[\w.-]{1,80}", option) else quoted(option)
    return f"{option} is no option of {of}; {instead}"


def amount(number: float, noun: str = "") -> str:
    """Such as "1,234 packs", "0.25 steps" or "1 epoch"; without a noun "1,234"."""
    text = f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"
    return f"{text} {noun}{'s' * (text != '1')}" if noun else text
