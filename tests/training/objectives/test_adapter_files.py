"""Files of adapters: what one rank cannot write ends the export on all of them."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from torchtitan_magi.training.objectives import lora
from torchtitan_magi.training.objectives.lora import save_adapters
from torchtitan_magi.training.settings.options import LoRA


def save_to(folder):
    """Saves the adapters of a model that has none; the name of what is raised."""
    adapter = SimpleNamespace(model_config=SimpleNamespace(first_attention=None, layers=[]))
    dist.group.WORLD.set_timeout(timedelta(seconds=5))
    try:
        save_adapters(Path(folder), [], adapter, LoRA(rank=4), "base", torch.float32)
    except OSError as error:
        return type(error).__name__
    finally:
        dist.group.WORLD.set_timeout(timedelta(seconds=1800))


def test_a_folder_that_cannot_be_written_ends_the_export_on_all_ranks(three_ranks, tmp_path):
    (tmp_path / "file").touch()
    assert three_ranks.run(save_to, str(tmp_path / "file" / "adapters")) == ["NotADirectoryError"] * 3
    assert three_ranks.run(save_to, str(tmp_path / "adapters")) == [None] * 3
    assert {path.name for path in (tmp_path / "adapters").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors"
    }  # fmt: skip


def save_cut_off(folder):
    with mock.patch.object(lora, "write_whole", side_effect=OSError):
        return save_to(folder)


def test_weights_that_are_not_written_have_no_configuration_of_an_earlier_run(three_ranks, tmp_path):
    assert three_ranks.run(save_to, str(tmp_path)) == [None] * 3
    assert three_ranks.run(save_cut_off, str(tmp_path)) == ["OSError"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_model.safetensors"]
