"""Training is the same under every layout: the rows of tests/long/layouts.py, on packs of real documents."""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
from support.cp_case import SLOW_NETWORK
from support.marks import marked_long
from support.parity import ALL_LAYOUTS, difference, trained, trained_anew
from support.runs import train, watch

from torchtitan_magi.planning.cost_model import H200, KernelCost, Link

from layouts import LAYOUTS, TOLERANCE, max_relative_difference  # isort: skip

# Data-parallel ranks train on the packs of one rank; tensor parallelism leaves qwen3 as it is; rotary embeddings see
# differences of positions only, and those within a document are the same over the pack.
REFERENCES = {"dp2": "cp1", "qwen3_tp2": "qwen3_cp1", "cp1_positions_pack": "cp1"}
REFERENCES |= {name: layout.against for name, layout in ALL_LAYOUTS.items() if layout.against}


LONG = {"cp2_ac_none", "cp2_ac_op", "cp2_no_overlap", "cp4_overlap_2", "cp2_positions_pack"}
LONG |= {"dp2_cp2", "qwen3_cp2_tp2"}


@pytest.mark.parametrize("name", marked_long(REFERENCES, LONG))
def test_loss_and_gradient_norm_of_every_step(name):
    worst = difference(trained(name), trained(REFERENCES[name]))
    print(f"{name}: {worst:.1e}")
    assert worst <= TOLERANCE


@pytest.mark.parametrize("losses", [[8.0, math.nan], [8.0], []])
def test_runs_without_all_numbers_equal_nothing(losses):
    assert max_relative_difference(losses, [8.0, 7.0]) == math.inf


def test_random_weights_are_those_of_one_process():
    """FSDP2 and tensor parallelism both shard rows; the seed checkpoint was drawn by one process."""
    layout = ALL_LAYOUTS["cp2_tp2"]
    run = train(layout.processes, [*layout.arguments, "--training.steps", "1"])
    assert run.losses == pytest.approx(trained("cp2_tp2").losses[:1], rel=1e-6)
    assert "DTensor random operators" not in run.output


def test_gradients_are_summed_before_the_optimizer_sees_them():
    ((placements,), *_) = trained("qwen3_tp2").of("placements")
    assert any(of_parameter for of_parameter, _ in placements)
    assert all(of_parameter == of_gradient for of_parameter, of_gradient in placements)


def test_other_documents_do_not_recompile():
    for rank in range(2):
        (first,), *later = trained("cp2_compile").of("graphs", rank)
        assert first > 0
        assert later == [(first,)] * 2
    assert trained("cp2").of("graphs") == [(0,)] * 3


def in_chunks(report):
    from torchtitan_magi.losses import logprobs

    logprobs.CHUNK_LOGITS = 100 * 2048  # 100 tokens of the debug model's vocabulary


IN_CHUNKS = ["cp1", "cp2_tp2", "dp2_cp2", "cp2_accumulation", "qwen3_tp2"]


@pytest.mark.parametrize("name", marked_long(IN_CHUNKS, ["dp2_cp2", "cp2_accumulation"]))
def test_without_all_logits_it_is_the_training_of_torchtitan(name):
    run, stock = trained_anew(name, entry="torchtitan_magi.train", setup=in_chunks), trained(name)
    assert max_relative_difference(run.losses, stock.losses) <= 1e-5
    assert max_relative_difference(run.grad_norms, stock.grad_norms) <= TOLERANCE
    for key in ("loss_metrics/global_max_loss", "tflops"):
        assert all(math.isfinite(values[key]) for values in run.metrics)
    largest = [[values["loss_metrics/global_max_loss"] for values in one.metrics] for one in (run, stock)]
    assert largest[0] == pytest.approx(largest[1], rel=1e-5)


def two_ranks_per_node(report):
    from torchtitan_magi.exchange import mesh
    from torchtitan_magi.training.batches.planner import MagiRuntime

    mesh.machine = lambda: str(int(os.environ["RANK"]) // 2)  # as on two machines

    def report_plan(batch, *_):
        exchanges = max(len(stage.exchanges) for stage in batch.indices[0].share.backward)
        report("plan", exchanges, int(batch.plans[0].rows_across_nodes.sum()))

    watch(MagiRuntime, "plan_ahead", report_plan)


def in_stripes_on_two_nodes(report):
    from torchtitan_magi.planning import plan

    def stripes(layers, num_tokens, cp_size, nodes, tile_rows):
        starts = np.arange(0, num_tokens, 32).reshape(-1, cp_size)
        yield tuple(np.stack([of_rank, of_rank + 32], 1) for of_rank in starts.T)

    plan.placements = stripes  # so that every rank needs rows of every other one
    two_ranks_per_node(report)


def test_rows_that_cross_to_a_node_once_train_alike(tmp_path):
    SLOW_NETWORK.save(tmp_path / "cost.json")
    run = trained_anew("cp4", "--magi.cost_model", str(tmp_path / "cost.json"), setup=in_stripes_on_two_nodes)
    assert difference(run, trained("cp1")) <= TOLERANCE
    assert any(exchanges == 2 and rows > 0 for exchanges, rows in run.of("plan"))


def one_document_per_batch(report):
    from torchtitan_magi.training.batches.planner import MagiRuntime

    plan = MagiRuntime.plan_ahead

    def without_boundaries(self, inputs, labels, eos_id):
        whole = np.array([[0, inputs["input"].numel()]], np.int32)
        return plan(self, inputs | {"documents": whole}, labels, eos_id)

    MagiRuntime.plan_ahead = without_boundaries


def report_stages_of_one_document(report):
    from torchtitan_magi.exchange import mesh
    from torchtitan_magi.training.batches.planner import MagiRuntime

    mesh.machine = lambda: os.environ["RANK"]  # as on two machines: stages are chosen across nodes
    one_document_per_batch(report)

    def report_stages(batch, *_):
        plan = batch.plans[0]
        report("stages", len(plan.forward), len(plan.backward))

    watch(MagiRuntime, "plan_ahead", report_stages)


def test_stages_are_chosen_by_the_cost_model_that_is_named(tmp_path):
    kernel = KernelCost(launch=0.0, pair=1e-10, pair_dim=0.0, row=0.0, row_dim=0.0)
    cost = replace(H200, forward=kernel, backward=kernel, merge=0.0, stage=0.0, across=Link(0.0, 1e9))
    cost.save(tmp_path / "cost.json")
    arguments = [*LAYOUTS["cp2"].arguments, "--training.steps", "1"]
    named = [*arguments, "--magi.cost_model", str(tmp_path / "cost.json")]
    runs = (train(2, options, setup=report_stages_of_one_document) for options in (arguments, named))
    shipped, chosen = (set(run.of("stages")) for run in runs)
    assert shipped == {(1, 1)}
    assert min(chosen) >= (3, 3)


def positions_all_zero(report):
    """Every token is the first of its document."""
    from torchtitan_magi.training.batches.planner import MagiRuntime

    watch(MagiRuntime, "bind", lambda bound, *_: bound[1]["positions"].zero_())


@pytest.mark.parametrize("wrong", [one_document_per_batch, positions_all_zero])
def test_without_the_document_mask_or_with_wrong_positions_it_is_another_training(wrong):
    """So the comparison can tell."""
    run = trained_anew("cp2", setup=wrong)
    assert max_relative_difference(run.grad_norms, trained("cp1").grad_norms) > 2 * TOLERANCE
    assert max_relative_difference(run.losses, trained("cp1").losses) > TOLERANCE


def test_positions_over_the_pack_are_others():
    assert trained("cp1_positions_pack").grad_norms != trained("cp1").grad_norms
