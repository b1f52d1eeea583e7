"""The reference of preference training as a frozen copy of the initial model."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.training.batches.pack_loader import PackLoader
from torchtitan_magi.training.objectives.dpo import PairBatch, logprobs_by
from torchtitan_magi.training.objectives.fingerprint import KnownWeights, fingerprint_of_model
from torchtitan_magi.training.objectives.logprob_model import LogprobModel
from torchtitan_magi.training.objectives.pipeline import Pipeline
from torchtitan_magi.training.process.groups import group_of
from torchtitan_magi.wording import quoted_path

logger = logging.getLogger(__name__)


class Policy(Protocol):
    """What a reference needs of the policy that is trained, see ``ObjectiveTrainer``."""

    job_config: Any
    parallel_dims: Any
    device: torch.device
    model_parts: Sequence[nn.Module]
    model_facts: ModelConfig

    def build_frozen_copy(self) -> LogprobModel | Pipeline: ...

    def load_weights(self, parts: Sequence[nn.Module], path: str) -> None: ...

    def open_packs(self, section: Any) -> PackLoader: ...

    def logprobs_of(self, loader: PackLoader) -> tuple[Tensor, Tensor, Tensor]: ...


class ReferenceModel(KnownWeights):
    """A second model, sharded like the policy. With the same weights it gives the same bits, except under
    torch.compile, which may fuse differently where no gradient is needed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.model: LogprobModel | Pipeline | None = None

    def prepare(self, step: int) -> None:
        """Copies the policy's weights in a new run; in a resumed one loads the initial weights again.

        Raises:
            ValueError: the run is resumed, and nothing says where the initial weights are, or other weights are there.
        """
        if self.model is not None:  # training and validation share it
            return
        policy, checkpoint = self.policy, self.policy.job_config.checkpoint
        path, option = checkpoint.initial_load_path, "checkpoint.initial_load_path"
        if not path and checkpoint.initial_load_in_hf:
            path, option = policy.job_config.model.hf_assets_path, "model.hf_assets_path"
        if step > 0 and not path:
            raise ValueError(
                f"checkpoint.initial_load_path is {quoted_path(checkpoint.initial_load_path)}, but the run resumes "
                f"at step {step} and the reference is the model before step 1; set it to those weights"
            )
        if checkpoint.enable and not path:
            logger.warning(
                "This run cannot be resumed: the reference is the model as it is now, and no "
                "checkpoint.initial_load_path says where to find it again"
            )
        self.model = policy.build_frozen_copy()
        parts = self.model.parts
        if step == 0:
            for mine, its in zip(_tensors(parts), _tensors(policy.model_parts), strict=True):
                mine.detach().copy_(its.detach())
        else:
            policy.load_weights(parts, path)
        if checkpoint.enable:
            found = fingerprint_of_model(parts, group=group_of(policy.parallel_dims, "pp"))
            remedy = f"set {option} to the weights that the run began with, or start another run"
            self.check_weights(quoted_path(path), found, step, remedy)

    def logprobs(self, batches: list[PairBatch]) -> list[Tensor]:
        assert self.model is not None
        return logprobs_by(self.model, batches)


def _tensors(parts: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers: a model with experts may have learnt a bias of their choice, which is a buffer."""
    return itertools.chain.from_iterable(itertools.chain(part.parameters(), part.buffers()) for part in parts)
