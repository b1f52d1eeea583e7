"""The loader of a run: state, workers, the end of the data; and whole runs that resume and end."""

import json
import re
import shutil

import pytest
from support.jsonl import write_jsonl
from support.runs import TrainingError, call, corpus, new_folder, train
from support.streams import join, resume, take

SEQ_LEN, RECORDS = 64, 60


def tokenize(record):
    """`text` is "id length": tokens id * 1000, id * 1000 + 1, ..., all learned."""
    import numpy as np

    from torchtitan_magi.data import TokenizedDocument

    name, length = map(int, record["text"].split())
    return TokenizedDocument(np.arange(name * 1000, name * 1000 + length, dtype=np.int32), np.ones(length, dtype=bool))


def make_loader(path, rank=0, ranks=1, batch_size=2, batches_per_step=1, num_workers=0, epochs=1, **options):
    from torchtitan_magi.data import PackedSFTDataset
    from torchtitan_magi.data.records import record_file
    from torchtitan_magi.training.batches.pack_loader import PackLoader

    record_file.BLOCK_BYTES = 200
    packs = PackedSFTDataset(path, tokenize, SEQ_LEN, rank, ranks, epochs=epochs, window_blocks=4)
    loader_options = {"num_workers": num_workers, "persistent_workers": False, "prefetch_factor": None}
    return PackLoader(packs, batch_size, batches_per_step, **loader_options, **options)


def rows(batches):
    """The packs, row by row, padding left out."""
    return [row for inputs, _ in batches for row in inputs["input"].tolist() if any(row)]


def with_workers(case, *arguments):
    """In a daemon, as the processes of `training` are, Python starts no workers; and here they shall be forked."""
    import multiprocessing

    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    return case(*arguments)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    records = ({"text": f"{i + 1} {5 + 11 * i % 40}"} for i in range(RECORDS))
    return write_jsonl(tmp_path_factory.mktemp("loader") / "train.jsonl", records)


