"""Runs whose layers keep different things for their backward: losses and gradient norms are those of keeping all."""

import functools
import importlib
import itertools

import pytest
from support.hf_loop import pairs_file
from support.hf_models import hf_arguments, make_hf_folder
from support.runs import IS_0_3, new_folder, train

MIX = "1 inputs offloaded, 1 products, 1 attention offloaded, 1 all"
MIXES = {
    "mixed": MIX,
    "all": "all",
    "all, offloaded": "all offloaded",
    "products, offloaded": "products offloaded",
    "attention": "attention",
    "attention, offloaded": "attention offloaded",
    "inputs": "inputs",
}
CP = "--parallelism.context_parallel_degree 2"
TP = "--parallelism.tensor_parallel_degree 2"
DPO = "--training.dataset dpo --training.dataset_path PAIRS"
CHECKPOINTS = "--checkpoint.enable --checkpoint.interval 2 --checkpoint.async_mode disabled"
LAYOUTS = {  # processes, options
    "compiled": (1, "--compile.enable"),
    "CP 2": (2, CP),
    "TP 2": (2, TP),
    "FSDP 2": (2, "--parallelism.data_parallel_shard_degree 2 --training.local_batch_size 1"),
    "TP 2, CP 2": (4, f"{TP} {CP}"),
    "HSDP 2 x 2": (
        4,
        "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2 "
        "--training.local_batch_size 1",
    ),
    "accumulated": (1, "--training.global_batch_size 4 --training.local_batch_size 2"),
    "PP 2": (2, "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 4"),
    "LoRA": (1, "--magi.lora.rank 4"),
    "experts, EP 2": (2, f"EXPERTS {CP} --parallelism.expert_parallel_degree 2"),
    "experts, TP 2, EP 2": (2, f"EXPERTS {TP} --parallelism.expert_parallel_degree 2"),
    "DPO": (1, DPO),
    "LoRA, DPO": (1, f"--magi.lora.rank 4 {DPO}"),
}


def offload_everything(report):
    """Offloads small tensors too, and reports what the host's memory holds when the run ends."""
    from torchtitan_magi.training.activations import host_memory, offload

    close = host_memory.HostMemory.close

    def closed(memory):
        report("host memory", memory.num_bytes, len(memory._free) == len(memory._all))
        close(memory)

    offload.SMALL, host_memory.HostMemory.close = 16, closed


def report_kept(report):
    """Reports how many bytes each layer saves for its backward, as often as it runs."""
    from torch.autograd.graph import saved_tensors_hooks

    def counted(number, call, *arguments, **options):
        sizes = {}

        def pack(x):
            if x.numel():  # weights that are gathered have no memory of their own yet
                sizes[x.data_ptr()] = x.numel() * x.element_size()
            return x

        with saved_tensors_hooks(pack, lambda x: x):
            out = call(*arguments, **options)
        report("kept", number, sum(sizes.values()))
        return out

    def count_layers(model, keepings, device):
        for name, layer in model.layers.named_children():
            call = layer._compiled_call_impl or layer._call_impl
            layer.__dict__["_compiled_call_impl"] = functools.partial(counted, int(name), call)

    adapter = importlib.import_module(f"torchtitan_magi.titan.{'v03.models' if IS_0_3 else 'v02.spec'}")
    adapter.offload_layers = count_layers


def report_given_back(report):
    """Reports when the allocator gives back what it has free, and when an optimizer makes the state of a weight."""
    import torch

    step = torch.optim.AdamW.step

    def reported(optimizer, *arguments, **options):
        report("update", len(optimizer.state))
        return step(optimizer, *arguments, **options)

    torch.optim.AdamW.step = reported
    torch.cuda.empty_cache = lambda: report("given back")


@functools.cache
def few_experts():
    folder = make_hf_folder("qwen3_moe", num_hidden_layers=4)
    return [*hf_arguments(folder, "qwen3_moe"), "--magi.random_weights"]


@functools.cache
def run(keep, processes=1, options=""):
    mode = "none" if keep is None else "auto"
    arguments = ["--activation_checkpoint.mode", mode]
    made = {"PAIRS": lambda: [str(pairs_file())], "EXPERTS": few_experts}
    for option in options.split():
        arguments += made[option]() if option in made else [option]
    arguments += [] if keep is None else ["--magi.keep", keep]
    return train(processes, arguments, layers=4, entry="torchtitan_magi.train", setup=offload_everything)


