"""Our own entry point: the loss without all logits is torchtitan's, and a loss per document is what it says."""

from pathlib import Path

import pytest
import torch
from support.adapter import check
from support.errors import assert_says, changed, value_errors
from support.parity import difference, trained, trained_anew
from support.runs import DEBUG_TOML, call, corpus, watch

from layouts import TOLERANCE, max_relative_difference  # isort: skip


def ours(name, *options, entry="torchtitan_magi.train", **kwargs):
    return trained_anew(name, *options, entry=entry, **kwargs)


def report_tokens_of_the_output_layer(report):
    from torchtitan_magi.training.objectives import logprob_model
    from torchtitan_magi.training.objectives import objective as objectives

    watch(logprob_model, "summed_logprobs", lambda _, hidden, *args, **options: report("rows", len(hidden)))
    watch(objectives.SFT, "count_items", lambda count, _, batch: report("labels", count, batch.labels.numel()))


def test_the_output_layer_runs_for_tokens_with_a_label_only():
    run = ours("cp2_tp2", "--training.steps", "2", "--debug.deterministic", setup=report_tokens_of_the_output_layer)
    assert "deterministic flex attention" in run.output
    rows = [[count for (count,) in run.of("rows", rank)] for rank in range(4)]
    assert rows[0] == rows[1]  # the two ranks that share the vocabulary
    assert rows[2] == rows[3]
    labels = run.of("labels")
    assert [a + b for a, b in zip(rows[0], rows[2], strict=True)] == [count for count, _ in labels]
    assert all(count < tokens for count, tokens in labels)


