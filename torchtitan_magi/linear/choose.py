"""Chooses what runs the gated delta rule over a layer's tokens."""

import torch

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
    check_kernels((tokens.k.shape[2], tokens.v.shape[2]), tokens.v.dtype, tokens.v.device)
    return Kernels()


def runs_kernels(tokens: Tokens) -> bool:
    """Whether kernels are to run, so that autograd cannot look inside."""
    return _have_kernels(tokens.v.dtype, tokens.v.device) and tokens.wide.itemsize != 8


def check_heads(dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Checks a model's heads before its first step; says whether kernels are to run.

    Args:
        dims: elements of a head, of q and k, and of v.
        dtype: of q, k, v.

    Raises:
        ValueError: as ``choose_backend``.
    """
    have_kernels = _have_kernels(dtype, device)
    if have_kernels:
        check_kernels(dims, dtype, device)
    return have_kernels


def _have_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cuda" and dtype.itemsize == 2
