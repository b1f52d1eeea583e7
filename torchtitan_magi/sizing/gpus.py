"""GPUs by name: how much memory they have, and how fast they are at what a step does."""

from dataclasses import dataclass, replace

from torchtitan_magi.planning.cost_model import H200 as H200_COST
from torchtitan_magi.planning.cost_model import CostModel, KernelCost
from torchtitan_magi.sizing.memory import GIB
from torchtitan_magi.wording import quoted


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU. Steps were measured on the H200; the speed of the others follows their data sheets.

    Attributes:
        capacity: bytes of memory that a process can have.
        peak: operations per second of matrix products in bfloat16 by the data sheet, by which MFU is counted.
        bandwidth: bytes per second of its memory by the data sheet.
        link: bytes per second that it sends to others of its node, and receives, by the data sheet.
        adapter: bytes per second of its share of the node's network adapters, as usual machines have them.
        attention: time of an attention call, by the backend that serves it, over that of our kernel on an H200.
    """

    name: str
    capacity: int
    peak: float
    bandwidth: float
    link: float
    adapter: float
    attention: float = 1.0

    @property
    def products(self) -> float:
        """Operations per second of the large matrix products of a step."""
        return self.peak * PRODUCTS / H200.peak

    @property
    def passes(self) -> float:
        """Bytes per second of element-wise passes."""
        return H200_COST.memory * self.bandwidth / H200.bandwidth

    @property
    def cost(self) -> CostModel:
        """What a layer's attention and its exchanges cost."""
        links = self.link / H200.link, self.adapter / H200.adapter
        inside, across = (
            replace(link, bandwidth=link.bandwidth * ratio)
            for link, ratio in zip((H200_COST.inside, H200_COST.across), links, strict=True)
        )
        forward, backward = (_slower(kernel, self.attention) for kernel in (H200_COST.forward, H200_COST.backward))
        return replace(H200_COST, forward=forward, backward=backward, memory=self.passes, inside=inside, across=across)


def _slower(kernel: KernelCost, factor: float) -> KernelCost:
    times = {name: factor * getattr(kernel, name) for name in ("pair", "pair_dim", "row", "row_dim")}
    return replace(kernel, **times)


# Fitted to keeping_*.json, eight_*.json and models_h200.json in benchmarks/results, whose steps are predicted to 15%
# with them but for small layers, those of dense models without adapters to 9%: operations per second of a step's matrix
# products on an H200; what attention takes in a step, where GPUs have to slow down, over what it takes in bursts;
# seconds that a layer takes in each microbatch beside its work, and that are between steps.
PRODUCTS, IN_STEPS, OF_LAYER, BETWEEN = 7.0e14, 1.08, 0.003, 0.03
# Which share of that speed the operations of the gated delta rule's forward have, and how often the time of its forward
# its backward takes: fitted to the packs of linear_h200.json, with errors of -21 to +14%.
RULE, RULE_BACKWARD = 0.314, 2.7
# Bytes per second between a GPU and pinned memory of the host, each way, and by which share of the copies' time what
# runs beside them takes longer: 0 to 9% in keeping_*.json, of one GPU and of two that copy at once.
# Host memory that a GPU's process can fill where it is not known: a quarter of a machine with 2 TB and eight GPUs.
HOST_LINK, BESIDE_COPIES = 5.0e10, 0.08
HOST_MEMORY = 64 * GIB
# Time of flex_attention over that of our kernel, of the same packs on one H200: train_rivals_h200.json; and of the
# deterministic backward over the other, of packs in kernel_h100.json.
FLEX, DETERMINISTIC = 1.45, 1.3

# Data sheets: nvidia.com/en-us/data-center/{h200,h100,a100,dgx-b200}. Dense operations, the SXM modules. Capacities:
# torch's total_memory, for the B200 192 GB less what the others have less.
H200 = Gpu("H200", int(139.8 * GIB), 9.895e14, 4.8e12, 4.5e11, 5e10)
H100 = Gpu("H100", int(79.1 * GIB), 9.895e14, 3.35e12, 4.5e11, 5e10)
A100 = Gpu("A100", int(79.2 * GIB), 3.12e14, 2.04e12, 3.0e11, 2.5e10, attention=FLEX * 9.895 / 3.12)
B200 = Gpu("B200", int(178 * GIB), 2.25e15, 8e12, 9.0e11, 5e10, attention=FLEX * 9.895 / 22.5)
GPUS = {gpu.name: gpu for gpu in (H100, H200, A100, B200)}


def gpu_named(name: str) -> Gpu:
    """Raises ValueError for a GPU that is not known; one line with those that are."""
    if name.upper() not in GPUS:
        raise ValueError(f"--gpu is {quoted(name)}; use one of {', '.join(GPUS)}")
    return GPUS[name.upper()]
