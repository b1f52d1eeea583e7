"""A microbatch: what its loader gave, what was planned for it, and what its objective counts in it."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtitan_magi.attention.bound_plan import IndexData
from torchtitan_magi.data.packs.prefix_trees import Nodes, branches_of_documents, nodes_of
from torchtitan_magi.losses import IGNORE_INDEX
from torchtitan_magi.masks.builders import tree_causal
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.plan import AttnPlan

MICROBATCH = "microbatch"  # its key beside "input" in the dict that torchtitan's Trainer hands on
Batch = tuple[dict[str, Any], Tensor]  # "input" and MICROBATCH; labels
# what is not for the model
_FROM_LOADERS = (
    "input", "documents", "records", "label_weights", "advantages", "behaviour", "pairs", "pair_ids", "pair_numbers"
)  # fmt: skip


@dataclass(eq=False)
class Microbatch:
    """A microbatch on the host, until its tokens are the model's.

    Args:
        tokens: int64 [batch, seq_len], the rows planned as one pack.
        labels: int64 [batch, seq_len]; None where nobody asks for them.
        branches: int64 [n, 3], the documents over the flattened batch, or answers with their prompts, see
            ``prefix_trees``.
        records: int64, the number of each document's or pair's record in the data set; None where nobody has counted
            records.
        model_inputs: what the model is called with besides: "positions", int32 [batch, seq_len], if they are not to run
            over the pack.
        label_weights: float64 [batch, 2, seq_len], what each label weighs in a mean over labels and in one over
            documents, where several documents may share it; None: all in a document weigh the same.
        advantages: float32 [n], of each branch, where these are sampled answers.
        behaviour: float32 [batch, seq_len], the log-probability of each of their labels under the policy that sampled
            it; NaN where it is not known.
        pairs: int64 [k, 2], numbers of the branches that are chosen and rejected; None: there are no preference pairs.
        pair_numbers: int64 [k], the number of each pair in its record; None without pairs.

    Attributes:
        plans: one for each kind of layers; indices: this rank's index data of each, on the host.
        labelled: int64 [l], which of this rank's tokens have a label.
        planning_seconds: what planning took.
        num_items: see ``Objective.count_items``, which also sets weights: float32 [batch, seq_len], None for 1.
    """

    tokens: Tensor
    labels: Tensor | None
    branches: npt.NDArray[np.int64]
    records: npt.NDArray[np.int64] | None
    model_inputs: dict[str, Any]
    label_weights: Tensor | None = None
    advantages: npt.NDArray[np.float32] | None = None
    behaviour: Tensor | None = None
    pairs: npt.NDArray[np.int64] | None = None
    pair_numbers: npt.NDArray[np.int64] | None = None
    plans: tuple[AttnPlan, ...] = ()
    indices: tuple[IndexData, ...] = ()
    labelled: Tensor | None = None
    planning_seconds: float = 0.0
    num_items: float = 0
    weights: Tensor | None = None
    content: int = 0

    @classmethod
    def of(cls, inputs: dict[str, Any], labels: Tensor | None, eos_id: int | None) -> "Microbatch":
        """A microbatch of a loader's inputs: tokens as "input", boundaries as "documents" (with three columns
        branches), else documents end with EOS; and "pairs" of documents.

        Raises:
            ValueError: neither boundaries nor an eos_id.
        """
        model_inputs = {name: value for name, value in inputs.items() if name not in _FROM_LOADERS}
        given, pairs = inputs.get("documents"), inputs.get("pairs")
        branches = branches_of_documents(documents_from_eos(inputs["input"], eos_id) if given is None else given)
        return cls(
            inputs["input"],
            labels,
            branches,
            inputs.get("records", inputs.get("pair_ids")),
            model_inputs,
            inputs.get("label_weights"),
            inputs.get("advantages"),
            inputs.get("behaviour"),
            None if pairs is None else pairs.astype(np.int64),
            inputs.get("pair_numbers"),
        )

    @functools.cached_property
    def nodes(self) -> Nodes:
        """The nodes of the branches."""
        return nodes_of(self.branches)

    @property
    def num_tokens(self) -> int:
        """Tokens of the documents, without padding."""
        return int((self.branches[:, 1] - self.branches[:, 0]).sum())

    @property
    def num_labels(self) -> int:
        """Tokens that have a label."""
        assert self.labels is not None
        return int((self.labels != IGNORE_INDEX).sum())

    @property
    def num_positions(self) -> int:
        """Rotary positions that the model needs. Without any given they run over the whole pack."""
        positions = self.model_inputs.get("positions")
        return int(self.tokens.shape[-1]) if positions is None else 1 + int(positions.max())

    def masks(self, windows: Sequence[int]) -> list[AttnSlices]:
        """What attends to what, for each window: how many tokens a row sees at most; 0: all of its document."""
        start, end, parent, _ = self.nodes
        return [tree_causal(end - start, parent, start, window or None) for window in windows]

    def digest(self) -> int:
        """63 bits for tokens, labels, documents and pairs, by which ranks tell whether they have the same."""
        digest = hashlib.blake2b(digest_size=8)
        more = self.label_weights, self.advantages, self.behaviour, self.pairs
        for array in (self.tokens, self.labels, self.branches, *more):
            if array is not None:
                digest.update(np.asarray(array).tobytes())
        return int.from_bytes(digest.digest()) >> 1

    def check_tokens(self, vocab_size: int) -> None:
        """Raises ValueError for a token or a label that the model does not have.

        On a GPU that would end in a failed assertion, or make the loss a wrong one.
        """
        labels = None if self.labels is None else self.labels.masked_fill(self.labels == IGNORE_INDEX, 0)
        for name, numbers in (("token", self.tokens), ("label", labels)):
            if numbers is None or not numbers.numel():
                continue
            smallest, largest = map(int, numbers.aminmax())
            if largest >= vocab_size:
                raise ValueError(
                    f"the data has {name} {largest}, but the model a vocabulary of {vocab_size:,}; use the model's "
                    "tokenizer (model.hf_assets_path), or a flavor of its size"
                )
            if smallest < 0:
                raise ValueError(
                    f"the data has {name} {smallest}; tokens are numbered from 0, and a token without a label has "
                    f"{IGNORE_INDEX}"
                )


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """This rank's tokens of a microbatch, ready for the model.

    Args:
        tokens, labels: int64 [b, s].
        labelled: int64 [n], numbers of the tokens that have a label, of b * s.
        model_inputs: what else the model is called with.
        take: x [b, s * cp] of the whole microbatch -> this rank's [b, s].
    """

    tokens: Tensor
    labels: Tensor
    labelled: Tensor
    model_inputs: dict[str, Any]
    take: Callable[[Tensor], Tensor]


Process = Callable[[dict[str, Any], Tensor], LocalBatch]  # takes inputs and labels of a microbatch on the device


def on_device(batch: Batch, device: torch.device | str) -> Batch:
    """A batch with its tokens and labels on the device, as torchtitan's Trainer brings them there."""
    inputs, labels = batch
    return inputs | {"input": inputs["input"].to(device)}, labels.to(device)


def documents_from_positions(positions: Tensor) -> npt.NDArray[np.int32]:
    """Token ranges int32 [n, 2] of the documents of a batch, whose positions [batch, seq_len] restart with each."""
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    starts = begins.flatten().nonzero().flatten().numpy()
    return np.stack([starts, np.append(starts[1:], begins.numel())], 1).astype(np.int32)


def documents_from_eos(tokens: Tensor, eos_id: int | None) -> npt.NDArray[np.int32]:
    """Token ranges int32 [n, 2] of the documents of a batch [batch, seq_len]: each ends with an EOS or its row.

    Raises:
        ValueError: no eos_id.
    """
    if eos_id is None:
        raise ValueError(
            "the tokenizer has no EOS token; add one to it, or use a loader that gives document boundaries"
        )
    is_end = tokens == eos_id
    is_end[:, -1] = True
    ends = is_end.flatten().nonzero().flatten().cpu().numpy() + 1
    return np.stack([np.append(0, ends[:-1]), ends], 1).astype(np.int32)
