"""Tokens that are kept: the same packs cold, warm and resumed, and whatever happens to the folder or to a writer."""

import errno
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from support.errors import one_line
from support.kept_tokens import SEQ_LEN, corpus_fixtures, damage, dataset, flats, num_files
from support.odd_tokenizers import Deadly, Hungry, Probe, Slow
from support.streams import abort, with_small_blocks

from torchtitan_magi import files, machine
from torchtitan_magi.data import Corpus, PackedSFTDataset, TokenizedDocument, TokenizedPairs, guard
from torchtitan_magi.data.tokens import token_writer
from torchtitan_magi.data.tokens.array_file import Damaged
from torchtitan_magi.data.tokens.token_block import TokenBlock
from torchtitan_magi.data.tokens.token_cache import TokenCache, default_folder

blocks = with_small_blocks(20_000)
folder, tokenizer = corpus_fixtures()


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", ["documents", "pairs"])
def test_packs_are_the_same_without_a_cache_cold_warm_and_with_a_part_of_it(folder, tokenizer, cache, kind):
    here = dataset(folder, tokenizer, None, kind, epochs=2)
    expected = flats(here)
    cold = dataset(folder, tokenizer, cache, kind, epochs=2)
    assert cold.records.num_blocks == num_files_needed(cold) > 2
    assert flats(cold) == expected
    assert num_files(cache) == cold.records.num_blocks
    with mock.patch("subprocess.Popen", side_effect=AssertionError("nothing is missing")):
        warm = dataset(folder, tokenizer, cache, kind, epochs=2)
        assert flats(warm) == expected
    assert warm.counts == cold.counts == here.counts
    for path in sorted(cache.glob("*.tokens"))[::2]:
        path.unlink()
    assert flats(dataset(folder, tokenizer, cache, kind, epochs=2)) == expected
    assert not list(cache.glob("*.unfinished"))


def num_files_needed(packs):
    return len({packs.tokens.path(block) for block in range(packs.records.num_blocks)})


def test_other_content_tokenizer_kind_or_options_have_other_files(folder, tokenizer, cache, tmp_path):
    packs = dataset(folder, tokenizer, cache)
    list(packs)
    paths = set(cache.iterdir())
    (tmp_path / "train.jsonl").write_text((folder / "train.jsonl").read_text())
    list(dataset(tmp_path, tokenizer, cache, seq_len=100, seed=5, long_documents="split"))  # the same tokens
    assert set(cache.glob("*.tokens")) == {path for path in paths if path.suffix == ".tokens"}
    before = packs.tokens.path(0)
    other = type(tokenizer)(tokenizer.tokenizer, tokenizer.bos_id, None, tokenizer.template)
    assert dataset(folder, other, cache).tokens.path(0) != before
    assert TokenCache(cache, packs.records, tokenizer, "pairs", "").path(0) != before
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join([json.dumps({"text": "changed"}) + "\n", *lines[1:]]))
    changed = dataset(tmp_path, tokenizer, cache)
    assert changed.tokens.path(0) != before


@pytest.mark.parametrize("what", ["truncated", "empty", "head", "index", "content", "longer"])
def test_a_damaged_file_is_made_again(folder, tokenizer, cache, what, caplog):
    expected = flats(dataset(folder, tokenizer, cache))
    path = sorted(cache.glob("*.tokens"))[1]
    whole = path.read_bytes()
    damage(path, what)
    if what == "content":
        TokenBlock.open(str(path))  # only a reader of the record notices
    else:
        with pytest.raises(Damaged):
            TokenBlock.open(str(path))
    assert flats(dataset(folder, tokenizer, cache)) == expected
    assert f"{path} is damaged and is made again" in caplog.text
    assert path.read_bytes() == whole


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_is_full_or_read_only_is_one_line_with_the_remedy(folder, tokenizer, cache, error):
    packs = dataset(folder, tokenizer, cache)
    job = token_writer.Job(packs.records, [(0, str(cache / "0.tokens"))], tokenizer, "documents", os.getpid())
    with mock.patch("tempfile.mkstemp", side_effect=OSError(error, os.strerror(error))):
        failed = token_writer._write(token_writer.Task(job.items[0]), job, None)
    assert failed.message == (
        f"tokens cannot be kept in '{cache}': {os.strerror(error)}; make room there, or set magi.token_cache to"
        " another folder"
    )
    assert list(cache.glob("*.tokens")) == []


