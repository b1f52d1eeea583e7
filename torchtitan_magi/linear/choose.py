"""Chooses what runs the gated delta rule over a layer's tokens."""

from torchtitan_magi.linear.backend import Backend, Tokens
from torchtitan_magi.linear.chunked import Chunked
from torchtitan_magi.linear.kernels import Kernels, check_kernels


def choose_backend(tokens: Tokens) -> Backend:
    """Kernels where q, k, v have 16 bits and are on a GPU, plain torch for all else.

    Raises:
        ValueError: kernels that do not take these tokens, or are not installed.
    """
    if not runs_kernels(tokens):
        return Chunked()
    check_kernels(tokens)
    return Kernels()


def runs_kernels(tokens: Tokens) -> bool:
    """Whether kernels are to run, so that autograd cannot look inside."""
    return tokens.v.is_cuda and tokens.v.dtype.itemsize == 2 and tokens.wide.itemsize != 8
