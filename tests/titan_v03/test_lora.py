"""Low-rank adapters: what is trained, the reference of DPO, and their files as peft reads them."""

import json
import math
from pathlib import Path

import pytest
import torch
from support.hf_loop import ARGUMENTS, PACKS, PAIRS_PER_PACK, document, pairs_file, records
from support.hf_models import TITAN_NAMES, hf_arguments, make_hf_folder
from support.runs import corpus, new_folder, train
from transformers import AutoModelForCausalLM, AutoTokenizer

STORED = ["--magi.dpo.reference", "file"]


def arguments(folder, kind, dump, *options):
    chosen = [*hf_arguments(folder, kind), "--training.dataset_path", f"{corpus()}/train.jsonl"]
    chosen += ["--job.dump_folder", dump, *ARGUMENTS]
    chosen += ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--checkpoint.last_save_in_hf"]
    return [*chosen, "--magi.lora.rank", "4", "--parallelism.context_parallel_degree", "2", *options]


@pytest.mark.parametrize("kind", TITAN_NAMES)
def test_peft_loads_the_adapters_and_computes_the_validation_loss(kind):
    peft = pytest.importorskip("peft", reason="peft reads the adapters")
    weights = {"initializer_range": 0.2} if kind == "qwen3_moe" else {}  # experts in bfloat16 would show in the loss
    folder, dump = make_hf_folder(kind, **weights), new_folder()
    path = Path(new_folder(), "one.jsonl")
    path.write_text("\n".join(Path(f"{corpus()}/validation.jsonl").read_text().splitlines()[:4]) + "\n")
    validation = ["--validation.enable", "--validation.dataset", "sft", "--validation.dataset_path", str(path)]
    validation += ["--validation.seq_len", "256", "--validation.freq", "5", "--validation.local_batch_size", "1"]
    run = train(2, arguments(folder, kind, dump, *validation), layers=None)

    first, last = run.validation_losses
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder)
    assert first > last
    adapters = f"{dump}/checkpoint/step-5"
    assert run.output.splitlines()[-1].endswith(f'(AutoModelForCausalLM.from_pretrained("{folder}"), "{adapters}")')
    assert "Turns end with <|im_end|>, which is no EOS of the model: give generation eos_token_id=4" in run.output
    adapted = peft.PeftModel.from_pretrained(base, adapters).eval()
    assert loss_of(adapted, tokenizer, path) == pytest.approx(last, rel=1e-5)
    with adapted.disable_adapter():
        assert abs(loss_of(adapted, tokenizer, path) - last) > 100e-5 * last
    named = json.loads(Path(dump, "checkpoint/step-5/adapter_config.json").read_text())["target_modules"]
    of_layers = ["gate_proj", "down_proj", "up_proj"] if kind != "qwen3_moe" else []  # experts get none
    assert named == ["q_proj", "k_proj", "v_proj", "o_proj", *of_layers]


@torch.no_grad()
def loss_of(model, tokenizer, path):
    total, count = 0.0, 0
    for record in records(path):
        tokens, mask = document(tokenizer, record)
        labels = torch.tensor(tokens).masked_fill(torch.tensor(mask) == 0, -100)[1:]
        logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0]
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != -100).sum())
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
    run = train(1, [*options, "--training.dataset_path", str(pairs_file())], setup=report_experts)
    assert run.of("tokens") == [([256 * 8] * 2,)] * 3  # each token takes 8 experts
    assert run.of("bias") == [([[0.0] * 64] * 2,)] * 3