@pytest.mark.parametrize("full", [False, True])
def test_what_a_writer_says_of_its_folder_reaches_the_reader(folder, tokenizer, tmp_path, full):
    cache = tmp_path / "no folder"
    if full:
        cache = tmp_path / "cache"
        packs = dataset(folder, tokenizer, cache)
        os.makedirs(packs.tokens.path(0))  # cannot be written over
    else:
        packs = dataset(folder, tokenizer, cache)
        os.rename(cache, tmp_path / "moved")
        cache.write_text("a file")
    with pytest.raises(ValueError, match=r"^tokens cannot be kept in '.*': .*; make room there, or set") as caught:
        list(packs)
    assert str(cache) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_warm_cache_may_be_read_only(folder, tokenizer, cache):
    expected = flats(dataset(folder, tokenizer, cache))
    with mock.patch("fcntl.flock", side_effect=OSError(errno.EROFS, "read-only")):
        assert flats(dataset(folder, tokenizer, cache)) == expected


READER = """
import sys
from pathlib import Path
folder, cache, seconds, *sys.path[:0] = sys.argv[1:]
from support.streams import small_blocks
from support.corpus import chat_tokenizer
from support.kept_tokens import dataset, flats
from support.odd_tokenizers import Slow
small_blocks(20_000)
packs = dataset(Path(folder), Slow(chat_tokenizer(folder), float(seconds)), Path(cache))
print("begin", flush=True)
print(hash(str(flats(packs))))
"""


def reader(folder, cache, seconds=0):
    """A process that reads all packs; its tokenizer sleeps for so long."""
    command = [sys.executable, "-c", READER, folder, cache, str(seconds), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_two_jobs_at_once_share_the_work(folder, cache):
    jobs = [reader(folder, cache) for _ in range(2)]
    (one, _), (two, _) = (job.communicate() for job in jobs)
    assert [job.returncode for job in jobs] == [0, 0]
    assert one == two
    assert not list(cache.glob("*.unfinished"))


def children_of(process):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def wait_for(condition):
    while not condition():
        time.sleep(0.02)


def test_a_writer_that_is_killed_is_followed_by_another(folder, tokenizer, cache):
    expected = flats(dataset(folder, tokenizer, None))
    packs = dataset(folder, Slow(tokenizer, 0.2), cache)
    found = []
    thread = threading.Thread(target=lambda: found.extend(flats(packs)))
    thread.start()
    wait_for(lambda: num_files(cache) > 0)
    (writer,) = packs.tokens._writers.values()
    workers = children_of(writer.process.pid)
    writer.process.kill()
    thread.join()
    assert found == expected
    wait_for(lambda: not any(map(is_alive, workers)))


def test_a_stopped_writer_is_named(folder, tokenizer, cache, monkeypatch):
    """Also by a process that did not start it, which waits until it is dead."""
    expected = flats(dataset(folder, tokenizer, None))
    packs = dataset(folder, tokenizer, cache)
    packs.tokens._write([0], packs.tokens.order_name)
    (writer,) = packs.tokens._writers.values()
    writer.process.send_signal(signal.SIGSTOP)
    texts = []
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    monkeypatch.setattr(files.logger, "warning", lambda text: (texts.append(text), writer.process.kill()))
    assert flats(dataset(folder, tokenizer, cache)) == expected
    assert re.match(
        rf"waiting for the tokens of .*, which process {writer.process.pid} on .* if that process", texts[0]
    )


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(folder, tokenizer, cache, tmp_path):
    (tmp_path / "precious").write_text("precious")
    list(dataset(folder, tokenizer, cache))
    for path in list(cache.iterdir()):
        path.unlink()
        if path.suffix == ".lock":
            path.symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match=r"tokens cannot be kept in .*: Too many levels of symbolic links"):
        list(dataset(folder, tokenizer, cache))
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_writer_ends_with_its_reader(folder, tokenizer, cache):
    job = reader(folder, cache, seconds=1000)
    assert job.stdout.readline() == "begin\n"
    wait_for(lambda: children_of(job.pid) and children_of(children_of(job.pid)[0]))
    (writer,) = children_of(job.pid)
    workers = children_of(writer)
    job.send_signal(signal.SIGKILL)
    job.wait()
    wait_for(lambda: not any(map(is_alive, [writer, *workers])))


