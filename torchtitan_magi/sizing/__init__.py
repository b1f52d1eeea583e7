"""``python -m torchtitan_magi.report``: a run before it has any GPUs."""
