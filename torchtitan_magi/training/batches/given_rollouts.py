"""Rollouts that a program gives step by step, in place of a loader's."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchtitan_magi.data import Corpus, PackedRolloutDataset, collate_packs
from torchtitan_magi.data.datasets.packed_dataset import Sample, padding_like
from torchtitan_magi.training.batches.pack_loader import chat_of, options_of_rollouts

logger = logging.getLogger(__name__)


class GivenRollouts:
    """Batches of rollouts that a program gives step by step, in place of a loader's.

    Args:
        open_packs: makes a data set of the rollouts of a step and its number.
        batch_size: packs per batch.

    Attributes:
        dataset: the rollouts of the last step, whose records have names.
    """

    dataset: PackedRolloutDataset | None = None

    def __init__(self, open_packs: Callable[[Corpus, int], PackedRolloutDataset], batch_size: int) -> None:
        self.open_packs, self.batch_size = open_packs, batch_size

    def batches(self, rollouts: Sequence[Any], step: int, multiple: int) -> list[Sample]:
        """This rank's batches of a step, as many as on the other ranks.

        Args:
            rollouts: records, see `rollout_format`, the same on all ranks.
            multiple: of which the number of batches is one.

        Raises:
            ValueError: `rollouts[index]: what; remedy`.
        """
        if not rollouts:
            raise ValueError("rollouts is empty; give a step at least one record")
        records = Corpus.of_records("rollouts", rollouts, PackedRolloutDataset.parse)
        self.dataset = self.open_packs(records, step)
        packs, counts = list(self.dataset), self.dataset.counts
        if counts.truncated or counts.unlabeled:
            logger.warning(f"step {step + 1}: {counts}")
        size = self.batch_size
        found = [collate_packs(packs[first : first + size], size) for first in range(0, len(packs), size)]
        return found + [padding_like(found[0])] * (-len(found) % multiple)

    def __iter__(self) -> Iterator[Sample]:
        raise ValueError(
            'training.dataset_path is "", and so are the data; give the JSONL file of dataset "rollouts", or the '
            "rollouts of each step by torchtitan_magi.open_trainer"
        )

    def state_dict(self) -> dict[str, Any]:
        """That the program knows where it is. A checkpoint without any state is taken for one of weights only."""
        return {"given": True}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def given_rollouts(section: Any, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> GivenRollouts:
    """Rollouts of a program for one data-parallel rank; arguments as for `build_dataloader`."""
    chat, seed = chat_of(tokenizer, job_config), job_config.debug.seed or 0

    def open_packs(records: Corpus, step: int) -> PackedRolloutDataset:
        return PackedRolloutDataset(
            records, chat, section.seq_len, dp_rank, dp_world_size, **options_of_rollouts(job_config),
            epochs=1, seed=seed + step, packs_per_step=section.local_batch_size * dp_world_size, reports=False,
        )  # fmt: skip

    return GivenRollouts(open_packs, section.local_batch_size)
