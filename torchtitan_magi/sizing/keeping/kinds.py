"""What a layer may keep for its backward, and how a mix of layers is written.

A mix is written as ``magi.keep`` takes it: "20 attention offloaded, 12 all" are the first 20 layers and the last 12;
without a number, it is all layers.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan_magi.wording import quoted

ALL, PRODUCTS, ATTENTION, INPUTS = "all", "products", "attention", "inputs"
AUTO = "auto"  # mode of activation checkpointing under which layers keep what is chosen
KEPT = (ALL, PRODUCTS, ATTENTION, INPUTS)  # the most first
OF_MODE = {"none": ALL, "selective": PRODUCTS, "full": INPUTS}  # torchtitan's modes; selective by operation
OFFLOADED = "offloaded"
AHEAD = 2  # layers whose offloaded tensors are on the GPU while they may still be on their way
PART = re.compile(rf"(?:(\d+) +)?({'|'.join(KEPT)})( +{OFFLOADED})?")


@dataclass(frozen=True)
class Keeping:
    """What a layer keeps for its backward, beside its input.

    Attributes:
        kept: "all" it needs; "products": every other matrix product and what attention puts out, torchtitan's selective
            checkpointing by operation; "attention": what attention puts out alone; "inputs": nothing.
        offloaded: whether it is kept in the host's memory.
    """

    kept: str
    offloaded: bool = False

    def __str__(self) -> str:
        return f"{self.kept} {OFFLOADED}" if self.offloaded else self.kept


def parse(text: str, num_layers: int) -> tuple[Keeping, ...]:
    """What each layer keeps.

    Raises:
        ValueError: one line that names what is wrong with magi.keep.
    """
    found: list[Keeping] = []
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"magi.keep has {quoted(part.strip())}; write it as 'attention', or '20 inputs offloaded, 12 all', of "
                f"{', '.join(KEPT)}"
            )
        count = num_layers if match[1] is None else int(match[1])
        if count > num_layers:  # before a list of so many is made
            break
        found += [Keeping(match[2], match[3] is not None)] * count
    if len(found) != num_layers:
        raise ValueError(
            f"magi.keep is {quoted(text)}, which does not come to the model's {num_layers} layers; write numbers that "
            "add up to them, or one kind without a number"
        )
    return tuple(found)


def runs_of(keepings: tuple[Keeping, ...]) -> Iterator[tuple[int, int, Keeping]]:
    """First and last number of layers next to each other that keep the same, and what."""
    first = 0
    for keeping, same in itertools.groupby(keepings):
        count = len(list(same))
        yield first, first + count - 1, keeping
        first += count


def as_option(keepings: tuple[Keeping, ...]) -> str:
    """The value of magi.keep for these layers."""
    return ", ".join(f"{last - first + 1} {keeping}" for first, last, keeping in runs_of(keepings))


def in_words(keepings: tuple[Keeping, ...]) -> str:
    """For a log: "layers 0-19 keep attention, 20-31 inputs, offloaded"."""
    texts = []
    for first, last, keeping in runs_of(keepings):
        layers = f"{first}-{last}" if last > first else str(first)
        texts.append(f"{layers} keep {keeping.kept}" + f", {OFFLOADED}" * keeping.offloaded)
    return "layers " + ", ".join(texts)
