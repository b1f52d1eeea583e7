"""The decision before the first step: the same on all ranks, said in one line, corrected by what runs took."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.numbered_records import dataset, write
from support.runs import call, corpus, train

from torchtitan_magi.models.published import published_sizes
from torchtitan_magi.sizing.gpus import H100
from torchtitan_magi.sizing.keeping.kinds import parse
from torchtitan_magi.sizing.memory import GIB, predict
from torchtitan_magi.sizing.predicted_run import Place, predict_run
from torchtitan_magi.sizing.run_setup import Setup
from torchtitan_magi.sizing.sample_packs import first_packs, sample
from torchtitan_magi.training.activations import decide
from torchtitan_magi.training.activations.decide import note_beyond
from torchtitan_magi.training.activations.gpu_memory import GpuMemory

CAPACITY = int(79.1 * GIB)
SETUP = Setup(published_sizes("Llama-3.1-8B"), 2**20, cp=8, checkpointing="auto", compiled=True, compiled_loss=True)


@pytest.fixture
def machine(monkeypatch):
    """Eight ranks on H100s of one machine with 1,000 GiB; values of the first rank can be changed."""
    first = {"memory": CAPACITY, "available": 1000 * GIB, "hosts": ["a"] * 8}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(decide, "available_memory", lambda: 1000 * GIB)

    def gathered(mine):
        of_first = min(first["memory"], mine[0]), first["available"]
        return [(*of_first, first["hosts"][0]), *((*mine[:2], host) for host in first["hosts"][1:])]

    monkeypatch.setattr(decide, "gathered", gathered)
    return first


def decided(setup, folder, loader=None):
    return decide.decided(setup, folder, loader, CAPACITY)


def said(caplog):
    (line,) = [record.getMessage() for record in caplog.records if "Activation checkpointing" in record.getMessage()]
    caplog.clear()
    return line


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO)
    return caplog


def test_the_decision_is_one_line_that_can_be_repeated(machine, tmp_path, log):
    found = decided(SETUP, tmp_path)
    line = said(log)
    assert line.startswith("Activation checkpointing: layers 0-")
    assert f"; {predict(found).total / GIB:.1f} of 79.1 GiB, " in line
    assert " of 75.0 GiB of the host's; recomputation " in line
    repeated = parse(line.split('magi.keep = "')[1].split('"')[0], 32)
    assert repeated == found.keeping
    pinned = decided(replace(SETUP, keeping=repeated), tmp_path)
    assert pinned == found
    assert said(log) == line


def test_all_ranks_take_the_least_that_any_has(machine, tmp_path):
    whole = decided(SETUP, tmp_path)
    machine["memory"] = 70 * GIB
    small = decided(SETUP, tmp_path)
    assert predict(small).total < 0.915 * 70 * GIB < predict(whole).total
    machine["memory"], machine["available"] = int(79.1 * GIB), 100 * GIB  # 7.5 GiB for each of eight ranks
    assert sum(keeping.offloaded for keeping in decided(SETUP, tmp_path).keeping) < 8
    machine["hosts"] = [*"aabbccdd"]  # two ranks on each, which have more of it
    assert sum(keeping.offloaded for keeping in decided(SETUP, tmp_path).keeping) > 8


def test_the_first_rank_decides_for_those_on_other_gpus(machine, tmp_path, monkeypatch):
    runs, on_first_rank = [], decide.on_first_rank
    monkeypatch.setattr(decide, "on_first_rank", lambda function: runs.append(on_first_rank(function)) or runs[0])
    first = decided(SETUP, tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    other = replace(SETUP, cp_per_machine=(4, 4))
    assert decided(other, tmp_path) == replace(other, keeping=first.keeping)
    assert runs[1].time != runs[0].time


def test_what_a_run_took_corrects_the_next_decision(machine, tmp_path, log):
    first = decided(SETUP, tmp_path)
    said(log)
    note_beyond(first, tmp_path, 4 * GIB)
    second = decided(SETUP, tmp_path)
    assert " of 75.1 GiB" in said(log)
    assert predict(second).total <= 0.91 * 75.1 * GIB
    note_beyond(second, tmp_path, 8 * GIB)
    third = decided(SETUP, tmp_path)
    assert third != second
    assert " of 71.1 GiB" in said(log)
    for less in (0, -5 * GIB, 7 * GIB):  # what was corrected stays
        note_beyond(third, tmp_path, less)
        assert decided(SETUP, tmp_path) == third
    other = replace(SETUP, seq_len=2**19)
    assert decided(other, tmp_path) == decided(other, tmp_path / "none")  # of another setup nothing is noted


def test_a_note_that_cannot_be_written_does_not_end_the_run(tmp_path, log):
    (tmp_path / "full").touch()
    note_beyond(SETUP, tmp_path / "full", GIB)
    (record,) = log.records
    assert record.levelname == "WARNING"
    assert "full/activation_memory.json cannot be written (" in record.getMessage()


def test_a_note_that_cannot_be_read_is_none(machine, tmp_path):
    first = decided(SETUP, tmp_path)
    for content in (b"{", b"[1]", b"\xff", json.dumps({"a": "b"}).encode()):
        (tmp_path / decide.FILE).write_bytes(content)
        assert decided(SETUP, tmp_path) == first


def test_without_a_gpu_layers_keep_all(tmp_path, log):
    assert {str(keeping) for keeping in decided(replace(SETUP, gpu=False), tmp_path).keeping} == {"all"}
    assert said(log) == "Activation checkpointing: layers 0-31 keep all"


def out_of_memory(mode, folder, raised, ranks=1, chosen=True):
    """The error of a step in which another one is raised on some ranks, and what is noted."""
    from torchtitan_magi.training.memory_log import MeasuredMemory

    setup = replace(SETUP, checkpointing=mode, keeping=parse("all", 32) if mode == "auto" else ())
    rank = setup, predict(setup), "cpu", folder if chosen else None, GpuMemory(80 * GIB)
    for memory in [MeasuredMemory(*rank) for _ in range(ranks)]:
        try:
            with memory.noting():
                raise raised
        except RuntimeError as error:
            found = type(error).__name__, str(error)
    return *found, [*folder.glob("*")] and json.loads((folder / decide.FILE).read_text())


def test_a_run_that_is_out_of_memory_says_what_layers_kept(tmp_path):
    raised = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    kind, text, noted = call(out_of_memory, "auto", tmp_path, raised)
    assert kind == "RuntimeError"
    assert text.startswith("out of memory with layers 0-31 keep all, predicted to take ")
    assert (
        "(CUDA out of memory. Tried to allocate 2 GiB); the next run keeps less, by what is noted in job.dump_folder"
        in text
    )
    assert list(noted.values()) == [int(0.05 * 80 * GIB)]
    kind, text, noted = call(out_of_memory, "full", tmp_path / "other", raised)
    assert (kind, text, noted) == ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", [])


def test_several_ranks_that_are_out_of_memory_note_it_once(tmp_path):
    raised = torch.OutOfMemoryError("CUDA out of memory")
    assert list(call(out_of_memory, "auto", tmp_path, raised, 4)[2].values()) == [int(0.05 * 80 * GIB)]
    assert list(call(out_of_memory, "auto", tmp_path, raised, 4)[2].values()) == [2 * int(0.05 * 80 * GIB)]


def test_what_layers_keep_by_hand_is_not_corrected(tmp_path):
    raised = torch.OutOfMemoryError("CUDA out of memory")
    kind, text, noted = call(out_of_memory, "auto", tmp_path, raised, 1, False)
    assert (kind, noted) == ("RuntimeError", [])
    assert "(CUDA out of memory); change one or more of: parallelism.context_parallel_degree = 16" in text


def test_layers_that_offload_more_than_the_host_has_by_hand_are_refused(machine, tmp_path):
    by_hand = replace(SETUP, keeping=parse("all offloaded", 32))
    with pytest.raises(ValueError, match=r"magi.keep is '32 all offloaded', .* takes 546.5 GiB .* 125.0 are available"):
        decided(by_hand, tmp_path)
    assert decided(replace(SETUP, keeping=parse("all", 32)), tmp_path)


def test_memory_beside_pytorchs_counts_and_other_errors_do_not(tmp_path):
    beside = torch.distributed.DistBackendError("NCCL error: unhandled cuda error 2 'out of memory'")
    kind, text, noted = call(out_of_memory, "auto", tmp_path, beside)
    assert (kind, len(noted)) == ("RuntimeError", 1)
    assert "(NCCL error: unhandled cuda error 2 'out of memory'); the next run keeps less" in text
    assert call(out_of_memory, "auto", tmp_path / "other", RuntimeError("lost"))[:2] == ("RuntimeError", "lost")


# ---------------------------------------------------------------------------------------------------------------- data


def loader_of(path, lengths, **options):
    """Of documents of these tokens, all with loss."""
    documents = [(number, length, 0) for number, length in enumerate(lengths)]
    return SimpleNamespace(dataset=dataset(write(path, documents), **options))


def test_documents_of_the_first_packs_decide(machine, tmp_path, log):
    """Each of two decisions is the faster one for the documents that it was made for."""
    setup = replace(SETUP, cp=2, seq_len=2**18, model=replace(SETUP.model, num_layers=16))
    lengths, found = {"one": [2**18], "short": [1024] * 256}, {}
    for name, documents in lengths.items():
        found[name] = decided(setup, tmp_path, loader_of(tmp_path / f"{name}.jsonl", documents, seq_len=2**18))
        assert "The data are not known" not in log.text
    assert found["one"].keeping != found["short"].keeping
    for name, documents in lengths.items():
        place = Place(H100, 8, (np.array(documents),), host=60 * GIB)
        times = {other: predict_run(mixed, place).time.total for other, mixed in found.items()}
        assert times[name] == min(times.values())


def test_where_data_are_not_known_it_is_the_histogram(machine, tmp_path, log):
    found = decided(SETUP, tmp_path)
    assert log.text.count("The data are not known yet: what layers keep is decided for documents of the histogram") == 1
    packs = tuple(sample("histogram", SETUP.seq_len, 5).packs)
    assert found.keeping == predict_run(SETUP, Place(H100, 8, packs, host=75 * GIB)).setup.keeping


def test_the_first_packs_are_those_of_steps_of_one(tmp_path, monkeypatch):
    """Whatever a rank reads later, and in whichever order packs are dealt; nothing that it reads later changes."""
    monkeypatch.setattr("torchtitan_magi.data.records.record_file.BLOCK_BYTES", 200)
    lengths = np.random.default_rng(0).integers(2, 60, 400).tolist()
    path = write(tmp_path / "lengths.jsonl", [(number, length, 0) for number, length in enumerate(lengths)])
    expected = [np.diff(inputs["documents"])[:, 0].tolist() for inputs, _ in dataset(path)]
    dealt, plain = (dataset(path, dp_rank=1, dp_world_size=2, packs_per_step=4) for _ in range(2))
    state = dealt.state_dict()
    assert [pack.tolist() for pack in first_packs(dealt, len(expected) + 1)] == expected
    assert dealt.state_dict() == state
    assert [labels.tolist() for _, labels in dealt] == [labels.tolist() for _, labels in plain]


def report_packs(report):
    """Reports by which packs a run would decide on GPUs."""
    from torchtitan_magi.training import memory_log

    on_cpu = memory_log.decided

    def decided(setup, folder, loader, capacity):
        report("packs", [pack.tolist() for pack in decide._packs(setup, loader)])
        return on_cpu(setup, folder, loader, capacity)

    memory_log.decided = decided


@pytest.mark.either
def test_a_run_and_size_take_the_same_packs():
    options = "--activation_checkpoint.mode auto --training.local_batch_size 2 --training.global_batch_size 8"
    options = [*options.split(), "--parallelism.data_parallel_shard_degree", "2"]
    read, plain = train(2, options, setup=report_packs), train(2, options)
    assert read.losses == plain.losses
    of_file = f"{corpus()}/train.jsonl", 256, 5, 0, f"{corpus()}/tokenizer"
    expected = [pack.tolist() for pack in sample(*of_file).packs]
    assert [read.of("packs", rank) for rank in (0, 1)] == [[(expected,)]] * 2
