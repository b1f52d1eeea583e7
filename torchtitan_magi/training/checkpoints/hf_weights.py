"""Hugging Face safetensors: whether a folder holds the weights of a model, by the headers of its files."""

import json
import math
import re
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_magi.files import read_text, regular_file
from torchtitan_magi.machine import lack
from torchtitan_magi.models.model_config import Experts, LinearAttention, ModelConfig
from torchtitan_magi.models.names import name_in_files, of_pictures
from torchtitan_magi.training.checkpoints.digests import METADATA
from torchtitan_magi.training.checkpoints.hf_reader import EMBEDDINGS, OUTPUT, Place, places_of
from torchtitan_magi.wording import one_line, shown

INDEX = "model.safetensors.index.json"
DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
# What transformers leaves out as well: buffers of older checkpoints, and layers that predict tokens further ahead, as
# DeepSeek V3 has after the others.
LEFT_OUT = re.compile(r"(.*\.)?(rotary_emb|mtp)\..*")
PREDICTING = "eh_proj.weight"  # what such a layer has and another has not
ROWS_COMPARED = 2**14  # at a time
ALWAYS_FLOAT32 = "e_score_correction_bias"  # by which experts are chosen


@dataclass(frozen=True)
class ExportLayout:
    """How an export's weights are stored. The same on all ranks, and so is its ``repr``.

    shards: the number of the file for each tensor, see ``shard_numbers``; float32: names, see ``float32_names``;
    pictures: the model, and the folder of a checkpoint whose parts that see pictures go with it.
    """

    shards: dict[str, int] | None = None
    float32: tuple[str, ...] = ()
    pictures: tuple[str, str] | None = None


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of the model's weights."""
    return {name_in_files(config.model, name): shape for name, shape in _tensor_shapes(config)}


def _tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    dim = config.dim
    yield "model.embed_tokens.weight", (config.vocab_size, dim)
    for number in range(config.num_layers):
        layer = f"model.layers.{number}"
        yield from ((f"{layer}.{name}", shape) for name, shape in _attention(config, number))
        experts = config.experts
        if experts is None or number < experts.num_dense_layers:
            yield from _feed_forward(f"{layer}.mlp", dim, config.hidden_dim)
        else:
            mixture = _gpt_oss_experts if config.model == "gpt_oss" else _experts
            yield from ((f"{layer}.mlp.{name}", shape) for name, shape in mixture(config, experts))
        norms = ("input", "post_attention", *(("pre_feedforward", "post_feedforward") if config.muse else ()))
        yield from ((f"{layer}.{place}_layernorm.weight", (dim,)) for place in norms)
    yield "model.norm.weight", (dim,)
    if not config.tied:
        yield "lm_head.weight", (config.vocab_size, dim)


