"""Tokens -> packs -> batches, in an order that is the same on every rank."""
