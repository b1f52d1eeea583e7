"""Weights leave as Hugging Face safetensors and come back, under any layout."""

import json
from pathlib import Path

import pytest
from training import new_folder, train

from loss_compare import LAYOUTS, TOLERANCE, max_relative_difference  # isort: skip


def run(name, *options, model=""):
    layout = LAYOUTS[name]
    arguments = [*layout.arguments, *model.split(), "--checkpoint.enable", "--training.steps", "2", *options]
    return train(layout.processes, arguments)


@pytest.mark.parametrize(
    ("model", "layout"),
    [("", "cp2"), ("--model.name qwen3 --model.flavor debugmodel_varlen", "cp2_tp2")],  # tied weights need TP
    ids=["llama3", "qwen3"],
)
def test_safetensors_are_the_weights_of_the_checkpoint(model, layout):
    folders = {"dcp": new_folder(), "hf": new_folder()}
    first = {
        kind: run(
            "cp2_tp2", "--job.dump_folder", folder, *(["--checkpoint.last_save_in_hf"] * (kind == "hf")), model=model
        )
        for kind, folder in folders.items()
    }
    assert first["dcp"].losses == first["hf"].losses
    saved = {kind: Path(folder, "checkpoint", "step-2") for kind, folder in folders.items()}
    index = json.loads((saved["hf"] / "model.safetensors.index.json").read_text())
    assert "model.layers.0.self_attn.q_proj.weight" in index["weight_map"]
    losses = {}
    for kind, path in saved.items():
        options = ["--checkpoint.initial_load_in_hf"] * (kind == "hf")
        folder = ["--job.dump_folder", new_folder()]
        losses[kind] = run(layout, "--checkpoint.initial_load_path", f"{path}", *options, *folder, model=model).losses
    assert losses["hf"][0] < first["hf"].losses[0]
    assert max_relative_difference(losses["hf"], losses["dcp"]) <= TOLERANCE
