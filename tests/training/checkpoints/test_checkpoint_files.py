"""A checkpoint that is not whole, or cannot be written, is one line with its path; its bytes have digests."""

import hashlib
import os
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.errors import one_line
from support.full_disk import full_disk
from support.processes import python
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader

from torchtitan_magi import verify
from torchtitan_magi.training.checkpoints import digests

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE = {"weight": torch.arange(5000.0), "bias": torch.ones(3), "step": 7}


def save(folder, state=STATE):
    checkpoint.save(dict(state), storage_writer=digests.DigestWriter(folder), checkpoint_id=folder, no_dist=True)
    return Path(folder)


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "step-2")


def flip(path, where):
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)


def test_what_is_saved_is_whole_and_loads(folder, capsys):
    digests.check_sizes(folder)
    files = [path for path in folder.iterdir() if path.name != "SHA256SUMS"]
    assert digests.check_digests(folder) == sum(path.stat().st_size for path in files)
    assert sum(digests.check_digests(folder, rank, 3) for rank in range(3)) == digests.check_digests(folder)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)
    loaded = {"weight": torch.zeros(5000), "bias": torch.zeros(3), "step": 0}
    checkpoint.load(loaded, checkpoint_id=folder, no_dist=True)
    assert torch.equal(loaded["weight"], STATE["weight"])
    assert loaded["step"] == 7
    assert verify.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder} is whole: 0.00 GiB\n"


@pytest.mark.parametrize(("name", "where"), [("__0_0.distcp", 3000), ("__0_0.distcp", -3), (".metadata", 40)])
def test_a_flipped_bit_is_named(folder, name, where, capsys):
    flip(folder / name, where)
    with pytest.raises(ValueError, match=rf"^{folder}/{name} is damaged: .*; load another checkpoint, or copy .*$"):
        digests.check_digests(folder)
    assert verify.main([str(folder), str(save(folder.parent / "step-4"))]) == 1
    printed = capsys.readouterr()
    assert f"{name} is damaged" in printed.err
    assert "step-4 is whole" in printed.out


def test_each_file_is_checked_by_one_rank(folder):
    flip(folder / "__0_0.distcp", 100)  # the second name
    digests.check_digests(folder, 0, 2)
    with pytest.raises(ValueError, match="is damaged"):
        digests.check_digests(folder, 1, 2)


def test_a_shard_without_a_digest_is_named(folder, capsys):
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    (folder / "SHA256SUMS").write_text(f"{lines[0]}\n")
    assert verify.main([str(folder)]) == 1
    assert "SHA256SUMS has no digest of __0_0.distcp, which .metadata names; load" in capsys.readouterr().err


def test_what_an_unfinished_save_by_more_ranks_left_is_no_fault(folder):
    (folder / "__7_0.distcp").write_bytes(b"")
    assert verify.main([str(folder)]) == 0


def truncate(folder):
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"step-2/__0_0.distcp has [\d,]+ bytes, but [\d,]+ were written; load another"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), r"step-2/__0_0.distcp is missing, which .metadata names"),
        (lambda folder: (folder / ".metadata").unlink(), r"step-2 is no finished checkpoint: it has no .metadata"),
        (lambda folder: (folder / ".metadata").write_bytes(b"garbage"), r"step-2/.metadata cannot be read \(Unpick"),
        (lambda folder: (folder / ".metadata").write_bytes(b""), r"step-2/.metadata cannot be read \(EOFError"),
        (
            lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(3)),
            r"step-2/.metadata cannot be read \(Unpickl",
        ),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_one_line(folder, damage, message):
    damage(folder)
    with one_line(message):
        digests.check_sizes(folder)