@pytest.fixture
def with_deadly_records(folder, tmp_path):
    lines = (folder / "train.jsonl").read_text().splitlines()[:100]
    lines[40] = lines[43] = '{"text": "deadly"}'
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_records_that_end_their_process_are_malformed(with_deadly_records, tokenizer, cache):
    deadly = Deadly(tokenizer, signal.SIGXCPU)
    with pytest.raises(ValueError, match=r"train.jsonl:4[14]: the process that tokenizes it was ended: "):
        list(dataset(with_deadly_records, deadly, cache))
    packs = dataset(with_deadly_records, deadly, cache, bad_records="skip")
    list(packs)
    assert (packs.counts.documents, packs.counts.skipped) == (100, 2)
    with pytest.raises(ValueError, match=r"train.jsonl:41: the process"):
        dataset(with_deadly_records, deadly, cache)  # known from the files, before the first pack


def test_a_process_that_is_killed_from_outside_is_an_error_and_no_record_is_left_out(
    with_deadly_records, tokenizer, cache
):
    packs = dataset(with_deadly_records, Deadly(tokenizer, signal.SIGKILL), cache, bad_records="skip")
    with pytest.raises(ValueError, match=r"a process that tokenizes .* was ended by SIGKILL; free memory"):
        list(packs)


@pytest.fixture
def few(tmp_path):
    """Two of five records end their process."""
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", "deadly", "b", "deadly", "c")))
    return path


def written(file, tokenizer, cache):
    """What a writer says of the one block of a file, and its malformed records; None if there is no file of tokens."""
    cache.mkdir(exist_ok=True)
    path = str(cache / "block")
    job = token_writer.Job(Corpus(file), [(0, path)], tokenizer, "documents", os.getppid())
    failed = token_writer.write_blocks(job)
    return failed, TokenBlock.open(path).malformed if os.path.exists(path) else None


@pytest.mark.parametrize(
    ("how", "limit", "size", "remedy"),
    [
        (
            signal.SIGABRT,
            resource.RLIMIT_AS,
            10**5 * 2**20,
            "raise the limit of memory, ulimit -v, which is 100,000 MiB",
        ),
        (signal.SIGSEGV, resource.RLIMIT_STACK, 2**22, "raise the limit of stacks, ulimit -s, which is 4,096 KiB"),
        (signal.SIGXCPU, resource.RLIMIT_CPU, 99_999, "raise the limit of CPU time, ulimit -t, which is 99,999 s"),
    ],
)
def test_what_the_machine_lacks_is_not_kept_of_a_record(few, tokenizer, cache, how, limit, size, remedy, monkeypatch):
    """With more of it the record is tokenized, or its fault is known."""
    deadly = Deadly(tokenizer, how)
    soft, hard = resource.getrlimit(limit)
    monkeypatch.setattr(guard, "ROOM_BYTES", 10**11 if limit == resource.RLIMIT_AS else 2**20)
    resource.setrlimit(limit, (size, hard))
    try:
        failed, malformed = written(few, deadly, cache)
    finally:
        resource.setrlimit(limit, (soft, hard))
    monkeypatch.undo()
    assert malformed is None
    assert failed.message == f"a process that tokenizes {few} was ended by {how.name}; {remedy}"
    _, malformed = written(few, deadly, cache)
    assert malformed.keys() == {1, 3}
    assert not any("memory" in text or "limit" in text for text in malformed.values())


def test_a_process_that_gets_no_memory_is_an_error_and_no_record_is_left_out(few, tokenizer, cache):
    failed, malformed = written(few, Hungry(tokenizer), cache)
    assert malformed is None
    assert failed.message == f"a process that tokenizes {few} lacks memory: malloc of 9 bytes failed; free memory"


def test_a_template_that_the_machine_gives_too_little_memory_is_not_at_fault(monkeypatch):
    with pytest.raises(ValueError, match=r"takes more than 1 GiB of memory; correct the template"):
        guard.run_limited(bytearray, 2**40)
    monkeypatch.setattr(machine, "has_memory", lambda num_bytes: False)
    with pytest.raises(ValueError, match=r"less than the 1 GiB of memory that it may take; free memory$"):
        guard.run_limited(bytearray, 2**40)


def test_tokens_and_indices_take_no_descriptors(folder, tokenizer, cache, tmp_path):
    """So that a data set may have more files than a process may open."""
    for number in range(20):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"text": f"a text {number}"}) + "\n")
    paths = ", ".join(str(path) for path in tmp_path.glob("*.jsonl"))
    before = len(os.listdir("/proc/self/fd"))
    packs = PackedSFTDataset(paths, tokenizer, SEQ_LEN, epochs=1, token_cache=cache)
    (item,) = packs
    assert len(item[0]["documents"]) == 20
    assert len(packs.tokens._opened_last) == 20
    assert len(os.listdir("/proc/self/fd")) < before + 10


