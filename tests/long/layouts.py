"""Layouts that must train alike: the same few steps from one seed checkpoint, see tests/training/test_parity.py."""

import math
from dataclasses import dataclass

TOLERANCE = 1e-4  # relative, of any step's loss and gradient norm

COMMON = (  # float32 is for flex_attention; our kernel takes 16 bits
    "--magi.backend flex --training.mixed_precision_param float32 "
    "--training.global_batch_size 2 --training.local_batch_size 2 "
    "--parallelism.data_parallel_replicate_degree 1 --parallelism.data_parallel_shard_degree 1 "
    "--parallelism.context_parallel_degree 1 --parallelism.tensor_parallel_degree 1 "
    "--activation_checkpoint.mode selective --metrics.log_freq 1 --validation.no-enable --compile.no-enable"
)
DEGREES = {"dp": "data_parallel_shard_degree", "cp": "context_parallel_degree", "tp": "tensor_parallel_degree"}


@dataclass(frozen=True)
class Layout:
    """One way to train the same two packs per step.

    Args:
        degrees: of "dp" (FSDP), "cp", "tp", as far as they are not 1.
        against: name of the layout it must equal; None for a reference.
        options: further torchtitan overrides.
        model: overrides that choose another model.
    """

    degrees: dict[str, int]
    against: str | None = "cp1"
    options: str = ""
    model: str = ""

    @property
    def processes(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def arguments(self) -> list[str]:
        """The overrides. Data-parallel ranks share the two packs."""
        degrees = [f"--parallelism.{DEGREES[name]} {degree}" for name, degree in self.degrees.items()]
        batch = f"--training.local_batch_size {2 // self.degrees.get('dp', 1)}"
        return " ".join([COMMON, *degrees, batch, self.options, self.model]).split()


QWEN3 = "--model.name qwen3 --model.flavor debugmodel_varlen"
PACK = "--magi.positions pack"
LAYOUTS = {
    "cp1": Layout({}, None),
    "dp2": Layout({"dp": 2}, None),
    "cp2": Layout({"cp": 2}),
    "cp4": Layout({"cp": 4}),
    "cp2_tp2": Layout({"cp": 2, "tp": 2}),
    "dp2_cp2": Layout({"dp": 2, "cp": 2}, "dp2"),
    "dp2_cp2_tp2": Layout({"dp": 2, "cp": 2, "tp": 2}, "dp2"),
    "cp2_accumulation": Layout({"cp": 2}, options="--training.local_batch_size 1"),
    "cp2_ac_none": Layout({"cp": 2}, options="--activation_checkpoint.mode none"),
    "cp2_ac_op": Layout({"cp": 2}, options="--activation_checkpoint.selective_ac_option op"),
    "cp2_ac_full": Layout({"cp": 2}, options="--activation_checkpoint.mode full"),
    "cp2_compile": Layout({"cp": 2}, options="--compile.enable"),
    "cp2_no_overlap": Layout({"cp": 2}, options="--magi.overlap_stages 0"),
    "cp4_overlap_2": Layout({"cp": 4}, options="--magi.overlap_stages 2"),
    "cp1_positions_pack": Layout({}, None, PACK),
    "cp2_positions_pack": Layout({"cp": 2}, "cp1_positions_pack", PACK),
}
QWEN3_LAYOUTS = {
    "qwen3_cp1": Layout({}, None, model=QWEN3),
    "qwen3_tp2": Layout({"tp": 2}, None, model=QWEN3),
    "qwen3_cp2_tp2": Layout({"cp": 2, "tp": 2}, "qwen3_cp1", model=QWEN3),
}


def max_relative_difference(values: list[float], reference: list[float]) -> float:
    """Over the steps. inf if a number is not finite or the steps are not as many."""
    if len(values) != len(reference) or not all(map(math.isfinite, [*values, *reference])) or not values:
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))
