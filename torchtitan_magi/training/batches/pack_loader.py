"""Microbatches of packed records for one data-parallel rank, and the agreement of all ranks on the records."""

import functools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchtitan_magi.data import ChatTokenizer, PackedPairDataset, PackedRolloutDataset, PackedSFTDataset, collate_packs
from torchtitan_magi.data.datasets.packed_dataset import PackedDataset, Sample, padding_like
from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.data.packs.window_plan import unreadable_state
from torchtitan_magi.data.tokens.token_cache import default_folder
from torchtitan_magi.machine import raise_open_files
from torchtitan_magi.training.batches.findings import check_findings
from torchtitan_magi.training.batches.microbatch import documents_from_positions
from torchtitan_magi.training.batches.template_date import keep_template_date, template_date
from torchtitan_magi.training.process.all_ranks import agreed, rank_and_size
from torchtitan_magi.training.process.error_file import is_message
from torchtitan_magi.training.settings.options import DPO_DATASET, ROLLOUTS_DATASET
from torchtitan_magi.wording import shown

logger = logging.getLogger(__name__)


class PackLoader:
    """Batches of a ``PackedDataset``, one microbatch of ``collate_packs`` at a time.

    The state is the dataset's after the last batch given out, so it is the same on every data-parallel rank, is saved
    once in a checkpoint and can be loaded at another data-parallel degree. ``iter()`` begins at a loaded state, else at
    the first pack. At the end the last batch is filled up with padding, and the last step with batches of padding, so
    that no pack is left over.

    Args:
        dataset: the rank's shard.
        batch_size: packs per batch.
        batches_per_step: microbatches per training step on this rank.
        options: for torch's DataLoader. Workers live for one pass; of several, each makes every n-th batch.

    Attributes:
        schedule: "steps" that the learning rate follows and its "warmup", kept in states. saved_schedule: that of the
            loaded state; empty if there is none.
        run_length: who sets them, see ``run_length``.
        tell_counts: called with the counts that come with the first batch.
    """

    run_length: Any = None
    tell_counts: Callable[[PackingCounts], None] | None = None

    def __init__(self, dataset: PackedDataset, batch_size: int, batches_per_step: int = 1, **options: Any) -> None:
        self.dataset, self.batch_size, self.batches_per_step = dataset, batch_size, batches_per_step
        self.options = options
        if not options.get("num_workers"):
            self.options = {k: v for k, v in options.items() if k not in ("persistent_workers", "prefetch_factor")}
        self.schedule: dict[str, int] = {}
        self.saved_schedule: dict[str, int] = {}
        self._state = json.dumps(dataset.state_dict())
        self._exhausted = self._resuming = False

    def __iter__(self) -> Iterator[Sample]:
        state = self._state if self._resuming else None
        packs = _PacksWithState(self.dataset, state, self.batch_size, self.schedule)
        self._exhausted = self._resuming = False
        batches = self._whole_steps(packs)
        following = next(batches, None)
        if following is not None and self.tell_counts is not None:
            self.tell_counts(PackingCounts(**json.loads(following[1])["cursor"]["counts"]))
        while following is not None:
            (batch, self._state), following = following, next(batches, None)
            self._exhausted = following is None
            yield batch

    def _whole_steps(self, packs: "_PacksWithState") -> Iterator[tuple[Sample, str]]:
        collate = functools.partial(_collate_with_state, num_rows=self.batch_size)
        number = 0
        for made in DataLoader(packs, batch_size=self.batch_size, collate_fn=collate, **self.options):
            if isinstance(made, str):
                raise ValueError(made)
            number += 1
            batch, state = made
            yield batch, state
        for _ in range(-number % self.batches_per_step):
            yield padding_like(batch), state

    def state_dict(self) -> dict[str, Any]:
        """state: the dataset's and the schedule, as JSON; exhausted: whether the last batch has been given out."""
        return {"state": self._state, "exhausted": self._exhausted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError if the state is of other data or other options, or none."""
        if not state_dict:
            return
        try:
            state = json.loads(state_dict["state"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise unreadable_state(error) from None
        self.dataset.check_state(state)
        self.saved_schedule = state.get("schedule", {})
        self._state, self._resuming = state_dict["state"], True

    @property
    def position(self) -> dict[str, Any] | None:
        """The dataset's state from which ``iter()`` will continue; None: it will begin at the first pack."""
        return json.loads(self._state) if self._resuming else None


class _PacksWithState(IterableDataset):
    """Items of a dataset, each with the state after it; it is iterated where the loader's worker lives.

    Of several workers, number w makes batches w, w + n, w + 2n, ..., as the loader takes them. A worker's last item is
    the message of a ValueError, if there is one: torch would put its traceback into the message. schedule: see
    ``PackLoader``.
    """

    def __init__(self, dataset: PackedDataset, state: str | None, batch_size: int, schedule: dict[str, int]) -> None:
        self.dataset, self.state, self.batch_size = dataset, state, batch_size
        self.more = {"schedule": schedule} if schedule else {}

    def __iter__(self) -> Iterator[tuple[Sample, str] | str]:
        if self.state is not None:
            self.dataset.load_state_dict(json.loads(self.state))
        worker = get_worker_info()
        number, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        try:
            for sample in self.dataset.shard(lambda item: item // self.batch_size % num_workers == number):
                yield sample, json.dumps(self.dataset.state_dict() | self.more)
        except ValueError as error:
            if worker is None or not is_message(error):
                raise
            yield str(error)


def _collate_with_state(items: list[tuple[Sample, str] | str], num_rows: int) -> tuple[Sample, str] | str:
    if isinstance(items[-1], str):
        return items[-1]
    samples, states = zip(*items, strict=True)
    return collate_packs(samples, num_rows), states[-1]


def warn_of_shorter_packs(length: int, of_training: int) -> None:
    """Warns where documents that training has whole may be truncated in packs of this length, in tokens."""
    if length < of_training:
        logger.warning(
            f"Validation packs have {length} tokens, those of training {of_training}: documents whole there may be "
            "truncated here; set validation.seq_len to compare losses"
        )


def chat_of(tokenizer: Any, job_config: Any) -> ChatTokenizer:
    """The run's tokenizer with its chat template. Says, and keeps, which date a template prints."""
    day = template_date(job_config.magi.template_date, job_config.job.dump_folder)
    assets = job_config.model.hf_assets_path
    chat = ChatTokenizer.from_assets(tokenizer.tokenizer, tokenizer.bos_id, tokenizer.eos_id, assets, day)
    if chat.prints_date:
        keep_template_date(job_config.job.dump_folder, day)
        logger.info(f"The chat template prints the date: {day}; another by magi.template_date")
    return chat


def options_of_rollouts(job_config: Any) -> dict[str, bool]:
    """What the run's options say of a ``PackedRolloutDataset``."""
    rollouts = job_config.magi.rollouts
    return {"scale_rewards": rollouts.normalization != "dr_grpo", "on_policy": rollouts.on_policy}


def build_dataloader(
    section: Any, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, training: bool
) -> PackLoader:
    """Packs of ``section.dataset_path`` for one data-parallel rank: documents for "sft", preference pairs for "dpo",
    answers for "rollouts".

    A collective of all ranks where there are several.

    Args:
        section: job_config.training or job_config.validation.
        tokenizer: torchtitan's Hugging Face tokenizer.
        training: as the [magi] options say, or one pass over every record in the order of the files.

    Raises:
        ValueError: on all ranks, for a records file that is missing, empty, malformed or not the same on each of them,
            and for what is surely wrong with it or with the chat template.
    """
    magi, path = job_config.magi, section.dataset_path
    raise_open_files()
    warn_of_shorter_packs(section.seq_len, job_config.training.seq_len)
    packs_per_batch = section.local_batch_size * dp_world_size
    batches_per_step = max(1, section.global_batch_size // packs_per_batch) if training else 1

    def make() -> PackedDataset:
        chat = chat_of(tokenizer, job_config)
        shard = (section.seq_len, dp_rank, dp_world_size)
        options = {
            "seed": job_config.debug.seed or 0,
            "shuffle": training and magi.shuffle,
            "epochs": magi.epochs if training else 1,
            "weighted": training,
            "bad_records": magi.bad_records,
            "check": False,
            "token_cache": magi.token_cache or default_folder(),
            "packs_per_step": packs_per_batch * batches_per_step,
        }
        dataset: PackedDataset
        if section.dataset == DPO_DATASET:
            dataset = PackedPairDataset(path, chat.pair, *shard, shared_prompt=magi.dpo.shared_prompt, **options)
        elif section.dataset == ROLLOUTS_DATASET:
            dataset = PackedRolloutDataset(path, chat, *shard, **options_of_rollouts(job_config), **options)
        else:
            own = {"long_documents": magi.long_documents, "share_prefixes": magi.share_prefixes}
            dataset = PackedSFTDataset(path, chat, *shard, **own, **options)
        rank, size = rank_and_size()
        if magi.bad_records == "error":  # in all records, each rank in its share
            dataset.check(rank, size)
        if training and rank == 0:
            check_findings(
                dataset.records, chat, dataset.kind, job_config.model.hf_assets_path, magi.findings == "warn"
            )
        return dataset

    dataset = agreed(path, make, lambda dataset: dataset.records.fingerprint)
    logger.info(
        f"Packing {shown(path)} into {section.seq_len} tokens per pack: {dataset.records.fingerprint}; {dataset.tokens}"
    )
    return PackLoader(dataset, section.local_batch_size, batches_per_step, **asdict(section.dataloader))


class TextLoader:
    """torchtitan's text loader. Positions that restart say where documents begin, as no EOS stands between them. Which
    positions the model gets is for [magi] ``positions``."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __iter__(self) -> Any:
        for inputs, labels in self.loader:
            tokens, positions = {"input": inputs["input"]}, inputs.get("positions")
            if positions is None:  # a loader of one's own, whose documents end with EOS
                yield tokens, labels
            else:
                yield tokens | {"documents": documents_from_positions(positions)}, labels


class FromTheStart:
    """A loader of torchtitan's, every pass over which begins with its first batch. By itself it goes on behind the last
    one that was loaded, be it only ahead of its use."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.state_dict, self.start = loader, loader.state_dict, loader.state_dict()

    def __iter__(self) -> Any:
        self.loader.load_state_dict(self.start)
        return iter(self.loader)
