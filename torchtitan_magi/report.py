"""``python -m torchtitan_magi.report``: sizes a run, see ``sizing``."""

from torchtitan_magi.sizing.command import main

if __name__ == "__main__":
    main()