def _attention(config: ModelConfig, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What the layer of that number has of attention, or in its place."""
    linear, attention = config.linear, _grouped_attention if config.latent is None else _latent_attention
    is_linear = linear is not None and number in linear.layers
    tensors = _linear_attention(linear, config.dim) if linear is not None and is_linear else attention(config)
    yield from ((f"{'linear' if is_linear else 'self'}_attn.{name}", shape) for name, shape in tensors)


def _linear_attention(linear: LinearAttention, dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads, values = linear.num_heads_v, linear.num_heads_v * linear.value_dim
    yield "A_log", (heads,)
    yield "dt_bias", (heads,)
    yield "conv1d.weight", (linear.channels, 1, linear.conv_width)
    for name, rows in {"qkv": linear.channels, "z": values, "a": heads, "b": heads}.items():
        yield f"in_proj_{name}.weight", (rows, dim)
    yield "norm.weight", (linear.value_dim,)
    yield "out_proj.weight", (dim, values)


def _grouped_attention(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    rows_q, rows_kv = config.num_heads_q * config.head_dim, config.num_heads_kv * config.head_dim
    projections = {"q_proj": (rows_q, config.dim), "k_proj": (rows_kv, config.dim), "v_proj": (rows_kv, config.dim)}
    if config.muse:
        projections["gate_proj"] = (rows_q, config.dim)
    if config.model == "qwen3_5":  # a gate beside each query
        projections["q_proj"] = (2 * rows_q, config.dim)
    for name, shape in (projections | {"o_proj": (config.dim, rows_q)}).items():
        yield f"{name}.weight", shape
        if config.model == "gpt_oss":
            yield f"{name}.bias", shape[:1]
    if config.model == "gpt_oss":
        yield "sinks", (config.num_heads_q,)
    if config.model in ("qwen3", "qwen3_5"):
        yield "q_norm.weight", (config.head_dim,)
        yield "k_norm.weight", (config.head_dim,)


def _latent_attention(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    assert config.latent is not None
    latent, heads = config.latent, config.num_heads_q
    if latent.q_rank:
        yield "q_a_proj.weight", (latent.q_rank, config.dim)
        yield "q_a_layernorm.weight", (latent.q_rank,)
        yield "q_b_proj.weight", (heads * config.head_dim, latent.q_rank)
    else:
        yield "q_proj.weight", (heads * config.head_dim, config.dim)
    yield "kv_a_proj_with_mqa.weight", (latent.kv_rank + latent.rope_dim, config.dim)
    yield "kv_a_layernorm.weight", (latent.kv_rank,)
    yield "kv_b_proj.weight", (heads * (config.head_dim - latent.rope_dim + config.value_dim), latent.kv_rank)
    yield "o_proj.weight", (config.dim, heads * config.value_dim)


def _experts(config: ModelConfig, experts: Experts) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "gate.weight", (experts.num_experts, config.dim)
    for number in range(experts.num_experts):
        yield from _feed_forward(f"experts.{number}", config.dim, experts.hidden_dim)
    shared = "shared_experts" if config.latent else "shared_expert"
    if experts.num_shared:
        yield from _feed_forward(shared, config.dim, experts.num_shared * experts.hidden_dim)
    if config.latent:
        yield "gate.e_score_correction_bias", (experts.num_experts,)
    elif experts.num_shared:
        yield "shared_expert_gate.weight", (1, config.dim)


def _gpt_oss_experts(config: ModelConfig, experts: Experts) -> Iterator[tuple[str, tuple[int, ...]]]:
    number, dim, width = experts.num_experts, config.dim, experts.hidden_dim
    yield "router.weight", (number, dim)
    yield "router.bias", (number,)
    yield "experts.gate_up_proj", (number, dim, 2 * width)
    yield "experts.gate_up_proj_bias", (number, 2 * width)
    yield "experts.down_proj", (number, width, dim)
    yield "experts.down_proj_bias", (number, dim)


def _feed_forward(name: str, dim: int, hidden_dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (hidden_dim, dim)
    yield f"{name}.up_proj.weight", (hidden_dim, dim)
    yield f"{name}.down_proj.weight", (dim, hidden_dim)


def check_files(folder: Path) -> tuple[dict[str, str], Metadata]:
    """The index of a folder's safetensors, empty without one, and their headers. All can be opened.

    Raises:
        ValueError: a file is missing or broken; one line with the file and the remedy.
    """
    index = _read_index(folder)
    for name in sorted(set(index.values())):
        if not (folder / name).is_file():
            raise ValueError(f"{shown(folder / INDEX)} names {shown(name)}, which is not there; download it again")
    return index, _headers(folder)


def check_weights(folder: str | Path, config: ModelConfig) -> None:
    """Checks that the safetensors of a folder, and their index if there is one, hold all tensors of the model, and no
    others but those that transformers leaves out as well.

    Raises:
        ValueError: a file or a tensor is missing, broken, twice there, of another shape or of no floating-point dtype,
            or has no place in the model; one line with the file or the tensor and the remedy.
    """
    folder, needed = Path(folder), tensor_shapes(config)
    index, headers = check_files(folder)
    stored: dict[str, Any] = headers.state_dict_metadata
    if index:
        _check_complete(folder / INDEX, _places_by(index, config), needed)
    places = places_of({name: tuple(tensor.size) for name, tensor in stored.items()})
    _check_complete(folder, places, needed)
    for name, shape in needed.items():
        place, tensor = places[name], stored[places[name].name]
        if place.shape != shape:
            raise ValueError(
                f"{shown(folder)}: {name} has shape {list(place.shape)}, in this model {list(shape)}; use the "
                'config.json that came with the weights and model.flavor = "hf"'
            )
        if len({chunk.offsets for chunk in tensor.chunks}) != len(tensor.chunks):
            raise ValueError(f"{shown(folder)}: {name} is in several files; leave one set of safetensors there")
        if (dtype := tensor.properties.dtype) not in DTYPES:
            raise ValueError(f"{shown(folder)}: {name} is {dtype}; use the checkpoint from before its quantization")
    of_text = {name: place for name, place in places.items() if not of_pictures(config.model, place.name)}
    _check_no_others(folder, of_text, needed, headers)
    embedding = places[name_in_files(config.model, EMBEDDINGS[0])].name
    if config.tied and OUTPUT in stored and embedding != OUTPUT:
        _check_tied(folder, (embedding, OUTPUT), headers)


def shard_numbers(folder: str | Path, config: ModelConfig) -> dict[str, int] | None:
    """The number of the file, from 1, that each tensor of an export goes to: the same split as in the folder.

    None for one file: the folder's index names only one, or there is no index.

    Raises:
        ValueError: the index is broken or lacks a tensor of the model.
    """
    index, needed = _read_index(Path(folder)), tensor_shapes(config)
    if not index:
        return None
    places = _places_by(index, config)
    _check_complete(Path(folder) / INDEX, places, needed)
    files = sorted({index[places[name].name] for name in needed})
    return {name: 1 + files.index(index[places[name].name]) for name in needed} if len(files) > 1 else None


def float32_names(folder: str | Path, config: ModelConfig) -> tuple[str, ...]:
    """The tensors that an export keeps in float32: those that the folder's weights keep so among others of 16 bits, and
    those that transformers and vLLM compute with in float32 whatever the others are.

    Args:
        folder: may be without weights, or without any that can be read.
    """
    needed = tensor_shapes(config)
    names = {name for name in needed if name.endswith(ALWAYS_FLOAT32)}
    try:
        stored: dict[str, Any] = _headers(Path(folder)).state_dict_metadata
    except ValueError:
        return tuple(sorted(names))
    places = places_of({name: tuple(tensor.size) for name, tensor in stored.items()})
    dtypes = {name: stored[places[name].name].properties.dtype for name in needed if name in places}
    sizes: Counter[torch.dtype] = Counter()
    for name, dtype in dtypes.items():
        sizes[dtype] += math.prod(needed[name])
    if sizes and max(sizes, key=sizes.__getitem__).itemsize < 4:
        names |= {name for name, dtype in dtypes.items() if dtype in (torch.float32, torch.float64)}
    return tuple(sorted(names))


def _read_index(folder: Path) -> dict[str, str]:
    """File of each tensor; empty without an index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    try:
        weight_map = json.loads(read_text(path))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        other = f"{shown(path)} is no index of safetensors ({reason}); download it again"
        raise ValueError(lack(error, shown(path)) or other) from None


def _places_by(index: dict[str, str], config: ModelConfig) -> dict[str, Place]:
    """The places of tensors as far as an index tells them: without shapes."""
    experts = config.experts
    fused = (experts.num_experts, 2 * experts.hidden_dim, config.dim) if experts else ()
    return places_of(dict.fromkeys(index, fused))


def _headers(folder: Path) -> Metadata:
    """Size, dtype, chunks and files of each stored tensor, as torch will read them."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        remedy = "put the model's weights there"
        if (folder / METADATA).is_file():
            remedy = f"it has a {METADATA} of torch's format: set checkpoint.initial_load_in_hf to false to load it"
        raise ValueError(f"{shown(folder)} has no *.safetensors; {remedy}")
    for path in paths:
        try:
            regular_file(path)
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            other = f"{shown(path)}: {one_line(error)}; download it again"
            raise ValueError(lack(error, shown(path)) or other) from None
    return HuggingFaceStorageReader(str(folder)).read_metadata()


def _check_complete(where: Path, places: dict[str, Place], needed: dict[str, tuple[int, ...]]) -> None:
    missing = [name for name in needed if name not in places]
    if OUTPUT in needed:  # else it may be the embedding
        missing += [name for name in EMBEDDINGS if name in needed and name in places and places[name].name == OUTPUT]
    if missing == [OUTPUT]:
        raise ValueError(
            f"{shown(where)} lacks {OUTPUT}, but tie_word_embeddings is not true in config.json; set it to true if "
            "the output layer is the embedding, else download the weights again"
        )
    if missing:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise ValueError(
            f"{shown(where)} lacks {missing[0]}{more} of the model; download the weights again, or use the "
            'config.json that came with them and model.flavor = "hf"'
        )


def _check_no_others(folder: Path, places: dict[str, Place], needed: Container[str], headers: Metadata) -> None:
    """Refuses tensors that would not be loaded."""
    layers = {name.removesuffix(PREDICTING) for name in headers.state_dict_metadata if name.endswith(PREDICTING)}
    read = _names_read(folder, headers)
    others = sorted(
        place.name if place.expert is None else name
        for name, place in places.items()
        if name not in needed
        and place.name in read
        and not (place.name == OUTPUT or LEFT_OUT.fullmatch(name) or place.name.startswith(tuple(layers)))
    )
    if others:
        more = f" and {len(others) - 1} more tensors" if len(others) > 1 else ""
        raise ValueError(
            f"{shown(folder)} has {shown(others[0])}{more} that the model has no place for; use the config.json that "
            'came with the weights and model.flavor = "hf", or take them out of the file'
        )


def _names_read(folder: Path, headers: Metadata) -> set[str]:
    """The stored tensors of the files that transformers reads."""
    files = set(_read_index(folder).values()) or {"model.safetensors"}
    found = {index.fqn: Path(info.relative_path).name for index, info in headers.storage_data.items()}
    return {name for name, file in found.items() if file in files} or set(found)


def _check_tied(folder: Path, names: tuple[str, str], headers: Metadata) -> None:
    """Refuses an output layer that is another than the embedding, which transformers would take and others would not.

    Args:
        names: of the two as they are stored.
    """
    paths = {index.fqn: info.relative_path for index, info in headers.storage_data.items()}
    one, other = (safe_open(paths[name], framework="pt").get_slice(name) for name in names)
    shape = one.get_shape()
    blocks = [slice(row, row + ROWS_COMPARED) for row in range(0, shape[0], ROWS_COMPARED)]
    if shape != other.get_shape() or not all(torch.equal(one[rows].float(), other[rows].float()) for rows in blocks):
        raise ValueError(
            f"{shown(folder)} has another {OUTPUT} than {names[0]}, but tie_word_embeddings is true in config.json; "
            f"set it to false to train both, or take {OUTPUT} out of the file"
        )
