#!/usr/bin/env python3
"""Times training steps of every family of models, few layers of each, and their memory: what `size` is compared with.

    python benchmarks/bench_models.py [--cases "gpt_oss 20B" "llama3 8B, LoRA"] [--output FILE.json]

Each case is a run of its own on one GPU by the package's command, with the layer shapes of a published model and random
weights. Documents are those of bench_train.py. A row has the median over steps of the seconds per step, the first ones
not counted, and the most memory: allocated by PyTorch and outside its allocator, of the GPU that has the most.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench_train import CHARACTERS, RECORD, copy_tokenizer, documents, ended_well, torchrun
from figures import part, recording_parser, save, table, thousands
from steps import Steps, host_gib

from torchtitan_magi.calibrate import facts_of_run
from torchtitan_magi.models.published import SIZES
from torchtitan_magi.sizing.gpus import GPUS
from torchtitan_magi.sizing.keeping.kinds import Keeping, as_option
from torchtitan_magi.sizing.memory import GIB
from torchtitan_magi.sizing.predicted_run import Place, PredictedRun, predict_run
from torchtitan_magi.sizing.run_file import RunFile, setup_of_file
from torchtitan_magi.sizing.sample_packs import pairs_of, sample

WARM_UP = 8  # steps before timing, at most half of them
LONG = 100  # steps from which on a run is recorded by its fifths
TIMEOUT = 150  # seconds per run
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "rms_norm_eps": 1e-5,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128, "attention_bias": True,
    "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {  # layers of DeepSeek V2 Lite's sizes, scored as V3 scores
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 2048, "hidden_act": "silu",
    "intermediate_size": 10944, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 102400,
    "first_k_dense_replace": 1, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
    "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "rope_scaling": None, "max_position_embeddings": 163840, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
MUSE_TEXT = {
    "model_type": "muse_glimmer_text", "hidden_size": 6656, "intermediate_size": 19968, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 202048, "hidden_activation": "silu",
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "layer_rope_theta": [500000.0] * 3 + [0],
    "sliding_window": 2048, "final_logit_softcapping": 20.0, "output_multiplier": 0.19611613513818404,
    "qk_scale_factor": 3.87, "post_norm_eps": 1e-8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "attention_bias": False,
    "attention_dropout": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
MUSE = {
    "architectures": ["MuseGlimmerForConditionalGeneration"],
    "model_type": "muse_glimmer",
    "text_config": MUSE_TEXT,
}
QWEN3_5_TEXT = {
    "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "full_attention_interval": 4, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "attn_output_gate": True, "attention_bias": False, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "max_position_embeddings": 262144,
}  # fmt: skip
QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": QWEN3_5_TEXT,
}


TOML = """
[job]
custom_config_module = "torchtitan_magi.titan"
dump_folder = "{folder}/outputs"
[experimental]
custom_import = "torchtitan_magi.titan"
[magi]
random_weights = true
[magi.lora]
rank = {rank}
[model]
name = "{model}"
flavor = "hf"
hf_assets_path = "{folder}"
[training]
dataset = "{dataset}"
dataset_path = "{folder}/documents.jsonl"
local_batch_size = 1
global_batch_size = {packs}
seq_len = {tokens}
dtype = "{dtype}"
[parallelism]
context_parallel_degree = {cp}
expert_parallel_degree = {ep}
[activation_checkpoint]
mode = "{mode}"
[compile]
enable = true
[debug]
seed = 0
[metrics]
log_freq = 1
"""


@dataclass(frozen=True)
class Case:
    """A run: torchtitan's name of the model, its config.json without the number of layers, and what else differs."""

    model: str
    config: dict[str, Any]
    layers: int
    tokens: int
    mode: str = "none"
    dataset: str = "sft"
    rank: int = 0
    packs: int = 1
    one_document: bool = False  # that fills each pack
    dtype: str = "float32"  # of weights and the optimizer's states
    gpus: int = 1
    cp: int = 1
    ep: int = 1
    memory_of: str = ""  # kind of GPU whose memory PyTorch may take; empty: of this one

    def write(self, folder: Path) -> RunFile:
        """Writes the run's file and the model's config.json."""
        config, is_part = self.config, "text_config" in self.config
        layers: dict[str, Any] = {"num_hidden_layers": self.layers}
        if types := (config["text_config"] if is_part else config).get("layer_types"):
            layers["layer_types"] = (types * self.layers)[: self.layers]
        config = config | ({"text_config": config["text_config"] | layers} if is_part else layers)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "bench.toml").write_text(TOML.format(folder=folder, **vars(self)))
        return RunFile(str(folder / "bench.toml"))

    def allocator(self) -> list[str]:
        """Assignments of environment variables of the run."""
        if not self.memory_of:
            return []
        share = GPUS[self.memory_of].capacity / torch.cuda.get_device_properties(0).total_memory
        return [f"PYTORCH_ALLOC_CONF=expandable_segments:True,per_process_memory_fraction:{share:.4f}"]


