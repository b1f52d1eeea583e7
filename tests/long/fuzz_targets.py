"""What `fuzz.py` feeds: each target reads bytes as the package reads a person's file or arguments.

Each is one small function over one entry of the package; seeds are sound inputs, words what a mutation may put in.
"""

import functools
import gzip
import hashlib
import io
import json
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from fuzz import Check, Target
from runner import ROOT
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_magi.cuda.entries import open_folder, read_entry
from torchtitan_magi.data import (
    ChatTokenizer,
    Corpus,
    PackedPairDataset,
    PackedRolloutDataset,
    PackedSFTDataset,
    TokenizedDocument,
    guard,
)
from torchtitan_magi.data.datasets.packed_dataset import PackedDataset
from torchtitan_magi.data.packs import prefix_trees
from torchtitan_magi.data.tokens.array_file import Damaged
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer
from torchtitan_magi.data.tokens.chat import CHATML_TEMPLATE, PLAIN_TEMPLATE, load_chat_template
from torchtitan_magi.data.tokens.token_block import TokenBlock
from torchtitan_magi.masks.builders import block_causal, shared_prompt, sliding_window, varlen_causal, varlen_full
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.models.config_file import PLAIN
from torchtitan_magi.models.model_config import (
    ROPE_FIELDS,
    Experts,
    LatentAttention,
    ModelConfig,
    Rope,
    read_model_config,
)
from torchtitan_magi.planning.cost_model import H200, CostModel
from torchtitan_magi.planning.plan import make_plan
from torchtitan_magi.sizing.sample_packs import read_lengths
from torchtitan_magi.training.batches.pack_loader import PackLoader
from torchtitan_magi.training.checkpoints.digests import DIGESTS, METADATA, check_digests, check_sizes
from torchtitan_magi.training.checkpoints.hf_weights import INDEX, check_weights, shard_numbers, tensor_shapes
from torchtitan_magi.training.objectives.reference_file import read_logprobs, write_logprobs

from support.masks import dense_mask  # isort: skip

SEQ_LEN, SHORTEST = 64, 8  # tokens of a pack, and of a beginning that is shared


def words(text: str) -> tuple[bytes, ...]:
    return tuple(text.encode().split())


def of_file(name: str, read: Callable[[Path], object]) -> Callable[[Path], Check]:
    """A target that writes its inputs to a file of that name, and reads it."""

    def make(folder: Path) -> Check:
        def check(data: bytes) -> None:
            (folder / name).write_bytes(data)
            read(folder / name)

        return check

    return make


def lines(*values: Any) -> bytes:
    """JSON, one value a line."""
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


# ------------------------------------------------------------------------------------------------------------- records

