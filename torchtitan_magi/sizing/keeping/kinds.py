"""What a layer may keep for its backward, and how a mix of layers is written.

A mix is written as ``magi.keep`` takes it: "20 attention offloaded, 12 all" are the first 20 layers and the last 12,
"8 products offloaded among 24 products" are 32, of which each fourth offloads; without a number, it is all layers.
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
KIND = rf"({'|'.join(KEPT)})( +{OFFLOADED})?"
PART = re.compile(rf"(?:(\d+) +)?{KIND}(?: +among +(\d+) +{KIND})?")


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
                f"magi.keep has {quoted(part.strip())}; write it as 'attention', '20 inputs offloaded, 12 all', or "
                f"'8 products offloaded among 24 products', of {', '.join(KEPT)}"
            )
        count, others = num_layers if match[1] is None else int(match[1]), int(match[4] or 0)
        if count + others > num_layers:  # before a list of so many is made
            break
        one, other = (Keeping(match[at], match[at + 1] is not None) for at in (2, 5))
        found += spread(one, count, other, others)
    if len(found) != num_layers:
        raise ValueError(
            f"magi.keep is {quoted(text)}, which does not come to the model's {num_layers} layers; write numbers that "
            "add up to them, or one kind without a number"
        )
    return tuple(found)


def spread(one: Keeping, count: int, other: Keeping, others: int) -> tuple[Keeping, ...]:
    """Layers of one kind among those of another, evenly and from the first on."""
    size = count + others
    return tuple(one if at * count % size < count else other for at in range(size))


def as_option(keepings: tuple[Keeping, ...]) -> str:
    """The value of magi.keep for these layers."""
    return ", ".join(text if "among" in text else f"{size} {text}" for _, size, text in _parts(keepings))


def in_words(keepings: tuple[Keeping, ...]) -> str:
    """For a log: "layers 0-19 keep attention, 20-31 keep inputs offloaded"."""
    texts = []
    for first, size, text in _parts(keepings):
        layers = f"{first}-{first + size - 1}" if size > 1 else str(first)
        texts.append(f"{layers} keep {text}")
    return "layers " + ", ".join(texts)


def _parts(keepings: tuple[Keeping, ...]) -> Iterator[tuple[int, int, str]]:
    """The first layer, how many, and what they keep, of layers next to each other that keep the same or of which two
    or more are spread among others."""
    first = 0
    while first < len(keepings):
        rest, one = keepings[first:], keepings[first]
        size, text = len(list(itertools.takewhile(one.__eq__, rest))), str(one)
        for longer in range(len(rest), size + 1, -1):
            count = rest[:longer].count(one)
            other = rest[size]
            if min(count, longer - count) > 1 and rest[:longer] == spread(one, count, other, longer - count):
                size, text = longer, f"{count} {one} among {longer - count} {other}"
                break
        yield first, size, text
        first += size
