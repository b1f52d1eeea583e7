"""For which of a device's streams tables are kept."""

from types import SimpleNamespace
from unittest import mock

import torch

from torchtitan_magi.cuda.tables import stream_of


def test_gpus_have_streams_and_the_cpu_has_none() -> None:
    stream = SimpleNamespace(cuda_stream=7)
    with mock.patch.object(torch.cuda, "current_stream", return_value=stream) as current:
        assert stream_of(torch.device("cuda", 1)) == 7
        assert stream_of(torch.device("cpu")) == 0
    current.assert_called_once_with(torch.device("cuda", 1))
