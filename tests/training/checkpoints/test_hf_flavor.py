"""``flavor = "hf"`` is the model of the folder, its weights come in and go out, and a wrong folder is one line."""

import importlib
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support import adapter
from support.errors import assert_says, run_ends
from support.hf_models import KINDS, edit, hf_arguments, make_hf_folder, tensors_of
from support.runs import ADAPTER, DEBUG_TOML, IS_0_3, ROOT, TrainingError, corpus, new_folder, train

from torchtitan_magi.training.checkpoints.hf_weights import INDEX

READ = "--checkpoint.enable --checkpoint.initial_load_in_hf"
RANDOM = "--magi.random_weights"
EXPORT = "--checkpoint.enable --checkpoint.last_save_in_hf"


@pytest.fixture(scope="module")
def folders():
    return {kind: make_hf_folder(kind) for kind in KINDS}


@pytest.fixture
def folder(folders, tmp_path):
    """A llama of one file, to be changed."""
    return Path(shutil.copytree(folders["llama"], tmp_path / "model"))


def start(folder, arguments="", kind="llama", flavor="hf", dump_folder=None):
    """The model, with all that a Trainer checks before it builds it."""
    arguments = arguments if "initial_load" in arguments else f"{RANDOM} {arguments}"
    arguments = [*hf_arguments(folder, kind), "--model.flavor", flavor, *arguments.split()]
    arguments += ["--job.dump_folder", dump_folder or new_folder()]
    arguments += ["--training.dataset_path", f"{corpus()}/train.jsonl"]
    return adapter.start(DEBUG_TOML, *arguments)


