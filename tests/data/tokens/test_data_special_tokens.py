"""A tokenizer is read as transformers reads it, whatever file names its special tokens; runs, the inspector and the
report read the same one."""

import json

import numpy as np
import pytest
from support.chat import byte_level_tokenizer
from support.conversations import assistant, user
from support.runs import IS_0_3
from transformers import AutoTokenizer

from torchtitan_magi.data import ChatTokenizer
from torchtitan_magi.data.inspection.summary import inspect_data
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer, load_tokenizer
from torchtitan_magi.data.tokens.chat import CHATML_TEMPLATE
from torchtitan_magi.sizing.sample_packs import read_data_set
from torchtitan_magi.training.settings.model_folder import check_vocabulary

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEXT = "<s>the<|im_start|> user\n<tool> a <|im_end|> <x></s><pad>"
NUMBERED = {
    "60": {"content": "<tool>", "special": False, "normalized": False, "lstrip": False, "rstrip": True},
    "57": {"content": "<|im_start|>", "special": True},
    "58": {"content": "<|im_end|>", "special": True},
}
TYPED = {"__type": "AddedToken", "content": "<x>", "lstrip": True, "normalized": False, "rstrip": False}
# files of a folder -> the tokens that they add, in order; the tokenizer's own are <s> and <|im_end|>
FOLDERS = {
    "numbered": ({CONFIG: {"added_tokens_decoder": NUMBERED}}, ["<|im_start|>", "<tool>"]),
    "named": ({CONFIG: {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}}, ["</s>", "<pad>"]),
    "named, with flags": ({CONFIG: {"eos_token": TYPED}}, ["<x>"]),
    "named by another word": ({CONFIG: {"image_token": "<x>", "add_bos_token": True}}, ["<x>"]),
    "additional": ({CONFIG: {"additional_special_tokens": ["<x>", "<|im_start|>"]}}, ["<x>", "<|im_start|>"]),
    "extra": ({CONFIG: {"extra_special_tokens": ["<tool>"], "additional_special_tokens": ["<x>"]}}, ["<tool>"]),
    "extra, with names": ({CONFIG: {"extra_special_tokens": {"tool_token": "<tool>"}}}, ["<tool>"]),
    "map": ({MAP: {"eos_token": "</s>", "additional_special_tokens": ["<tool>"]}}, ["</s>", "<tool>"]),
    "map, with flags": ({MAP: {"bos_token": {"content": "<s>"}, "pad_token": {"content": "<pad>"}}}, ["<pad>"]),
    "map before configuration": ({CONFIG: {"eos_token": "<x>"}, MAP: {"eos_token": "</s>"}}, ["</s>"]),
    "map that does not count": (
        {CONFIG: {"added_tokens_decoder": NUMBERED}, MAP: {"eos_token": "</s>"}, ADDED: {"<x>": 90}},
        ["<|im_start|>", "<tool>"],
    ),
    "added": ({ADDED: {"<x>": 403, "<tool>": 402}, MAP: {"unk_token": "<x>"}}, ["<tool>", "<x>"]),
}


