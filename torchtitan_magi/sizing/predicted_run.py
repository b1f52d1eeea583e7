"""What a run takes on a kind of GPU: memory, the time of a step and of the whole, and what would be faster."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array
from torchtitan_magi.models.shapes import heads_of_rank
from torchtitan_magi.planning.cost_model import CostModel, FloatArray, Heads
from torchtitan_magi.sizing.gpus import DETERMINISTIC, FLEX, HOST_MEMORY, Gpu
from torchtitan_magi.sizing.keeping.choose import MARGIN, MARGIN_OF_EXPERTS, Bound, choose
from torchtitan_magi.sizing.keeping.kinds import AUTO
from torchtitan_magi.sizing.memory import Prediction, host_memory, predict, states_on_host
from torchtitan_magi.sizing.run_setup import Setup
from torchtitan_magi.sizing.step_time import StepTime, time_of_step
from torchtitan_magi.sizing.strategies.outcomes import Case, plan_outcome
from torchtitan_magi.sizing.strategies.pack_masks import mask_of, tokens_and_parents

ROOM = 0.95  # of a GPU's memory that is taken without care: PyTorch's allocator loses some between blocks
WORTH = 0.01  # a change that saves less of a step is not named


@dataclass(frozen=True)
class Place:
    """Where a run trains, and on what.

    Attributes:
        packs: tokens of the documents in sampled packs, see ``pack_masks``. learned: share of these that have a label.
        cost: of attention and exchanges; None: that of the GPU.
        host: bytes of the host's memory that each GPU's process can fill.
    """

    gpu: Gpu
    gpus_per_node: int
    packs: tuple[Int64Array, ...]
    learned: float = 1.0
    cost: CostModel | None = None
    host: int = HOST_MEMORY

    def __hash__(self) -> int:
        return id(self.packs)

    def cp_in_node(self, cp_size: int, tp_size: int) -> int:
        """Context-parallel ranks of a pack in each node."""
        return max(1, min(self.gpus_per_node // tp_size, cp_size))

    @functools.lru_cache(maxsize=64)  # noqa: B019 - lives as long as a command
    def attention(self, total: int, cp_size: int, tp_size: int, heads: Heads) -> FloatArray:
        """Seconds of a layer's forward and backward on a full mask, as planned and on one GPU divided by the GPUs:
        [packs, 2, 2]."""
        node = self.cp_in_node(cp_size, tp_size)
        cases = [Case(pack, total, cp_size, node, heads, self.cost or self.gpu.cost) for pack in self.packs]
        return np.array([[plan_outcome(case, case.plan()).seconds, case.ideal_seconds] for case in cases])


@dataclass(frozen=True)
class PredictedRun:
    """A run on its GPUs.

    Attributes:
        given: what is predicted, with what layers keep left open or not. setup: with that chosen.
        tokens: of a step, without padding.
        efficiency: of attention: our kernel on the whole packs on one GPU, its time over the GPUs', over what is
            planned.
    """

    given: Setup
    setup: Setup
    place: Place
    memory: Prediction
    time: StepTime
    tokens: float
    efficiency: float

    @property
    def fits(self) -> bool:
        """Whether the memory is enough, with room for what an allocator loses, and the host's for what is offloaded."""
        return self.memory.total <= ROOM * self.place.gpu.capacity and host_memory(self.setup) <= self.place.host

    @property
    def tokens_per_second(self) -> float:
        """Tokens that one GPU takes in a second."""
        return self.tokens / self.time.total / self.setup.world_size

    @property
    def mfu(self) -> float:
        """Operations that the step needs over what the GPU's data sheet promises, 0 to 1."""
        return self.time.flops / self.time.total / self.place.gpu.peak


def predict_run(setup: Setup, place: Place) -> PredictedRun:
    """Predicts a run. In each microbatch data-parallel ranks wait for the slowest of their packs. What layers keep is
    chosen, where the setup leaves that open.

    Raises:
        ValueError: a tensor-parallel degree that does not divide the heads.
    """
    given = replace(setup, learned=place.learned, cp_per_machine=place.cp_in_node(setup.cp, setup.tp))
    setup = with_keeping(given, place)
    work = _attention_work(setup, place)
    mean_tokens = float(np.mean([tokens_and_parents(pack)[0].sum() for pack in place.packs]))
    tokens = mean_tokens * setup.packs_per_step
    return PredictedRun(given, setup, place, predict(setup), _time(setup, place, work), tokens, work.efficiency)


def with_keeping(setup: Setup, place: Place) -> Setup:
    """The setup with what layers keep, chosen where it leaves that open: the fastest over steps of one of the packs of
    ``place`` each, as copies to the host hide behind a step's own attention. Memory is for one document that fills its
    pack."""
    if setup.checkpointing != AUTO or setup.keeping:
        return setup
    works = [_attention_work(setup, place, slice(number, number + 1)) for number in range(len(place.packs))]
    whole, margin = replace(setup, learned=1.0), MARGIN if setup.ep == 1 else MARGIN_OF_EXPERTS

    def seconds(mixed: Setup) -> float:
        return float(np.mean([_time(mixed, place, work).total for work in works]))

    gpu = Bound(lambda mixed: predict(mixed).total, margin * place.gpu.capacity)
    host = Bound(host_memory, max(0, place.host - states_on_host(setup)))
    return replace(setup, keeping=choose(whole, gpu, host, seconds).keeping)