def assert_refused(messages, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        start(*args, **kwargs)
    assert_says(caught.value, messages)


def said_by_us(caplog):
    """Warnings, without torchtitan's own."""
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    return [record.getMessage() for record in warnings if record.name.startswith("torchtitan_magi.")]


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# --------------------------------------------------------------------------------------------------------- whole runs


README_OVERRIDES = ["--training.seq_len", "256", "--parallelism.context_parallel_degree", "2"]
README_OVERRIDES += ["--training.mixed_precision_param", "float32", "--checkpoint.export_dtype", "float32"]


def readme():
    """The first TOML file of README.md, with the data of the corpus."""
    text = (ROOT / "README.md").read_text().partition("```toml\n")[2].partition("```")[0]
    path = Path(new_folder(), "readme.toml")
    path.write_text(text.replace("data/conversations.jsonl", f"{corpus()}/train.jsonl"))
    return path


@pytest.mark.parametrize(
    ("kind", "fields", "index", "arguments"),
    [
        ("llama", {}, False, ""),
        ("llama", {"max_position_embeddings": 128}, True, "--parallelism.data_parallel_shard_degree 2"),
        ("llama", {"shards": 3, "rope": {"rope_type": "linear", "factor": 2.0}}, True, ""),
        ("qwen3", {"shards": 2}, True, "--parallelism.context_parallel_degree 2"),
        ("qwen3", {"tied": True}, True, "--parallelism.tensor_parallel_degree 2"),
    ],
)
def test_weights_come_in_and_go_out_as_they_are(kind, fields, index, arguments):
    """With a learning rate of zero: the exported tensors are the folder's, in the folder's files. Without arguments and
    an index, by the lines of README.md."""
    folder = make_hf_folder(kind, **fields)
    if index and not (folder / INDEX).exists():
        write_index(folder, dict.fromkeys(tensors_of(folder), "model.safetensors"))
    run_folder = new_folder()
    common = ["--optimizer.lr", "0.0", "--job.dump_folder", run_folder, "--training.steps", "1"]
    if index:
        arguments = [*hf_arguments(folder, kind), *READ.split(), *EXPORT.split(), *arguments.split()]
        run = train(2 if "2" in arguments else 1, [*arguments, *common])
    else:
        run = train(2, [*README_OVERRIDES, "--model.hf_assets_path", str(folder), *common], toml=readme(), defaults=())
        assert f"Weights: those of {folder}, in safetensors\n" in run.output
        assert "saves nothing" not in run.output
    exported = Path(run_folder, "checkpoint", "step-1")
    theirs, ours = tensors_of(folder), tensors_of(exported)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    files = json.loads((exported / INDEX).read_text())["weight_map"]
    if fields.get("shards"):
        assert files == json.loads((folder / INDEX).read_text())["weight_map"]
    else:
        assert set(files.values()) == {"model-00001-of-00001.safetensors"}
    assert ("the model was trained for 128 positions" in run.output) == ("max_position_embeddings" in fields)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tied_weights_train_with_0_2_2_except_under_fsdp_alone(kind):
    two = [*hf_arguments(make_hf_folder(kind, tied=True), kind), RANDOM, "--training.steps", "2"]
    degrees = ["--parallelism.context_parallel_degree", "2"]
    if not IS_0_3:
        with run_ends("tie_word_embeddings is True") as caught:
            train(2, [*two, *degrees])
        remedy = {"llama": "an output layer of its own", "qwen3": "set parallelism.tensor_parallel_degree to 2"}[kind]
        assert remedy in str(caught.value)
        degrees = ["--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1"]
    if IS_0_3 or kind == "qwen3":
        alone = train(1, [*two, *batch(4)])
        both = train(2, [*two, *degrees, *batch(4 if IS_0_3 else 2)], entry="torchtitan_magi.train")
        assert both.losses == pytest.approx(alone.losses, rel=1e-5)


def batch(packs):
    return ["--training.local_batch_size", f"{packs}"]


def other_layers_on_rank_1(report):
    from torchtitan_magi.models.model_config import read_model_config
    from torchtitan_magi.training.settings import model_folder

    if os.environ["RANK"] == "1":
        for module in (model_folder, importlib.import_module(f"{ADAPTER}.trainer")):
            module.read_model_config = lambda folder: read_model_config(f"{folder}/deeper")


def test_ranks_with_other_files_are_named(folder):
    shutil.copytree(folder, folder / "deeper")
    edit(folder / "deeper", num_hidden_layers=3)
    arguments = [*hf_arguments(folder), RANDOM, "--parallelism.context_parallel_degree", "2"]
    with pytest.raises(TrainingError, match=r"num_layers=2.* on rank 0, .*num_layers=3.* on rank 1; give every"):
        train(2, arguments, setup=other_layers_on_rank_1)


# ------------------------------------------------------------------------------------------------ before the first step


def test_each_trainer_has_the_model_of_its_folder(folder):
    first = start(folder)
    edit(folder, num_hidden_layers=1)
    assert (start(folder).num_layers, first.num_layers) == (1, 2)


def test_the_wrong_architecture(folders):
    assert_refused(["model.name is 'qwen3'", "of a llama3", 'set it to "llama3"'], folders["llama"], kind="qwen3")
    assert_refused(["model.name is 'llama3'", "of a qwen3", 'set it to "qwen3"'], folders["qwen3_moe"], kind="llama")


def test_no_config_json(folder):
    (folder / "config.json").unlink()
    assert_refused(["model/config.json: No such file", "put the config.json of the weights there"], folder)
    start(folder, flavor="debugmodel_varlen_attn")


NAMED = {"flavor": "debugmodel_varlen_attn"}
DIFFERENT = ["'debugmodel_varlen_attn' is not the model of", "dim 64 in the file, 256 in the flavor", "num_layers 2"]
DIFFERENT += ["rope.type default in the file, llama3 in the flavor", 'set model.flavor = "hf"']


@pytest.mark.parametrize("arguments", [READ, EXPORT])
def test_a_named_flavor_of_another_model_is_an_error_where_weights_move(arguments, folder):
    assert_refused([*DIFFERENT, str(folder)], folder, arguments, **NAMED)


def test_a_named_flavor_beside_another_model_is_a_warning_elsewhere(folder, caplog):
    start(folder, "--checkpoint.enable", **NAMED)
    (warning,) = said_by_us(caplog)
    for message in DIFFERENT:
        assert message in warning


def test_another_model_in_initial_load_path(folder, folders):
    assert_refused(
        [
            "'hf' is not the model of",
            "head_dim 16 in the file, 8 in the flavor",
            f"hf_assets_path = '{folders['qwen3']}'",
        ],
        folder,
        f"{READ} --checkpoint.initial_load_path {folders['qwen3']}",
    )
    other = shutil.copytree(folder, folder.parent / "other")
    start(folder, f"{READ} --checkpoint.initial_load_path {other}")
    (other / "config.json").unlink()
    start(folder, f"{READ} --checkpoint.initial_load_path {other}")
    (other / "model.safetensors").unlink()
    assert_refused([f"{other} has no *.safetensors"], folder, f"{READ} --checkpoint.initial_load_path {other}")


def test_a_named_flavor_beside_a_model_that_is_refused(folder, caplog):
    edit(folder, attention_bias=True)
    messages = ["cannot be the model of this folder", "attention_bias is True", "no biases"]
    assert_refused(messages, folder, READ, **NAMED)
    assert_refused(messages, folder, EXPORT, **NAMED)
    start(folder, **NAMED)
    assert all(message in caplog.text for message in messages)


def test_a_vocabulary_that_differs(folder):
    edit(folder, vocab_size=2047)
    assert_refused(["has 2048 tokens, the model's vocab_size is 2047", "use the tokenizer"], folder)
    edit(folder, vocab_size=3000)
    assert start(folder).vocab_size == 3000


def test_weights_that_are_not_complete(folder):
    path, tensors = folder / "model.safetensors", tensors_of(folder)
    name = "model.layers.1.mlp.up_proj.weight"

    save_file({key: value for key, value in tensors.items() if ".layers.1." not in key}, path)
    assert_refused([f"{folder} lacks model.layers.1.self_attn.q_proj.weight and 8 more tensors"], folder, READ)
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, path)
    assert_refused([f"{name} has shape [175, 64], in this model [176, 64]"], folder, READ)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path)
    assert_refused([f"{name} is torch.int8", "before its quantization"], folder, READ)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert_refused([str(path), "download it again"], folder, READ)
    save_file(tensors, path)
    save_file({name: tensors[name]}, folder / "more.safetensors")
    assert_refused([f"{name} is in several files", "leave one set"], folder, READ)
    (folder / "more.safetensors").unlink()
    start(folder, READ)
    path.unlink()
    assert_refused([f"{folder} has no *.safetensors", "put the model's weights there"], folder, READ)
    (folder / ".metadata").touch()
    assert_refused([f"{folder} has no *.safetensors", "set checkpoint.initial_load_in_hf to false"], folder, READ)
    start(folder, EXPORT)


