"""The examples run as they stand."""

import json
import re
import runpy

import pytest
import torch
from support.hf_models import make_hf_folder, tensors_of
from support.processes import python, torchrun
from support.runs import ROOT, run_script

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name, processes=None):
    """What it prints."""
    path = ROOT / "examples" / name
    done = torchrun(f"--nproc-per-node={processes}", path) if processes else python(path)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) < 120


def test_a_mask_of_ones_own():
    printed = run("own_mask.py")
    assert "7 slices, 333 of 729 pairs" in printed
    assert float(re.search(r"relative: (\S+)", printed)[1]) < 1e-5
    assert printed.count("receives K/V of") == 4


def test_a_plain_loop_learns_the_same_on_any_number_of_ranks():
    one, two = run("fsdp_loop.py", 1), run_script(2, ROOT / "examples" / "fsdp_loop.py").output
    alone, together = ([float(loss) for loss in re.findall(r"loss (\S+)", printed)] for printed in (one, two))
    assert together == pytest.approx(alone, rel=0, abs=1.01e-4)  # the last printed digit may round apart
    assert alone[-1] < 0.5 < 4 < alone[0]


def test_answers_are_sampled_and_learned_on_any_number_of_ranks(tmp_path):
    folder, found = make_hf_folder("llama", initializer_range=0.1), []
    for processes in (1, 2):
        arguments = ["--job.config_file", ROOT / "examples" / "rl_loop.toml", "--model.hf_assets_path", folder]
        arguments += ["--job.dump_folder", tmp_path / str(processes), "--training.mixed_precision_param", "float32"]
        arguments += ["--training.steps", 4, "--training.seq_len", 512, "--optimizer.lr", "1e-2"]
        arguments += ["--parallelism.context_parallel_degree", processes]
        printed = run_script(processes, ROOT / "examples" / "rl_loop.py", *arguments).output
        steps = re.findall(r"^step (\d+): reward (\S+), loss \S+, ratio (\S+)", printed, re.M)
        assert [int(number) for number, *_ in steps] == [1, 2, 3, 4]
        assert {ratio for *_, ratio in steps} == {"1.0000"}  # who samples has the weights that are trained
        found.append([float(reward) for _, reward, _ in steps])
        assert (tmp_path / str(processes) / "checkpoint" / "step-4" / "config.json").is_file()
    assert found[0][0] == found[1][0]
    assert found[0] == pytest.approx(found[1], abs=0.02)  # a sampled token may change by rounding


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5"])
def test_who_samples_takes_weights_by_their_names_in_files(kind):
    """In memory transformers has the experts of a layer in one tensor, and other names of what sees no pictures."""
    first, other = (make_hf_folder(kind, seed=seed) for seed in (0, 1))
    Sampler = runpy.run_path(str(ROOT / "examples" / "rl_loop.py"))["Sampler"]
    sampler, wanted, tokens = Sampler(first), Sampler(other).model, torch.arange(30)[None]
    assert not torch.equal(sampler.model(tokens).logits, wanted(tokens).logits)
    sampler.load((name, tensor) for name, tensor in tensors_of(other).items() if "visual" not in name)
    assert torch.equal(sampler.model(tokens).logits, wanted(tokens).logits)


def test_a_sampled_answer_ends_at_any_end_that_the_model_has(tmp_path):
    """What comes behind it is padding, which nobody sampled."""
    folder = make_hf_folder("llama", initializer_range=0.1, folder=tmp_path / "model")
    path, ends = folder / "generation_config.json", set(range(0, 512, 4))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": sorted(ends)}))
    sampler = runpy.run_path(str(ROOT / "examples" / "rl_loop.py"))["Sampler"](folder)
    for answer in sampler.rollouts(0)[0]["completions"]:
        *before, last = answer["completion_ids"]
        assert not ends & set(before)
        assert last in ends or len(before) == 31


def test_models_of_transformers_have_the_losses_they_have_alone():
    printed = run("transformers_attention.py", 2)  # it asserts that they have
    assert re.findall(r"^(\w+) +on 2 ranks", printed, re.M) == ["llama", "qwen3", "mistral", "granite"]
