"""Ranks that planned different microbatches end with the reason, also when the device hangs."""

import subprocess
import sys

SCRIPT = """
import ctypes, sys, time
import torch.distributed as dist
import torchtitan_magi as magi
from torchtitan_magi.exchange import agreement

agreement._GRACE_SECONDS = 1
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
plans = agreement.PlanAgreement([0, 1], [0, 1])
plans.check(magi.make_plan(magi.varlen_causal([0, 10 + rank, 40]), 40, 2))
while plans.error is None:
    time.sleep(0.01)
ctypes.PyDLL(None).sleep(3600)  # as a launch into the full queue of a device that hangs: with the interpreter's lock
"""


def test_a_launch_that_never_returns_does_not_keep_the_process(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            _, stderr = process.communicate(timeout=900)
            assert process.returncode == 1
            assert "microbatch 1: ranks [1] have other documents than the rest of ranks [0, 1]" in stderr
    finally:
        for process in ranks:
            process.kill()
