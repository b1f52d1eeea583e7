"""Compiles the CUDA sources in `kernels/` with NVRTC through `cuda.core`, keeps the result on disk, loads it.

A cache entry is one file, named by the hash of everything that decides the code: the source with its includes
expanded, the macros, the compiler options. It holds the SHA-256 of the machine code, then the machine code, so that a
truncated or damaged entry is noticed and built again. Ranks that start together take a file lock: one compiles, the
others read. What another user could have written is never loaded (`entries.py`).
"""

import functools
import hashlib
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_magi.cuda.entries import locked, open_folder, read_entry, write_entry
from torchtitan_magi.files import cache_folder
from torchtitan_magi.wording import one_line, shown

ARCH = "sm_90a"
STD = "c++17"

Macros = Mapping[str, int]


def kernel_dir() -> Path:
    """The folder of the `.cu` sources: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "sm90.cuh").exists():
            return folder
    raise FileNotFoundError("the CUDA sources (kernels/*.cu) are missing from this installation of torchtitan_magi")


def cache_dir() -> Path:
    """Where machine code is kept: kernels/ in $TORCHTITAN_MAGI_CACHE, or in torchtitan_magi under the user's cache
    folder. A folder of its own, as tokens may lie in one that others write to."""
    return cache_folder("kernels")


def expand_source(name: str) -> str:
    """The text of `kernels/<name>` with our own includes expanded, each once."""
    folder, seen = kernel_dir(), set()

    def expand(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        text = (folder / file).read_text()
        text = text.replace("#pragma once\n", "")
        return re.sub(r'^#include "(.+)"$', lambda m: expand(m[1]), text, flags=re.MULTILINE)

    return expand(name)


def compile_source(name: str, source: str, macros: Macros) -> tuple[bytes, str]:
    """Compiles one variant; needs no GPU.

    Returns:
        cubin: machine code for sm_90a.
        log: what ptxas reports: registers, spills, stack frame, remarks on wgmma.

    Raises:
        RuntimeError: the source does not compile, or NVRTC is missing.
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise RuntimeError("the FFA kernel is compiled through the package cuda-core; install it") from error
    options = ProgramOptions(
        name=name,
        arch=ARCH,
        std=STD,
        device_as_default_execution_space=True,
        ptxas_options=["-v"],
        define_macro=[(k, str(v)) for k, v in macros.items()] or None,
    )
    log = io.StringIO()
    try:
        code = Program(source, "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        raise RuntimeError(f"{name} does not compile with {dict(macros)}:\n{error}") from error
    return bytes(code), log.getvalue()


def cubin(name: str, macros: Macros) -> bytes:
    """Machine code of one variant of `kernels/<name>`, from the disk cache or compiled now.

    Raises:
        ValueError: the cache folder is not known, cannot be written to, or another user could write to it.
    """
    source = expand_source(name)
    key = hashlib.sha256(repr((name, source, sorted(macros.items()), ARCH, STD)).encode()).hexdigest()[:32]
    path, entry = cache_dir(), f"{Path(name).stem}-{key}"
    try:
        with open_folder(path) as folder:
            code = read_entry(folder, f"{entry}.cubin")
            if code is None:
                with locked(folder, f"{entry}.lock"):
                    code = read_entry(folder, f"{entry}.cubin")  # another process may have compiled it while we waited
                    if code is None:
                        code, _ = compile_source(name, source, macros)
                        write_entry(folder, f"{entry}.cubin", code)
    except OSError as error:
        raise ValueError(
            f"kernels cannot be kept in {shown(path)} ({one_line(error)}); set TORCHTITAN_MAGI_CACHE to a folder "
            "that can be written to"
        ) from error
    return code


def load_kernel(name: str, function: str, macros: tuple[tuple[str, int], ...], shared_bytes: int, device: int) -> int:
    """The driver's handle of `function` in one variant of `kernels/<name>`.

    Args:
        macros: the variant.
        shared_bytes: dynamic shared memory per block.
        device: the current device; the handle is valid there.
    """
    from cuda.bindings import driver

    code = cubin(name, dict(macros))
    library = check(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    kernel = check(driver.cuLibraryGetKernel(library, function.encode()))
    handle = check(driver.cuKernelGetFunction(kernel))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuKernelSetAttribute(limit, shared_bytes, kernel, check(driver.cuDeviceGet(device))))
    return int(handle)


@functools.cache
def is_hopper(device: int) -> bool:
    """Whether the device has compute capability 9.0, for which ARCH is compiled."""
    import torch

    return torch.cuda.get_device_capability(device) == (9, 0)


def check(result: tuple[Any, ...]) -> Any:
    """Unpacks a driver call's (status, values...); raises RuntimeError when the call failed."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver call failed: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)
