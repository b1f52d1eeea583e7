"""What a checkpoint has beside the text model that is trained: parts that see pictures, exported as they were."""

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from torchtitan_magi.files import read_text, write_whole
from torchtitan_magi.models.names import of_pictures
from torchtitan_magi.training.checkpoints.hf_weights import INDEX

FILE = "model-pictures.safetensors"


def copy_pictures(source: str | Path, folder: Path, model: str) -> None:
    """Copies the tensors that see pictures, in their dtype, beside exported weights, and names them in the index.

    Args:
        source: of the checkpoint that was trained; nothing is done if it has none.
        folder: of the export.
        model: see ``ModelConfig``.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(Path(source).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys() if of_pictures(model, name)}  # noqa: SIM118
    if not tensors:
        return
    write_whole(folder / FILE, save(tensors, {"format": "pt"}))  # save_file's are for their owner alone
    index = json.loads(read_text(folder / INDEX))
    index["weight_map"] |= dict.fromkeys(tensors, FILE)
    index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps(index, indent=2))
