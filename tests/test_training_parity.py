"""Training is the same under every layout: the rows of scripts/loss_compare.py, on packs of real documents."""

import functools
from dataclasses import replace

import pytest
from training import new_folder, train  # first: it adds scripts/ to the path

from torchtitan_magi.planning.cost_model import H200, KernelCost, Link

from loss_compare import LAYOUTS, QWEN3_LAYOUTS, TOLERANCE, Layout, max_relative_difference  # isort: skip

ALL_LAYOUTS = LAYOUTS | QWEN3_LAYOUTS


@functools.cache
def seed_checkpoint(model=""):
    """A checkpoint of random weights, from torchtitan's own option."""
    folder = new_folder()
    arguments = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint", "--job.dump_folder", folder]
    train(1, [*Layout({}, model=model).arguments, *arguments])
    return f"{folder}/checkpoint/step-0"


def trained_anew(name, *options, setup, **kwargs):
    """The run of a layout from the seed checkpoint."""
    layout = ALL_LAYOUTS[name]
    load = ["--checkpoint.enable", "--checkpoint.initial_load_path", seed_checkpoint(layout.model)]
    return train(layout.processes, [*layout.arguments, *load, *options], setup=setup, **kwargs)


@functools.cache
def trained(name):
    return trained_anew(name, setup=without_saving_and_counting_graphs)


def without_saving(report):
    from torchtitan.components.checkpoint import CheckpointManager

    CheckpointManager.save = lambda *_, **__: None


def without_saving_and_counting_graphs(report):
    import torchtitan.train
    from torch._dynamo.utils import counters

    train_step = torchtitan.train.Trainer.train_step

    def train_and_count(self, data_iterator):
        train_step(self, data_iterator)
        report("graphs", counters["stats"]["unique_graphs"])

    torchtitan.train.Trainer.train_step = train_and_count
    without_saving(report)


class _Batches:
    """A data loader of what a generator function yields."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return self.batches()

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def feed(batches, report):
    """Trains llama3 on batches(shape, dp_rank, dp_world_size) instead of a dataset, without saving."""
    from torchtitan.protocols import train_spec

    def build_dataloader(dp_world_size, dp_rank, tokenizer, job_config):
        shape = job_config.training.local_batch_size, job_config.training.seq_len
        return _Batches(functools.partial(batches, shape, dp_rank, dp_world_size))

    spec = train_spec.get_train_spec("llama3")
    train_spec._extra_train_specs["llama3"] = replace(spec, build_dataloader_fn=build_dataloader)
    without_saving(report)


def difference(run, reference):
    losses = max_relative_difference(run.losses, reference.losses)
    return max(losses, max_relative_difference(run.grad_norms, reference.grad_norms))


@pytest.mark.parametrize("name", [name for name, layout in ALL_LAYOUTS.items() if layout.against])
def test_loss_and_gradient_norm_of_every_step(name):
    worst = difference(trained(name), trained(ALL_LAYOUTS[name].against))
    print(f"{name}: {worst:.1e}")
    assert worst <= TOLERANCE


def test_other_documents_do_not_recompile():
    for rank in range(2):
        (first,), *later = trained("cp2_compile").of("graphs", rank)
        assert first > 0
        assert later == [(first,)] * 4
    assert trained("cp2").of("graphs") == [(0,)] * 5


def test_data_parallel_ranks_train_on_the_packs_of_one_rank():
    assert difference(trained("dp2"), trained("cp1")) <= TOLERANCE


def test_qwen3_under_tensor_parallelism_is_qwen3():
    assert difference(trained("qwen3_tp2"), trained("qwen3_cp1")) <= TOLERANCE


def two_ranks_per_node(report):
    import os

    from torchtitan_magi.training.runtime import MagiRuntime

    os.environ["LOCAL_WORLD_SIZE"] = "2"  # as torchrun says on each of two machines
    plan = MagiRuntime.plan_ahead

    def plan_and_count(self, inputs, labels, eos_id):
        planned = plan(self, inputs, labels, eos_id)
        exchanges = max(len(stage.exchanges) for stage in planned["planned"].index.share.backward)
        report("plan", exchanges, int(planned["planned"].plan.rows_across_nodes.sum()))
        return planned

    MagiRuntime.plan_ahead = plan_and_count
    without_saving(report)


def test_rows_that_cross_to_a_node_once_train_alike():
    run = trained_anew("cp4", setup=two_ranks_per_node)
    assert difference(run, trained("cp1")) <= TOLERANCE
    assert any(exchanges == 2 and rows > 0 for exchanges, rows in run.of("plan"))


def one_document_per_batch(report):
    import numpy as np

    from torchtitan_magi.training.runtime import MagiRuntime

    plan = MagiRuntime.plan_ahead

    def without_boundaries(self, inputs, labels, eos_id):
        whole = np.array([[0, inputs["input"].numel()]], np.int32)
        return plan(self, inputs | {"documents": whole}, labels, eos_id)

    MagiRuntime.plan_ahead = without_boundaries
    without_saving(report)


def report_stages_of_one_document(report):
    from torchtitan_magi.training.runtime import MagiRuntime

    one_document_per_batch(report)
    plan = MagiRuntime.plan_ahead

    def plan_and_report(self, inputs, labels, eos_id):
        planned = plan(self, inputs, labels, eos_id)
        report("stages", len(planned["planned"].plan.forward), len(planned["planned"].plan.backward))
        return planned

    MagiRuntime.plan_ahead = plan_and_report


def test_stages_are_chosen_by_the_cost_model_that_is_named(tmp_path):
    kernel = KernelCost(launch=0.0, pair=1e-10, pair_dim=0.0, row=0.0, row_dim=0.0)
    cost = replace(H200, forward=kernel, backward=kernel, merge=0.0, stage=0.0, inside=Link(0.0, 1e9))
    cost.save(tmp_path / "cost.json")
    arguments = [*LAYOUTS["cp2"].arguments, "--training.steps", "1"]
    named = [*arguments, "--magi.cost_model", str(tmp_path / "cost.json")]
    runs = (train(2, options, setup=report_stages_of_one_document) for options in (arguments, named))
    shipped, chosen = (set(run.of("stages")) for run in runs)
    assert shipped == {(1, 1)}
    assert min(chosen) >= (3, 3)


def test_without_the_document_mask_it_is_another_training():
    """So the comparison can tell."""
    run = trained_anew("cp2", setup=one_document_per_batch)
    assert max_relative_difference(run.grad_norms, trained("cp1").grad_norms) > 1e-3
    assert max_relative_difference(run.losses, trained("cp1").losses) > TOLERANCE


def test_positions_over_the_pack_are_those_in_the_documents():
    """Rotary embeddings see differences of positions only, and those within a document are the same."""
    assert difference(trained("cp1_positions_pack"), trained("cp1")) <= TOLERANCE
    assert trained("cp1_positions_pack").grad_norms != trained("cp1").grad_norms  # they did change


def test_wrong_positions_are_another_training():
    """So the comparison can tell: here every token is the first of its document."""
    run = trained_anew("cp2", setup=positions_all_zero)
    assert max_relative_difference(run.grad_norms, trained("cp1").grad_norms) > 1e-3


def positions_all_zero(report):
    from torchtitan.distributed import context_parallel

    cp_shard = context_parallel.cp_shard

    def shard(*args, **kwargs):
        (tokens, labels, positions), masks = cp_shard(*args, **kwargs)
        return (tokens, labels, positions * 0), masks

    context_parallel.cp_shard = shard
    without_saving(report)
