"""The entry point: ``torchrun ... -m torchtitan_magi.train --job.config_file my.toml``, for SFT and DPO."""

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    try:
        from torchtitan_magi.titan.v02.trainer import main
    except ImportError as error:
        if error.name != "torchtitan":
            raise
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # what torchrun shows in the end
            Path(error_file).write_text(json.dumps({"message": str(error)}))
        sys.exit(str(error))
    main()
