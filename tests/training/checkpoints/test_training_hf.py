"""Weights leave as Hugging Face safetensors and come back, under any layout."""

import json
from pathlib import Path

from support.runs import new_folder, train

from loss_compare import LAYOUTS, TOLERANCE, max_relative_difference  # isort: skip


def run(name, *options):
    layout = LAYOUTS[name]
    arguments = [*layout.arguments, "--checkpoint.enable", "--training.steps", "2", *options]
    return train(layout.processes, arguments)


def test_safetensors_are_the_weights_of_the_checkpoint():
    first, again = [], []
    for in_hf in (False, True):
        save, load = (["--checkpoint.last_save_in_hf"], ["--checkpoint.initial_load_in_hf"]) if in_hf else ([], [])
        folder = new_folder()
        saved = Path(folder, "checkpoint", "step-2")
        first.append(run("cp2_tp2", "--job.dump_folder", folder, *save).losses)
        load += ["--checkpoint.load_only", "--checkpoint.initial_load_path", f"{saved}"]
        again.append(run("cp2", *load).losses)
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert "model.layers.0.self_attn.q_proj.weight" in index["weight_map"]
    assert first[0] == first[1]
    assert again[1][0] < first[1][0]
    assert max_relative_difference(again[1], again[0]) <= TOLERANCE
