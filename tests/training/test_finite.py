"""Updates of steps that are not finite are left out, states that are not finite are not saved."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from torchtitan_magi.training.batches.microbatch import Microbatch
from torchtitan_magi.training.finite import StepGuard, check_state, clip_and_note
from torchtitan_magi.training.objectives.document_losses import DocumentLosses, described, mean_losses
from torchtitan_magi.training.objectives.objective import LossRecord

NAN = math.nan
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KINDS = [torch.optim.Adam, torch.optim.AdamW]
WAYS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}


class Optimizers(list):
    """torchtitan's container, as far as the guard knows it. before: hooks of an update."""

    def __init__(self, model, kind, **options):
        super().__init__([kind(model.parameters(), lr=0.1, weight_decay=0.1, **options)])
        self.model_parts, self.before = [model], []

    def step(self):
        for hook in self.before:
            hook()
        for optimizer in self:
            optimizer.step()


class Training:
    """Steps of a small model with given losses and gradient norms."""

    def __init__(self, kind=torch.optim.AdamW, device="cpu", logged=False, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(device)
        self.model.register_buffer("expert_bias", torch.zeros(2, device=device))
        self.optimizers = Optimizers(self.model, kind, **options)
        self.metrics_processor = SimpleNamespace(losses=LossRecord(2), should_log=lambda step: logged)
        self.parallel_dims = SimpleNamespace(get_optional_mesh=lambda axis: None)
        self.device, self.dataloader, self.step = torch.device(device), None, 0
        self.guard = StepGuard(self)

    def take(self, loss=1.0, norm=1.0):
        """A step. Its gradients are those of its number, and not finite if loss or norm is not."""
        self.step += 1
        for weight in self.model.parameters():
            weight.grad = torch.full_like(weight, self.step * norm * loss)
        for part in (0.5, loss):  # of two microbatches
            self.metrics_processor.losses.add(torch.full((), part, device=self.device), 1)
        clip_and_note(lambda: torch.full((), norm, device=self.device))
        self.optimizers.step()

    def state(self):
        """Copies of weights, moments, counts and buffers."""
        moments = [x for optimizer in self.optimizers for state in optimizer.state.values() for x in state.values()]
        return [x.detach().clone() for x in (*self.model.parameters(), *moments, *self.model.buffers())]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("odd", [{"loss": NAN}, {"loss": math.inf}, {"norm": NAN}, {"norm": math.inf}])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_not_finite_is_left_out(kind, way, odd):
    training = Training(kind, **WAYS[way])
    training.take()
    training.take()
    before = training.state()
    what = "gradient norm" if "norm" in odd else "loss"
    if way == "fused":  # which the host learns later
        training.take(**odd)
        assert same(training.state(), before)
        odd = {}
    with pytest.raises(FloatingPointError, match=f"^step 3: the {what} is not finite; nothing of this step is saved"):
        training.take(**odd)
    assert same(training.state(), before)


@pytest.mark.parametrize("way", WAYS)
def test_healthy_steps_are_those_of_the_optimizer_alone(way):
    training, alone = Training(**WAYS[way]), Training(**WAYS[way])
    alone.optimizers.step = alone.guard.update
    for _ in range(3):
        training.take()
        alone.take()
    assert same(training.state(), alone.state())
    training.guard.end_step(saves=True, is_last=True)


def test_the_first_step_leaves_no_count():
    training = Training(fused=True)
    before = [weight.detach().clone() for weight in training.model.parameters()]
    training.take(loss=NAN)
    assert same(list(training.model.parameters()), before)
    assert not any(x.any() for state in training.optimizers[0].state.values() for x in state.values())


def test_what_a_hook_of_the_update_moves_is_put_back():
    training = Training(fused=True)
    training.optimizers.before.append(lambda: training.model.expert_bias.add_(1))
    training.take()
    training.take(loss=NAN)
    assert training.model.expert_bias.tolist() == [1, 1]


def test_a_step_that_is_logged_ends_the_run_itself():
    training = Training(fused=True, logged=True)
    with pytest.raises(FloatingPointError, match=r"^step 1: "):
        training.take(norm=NAN)


@pytest.mark.parametrize(("saves", "is_last"), [(True, False), (False, True)])
def test_nothing_is_saved_and_no_run_ends_well_after_such_a_step(saves, is_last):
    training = Training(fused=True)
    training.take(loss=NAN)
    training.guard.end_step(saves=False, is_last=False)
    with pytest.raises(FloatingPointError, match=r"^step 1: "):
        training.guard.end_step(saves, is_last)


def test_weights_that_the_last_update_broke_end_a_run_that_saves_nothing():
    training = Training(fused=True)
    training.take()
    training.model[1].bias.data[1] = math.inf
    with pytest.raises(FloatingPointError, match=r"^after step 1 1.bias hold"):
        training.guard.end_step(saves=False, is_last=True)


# ----------------------------------------------------------------------------------------------------- what is saved


def test_a_state_is_checked_by_name():
    training = Training(fused=True)
    training.take()
    state = {**training.model.state_dict(), "optimizer": training.optimizers, "count": torch.tensor(3), "plain": "text"}
    state |= {"empty": torch.zeros(0), "large": torch.full((3,), 3e38), "half": torch.ones(3).bfloat16()}
    check_state(state, 7)
    training.optimizers[0].state[training.model[0].weight]["exp_avg_sq"][1, 2] = math.inf
    with pytest.raises(FloatingPointError, match=r"^after step 7 exp_avg_sq of 0.weight hold numbers that are not"):
        check_state(state, 7)
    state["half"][1] = NAN
    with pytest.raises(FloatingPointError, match=r"^after step 7 half and 1 other tensors hold"):
        check_state(state, 7)


# -------------------------------------------------------------------------------------------------- which documents


def losses_of(tokens, labelled, losses, **bounds):
    owned = SimpleNamespace(share=SimpleNamespace(tokens=np.array(tokens)))
    arrays = {name: np.array(values, np.int32) for name, values in bounds.items()}
    batch = Microbatch.of({"input": torch.zeros(2, 8, dtype=torch.int64)} | arrays, None, None)
    batch.indices, batch.labelled = (owned,), labelled and torch.tensor(labelled)
    return DocumentLosses(batch, torch.tensor(losses))


def test_losses_belong_to_the_documents_of_their_tokens():
    # Two rows of 8 tokens, padded at their ends; this rank has every other token.
    documents, tokens = [[0, 3], [3, 6], [8, 12]], list(range(0, 16, 2))
    losses = [1.0, 2.0, 5.0, NAN, 1.0]
    microbatch = losses_of(tokens, [0, 1, 2, 4, 5], losses, documents=documents, records=[4, 0, 4])
    assert mean_losses([microbatch], "line {}".format, 0) == {"line 4": pytest.approx(NAN, nan_ok=True), "line 0": 5.0}
    microbatch.batch.records = None
    names = mean_losses([microbatch, microbatch], None, 3)
    assert list(names)[:2] == [
        f"tokens {span} of microbatch 1 of data-parallel rank 3" for span in ("0 to 2", "3 to 5")
    ]
    assert len(names) == 6


def test_a_loss_that_documents_share_is_of_each_of_them():
    # The second goes on behind token 2 of the first, the third is the beginning of the second.
    branches = [[0, 6, 0], [6, 9, 3], [9, 9, 4], [9, 12, 0]]
    losses = [1.0, 2.0, 4.0, 8.0, 16.0]
    microbatch = losses_of(range(16), [1, 4, 6, 7, 9], losses, documents=branches, records=[3, 5, 6, 9])
    assert mean_losses([microbatch], str, 0) == {"3": 3 / 2, "5": 13 / 3, "6": 5 / 2, "9": 16.0}


def test_losses_of_pairs_are_those_of_their_records():
    documents, numbers = [[0, 4, 0], [4, 6, 2], [6, 9, 0], [9, 12, 2]], {"pair_ids": [7, 2], "pair_numbers": [0, 0]}
    pairs = losses_of(range(12), None, [0.5, NAN], documents=documents, pairs=[[0, 1], [3, 2]], **numbers)
    nothing = losses_of(range(2), None, [0.0], documents=[[0, 2]], records=[1])
    nothing.losses = None  # on a rank without the last stage of a pipeline
    assert mean_losses([pairs, nothing], str, 0) == {"7": 0.5, "2": pytest.approx(NAN, nan_ok=True)}
    pairs.batch.records = None
    names = [f"tokens {span} of microbatch 1 of data-parallel rank 0" for span in ("0 to 5", "6 to 11")]
    assert list(mean_losses([pairs], None, 0)) == names


def test_a_few_documents_are_named():
    many = {f"{number}": NAN if number % 2 else 1.0 for number in range(20)}
    assert described(many) == " in 10 of 20 documents: 1, 3, 5, 7, 9 and 5 more"
    assert described({"a": 1.25, "b": 3.0}) == "; the highest losses are those of b (3), a (1.25)"
    assert described({}) == ""


# -------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_a_healthy_step_does_not_wait_for_the_gpu(states):
    training = Training(device="cuda", fused=True)
    for weight in training.model.parameters():
        moments = {name: torch.zeros_like(weight, dtype=states) for name in ("exp_avg", "exp_avg_sq")}
        training.optimizers[0].state[weight] = {"step": torch.zeros((), device="cuda"), **moments}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            training.take()
        torch.cuda.set_sync_debug_mode("default")
        before = training.state()
        assert all(x.any() for x in before[:-1])
        torch.cuda.set_sync_debug_mode("error")
        training.take(loss=NAN)
        with pytest.raises(FloatingPointError, match=r"^step 4: the loss is not finite"):
            training.take()
    except RuntimeError as error:
        if states == torch.float32 or not re.search("dtype|scalar type", str(error)):
            raise
        pytest.skip(f"this torch has no moments of another dtype: {error}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(training.state(), before)


@pytest.mark.gpu
@ON_GPU
def test_a_state_on_a_gpu_is_checked_in_every_place():
    state = {f"{size} {dtype}": torch.ones(size, device="cuda", dtype=dtype) for size in (1, 1000, 300_001) for dtype in
             (torch.float32, torch.bfloat16)}  # fmt: skip
    check_state(state, 1)
    for name, tensor in state.items():
        for place in (0, len(tensor) // 2, -1):
            for value in (NAN, math.inf, -math.inf):
                tensor[place] = value
                with pytest.raises(FloatingPointError, match=f"^after step 1 {name} hold"):
                    check_state(state, 1)
                tensor[place] = 1
