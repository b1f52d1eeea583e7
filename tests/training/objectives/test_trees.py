"""Records with common beginnings, computed once: losses and gradients are those of flat packs of the same records."""

import functools
import re
import shutil

import pytest
from support.hf_loop import pairs_file
from support.parity import difference, trained_anew
from support.rollouts import rollouts_file
from support.runs import IS_0_3, TrainingError, corpus, train
from support.trees import answers_files, trees_file

from torchtitan_magi.data import PackedSFTDataset
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer

from layouts import TOLERANCE, max_relative_difference  # isort: skip

SEQ_LEN = 2048
pytestmark = pytest.mark.either


@functools.cache
def packs_per_epoch(shared, path=None):
    """A step is an epoch, so that it has the same records with and without trees."""
    tokenizer = load_chat_tokenizer(corpus() / "tokenizer")
    packs = PackedSFTDataset(path or trees_file(), tokenizer, SEQ_LEN, shuffle=False, epochs=1, share_prefixes=shared)
    return len(list(packs))


def trained(name, *options, shared, path=None, **kwargs):
    options = ["--training.steps", "2", *options, "--training.dataset_path", str(path or trees_file())]
    options += ["--magi.no-shuffle"]
    options += ["--training.local_batch_size", "1"]
    options += ["--training.global_batch_size", str(packs_per_epoch(shared, path))]
    options += ["--training.seq_len", str(SEQ_LEN), *(["--magi.share_prefixes"] if shared else [])]
    return trained_anew(name, *options, entry="torchtitan_magi.train", **kwargs)


@functools.cache
def flat(per):
    return trained("cp1", "--magi.loss_per", per, shared=False)


def assert_trained_alike(run, expected):
    assert max_relative_difference(run.losses[:1], expected.losses[:1]) < 1e-6
    assert max_relative_difference(run.grad_norms[:1], expected.grad_norms[:1]) < 1e-6
    assert difference(run, expected) <= TOLERANCE


def test_trees_take_fewer_packs():
    assert packs_per_epoch(True) < 0.6 * packs_per_epoch(False)


LONG = pytest.mark.long
CASES = [("cp1", "token"), pytest.param("cp1", "document", marks=LONG), pytest.param("cp2", "token", marks=LONG)]
CASES += [("cp2_tp2", "document")]


@pytest.mark.parametrize(("name", "per"), CASES)
def test_losses_and_gradients_are_those_of_flat_packs(name, per):
    assert_trained_alike(trained(name, "--magi.loss_per", per, shared=True), flat(per))


@pytest.mark.parametrize("per", ["token", "document"])
def test_answers_count_as_so_many_records(per):
    whole, alone = answers_files()
    expected = trained("cp1", "--magi.loss_per", per, shared=False, path=alone)
    run = trained("cp2", "--magi.loss_per", per, shared=True, path=whole)
    assert packs_per_epoch(True, whole) < packs_per_epoch(False, alone)
    assert_trained_alike(run, expected)


def test_a_run_says_what_it_saves_and_validates_on_trees(tmp_path):
    path = str(trees_file())
    options = ["--validation.enable", "--validation.dataset", "sft", "--validation.dataset_path", path]
    options += ["--validation.steps=-1", "--validation.seq_len", str(SEQ_LEN), "--training.steps", "1"]
    run, alone = (trained("cp1", *options, shared=shared) for shared in (True, False))
    assert run.validation_losses == pytest.approx(alone.validation_losses, rel=1e-6)
    (said,) = re.findall(r"magi.share_prefixes: .*", run.output)
    counted = (
        r"([\d,]+) tokens in place of ([\d,]+) in 37 records; a step takes about 37 records in place of [\d.]+, an"
    )
    few, many = (int(number.replace(",", "")) for number in re.search(counted, said).groups())
    assert few < many / 2
    assert "magi.share_prefixes" not in alone.output


def test_a_killed_run_goes_on(tmp_path):
    arguments = ["--checkpoint.enable", "--checkpoint.interval", "2", "--job.dump_folder", str(tmp_path)]
    arguments += ["--training.dataset_path", str(trees_file()), "--magi.share_prefixes", "--training.steps", "5"]
    arguments += ["--training.seq_len", "1024", "--parallelism.context_parallel_degree", "2"]
    whole = train(2, arguments, entry="torchtitan_magi.train")
    for step in (4, 5):
        shutil.rmtree(tmp_path / "checkpoint" / f"step-{step}")
    rest = train(2, arguments, entry="torchtitan_magi.train")
    assert rest.losses == whole.losses[2:]
    assert rest.grad_norms == whole.grad_norms[2:]
    shutil.rmtree(tmp_path / "checkpoint" / "step-5")
    with pytest.raises(TrainingError, match="share_prefixes = True, this run has False; resume with the same value"):
        train(2, [*arguments, "--magi.no-share_prefixes", "--training.steps", "6"], entry="torchtitan_magi.train")


def test_experts_that_are_balanced_by_what_they_get_are_refused():
    model = ["deepseek_v3", "debugmodel"] if IS_0_3 else ["qwen3", "debugmodel_moe_varlen"]
    options = ["--model.name", model[0], "--model.flavor", model[1]]
    options += ["--training.dataset_path", str(trees_file()), "--magi.share_prefixes"]
    with pytest.raises(TrainingError, match="share_prefixes is true, but this model balances its experts"):
        train(1, options, layers=None, entry="torchtitan_magi.train")
    options[-2:] = [str(pairs_file()), "--training.dataset", "dpo"]
    with pytest.raises(TrainingError, match=r"dpo\.shared_prompt is true, but this model .*; set it to false, or use"):
        train(1, options, layers=None, entry="torchtitan_magi.train")
    options[-3:] = [str(rollouts_file()), "--training.dataset", "rollouts"]
    with pytest.raises(
        TrainingError, match="'rollouts', which share their prompts, but this model balances its experts"
    ):
        train(1, options, layers=None, entry="torchtitan_magi.train")