@pytest.mark.parametrize("arguments", [READ, EXPORT])
def test_an_index_that_is_wrong(arguments, folder):
    names = tensors_of(folder)
    (folder / INDEX).write_text("{")
    assert_refused([INDEX, "no index of safetensors", "download it again"], folder, arguments)
    (folder / INDEX).write_text("{}")
    assert_refused([INDEX, "no index of safetensors", "weight_map"], folder, arguments)
    write_index(folder, {name: "model.safetensors" for name in names if name != "model.norm.weight"})
    assert_refused([f"{INDEX} lacks model.norm.weight of the model"], folder, arguments)
    write_index(folder, dict.fromkeys(names, "model.safetensors"))
    start(folder, arguments)


def test_an_index_that_names_a_file_which_is_missing():
    folder = make_hf_folder("llama", shards=2)
    missing = sorted(folder.glob("*.safetensors"))[-1]
    missing.unlink()
    assert_refused([f"{INDEX} names {missing.name}, which is not there", "again"], folder, READ)
    start(folder, EXPORT)


def test_a_run_that_resumes_needs_no_initial_weights_but_a_reference_does(folder):
    (folder / "model.safetensors").unlink()
    run_folder = new_folder()
    dcp.save({"weight": torch.zeros(1)}, checkpoint_id=f"{run_folder}/checkpoint/step-0", no_dist=True)
    start(folder, READ, dump_folder=run_folder)
    assert_refused(["has no *.safetensors"], folder, f"{READ} --training.dataset dpo", dump_folder=run_folder)


def test_more_positions_than_the_model_has(folder, caplog):
    start(folder, EXPORT)
    assert not said_by_us(caplog)
    edit(folder, max_position_embeddings=512)
    start(folder)
    start(folder, EXPORT)
    without, with_export = (text for text in caplog.messages if text.startswith("training.seq_len is 1024"))
    assert without.startswith("training.seq_len is 1024, but the model was trained for 512 positions: what lies")
    more = "; the export's max_position_embeddings will be the longest length trained, if it is more"
    assert with_export == without + more
