"""The last line of a run: where its model lies, and how to go on from there."""

import json
import logging
from typing import Any

from torchtitan_magi.training.process.all_ranks import is_first_rank
from torchtitan_magi.wording import shown

logger = logging.getLogger(__name__)


class LastLine:
    """The last line of one run; it is logged once, on rank 0."""

    def __init__(self) -> None:
        self.text = ""

    def note(
        self, checkpointer: Any, step: int, adapters_of: str = "", auto_class: str = "AutoModelForCausalLM"
    ) -> None:
        """Takes note of a last checkpoint.

        Args:
            checkpointer: torchtitan's CheckpointManager, which has saved it.
            adapters_of: the folder of the model whose adapters are exported; "": the whole model is.
            auto_class: transformers' that loads it.
        """
        if not is_first_rank():
            return
        folder = checkpointer._create_checkpoint_id(step)
        quoted = _literal(folder)
        load = f"{auto_class}.from_pretrained({{}})"
        if checkpointer.last_save_in_hf and adapters_of:
            base = load.format(_literal(adapters_of))
            self.text = f"The adapters are in {shown(folder)}: PeftModel.from_pretrained({base}, {quoted})"
        elif checkpointer.last_save_in_hf:
            self.text = f"The model is in {shown(folder)}: {load.format(quoted)}"
        elif checkpointer.last_save_model_only:
            self.text = (
                f"The weights are in {shown(folder)}, in torch's format; another run starts from them with "
                f"--checkpoint.initial_load_path {shown(folder)}, and exports them with --training.steps 1 "
                "--optimizer.lr 0 --checkpoint.last_save_in_hf as well"
            )
        else:
            self.text = (
                f"The last checkpoint is {shown(folder)}; the run goes on from it with more --training.steps, and "
                "exports with --checkpoint.last_save_in_hf --checkpoint.last_save_model_only as well"
            )

    def tell(self) -> None:
        """Logs it, if there is one."""
        if self.text:
            logger.info(self.text)
        self.text = ""


def _literal(path: str) -> str:
    """A path as Python has it between double quotes, all of it printable."""
    return json.dumps(path, ensure_ascii=not path.isprintable())


LAST_LINE = LastLine()