def test_safetensors_without_metadata_name_the_option(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has safetensors and no .metadata; set checkpoint.initial_load_in_hf"):
        digests.check_sizes(tmp_path)


def test_the_command_names_an_export(tmp_path, capsys):
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").touch()
    assert verify.main([str(tmp_path)]) == 0
    assert f"{tmp_path} is an export, which has no digests; ask its model with --generate" in capsys.readouterr().out
    with pytest.raises(ValueError, match="is an export in safetensors, without digests; give a checkpoint to resume"):
        digests.check_digests(tmp_path)


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        (["unfinished/sharded"], "model.safetensors.index.json"),
        (["unfinished/sharded", "model-00001-of-00001.safetensors"], "model.safetensors.index.json"),
        (["adapter_model.safetensors"], "adapter_config.json"),
        (["model-00001-of-00001.safetensors"], "config.json"),
    ],
)
def test_the_command_takes_no_export_that_was_cut_off_for_whole(present, missing, tmp_path, capsys):
    for name in present:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    assert verify.main([str(tmp_path)]) == 1
    assert f"{tmp_path} is an export that was cut off, or copied in part; copy it again, or" in capsys.readouterr().err
    (tmp_path / missing).write_text('{"weight_map": {"x": "model-00001-of-00001.safetensors"}}')
    save_file({"x": torch.zeros(1)}, tmp_path / "model-00001-of-00001.safetensors")
    assert verify.main([str(tmp_path)]) == 0


def test_the_command_takes_no_export_that_was_copied_in_part_for_whole(tmp_path, capsys):
    path, index = tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model.safetensors.index.json"
    save_file({"x": torch.zeros(100)}, path)
    (tmp_path / "config.json").touch()
    index.write_text(
        '{"weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}}'
    )
    assert verify.main([str(tmp_path)]) == 1
    assert f"{index} names model-00002-of-00002.safetensors, which is not there" in capsys.readouterr().err
    shutil.copy(path, tmp_path / "model-00002-of-00002.safetensors")
    assert verify.main([str(tmp_path)]) == 1
    assert f"{index} names y, which no file has; copy them again" in capsys.readouterr().err
    index.unlink()
    os.truncate(path, 200)
    assert verify.main([str(tmp_path)]) == 1
    assert f"{path}: " in capsys.readouterr().err


def test_the_command_names_a_folder_that_is_not_there(tmp_path, capsys):
    assert verify.main([str(tmp_path / "step-1")]) == 1
    assert f"{tmp_path}/step-1 is no folder; give that of a checkpoint" in capsys.readouterr().err


def test_the_command_names_the_checkpoints_of_a_folder(tmp_path, capsys):
    saved = tmp_path / "checkpoint"
    (saved / "step-10").mkdir(parents=True)
    (saved / "step-20").mkdir()
    said = f"{saved} has the checkpoints step-10, step-20; give one of them, or {saved}/step-*"
    for folder in (saved, tmp_path):  # that of a run
        assert verify.main([str(folder)]) == 1
        assert said in capsys.readouterr().err


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path, capsys):
    assert verify.main([str(tmp_path)]) == 1
    assert f"{tmp_path} is no finished checkpoint: it has no .metadata" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "no digest\n", ""])
def test_digests_that_are_not_there(folder, text, capsys):
    (folder / "SHA256SUMS").unlink()
    if text is not None:
        (folder / "SHA256SUMS").write_text(text)
    assert verify.main([str(folder)]) == 1
    assert "SHA256SUMS has no digests that can be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"weight": torch.zeros(4000)}, "rank 0: ValueError: Size mismatch between saved .* for weight"),
        ({"other": torch.zeros(4000)}, "rank 0: RuntimeError: Missing key in checkpoint state_dict: other"),
    ],
)
def test_another_model_is_one_line(folder, state, message):
    line = rf"^{folder} cannot be loaded into this run: {message}.*; use the model"
    with pytest.raises(ValueError, match=line), digests.loading(folder):
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)


def fill_disk(folder):
    """Makes the disk full as far as rank 0's shard is concerned."""
    folder.mkdir()
    (folder / "__0_0.distcp").symlink_to("/dev/full")


def test_a_full_disk_is_one_line(tmp_path):
    fill_disk(tmp_path / "step-2")
    said = rf"^{tmp_path}/step-2 could not be saved: rank 0: .*GiB free: make room"
    with one_line(said, OSError), digests.saving(tmp_path / "step-2"):
        save(tmp_path / "step-2")


