"""Packs as items that a training loop takes: their tokens, labels and boundaries."""
