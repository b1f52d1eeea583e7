"""Training on torchtitan 0.3: degrees that do not fit the model, its own entry point, its own text data."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from support.errors import run_ends
from support.hf_models import hf_arguments, make_hf_folder
from support.parity import difference
from support.processes import torchrun
from support.runs import ROOT, TrainingError, corpus, new_folder, on_corpus, train
from torchtitan.components.optimizer import ParamGroupConfig

from torchtitan_magi.training.batches.microbatch import Microbatch
from torchtitan_magi.training.batches.pack_loader import TextLoader
from torchtitan_magi.training.settings.optimizer import check_groups


def test_degrees_that_are_not_as_many_as_processes_are_named():
    message = "context 3, tensor 1, pipeline 1, but torchrun started 2 processes; start as many as they multiply to"
    with run_ends(message):
        train(2, ["--parallelism.context_parallel_degree", "3"])


@pytest.mark.parametrize(
    ("kind", "degree", "message"),
    [
        (
            "llama",
            "tensor_parallel",
            "tensor_parallel_degree is 4, but the model has .* use a degree that divides both",
        ),
        ("llama", "expert_parallel", "expert_parallel_degree is 4, but model.flavor 'hf' has no experts; set it to 1"),
        ("qwen3_moe", "expert_parallel", "expert_parallel_degree is 4, which does not divide the 6 experts of "),
    ],
)
def test_degrees_that_the_model_does_not_divide_by_are_named(kind, degree, message):
    fields = {"num_experts": 6} if kind == "qwen3_moe" else {}
    model = [*hf_arguments(make_hf_folder(kind, **fields), kind), f"--parallelism.{degree}_degree", "4"]
    model.append("--magi.random_weights")
    with run_ends(message):
        train(4, [*model, "--training.dataset_path", f"{corpus()}/train.jsonl"], layers=None)


def test_optimizer_states_that_there_are_not_on_a_device_are_named():
    states = ["--optimizer.implementation", "fused_opt_states_bf16"]
    with run_ends('which torch .* does not have on the CPU, where the optimizer runs; set it to "fused"'):
        train(1, states)
    assert len(train(1, [*states, "--training.dtype", "bfloat16"]).losses) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1e-5}, "optimizer.lr is -1e-05; use a number of at least 0"),
        ({"lr": 1e-5, "betas": (0.9, 1.0)}, "optimizer.beta2 is 1.0; use"),
        ({"lr": 1e-5, "eps": 0.0}, "optimizer.eps is 0.0; use a number above 0"),
        ({"lr": 1e-5, "weight_decay": -0.1}, "optimizer.weight_decay is -0.1; use"),
    ],
)
def test_numbers_that_a_program_gives_the_optimizer_are_checked(options, message):
    good = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-5, "betas": (0.9, 0.95)})
    check_groups([good])
    with pytest.raises(ValueError, match=message):
        check_groups([good, ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=options)])


def test_weights_that_nothing_loads_end_the_run_before_the_first_step():
    model = [*hf_arguments(make_hf_folder("llama")), "--training.dataset_path", f"{corpus()}/train.jsonl"]
    with pytest.raises(TrainingError, match=r"holds weights \(model.safetensors\), but nothing loads them; add enable"):
        train(1, model, layers=None)


def own_entry_point(*options, **how):
    """A run of torchtitan's own command with our configuration of its debug model."""
    command = ["-m", "torchtitan.train", "--module", "torchtitan_magi.titan", "--config", "llama3_debug"]
    command += ["--training.steps", "2", "--training.seq_len", "256", "--training.local_batch_size", "1"]
    command += ["--dataloader.dataset", "sft", "--dataloader.dataset_path", f"{corpus()}/train.jsonl"]
    command += ["--hf_assets_path", f"{corpus()}/tokenizer", "--dump_folder", new_folder()]
    return torchrun("--nproc-per-node=1", *command, *options, **how)


