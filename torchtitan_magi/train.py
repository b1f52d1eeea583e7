"""The entry point: ``torchrun ... -m torchtitan_magi.train --job.config_file my.toml``, for SFT and DPO."""

import importlib
import json
import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record


@record  # so that torchrun says last what went wrong, whatever it is
def main() -> None:
    """Trains as the command line says."""
    from torchtitan_magi.titan import adapter

    importlib.import_module(f"{adapter.__name__}.trainer").main()


if __name__ == "__main__":
    try:
        main()
    except ImportError as error:
        if error.name != "torchtitan":
            raise
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            Path(error_file).write_text(json.dumps({"message": str(error)}))
        sys.exit(str(error))