def test_without_all_logits_validation_is_that_of_the_stock_entry_point(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("".join((corpus() / "validation.jsonl").read_text().splitlines(keepends=True)[:12]))
    options = ["--validation.enable", "--validation.dataset", "sft", "--validation.dataset_path", str(path)]
    options += ["--validation.steps=-1", "--validation.seq_len", "256", "--training.steps", "1"]
    stock, run = ours("cp1", *options, entry="torchtitan.train"), ours("dp2_cp2", *options)
    assert len(run.validation_losses) == 1
    assert run.validation_losses == pytest.approx(stock.validation_losses, rel=1e-5)


def report_token_losses(report):
    """The documents of each microbatch, and the loss of each token."""
    from torchtitan_magi.training.objectives import objective as objectives

    def report_losses(_, model, batch, scale, kept):
        with torch.no_grad():
            logprobs = model(batch)
        report("losses", batch.labels.flatten().tolist(), (-logprobs).flatten().tolist())

    watch(objectives.SFT, "count_items", lambda _, sft, batch: report("documents", batch.branches[:, :2].tolist()))
    watch(objectives.LogprobModel, "summed", report_losses)


@pytest.fixture(scope="module")
def per_document():
    return ours("cp1", "--magi.loss_per", "document", setup=report_token_losses)


def test_the_loss_per_document_by_hand(per_document):
    ((documents,), *_), ((targets, losses), *_) = per_document.of("documents"), per_document.of("losses")
    means = []
    for start, end in documents:
        labelled = [losses[i] for i in range(start, end) if targets[i] != -100]
        means += [sum(labelled) / len(labelled)] if labelled else []
    assert len(means) > 2
    assert per_document.losses[0] == pytest.approx(sum(means) / len(means), rel=1e-6)
    assert abs(per_document.losses[0] - trained("cp1").losses[0]) > 2e-5


def test_the_loss_per_document_is_the_same_under_every_layout(per_document):
    for name in ("dp2_cp2", "cp2_accumulation"):
        assert difference(ours(name, "--magi.loss_per", "document"), per_document) <= TOLERANCE
    assert max_relative_difference(per_document.grad_norms, trained("cp1").grad_norms) > 1e-3


# --------------------------------------------------------------------------------------------- what a user gets wrong

DPO = ["--training.dataset", "dpo"]
VALIDATION = "--validation.enable --validation.dataset sft --validation.dataset_path x"
FOR_DPO = {
    "--magi.dpo.beta 0": ["magi.dpo.beta is 0.0", "use a positive number"],
    "--magi.dpo.beta=-1": ["magi.dpo.beta is -1.0"],
    "--magi.dpo.beta nan": ["magi.dpo.beta is nan"],
    "--magi.dpo.label_smoothing 0.5": ["label_smoothing is 0.5", "less than 0.5"],
    "--magi.dpo.label_smoothing=-0.1": ["label_smoothing is -0.1", "0 or more"],
    "--magi.dpo.label_smoothing 0.1 --magi.dpo.loss ipo": ["0.1 with magi.dpo.loss 'ipo'", "set it to 0"],
    "--magi.dpo.reference_path a.npz": ["is 'a.npz' with magi.dpo.reference 'model'", 'reference "file", or leave it'],
    "--magi.dpo.reference_path . --magi.dpo.reference file": ["reference_path is '.', a folder", "the name of a file"],
    "--magi.dpo.label_smoothing 0.1 --magi.dpo.loss hinge": ["with magi.dpo.loss 'hinge'", "set it to 0"],
    "--magi.long_documents split": ["magi.long_documents is 'split'", 'use "truncate"'],
    "--magi.positions pack": ['magi.positions is "pack"', 'use "auto"'],
    VALIDATION: ["validation.dataset is 'sft'", "'dpo'"],
    "--magi.share_prefixes": ["magi.share_prefixes is true and training.dataset 'dpo'", "magi.dpo.shared_prompt"],
    "--magi.loss_per document": ['magi.loss_per is "document"', "training.dataset 'dpo'", 'use that, or "token"'],
}
FOR_SFT = {
    "--magi.loss_per document --training.dataset c4": ["training.dataset 'c4'", "dataset 'sft'"],
    "--validation.enable --validation.dataset dpo --validation.dataset_path x": ["validation.dataset is 'dpo'"],
    "--training.seq_len 1002": ["training.seq_len is 1002", "multiple of 4", "context_parallel_degree"],
    "--parallelism.context_parallel_degree 3": ["training.seq_len is 1024", "multiple of 6"],
    f"{VALIDATION} --validation.seq_len 1001": ["validation.seq_len is 1001", "multiple of 4"],
    VALIDATION: ["validation.seq_len is 2048", "at most training.seq_len, 1024"],
    "--training.steps 0": ["training.steps is 0", "at least 1"],
    "--training.dataset stf": ["training.dataset is 'stf'", "'sft', 'dpo'"],
    "--magi.share_prefixes --training.dataset c4": ["training.dataset 'c4'", "dataset 'sft': use that, or false"],
    "--magi.share_prefixes --magi.positions pack": ['magi.positions "pack"', 'use "auto"'],
    "--checkpoint.enable --checkpoint.exclude_from_loading optimiser": ["has 'optimiser'; use some of optimizer, lr_"],
    "--checkpoint.enable --checkpoint.exclude_from_loading=": ["exclude_from_loading has ''; use some of optimizer"],
    "--magi.overlap_stages 17": ["magi.overlap_stages is 17", "at most 16"],
}


IN_FILE = {
    'template_date = "26 Jul"': ["magi.template_date is '26 Jul'", 'use a date such as "2024-07-26"'],
    'backend = "fla"': ["magi.backend is 'fla'", "use one of 'auto', 'ffa', 'flex'"],
    'positions = "row"': ["magi.positions is 'row'", "use one of 'auto', 'document', 'pack'"],
    'long_documents = "drop"': ["magi.long_documents is 'drop'", "use one of 'truncate', 'split'"],
    "overlap_stages = -3": ["magi.overlap_stages is -3", "use 0 for no overlap"],
    'overlap_stages = "two"': ["magi.overlap_stages is 'two'", "use 0 for no overlap"],
    "epochs = true": ["magi.epochs is True", "use a number of passes"],
    'shuffle = "false"': ["magi.shuffle is 'false'", "use true or false"],
}


def errors_of(cases):
    """What the check of the configuration says to each case of arguments."""
    return value_errors(check, [(DEBUG_TOML, *arguments) for arguments in cases])


def test_a_wrong_option_is_one_line_that_names_the_remedy():
    cases = [[*DPO, *case.split()] for case in FOR_DPO] + [case.split() for case in FOR_SFT]
    for said, messages in zip(call(errors_of, cases), [*FOR_DPO.values(), *FOR_SFT.values()], strict=True):
        assert said is not None
        assert_says(said, messages)
    assert call(errors_of, [[], DPO, ["--magi.loss_per", "document"]]) == [None] * 3


def test_a_wrong_option_in_the_file_is_one_line_that_names_the_remedy(tmp_path):
    files = [tmp_path / f"{number}.toml" for number in range(len(IN_FILE))]
    for file, option in zip(files, IN_FILE, strict=True):
        changed(tmp_path, ("[magi]", f"[magi]\n{option}")).rename(file)
    found = call(value_errors, check, [(file,) for file in files])
    for said, messages in zip(found, IN_FILE.values(), strict=True):
        assert_says(said, messages)


def errors_of_continuing(folder):
    """What is said of continuing from checkpoints of steps 1 (whole), 2, 3 (weights only) and 4 (never finished)."""
    import torch.distributed.checkpoint as dcp

    for step in (1, 2):
        state = {"model": torch.zeros(2)} | ({"dataloader": {"state": torch.zeros(1)}} if step == 1 else {})
        dcp.save(state, checkpoint_id=f"{folder}/checkpoint/step-{step}", no_dist=True)
    for step in (3, 4):
        Path(folder, "checkpoint", f"step-{step}").mkdir()
    Path(folder, "checkpoint", "step-3", "model.safetensors.index.json").write_text("{}")
    continued = ["--job.dump_folder", folder, "--checkpoint.enable"]
    cases = [[], ["--checkpoint.load_step", "1"], ["--checkpoint.load_step", "2"], ["--checkpoint.load_step", "7"]]
    cases += [["--checkpoint.exclude_from_loading", "dataloader"], ["--checkpoint.load_only"]]
    said = errors_of([continued + case for case in cases])
    new = ["--job.dump_folder", f"{folder}/new"]
    cases = [["--job.dump_folder", folder], new, [*new, "--checkpoint.enable", "--checkpoint.load_step", "1"]]
    return [*said, *errors_of(cases)]


def said_of_steps(folder, cases):
    """What is said of continuing from a whole checkpoint of step 3, and the warnings."""
    import torch.distributed.checkpoint as dcp

    from torchtitan_magi.training.settings import resume

    dcp.save({"dataloader": {"state": torch.zeros(1)}}, checkpoint_id=f"{folder}/checkpoint/step-3", no_dist=True)
    warned = []
    resume.logger.warning = warned.append
    continued = ["--job.dump_folder", folder, "--checkpoint.enable", "--magi.no-verify_checkpoint"]
    return errors_of([continued + case.split() for case in cases]), warned


def test_a_run_that_continues_has_steps_left(tmp_path):
    cases = [f"--training.steps {steps}" for steps in (2, 3, 4)]
    cases += ["--training.steps 2 --checkpoint.exclude_from_loading train_state", "--magi.epochs 1 --training.steps 2"]
    before, last, more, excluded, epochs = call(said_of_steps, str(tmp_path), cases)[0]
    assert "training.steps is 2, but the run goes on from step 3; set it to more, or checkpoint.load_step to" in before
    assert [last, more, excluded, epochs] == [None, None, None, before]
    (warning,) = call(said_of_steps, str(tmp_path / "new"), cases[1:3])[1]
    assert "training.steps is 3, but the run goes on from step 3, its last: it trains and saves nothing more" in warning


def said_of_later_ones(folder, cases):
    """What is said of continuing where there are whole checkpoints of steps 2 to 5, and the warnings."""
    import torch.distributed.checkpoint as dcp

    from torchtitan_magi.training.settings import resume

    for step in (2, 3, 4, 5):
        path = f"{folder}/checkpoint/step-{step}"
        dcp.save({"dataloader": {"state": torch.zeros(1)}}, checkpoint_id=path, no_dist=True)
    warned = []
    resume.logger.warning = warned.append
    continued = ["--job.dump_folder", folder, "--checkpoint.enable", "--magi.no-verify_checkpoint"]
    return errors_of([continued + case.split() for case in cases]), warned


def test_checkpoints_later_than_that_of_load_step_are_warned_of(tmp_path):
    taken, warned = call(said_of_later_ones, str(tmp_path), ["--checkpoint.load_step 2", ""])
    assert taken == [None] * 2
    (line,) = warned
    assert f"is 2, but {tmp_path}/checkpoint has later checkpoints, up to step 5: the same command begins at" in line


def test_a_run_does_not_continue_from_weights_alone(tmp_path):
    last, whole, weights, none, *others = call(errors_of_continuing, str(tmp_path))
    for said, step, in_hf in ((last, 3, "true"), (weights, 2, "false")):
        assert f"checkpoint/step-{step} has no state of the data loader" in said
        assert "set checkpoint.load_step to 1" in said
        assert f"its path as checkpoint.initial_load_path and initial_load_in_hf = {in_hf}" in said
    assert "checkpoint.load_step is 7" in none
    assert f"checkpoint.load_step is 1, but {tmp_path}/new/checkpoint has no finished checkpoint; set" in others.pop()
    assert [whole, *others] == [None] * 5


def test_a_token_or_label_that_the_model_does_not_have_is_named():
    from torchtitan_magi.training.batches.microbatch import Microbatch

    def check_tokens(tokens, labels, vocab_size):
        Microbatch(tokens, labels, None, None, {}).check_tokens(vocab_size)

    fine, none = torch.tensor([[0, 99]]), torch.zeros(1, 0, dtype=torch.int64)
    check_tokens(fine, torch.tensor([[99, -100]]), 100)
    check_tokens(none, none, 100)
    for tokens, labels, name in ((100, 5, "token 100"), (5, 100, "label 100")):
        with pytest.raises(ValueError, match=f"the data has {name}, but the model a vocabulary of 100; use"):
            check_tokens(torch.tensor([[0, tokens]]), torch.tensor([[0, labels]]), 100)
    for tokens, labels, name in ((-1, 5, "token -1"), (5, -7, "label -7")):
        with pytest.raises(ValueError, match=f"the data has {name}; tokens are numbered from 0"):
            check_tokens(torch.tensor([[0, tokens]]), torch.tensor([[0, labels]]), 100)


def test_validation_in_shorter_packs_is_warned_of(caplog):
    from torchtitan_magi.training.batches.pack_loader import warn_of_shorter_packs

    for length in (256, 1024):
        warn_of_shorter_packs(length, 1024)
    (warning,) = caplog.messages
    assert warning.startswith("Validation packs have 256 tokens, those of training 1024:")


def convert_the_output_layer(name):
    from types import SimpleNamespace

    from torch import nn

    from torchtitan_magi.training.objectives.logprob_model import LogprobModel

    class Float8Linear(nn.Linear):
        def forward(self, x):
            return x

    LogprobModel(SimpleNamespace(**{name: Float8Linear(2, 3, bias=False)}))


def returned_and_logprobs():
    """Whether what a model returns to the hooks around it is a view, and the shape of its log-probabilities."""
    from types import SimpleNamespace

    import torch
    from torch import nn

    from torchtitan_magi.training.objectives.logprob_model import LogprobModel

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.lm_head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)

        def forward(self, tokens):
            self.returned = self.lm_head(self.embedding(tokens))
            return self.returned

    model, tokens = Model(), torch.arange(6).view(2, 3)
    batch = SimpleNamespace(tokens=tokens, labels=tokens, labelled=torch.tensor([0, 4]), model_inputs={})
    return [(tuple(LogprobModel(model)(batch).shape), model.returned._is_view())]


def test_a_model_returns_no_view():
    """FSDP2 warns of one in each run, as if gradients could be wrong."""
    assert call(returned_and_logprobs) == [((2, 3), False)]


def test_a_converted_output_layer_is_refused():
    """By the option that keeps it plain in the torchtitan whose name it has."""
    for_0_2, for_0_3 = call(value_errors, convert_the_output_layer, [("output",), ("lm_head",)])
    assert for_0_2.startswith("the model's output layer is Float8Linear, but")
    assert for_0_2.endswith('for float8 by quantize.linear.float8.filter_fqns = ["output"]')
    assert for_0_3.endswith('for float8 by its converter\'s filter_fqns = ["lm_head"]')