def _hf(name: str) -> dict[str, Any]:
    return replace(SIZES[name], max_positions=131072).to_hf() | {"hidden_act": "silu"}


LLAMA, QWEN, QWEN_MOE = map(_hf, ("Llama-3.1-8B", "Qwen3-8B", "Qwen3-30B-A3B"))
CASES = {
    "llama3 8B": Case("llama3", LLAMA, 4, 32768),
    "llama3 8B, 4 packs a step": Case("llama3", LLAMA, 4, 16384, packs=4),
    "llama3 8B, LoRA": Case("llama3", LLAMA, 8, 32768, rank=16),
    "llama3 8B, LoRA, long": Case("llama3", LLAMA, 8, 65536, "full", rank=16),
    "llama3 8B, DPO": Case("llama3", LLAMA, 4, 32768, dataset="dpo"),
    "qwen3 8B": Case("qwen3", QWEN, 4, 32768, "selective"),
    "qwen3 30B-A3B": Case("qwen3", QWEN_MOE, 4, 32768, "full"),
    "qwen3_5 9B": Case("qwen3_5", QWEN3_5, 8, 32768, "selective"),
    "gpt_oss 20B": Case("gpt_oss", GPT_OSS, 4, 32768),
    "gpt_oss 20B, long": Case("gpt_oss", GPT_OSS, 4, 65536, "full"),
    "deepseek_v3 16B": Case("deepseek_v3", DEEPSEEK, 4, 32768),
    "muse_glimmer 30B": Case("muse_glimmer", MUSE, 4, 16384),
}


