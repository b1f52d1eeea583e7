"""Packs of rollouts: the answers to a prompt, sampled by a policy, for its gradient.

Answers of a window whose prompts begin alike are packed as trees, see `prefix_trees`. Only tokens without a label are
shared: the loss of an answer is no sum over log-probabilities, so each keeps its own.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchtitan_magi.data.datasets.documents import cut_documents, lay_out_documents
from torchtitan_magi.data.datasets.packed_dataset import PackedDataset, Sample
from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.data.packs.stream import Pack
from torchtitan_magi.data.packs.window_plan import Pieces
from torchtitan_magi.data.records.rollout_format import parse_rollouts
from torchtitan_magi.data.tokens.documents import TokenizedAnswers
from torchtitan_magi.data.tokens.token_block import TokenBlock
from torchtitan_magi.wording import quoted_path

STD_EPS = 1e-4


def group_advantages(rewards: Sequence[float] | npt.NDArray[Any], scale: bool = True) -> npt.NDArray[np.float64]:
    """Advantages of the answers to one prompt: their rewards less the mean, over the standard deviation and 1e-4 (GRPO,
    arXiv 2402.03300). The deviation is that of a sample: of n answers by n - 1.

    Args:
        rewards: of each answer; one alone has an advantage of 0.
        scale: whether to divide; Dr. GRPO (arXiv 2503.20783) does not.
    """
    values = np.asarray(rewards, np.float64)
    centred = values - values.mean()
    return centred / (values.std(ddof=1) + STD_EPS) if scale and len(values) > 1 else centred


class PackedRolloutDataset(PackedDataset):
    """Packs of answers with advantages.

    See `PackedDataset` for the arguments, the shards and the state, and `rollout_format.parse_rollouts` for the
    records. `tokenize` maps a record to TokenizedAnswers, as `ChatTokenizer.rollouts` does for several. An item has

    - `inputs["documents"]`: NumPy int32 [n, 3], rows (start, end, shared), see `PackedSFTDataset`: an answer each;
    - `inputs["records"]`: NumPy int64 [n], the number of each answer's record in the data set, from 0;
    - `inputs["advantages"]`: NumPy float32 [n];
    - `inputs["behaviour"]`: float32 [seq_len], the log-probability of each label under the policy that sampled it, NaN
      elsewhere and with `on_policy`.

    An answer that does not fit a pack loses its end.

    Args:
        scale_rewards: see `group_advantages`.
        on_policy: whether answers are trained as if the current weights had sampled them; otherwise their
            log-probabilities are needed.
    """

    kind, made = "rollouts", (TokenizedAnswers,)
    parse = staticmethod(parse_rollouts)

    def __init__(self, *args: Any, scale_rewards: bool = True, on_policy: bool = False, **options: Any):
        self.scale_rewards, self.on_policy = scale_rewards, on_policy
        super().__init__(*args, share_prefixes=True, share_labels=False, **options)

    def make_pieces(self, block: TokenBlock, indices: np.ndarray) -> tuple[Pieces, PackingCounts]:
        """Pieces of answers, see `cut_documents`."""
        if not self.on_policy and not self._know_their_policy(block, indices):
            raise ValueError(
                f'{quoted_path(self.records.paths)} has answers without "logprobs"; add those of the policy that '
                "sampled them, or set magi.rollouts.on_policy to true if that is the one each step begins with"
            )
        return cut_documents(block, indices, self.seq_len, np.ones(len(block.weights), bool), split=False)

    def _know_their_policy(self, block: TokenBlock, indices: np.ndarray) -> bool:
        if not len(block.logprobs):
            return not len(indices)
        first = block.first_learned(block.begins(indices))  # all answers of a record have log-probabilities, or none
        return not np.isnan(block.logprobs[first[first < block.begins(indices + 1)]]).any()

    def lay_out(self, pack: Pack) -> Sample:
        """The item of a pack, each answer with positions from 0 at the beginning of its prompt."""
        columns = lay_out_documents(pack)
        behaviour = np.full(self.seq_len, np.nan, np.float32)
        advantages = np.zeros(len(pack.index), np.float32)
        for number, (start, end, shared) in enumerate(columns.branches.tolist()):
            block, index = pack.tokens[int(pack.block[number])], pack.index[number]
            first = int(block.begins(index) + pack.start[number])
            advantages[number] = self._advantage(block, int(index), first)
            if not self.on_policy:
                behaviour[start:end] = block.logprobs[first + shared + 1 : first + 1 + int(pack.length[number])]
        item, labels = self.item(
            [(columns.inputs, columns.positions, columns.labels(columns.learned))], columns.branches
        )
        item |= {"records": pack.record, "advantages": advantages, "behaviour": torch.from_numpy(behaviour)}
        return item, labels

    def _advantage(self, block: TokenBlock, index: int, first: int) -> float:
        """The advantage of the answer that begins with the token ``first`` of a block."""
        parts = slice(*block.firsts[index : index + 2].tolist())
        values = block.weights[parts]
        if block.rewarded[index]:
            values = group_advantages(values, self.scale_rewards)
        return float(values[block.bounds[parts].searchsorted(first, side="right") - 1])

    def identity(self) -> dict[str, Any]:
        """All that the stream of packs depends on, and what its items do."""
        return super().identity() | {"scale_rewards": self.scale_rewards, "on_policy": self.on_policy}
