"""A run's chat template prints one date, whenever the run is started again."""

from datetime import date

import pytest

from torchtitan_magi.training.batches import template_date as module
from torchtitan_magi.training.batches.template_date import keep_template_date, template_date


class Day(date):
    """A day on which nothing else happens."""

    @classmethod
    def today(cls):
        return date(2031, 1, 2)


def test_the_date_of_the_first_start_is_kept(tmp_path, monkeypatch):
    folder = str(tmp_path / "run")
    first = template_date("", folder)
    assert first == date.today()
    keep_template_date(folder, first)
    monkeypatch.setattr(module, "date", Day)
    assert template_date("", str(tmp_path / "other")) == date(2031, 1, 2)
    assert template_date("", folder) == first
    keep_template_date(folder, date(2031, 1, 2))
    assert template_date("", folder) == first
    assert template_date("2024-07-26", folder) == date(2024, 7, 26)


def test_a_date_that_cannot_be_read_or_written_is_one_line(tmp_path):
    (tmp_path / "template_date").write_text("yesterday\n")
    with pytest.raises(ValueError, match=r"template_date holds no date \(.*\); remove it, or give magi.template_date"):
        template_date("", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write .*file/template_date: .*; set job.dump_folder"):
        keep_template_date(str(tmp_path / "file"), date(2024, 7, 26))