SPECIAL = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
TURNS = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
CALL = {"id": "7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "so?"}]}, {**TURNS[1], "weight": 0}, *TURNS]
REASONING = [TURNS[0], {**TURNS[1], "reasoning_content": "easy"}, *TURNS]
DOCUMENTS = (
    lines({"messages": TURNS}, {"text": "once"}),
    lines(
        {"messages": [*CALLS, TURNS[1]], "tools": TOOLS}, {"messages": [*CALLS, TURNS[1]], "tools": json.dumps(TOOLS)}
    ),
    lines({"messages": PARTS, "chat_template_kwargs": {"enable_thinking": False}}, {"messages": REASONING}),
    lines({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "c"}),
    lines({"prompt": "a", "completion": "b"}, {"instruction": "a", "input": "b", "output": "c"}),
    lines({"prompt": "a", "completions": ["b", TURNS[1:], {"completion": "c", "weight": 0.5}]}),
)
PAIRS = (
    lines({"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": "4"}),
    lines({"chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "3"}]}),
    lines({"prompt": CALLS, "chosen": TURNS[1], "rejected": "c", "tools": TOOLS, "system": "d"}),
    lines({"prompt": "a", "completions": ["b", TURNS[1], {"completion": "c"}], "pairs": [[0, 2], [1, 0]]}),
    lines(
        {"prompt": TURNS[:1], "completions": [{"completion": text, "score": len(text)} for text in ("b", "cd", "e")]}
    ),
)
SAMPLED = {"completion_ids": [3, 4, 5], "logprobs": [-1, -0.5, 0], "advantage": 1.5, "completion_mask": [1, 0, 1]}
REWARDED = [{"completion": TURNS[1:], "reward": 1}, {"completion": "3", "reward": 0.5}]
ROLLOUTS = (
    lines({"prompt_ids": [7] * 40, "completions": [SAMPLED, SAMPLED]}, {"prompt_ids": [7] * 40, **SAMPLED}),
    lines({"prompt": "a", "completions": REWARDED, "tools": TOOLS}, {"prompt": TURNS[:1], "completions": REWARDED}),
)
RECORD_WORDS = words(
    '"messages" "conversations" "role" "content" "from" "value" "human" "gpt" "user" "assistant" "system" "tool" "text"'
    ' "prompt" "completion" "completions" "chosen" "rejected" "tools" "tool_calls" "function" "arguments" "weight"'
    ' "prompt_ids" "completion_ids" "completion_mask" "logprobs" "advantage" "reward"'
    ' "reasoning" "thinking" "reasoning_content" "chat_template_kwargs" "name" "type" "<|im_end|>" "pairs" "score"'
    ' "{\\"a\\":1}" "[[[" "\\udc00"'
)


def tokenizer() -> Tokenizer:
    """One token for each byte, and SPECIAL."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return made


def chat_tokenizer(template: str) -> ChatTokenizer:
    made = tokenizer()
    return ChatTokenizer(made, *map(made.token_to_id, SPECIAL[:2]), template)


TOOL_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content is defined and loop.last %}{{ '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@functools.cache
def tool_tokenizer() -> ChatTokenizer:
    return chat_tokenizer(TOOL_TEMPLATE)


def read_documents(path: Path) -> None:
    read_packs(PackedSFTDataset, path, tool_tokenizer(), share_prefixes=path.stat().st_size % 3 > 0)


def read_pairs(path: Path) -> None:
    read_packs(PackedPairDataset, path, tool_tokenizer().pair)


def read_rollouts(path: Path) -> None:
    read_packs(PackedRolloutDataset, path, tool_tokenizer(), on_policy=path.stat().st_size % 3 > 0)


def read_packs(kind: type[PackedDataset], path: Path, tokenize: Any, **options: Any) -> None:
    """Half of the inputs are read with malformed records left out."""
    bad_records = "skip" if path.stat().st_size % 2 else "error"
    dataset = kind(path, tokenize, SEQ_LEN, epochs=1, bad_records=bad_records, **options)
    with mock.patch.object(prefix_trees, "SHORTEST", SHORTEST):
        for inputs, labels in dataset:
            assert inputs["input"].shape == labels.shape == (SEQ_LEN,)
    counts = dataset.counts
    left_out = counts.unlabeled + counts.skipped + counts.equal + counts.long_prompts
    assert counts.documents + counts.extra_pieces == counts.pieces + left_out
    packed = counts.tokens + counts.shared_tokens
    assert counts.tokens_read == packed + counts.truncated_tokens + counts.tokens_left_out


def read_source(path: Path) -> None:
    """The file, and what is kept of it, are read twice."""
    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        for _ in range(2):
            corpus = Corpus(path, cache=cache)
            for block in range(corpus.num_blocks):
                corpus.read(block)
                corpus.digest(block)
            corpus.where(len(corpus) - 1)


def _parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"messages": TURNS}] * 3), file)
    return file.getvalue()


def read_tokens(path: Path) -> None:
    try:
        block = TokenBlock.open(str(path))
    except Damaged:
        raise ValueError("the file is damaged; its tokens are made again") from None
    if not block.are_sound(np.arange(len(block))):
        raise ValueError("the tokens are damaged; they are made again")
    assert path.read_bytes() == BLOCK


def _block() -> bytes:
    document = TokenizedDocument(np.arange(9, dtype=np.int32), np.arange(9) % 2 == 0)
    with tempfile.TemporaryDirectory() as folder:
        TokenBlock.of([document, ValueError("malformed; remove it"), document]).write(f"{folder}/block")
        return Path(folder, "block").read_bytes()


BLOCK = _block()


# ----------------------------------------------------------------------------------------------------------- templates

TEMPLATES = (PLAIN_TEMPLATE, CHATML_TEMPLATE, TOOL_TEMPLATE)
TEMPLATE_WORDS = words(
    "{% {%- %} -%} {{ }} {# #} if else elif endif for endfor in loop.last set endset namespace macro endmacro call"
    " generation endgeneration messages message.content tools tojson tojson(indent=2000000000) lipsum() range(9**9)"
    " '%2000000000d'%1 join | ~ ** cycler raise_exception('no') strftime_now('%Y') 'a'*999999999 self include import"
    " ''.__class__ messages.append(messages) message|attr('__init__') dict() bos_token eos_token recursive"
    " loop(messages) debug ascii e is defined not in [::-1] 0.1 None true"
)


def render_template(folder: Path) -> Check:
    guard.limit_process()
    guard.SECONDS = 2

    def check(data: bytes) -> None:
        chat = chat_tokenizer(data.decode(errors="replace"))
        for record in ({"messages": TURNS}, {"messages": REASONING}, {"messages": [*CALLS, TURNS[1]], "tools": TOOLS}):
            chat(record)

    return check


NAMED = {"name": "default", "template": CHATML_TEMPLATE}
ASSETS = (lines({"chat_template": CHATML_TEMPLATE}), lines({"chat_template": [NAMED, NAMED | {"name": "tool_use"}]}))


def read_assets(path: Path) -> None:
    template = load_chat_template(path.parent)
    if template is not None:
        chat_tokenizer(template)


# Files of a tokenizer's folder, one object of all of them.
TOKEN = {"content": "<|end|>", "special": True}
NAMES = {"bos_token": "<|begin|>", "eos_token": TOKEN, "additional_special_tokens": ["<|im_end|>", TOKEN]}
DECLARED = {"added_tokens_decoder": {"256": TOKEN, "300": {**TOKEN, "lstrip": True}}, "extra_special_tokens": ["<x>"]}
ADDED = {"<|tool|>": 301, "<|end|>": 257}
MERGES = "#version: 0.2\na b\nab c\n"
VOCABULARY = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
FOLDERS = (
    {"tokenizer_config.json": {**NAMES, **DECLARED}, "tokenizer.json": json.loads(tokenizer().to_str())},
    {"special_tokens_map.json": NAMES, "added_tokens.json": ADDED, "vocab.json": VOCABULARY, "merges.txt": MERGES},
    {"vocab.txt": "a\nb\n[UNK]\n", "chat_template.jinja": CHATML_TEMPLATE, "tokenizer_config.json": {}},
)
FOLDER_NAMES = {name for files in FOLDERS for name in files}
TOKEN_WORDS = words(" ".join(map(json.dumps, [*NAMES, *DECLARED, *FOLDER_NAMES, "lstrip", "normalized", "unk_token"])))


def read_tokenizer(folder: Path) -> Check:
    def check(data: bytes) -> None:
        given = _json(data)
        for name in FOLDER_NAMES:
            (folder / name).unlink(missing_ok=True)
        for name, value in given.items() if isinstance(given, dict) else ():
            if name in FOLDER_NAMES:
                text = value if isinstance(value, str) else json.dumps(value)
                (folder / name).write_bytes(text.encode(errors="replace"))
        load_chat_tokenizer(folder)

    return check


# --------------------------------------------------------------------------------------------------------------- masks

TABLES = ([[0, 8, 0, 8, 1]], [[0, 4, 0, 4, 1], [4, 9, 2, 9, 3]], [[0, 6, 0, 6, 2], [2, 8, 1, 7, 0], [3, 3, 0, 1, 1]])
MAX_DENSE = 64  # tokens of a mask that is compared with a dense one
MAX_PLANNED = 2**16  # tokens of a mask that is planned


def plan_slices(folder: Path) -> Check:
    def check(data: bytes) -> None:
        _check_mask(AttnSlices(_json(data)))

    return check


def plan_documents(folder: Path) -> Check:
    """cu_seqlens, and a window or size of blocks; or the lengths of preference pairs."""

    def check(data: bytes) -> None:
        value = _json(data)
        if not isinstance(value, dict):
            _check_mask(shared_prompt(value))
            return
        cu_seqlens, size, total = (value.get(name) for name in ("cu_seqlens", "size", "total"))
        for mask in (varlen_causal(cu_seqlens, total), varlen_full(cu_seqlens)):
            _check_mask(mask)
        for mask in (sliding_window(cu_seqlens, size), block_causal(cu_seqlens, size)):
            _check_mask(mask)

    return check


def _json(data: bytes) -> Any:
    """The value of JSON; None of what is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _check_mask(mask: AttnSlices) -> None:
    total = int(mask.table[:, [1, 3]].max(initial=1))
    if total > MAX_PLANNED:
        return
    canonical = mask.canonical()
    assert canonical.canonical() == canonical
    assert mask.row_cost(total).sum() == mask.area
    if total <= MAX_DENSE:
        pairs = dense_mask(mask.table, total, total)
        np.testing.assert_array_equal(dense_mask(canonical.table, total, total), pairs)
        assert canonical.area == pairs.sum()  # no pair twice
    for cp_size in (1, 2, 3):
        owned = np.concatenate([rank.tokens for rank in make_plan(mask, total, cp_size).ranks])
        assert len(np.unique(owned)) == len(owned) >= total


# ------------------------------------------------------------------------------------------------------- configurations

CONFIGS = [ROOT / "train_configs" / name for name in ("debug.toml", "dpo_debug.toml")]
TOML_WORDS = words(
    "[magi] [magi.dpo] [training] [parallelism] [validation] [checkpoint] [job] [metrics] true false -1 0 1.5 inf nan"
    ' 1979-05-27 [] {} \'\' "x" """ [[ ]] = steps seq_len local_batch_size global_batch_size freq interval enable'
    " log_freq dump_folder dataset dataset_path beta loss reference backend overlap_stages epochs positions imports"
    " context_parallel_degree tensor_parallel_degree data_parallel_shard_degree pipeline_parallel_degree mode magi dpo"
)


def read_toml(folder: Path) -> Check:
    """What the launcher and the Trainer do with the file before anything is built."""
    from support import adapter

    import torchtitan_magi.titan  # noqa: F401  registers what the files name
    from torchtitan_magi import launch

    os.chdir(folder)  # the paths in a file may be written to
    path = folder / "config.toml"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            config = launch.read(path)
        except ValueError as error:  # it says where, and the launcher prints it as it is
            raise ValueError(f"{launch.in_one_line(error)}; correct the file") from None
        launch.check_file(config)
        launch.check_hooks(config, [])
        launch.num_processes(config, [], 8)
        adapter.check(path)

    return check


# --------------------------------------------------------------------------------------------------------- other files

LOGPROBS = np.linspace(-9, -1, 10).reshape(5, 2)
FINGERPRINTS = {"model": "1f", "data": "5 records"}
MODEL = ModelConfig("llama3", 64, 2, 8, 2, 8, 176, 100, 1e-5, Rope(5e5), max_positions=128)
TINY = ModelConfig("llama3", 8, 1, 2, 1, 4, 8, 10, 1e-5, Rope(5e5), max_positions=128)
YARN = Rope(5e5, "yarn", 4.0, original_max_positions=32, beta_fast=32.0, beta_slow=1.0)
GPT_OSS = replace(MODEL, model="gpt_oss", hidden_dim=0, rope=YARN, windows=(16, 0), experts=Experts(4, 2, 48, True))
LATENT = {"num_heads_kv": 8, "head_dim": 24, "value_dim": 16, "latent": LatentAttention(32, 24, 8, 1.0)}
DEEPSEEK_V3 = replace(MODEL, model="deepseek_v3", rope=YARN, experts=Experts(8, 2, 48, True, 1, 1, 4, 2, 2.5), **LATENT)
MODELS = (MODEL, GPT_OSS, DEEPSEEK_V3)
MODEL_WORDS = words(" ".join(map(json.dumps, [*PLAIN, *ROPE_FIELDS, "layer_types", "auto_map", "llama3", "linear"])))


def read_cost_model(path: Path) -> None:
    make_plan(varlen_causal([0, 300, 1000]), 1000, 2, cost=CostModel.load(path)).predict(CostModel.load(path))


def read_weights(folder: Path) -> Check:
    """Names, shapes and places in the head of a file of weights, whose length comes before it."""
    _, body = _weights()

    def check(data: bytes) -> None:
        (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + body)
        check_weights(folder, TINY)

    return check


def _weights() -> tuple[bytes, bytes]:
    """Head and body."""
    file = safetensors.torch.save({name: torch.zeros(shape) for name, shape in tensor_shapes(TINY).items()})
    end = 8 + int.from_bytes(file[:8], "little")
    return file[8:end], file[end:]


def check_lengths(path: Path) -> None:
    assert read_lengths(path).min() > 0


def _array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([3, 1, 4]))
    return file.getvalue()


def read_checkpoint(path: Path) -> None:
    """Nothing that the list names is run but the classes that it consists of."""
    (path.parent / "__0_0.distcp").write_bytes(bytes(16))
    check_sizes(path.parent)


def read_digests(path: Path) -> None:
    """As ``python -m torchtitan_magi.verify`` does with SHA256SUMS beside a sound checkpoint."""
    (path.parent / METADATA).write_bytes(_metadata())
    (path.parent / "__0_0.distcp").write_bytes(bytes(16))
    check_digests(path.parent)
    check_sizes(path.parent)


def _digests() -> bytes:
    files = {METADATA: _metadata(), "__0_0.distcp": bytes(16)}
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()).encode()


def read_loader_state(folder: Path) -> Check:
    """What a checkpoint holds of the data loader, as text."""
    (folder / "documents.jsonl").write_bytes(DOCUMENTS[0] * 8)

    def check(data: bytes) -> None:
        loader = _loader(folder)
        loader.load_state_dict({"state": data.decode(errors="replace"), "exhausted": False})
        assert loader.position is not None
        for inputs, _ in islice(loader, 3):
            assert inputs["input"].shape == (1, SEQ_LEN)

    return check


def _loader(folder: Path) -> PackLoader:
    dataset = PackedSFTDataset(folder / "documents.jsonl", chat_tokenizer(TOOL_TEMPLATE), SEQ_LEN, seed=3)
    return PackLoader(dataset, 1)


def _loader_state() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "documents.jsonl").write_bytes(DOCUMENTS[0] * 8)
        loader = _loader(Path(name))
        next(iter(loader))
        return str(loader.state_dict()["state"]).encode()


