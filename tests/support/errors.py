"""Runs that must end in one line before the first step, and configuration files with something wrong in them."""

import contextlib

import pytest
from support.runs import DEBUG_TOML, TrainingError, corpus, train


def error_of(arguments, processes=1, **kwargs):
    """The TrainingError of a run that must not reach its first step."""
    with pytest.raises(TrainingError) as caught:
        train(processes, arguments, **kwargs)
    assert "Training starts" not in "".join(caught.value.__notes__)
    return caught.value


@contextlib.contextmanager
def run_ends(match, kind="ValueError"):
    """Within it a run ends with an exception of this class and such a text. Gives pytest's information on it."""
    with pytest.raises(TrainingError, match=match) as caught:
        yield caught
    assert caught.value.type == kind


def assert_says(error, messages):
    """The text of an exception is one line with all these messages."""
    assert "\n" not in str(error)
    assert [message for message in messages if message not in str(error)] == [], str(error)


def assert_one_line(error, messages):
    """A TrainingError is a ValueError of one line with all these messages."""
    assert error.type == "ValueError"
    assert_says(error, messages)


@contextlib.contextmanager
def one_line(match, kind=ValueError):
    """Within it an exception with such a text is raised, of one line. Gives pytest's information on it."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert "\n" not in str(caught.value)


def value_errors(function, cases):
    """The text of the ValueError that function(*case) raises, for each case; None where it raises none."""

    def value_error(case):
        try:
            function(*case)
        except ValueError as error:
            return str(error)

    return [value_error(case) for case in cases]


def changed(folder, *replacements):
    """The debug configuration with lines replaced."""
    lines = DEBUG_TOML.read_text().replace("assets/demo", str(corpus())).splitlines()
    for old, new in (*replacements, ("context_parallel_degree", "")):
        assert sum(line.startswith(old) for line in lines) == 1
        lines = [new if line.startswith(old) else line for line in lines]
    path = folder / "config.toml"
    path.write_text("\n".join(lines))
    return path