def write_folder(folder, files, template=CHATML_TEMPLATE):
    tokenizer = byte_level_tokenizer(["<s>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {CONFIG: {}} | files
    files[CONFIG] = {"tokenizer_class": "PreTrainedTokenizerFast", **files[CONFIG]}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(template)
    return tokenizer


def run_tokenizer(folder):
    """The tokenizer that a run of the installed torchtitan builds."""
    if IS_0_3:
        from torchtitan_magi.titan.v03.components import MagiTokenizer

        return MagiTokenizer.Config().build(tokenizer_path=str(folder))
    from torchtitan_magi.titan.v02.components import MagiTokenizer

    return MagiTokenizer(str(folder))


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_are_those_of_transformers(name, tmp_path):
    files, added = FOLDERS[name]
    own = write_folder(tmp_path, files).get_vocab_size()
    theirs, (ours, bos, eos) = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert [ours.id_to_token(own + number) for number in range(len(added) + 1)] == [*added, None]
    assert ours.encode(TEXT, add_special_tokens=False).ids == theirs.encode(TEXT, add_special_tokens=False)
    tokens = [tokenizer.get_added_tokens_decoder() for tokenizer in (ours, theirs.backend_tokenizer)]
    assert repr(tokens[0]) == repr(tokens[1])  # with their flags
    assert (bos, eos) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parametrize("name", FOLDERS)
def test_training_has_the_same_tokenizer(name, tmp_path):
    write_folder(tmp_path, FOLDERS[name][0])
    (ours, bos, eos), theirs = load_tokenizer(tmp_path), run_tokenizer(tmp_path)
    assert theirs.tokenizer.to_str() == ours.to_str()
    assert (theirs.bos_id, theirs.eos_id) == (bos, eos)
    assert (theirs.bos_token, theirs.eos_token) == tuple(i if i is None else ours.id_to_token(i) for i in (bos, eos))
    assert theirs.encode("the", add_bos=bos is not None, add_eos=eos is not None)[:1] == (
        [bos] if bos is not None else ours.encode("the").ids[:1]
    )


def test_inspector_and_report_count_the_tokens_of_training(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_MAGI_CACHE", str(tmp_path / "cache"))
    own = write_folder(tmp_path, FOLDERS["numbered"][0]).get_vocab_size()
    records = [{"messages": [user("the cat"), assistant("a hat " * n)]} for n in (1, 2, 3)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = run_tokenizer(tmp_path)
    chat = ChatTokenizer.from_assets(run.tokenizer, run.bos_id, run.eos_id, tmp_path)
    lengths = [len(chat(record).tokens) for record in records]
    inspection = inspect_data(tmp_path / "data.jsonl", tmp_path)
    assert list(inspection.tallies[0].tokens) == lengths
    assert f"{own + 2} tokens" in inspection.setting[1]
    packs = read_data_set(str(tmp_path / "data.jsonl"), tmp_path, 200, 9, 0, "sft", False).packs
    assert sorted(np.concatenate(packs)) == [length - 1 for length in lengths]


def test_a_template_sees_the_special_tokens_that_have_a_name(tmp_path):
    template = "{{ pad_token }}{{ tool_token }}{{ eos_token }}{{ sep_token }}" + CHATML_TEMPLATE
    tokens = {"pad_token": "<pad>", "eos_token": "</s>", "extra_special_tokens": {"tool_token": "<tool>"}}
    write_folder(tmp_path, {CONFIG: tokens}, template)
    conversation = [user("a"), assistant("b")]
    text, _ = load_chat_tokenizer(tmp_path).render(conversation)
    assert text.startswith("<pad><tool></s>")
    assert text == AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(conversation, tokenize=False)


def test_the_fingerprint_knows_added_tokens_and_what_the_template_writes(tmp_path):
    def fingerprint(template=CHATML_TEMPLATE, **config):
        write_folder(tmp_path, {CONFIG: config}, template)
        return load_chat_tokenizer(tmp_path).fingerprint

    pads = CHATML_TEMPLATE + "{{ pad_token }}"
    assert fingerprint() == fingerprint(pad_token=None)
    assert fingerprint() != fingerprint(additional_special_tokens=["<x>"])
    assert fingerprint(pad_token="<s>") == fingerprint(pad_token="<|im_end|>")  # tokens are the same
    assert fingerprint(pads, pad_token="<s>") != fingerprint(pads, pad_token="<|im_end|>")


def test_tokens_that_the_embedding_lacks_are_counted_in_full(tmp_path):
    tokens = write_folder(tmp_path, FOLDERS["map"][0]).get_vocab_size() + 2
    job = type("Job", (), {"model": type("Model", (), {"hf_assets_path": str(tmp_path)})})

    def check(vocab_size):
        check_vocabulary(run_tokenizer(tmp_path), type("Config", (), {"vocab_size": vocab_size}), job)

    check(tokens)
    with pytest.raises(ValueError, match=f"has {tokens} tokens, the model's vocab_size is {tokens - 1}"):
        check(tokens - 1)


def test_a_tokenizer_of_another_model_is_told_by_the_models_special_tokens(tmp_path, caplog):
    tokens = write_folder(tmp_path, FOLDERS["map"][0]).get_vocab_size() + 2
    job = type("Job", (), {"model": type("Model", (), {"hf_assets_path": str(tmp_path)})})
    tokenizer, model = run_tokenizer(tmp_path), type("Config", (), {"vocab_size": 9999})
    tokenizer.bos_id = 7

    def check(**fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        check_vocabulary(tokenizer, model, job)

    check(bos_token_id=tokenizer.bos_id, eos_token_id=[0, tokens - 1])
    check(bos_token_id=None)
    assert not caplog.records
    for eos in (tokens, [0, tokens]):
        with pytest.raises(
            ValueError, match=f"eos_token_id {tokens}, but the tokenizer there has {tokens} tokens; use"
        ):
            check(eos_token_id=eos)
    check(bos_token_id=tokenizer.bos_id + 1)
    assert "is it the tokenizer that came with the weights?" in caplog.text


def test_a_folder_without_tokenizer_json(tmp_path, caplog):
    """What torchtitan takes, everything takes."""
    whole = write_folder(tmp_path, {CONFIG: {"bos_token": "<s>"}})
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer.json does not exist; give the directory of a Hugging Face tok"):
        load_tokenizer(tmp_path)
    model = json.loads(whole.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    text = "the cat and\n  the hat"
    assert load_tokenizer(tmp_path).tokenizer.encode(text).ids == whole.encode(text).ids
    assert run_tokenizer(tmp_path).encode(text) == whole.encode(text).ids
    assert "has no tokenizer.json: vocab.json is read with merges.txt as GPT-2's byte-level BPE" in caplog.text
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "c": 2, "ab": 3}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nab c\n")  # at which the library panics
    with pytest.raises(
        ValueError, match=r"merges.txt has 'ab c', but not all of it is in vocab.json\); download it again"
    ):
        load_tokenizer(tmp_path)
    for name in ("merges.txt", "vocab.json"):
        (tmp_path / name).unlink()
    (tmp_path / "vocab.txt").write_text("[UNK]\nthe\n<s>\n")
    tokenizer, bos, _ = load_tokenizer(tmp_path)
    assert (tokenizer.encode("<s>the<s>cat").ids, bos) == ([2, 1, 2, 0], 2)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({CONFIG: {"bos_token": 3}}, r'tokenizer_config.json: "bos_token" has 3; write the text of a token'),
        ({CONFIG: {"additional_special_tokens": "<x>"}}, r"\"additional_special_tokens\" is '<x>'; write a list of"),
        ({CONFIG: {"added_tokens_decoder": []}}, r'"added_tokens_decoder" is \[\]; write an object of tokens'),
        ({CONFIG: {"added_tokens_decoder": {"a": {"content": "<x>"}}}}, r"'a' is no number of a token; write an int"),
        ({CONFIG: {"added_tokens_decoder": {"1": {}}}}, r'"added_tokens_decoder" has {}; write the text of a token'),
        ({MAP: []}, r"special_tokens_map.json is not a JSON object \(it is a list\); download the tokenizer's files"),
        ({ADDED: {"<x>": None}}, r"added_tokens.json: None is no number of a token; write an integer"),
    ],
)
def test_malformed_files_are_one_line(files, said, tmp_path):
    write_folder(tmp_path, files)
    for load in (load_tokenizer, run_tokenizer):
        with pytest.raises(ValueError, match=said) as error:
            load(tmp_path)
        assert "\n" not in str(error.value)
