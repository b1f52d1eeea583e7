"""What an adapter makes for a run whatever the torchtitan: the model's facts, an export, data with plans, a runtime."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.training.batches.pack_loader import build_dataloader
from torchtitan_magi.training.batches.planned_loader import PlannedLoader, with_plans
from torchtitan_magi.training.batches.planner import MagiRuntime, WorkCount, attention_options, heads_of_rank
from torchtitan_magi.training.batches.run_length import set_run_length
from torchtitan_magi.training.checkpoints.export import Export
from torchtitan_magi.training.checkpoints.exported_files import exported_files
from torchtitan_magi.training.checkpoints.turn_end import add_turn_end
from torchtitan_magi.training.process.groups import data_parallel_rank, group_of
from torchtitan_magi.training.settings.checks import check_model
from torchtitan_magi.training.settings.model_folder import check_vocabulary
from torchtitan_magi.training.settings.options import OUR_DATASETS


class RunParts:
    """Mixed into what builds a run: methods in the order in which a run needs them.

    Attributes:
        model_facts: the run's model.
        export: how the model is exported, and with which files.
        runtime: what plans microbatches; there when the first of them is loaded.
        count: the work of the microbatches.
    """

    model_facts: ModelConfig
    export: Export
    runtime: MagiRuntime | None
    count: WorkCount

    def read_model(self, job_config: Any, read: Callable[[], ModelConfig]) -> None:
        """Sets ``model_facts`` and ``export``. A collective of all ranks, which raises as ``check_model``."""
        self.model_facts, layout = check_model(job_config, read)
        self.export = Export(layout=layout)

    def build_runtime(
        self, job_config: Any, dims: Any, facts: ModelConfig, device: torch.device, windows: Sequence[int] = (0,)
    ) -> MagiRuntime:
        """What plans microbatches for this rank. A collective of all ranks.

        Args:
            dims: torchtitan's ParallelDims.
            windows: see ``MagiRuntime``.

        Raises:
            ValueError: the tensor-parallel degree does not divide the heads.
        """
        heads = heads_of_rank(facts, dims.tp)
        cp_group, data_rank = group_of(dims, "cp"), data_parallel_rank(dims)
        return MagiRuntime(attention_options(job_config), cp_group, heads, device, self.count, windows, data_rank)

    def use_tokenizer(self, job_config: Any, tokenizer: Any) -> None:
        """Takes its files for the export. Raises ValueError where it has tokens that the model has not."""
        check_vocabulary(tokenizer, self.model_facts, job_config)
        self.export.files = exported_files(job_config, self.model_facts, tokenizer)

    def training_data(
        self, job_config: Any, section: Any, place: tuple[int, int], tokenizer: Any, sections: Any, stock: Any
    ) -> PlannedLoader:
        """The training data with plans made ahead; also sets the number of steps. A collective of all ranks.

        Args:
            section: [training] as this rank is to load it.
            place: the number of batches that are loaded at a time, and which of them is this rank's.
            sections: where the number of steps is set, see ``RunLength``.
            stock: makes torchtitan's own loader, for its own data sets.

        Raises:
            ValueError: see ``build_dataloader``.
        """
        if section.dataset not in OUR_DATASETS:
            return self._planned(stock(), tokenizer)
        loader = build_dataloader(section, *place, tokenizer, job_config, True)
        set_run_length(sections, job_config, loader)
        add_turn_end(self.export.files, loader.dataset, bool(job_config.magi.lora.rank))
        return self._planned(loader, tokenizer)

    def validation_data(
        self, job_config: Any, section: Any, place: tuple[int, int], tokenizer: Any, stock: Any
    ) -> PlannedLoader:
        """The same for one pass over the data of [validation], which sets nothing."""
        if section.dataset not in OUR_DATASETS:
            return self._planned(stock(), tokenizer)
        return self._planned(build_dataloader(section, *place, tokenizer, job_config, False), tokenizer)

    def _planned(self, loader: Any, tokenizer: Any) -> PlannedLoader:
        return with_plans(loader, lambda: self.runtime, self.count, self.model_facts.vocab_size, tokenizer.eos_id)