@dataclass(frozen=True)
class _Work:
    """Attention of a microbatch in all layers.

    Attributes:
        forward, backward: seconds, of the slowest of the data-parallel ranks.
        pairs: (query, key) pairs of a context-parallel rank, the mean over layers.
        efficiency: as in ``PredictedRun``.
    """

    forward: float
    backward: float
    pairs: float
    efficiency: float


def _time(setup: Setup, place: Place, work: _Work) -> StepTime:
    return time_of_step(setup, place.gpu, place.gpus_per_node, (work.forward, work.backward), work.pairs)


def _attention_work(setup: Setup, place: Place, chosen: slice = slice(None)) -> _Work:
    """chosen: which packs of ``place``."""
    heads, packs = heads_of_rank(setup.model, setup.tp), place.packs[chosen]
    seconds = place.attention(setup.seq_len, setup.cp, setup.tp, heads)[chosen]
    slower = 1.0, DETERMINISTIC if setup.deterministic else 1.0
    if setup.flex or place.gpu.attention != 1:  # whose attention is by flex_attention already
        slower = (FLEX if place.gpu.attention == 1 else 1.0,) * 2
    windows, areas = setup.model.windows or (0,) * setup.model.num_attention_layers, np.zeros(len(packs))
    attends, ideal = np.zeros((len(packs), 2)), 0.0
    for window in set(windows):
        count = windows.count(window)
        area, share = (np.array(found) for found in zip(*(_area(pack, window) for pack in packs), strict=True))
        attends += count * share[:, None] * seconds[:, 0]
        ideal += float((count * share[:, None] * seconds[:, 1]).sum())
        areas += area * count / len(windows)
    ranks = setup.dp_shard * setup.dp_replicate
    forward, backward = (slower[way] * setup.packs * expected_largest(attends[:, way], ranks) for way in (0, 1))
    return _Work(forward, backward, setup.packs * float(areas.mean()) / setup.cp, ideal / float(attends.sum()))


def _area(pack: Int64Array, window: int) -> tuple[float, float]:
    """(query, key) pairs of a pack where rows see at most ``window`` tokens, 0: all; and their share of all pairs."""
    whole = mask_of(pack).area
    seen = mask_of(pack, window).area if window else whole
    return seen, seen / whole


def expected_largest(values: FloatArray, count: int) -> float:
    """The mean of the largest of ``count`` draws from values."""
    steps = np.arange(len(values) + 1) / len(values)
    return float((np.sort(values) * np.diff(steps**count)).sum())


# ------------------------------------------------------------------------------------------------- what would be faster


def faster(run: PredictedRun, most: int = 3) -> list[tuple[str, PredictedRun]]:
    """Other degrees and checkpointing on the same GPUs, with as many packs a step, that fit and take less time, or that
    fit where the run does not: the options to set, and the run with them. The fastest first."""
    found = [(_changed(run.given, setup), predict_run(setup, run.place)) for setup in _others(run.given, run.place)]
    worth = (1 - WORTH) * run.time.total if run.fits else math.inf
    fitting = [(words, other) for words, other in found if other.fits and other.time.total < worth]
    return sorted(fitting, key=lambda each: each[1].time.total)[:most]


def _others(setup: Setup, place: Place) -> Iterator[Setup]:
    share = setup.cp * setup.tp * setup.dp_shard
    packs = setup.microbatches * setup.packs * setup.dp_shard
    heads, experts = math.gcd(setup.model.num_heads_q, setup.model.num_heads_kv), setup.model.experts
    modes = {setup.checkpointing, AUTO}
    for cp, tp, mode in itertools.product(_powers(share), _powers(place.gpus_per_node), sorted(modes)):
        shard, rest = divmod(share, cp * tp)
        batches, uneven = divmod(packs, max(1, shard * setup.packs))
        if rest or uneven or heads % tp or setup.model.vocab_size % tp or setup.seq_len % (2 * cp * tp):
            continue
        if experts and tp != setup.tp:  # how experts are split changes with it
            continue
        other = replace(setup, cp=cp, tp=tp, dp_shard=shard, microbatches=batches, checkpointing=mode)
        if mode == AUTO != setup.checkpointing:
            other = replace(other, every=0)
        if other != setup:
            yield other


def _powers(most: int) -> list[int]:
    return [1 << bit for bit in range(most.bit_length())]


def _changed(before: Setup, after: Setup) -> str:
    """The options that make one setup the other."""
    degrees = {"context_parallel": "cp", "tensor_parallel": "tp", "data_parallel_shard": "dp_shard"}
    values = [(kind, getattr(before, name), getattr(after, name)) for kind, name in degrees.items()]
    options = [f"{kind}_degree = {now}" for kind, then, now in values if now != then]
    if after.checkpointing != before.checkpointing:
        options.append(f'activation_checkpoint.mode = "{after.checkpointing}"')
    return ", ".join(options)
