"""Low-rank adapters: what is trained, the reference of DPO, and their files as peft reads them."""

import functools
import json
import math
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.degrees import degree_arguments, num_processes
from support.hf_loop import ARGUMENTS, PACKS, PAIRS_PER_PACK, SEQ_LEN, document, pairs_file, records, summed_loss
from support.hf_models import KINDS, TEXT_PARTS, edit, hf_arguments, load_hf, make_hf_folder
from support.marks import marked_long
from support.runs import TrainingError, corpus, new_folder, train
from transformers import AutoTokenizer

from torchtitan_magi.models.model_config import read_model_config
from torchtitan_magi.models.shapes import weights_used

STORED = ["--magi.dpo.reference", "file"]


def arguments(folder, kind, dump, *options):
    chosen = [*hf_arguments(folder, kind), "--training.dataset_path", f"{corpus()}/train.jsonl"]
    chosen += ["--job.dump_folder", dump, *ARGUMENTS]
    chosen += ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--checkpoint.last_save_in_hf"]
    return [*chosen, "--magi.lora.rank", "4", "--parallelism.context_parallel_degree", "2", *options]


NO_DENSE_LAYERS = ("qwen3_moe", "gpt_oss")
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
GROUPED, FEED_FORWARD = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
BESIDE_EXPERTS = [f"{parent}.{name}.weight" for parent in ("mlp", "shared_experts") for name in FEED_FORWARD]
TARGETS = {  # target_modules and target_parameters, where they are others than those of a dense model
    **dict.fromkeys(NO_DENSE_LAYERS, (GROUPED, [])),
    "deepseek_v3": (LATENT, BESIDE_EXPERTS),
    "kimi_k25": ([f"self_attn.{name}" for name in LATENT], BESIDE_EXPERTS),
    "muse_glimmer": ([f"self_attn.{name}" for name in GROUPED] + [f"mlp.{name}" for name in FEED_FORWARD], []),
}
LINEAR = [f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")]
TARGETS["qwen3_5"] = (TARGETS["muse_glimmer"][0] + LINEAR, [])
SHARED = [f"shared_expert.{name}.weight" for name in FEED_FORWARD]
TARGETS["qwen3_5_moe"] = ([f"self_attn.{name}" for name in GROUPED] + LINEAR, SHARED)
CP, TP = {"cp": 2}, {"cp": 1, "tp": 2}


@functools.cache
def folder_of(kind):
    """Experts in bfloat16 would show in the loss."""
    if kind == "dense_deepseek":
        return make_hf_folder("deepseek_v3", first_k_dense_replace=2)
    return make_hf_folder(kind, **({"initializer_range": 0.2} if kind in (*NO_DENSE_LAYERS, "qwen3_5_moe") else {}))


@functools.cache
def four_records():
    path = Path(new_folder(), "one.jsonl")
    path.write_text("\n".join(Path(f"{corpus()}/validation.jsonl").read_text().splitlines()[:4]) + "\n")
    return path


def trained(kind, degrees, *options):
    """A run with adapters, and where they are."""
    dump, path = new_folder(), str(four_records())
    validation = ["--validation.enable", "--validation.dataset", "sft", "--validation.dataset_path", path]
    validation += ["--validation.seq_len", "256", "--validation.freq", "5", "--validation.local_batch_size", "1"]
    packs = ["--training.local_batch_size", str(PACKS // degrees.get("dp", 1))]
    chosen = [*validation, *packs, *degree_arguments(degrees), *options]
    run = train(num_processes(degrees), arguments(folder_of(kind), kind, dump, *chosen), layers=None)
    return run, f"{dump}/checkpoint/step-5"


def check_with_peft(kind, run, adapters):
    """Compares the validation loss; returns what adapter_config.json says."""
    peft = pytest.importorskip("peft", reason="peft reads the adapters")
    folder, path = folder_of(kind), four_records()
    first, last = run.validation_losses
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert first > last
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = peft.PeftModel.from_pretrained(load_hf(folder), adapters).eval()
    assert not [str(warning.message) for warning in caught if "adapter keys" in str(warning.message)]
    assert loss_of(adapted, tokenizer, path) == pytest.approx(last, rel=1e-5)
    with adapted.disable_adapter():
        assert abs(loss_of(adapted, tokenizer, path) - last) > 100e-5 * last
    return json.loads(Path(adapters, "adapter_config.json").read_text())


@pytest.mark.parametrize("kind", [*KINDS, *TEXT_PARTS])
def test_peft_loads_the_adapters_and_computes_the_validation_loss(kind):
    run, adapters = trained(kind, CP)
    automatic = "AutoModelForImageTextToText" if kind in TEXT_PARTS else "AutoModelForCausalLM"
    assert run.output.splitlines()[-1].endswith(f'({automatic}.from_pretrained("{folder_of(kind)}"), "{adapters}")')
    assert "Turns end with <|im_end|>, which is no EOS of the model: give generation eos_token_id=4" in run.output
    found = check_with_peft(kind, run, adapters)
    assert len({path.stat().st_mode for path in Path(adapters).iterdir()}) == 1  # all may be read alike
    tensors = load_file(f"{adapters}/adapter_model.safetensors")
    sizes = {  # of those that q, k, v share, once; of three in one, those of each
        tensor.view(torch.uint8).numpy().tobytes(): int(tensor.count_nonzero())
        if "in_proj_qkv" in name
        else tensor.numel()
        for name, tensor in tensors.items()
    }
    assert f"LoRA trains {sum(sizes.values()):,} parameters, " in run.output
    config, logged = read_model_config(folder_of(kind)), run.metrics[-1]
    frozen = 4 * weights_used(config)  # operations a token: weights without gradients
    others = 6 * sum(sizes.values()) + config.attention_flops * SEQ_LEN / 2 + config.linear_flops
    assert frozen < logged["tflops"] * 1e12 / logged["throughput(tps)"] < frozen + others
    modules, parameters = TARGETS.get(kind, ([*GROUPED, *FEED_FORWARD], []))
    assert sorted(found["target_modules"]) == sorted(modules)
    assert sorted(found.get("target_parameters", [])) == sorted(parameters)


def test_adapters_of_a_deepseek_without_experts_are_those_of_peft():
    """As one is that was cut to its first layers: PEFT takes its ``gate_proj`` for that of experts all the same."""
    check_with_peft("dense_deepseek", *trained("dense_deepseek", CP, "--model.name", "deepseek_v3"))


TP_KINDS = ["gpt_oss", "deepseek_v3", "muse_glimmer", "qwen3_5"]


@pytest.mark.parametrize("kind", marked_long(TP_KINDS, ["gpt_oss", "muse_glimmer"]))
def test_adapters_train_alike_under_tensor_parallelism(kind):
    """Also where layers see this rank's tensors alone, or have no rows and columns to be split."""
    alike = [trained(kind, degrees)[0] for degrees in (CP, TP)]
    assert alike[1].losses == pytest.approx(alike[0].losses, rel=1e-5)
    assert alike[1].validation_losses == pytest.approx(alike[0].validation_losses, rel=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3", "kimi_k25", "qwen3_5_moe"])
def test_adapters_of_experts_are_those_of_peft(kind):
    run, adapters = trained(kind, CP, "--magi.lora.target_modules", "experts")
    found = check_with_peft(kind, run, adapters)
    assert found["target_modules"] == []
    assert found["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj"]


EP = {"cp": 1, "dp": 2, "ep": 2}


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("qwen3_moe", EP),
        ("gpt_oss", TP),
        pytest.param("qwen3_moe", TP, marks=pytest.mark.long),
        pytest.param("gpt_oss", EP, marks=pytest.mark.long),
    ],
)
def test_adapters_of_experts_train_alike_under_every_layout(kind, degrees):
    alike = [trained(kind, chosen, "--magi.lora.target_modules", "experts", "wo")[0] for chosen in (CP, degrees)]
    assert alike[1].losses == pytest.approx(alike[0].losses, rel=1e-5)
    assert alike[1].validation_losses == pytest.approx(alike[0].validation_losses, rel=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_resumed_run_has_the_frozen_weights_and_adapters_of_experts(kind):
    """And does not add the adapters to the weights once more."""
    dump = new_folder()
    options = ["--magi.lora.target_modules", "experts", "--training.local_batch_size", str(PACKS)]
    options += ["--training.steps", "3", "--checkpoint.interval", "2"]
    whole, resumed = (train(2, arguments(folder_of(kind), kind, dump, *options), layers=None) for _ in range(2))
    assert resumed.losses == whole.losses[2:]


@torch.no_grad()
def loss_of(model, tokenizer, path):
    total, count = 0.0, 0
    for record in records(path):
        tokens, mask = document(tokenizer, record, SEQ_LEN)
        total += summed_loss(model, tokens, mask).item()
        count += sum(mask[1:])
    return total / count


def test_the_reference_of_dpo_is_the_policy_without_adapters():
    """Every step has the same pairs, so that their loss falls whatever the adapters begin with."""
    pairs = Path(new_folder(), "pairs.jsonl")
    pairs.write_text("".join(pairs_file().read_text().splitlines(keepends=True)[: PACKS * PAIRS_PER_PACK]))
    folder = make_hf_folder("llama")
    options = ["--training.dataset", "dpo", "--training.dataset_path", str(pairs)]
    alike = [arguments(folder, "llama", new_folder(), *options, *more) for more in ([], STORED)]
    model, stored = (train(2, chosen, layers=None) for chosen in alike)
    assert model.losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert model.losses[-1] < model.losses[0]
    assert model.losses == pytest.approx(stored.losses, rel=1e-6)  # computed before training, of the same weights
    edit(folder, rms_norm_eps=0.1)
    with pytest.raises(
        TrainingError, match=r"was made with the configuration \[.*\], this run has \[.*delete the file"
    ):
        train(2, arguments(folder, "llama", new_folder(), *options, *STORED), layers=None)


def test_adapters_that_were_trained_are_not_left_out_or_scaled_in_silence():
    folder, dump = make_hf_folder("llama"), new_folder()
    saved = [
        *arguments(folder, "llama", dump),
        "--checkpoint.no-last_save_model_only",
        "--checkpoint.no-last_save_in_hf",
    ]
    train(2, [*saved, "--training.steps", "2"], layers=None)
    for options, error in {
        "--magi.lora.target_modules wo": "has trained adapters of w1, w2, w3, wqkv, for which this run has none; set ",
        "--magi.lora.alpha 64": "magi.lora.alpha is 64, but the adapters of the run that resumes at step 2 have 16",
    }.items():
        with pytest.raises(TrainingError, match=re.escape(error)):
            train(2, [*saved, "--training.steps", "3", *options.split()], layers=None)
    base = [*saved, "--magi.lora.rank", "0", "--job.dump_folder", new_folder(), "--checkpoint.no-initial_load_in_hf"]
    with pytest.raises(
        TrainingError, match="has trained adapters of w1, w2, w3, wo, wqkv, for which this run has none"
    ):
        train(2, [*base, "--checkpoint.initial_load_path", f"{dump}/checkpoint/step-2"], layers=None)
    whole = ["--magi.lora.rank", "0", "--training.steps", "1"]
    train(2, [*saved, *whole, "--job.dump_folder", whole_dump := new_folder()], layers=None)
    base += ["--magi.lora.rank", "4", "--checkpoint.initial_load_path"]
    with pytest.raises(TrainingError, match="has no adapters of w1, w2, w3, wo, wqkv, which this run trains; set "):
        train(2, [*base, f"{whole_dump}/checkpoint/step-1"], layers=None)
    base = [*base[:-1], "--training.dataset", "dpo", "--training.dataset_path", str(pairs_file())]
    with pytest.raises(TrainingError, match="whose adapters are trained, but the reference would be the model without"):
        train(2, [*base, "--checkpoint.initial_load_path", f"{dump}/checkpoint/step-2"], layers=None)


def test_adapters_are_not_exported_for_weights_that_they_were_not_trained_on():
    """A checkpoint has the frozen weights; adapter_config.json names a folder, which may have others by then."""
    folder, other, copy = make_hf_folder("llama"), make_hf_folder("llama", seed=1), Path(new_folder(), "copy")
    shutil.copytree(folder, copy)
    steps = ["--training.steps", "3", "--checkpoint.interval", "2"]
    whole = train(2, arguments(folder, "llama", dump := new_folder(), *steps), layers=None)
    shutil.rmtree(f"{dump}/checkpoint/step-3")
    begun = ["--checkpoint.no-initial_load_in_hf", "--checkpoint.initial_load_path", f"{dump}/checkpoint/step-2"]
    for saved, *options in [(dump,), (new_folder(), *begun)]:
        chosen = arguments(other, "llama", saved, *steps, *options)
        with pytest.raises(
            TrainingError, match=r"hf_assets_path is .*, whose weights \[.*\] are not .* frozen here, \[.*\]; set it to"
        ):
            train(2, chosen, layers=None)
    resumed = train(2, arguments(copy, "llama", dump, *steps), layers=None)
    assert resumed.losses == whole.losses[2:]
    named = json.loads(Path(dump, "checkpoint", "step-3", "adapter_config.json").read_text())
    assert named["base_model_name_or_path"] == str(copy)


def report_experts(report):
    """Reports, before each logged step resets them, the tokens that experts got in each layer and their bias."""
    from torchtitan_magi.training import metrics

    take = metrics.take_expert_load

    def report_and_take(models, *groups):
        buffers = dict(models[0].named_buffers())
        report("tokens", [int(x.sum()) for name, x in buffers.items() if name.endswith("tokens_per_expert_E")])
        report("bias", [x.tolist() for name, x in buffers.items() if name.endswith("expert_bias_E")])
        return take(models, *groups)

    metrics.take_expert_load = report_and_take


def test_experts_of_the_frozen_model_keep_their_bias_and_count_the_policys_tokens_alone():
    """A preset flavor, whose bias torchtitan would move, and with it the reference."""
    options = ["--model.name", "qwen3", "--model.flavor", "debugmodel_moe", "--activation_checkpoint.mode", "none"]
    options += ["--training.dataset", "dpo", "--magi.lora.rank", "4", "--training.local_batch_size", "1"]
    options += ["--training.steps", "2"]
    run = train(1, [*options, "--training.dataset_path", str(pairs_file())], setup=report_experts)
    assert run.of("tokens") == [([256 * 8] * 2,)] * 2  # each token takes 8 experts
    assert run.of("bias") == [([[0.0] * 64] * 2,)] * 2
