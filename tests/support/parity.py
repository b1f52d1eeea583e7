"""Runs of the layouts of tests/long/layouts.py from one seed checkpoint."""

import functools

from support.runs import new_folder, train, watch

from layouts import LAYOUTS, QWEN3_LAYOUTS, Layout, max_relative_difference  # isort: skip

ALL_LAYOUTS = LAYOUTS | QWEN3_LAYOUTS


@functools.cache
def seed_checkpoint(model=""):
    """A checkpoint of random weights, from torchtitan's own option."""
    folder = new_folder()
    arguments = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint", "--job.dump_folder", folder]
    train(1, [*Layout({}, model=model).arguments, *arguments])
    return f"{folder}/checkpoint/step-0"


def initial_weights(model=""):
    return ["--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.initial_load_path", seed_checkpoint(model)]


def trained_anew(name, *options, **kwargs):
    """The run of a layout from the seed checkpoint; it saves nothing."""
    layout = ALL_LAYOUTS[name]
    return train(layout.processes, [*layout.arguments, *initial_weights(layout.model), *options], **kwargs)


@functools.cache
def trained(name):
    return trained_anew(name, setup=report_graphs_and_gradients)


def report_graphs_and_gradients(report):
    import torchtitan.train
    from torch._dynamo.utils import counters
    from torchtitan.distributed import utils

    def placements(_, parameters, *args, **kwargs):
        report("placements", [[getattr(x, "placements", ()) for x in (p, p.grad)] for p in parameters])

    watch(utils, "clip_grad_norm_", placements)
    watch(torchtitan.train.Trainer, "train_step", lambda *_: report("graphs", counters["stats"]["unique_graphs"]))


class Fed:
    """A loader of a generator's batches, which no checkpoint keeps."""

    def __init__(self, batches):
        self.batches, self.state_dict, self.load_state_dict = batches, dict, dict.fromkeys

    def __iter__(self):
        return self.batches


def feed(batches):
    """Trains on the generator batches(shape, dp_rank, dp_world_size) instead of a dataset."""
    from torchtitan_magi.training.run_parts import RunParts

    def open_data(self, section, place, sections):
        size, rank = place
        self.loader = Fed(batches((section.local_batch_size, section.seq_len), rank, size))

    RunParts.open_data = open_data


def difference(run, reference):
    losses = max_relative_difference(run.losses, reference.losses)
    return max(losses, max_relative_difference(run.grad_norms, reference.grad_norms))
