"""Trains as torchtitan_magi.train does, but rank 1 is struck at step 4: struck.py PHASE BLOW [arguments of a training]

BLOW is a signal's name, or "memory": rank 1 wants more than is left of its GPU's memory.
"""

import signal
import sys

import torch
from support.faults import Blow

from torchtitan_magi.train import main

STEP = 4


def take_memory() -> None:
    taken = []
    while True:
        taken.append(torch.empty(1 << 28, dtype=torch.uint8, device="cuda"))


if __name__ == "__main__":
    phase, blow = sys.argv[1:3]
    del sys.argv[1:3]
    Blow(phase, STEP, 1, take_memory if blow == "memory" else signal.Signals[blow])(lambda *_: None)
    main()
