"""The disk cache of compiled kernels: one compile per variant, damage is noticed, sources decide the key."""

import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_magi.cuda import jit

SMALL = 'extern "C" __global__ void f(int* x) { *x = N; }'


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts compilations of a small source, with the cache in a folder of its own."""
    calls: list[str] = []

    def fake_compile(name: str, source: str, macros: jit.Macros) -> tuple[bytes, str]:
        calls.append(name)
        return f"code {source} {sorted(macros.items())}".encode(), ""

    monkeypatch.setenv("TORCHTITAN_MAGI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "compile_source", fake_compile)
    monkeypatch.setattr(jit, "expand_source", lambda name: SMALL)
    return calls


def test_a_variant_is_compiled_once_and_read_without_the_lock(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = jit.cubin("a.cu", {"N": 1})
    with monkeypatch.context() as patch:
        patch.setattr(jit, "_locked", None)
        assert jit.cubin("a.cu", {"N": 1}) == first
    assert len(compiled) == 1
    assert jit.cubin("a.cu", {"N": 2}) != first
    assert len(compiled) == 2


def test_an_entry_is_named_as_at_earlier_commits_and_other_users_may_read_it(compiled: list[str]) -> None:
    """The name was computed at commit 7adc6a3: users' caches stay valid."""
    jit.cubin("a.cu", {"N": 1, "M": 2})
    (entry,) = jit.cache_dir().glob("*.cubin")
    assert entry.name == "a-9663de3fb3feaa5ee4298b116b4a0ab7.cubin"
    assert entry.stat().st_mode & 0o444 == 0o444


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
    with pytest.raises(
        ValueError, match=r"kernels cannot be kept in /proc/nowhere .*set TORCHTITAN_MAGI_CACHE"
    ) as error:
        jit.cubin("a.cu", {})
    assert "\n" not in str(error.value)
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
    root = str(Path(__file__).resolve().parent.parent)
    env = {"TORCHTITAN_MAGI_CACHE": str(tmp_path / "cache"), "PYTHONPATH": root, "PATH": "/usr/bin:/bin"}
    log = tmp_path / "log"
    ranks = [subprocess.Popen([sys.executable, "-c", PROCESS, str(log)], env=env) for _ in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert log.read_text().count("compiled") == 1


def test_what_does_not_compile_says_so(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core")
    pytest.importorskip("cuda.bindings.nvrtc")
    with pytest.raises(RuntimeError, match=r"bad\.cu does not compile"):
        jit.compile_source("bad.cu", "not C++", {})