def records(case: Case) -> list[dict[str, str]]:
    """The documents, or pairs of which half a document is the prompt and a quarter each answer."""
    texts = [row["text"] for row in documents(case.tokens)]
    if case.one_document:
        return [{"text": "".join(texts)[: case.tokens * (CHARACTERS + 1)]}] * 8  # longer, and cut to the pack
    if case.dataset == "sft":
        return [{"text": text} for text in texts]
    cuts = [(len(text) // 2, 3 * len(text) // 4) for text in texts if len(text) > 40]
    return [
        {"prompt": text[:half], "chosen": text[half:end], "rejected": text[end:]}
        for text, (half, end) in zip((text for text in texts if len(text) > 40), cuts, strict=True)
    ]


def run(case: Case, steps: int, options: Sequence[str] = (), timeout: float = TIMEOUT) -> dict[str, Any]:
    """What the run's first process recorded; what was printed, if it failed.

    Args:
        options: further ones of the command line.
        timeout: seconds.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tokenizer(folder)
        case.write(folder)
        (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records(case)))
        command = ["env", *case.allocator(), *torchrun(case.gpus), __file__, RECORD]
        command += [name, "--job.config_file", f"{name}/bench.toml", "--training.steps", str(steps), *options]
        return recorded(command, folder, timeout)


def recorded(command: Sequence[str], folder: Path, timeout: float = TIMEOUT) -> dict[str, Any]:
    """What the processes of a run recorded in a folder, see ``record_run``; what was printed, if it failed.

    Returns:
        That of the first process, with the most memory that any of them had.
    """
    if not ended_well(command, log := folder / "log", timeout):
        return {"error": log.read_text()[-3000:]}
    ranks: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(folder.glob("record*.json"))]
    return ranks[0] | {key: max(rank[key] for rank in ranks) for key in ranks[0] if key.endswith("_gib")}


def record_run() -> None:
    """The process of a run: the command of the package, whose steps are timed."""
    folder = sys.argv[2]
    sys.argv[1:3] = []
    from torchtitan_magi.train import main
    from torchtitan_magi.training.metrics import PlanMetrics

    steps = Steps(PlanMetrics)
    main()
    times, seconds = steps.times, steps.seconds
    seconds = seconds[min(WARM_UP, len(seconds) // 2) :]
    kept = as_option(steps.seen.memory.setup.keepings)
    found: dict[str, Any] = {"step_ms": 1e3 * statistics.median(seconds), "kept": kept, "loss": steps.losses[-1]}
    found["losses"] = [round(loss, 5) for loss in steps.losses[:LONG]]
    found |= {"steps_ms": [round(1e3 * step, 1) for step in steps.seconds[:LONG]], "retries": steps.retries[:LONG]}
    found |= steps.peaks | {"host_after_gib": host_gib()}
    if len(times) >= LONG:
        fifths = [range(len(times))[i * len(times) // 5 : (i + 1) * len(times) // 5] for i in range(5)]
        found["fifths"] = {name: [max(of[i] for i in fifth) for fifth in fifths] for name, of in steps.memory.items()}
        found["fifths"]["step_ms"] = [1e3 * (times[fifth[-1]] - times[fifth[0]]) / (len(fifth) - 1) for fifth in fifths]
    Path(folder, f"record{os.environ['RANK']}.json").write_text(json.dumps(found))


def predicted(case: Case, device: str, keeping: tuple[Keeping, ...] = ()) -> PredictedRun:
    """The run as `size` predicts it, on packs of the histogram. device: its full name, such as "NVIDIA H200"."""
    (gpu,) = (gpu for name, gpu in GPUS.items() if name in device)
    if case.memory_of:
        gpu = replace(gpu, capacity=GPUS[case.memory_of].capacity)
    packs = sample("dense" if case.one_document else "histogram", case.tokens, 1 if case.one_document else 5)
    if case.dataset == "dpo":
        packs = pairs_of(packs)
    place = Place(gpu, 8, tuple(packs.packs), packs.learned)
    with tempfile.TemporaryDirectory() as folder:
        return predict_run(replace(setup_of_file(case.write(Path(folder)), case.gpus), keeping=keeping), place)


def memory_cells(row: dict[str, Any], run: PredictedRun) -> list[str]:
    """GiB that PyTorch allocated, as measured and as predicted, and the error."""
    gib = run.memory.allocated / GIB
    return [f"{row['peak_gib']:.1f}", f"{gib:.1f}", f"{gib / row['peak_gib'] - 1:+.0%}"]


def models_table(*files: dict[str, Any]) -> str:
    """Steps and memory of each case, measured and predicted."""
    lines = []
    for found in files:
        for row in found["rows"]:
            case = CASES[row["case"]]
            run = predicted(case, found["device"])
            step = 1e3 * run.time.total
            lines.append([
                row["case"], case.layers, thousands(case.tokens), case.mode,
                f"{row['step_ms']:,.0f}", f"{step:,.0f}", f"{step / row['step_ms'] - 1:+.0%}",
                *memory_cells(row, run),
            ])  # fmt: skip
    columns = ["model", "layers", "tokens", "checkpointing", "step, ms", "predicted", "error", "GiB", "predicted"]
    return table([*columns, "error"], lines)


PARTS: dict[str, Callable[[], str]] = {"models-predicted": part(models_table, "models_h200")}  # of the docs


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE", help="to run")
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    arguments = parser.parse_args()
    found: dict[str, Any] = facts_of_run(arguments.commit) | {"rows": []}
    for name in arguments.cases:
        row = {"case": name} | run(CASES[name], arguments.steps)
        if "error" in row:
            print(f"{name} FAILED\n{row['error']}", flush=True)
            continue
        print(f"{name}: {row['step_ms']:.1f} ms a step, {row['peak_gib']:.1f} GiB", flush=True)
        found["rows"].append(row)
        save(found, arguments.output)
    if any(name in found["device"] for name in GPUS):  # others have no prediction
        print(models_table(found))


if __name__ == "__main__":
    record_run() if sys.argv[1:2] == [RECORD] else main()