@pytest.mark.parametrize(
    "write", [lambda path: save_file({"weight": torch.zeros(4000)}, path), lambda path: path.write_bytes(bytes(4000))]
)
def test_an_export_without_room_is_one_line(write, tmp_path):
    said = rf"^{tmp_path} could not be saved: .*File too large.*GiB free: make room"
    with one_line(said, OSError), digests.saving(tmp_path), full_disk():
        write(tmp_path / "model.safetensors")


def test_a_checkpoint_that_is_written_over_is_unfinished_meanwhile(folder):
    """Otherwise the old list of contents would stand beside new files."""
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="could not be saved"), digests.saving(folder):
        save(folder)
    assert not (folder / ".metadata").exists()
    assert not (folder / "SHA256SUMS").exists()
    (folder / "__0_0.distcp").unlink()
    digests.check_digests(save(folder, STATE | {"bias": torch.zeros(3)}))


ASYNC = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan_magi.training.checkpoints import digests

def save(folder):
    writer, kind = digests.DigestWriter(folder), AsyncCheckpointerType.PROCESS
    options = {"storage_writer": writer, "checkpoint_id": folder, "async_checkpointer_type": kind}
    checkpoint.async_save({"weight": torch.arange(100.0)}, **options).result()

if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save(sys.argv[1])
    with digests.saving(sys.argv[2]):
        save(sys.argv[2])
"""


def test_a_save_in_another_process_has_digests_and_one_line(tmp_path):
    """torchtitan's async_with_pinned_mem, but for the pinned memory."""
    (tmp_path / "script.py").write_text(ASYNC)
    fill_disk(tmp_path / "full")
    result = python(tmp_path / "script.py", tmp_path / "step-2", tmp_path / "full")
    assert digests.check_digests(tmp_path / "step-2") > 400
    lines = [line for line in result.stderr.splitlines() if " - INFO - " not in line]  # of the process that saves
    assert f"OSError: {tmp_path}/full could not be saved: rank 0: " in lines[-1]


class Runs:
    """Runs a program when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("inside", [False, True])
def test_a_list_that_would_run_something_runs_nothing_and_is_one_line(folder, tmp_path, inside, capsys):
    value = FileSystemReader(folder).read_metadata()
    value.planner_data = Runs(tmp_path / "it ran")
    content = pickle.dumps(value if inside else value.planner_data)
    (folder / ".metadata").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    lines = [f"{digest}  .metadata" if line.endswith(".metadata") else line for line in lines]
    (folder / "SHA256SUMS").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read \(UnpicklingError: it names posix\.mkdir, which "):
        digests.check_sizes(folder)
    assert verify.main([str(folder)]) == 1
    assert "it names posix.mkdir" in capsys.readouterr().err
    assert not (tmp_path / "it ran").exists()


def test_a_list_that_names_files_outside_of_the_folder_is_refused(folder):
    metadata = FileSystemReader(folder).read_metadata()
    for item in metadata.storage_data.values():
        item.relative_path = f"../{folder.name}/{item.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"it names '\.\./step-2/__0_0\.distcp', outside of the folder"):
        digests.check_sizes(folder)


@pytest.mark.parametrize("name", ["a\0b", "../step-1/x", "/etc/passwd"])
def test_digests_of_files_outside_of_the_folder_are_refused(name, folder):
    with (folder / "SHA256SUMS").open("a") as file:
        file.write(f"{'0' * 64}  {name}\n")
    with pytest.raises(ValueError, match=r"has no digests that can be read \(.*outside of the folder\); load another"):
        digests.check_digests(folder)


def test_a_list_of_all_kinds_of_tensors_is_read(tmp_path):
    dtypes = [torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
    state = {str(dtype): torch.zeros(2, dtype=dtype) for dtype in dtypes} | {"nested": {"list": [1, {"a": "b"}]}}
    folder = save(tmp_path / "step-1", state)
    plain = FileSystemReader(folder).read_metadata()
    assert digests.read_metadata(folder).state_dict_metadata == plain.state_dict_metadata
