"""A rank that dies in the middle of a step ends the job with its reason; the job continues from its checkpoint."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.gpus import needs_two_gpus
from support.runs import DEBUG_TOML, ROOT, SMALL, new_folder, on_corpus, train

from layouts import TOLERANCE, max_relative_difference  # isort: skip

LAUNCH = "import sys; from torchtitan_magi.launch import launch; launch(sys.argv[1:])"
HUNG = r"rank 0 failed: this rank was killed \d+ s after step \d+ ended, without another: .* comm.train_timeout_seconds"
KILLED = r"rank 1 failed: Signal 9 \(SIGKILL\) received by PID \d+"
TRAIN_TIMEOUT = 10  # seconds
# To an end by it: NCCL's watchdog writes its records, torchrun gives processes 30 to end by themselves, and the machine
# is busy.
SOON = TRAIN_TIMEOUT + 12 + 30 + 60
TIMEOUT = 600  # torchtitan's train_timeout_seconds: a job that ends sooner after a blow ends by it


def common():
    return [*on_corpus(), *SMALL, "--parallelism.context_parallel_degree", "2", "--metrics.disable_color_printing"]


def endless(timeout):
    return ["--training.steps", "100000", "--comm.train_timeout_seconds", f"{timeout}"]


def process_of_rank(rank, launcher):
    """The process that torchrun's process `launcher` started for a rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"\0RANK={rank}\0" in (folder / "environ").read_text():
                return int(folder.name)
        except OSError:  # it ended meanwhile
            continue
    raise AssertionError(f"torchrun has no process of rank {rank}")


def run_and_strike(folder, arguments, device, blow, program=("-m", "torchtitan_magi.train")):
    """The exit code of torchtitan_magi/launch.py, what it printed, and the seconds until it ended after rank 1 got the
    signal `blow`.

    blow: None: the program itself sends it.
    """
    visible = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    path = os.pathsep.join([str(ROOT), f"{ROOT}/tests", *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | visible
    environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"  # the watchdog waits 4 times as long for other ranks'
    torchrun = [sys.executable, "-c", LAUNCH, "--standalone", "--nproc-per-node=2", "--local-ranks-filter=0"]
    torchrun += ["--role=rank", "--tee=3", *program, "--job.config_file", DEBUG_TOML, "--job.dump_folder", folder]
    if device == "cuda":
        arguments = [*arguments, "--training.mixed_precision_param", "bfloat16"]  # the kernel takes no float32
    with open(f"{folder}/log", "w+") as log:
        job = subprocess.Popen([*torchrun, *arguments], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        while not re.search(r"step: 3/", Path(log.name).read_text()):
            assert job.poll() is None, Path(log.name).read_text()[-4000:]
            time.sleep(0.05)
        struck = time.monotonic()
        if blow is not None:
            os.kill(process_of_rank(1, job.pid), blow)
        code = job.wait(TIMEOUT + 300)
        return code, Path(log.name).read_text(), time.monotonic() - struck


@pytest.mark.gpu
@pytest.mark.alone(gpus=2)
@needs_two_gpus
def test_a_rank_that_hangs_ends_the_job_within_the_timeout():
    arguments = [*common(), *endless(TRAIN_TIMEOUT)]
    code, log, seconds = run_and_strike(new_folder(), arguments, "cuda", signal.SIGSTOP)
    assert code != 0
    assert seconds < SOON
    assert re.fullmatch(HUNG, log.splitlines()[-1]), log[-4000:]


@pytest.mark.gpu
@pytest.mark.alone(gpus=2)
@needs_two_gpus
@pytest.mark.parametrize("phase", ["forward", "backward", "rows"])
@pytest.mark.parametrize("blow", ["SIGKILL", "SIGSTOP", "memory"])
def test_wherever_a_rank_fails_the_job_ends_with_its_reason(blow, phase):
    arguments = [*common(), *endless(TRAIN_TIMEOUT)]
    program = [ROOT / "tests" / "support" / "faulty_rank.py", phase, blow]
    code, log, seconds = run_and_strike(new_folder(), arguments, "cuda", None, program)
    assert code != 0
    assert seconds < SOON
    reasons = {"SIGKILL": KILLED, "SIGSTOP": HUNG, "memory": "rank 1 failed: OutOfMemoryError: .*out of memory.*"}
    assert re.fullmatch(reasons[blow], log.splitlines()[-1]), log[-4000:]


ON_TWO_GPUS = [pytest.mark.gpu, pytest.mark.alone(gpus=2), needs_two_gpus]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_TWO_GPUS)])
def test_a_killed_rank_ends_the_job_which_then_continues(device):
    folder = new_folder()
    arguments = common()
    arguments += ["--checkpoint.enable", "--checkpoint.interval", "2", "--lr_scheduler.decay_ratio", "0"]
    arguments += ["--magi.overlap_stages", "2"]
    code, log, seconds = run_and_strike(folder, [*arguments, *endless(TIMEOUT)], device, signal.SIGKILL)
    assert code != 0
    assert seconds < TIMEOUT
    assert re.fullmatch(KILLED, log.splitlines()[-1])
    complete = Path(folder, "checkpoint").glob("step-*/.metadata")
    saved = max(int(path.parent.name.removeprefix("step-")) for path in complete)
    if device == "cpu":
        arguments += ["--training.steps", f"{saved + 2}"]
        ours = {"layers": None, "entry": "torchtitan_magi.train"}
        resumed = train(2, [*arguments, "--job.dump_folder", folder], **ours)
        assert [metrics["step"] for metrics in resumed.metrics] == [saved + 1, saved + 2]
        whole = train(2, [*arguments, "--job.dump_folder", new_folder()], **ours)
        assert max_relative_difference(resumed.losses, whole.losses[saved:]) <= TOLERANCE
        printed = set(re.findall(r"step: (\d+)/[\d,]+  loss: ([0-9.]+) ", log))
        assert printed >= {(f"{step}", f"{loss:.5f}") for step, loss in enumerate(whole.losses[:saved], 1)}
