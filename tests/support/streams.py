"""What the tests of packed streams share: taking and resuming, joined ranks, counts, memory."""

import faulthandler
import itertools
import os
import subprocess
import sys

import pytest


def abort(*_):
    """Ends this process as a fault in native code does, without the page that pytest would print of it."""
    faulthandler.disable()
    os.abort()


def small_blocks(num_bytes):
    """Blocks of so many bytes of text, so that little data has many windows; and all their plans are kept."""
    patch = pytest.MonkeyPatch()
    patch.setattr("torchtitan_magi.data.records.record_file.BLOCK_BYTES", num_bytes)
    patch.setattr("torchtitan_magi.data.packs.stream._FEWEST_KEPT", 1)
    return patch


def with_small_blocks(num_bytes):
    """The same as a fixture for all tests of a module."""

    @pytest.fixture(scope="module", autouse=True)
    def blocks():
        patch = small_blocks(num_bytes)
        yield
        patch.undo()

    return blocks


def take(items, count=None):
    return list(itertools.islice(items, count))


def resume(packs, state):
    """The data set or loader, set to a state."""
    packs.load_state_dict(state)
    return packs


def join(shards):
    """The stream of which rank r of n has every n-th item from item r on; shards are equally long."""
    return [item for row in zip(*shards, strict=True) for item in row]


def assert_nothing_is_lost(counts):
    left_out = counts.unlabeled + counts.skipped + counts.equal + counts.long_prompts
    assert counts.documents + counts.extra_pieces == counts.pieces + left_out
    assert counts.tokens_read - counts.shared_tokens == counts.tokens + counts.truncated_tokens + counts.tokens_left_out


MEASURED = """
import resource, sys
path, code, *sys.path[:0] = sys.argv[1:]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
imports, code = code.split("\\n\\n")
exec(imports)
before = peak()
exec(code)
print(peak() - before)
"""


def in_a_process(code, path):
    """Lines that a process prints, and by how many bytes its peak memory grows.

    Args:
        code: imports, an empty line, what is measured, which finds the file's path in `path`.
    """
    command = [sys.executable, "-c", MEASURED, path, code, *filter(None, sys.path)]
    *printed, grown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return printed, int(grown)