def resume_at_another_degree(path, num_workers):
    """Every state of a run on two ranks is the same on both; the rest is the same on one rank or three."""
    whole = rows(make_loader(path))
    loaders = [make_loader(path, rank, 2, batch_size=1, num_workers=num_workers) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    for step in range(8):
        states = [loader.state_dict() for loader in loaders]
        assert states[0] == states[1]
        for ranks, batch_size in ((1, 2), (3, 2), (2, 1)):
            rest = []
            for rank in range(ranks):
                workers = num_workers if step == 3 else 0
                resumed = resume(make_loader(path, rank, ranks, batch_size, num_workers=workers), states[0])
                assert resumed.state_dict()["state"] == states[0]["state"]
                rest.append([inputs["input"].tolist() for inputs, _ in resumed])
            joined = [row for batches in zip(*rest, strict=True) for row in join(batches) if any(row)]
            assert joined == whole[2 * step :], (step, ranks)
        for iterator in iterators:
            next(iterator)
    return True


def stops_and_repeats(path, num_workers):
    """The last batch is filled with padding, the last step with batches; a second pass is the same as the first."""
    from torchtitan_magi.data import IGNORE_INDEX

    whole = rows(make_loader(path, batch_size=1))
    loader = make_loader(path, batch_size=4, batches_per_step=4, num_workers=num_workers)
    assert len(whole) % 16 not in (0, 15)
    for _ in range(2):
        batches, ends = [], []
        for inputs, labels in loader:
            batches.append((inputs, labels))
            ends.append(loader.state_dict()["exhausted"])
        assert ends == [False] * (len(batches) - 1) + [True]
        assert len(batches) == 4 * -(-len(whole) // 16)
        assert {tuple(inputs["input"].shape) for inputs, _ in batches} == {(4, SEQ_LEN)}
        assert rows(batches) == whole
        assert (batches[-1][1] == IGNORE_INDEX).all()
        assert batches[-1][0]["documents"].shape == (0, 2)
        take(loader, 2)  # as validation with a number of steps
    finished = make_loader(path, batch_size=4)
    assert rows(resume(finished, loader.state_dict())) == whole[8:]
    list(loader)
    assert list(resume(finished, loader.state_dict())) == []
    more = resume(make_loader(path, batch_size=4, epochs=2), loader.state_dict())
    assert rows(more) == rows(make_loader(path, batch_size=1, epochs=2))[len(whole) :]
    return True


def names_a_record_that_is_broken(path, num_workers):
    """By the message alone, in whichever process it is read."""
    with open(path) as file, open(f"{path}.broken.jsonl", "w") as broken:
        broken.write(file.read() + '{"text": "no number"}\n')
    with pytest.raises(ValueError) as caught:
        list(make_loader(broken.name, num_workers=num_workers))
    assert re.fullmatch(rf"{broken.name}:{RECORDS + 1}: .*", str(caught.value))
    return True


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("case", [resume_at_another_degree, stops_and_repeats, names_a_record_that_is_broken])
def test_the_loader(case, num_workers, path):
    assert call(with_workers, case, str(path), num_workers)


def run_on(processes, folder, *arguments, **kwargs):
    layout = ("--parallelism.data_parallel_shard_degree", f"{processes}", "--training.global_batch_size", "2")
    checkpoints = ("--checkpoint.enable", "--checkpoint.interval", "3", "--job.dump_folder", folder)
    return train(processes, [*layout, "--training.local_batch_size", "1", *checkpoints, *arguments], **kwargs)


def test_a_run_on_two_ranks_continues_on_one_with_the_same_batches():
    """In the middle of an epoch: losses of a run that was never interrupted, and of one on two ranks."""
    folder = new_folder()
    whole = run_on(2, folder, "--training.steps", "6")
    shutil.rmtree(f"{folder}/checkpoint/step-6")
    rest = run_on(1, folder, "--training.steps", "6")
    assert [metrics["step"] for metrics in rest.metrics] == [4, 5, 6]
    assert rest.losses == pytest.approx(whole.losses[3:], rel=2e-6)
    assert rest.grad_norms == pytest.approx(whole.grad_norms[3:], rel=1e-4)


def rates(run):
    """The learning rate of each step."""
    return [next(value for name, value in metrics.items() if name.split("/")[0] == "lr") for metrics in run.metrics]


def test_training_ends_with_the_last_epoch_and_saves(tmp_path):
    """Steps and interval say nothing of it, and the learning rate ends with it; resumed, there is nothing left to do,
    and with an epoch more there is."""
    lines = (corpus() / "train.jsonl").read_text().splitlines()[:12]
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    data = ["--training.dataset_path", f"{tmp_path}/few.jsonl", "--training.steps", "90"]
    data += ["--checkpoint.interval", "80", "--checkpoint.no_last_save_model_only"]
    run, again, more = (run_on(1, str(tmp_path), *data, "--magi.epochs", epochs) for epochs in ("2", "2", "3"))
    steps = len(run.losses)
    assert 4 <= steps < 40
    assert "Ran out of data" not in run.output
    assert f"{steps} steps are 2 epochs: magi.epochs = 2 ends the run before training.steps = 90\n" in run.output
    decay = [(steps - step) / (steps - 2) for step in range(2, steps)]  # two steps are warm-up
    assert rates(run) == pytest.approx([0.003 * factor for factor in (1 / 2, 1, *decay)][:steps])
    assert "Weights: random, as nothing is loaded\n" in run.output
    assert re.search(r"token cache .*/tokens: \d+\.\d\d GiB in \d+ files\n", run.output)
    assert again.losses == []
    assert more.metrics[0]["step"] == steps + 1
    assert f"Weights: those of {tmp_path}/checkpoint/step-{steps}, where this run goes on\n" in more.output
    end = more.metrics[-1]["step"]
    assert (
        f"From step {steps + 1} on the learning rate follows {end} steps with 2 of warm-up, before it fo" in more.output
    )
    assert f"before it followed {steps} steps with 2 of warm-up; set training.steps" in more.output
    assert rates(more)[0] == pytest.approx(0.003 * (end - steps) / (end - 2))
    saved = {f"step-{steps}", f"step-{more.metrics[-1]['step']}"}
    assert {path.name for path in (tmp_path / "checkpoint").glob("step-*")} == saved


def test_a_bad_record_stops_all_ranks_with_one_message(tmp_path):
    """Only the second rank checks it, and few steps would not come to it."""
    lines = (corpus() / "train.jsonl").read_text().splitlines()
    bad = 3 * len(lines) // 4
    lines[bad] = '{"text": '
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    arguments = ["--training.dataset_path", f"{tmp_path}/bad.jsonl", "--parallelism.data_parallel_shard_degree", "2"]
    with pytest.raises(TrainingError) as caught:
        train(2, [*arguments, "--training.steps", "2"])
    message = f"bad.jsonl:{bad + 1}: not JSON (Expecting value, column 9); write one JSON object per line"
    assert str(caught.value) == f"{tmp_path}/{message}"
    assert caught.value.type == "ValueError"
    run = train(2, [*arguments, "--magi.bad_records", "skip", "--training.steps", "2"])
    assert len(run.losses) == 2


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--magi.epochs", "0"), "magi.epochs is 0; use a number of passes over the data, or -1 for no end"),
        (("--training.dataset_path", "*.no"), "no file matches '*.no'; check the pattern"),
    ],
)
def test_options_that_cannot_be_used_are_refused(option, message):
    with pytest.raises(TrainingError) as caught:
        train(1, [*option])
    assert str(caught.value).startswith(message)
    assert caught.value.type == "ValueError"
    assert "\n" not in str(caught.value)


UNREADABLE = {
    "no JSON": lambda state: "{",
    "no object": lambda state: "[]",
    "no stream": lambda state: json.dumps(state | {"stream": None}),
    "no position": lambda state: json.dumps({"stream": state["stream"]}),
    "a negative window": lambda state: json.dumps(state | {"cursor": state["cursor"] | {"window": -1}}),
    "text for a number": lambda state: json.dumps(state | {"cursor": state["cursor"] | {"epoch": "0"}}),
    "pieces of three numbers": lambda state: json.dumps(state | {"cursor": state["cursor"] | {"carried": [[1, 2, 3]]}}),
    "a window beyond the data": lambda state: json.dumps(state | {"cursor": state["cursor"] | {"window": 99}}),
    "a record beyond the data": lambda state: json.dumps(state | {"cursor": state["cursor"] | {"carried": [[99, 0]]}}),
}


@pytest.mark.parametrize("fault", UNREADABLE)
def test_a_state_that_is_none_is_refused_in_one_line(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torchtitan_magi.data.records.record_file.BLOCK_BYTES", 200
    )  # as make_loader has it, undone at the end
    path = tmp_path / "data.jsonl"
    write_jsonl(path, ({"text": f"{number} 30"} for number in range(8)))
    loader = make_loader(path)
    text = UNREADABLE[fault](json.loads(loader.state_dict()["state"]))
    with pytest.raises(ValueError, match=r"^the loader's saved state cannot be read \(.*\); load another checkpoint$"):
        loader.load_state_dict({"state": text, "exhausted": False})
