"""The disk cache of compiled kernels: one compile per variant, damage is noticed, sources decide the key, and nothing
that another user could have written is loaded."""

import hashlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.compiler import SMALL, note_compilations
from support.errors import one_line
from support.full_disk import full_disk

from torchtitan_magi.cuda import entries, jit


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sources that were compiled, with the cache in a folder of its own."""
    monkeypatch.setenv("TORCHTITAN_MAGI_CACHE", str(tmp_path / "cache"))
    return note_compilations(monkeypatch)


def test_a_variant_is_compiled_once_and_read_without_the_lock(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = jit.cubin("a.cu", {"N": 1})
    with monkeypatch.context() as patch:
        patch.setattr(jit, "locked", None)
        assert jit.cubin("a.cu", {"N": 1}) == first
    assert len(compiled) == 1
    assert jit.cubin("a.cu", {"N": 2}) != first
    assert len(compiled) == 2


def test_an_entry_is_named_as_at_earlier_commits(compiled: list[str]) -> None:
    """The name was computed at commit 7adc6a3: users' caches stay valid."""
    jit.cubin("a.cu", {"N": 1, "M": 2})
    (entry,) = jit.cache_dir().glob("*.cubin")
    assert entry.name == "a-9663de3fb3feaa5ee4298b116b4a0ab7.cubin"
    entry.chmod(0o644)  # as they were written
    jit.cubin("a.cu", {"N": 1, "M": 2})
    assert len(compiled) == 1


@pytest.mark.parametrize("damage", [b"", b"short", bytes(100)])
def test_a_damaged_entry_is_rebuilt(compiled: list[str], damage: bytes) -> None:
    code = jit.cubin("a.cu", {"N": 1})
    (entry,) = jit.cache_dir().glob("*.cubin")
    entry.write_bytes(damage)
    assert jit.cubin("a.cu", {"N": 1}) == code
    entry.write_bytes(entry.read_bytes()[:-1])
    assert jit.cubin("a.cu", {"N": 1}) == code
    assert len(compiled) == 3


