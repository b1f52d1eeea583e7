"""Locks of files where the file system has them and where it has none: what is kept is the same."""

import errno
import fcntl
import os
import tempfile

import pytest
from support.compiler import note_compilations
from support.kept_tokens import corpus_fixtures, dataset, flats, num_files
from support.processes import keep_at_once

from torchtitan_magi import files
from torchtitan_magi.cuda import jit
from torchtitan_magi.data.packs import stream

folder, tokenizer = corpus_fixtures()
NUMBERS = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP]


@pytest.fixture(params=[*NUMBERS, None], ids=["ENOSYS", "ENOLCK", "EOPNOTSUPP", "none on this machine"])
def shared(request, tmp_path, monkeypatch):
    """A folder on a file system without locks; or no file can be locked."""
    stock, number, shared, here = fcntl.flock, request.param, tmp_path / "shared", tmp_path / "here"

    def flock(file, how):
        path = os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")
        if number is None or path.startswith(str(shared)):
            raise OSError(number or errno.ENOLCK, "no locks there")
        stock(file, how)

    files._warn_of_missing_locks.cache_clear()
    shared.mkdir(mode=0o700)
    here.mkdir()
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    return shared


def test_kernels_are_kept(shared, monkeypatch, caplog):
    compiled = note_compilations(monkeypatch)
    monkeypatch.setenv("TORCHTITAN_MAGI_CACHE", str(shared))
    assert jit.cubin("a.cu", {}) == jit.cubin("a.cu", {})
    assert jit.cubin("b.cu", {})
    assert compiled == ["a.cu", "b.cu"]
    (line,) = caplog.messages
    assert line.startswith(f"The file system of {shared}/kernels has no locks: each machine that shares it may make")
    assert line.endswith("another folder is set by TORCHTITAN_MAGI_CACHE or magi.token_cache")


@pytest.mark.parametrize("kind", ["documents", "pairs"])
def test_tokens_and_plans_are_kept(shared, folder, tokenizer, kind, monkeypatch, caplog):
    monkeypatch.setattr(stream, "_FEWEST_KEPT", 1)
    expected = flats(dataset(folder, tokenizer, None, kind))
    packs = dataset(folder, tokenizer, shared / "tokens", kind)
    assert flats(packs) == expected
    assert num_files(shared / "tokens") == packs.records.num_blocks
    assert list((shared / "tokens").glob("*.plan"))
    assert sum("has no locks" in line for line in caplog.messages) == 1
    assert not any("cannot be kept" in line for line in caplog.messages)


def test_processes_of_a_machine_make_a_file_once_if_it_has_locks(shared, tmp_path, request):
    (tmp_path / "source").write_text("content")
    assert keep_at_once(shared, tmp_path / "source") == 1 or not request.node.callspec.params["shared"]


def test_a_lock_excludes_others_of_this_machine(tmp_path, monkeypatch):
    stock = fcntl.flock

    def flock(file, how):
        if os.readlink(f"/proc/self/fd/{file}") == f"{tmp_path}/lock":
            raise OSError(errno.ENOSYS, "Function not implemented")
        stock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    first, second = (files.open_lock(tmp_path / "lock") for _ in range(2))
    try:
        files.take_lock(first)
        with pytest.raises(BlockingIOError, match=f"^process {os.getpid()} on "):
            files.take_lock(second)
        assert not os.get_inheritable(first)
        files.release_lock(first)
        files.take_lock(second)
    finally:
        os.close(first)
        os.close(second)
