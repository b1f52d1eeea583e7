"""Training that another program leads: it samples, and gives each step its rollouts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchtitan_magi.training.process.all_ranks import is_first_rank, of_first_rank
from torchtitan_magi.training.trainer import ObjectiveTrainer
from torchtitan_magi.wording import quoted


class RolloutTrainer:
    """A run of dataset "rollouts" without a file, see ``open_trainer``. All its methods are collectives of all ranks.

    Args:
        trainer: of the run.
        train_on: see ``ObjectiveTrainer.given_steps``.
    """

    def __init__(self, trainer: ObjectiveTrainer, train_on: Callable[[Sequence[Any]], dict[str, float]]) -> None:
        self._trainer, self._train_on = trainer, train_on

    @property
    def is_first_rank(self) -> bool:
        """Whether this is rank 0, which gives the rollouts."""
        return is_first_rank()

    @property
    def folder(self) -> str:
        """model.hf_assets_path, the folder of the model's configuration, tokenizer and first weights."""
        return str(self._trainer.job_config.model.hf_assets_path)

    @property
    def step(self) -> int:
        """The number of steps done; that of the checkpoint in a run that goes on."""
        return self._trainer.step

    @property
    def num_steps(self) -> int:
        """training.steps, which the learning rate follows."""
        return int(self._trainer.job_config.training.steps)

    def train_step(self, rollouts: Sequence[dict[str, Any]] | None) -> dict[str, float]:
        """One step of the optimizer on all these rollouts, over as many packs as they need; saves checkpoints as
        [checkpoint] says.

        Args:
            rollouts: records as of dataset "rollouts" (docs/how-to/rollouts.md): prompts with answers, advantages and
                log-probabilities. Those of rank 0 are trained on; other ranks wait for them, however long it takes.

        Returns:
            What is logged of the step: "loss_metrics/global_avg_loss", "grad_norm", "policy/ratio", ...

        Raises:
            ValueError: `rollouts[index]: what; remedy`, and after the last step.
        """
        if isinstance(rollouts, Iterable) and not isinstance(rollouts, Mapping | str):
            given: Any = list(rollouts)
        else:
            given = quoted(rollouts)
        if isinstance(given := of_first_rank(given), str):
            raise ValueError(f"rollouts is {given} on rank 0; give a list of records there")
        self._trainer.last_words.note_step(self.step)
        return self._train_on(given)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """transformers' name and value of each trained weight, whole and on the device, for the program that samples.

        Raises:
            ValueError: with a pipeline or adapters, whose weights are exported instead.
        """
        return self._trainer.trained_weights()
