import pytest
import torch

from torchtitan_magi.cuda.memory import empty, layout

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(3, 4, 5), (0, 2, 5), (7,), torch.Size([2, 3])])
def test_empty_is_contiguous(shape):
    ours, theirs = empty(shape, torch.bfloat16, CPU), torch.empty(shape, dtype=torch.bfloat16)
    assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert type(layout(shape)[0]) is tuple


def test_empty_is_nan_where_torch_is_to_fill_memory():
    torch.use_deterministic_algorithms(True)
    try:
        assert empty((3, 4), torch.float32, CPU).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
