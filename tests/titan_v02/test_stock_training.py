"""Training without context parallelism is plain training: stock torchtitan, and a loop over the documents."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.corpus import chat_tokenizer
from support.parity import difference, feed, initial_weights, seed_checkpoint, trained_anew
from support.runs import LAYERS, call, corpus, new_folder, on_corpus, train

from layouts import TOLERANCE  # isort: skip

SEQ_LEN = 256
STOCK = (
    "--model.name llama3 --model.flavor debugmodel --training.local_batch_size 2 --optimizer.lr 3e-3 "
    "--lr_scheduler.warmup_steps 2 --metrics.log_freq 1 --debug.seed 0 --comm.trace_buf_size 0"
)


# ------------------------------------------------------------------------------------------- one document: stock SDPA


def one_document_per_pack(shape, dp_rank, dp_world_size):
    """No EOS in a pack."""
    import torch

    rng = np.random.default_rng(0)
    while True:
        tokens = torch.from_numpy(rng.integers(10, 2000, (shape[0], shape[1] + 1)))
        labels = tokens[:, 1:].clone()
        labels[:, ::3] = -100
        yield {"input": tokens[:, :-1].contiguous()}, labels


def feed_one_document_per_pack(report):
    feed(one_document_per_pack)


def feed_stock_torchtitan(report):
    from torchtitan.protocols import train_spec

    def build_dataloader(dp_world_size, dp_rank, tokenizer, job_config):
        shape = job_config.training.local_batch_size, job_config.training.seq_len
        return one_document_per_pack(shape, dp_rank, dp_world_size)

    specs = train_spec._extra_train_specs
    specs.clear()  # the plugin's, which the fork server has imported
    specs["llama3"] = replace(train_spec.get_train_spec("llama3"), build_dataloader_fn=build_dataloader)


def test_a_pack_of_one_document_trains_as_in_stock_torchtitan():
    arguments = [*STOCK.split(), *on_corpus(), *initial_weights()]
    empty = Path(new_folder(), "empty.toml")
    empty.touch()
    stock = train(1, arguments, toml=str(empty), setup=feed_stock_torchtitan)
    assert "flex attention" not in stock.output
    for cp in (1, 2):
        arguments = ["--training.dataset", "c4_test", "--parallelism.context_parallel_degree", f"{cp}"]
        ours = train(cp, [*arguments, *initial_weights()], setup=feed_one_document_per_pack)
        assert "flex attention" in ours.output
        assert ("rows by gloo" in ours.output) == (cp == 2)
        assert difference(ours, stock) <= TOLERANCE


# ------------------------------------------------------------------------------ many documents: a loop over documents


def report_gradients(report):
    """The whole gradients of the first step, in the order of the model's parameters."""
    from torch.distributed.tensor import DTensor
    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_

    def report_and_clip(parameters, *args, **kwargs):
        gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
        report("gradients", [gradient.numpy().copy() for gradient in gradients])
        return clip(parameters, *args, **kwargs)

    utils.clip_grad_norm_ = report_and_clip


def loop_over_documents(checkpoint, data):
    """Loss and gradients of the first two packs: a plain dense model sees one document at a time."""
    import torch
    import torch.distributed.checkpoint as dcp
    import torch.nn.functional as F
    from torchtitan.models.llama3 import get_train_spec

    from torchtitan_magi.data import PackedSFTDataset

    spec = get_train_spec()
    args = replace(spec.model_args["debugmodel"], n_layers=LAYERS, max_seq_len=SEQ_LEN)
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights()
    weights = model.state_dict()
    dcp.load(weights, checkpoint_id=checkpoint)
    model.load_state_dict(weights)

    packs = iter(PackedSFTDataset(f"{data}/train.jsonl", chat_tokenizer(data), SEQ_LEN, packs_per_step=2))
    loss_sum, num_valid, num_documents = 0.0, 0, 0
    for inputs, labels in (next(packs), next(packs)):
        num_valid += (labels != -100).sum()
        for start, end in inputs["documents"]:
            logits = model(inputs["input"][None, start:end])[0]
            loss_sum += F.cross_entropy(logits, labels[start:end], reduction="sum", ignore_index=-100)
            num_documents += 1
    (loss_sum / num_valid).backward()
    return num_documents, (loss_sum / num_valid).item(), [p.grad.numpy() for p in model.parameters()]


@pytest.fixture(scope="module")
def looped():
    return call(loop_over_documents, seed_checkpoint(), str(corpus()))


@pytest.mark.parametrize("name", ["cp1", "cp2", "dp2_cp2_tp2"])
def test_a_pack_of_documents_trains_as_a_loop_over_them(name, looped):
    num_documents, loss, gradients = looped
    assert num_documents >= 4
    run = trained_anew(name, "--training.steps", "1", setup=report_gradients)
    assert run.losses == [pytest.approx(loss, rel=1e-6)]
    ((ours,),) = run.of("gradients")
    for got, want in zip(ours, gradients, strict=True):
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    squares = sum(np.square(want, dtype=np.float64).sum() for want in gradients)
    assert run.grad_norms == [pytest.approx(np.sqrt(squares), rel=1e-5)]
