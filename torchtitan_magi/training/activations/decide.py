"""Decides before the first step what each layer keeps, the same on all ranks, and corrects the next decision."""

import json
import logging
import socket
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan_magi.files import read_text, write_whole
from torchtitan_magi.machine import available_memory
from torchtitan_magi.sizing.gpus import GPUS, H100
from torchtitan_magi.sizing.keeping.kinds import ALL, Keeping, as_option, in_words
from torchtitan_magi.sizing.memory import GIB, host_memory, states_on_host
from torchtitan_magi.sizing.predicted_run import Place, predict_run
from torchtitan_magi.sizing.run_file import NO_DATA
from torchtitan_magi.sizing.run_setup import Setup
from torchtitan_magi.sizing.sample_packs import PACKS, first_packs, make_packs
from torchtitan_magi.training.batches.pack_loader import PackLoader
from torchtitan_magi.training.process.all_ranks import agreed, gathered, on_first_rank
from torchtitan_magi.wording import one_line, quoted, shown

logger = logging.getLogger(__name__)

HOST_SHARE = 0.6  # of the host's memory that is available, for what layers offload
FILE = "activation_memory.json"  # in job.dump_folder: bytes measured beyond what was predicted, by setup


def decided(setup: Setup, folder: Path, loader: PackLoader | None, capacity: int) -> Setup:
    """The setup with what each layer keeps: what magi.keep says, else the fastest mix that fits. Logs it.

    A collective of all ranks: the first one decides, for the least memory that any of them has. Others may have GPUs of
    another kind, or a place in which they exchange rows otherwise.

    Args:
        folder: job.dump_folder, where ``note_beyond`` has noted what an earlier run took.
        loader: of the packs that are trained; None: they are not known yet.
        capacity: bytes of a GPU that the run may take.
    """
    if not setup.gpu:
        keeping = setup.keeping or (Keeping(ALL),) * setup.model.num_layers
        logger.info(f"Activation checkpointing: {in_words(keeping)}")
        return replace(setup, keeping=keeping)
    mine = capacity - beyond_of_last(setup, folder), available_memory(), socket.gethostname()
    capacities, available, hosts = zip(*gathered(mine), strict=True)
    most_ranks = max(Counter(hosts).values())
    capacity, host = min(capacities), int(HOST_SHARE * min(available) / most_ranks)
    called = torch.cuda.get_device_name()
    gpu = next((gpu for name, gpu in GPUS.items() if name in called), H100)
    packs = _packs(setup, loader)
    place = Place(replace(gpu, capacity=capacity), most_ranks, packs, host=host)
    run = on_first_rank(lambda: predict_run(setup, place))
    keeping, of_host = run.setup.keepings, host_memory(run.setup) / GIB
    beside = f", {of_host:.1f} of {host / GIB:.1f} GiB of the host's" if of_host else ""
    again = run.time.parts.get("recomputation", 0.0) / run.time.total
    taken, most = host_memory(run.setup) + states_on_host(setup), min(available) // most_ranks
    if setup.keeping and taken > most:
        raise ValueError(
            f"magi.keep is {quoted(as_option(keeping))}, with which each GPU's process takes {taken / GIB:.1f} GiB of "
            f"the host's memory ({of_host:.1f} of layers), where {most / GIB:.1f} are available to it; offload fewer "
            "layers, or leave magi.keep out"
        )
    logger.info(
        f"Activation checkpointing: {in_words(keeping)}; {run.memory.total / GIB:.1f} of {capacity / GIB:.1f} GiB"
        f"{beside}; recomputation {again:.0%} of a step "
        f'(magi.keep = "{as_option(keeping)}" repeats this)'
    )
    return replace(setup, keeping=keeping)


def _packs(setup: Setup, loader: PackLoader | None) -> tuple[Any, ...]:
    """A run's first packs, the same on all ranks; those of the histogram where they are not known, which is logged."""
    if loader is None:
        logger.info(f"The data are not known yet: what layers keep is decided for documents of the {NO_DATA}")
        return tuple(make_packs(NO_DATA, setup.seq_len, PACKS))
    path, read = loader.dataset.records.paths, partial(first_packs, loader.dataset, PACKS)
    return tuple(agreed(path, read, lambda packs: f"packs with checksum {zlib.crc32(b''.join(map(bytes, packs))):08x}"))


def beyond_of_last(setup: Setup, folder: Path) -> int:
    """Bytes on a GPU beyond what is predicted for a setup, as its earlier runs noted them."""
    return _read(folder).get(_key(setup), 0)


def note_beyond(setup: Setup, folder: Path, beyond: int) -> None:
    """Notes for later decisions about a setup how many bytes on a GPU a run took beyond what was predicted. The most
    that is noted stays: a run that took less may have kept less, or had packs that bring fewer rows."""
    most = max(beyond, beyond_of_last(setup, folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE, json.dumps({**_read(folder), _key(setup): most}).encode())
    except OSError as error:  # a run does not end for want of a note
        logger.warning(
            f"{shown(folder / FILE)} cannot be written ({one_line(error)}); later runs decide without what this took"
        )


def _read(folder: Path) -> dict[str, int]:
    """Bytes by setup; nothing where there is no such file, or no longer a whole one."""
    with suppress(OSError, ValueError):
        if isinstance(found := json.loads(read_text(folder / FILE)), dict):
            return {key: value for key, value in found.items() if isinstance(value, int)}
    return {}


def _key(setup: Setup) -> str:
    """What tells setups apart, whatever their layers keep."""
    return f"{zlib.crc32(repr(replace(setup, keeping=(), cp_per_machine=None)).encode()):08x}"
