"""What a run leaves in its folder: the log of rank 0, and all options, with which it can be started again."""

import logging
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from support.adapter import read_job
from support.parity import trained_anew
from support.runs import DEBUG_TOML, call, new_folder

from torchtitan_magi.train import _trainer_module
from torchtitan_magi.training.process.noise import NOISE, is_worth_a_line
from torchtitan_magi.training.process.run_folder import CONFIG, LOG, keep_log, save_config, toml_lines

OPTIONS = [
    "--training.steps",
    "7",
    "--magi.imports",
    "json",
    "--optimizer.lr",
    "1e-5",
    "--job.description",
    'a "b" \\é',
]


def saved_and_read(folder):
    """The options of a command line, and those that are read from what was saved of them."""
    job = read_job(DEBUG_TOML, *OPTIONS, "--job.dump_folder", folder)
    save_config(job)
    again = read_job(Path(folder) / CONFIG)
    found = [asdict(options) for options in (job, again)]
    for options in found:
        options["job"].pop("config_file")
    return found


def test_a_run_can_be_started_with_the_options_that_it_saved():
    first, again = call(saved_and_read, new_folder())
    assert first == again
    assert first["job"]["description"] == 'a "b" \\é'


def test_toml_of_nested_options():
    options = {
        "a": {"x": 1e-08, "n": None, "inner": {"y": ["p", "q"]}, "z": True},
        "empty": {},
        "f": {"g": float("inf")},
    }
    lines = list(toml_lines(options))
    assert tomllib.loads("\n".join(lines)) == {
        "a": {"x": 1e-08, "z": True, "inner": {"y": ["p", "q"]}},
        "f": {"g": float("inf")},
    }


def test_the_log_of_rank_0_is_kept_and_continued():
    folder = new_folder()
    for _ in range(2):
        arguments = ["--training.steps", "2", "--job.dump_folder", folder]
        trained_anew("dp2", *arguments, entry="torchtitan_magi.train")
    text = (Path(folder) / LOG).read_text()
    assert text.count("INFO step: 1/2  loss: ") == text.count("INFO step: 2/2  loss: ") == 2
    assert "\x1b" not in text
    assert tomllib.loads((Path(folder) / CONFIG).read_text())["training"]["steps"] == 2


def test_a_log_has_nothing_that_others_say_in_every_run(caplog):
    _trainer_module()
    root = logging.getLogger()
    assert is_worth_a_line in root.filters
    try:
        for words in (*NOISE, "Training starts"):
            root.warning(f"{words} at step 1")
    finally:
        root.removeFilter(is_worth_a_line)
    assert caplog.messages == ["Training starts at step 1"]


def test_the_log_of_a_new_folder_and_one_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    keep_log(str(tmp_path / "new" / "run"))
    logging.getLogger("x").warning("a line")
    keep_log(str(tmp_path / "second"))
    logging.getLogger("x").warning("another line")
    assert (tmp_path / "new" / "run" / LOG).read_text().endswith("WARNING a line\n")
    assert (tmp_path / "second" / LOG).read_text().endswith("WARNING another line\n")
    (tmp_path / LOG).mkdir()
    with pytest.raises(ValueError, match=r"^job.dump_folder is '.*', but its run.log cannot be written .*; make room"):
        keep_log(str(tmp_path))


@dataclass
class Place:
    dump_folder: str


@dataclass
class Job:
    job: Place


def said_of_options(folder):
    try:
        save_config(Job(Place(folder)))
    except ValueError as error:
        return str(error)


def test_options_that_cannot_be_kept_end_the_run_on_all_ranks(three_ranks, tmp_path):
    assert three_ranks.run(said_of_options, str(tmp_path)) == [None] * 3
    (tmp_path / "other" / CONFIG).mkdir(parents=True)
    first, *others = three_ranks.run(said_of_options, str(tmp_path / "other"))
    assert first.startswith(f"job.dump_folder is '{tmp_path}/other', but its run_config.toml cannot be written (")
    assert others == [first] * 2
