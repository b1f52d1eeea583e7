"""Files of a checkpoint in torch's distributed format: written with SHA-256 digests, checked before they are loaded."""

import hashlib
import io
import itertools
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, _FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan_magi.files import read_text, regular_file, write_whole
from torchtitan_magi.machine import lack
from torchtitan_magi.wording import one_line, quoted, shown

METADATA = ".metadata"  # torch writes it last: a folder without it is no finished checkpoint
DIGESTS = "SHA256SUMS"  # in the format of sha256sum, which can check it, too; torchtitan by itself writes none
ANOTHER = "load another checkpoint, or copy this one again from where it is whole"


class DigestWriter(_FileSystemWriter):
    """torch's writer of checkpoints, which also writes the digests of all files to SHA256SUMS.

    Each rank computes them while it writes, in an asynchronous save in the thread or process that writes; rank 0
    collects them. A checkpoint that is written over counts as unfinished from the first byte on.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.fs = _DigestedFiles()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Removes what marks an earlier checkpoint there as finished; runs on rank 0, before any rank writes."""
        for name in (METADATA, DIGESTS):
            Path(self.path, name).unlink(missing_ok=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Writes the files of one rank; its results end with their digests."""
        self.fs.digests.clear()
        results: Future[list[Any]] = Future()
        results.set_result([*super().write_data(plan, planner).value(), _Digests(self.fs.digests)])
        return results

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Writes the metadata and the digests that all ranks returned; runs on rank 0."""
        parts = list(itertools.chain(*results))
        digests = dict(itertools.chain(*(part.items() for part in parts if isinstance(part, _Digests))))
        super().finish(metadata, [[part for part in parts if isinstance(part, WriteResult)]])
        digests[METADATA] = self.fs.digests[f"{METADATA}.tmp"]
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
        write_whole(Path(self.path, DIGESTS), lines.encode())


def save_with_digests(stock: Callable[..., Any], state_dict: dict[str, Any], **options: Any) -> Any:
    """Calls torch's ``save`` or ``async_save`` with a ``DigestWriter`` where its caller names no writer."""
    if options.get("storage_writer") is None and (folder := options.get("checkpoint_id")) is not None:
        options["storage_writer"] = DigestWriter(folder)
    return stock(state_dict, **options)


class _Digests(dict[str, str]):
    """Digests of the files that one rank wrote, by name."""


class _DigestedFiles(FileSystem):
    """Files whose digests are known once they are written."""

    def __init__(self) -> None:
        self.digests = _Digests()

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with _DigestedStream(io.FileIO(path, "wb")) as stream:
            yield stream
        self.digests[Path(path).name] = stream.sha256.hexdigest()


class _DigestedStream(io.BufferedWriter):
    """A file that is written from its beginning to its end."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return super().write(data)


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of a list of what a checkpoint holds, and no other, which could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is of no checkpoint")
        return super().find_class(module, name)


_TENSORS = {"TensorProperties", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"}
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorStorageMetadata",
        *_TENSORS,
    },
    "torch.distributed._shard.sharded_tensor.metadata": _TENSORS,  # of earlier versions of torch
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"},
}


def check_finished(folder: Path) -> None:
    """Raises ValueError, one line with path and remedy, for a folder without what is written last."""
    if not (folder / METADATA).is_file():
        if any(folder.glob("*.safetensors")):
            raise ValueError(
                f"{shown(folder)} has safetensors and no {METADATA}; set checkpoint.initial_load_in_hf to true to "
                "load them"
            )
        raise ValueError(
            f"{shown(folder)} is no finished checkpoint: it has no {METADATA}, which is written last; give the "
            "folder of a finished one, step-*"
        )


def read_metadata(folder: Path) -> Metadata:
    """The list of what a checkpoint holds and where: a pickle, of which nothing is run.

    torch reads it once more when it loads the checkpoint, without such care: read it before that.

    Raises:
        ValueError: there is none, or it cannot be read; one line with path and remedy.
    """
    check_finished(folder)
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        _check_content(metadata)
        return metadata
    except OSError as error:
        raise _unreadable(path, "cannot be read", error) from None
    except Exception as error:  # a broken pickle can raise anything, also for want of the memory that it asks for
        raise ValueError(f"{shown(path)} cannot be read ({_in_one_line(error)}); {ANOTHER}") from None


def _unreadable(path: Path, what: str, error: BaseException) -> ValueError:
    """The error for a file that the machine lacks something to read, else that is wrong itself."""
    return ValueError(lack(error, shown(path)) or f"{shown(path)} {what} ({_in_one_line(error)}); {ANOTHER}")


def _check_content(metadata: Any) -> None:
    """Raises UnpicklingError for what is no list of tensors and of places in files of the folder."""
    if not isinstance(metadata, Metadata) or not all(isinstance(name, str) for name in metadata.state_dict_metadata):
        raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}, or has names that are no text")
    for item in metadata.storage_data.values():
        if type(item.relative_path) is not str or type(item.offset) is not int or type(item.length) is not int:
            raise pickle.UnpicklingError(f"a place is {quoted(vars(item))}")
    _check_names({item.relative_path for item in metadata.storage_data.values()})


def _check_names(names: set[str]) -> None:
    """Raises ValueError for a name that leads out of the folder, or that no file has."""
    for name in names:
        if "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"it names {quoted(name)}, outside of the folder")


def check_sizes(folder: Path) -> None:
    """Checks that all files of a checkpoint are there and as long as they were written.

    Raises:
        ValueError: one line that names the file and the remedy.
    """
    for name, end in sorted(_file_sizes(read_metadata(folder)).items()):
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{shown(path)} is missing, which {METADATA} names; {ANOTHER}")
        if (size := path.stat().st_size) != end:
            raise ValueError(f"{shown(path)} has {size:,} bytes, but {end:,} were written; {ANOTHER}")


def _file_sizes(metadata: Metadata) -> dict[str, int]:
    """The number of bytes of each file that a checkpoint consists of."""
    ends: dict[str, int] = {}
    for item in metadata.storage_data.values():
        ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
    return ends


def is_export(folder: Path) -> bool:
    """Whether a folder holds an export for transformers or PEFT."""
    return not (folder / DIGESTS).exists() and any(folder.glob("*.safetensors"))


def check_digests(folder: Path, rank: int = 0, world_size: int = 1) -> int:
    """Compares the bytes of a checkpoint's files with SHA256SUMS, which must name all of them.

    Args:
        rank: checks every ``world_size``-th file, so that all ranks together read each file once.

    Returns:
        The number of bytes that this rank has read.

    Raises:
        ValueError: one line that names the file and the remedy.
    """
    path, num_bytes = folder / DIGESTS, 0
    if is_export(folder):
        raise ValueError(
            f"{shown(folder)} is an export in safetensors, without digests; give a checkpoint to resume from"
        )
    try:
        lines = [line.split("  ", 1) for line in read_text(path).splitlines()]
        digests = {name: digest for digest, name in lines}
        if METADATA not in digests:
            raise ValueError(f"{METADATA} is not among them")
        _check_names(set(digests))
    except (OSError, ValueError) as error:
        raise _unreadable(path, "has no digests that can be read", error) from None
    digests = {METADATA: digests[METADATA]} | digests  # rank 0 reads it first
    for name, digest in list(digests.items())[rank::world_size]:
        try:
            regular_file(folder / name)
            with (folder / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                num_bytes += file.tell()
        except OSError as error:
            raise _unreadable(folder / name, "cannot be read", error) from None
        if found != digest:
            raise ValueError(f"{shown(folder / name)} is damaged: its bytes are not those that were written; {ANOTHER}")
    if rank == 0:  # other shards may lie there: an earlier save, by more ranks, was not finished
        for name in sorted(_file_sizes(read_metadata(folder))):
            if name not in digests:
                raise ValueError(f"{shown(path)} has no digest of {shown(name)}, which {METADATA} names; {ANOTHER}")
    return num_bytes


@contextmanager
def loading(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Makes one line of what torch raises when a checkpoint does not fit the run.

    Raises:
        ValueError: names the folder, what does not fit, and the remedy.
    """
    try:
        yield
    except CheckpointException as error:
        raise ValueError(
            f"{shown(folder)} cannot be loaded into this run: {_first_failure(error)}; use the model and the options "
            "that it was saved with, or another checkpoint"
        ) from None


@contextmanager
def saving(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Makes one line of what is raised when a checkpoint or an export cannot be written.

    Raises:
        OSError: names the folder, the reason, the free space of its disk, and the remedy.
    """
    try:
        yield
    except (CheckpointException, SafetensorError, OSError) as error:
        reason = _first_failure(error) if isinstance(error, CheckpointException) else _in_one_line(error)
        existing = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.is_dir())
        free = shutil.disk_usage(existing).free / 2**30
        raise OSError(
            f"{shown(folder)} could not be saved: {reason}; the disk of {shown(existing)} has "
            f"{free:.1f} GiB free: make room, or keep fewer checkpoints by checkpoint.keep_latest_k, and start the run "
            "again"
        ) from None


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"rank {rank}: {_in_one_line(cause)}"


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {one_line(lines[0], 500)}" if lines else type(error).__name__