def test_a_lack_of_descriptors_is_named(folder, tokenizer, cache):
    with mock.patch("builtins.open", side_effect=OSError(errno.EMFILE, "Too many open files")):
        with pytest.raises(ValueError, match=r"train.jsonl': Too many open files; raise the limit .* ulimit -n"):
            Corpus(folder / "train.jsonl")
        assert "ulimit -n" in token_writer.unusable(cache, OSError(errno.EMFILE, "Too many open files"))


def test_a_writer_that_is_killed_again_and_again_is_the_error(folder, tokenizer, cache, monkeypatch):
    monkeypatch.setattr(guard, "_CLEAN", "import os, sys; sys.stdin.buffer.read(); os.kill(os.getpid(), 9)")
    words = r"^the process that tokenizes .*train.jsonl was ended by SIGKILL again and again; free memory$"
    with pytest.raises(ValueError, match=words):
        list(dataset(folder, tokenizer, cache))


def test_a_file_that_ends_the_process_that_reads_it_is_named(folder, tokenizer, cache, monkeypatch):
    corpus = Corpus(folder / "train.jsonl")
    monkeypatch.setattr(Corpus, "read", abort)
    job = token_writer.Job(corpus, [(0, f"{cache}/block")], tokenizer, "documents", os.getppid())
    failed = token_writer.write_blocks(job)
    assert failed.message == (
        f"cannot read records file '{folder}/train.jsonl': the process that reads it was ended by SIGABRT; write the "
        "file again"
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (Terminal(), r"tokenizing:  50%\|.*\| 500/1000 \[00:00<00:00, .* records/s, 1\.00 M tokens/s\]"),
        (io.StringIO(), r"tokenizing: 500 of 1,000 records, 1\.00 M tokens/s, 1 min left\n$"),
    ],
)
def test_tokenizing_shows_records_speed_and_time_left(stderr, words, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(token_writer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(sys, "stderr", stderr)
    progress = token_writer._Progress(1000)
    now[0] = 60.0
    progress.add(token_writer.Written(500, 60_000_000, 0, ""))
    if progress.bar is not None:
        progress.bar.refresh()
    assert re.search(words, stderr.getvalue())
    progress.close()


def test_the_log_says_how_large_the_folder_is(folder, tokenizer, cache):
    tokens = dataset(folder, tokenizer, cache).tokens
    for number in range(2):
        with open(cache / f"{number}.tokens", "wb") as file:
            file.truncate(3 * 2**29)
    number = len([*cache.iterdir()])
    assert str(tokens) == f"token cache {cache}: 3.00 GiB in {number} files"


def test_a_writer_that_nobody_listens_to_ends_without_a_traceback(monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(os, "nice", lambda more: None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(token_writer, "write_blocks", lambda job: token_writer.Failed("a file has changed"))
    with open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit):
            token_writer.write(None)
    assert capfd.readouterr().err == ""


def test_malformed_records_keep_file_and_line(folder, tokenizer, cache, tmp_path, caplog):
    lines = (folder / "train.jsonl").read_text().splitlines()
    lines[150] = '{"messages": [{"role": "user", "content": "q"}], "tools": [{"name": "f"}]}'  # the template refuses it
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r'train.jsonl:151: the chat template has no place for "tools"; give'):
        list(dataset(tmp_path, tokenizer, cache))
    packs = dataset(tmp_path, tokenizer, cache, bad_records="skip")
    list(packs)
    assert (packs.counts.documents, packs.counts.skipped) == (600, 1)
    assert "record left out: " in caplog.text
    assert "train.jsonl:151: the chat template" in caplog.text


def test_large_data_are_checked_as_they_are_tokenized(folder, tokenizer, cache, tmp_path):
    lines = (folder / "train.jsonl").read_text().splitlines()
    lines[150] = "{"
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"train.jsonl:151: not JSON"):
        dataset(tmp_path, tokenizer, cache)
    with mock.patch("torchtitan_magi.data.datasets.packed_dataset.CHECKED_BYTES", 1000):
        packs = dataset(tmp_path, tokenizer, cache)
    with pytest.raises(ValueError, match=r"train.jsonl:151: not JSON"):
        list(packs)


def test_the_state_of_another_packing_version_is_refused(folder, tokenizer):
    packs = dataset(folder, tokenizer, None)
    state = packs.state_dict()
    state["stream"]["packing"] = 99
    with pytest.raises(ValueError, match=r"has packing version 99, this program has \d+; resume with the program"):
        packs.load_state_dict(state)
    del state["stream"]["packing"]  # of a version that had none
    with pytest.raises(ValueError, match="has packing version 1, "):
        packs.load_state_dict(state)


def test_a_writer_does_without_torch(folder, tokenizer, cache):
    probe = Probe(tokenizer)
    with pytest.raises(ValueError, match=r"modules: \[\]"):
        list(dataset(folder, probe, cache))


def test_a_block_is_read_as_it_was_written(tmp_path):
    rng = np.random.default_rng(0)

    def document(size):
        return TokenizedDocument(rng.integers(0, 99, size).astype(np.int32), rng.random(size) < 0.5)

    documents = [document(size) for size in (5, 0, 9, 1)]
    answers = {3: [(1, 0), (0, 2)], 1: [(0, 1)], 40: [(0, 1), (0, 2), (2, 1)]}
    pairs = [
        TokenizedPairs(document(size).tokens, (document(size), document(size + 1), document(5)), tuple(of_one))
        for size, of_one in answers.items()
    ]
    for kind, records in (("documents", documents), ("pairs", pairs)):
        TokenBlock.of([*records, ValueError("wrong; mend it")]).write(str(tmp_path / kind))
        block = TokenBlock.open(str(tmp_path / kind))
        assert (len(block), block.malformed) == (len(records) + 1, {len(records): "wrong; mend it"})
        for index, record in enumerate(records):
            assert block.are_sound(np.array([index]))
            parts = [block.document(*block.bounds[part : part + 2]) for part in range(*block.firsts[index : index + 2])]
            expected = [record]
            if kind == "pairs":
                assert parts.pop(0).tokens.tolist() == record.prompt.tolist()
                expected = record.answers
                here = slice(*block.first_pairs[index : index + 2])
                assert [*map(tuple, block.pairs[here].tolist())] == [*record.pairs]
                both = [[expected[number].tokens.tolist() for number in pair] for pair in record.pairs]
                assert [one[:same] == two[:same] for (one, two), same in zip(both, block.common[here], strict=True)]
            for one, two in zip(parts, expected, strict=True):
                assert (one.tokens.tolist(), one.loss_mask.tolist()) == (two.tokens.tolist(), two.loss_mask.tolist())
    empty = TokenBlock.of([ValueError("a"), ValueError("b")])
    empty.write(str(tmp_path / "empty"))
    assert TokenBlock.open(str(tmp_path / "empty")).malformed == {0: "a", 1: "b"}


def test_the_default_folder(monkeypatch):
    monkeypatch.setenv("TORCHTITAN_MAGI_CACHE", "/somewhere")
    assert default_folder() == Path("/somewhere/tokens")
    monkeypatch.delenv("TORCHTITAN_MAGI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/user/cache")
    assert default_folder() == Path("/user/cache/torchtitan_magi/tokens")


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    monkeypatch.setenv("TORCHTITAN_MAGI_CACHE", "/somewhere")
    assert default_folder() == Path("/somewhere/tokens")
    monkeypatch.delenv("TORCHTITAN_MAGI_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with one_line("no home folder; set TORCHTITAN_MAGI_CACHE"):
        default_folder()


def test_the_benchmark_runs_and_draws(tmp_path):
    root = Path(__file__).resolve().parents[3]
    code = (
        f"import sys; from pathlib import Path; sys.path.insert(0, {str(root / 'benchmarks')!r})\n"
        "import bench_data, figures, plot_results\n"
        "bench_data.QUICK_SIZES = dict(chat=40, records=50, lognormal=60); bench_data.RANKS = [1, 3]\n"
        f"result = bench_data.measure(Path({str(tmp_path)!r}), True)\n"
        f"figures.save(result, Path({str(tmp_path)!r}) / 'data.json')\n"
        f"plot_results.picture(Path({str(tmp_path)!r}) / 'data.json')\n"
        "assert [row['ranks'] for row in result['ranks']] == [1, 3]\n"
        "assert all(0 < row['fill'] <= 1 for row in result['fill']) and len(result['fill']) == 5\n"
        "assert result['opening']['records'] == 50"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "data.png").stat().st_size > 1000
