"""What an export says beside its weights, and in which dtypes these are; what a run says last."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf_models import TEXT_PARTS, make_hf_folder, tensors_of
from support.runs import corpus

from torchtitan_magi.data import ChatTokenizer, PackedSFTDataset
from torchtitan_magi.data.tokens.assets import load_tokenizer
from torchtitan_magi.data.tokens.chat import CHATML_TEMPLATE
from torchtitan_magi.models.model_config import read_model_config
from torchtitan_magi.models.names import of_pictures
from torchtitan_magi.training.batches.microbatch import Microbatch
from torchtitan_magi.training.batches.planned_loader import PlannedLoader, with_plans
from torchtitan_magi.training.batches.planner import WorkCount
from torchtitan_magi.training.checkpoints.export import Export, export
from torchtitan_magi.training.checkpoints.hf_weights import INDEX, check_weights, float32_names
from torchtitan_magi.training.checkpoints.pictures import FILE, copy_pictures
from torchtitan_magi.training.checkpoints.trained_length import keep_trained_length, trained_length
from torchtitan_magi.training.checkpoints.turn_end import add_turn_end, learned_end
from torchtitan_magi.training.process.last_line import LastLine
from torchtitan_magi.training.settings.model_folder import ExportLayout

# ------------------------------------------------------------------------------------------------------------- dtypes

BIASES = ("model.layers.1.mlp.gate.e_score_correction_bias",)


def in_dtypes(folder, dtype_of):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: x.to(dtype_of(name, x)) for name, x in tensors.items()}, path)


def test_what_a_source_keeps_in_float32_stays_so(tmp_path):
    folder = make_hf_folder("deepseek_v3", folder=tmp_path)
    config = read_model_config(folder)
    assert float32_names(folder, config) == BIASES  # all are
    in_dtypes(folder, lambda name, x: torch.float32 if name.endswith("mlp.gate.weight") else torch.bfloat16)
    assert float32_names(folder, config) == (*BIASES, "model.layers.1.mlp.gate.weight")
    (folder / "model.safetensors").write_text("no weights")
    assert float32_names(folder, config) == BIASES
    assert float32_names(f"{tmp_path}/none", config) == BIASES
    llama = make_hf_folder("llama", folder=tmp_path / "llama")
    in_dtypes(llama, lambda name, x: torch.bfloat16 if "norm" in name else torch.float32)
    assert float32_names(llama, read_model_config(llama)) == ()


@pytest.mark.parametrize("kind", TEXT_PARTS)
def test_what_sees_pictures_goes_with_the_text(kind, tmp_path):
    """As it was, and named in the index; config.json names dtype and length of the text."""
    source = make_hf_folder(kind, max_position_embeddings=8)
    if kind.startswith("qwen3_5"):  # whose files also have layers that transformers leaves out
        save_file(tensors_of(source) | {"mtp.fc.weight": torch.ones(3)}, source / "model.safetensors", {"format": "pt"})
        check_weights(source, read_model_config(source))
    model, texts = read_model_config(source).model, {"lm_head.weight": torch.ones(2).bfloat16()}

    def save(folder):
        save_file(texts, folder / "model-00001-of-00001.safetensors")
        index = {"metadata": {"total_size": 4}, "weight_map": dict.fromkeys(texts, "model-00001-of-00001.safetensors")}
        (folder / INDEX).write_text(json.dumps(index))
        copy_pictures(source, folder, model)

    export(tmp_path, {"config.json": (source / "config.json").read_bytes()}, torch.bfloat16, save, length=16)
    pictures = {name: x for name, x in tensors_of(source).items() if of_pictures(model, name)}
    exported, index = tensors_of(tmp_path), json.loads((tmp_path / INDEX).read_text())
    assert len(pictures) > 20
    assert len({(tmp_path / name).stat().st_mode for name in (FILE, INDEX)}) == 1  # who reads one reads the other
    assert exported.keys() == index["weight_map"].keys() == pictures.keys() | texts.keys()
    assert all(torch.equal(exported[name], x) for name, x in pictures.items())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in exported.values())
    assert ("mtp.fc.weight" in exported) == kind.startswith("qwen3_5")
    config = json.loads((tmp_path / "config.json").read_text())  # Kimi's positions are YaRN's, a product
    assert (config["dtype"], config["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    assert config["text_config"]["max_position_embeddings"] == (8 if kind == "kimi_k25" else 16)


NAMES = {"model.layers.{}.gate.bias": "layers.{}.bias", "model.layers.{}.experts.{}.up": "layers.{}.up"}


def manager(folder, weights, **options):
    return SimpleNamespace(
        states={"model": SimpleNamespace(state_dict=lambda: weights), "dataloader": SimpleNamespace(longest=0)},
        sd_adapter=SimpleNamespace(from_hf_map=NAMES),
        folder=f"{folder}",
        _create_checkpoint_id=lambda step: f"{folder}/step-{step}",
        **options,
    )


@pytest.mark.parametrize("to_hf", [True, False])
def test_what_torchtitan_has_rounded_is_saved_in_float32(to_hf, tmp_path):
    """In an export and in a last checkpoint in torch's format; other states are as they were."""
    trained = {f"layers.{number}.{name}": torch.rand(3) for number in (3, 12) for name in ("bias", "up", "down")}
    rounded, saved = {name: x.bfloat16() for name, x in trained.items()}, []
    names = ("model.layers.12.gate.bias", "model.layers.3.experts.7.up", "model.layers.40.gate.bias")  # of another rank
    files = {"config.json": b"{}"}

    def save(weights, folder):
        saved.append(weights)
        (folder / "sharded").mkdir(parents=True)

    Export(files, ExportLayout(float32=names)).save(
        manager(tmp_path, trained), rounded, tmp_path / "step-1", to_hf, save
    )
    kept = {"layers.12.bias", "layers.3.up"}
    for name, x in saved[0].items():
        assert torch.equal(x, trained[name] if name in kept else rounded[name])
        assert x.dtype == (torch.float32 if name in kept else torch.bfloat16)
    if to_hf:
        assert json.loads((tmp_path / "step-1" / "config.json").read_text()) == {"torch_dtype": "bfloat16"}


