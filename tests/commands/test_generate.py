"""verify --generate: an export answers through transformers, and the command says whether it stopped by itself."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf_models import make_hf_folder

from torchtitan_magi import verify
from torchtitan_magi.commands.generation import MAX_NEW_TOKENS, QUESTION


def set_fields(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def set_ends(folder, *ends):
    for name in ("config.json", "generation_config.json"):
        set_fields(folder / name, eos_token_id=list(ends))
    return folder


def folder_that_says(*tokens):
    """A model that says these tokens, one after the other, and then begins again: its blocks add nothing."""
    folder = make_hf_folder("llama")
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight", "embed_tokens.weight")):
            weight.zero_()
    embedding, output = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding[:, 0] = 1.0
    weights["model.norm.weight"].fill_(1.0)
    for number, token in enumerate(tokens):
        output[token, number] = 1.0
    for number, token in enumerate(tokens[:-1], 1):
        embedding[token] = torch.nn.functional.one_hot(torch.tensor(number), embedding.shape[1])
    save_file(weights, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def words():
    """The tokens of an answer, its text, and the token that ends a turn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_hf_folder("llama"))
    tokens = tokenizer("why", add_special_tokens=False).input_ids
    assert len(tokens) == len({*tokens}) > 1
    return tokens, "why", tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.fixture(scope="module")
def speaker(words):
    """It ends its turn, but generation does not know the token that ends it."""
    tokens, _, end = words
    return folder_that_says(*tokens, end)


@pytest.fixture
def stopping(speaker, words, tmp_path):
    return set_ends(shutil.copytree(speaker, tmp_path / "model"), 1, words[2])


def said(capsys, *arguments, code=0):
    capsys.readouterr()  # of transformers, while the model was made
    assert verify.main([*map(str, arguments)]) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def test_a_model_answers_and_stops(stopping, words, capsys):
    tokens, text, _ = words
    assert said(capsys, stopping, "--generate", "Why?") == (
        f"Question: Why?\nAnswer: {text}\nIt stopped by itself, with <|im_end|> after {len(tokens) + 1} tokens.\n"
    )
    assert said(capsys, stopping, stopping, "--generate").count(f"{stopping}\nQuestion: {QUESTION}\n") == 2


def test_a_model_whose_turns_end_with_another_token_says_which(speaker, words, capsys):
    tokens, _, end = words
    *_, last = said(capsys, speaker, "--generate").splitlines()
    times = MAX_NEW_TOKENS // (len(tokens) + 1)
    assert last == (
        f"It did not stop within 200 tokens: turns end with <|im_end|>, wrote it {times} times, but generation stops "
        f"at eos_token_id [1]; add {end} to it in generation_config.json, or give it to generate."
    )


def test_a_model_that_never_ends_says_so(words, capsys):
    tokens, _, end = words
    *_, last = said(capsys, set_ends(folder_that_says(*tokens), end), "--generate").splitlines()
    assert last == "It did not stop within 200 tokens: the answer is longer, or the model has not learned to end it."


def test_without_a_chat_template_a_text_is_continued(stopping, words, capsys):
    set_fields(stopping / "tokenizer_config.json", chat_template=None)
    continued = said(capsys, stopping, "--generate", "Once upon")
    assert continued.startswith(f"Text: Once upon\nContinued: {words[1]}\nIt stopped by itself")


def adapters(folder, base):
    """Adapters that change nothing yet, as PEFT writes them."""
    peft = pytest.importorskip("peft", reason="peft writes adapters")
    from transformers import AutoModelForCausalLM

    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(folder)
    set_fields(folder / "adapter_config.json", base_model_name_or_path=str(base))
    return folder


def test_adapters_answer_over_their_base(stopping, words, tmp_path, capsys):
    folder = adapters(tmp_path / "adapters", stopping)
    assert f"Answer: {words[1]}\nIt stopped by itself" in said(capsys, folder, "--generate")


def test_adapters_that_lack_a_tensor_give_no_answer(stopping, tmp_path, capsys):
    folder = adapters(tmp_path / "adapters", stopping)
    path = folder / "adapter_model.safetensors"
    save_file(dict(list(load_file(path).items())[1:]), path)
    *_, line = said(capsys, folder, "--generate", code=1).splitlines()
    assert line.startswith(f"{folder} gives no answer: Found missing adapter keys")


def test_adapters_without_their_base_say_what_to_do(stopping, tmp_path, capsys):
    folder = adapters(tmp_path / "adapters", stopping)
    shutil.rmtree(stopping)
    assert said(capsys, folder, "--generate", code=1) == (
        f"{folder} gives no answer: its base model is '{stopping}', which is no folder here; start where it is, or set "
        "base_model_name_or_path in adapter_config.json\n"
    )


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_a_missing_package_is_one_line(package, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    if package == "peft":
        (tmp_path / "adapter_config.json").write_text("{}")
    expected = f"--generate needs {package} for {tmp_path}; pip install {package}\n"
    assert said(capsys, tmp_path, "--generate", code=1) == expected


def remove_weights(folder):
    for path in folder.glob("*.safetensors"):
        path.unlink()


def remove_a_tensor(folder):
    (path,) = folder.glob("*.safetensors")
    save_file({name: x for name, x in load_file(path).items() if name != "model.norm.weight"}, path, {"format": "pt"})


def refuse_questions(folder):
    set_fields(folder / "tokenizer_config.json", chat_template="{{ raise_exception('no\nquestions') }}")


WRONG = {
    "it has no config.json; give the folder that a run with": lambda folder: (folder / "config.json").unlink(),
    "no questions": refuse_questions,
    "model.safetensors": remove_weights,
    "lacks model.norm.weight, which would be random; copy or download it again": remove_a_tensor,
    "config.json": lambda folder: (folder / "config.json").write_text("{"),
}


@pytest.mark.parametrize("reason", WRONG)
def test_what_is_wrong_with_a_folder_is_one_line(reason, stopping, capsys):
    WRONG[reason](stopping)
    *_, line = said(capsys, stopping, "--generate", code=1).splitlines()  # after transformers' progress
    assert line.startswith(f"{stopping} gives no answer: ")
    assert reason in line
