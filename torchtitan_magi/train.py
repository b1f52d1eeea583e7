"""The entry point: ``torchrun ... -m torchtitan_magi.train --job.config_file my.toml``, for SFT and DPO."""

from torchtitan_magi.titan.v02.trainer import main

if __name__ == "__main__":
    main()
