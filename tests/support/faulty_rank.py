"""Trains as torchtitan_magi.train does, but rank 1 fails at step 4: faulty_rank.py PHASE CAUSE [training arguments]

CAUSE is a signal's name, or "memory": rank 1 wants more than it may have of its GPU's memory.
"""

import signal
import sys

import torch
from support.faults import Fault

from torchtitan_magi.train import main

STEP = 4


def take_memory() -> None:
    torch.cuda.set_per_process_memory_fraction(0.1)  # the rest is for others that share the GPU
    taken = []
    while True:
        taken.append(torch.empty(1 << 28, dtype=torch.uint8, device="cuda"))


if __name__ == "__main__":
    phase, cause = sys.argv[1:3]
    del sys.argv[1:3]
    Fault(phase, STEP, 1, take_memory if cause == "memory" else signal.Signals[cause])(lambda *_: None)
    main()
