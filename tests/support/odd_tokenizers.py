"""Tokenizers that do odd things in the processes that tokenize. Those import no torch, and so does this."""

import faulthandler
import os
import sys
import time


class Slow:
    """Takes its time."""

    def __init__(self, tokenizer, seconds):
        self.tokenizer, self.seconds, self.fingerprint = tokenizer, seconds, f"slow {tokenizer.fingerprint}"

    def documents(self, records):
        time.sleep(self.seconds)
        return self.tokenizer.documents(records)


class Deadly:
    """Ends its process at the records that hold a word."""

    def __init__(self, tokenizer, how):
        self.tokenizer, self.how, self.fingerprint = tokenizer, how, f"{how} {tokenizer.fingerprint}"

    def documents(self, records):
        if any("deadly" in str(record) for record in records):
            faulthandler.disable()  # pytest's, which would print a page
            os.kill(os.getpid(), self.how)
        return self.tokenizer.documents(records)


class Hungry:
    """Gets no memory at the records that hold a word."""

    def __init__(self, tokenizer):
        self.tokenizer, self.fingerprint = tokenizer, f"hungry {tokenizer.fingerprint}"

    def documents(self, records):
        if any("deadly" in str(record) for record in records):
            raise MemoryError("malloc of 9 bytes failed")
        return self.tokenizer.documents(records)


class Probe:
    """Refuses everything, and names the heavy modules that are loaded."""

    def __init__(self, tokenizer):
        self.tokenizer, self.fingerprint = tokenizer, "probe"

    def documents(self, records):
        heavy = [name for name in ("torch", "torchtitan", "transformers", "datasets") if name in sys.modules]
        return [ValueError(f"modules: {heavy}") for _ in records]