# -------------------------------------------------------------------------------------------------------- end of turn


def chat_of(template):
    return ChatTokenizer(*load_tokenizer(corpus() / "tokenizer"), template)


ENDS_OF_ITS_OWN = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% if loop.last %}{{
'<|end_of_text|>' }}{% else %}{{ '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{
'<|im_start|>assistant\\n' }}{% endif %}"""
WITHOUT = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
WITHOUT += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML_TEMPLATE, "<|im_end|>"),
        (ENDS_OF_ITS_OWN, "<|end_of_text|>"),  # of the last turn, after which nothing is to come
        (WITHOUT, None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_end_of_turn_that_is_learned(template, end):
    chat = chat_of(template)
    assert learned_end(chat) == (None if end is None else chat.tokenizer.token_to_id(end))


@pytest.fixture(scope="module")
def dataset():
    return PackedSFTDataset(corpus() / "train.jsonl", chat_of(CHATML_TEMPLATE), 256)


def ids_after(dataset, config, generation=None, has_adapters=False):
    files = {"config.json": json.dumps(config).encode()}
    if generation is not None:
        files["generation_config.json"] = json.dumps(generation).encode()
    add_turn_end(files, dataset, has_adapters)
    return [json.loads(content).get("eos_token_id") for content in files.values()]


def test_the_end_of_turn_joins_those_of_the_source(dataset, caplog):
    caplog.set_level(logging.INFO)
    assert ids_after(dataset, {}) == [4]
    assert ids_after(dataset, {"eos_token_id": 1}) == [[1, 4]]
    assert ids_after(dataset, {"eos_token_id": 1}, {"eos_token_id": [2, 3]}) == [[2, 3, 4], [2, 3, 4]]
    assert ids_after(dataset, {"text_config": {"eos_token_id": 1}}) == [[1, 4]]
    assert ids_after(dataset, {"eos_token_id": 1}, {}) == [[1, 4], [1, 4]]
    assert caplog.messages[-1] == (
        "Turns end with <|im_end|>, so generation must stop there: the export has eos_token_id [1, 4]"
    )
    assert len(caplog.messages) == 5


def test_the_end_of_turn_is_known_already(dataset, caplog):
    caplog.set_level(logging.INFO)
    assert ids_after(dataset, {"eos_token_id": [1, 4]}) == [[1, 4]]
    assert ids_after(dataset, {"eos_token_id": 1}, {"eos_token_id": 4}) == [1, 4]
    add_turn_end({}, dataset, False)  # no export
    assert not caplog.messages


def test_adapters_have_no_place_for_the_end_of_turn(dataset, caplog):
    assert ids_after(dataset, {"eos_token_id": 1}, has_adapters=True) == [1]
    assert caplog.messages == [
        "Turns end with <|im_end|>, which is no EOS of the model: give generation eos_token_id=4"
    ]


def test_plain_text_has_no_turns(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n')
    dataset = PackedSFTDataset(tmp_path / "text.jsonl", chat_of(CHATML_TEMPLATE), 256)
    assert ids_after(dataset, {"eos_token_id": 1}) == [1]
    (tmp_path / "bad.jsonl").write_text('{"nothing": 1}\n')
    both = f"{tmp_path}/text.jsonl,{tmp_path}/bad.jsonl"
    dataset = PackedSFTDataset(both, chat_of(CHATML_TEMPLATE), 256, bad_records="skip")
    assert ids_after(dataset, {"eos_token_id": 1}) == [[1, 4]]


# ---------------------------------------------------------------------------------------------------------- positions


@pytest.mark.parametrize(
    ("fields", "length", "changed"),
    [
        ({}, 300, {}),
        ({"max_position_embeddings": 256}, 256, {}),
        ({"max_position_embeddings": 256}, 300, {"max_position_embeddings": 300}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 5000, {"max_position_embeddings": 5000}),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 5000, {}),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            5000,
            {
                "max_position_embeddings": 5000,
                "rope_scaling": {"original_max_position_embeddings": 4096, "rope_type": "llama3", "factor": 8.0},
            },
        ),
        (
            {"rope_scaling": {"type": "llama3"}, "original_max_position_embeddings": 64},
            5000,
            {"max_position_embeddings": 5000},
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 64}},
            5000,
            {"max_position_embeddings": 5000},
        ),
    ],
)
def test_an_export_names_the_positions_that_were_trained(fields, length, changed, tmp_path):
    fields = {"max_position_embeddings": 4096, "dtype": "float32"} | fields
    files = {"config.json": json.dumps(fields).encode()}
    export(tmp_path, files, torch.float32, lambda place: (place / "sharded").mkdir(), length)
    assert json.loads((tmp_path / "config.json").read_text()) == fields | changed


def test_more_positions_do_not_change_the_model(tmp_path):
    """Also where the configuration says for llama3 only how many there are."""
    from transformers import AutoModelForCausalLM

    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    source = make_hf_folder("llama", rope=rope, max_position_embeddings=64, folder=tmp_path / "source")
    path = source / "config.json"
    fields = json.loads(path.read_text())
    fields["rope_parameters"].pop("original_max_position_embeddings")
    path.write_text(json.dumps(fields))
    exported = tmp_path / "exported"
    files = {"config.json": path.read_bytes()}
    export(exported, files, torch.float32, lambda place: (place / "sharded").mkdir(), 200)
    save_file(load_file(source / "model.safetensors"), exported / "model.safetensors", {"format": "pt"})
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (source, exported)]
    assert [model.config.max_position_embeddings for model in models] == [64, 200]
    logits = [model(torch.arange(60)[None]).logits for model in models]
    assert torch.equal(*logits)


def test_the_length_trained_is_kept_for_later_starts(tmp_path):
    run = manager(tmp_path / "checkpoint", {})
    assert trained_length(run) == 0
    keep_trained_length(run, 0)
    assert not Path(run.folder).exists()
    run.states["dataloader"].longest = 215
    keep_trained_length(run, trained_length(run))
    resumed = manager(tmp_path / "checkpoint", {})
    resumed.states["dataloader"].longest = 90
    assert trained_length(resumed) == 215
    keep_trained_length(resumed, trained_length(resumed))
    assert trained_length(run) == 215


class Batches:
    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        return iter([(inputs, inputs["input"]) for inputs in self.batches])

    def state_dict(self):
        return {}


def test_a_loader_knows_the_positions_of_what_it_gave_out():
    tokens = torch.zeros(1, 8, dtype=torch.long)
    batches = [{"input": tokens, "positions": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])}]
    batches += [{"input": tokens, "positions": torch.tensor([[0, 1, 2, 0, 1, 2, 0, 0]])}, {"input": tokens}]
    runtime = SimpleNamespace(plan_ahead=Microbatch.of)
    loader: PlannedLoader = with_plans(Batches(*batches), lambda: runtime, WorkCount(), 10, eos_id=1)
    assert loader.longest == 0
    assert [loader.longest for _ in loader] == [4, 4, 8]  # without positions they run over the pack


# ---------------------------------------------------------------------------------------------------------- last line


@pytest.mark.parametrize(
    ("in_hf", "model_only", "base", "line"),
    [
        (True, True, "", 'The model is in run/step-7: AutoModelForCausalLM.from_pretrained("run/step-7")'),
        (
            True,
            True,
            "base",
            "The adapters are in run/step-7: "
            'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "run/step-7")',
        ),
        (
            False,
            True,
            "",
            "The weights are in run/step-7, in torch's format; another run starts from them with "
            "--checkpoint.initial_load_path run/step-7 --checkpoint.no-initial_load_in_hf, and exports them with ",
        ),
        (False, False, "", "The last checkpoint is run/step-7; the run goes on from it with more --training.steps, "),
    ],
)
def test_a_run_says_last_where_its_model_is(in_hf, model_only, base, line, caplog):
    caplog.set_level(logging.INFO)
    last = LastLine()
    last.tell()
    last.note(manager("run", {}, last_save_in_hf=in_hf, last_save_model_only=model_only), 7, base)
    last.tell()
    last.tell()
    (text,) = caplog.messages
    assert text.startswith(line)