def test_a_folder_that_cannot_be_written_to_is_named(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTITAN_MAGI_CACHE", "/proc/nowhere")
    with one_line(r"kernels cannot be kept in /proc/nowhere/kernels .*set TORCHTITAN_MAGI_CACHE"):
        jit.cubin("a.cu", {})
    assert not compiled


def test_a_change_of_the_source_is_a_new_entry(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    jit.cubin("a.cu", {})
    monkeypatch.setattr(jit, "expand_source", lambda name: SMALL + " // changed")
    jit.cubin("a.cu", {})
    assert len(compiled) == 2


def test_includes_are_expanded_once() -> None:
    source = jit.expand_source("ffa_forward.cu")
    assert '#include "' not in source
    assert source.count("struct alignas(64) TensorMap") == 1


PROCESS = """
import sys, time
from pathlib import Path
from torchtitan_magi.cuda import jit
def slow_compile(name, source, macros):
    with open(sys.argv[1], "a") as log:
        log.write("compiled\\n")
    time.sleep(0.5)
    return b"code", ""
jit.compile_source = slow_compile
assert jit.cubin("rows.cu", {}) == b"code"
"""


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    env = {"TORCHTITAN_MAGI_CACHE": str(tmp_path / "cache"), "PYTHONPATH": root, "PATH": "/usr/bin:/bin"}
    log = tmp_path / "log"
    ranks = [subprocess.Popen([sys.executable, "-c", PROCESS, str(log)], env=env) for _ in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert log.read_text().count("compiled") == 1


# --------------------------------------------------------------------------------------------------- other users, links

STRANGER = 12345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def modes(folder: Path) -> list[int]:
    return [path.stat().st_mode & 0o777 for path in (folder, *sorted(folder.iterdir()))]


def test_no_umask_opens_the_folder(compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTITAN_MAGI_CACHE", str(tmp_path / "new" / "cache"))
    before = os.umask(0)
    try:
        jit.cubin("a.cu", {})
    finally:
        os.umask(before)
    assert modes(jit.cache_dir()) == [0o700, 0o600, 0o600]  # with an entry and its lock
    assert modes(tmp_path / "new") == [0o700, 0o700]


def test_kernels_are_private_in_a_cache_that_a_group_writes_to(compiled: list[str], tmp_path: Path) -> None:
    """As data of earlier versions, or a group's own hand, may leave it."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o775)
    first = jit.cubin("a.cu", {})
    assert jit.cubin("a.cu", {}) == first
    assert len(compiled) == 1
    assert modes(jit.cache_dir()) == [0o700, 0o600, 0o600]


def entry_of_a_stranger(code: bytes) -> Path:
    """An entry with a digest of its own, in the place of ours."""
    jit.cubin("a.cu", {})
    (entry,) = jit.cache_dir().glob("*.cubin")
    entry.write_bytes(hashlib.sha256(code).digest() + code)
    return entry


def replace_by_link(entry: Path) -> None:
    os.symlink(entry.rename(entry.parent.parent / "elsewhere"), entry)


def replace_by_pipe(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda entry: os.chown(entry, STRANGER, -1), marks=AS_ROOT, id="of another user"),
        pytest.param(lambda entry: entry.chmod(0o620), id="group may write"),
        pytest.param(lambda entry: entry.chmod(0o602), id="all may write"),
        pytest.param(replace_by_link, id="link"),
        pytest.param(replace_by_pipe, id="pipe"),
    ],
)
def test_an_entry_that_another_user_could_have_written_is_not_loaded(spoil, compiled: list[str]) -> None:
    entry = entry_of_a_stranger(b"evil")
    spoil(entry)
    assert jit.cubin("a.cu", {}) != b"evil"
    assert jit.cubin("a.cu", {}) != b"evil"
    assert len(compiled) == 2
    assert not entry.is_symlink()
    assert modes(entry.parent) == [0o700, 0o600, 0o600]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(
            lambda folder: os.chown(folder, STRANGER, -1), f"it belongs to user {STRANGER};", marks=AS_ROOT, id="owner"
        ),
        pytest.param(
            lambda folder: folder.chmod(0o770), r"it can be written to by other users \(mode 770\);", id="group"
        ),
        pytest.param(
            lambda folder: folder.chmod(0o1777), r"it can be written to by other users \(mode 1777\);", id="all"
        ),
    ],
)
def test_a_folder_that_another_user_could_write_to_is_refused(spoil, reason: str, compiled: list[str]) -> None:
    entry_of_a_stranger(b"evil")
    spoil(jit.cache_dir())
    for name in ("a.cu", "b.cu"):
        with one_line(f"not loaded from {jit.cache_dir()}, as {reason} run chmod 700"):
            jit.cubin(name, {})
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("user", "mode", "reason"),
    [
        (0, 0o40755, ""),
        (1000, 0o40700, ""),
        (1001, 0o40700, "belongs to user 1001"),
        (1000, 0o40720, "can be written to by other users (mode 720)"),
        (0, 0o41777, "can be written to by other users (mode 1777)"),
    ],
)
def test_root_and_the_user_are_trusted(user: int, mode: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert entries.others_can_write(os.stat_result((mode, 0, 0, 1, user, 0, 0, 0, 0, 0))) == reason


def test_a_link_to_the_folder_is_followed(compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users move caches to larger disks."""
    jit.cubin("a.cu", {})
    os.symlink(tmp_path / "cache", tmp_path / "link")
    monkeypatch.setenv("TORCHTITAN_MAGI_CACHE", str(tmp_path / "link"))
    jit.cubin("a.cu", {})
    assert len(compiled) == 1


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(compiled: list[str], tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    jit.cubin("a.cu", {})
    entry, lock = sorted(jit.cache_dir().iterdir())
    entry.unlink()
    lock.unlink()
    lock.symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match=r"kernels cannot be kept in .*symbolic links: .*\.lock"):
        jit.cubin("a.cu", {})
    assert (tmp_path / "precious").read_text() == "precious"


# ------------------------------------------------------------------------------------- full disks, processes that stop


def test_on_a_full_disk_kernels_are_used_but_not_kept(compiled: list[str], caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with full_disk(8):
            assert jit.cubin("a.cu", {}).startswith(b"code")
    assert len(compiled) == 2
    assert [path.suffix for path in jit.cache_dir().iterdir()] == [".lock"]
    assert len(caplog.messages) == 2
    assert f".cubin is not kept in {jit.cache_dir()} (File too large)" in caplog.text
    assert "make room there, or set TORCHTITAN_MAGI_CACHE" in caplog.text


def test_without_room_for_a_lock_kernels_are_used(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stock = os.open

    def full(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            raise OSError(28, "No space left on device", path)
        return stock(path, flags, *args, **kwargs)

    jit.cache_dir().mkdir(mode=0o700, parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        assert jit.cubin("a.cu", {}).startswith(b"code")
    assert not list(jit.cache_dir().iterdir())


STOPPED = """
import os, signal
from torchtitan_magi.cuda import jit
jit.compile_source = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
jit.expand_source = lambda name: "source"
jit.cubin("a.cu", {})
"""


def test_a_stopped_holder_of_the_lock_is_named_and_not_waited_for(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "expand_source", lambda name: "source")
    monkeypatch.setattr(entries, "PATIENCE", 0.2)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    holder = subprocess.Popen([sys.executable, "-c", STOPPED], env=environment)
    try:
        assert os.WIFSTOPPED(os.waitpid(holder.pid, os.WUNTRACED)[1])
        with caplog.at_level(logging.WARNING):
            assert jit.cubin("a.cu", {}).startswith(b"code")
        assert jit.cubin("a.cu", {}).startswith(b"code")  # which needs no lock
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    (message,) = caplog.messages
    assert message.startswith(f"process {holder.pid} on ")
    assert "has held the lock a-" in message
    assert "kill -9" in message
    assert len(compiled) == 1


def test_what_does_not_compile_says_so(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core")
    pytest.importorskip("cuda.bindings.nvrtc")
    with pytest.raises(RuntimeError, match=r"bad\.cu does not compile"):
        jit.compile_source("bad.cu", "not C++", {})
