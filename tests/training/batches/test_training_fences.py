"""Ranks of a data-parallel rank that load other tokens end the run, before anything of it is saved."""

from pathlib import Path

import pytest
from support.errors import run_ends
from support.runs import IS_0_3, new_folder, train

OF_ONE_DATA_RANK = {
    "tensor": ["--parallelism.tensor_parallel_degree", "2"],
    "context": ["--parallelism.context_parallel_degree", "2"],
    "pipeline": ["--parallelism.pipeline_parallel_degree", "2"],
}


class OtherLabel:
    """Rank 1 has another label in the last microbatch of a step. Pickled into the ranks."""

    def __init__(self, step, per_step):
        self.number = step * per_step

    def __call__(self, report):
        import os

        from torchtitan_magi.training.batches.microbatch import Microbatch

        stock, count = Microbatch.digest, 0

        def digest(batch):
            nonlocal count
            count += 1
            if os.environ["RANK"] == "1" and count == self.number:
                batch.labels.view(-1)[0] = 7
            return stock(batch)

        Microbatch.digest = digest


@pytest.mark.parametrize("axis", ["tensor", "context", *["pipeline"] * IS_0_3])
@pytest.mark.parametrize("step", [1, 3])
def test_other_labels_end_the_run_and_are_not_saved(axis, step):
    """In the last step, too, after which no microbatch comes."""
    folder, accumulated = new_folder(), 4
    arguments = [*OF_ONE_DATA_RANK[axis], "--training.global_batch_size", str(accumulated), "--checkpoint.enable"]
    arguments += ["--checkpoint.interval", "1", "--job.dump_folder", folder, "--training.steps", "3"]
    arguments += ["--training.local_batch_size", "2" if axis == "pipeline" else "1"]
    with run_ends(rf"microbatch {4 * step}: ranks \[1\] have other documents", "RuntimeError"):
        train(2, arguments, entry="torchtitan_magi.train", setup=OtherLabel(step, accumulated))
    assert not Path(folder, "checkpoint", f"step-{step}").exists()
