"""Chooses what runs the gated delta rule over a layer's tokens."""

from torchtitan_magi.linear.backend import Backend, Tokens
from torchtitan_magi.linear.chunked import Chunked


def choose_backend(tokens: Tokens) -> Backend:
    """Plain torch."""
    return Chunked()