def _metadata() -> bytes:
    """Of a checkpoint of one tensor."""
    index = MetadataIndex("weight", torch.Size([0]))
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    tensors = {"weight": TensorStorageMetadata(TensorProperties(), torch.Size([4]), [chunk])}
    return pickle.dumps(Metadata(tensors, {"weight": ("weight",)}, {index: _StorageInfo("__0_0.distcp", 0, 16)}))


CODE = hashlib.sha256(b"code").digest() + b"code"


def read_kernel(path: Path) -> None:
    """Nothing but what was written is ever loaded."""
    path.chmod(0o600)
    with open_folder(path.parent) as descriptor:
        code = read_entry(descriptor, path.name)
    if code is None:
        raise ValueError("the entry is damaged; it is compiled again")
    assert path.read_bytes() == CODE


def _reference() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "reference.npz")
        write_logprobs(path, FINGERPRINTS, LOGPROBS)
        return path.read_bytes()


TARGETS = {
    target.name: target
    for target in (
        Target("records", of_file("documents.jsonl", read_documents), DOCUMENTS, RECORD_WORDS),
        Target("pairs", of_file("pairs.jsonl", read_pairs), PAIRS, RECORD_WORDS),
        Target("rollouts", of_file("rollouts.jsonl", read_rollouts), ROLLOUTS, RECORD_WORDS),
        Target("gzip", of_file("documents.jsonl.gz", read_source), tuple(map(gzip.compress, DOCUMENTS))),
        Target("parquet", of_file("documents.parquet", read_source), (_parquet(),)),
        Target("tokens", of_file("block.tokens", read_tokens), (BLOCK,)),
        Target("templates", render_template, tuple(text.encode() for text in TEMPLATES), TEMPLATE_WORDS),
        Target("assets", of_file("tokenizer_config.json", read_assets), ASSETS),
        Target("tokenizer", read_tokenizer, tuple(map(lines, FOLDERS)), TOKEN_WORDS),
        Target("slices", plan_slices, tuple(map(lines, TABLES))),
        Target(
            "documents", plan_documents, (lines({"cu_seqlens": [0, 3, 9], "size": 2}), lines([[2, 3, 4], [1, 1, 1]]))
        ),
        Target("toml", read_toml, tuple(path.read_bytes() for path in CONFIGS), TOML_WORDS),
        Target("cost_model", of_file("cost.json", read_cost_model), (lines({"cost_model": asdict(H200)}),)),
        Target(
            "hf_config",
            of_file("config.json", lambda path: read_model_config(path.parent)),
            tuple(lines(model.to_hf()) for model in MODELS),
            MODEL_WORDS,
        ),
        Target("checkpoint", of_file(METADATA, read_checkpoint), (_metadata(),)),
        Target("digests", of_file(DIGESTS, read_digests), (_digests(),)),
        Target("loader_state", read_loader_state, (_loader_state(),)),
        Target("kernels", of_file("kernel.cubin", read_kernel), (CODE,)),
        Target(
            "reference",
            of_file("reference.npz", lambda path: read_logprobs(path, FINGERPRINTS, len(LOGPROBS), "delete it")),
            (_reference(),),
        ),
        Target(
            "hf_index",
            of_file(INDEX, lambda path: shard_numbers(path.parent, MODEL)),
            (lines({"weight_map": dict.fromkeys(tensor_shapes(MODEL), "a.safetensors")}),),
        ),
        Target("weights", read_weights, _weights()[:1]),
        Target("lengths", of_file("lengths.txt", check_lengths), (b"3 1, 4\n1024\n",)),
        Target("lengths_npy", of_file("lengths.npy", check_lengths), (_array(),)),
    )
}
