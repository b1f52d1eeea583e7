"""What errors quote is one short printable line, whatever the value is."""

import pytest
import torch

from torchtitan_magi.wording import one_line, quoted, quoted_path


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


VALUES = {
    "short": (0.5, "0.5"),
    "text": ("a  b\n\x1b", r"'a  b\n\x1b'"),
    "long": ("a" * 20_000, "'" + "a" * 76 + "..."),
    "integer": (1 << 100_000, "<a int too large to show>"),
    "deep": (nested(100_000), "<a list nested too deeply to show>"),
    "lines": (torch.eye(2), "tensor([[1., 0.], [0., 1.]])"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_one_short_line(name):
    value, expected = VALUES[name]
    assert quoted(value) == expected
    assert len(expected) <= 80


def test_a_path_that_people_use_is_whole(tmp_path):
    path = tmp_path / ("a" * 200) / ("b" * 200)
    assert quoted_path(path) == f"'{path}'"
    assert len(quoted_path("a" * 5000)) == 500


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", ""), ("a\n\n b\r\nc", "a b c"), ("\x0f; \u2028x", "?; x"), ("a" * 301, "a" * 297 + "...")],
)
def test_a_text_of_others_is_one_printable_line(text, expected):
    assert one_line(text) == expected
    assert one_line(text).isprintable()
