"""What an adapter makes for a run whatever the torchtitan: the model's facts, an export, data with plans, a runtime."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchtitan_magi.linear.choose import check_heads
from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.models.shapes import heads_of_rank
from torchtitan_magi.training.batches.given_rollouts import GivenRollouts, given_rollouts
from torchtitan_magi.training.batches.pack_loader import FromTheStart, PackLoader, build_dataloader
from torchtitan_magi.training.batches.planned_loader import PlannedLoader, with_plans
from torchtitan_magi.training.batches.planner import MagiRuntime, WorkCount, attention_options
from torchtitan_magi.training.batches.run_length import RunLength, set_run_length
from torchtitan_magi.training.checkpoints.export import Export, exported_files
from torchtitan_magi.training.checkpoints.turn_end import add_turn_end
from torchtitan_magi.training.kernels_ahead import compile_ahead
from torchtitan_magi.training.process.groups import data_parallel_rank, group_of
from torchtitan_magi.training.process.run_folder import keep_log
from torchtitan_magi.training.settings.checks import check_model
from torchtitan_magi.training.settings.model_folder import check_vocabulary
from torchtitan_magi.training.settings.options import OUR_DATASETS
from torchtitan_magi.training.settings.resume import last_checkpoint
from torchtitan_magi.wording import quoted


class RunParts:
    """Mixed into what builds a run: methods in the order in which a run needs them.

    Attributes:
        job_config: the sections of the run.
        tokenizer: torchtitan's, once it is built.
        model_facts: the run's model.
        export: how the model is exported, and with which files.
        runtime: what plans microbatches; there when the first of them is loaded.
        count: the work of the microbatches.
        loader: of the training data, if they are ours; there before the model is built.
        sections: where the data have set the number of steps, see ``RunLength``; None where they have not.
        run_length: how many steps and epochs it has, if the data are ours; there once they are.
    """

    job_config: Any
    tokenizer: Any
    model_facts: ModelConfig
    export: Export
    runtime: MagiRuntime | None
    count: WorkCount
    loader: PackLoader | GivenRollouts | None = None
    sections: Any = None
    run_length: RunLength | None = None

    def read_model(self, read: Callable[[], ModelConfig]) -> None:
        """Sets ``model_facts`` and ``export``, and begins to keep the log. A collective of all ranks, which raises as
        ``check_model``."""
        keep_log(self.job_config.job.dump_folder)
        self.model_facts, layout = check_model(self.job_config, read)
        self.export = Export(layout=layout)

    def build_runtime(
        self, dims: Any, facts: ModelConfig, device: torch.device, windows: Sequence[int] = (0,)
    ) -> MagiRuntime:
        """What plans microbatches for this rank. A collective of all ranks.

        Args:
            dims: torchtitan's ParallelDims.
            windows: see ``MagiRuntime``.

        Raises:
            ValueError: the tensor-parallel degree does not divide the heads, or there are no kernels for them.
        """
        options, heads = attention_options(self.job_config), heads_of_rank(facts, dims.tp)
        if (linear := facts.linear) is not None:
            dtype = getattr(torch, self.job_config.training.mixed_precision_param)
            if check_heads((linear.head_dim, linear.value_dim), dtype, device):
                own_heads = linear.num_heads_qk // dims.tp, linear.num_heads_v // dims.tp
                compile_ahead(own_heads, dtype, device, dims.world_size)
        cp_group, data_rank = group_of(dims, "cp"), data_parallel_rank(dims)
        return MagiRuntime(options, cp_group, heads, device, self.count, windows, data_rank, linear is not None)

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Keeps it, and its files for the export. Raises ValueError where it has tokens that the model has not."""
        self.tokenizer = tokenizer
        check_vocabulary(tokenizer, self.model_facts, self.job_config)
        self.export.files = exported_files(self.job_config, self.model_facts, tokenizer)

    def open_data(self, section: Any, place: tuple[int, int], sections: Any) -> None:
        """Sets ``loader`` and the number of steps, if the data are ours. A collective of all ranks.

        Args:
            section: [training] as this rank is to load it.
            place: the number of batches that are loaded at a time, and which of them is this rank's.
            sections: where the number of steps is set, see ``RunLength``.

        Raises:
            ValueError: see ``build_dataloader``.
        """
        if section.dataset not in OUR_DATASETS:
            return
        if not section.dataset_path:
            self.loader = given_rollouts(section, *place, self.tokenizer, self.job_config)
            return
        self.loader = loader = build_dataloader(section, *place, self.tokenizer, self.job_config, True)
        self.sections = sections
        set_run_length(sections, self.job_config, loader, last_checkpoint(self.job_config) > 0)
        self.run_length = loader.run_length
        add_turn_end(self.export.files, loader.dataset, bool(self.job_config.magi.lora.rank))

    def training_data(self, stock: Callable[[], Any]) -> PlannedLoader:
        """The training data with plans made ahead. stock: makes torchtitan's own loader, for its own data sets."""
        return self._planned(stock() if self.loader is None else self.loader)

    @property
    def num_steps(self) -> int:
        """The last step of the run, which may change when a checkpoint is loaded."""
        return (self.sections or self.job_config).training.steps

    def epoch_at(self, step: int) -> float | None:
        """How often the training data have been gone through after a step; None where that is not known."""
        return None if self.run_length is None else self.run_length.epoch_at(step)

    def validation_data(self, section: Any, place: tuple[int, int], stock: Callable[[], Any]) -> PlannedLoader:
        """One pass over the data of [validation], likewise; sets nothing.

        Raises:
            ValueError: one line, where ranks may have different numbers of batches.
        """
        if section.dataset not in OUR_DATASETS:
            if section.steps == -1 and place[0] > 1:
                raise ValueError(
                    f"validation.steps is -1, but {place[0]} data-parallel ranks may have different numbers of batches "
                    f"of dataset {quoted(section.dataset)}, and would wait for each other; set it to a number"
                )
            return self._planned(FromTheStart(stock()))
        return self._planned(build_dataloader(section, *place, self.tokenizer, self.job_config, False))

    def _planned(self, loader: Any) -> PlannedLoader:
        return with_plans(loader, lambda: self.runtime, self.count, self.model_facts.vocab_size, self.tokenizer.eos_id)
