"""Names of a model's modules and parameters as a checkpoint has them."""

import re

WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod)[.]")  # of checkpointing and compilers


def plain_name(name: str) -> str:
    """The name without what wrappers add to it."""
    return WRAPPERS.sub("", name)