def steps_of(found):
    """Loss and gradient norm of each step, as the last rank has them, which has the last stage of a pipeline."""
    logged = [values for _, values in found.of("metrics", rank=len(found.events) - 1) if "grad_norm" in values]
    return [values[name] for name in ("loss_metrics/global_avg_loss", "grad_norm") for values in logged]


@pytest.mark.parametrize(
    "mix", [pytest.param(mix, marks=() if mix == "mixed" else pytest.mark.either) for mix in MIXES]
)
def test_what_layers_keep_changes_no_loss(mix):
    found, expected = run(MIXES[mix]), run(None)
    assert steps_of(found) == pytest.approx(steps_of(expected), rel=1e-6)
    at_end = found.of("host memory")
    assert bool(at_end) == ("offloaded" in MIXES[mix])
    assert all(num_bytes > 0 and is_free for num_bytes, is_free in at_end)


@pytest.mark.parametrize(
    ("layout", "mix"),
    [
        pytest.param(layout, MIX, marks=pytest.mark.long if processes == 4 or "TP 2, EP" in layout else ())
        for layout, (processes, _) in LAYOUTS.items()
    ]
    + [("FSDP 2", "all offloaded"), ("TP 2", "products offloaded")]
    + [
        pytest.param("experts, TP 2, EP 2", "all offloaded", marks=pytest.mark.either),
        pytest.param("TP 2", "all offloaded", marks=pytest.mark.long),
        pytest.param("experts, EP 2", "products offloaded", marks=pytest.mark.long),
    ],
)
def test_a_mix_changes_no_loss_in_any_layout(layout, mix):
    """Weights that FSDP2 frees and gathers again stay; what is still on its way between ranks is waited for."""
    if not IS_0_3 and layout in ("PP 2", "LoRA", "LoRA, DPO"):
        pytest.skip("torchtitan 0.2.2 has none")
    found, expected = run(mix, *LAYOUTS[layout]), run(None, *LAYOUTS[layout])
    assert steps_of(found) == pytest.approx(steps_of(expected), rel=1e-5 if layout == "compiled" else 0)
    assert found.of("host memory")


@pytest.mark.parametrize("kinds", itertools.permutations(("attention", "products"), 2), ids=", ".join)
def test_a_compiled_layer_keeps_what_it_is_to(kinds):
    """Whatever the layers before it keep: torch.compile takes functions of the same code for the same."""
    kinds = [*kinds, "inputs", "all"]
    keep = ["--magi.keep", ", ".join(f"1 {kind}" for kind in kinds), "--activation_checkpoint.mode", "auto"]
    found = train(1, [*keep, "--compile.enable"], layers=4, entry="torchtitan_magi.train", setup=report_kept)
    kept = {kinds[number]: num_bytes for number, num_bytes in found.of("kept")}
    assert kept["inputs"] < kept["attention"] < 0.8 * kept["products"] < 0.8 * kept["all"]


def test_free_memory_is_given_back_once_before_states_are_made():
    found = train(1, ["--training.steps", "3"], layers=4, entry="torchtitan_magi.train", setup=report_given_back)
    done = [event for event in found.events[0] if event[0] in ("update", "given back")]
    assert [name for name, *_ in done] == ["given back", "update", "update", "update"]
    assert [count > 0 for _, count in done[1:]] == [False, True, True]


def test_a_killed_run_goes_on_with_another_mix():
    options = f"{CHECKPOINTS} --training.steps 6 --activation_checkpoint.mode auto"

    def part(keep, folder, until=None):
        arguments = ["--magi.keep", keep, *options.split(), "--job.dump_folder", folder]
        return train(1, arguments, layers=4, entry="torchtitan_magi.train", setup=offload_everything, until=until)

    whole, folder = part("all", new_folder()), new_folder()
    part(MIX, folder, lambda run: len(run.of("metrics")) == 5)
    rest = part("attention offloaded", folder)
    count = len(rest.losses)
    assert 0 < count < 6
    assert steps_of(rest) == pytest.approx(whole.losses[-count:] + whole.grad_norms[-count:], rel=1e-6)
