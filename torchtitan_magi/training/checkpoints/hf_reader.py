"""Layouts of Hugging Face safetensors: where the tensors lie that published checkpoints name as torchtitan does.

transformers loads two other layouts as well, and so does this reader: all experts of a layer in one tensor, as
transformers 5 has them in memory, and names without ``model.``, of a model that was saved without its output layer.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torchtitan_magi.models.names import ADAPTERS

BASE = "model."
BEGINNINGS = (BASE, "lm_head.", "mtp.", "language_model.")  # of published names
KIMI = "language_model.model.blocks.", "language_model.model.layers."  # what transformers 5 writes, what is published
OUTPUT = "lm_head.weight"
EMBEDDINGS = "model.embed_tokens.weight", "model.language_model.embed_tokens.weight"  # beside an output of that name
FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: in the stored one ``name``; in all of it, or in some rows of an expert's part.

    shape: of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    first_row: int = 0

    def read(self, file: Any, slices: tuple[slice, ...]) -> Tensor:
        """These slices of the tensor. file: what ``safe_open`` gave."""
        if self.expert is None:
            return file.get_slice(self.name)[slices]  # type: ignore[no-any-return]
        rows, *others = slices
        rows = slice(self.first_row + rows.start, self.first_row + rows.stop)
        return file.get_slice(self.name)[(self.expert, rows, *others)]  # type: ignore[no-any-return]


def places_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """Tensors by their names in a published checkpoint -> their places.

    A stored tensor whose name is not to be changed, as another has that name, keeps its own.

    Args:
        shapes: of the stored tensors, by name.
    """
    places: dict[str, Place] = {}
    others = []
    for name in shapes:
        found = dict(_places_in(name, shapes))
        if list(found) == [name]:
            places |= found
        else:
            others.append((name, found))
    for name, found in others:
        places |= {name: Place(name, shapes[name])} if found.keys() & places.keys() else found
    if OUTPUT in places:  # transformers ties the embedding to it if it is the only one
        places = dict.fromkeys(EMBEDDINGS, places[OUTPUT]) | places
    return places


def _places_in(name: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Place]]:
    """What a stored tensor holds."""
    shape, full_name = shapes[name], name.replace(*KIMI) if name.startswith(BEGINNINGS) else BASE + name
    match = FUSED.fullmatch(full_name)
    if match is None or f"{name}_bias" in shapes or len(shape) != 3:  # gpt-oss has them so in its published checkpoints
        yield full_name, Place(name, shape)
        return
    number, rows, columns = shape
    parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
    part = rows // len(parts), columns
    for expert in range(number):
        for place, projection in enumerate(parts):
            yield f"{match[1]}.{expert}.{projection}_proj.weight", Place(name, part, expert, place * part[0])


class WeightsReader(HuggingFaceStorageReader):
    """torch's, which finds each tensor by the name that it has in a published checkpoint, whatever the layout."""

    places: dict[str, Place]

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        stored, files = metadata.state_dict_metadata, metadata.storage_data
        self.places = places_of({name: tuple(tensor.size) for name, tensor in stored.items()})
        metadata.state_dict_metadata, metadata.storage_data = {}, {}
        for name, place in self.places.items():
            whole: Any = stored[place.name]
            tensor = whole if place.expert is None else _part(whole, place)
            metadata.state_dict_metadata[name] = tensor
            for there, here in zip(whole.chunks, tensor.chunks, strict=True):
                file = files[MetadataIndex(place.name, there.offsets)]
                metadata.storage_data[MetadataIndex(name, here.offsets)] = file
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for path, of_file in items.items():
            with safe_open(path, framework="pt") as file:
                for item in of_file:
                    self._read(file, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: Any, item: ReadItem, planner: LoadPlanner) -> None:
        begins_and_lengths = zip(item.storage_offsets, item.lengths, strict=True)
        slices = tuple(slice(begin, begin + length) for begin, length in begins_and_lengths)
        target = planner.resolve_tensor(item).detach()
        target.copy_(self.places[item.storage_index.fqn].read(file, slices))
        planner.commit_tensor(item, target)


def _part(whole: TensorStorageMetadata, place: Place) -> TensorStorageMetadata:
    size = torch.Size(place.shape)
    return replace(whole, size=size, chunks=[ChunkStorageMetadata(torch.Size([0] * len(size)), size)])


def adapter_of_all_layouts(stock: Callable[..., Any], model_config: Any, folder: str | None) -> Any:
    """torchtitan's StateDictAdapter of a model, reading by a ``WeightsReader``, but from quantized checkpoints.
    Low-rank adapters have no names in a checkpoint's files.

    Args:
        stock: makes it. Its own reading of the folder's index, which fails for a single file, is left out.
        folder: of the model's files.
    """
    adapter = stock(model_config, None)
    read_quantized: Callable[..., HuggingFaceStorageReader] = adapter.get_hf_storage_reader

    def reader(path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        return read_quantized(path, from_quantized) if from_quantized else WeightsReader(path)

    to_hf: Callable[[dict[str, Any]], dict[str, Any]] = adapter.to_hf

    def without_adapters(state_dict: dict[str, Any]) -> dict[str, Any]:
        return to_hf({name: x for name, x in state_dict.items() if not ADAPTERS.search(name)})

    adapter.get_hf_storage_reader, adapter.hf_assets_path = reader, folder
    adapter.to_hf = without_adapters
    return adapter
