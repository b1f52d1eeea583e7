"""Plans and their handles go when their microbatch does: nothing grows, whatever the documents."""

import functools
import gc
import random
from pathlib import Path

import pytest
from support.corpus import text
from support.gpus import needs_two_gpus
from support.jsonl import write_jsonl
from support.runs import call, new_folder, train, watch

pytestmark = pytest.mark.either
STEPS, GC_FREQ = 1000, 50
SETTLED = 250  # by then caches are full and allocators at their size
TOKENS, HEADS, HEAD_DIM = 96, 2, 8


def train_tiny_model(checkpointing):
    """Every GC_FREQ steps after the first SETTLED: entries of the registry, objects of Python, resident KiB."""
    import numpy as np
    import torch
    from torch.utils.checkpoint import checkpoint

    from torchtitan_magi.attention import api
    from torchtitan_magi.attention import op as attention
    from torchtitan_magi.planning.cost_model import Heads
    from torchtitan_magi.training.batches.planner import MagiRuntime, WorkCount
    from torchtitan_magi.training.settings.options import Magi

    torch.set_num_threads(1)
    runtime = MagiRuntime(Magi(), None, Heads(HEADS, HEADS, HEAD_DIM), torch.device("cpu"), WorkCount())
    projection = torch.nn.Linear(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM)
    optimizer = torch.optim.SGD(projection.parameters(), lr=1e-3)
    embedding = torch.randn(TOKENS, HEADS * HEAD_DIM)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    rng = np.random.default_rng(0)

    def block(x, handle):
        q, k, v = projection(x).view(TOKENS, 3, HEADS, HEAD_DIM).unbind(1)
        return x + attention.attention_op(q, k, v, handle.tensor, 0.3)[0].flatten(1)

    attend = functools.partial(checkpoint, block, use_reentrant=False) if checkpointing else block

    plans, objects, resident = [], [], []
    gc.freeze()  # what was imported
    gc.disable()  # torchtitan collects every GC_FREQ steps; plans must not wait for it
    for step in range(STEPS):
        ends = np.append(np.sort(rng.choice(np.arange(1, TOKENS), rng.integers(1, 12), replace=False)), TOKENS)
        documents = np.stack([np.append(0, ends[:-1]), ends], 1).astype(np.int32)
        bound, _ = runtime.bind(runtime.plan_ahead({"input": tokens, "documents": documents}, None, None))
        handle = attention.PlanHandle(bound.pop(0))
        y = attend(embedding, handle)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert attention.num_live_plans() == 1
        del handle, y
        assert attention.num_live_plans() == 0
        if step % GC_FREQ == 0:
            gc.collect()
        if step % GC_FREQ == 0 and step >= SETTLED:
            plans.append(len(api._handles))
            objects.append(len(gc.get_objects()))
            with open("/proc/self/statm") as file:
                resident.append(int(file.read().split()[1]) * 4)
    return plans, objects, resident


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_thousand_steps_with_ever_new_documents(checkpointing):
    plans, objects, resident = call(train_tiny_model, checkpointing)
    assert max(plans) == 0
    assert max(objects) - objects[0] < 50
    assert max(resident) - resident[0] < 4096


def report_live_plans(report):
    import torchtitan.train

    from torchtitan_magi.attention.op import num_live_plans

    watch(torchtitan.train.Trainer, "train_step", lambda *_: report("live", num_live_plans()))


def test_no_plan_outlives_its_step_in_the_trainer():
    arguments = ["--training.seq_len", "64", "--training.local_batch_size", "1"]
    arguments += ["--training.steps", "30", "--activation_checkpoint.mode", "full"]
    run = train(2, [*arguments, "--parallelism.context_parallel_degree", "2"], setup=report_live_plans)
    for rank in range(2):
        assert run.of("live", rank) == [(0,)] * 30


def fill_the_cache_after_two_steps(report):
    """PyTorch's allocator keeps all of the GPU but 256 MiB, of which nothing is in use."""
    import torch
    from torchtitan.train import Trainer

    from torchtitan_magi.exchange.peer_memory import PeerTransport

    now = 0

    def see_step(_, trainer, *args):
        nonlocal now
        now = trainer.step
        if now == 2:
            torch.cuda.synchronize()
            del_me = torch.empty(torch.cuda.mem_get_info()[0] - 2**28, dtype=torch.uint8, device="cuda")
            del del_me

    watch(Trainer, "train_step", see_step)
    watch(PeerTransport, "_grow", lambda _, __, needed: report("grown", now, needed))


@pytest.mark.gpu
@pytest.mark.alone(gpus=2)
@needs_two_gpus
def test_a_run_whose_longest_document_comes_late_goes_on_with_a_full_cache():
    path, rng = Path(new_folder(), "records.jsonl"), random.Random(0)
    lengths = [300] * 3000 + [120_000]  # words; the long one comes in step 5
    write_jsonl(path, [{"text": text(rng, n)} for n in lengths])
    arguments = ["--training.dataset_path", str(path), "--training.seq_len", "131072", "--training.steps", "6"]
    arguments += ["--training.mixed_precision_param", "bfloat16", "--magi.no-shuffle"]
    ranks = ["--parallelism.context_parallel_degree", "2"]
    run = train(2, [*arguments, *ranks], setup=fill_the_cache_after_two_steps, on_gpus=True)
    whole = train(1, arguments, on_gpus=True)
    assert len(run.losses) == 6
    assert run.losses == pytest.approx(whole.losses, rel=1e-2)
    for rank in range(2):
        steps, needed = zip(*run.of("grown", rank), strict=True)
        assert steps[-1] >= 2  # after the cache was full
        assert needed[-1] > 2**25  # bytes; both channels have two slots of as many
