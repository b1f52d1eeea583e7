"""Files mapped into memory. Python's own mapping keeps a descriptor of each file, and a data set has many files."""

import ctypes
import mmap
import os
import weakref

import numpy as np

from torchtitan_magi.files import regular_file

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """A file in memory, unmapped when no array shows it any more."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}
        weakref.finalize(self, _libc.munmap, address, size).atexit = False


def mapped(path: str | os.PathLike[str]) -> np.ndarray:
    """The bytes of a file: uint8 [size], read-only. Raises FileNotFoundError, OSError."""
    regular_file(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:  # nothing to map
            return np.zeros(0, np.uint8)
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(path))
    return np.asarray(_Mapping(address, size))
