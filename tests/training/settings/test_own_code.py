"""`[magi] imports`: a user's module adds a flavor, with 0.2.2 a converter, and a data set before they are looked up."""

import pytest
from support.errors import assert_one_line, changed, error_of
from support.processes import run
from support.runs import IS_0_3, ROOT, OnPath, train

DATA_SET = """
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

DATASETS["words"] = DatasetConfig(path="", loader=None, sample_processor=None)
"""
OF_0_3 = """
from torchtitan.models.llama3 import llama3_configs


def mine(**options):
    config = llama3_configs["debugmodel"](**options)
    config.layers = config.layers[:1]
    return config


llama3_configs["mine"] = mine
print("1 layer of 256 dimensions is mine")
"""
OF_0_2_2 = """
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.protocols.train_spec import get_train_spec

get_train_spec("llama3").model_args["mine"] = TransformerModelArgs(
    dim=64, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=2048, attn_type="varlen", attn_mask_type="block_causal"
)


class Frozen:
    def __init__(self, job_config, parallel_dims):
        self.degree = parallel_dims.cp

    def convert(self, model):
        model.tok_embeddings.requires_grad_(False)
        print(f"{model.model_args.dim} embedding dimensions are frozen, cp {self.degree}")

    def post_optimizer_hook(self, model):
        pass


register_model_converter(Frozen, "frozen")
"""
MODULE = DATA_SET + (OF_0_3 if IS_0_3 else OF_0_2_2)
USED = ["--model.flavor", "mine", "--training.steps", "2", "--training.seq_len", "128"]
USED += [] if IS_0_3 else ["--model.converters", "frozen"]
SAID = "1 layer of 256 dimensions is mine" if IS_0_3 else "64 embedding dimensions are frozen, cp "


@pytest.fixture
def folder(tmp_path):
    """A folder with the user's package."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text(MODULE)
    return tmp_path


def test_an_own_flavor_trains(folder):
    arguments = [*USED, "--magi.imports", "my_package", "--parallelism.context_parallel_degree", "2"]
    trained = train(2, arguments, setup=OnPath(folder), layers=None)
    assert len(trained.losses) == 2
    assert SAID + "2" * (not IS_0_3) in trained.output


@pytest.mark.either
def test_train_sh_finds_the_module_in_the_folder_of_its_caller(folder):
    path = changed(folder, ("[magi]", '[magi]\nimports = ["my_package"]'))
    command = ["bash", ROOT / "scripts" / "train.sh", path.name, *USED, "--job.dump_folder", folder / "run"]
    result = run(*command, cwd=folder, PYTHONPATH="")
    assert result.returncode == 0, result.stderr[-4000:]
    assert SAID in result.stdout
    assert "Training completed" in result.stdout + result.stderr


def test_an_own_data_set_is_known(folder):
    """torchtitan goes on to load it, which this one does not say how to."""
    arguments = ["--magi.imports", "my_package", "--training.dataset", "words"]
    error = error_of(arguments, setup=OnPath(folder))
    assert (error.type, str(error)) == ("TypeError", "'NoneType' object is not callable")
    without = error_of(["--training.dataset", "words"])
    assert_one_line(without, ["training.dataset is 'words'; use one of 'sft', 'dpo', "])


@pytest.mark.parametrize(
    ("names", "messages"),
    [
        ('["my_pakage"]', ["magi.imports has 'my_pakage', but there is no module 'my_pakage'", "or add the folder"]),
        ('["json.none"]', ["magi.imports has 'json.none', but there is no module 'json.none'", "install it"]),
        ('"my_package"', ["magi.imports is 'my_package'; use a list of module names"]),
        ('["my_folder/my_package"]', ["magi.imports is ['my_folder/my_package']; use a list of module names"]),
        ("[3]", ["magi.imports is [3]; use a list of module names"]),
    ],
)
def test_a_module_that_is_missing_is_one_line(names, messages, tmp_path):
    assert_one_line(error_of([], toml=changed(tmp_path, ("[magi]", f"[magi]\nimports = {names}"))), messages)


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ("import nothing_like_this", "ModuleNotFoundError", "No module named 'nothing_like_this'"),
        ("from json import nothing", "ImportError", "cannot import name 'nothing' from 'json'"),
        ("1 / 0", "ZeroDivisionError", "division by zero"),
    ],
)
def test_what_a_module_raises_is_its_own(line, kind, message, folder):
    (folder / "my_package" / "__init__.py").write_text(f"{line}\n")
    error = error_of(["--magi.imports", "my_package"], setup=OnPath(folder))
    assert error.type == kind
    assert str(error).startswith(message)
    assert f'{folder}/my_package/__init__.py", line 1, in <module>' in "".join(error.__notes__)