def test_torchtitans_own_entry_point_trains_our_configuration():
    run = own_entry_point("--debug.deterministic")
    assert run.returncode == 0, run.stderr[-3000:]
    losses = re.findall(r"step: \d/2  loss: ([\d.]+)", run.stderr + run.stdout)
    assert len(losses) == 2
    assert "deterministic flex attention" in run.stderr + run.stdout


OVERRIDE = """
from dataclasses import fields
from torchtitan.config import override
from torchtitan.models.common import Linear

@override(target=Linear.Config, fqns=["*.layers.0.*.w2"])
def plain(config):
    return Linear.Config(**{field.name: getattr(config, field.name) for field in fields(Linear.Config) if field.init})
"""


def test_the_command_line_of_torchtitans_entry_point_asks_for_adapters_and_modules(tmp_path):
    """Which are read after the function has made the configuration."""
    Path(tmp_path, "mine.py").write_text("print('mine is imported')" + OVERRIDE)
    here, lora = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, ["--magi.lora.rank", "2", "--magi.imports", "mine"]
    run = own_entry_point(*lora, **here)
    assert "LoRA trains 55,296 parameters, " in run.stderr + run.stdout
    assert "mine is imported" in run.stdout
    odd = own_entry_point(*lora, "--override.imports", "mine.plain", **here)
    assert "rank is 2, but layers.0.feed_forward.w2.weight would be trained, too, which" in odd.stderr + odd.stdout


LENGTH = 128  # tokens of a text that are inputs: BOS and all but the EOS


def texts(tokenizer):
    """Texts of LENGTH inputs each."""
    source = inspect.getsource(inspect)
    for start in range(0, 12000, 2000):
        ends = range(start + LENGTH, start + 6 * LENGTH)
        yield next(source[start:end] for end in ends if len(tokenizer.encode(source[start:end]).ids) == LENGTH - 1)


def has_texts(report):
    from datasets import Dataset
    from tokenizers import Tokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    rows = [{"text": text} for text in texts(Tokenizer.from_file(f"{corpus()}/tokenizer/tokenizer.json"))]
    DATASETS["texts"] = DatasetConfig(
        path="", loader=lambda _: Dataset.from_list(rows), sample_processor=lambda row: row["text"]
    )


def test_documents_of_torchtitans_text_data_do_not_see_each_other():
    """Its inputs have no EOS between them: two texts in one pack train as in two."""
    runs = []
    for packs in (1, 2):
        sizes = ["--training.local_batch_size", f"{packs}", "--training.seq_len", f"{2 // packs * LENGTH}"]
        runs.append(train(1, ["--training.dataset", "texts", *sizes, *on_corpus()[:2]], setup=has_texts))
    assert len(runs[0].losses) == 3
    assert difference(*runs) <= 1e-5


class Loader(list):
    """A loader of one's own that is iterated over."""

    state_dict = load_state_dict = None


def test_a_loader_without_positions_gives_documents_that_end_with_eos():
    tokens, positions = torch.tensor([[5, 1, 6, 7, 1, 8]] * 2), torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    (with_positions, _), (without, _) = TextLoader(
        Loader([({"input": tokens, "positions": positions}, None), ({"input": tokens}, None)])
    )
    found = [Microbatch.of(inputs, None, 1).branches[:, :2].tolist() for inputs in (with_positions, without)]
    assert found[0] == [[0, 3], [3, 5], [5, 6], [6, 12]]
    assert found[1] == [[0, 2], [2, 5], [5, 6], [6, 8], [8, 11], [11, 12]]
    assert set(with_positions) == {"input", "documents"}


def test_events_are_logged_if_wanted():
    folder = Path(new_folder())
    train(1, ["--debug.enable_structured_logging", "--training.steps", "2", "--job.dump_folder", str(folder)])
    (path,) = (folder / "structured_logs").iterdir()
    assert {"[step N/A]", "[step 1]", "[step 2]"} <= set(re.findall(r"\[step [^]]*\]", path.read_text()))
