"""Files that are made once: by one of several processes, again when their source changes, and where it cannot be."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.full_disk import full_disk
from support.processes import keep_at_once

from torchtitan_magi import files
from torchtitan_magi.data import Corpus
from torchtitan_magi.data.records.kept_files import digest_of_file, kept


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").write_text("content")
    return tmp_path / "source"


def test_one_process_makes_the_file_and_the_others_wait(source, tmp_path):
    assert keep_at_once(tmp_path / "cache", source) == 1


def test_a_changed_source_has_another_file(source, tmp_path):
    first = kept(tmp_path, str(source), "kind", lambda path: path.write_text("1"), Path.read_text)
    source.write_text("changed")
    os.utime(source, ns=(0, 0))
    second = kept(tmp_path, str(source), "kind", lambda path: path.write_text("2"), Path.read_text)
    assert (first, second) == ("1", "2")


HOLDER = """
import sys, time
from torchtitan_magi.files import open_lock, take_lock
take_lock(open_lock(sys.argv[1]))
print("locked", flush=True)
time.sleep(1000)
"""


def test_a_stopped_holder_of_the_lock_is_named(source, tmp_path, monkeypatch):
    """And waited for until it is dead."""
    kept(tmp_path, str(source), "kind", lambda path: path.write_text("1"), Path.read_text)
    (file,) = tmp_path.glob("*.kind")
    file.unlink()
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    command = [sys.executable, "-c", HOLDER, f"{file}.lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout.readline() == b"locked\n"
        holder.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(files.logger, "warning", lambda text: (texts.append(text), holder.kill()))
        texts = []
        assert kept(tmp_path, str(source), "kind", lambda path: path.write_text("2"), Path.read_text) == "2"
    (text,) = texts
    assert re.match(
        rf"waiting for {file}, which process {holder.pid} on .* makes; if that process is stopped, end", text
    )


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(source, tmp_path):
    kept(tmp_path, str(source), "kind", lambda path: path.write_text("1"), Path.read_text)
    (file,) = tmp_path.glob("*.kind")
    file.unlink()
    Path(f"{file}.lock").symlink_to(source)
    with pytest.raises(ValueError, match=r"cannot write the data cache .*: Too many levels of symbolic links; make"):
        kept(tmp_path, str(source), "kind", lambda path: path.write_text("1"), Path.read_text)
    assert source.read_text() == "content"


@pytest.mark.parametrize("damage", [lambda text: "", lambda text: text[:-20], lambda text: "f" + text[1:]])
def test_a_damaged_digest_is_made_again(source, tmp_path, damage, caplog):
    source.write_text("a")  # whose SHA-256 begins with c
    expected = digest_of_file(tmp_path, str(source))
    assert expected == digest_of_file(None, str(source))
    (file,) = tmp_path.glob("*.sha256")
    file.write_text(damage(file.read_text()))
    assert digest_of_file(tmp_path, str(source)) == expected
    assert f"{file} is damaged and is made again" in caplog.text


def make_and_die(path):
    path.write_text("half of it")
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_has_left_goes_and_what_another_makes_stays(source, tmp_path, monkeypatch):
    process = multiprocessing.get_context("fork").Process(
        target=kept, args=(tmp_path / "cache", str(source), "kind", make_and_die, Path.read_text)
    )
    process.start()
    process.join()
    (left,) = (tmp_path / "cache").glob("*.making")
    assert left.read_text() == "half of it"
    with files.making(tmp_path / "cache" / "other") as unfinished:
        kept(tmp_path / "cache", str(source), "kind", lambda path: path.write_text("all"), Path.read_text)
        assert list((tmp_path / "cache").glob("*.making")) == [unfinished]
        unfinished.write_text("of another")
    assert (tmp_path / "cache" / "other").read_text() == "of another"


def test_a_file_of_another_machine_is_left_alone_until_it_is_old(tmp_path):
    """Locks may hold within a machine only."""
    path = tmp_path / f"file.another-0123{files.MAKING}"
    path.write_text("")
    files.remove_abandoned(tmp_path)
    assert path.exists()
    os.utime(path, (0, 0))
    files.remove_abandoned(tmp_path)
    assert not path.exists()


def test_an_index_on_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 100)
    words = (
        r"^cannot write the data cache '.*cache': File too large; make room there, or name another folder in \[magi\] "
    )
    with full_disk(), pytest.raises(ValueError, match=words + "token_cache, or in TORCHTITAN_MAGI_CACHE"):
        Corpus(tmp_path / "a.jsonl", cache=tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]
    assert len(Corpus(tmp_path / "a.jsonl", cache=tmp_path / "cache")) == 100
