"""In place of the compiler of kernels: it notes what it is asked for."""

import pytest

from torchtitan_magi.cuda import jit

SMALL = 'extern "C" __global__ void f(int* x) { *x = N; }'


def note_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sources that are compiled from now on, all of them SMALL."""
    calls: list[str] = []

    def compile_source(name: str, source: str, macros: jit.Macros) -> tuple[bytes, str]:
        calls.append(name)
        return f"code {source} {sorted(macros.items())}".encode(), ""

    monkeypatch.setattr(jit, "compile_source", compile_source)
    monkeypatch.setattr(jit, "expand_source", lambda name: SMALL)
    return calls
