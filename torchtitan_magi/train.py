"""The entry point: ``torchrun ... -m torchtitan_magi.train --job.config_file my.toml``, for SFT and DPO."""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Trains as the command line says. Without a torchtitan that it can use, ends in one line that names the remedy."""
    try:
        from torchtitan_magi.titan.v02.trainer import main as train
    except ImportError as error:
        if error.name != "torchtitan":
            raise
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # what torchrun shows in the end
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": str(error)}))
        sys.exit(str(error))
    train()


if __name__ == "__main__":
    main()
