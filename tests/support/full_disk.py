"""A disk without room, as far as one process can make one: no file grows beyond a few bytes."""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(num_bytes=64):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
