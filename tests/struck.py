"""Trains as torchtitan_magi.train does, but rank 1 is struck at step 4: struck.py PHASE BLOW [arguments of a training]

BLOW is a signal's name, or "memory": rank 1 takes what is left of its GPU's memory.
"""

import signal
import sys

import torch
from blows import Blow

from torchtitan_magi.train import main

STEP = 4
taken = []


def take_memory(*_: object) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    taken.append(torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda"))


if __name__ == "__main__":
    phase, blow = sys.argv[1:3]
    del sys.argv[1:3]
    signal.signal(signal.SIGUSR1, take_memory)
    Blow(phase, STEP, 1, signal.SIGUSR1 if blow == "memory" else signal.Signals[blow])(lambda *_: None)
    main()
