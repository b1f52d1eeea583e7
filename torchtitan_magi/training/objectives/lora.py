"""Low-rank adapters: the policy without them as the reference of DPO, and their files as PEFT reads them."""

import contextlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn

from torchtitan_magi.files import write_whole
from torchtitan_magi.models.names import ADAPTER, ADAPTERS, plain_name
from torchtitan_magi.training.experts import expert_counts_kept, local, whole
from torchtitan_magi.training.objectives.dpo import PairBatch, logprobs_by
from torchtitan_magi.training.objectives.fingerprint import KnownWeights, fingerprint_of_model
from torchtitan_magi.training.objectives.logprob_model import LogprobModel
from torchtitan_magi.training.objectives.pipeline import Pipeline
from torchtitan_magi.training.process.all_ranks import gathered, on_first_rank, rank_and_size
from torchtitan_magi.training.process.groups import Group, reduced
from torchtitan_magi.training.settings.options import LoRA
from torchtitan_magi.wording import quoted_path

logger = logging.getLogger(__name__)

IN_MEMORY = "language_model.model.", "model.language_model."  # Kimi's names in files, and as transformers computes
SEEN = "adapters_seen"  # attribute of experts with adapters, see `adapters_seen`
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def adapted_layers(parts: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The layers with an adapter, by torchtitan's names."""
    for part in parts:
        for name, module in part.named_modules():
            if hasattr(module, "lora_a"):
                yield plain_name(name), module


def check_trainable(parts: Sequence[nn.Module], rank: int) -> None:
    """Checks that adapters alone are trained, which alone are exported. A collective of all ranks.

    Args:
        rank: of the adapters.

    Raises:
        ValueError: on all ranks, one line: an override has put a layer of its own in place of a frozen one.
    """
    trained = (name for part in parts for name, weight in part.named_parameters() if weight.requires_grad)
    names = [plain_name(name) for name in trained if not ADAPTERS.search(name)]
    if found := next(filter(None, gathered(names)), None):
        raise ValueError(
            f"magi.lora.rank is {rank}, but {found[0]} would be trained, too, which the export of adapters leaves out; "
            "leave out the converter or override that makes this layer, or set it to 0"
        )


def log_trainable(parts: Sequence[nn.Module], pp_group: Group, device: torch.device) -> None:
    """Logs how many parameters are trained. A collective of the pipeline's ranks; this one has the parts."""
    sizes = [(parameter.numel(), parameter.requires_grad) for part in parts for parameter in part.parameters()]
    own = [sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)]
    in_all, trained = reduced(torch.tensor(own, device=device), pp_group).tolist()
    logger.info(f"LoRA trains {trained:,} parameters, {100 * trained / in_all:.2g}% of the model's {in_all:,}")


@contextlib.contextmanager
def adapters_off(parts: Sequence[nn.Module]) -> Iterator[None]:
    """The model as it was before training."""
    layers = [(layer, layer._lora_scaling) for _, layer in adapted_layers(parts)]
    try:
        for layer, _ in layers:
            layer._lora_scaling = 0.0
        yield
    finally:
        for layer, scaling in layers:
            layer._lora_scaling = scaling


@contextlib.contextmanager
def adapters_seen(experts: nn.Module) -> Iterator[None]:
    """While experts compute: their weights are then the sums with their adapters."""
    setattr(experts, SEEN, True)
    try:
        yield
    finally:
        setattr(experts, SEEN, False)


class PolicyWithoutAdapters(KnownWeights):
    """The reference of DPO without a second copy of the weights. pp_group: the ranks of a pipeline."""

    def __init__(self, model: LogprobModel | Pipeline, pp_group: dist.ProcessGroup | None) -> None:
        self.model, self.pp_group = model, pp_group

    def prepare(self, step: int) -> None:
        """Raises ValueError in a resumed run whose frozen weights are others than those it began with."""
        found = fingerprint_of_model(self.model.parts, group=self.pp_group)
        self.check_weights("the frozen model", found, step, "load the whole checkpoint, or start another run")

    def logprobs(self, batches: list[PairBatch]) -> list[Tensor]:
        with adapters_off(self.model.parts), expert_counts_kept(self.model.parts):
            return logprobs_by(self.model, batches)


def check_untrained(path: str, parts: Sequence[nn.Module]) -> None:
    """Raises ValueError, one line, where adapters that a new run begins with are trained already, so that the reference
    without them is not the model before step 1. A collective of all ranks.

    Args:
        path: of the checkpoint that they are from.
    """
    weights = [b for _, layer in adapted_layers(parts) for b in layer.lora_b.parameters()]
    if any(gathered(any(bool(x.any()) for x in local(*weights)))):
        raise ValueError(
            f"checkpoint.initial_load_path is {quoted_path(path)}, whose adapters are trained, but the reference would "
            "be the model without them; merge them into its weights by PEFT's merge_and_unload, and begin with those"
        )


def check_base(option: str, base: str, parts: Sequence[nn.Module], read: Callable[[], None], group: Group) -> None:
    """Reads the frozen weights, which a checkpoint gave, from the folder that the adapters' export will name. A
    collective of all ranks.

    Args:
        option: what names the folder.
        read: loads its weights into the parts of the model on this rank.
        group: the ranks that have the other parts.

    Raises:
        ValueError: it has other weights; one line.
    """
    if not on_first_rank(lambda: any(path.name != ADAPTER for path in Path(base).glob("*.safetensors"))):
        logger.warning(f"{option} is {quoted_path(base)}, without weights, but the export of the adapters will name it")
        return
    frozen = fingerprint_of_model(parts, group=group)
    read()
    if (found := fingerprint_of_model(parts, group=group)) != frozen:
        raise ValueError(
            f"{option} is {quoted_path(base)}, whose weights [{found}] are not those that the checkpoint has frozen "
            f"here, [{frozen}]; set it to the folder that the run began with, which the export of its adapters names"
        )


def save_adapters(
    folder: Path, parts: Sequence[nn.Module], adapter: Any, lora: LoRA, base: str, dtype: torch.dtype
) -> None:
    """Writes adapter_model.safetensors and adapter_config.json. A collective of all ranks.

    Args:
        adapter: torchtitan's StateDictAdapter of the model.
        base: the folder of the frozen weights.

    Raises:
        OSError: on all ranks: a file cannot be written.
    """
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, layer in adapted_layers(parts):
        a, b = (_whole_parameters(part, dtype) for part in (layer.lora_a, layer.lora_b))
        of_layer = _of_linear if "weight" in b else _of_experts
        for target, rows_a, rows_b in of_layer(name, a, b, adapter):
            found.setdefault(f"base_model.model.{target}", []).append((rows_a, rows_b))
    tensors: dict[str, Tensor] = {}
    for prefix, pairs in found.items():
        rows_a, rows_b = torch.cat([a for a, _ in pairs]), torch.block_diag(*(b for _, b in pairs))
        tensors |= {f"{prefix}.lora_A.weight": rows_a, f"{prefix}.lora_B.weight": rows_b.contiguous()}
    tensors = _gathered(tensors)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        layers = list(dict.fromkeys(name.removesuffix(".lora_A.weight") for name in tensors if "lora_A" in name))
        config: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
        config |= {"bias": "none", "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0}
        model = adapter.model_config
        may_have_experts = hasattr(model.first_attention, "kv_lora_rank")  # DeepSeek's, even if all layers are dense
        has_experts = may_have_experts or any(layer.moe is not None for layer in model.layers)
        config |= _targets([layer.split(".") for layer in layers], has_experts)
        config |= _patterns(layers, lora, adapter)
        config_file = folder / "adapter_config.json"
        config_file.unlink(missing_ok=True)  # an earlier run's may have another scale
        write_whole(folder / ADAPTER, save(tensors, {"format": "pt"}))  # save_file's files are for their owner alone
        write_whole(config_file, (json.dumps(config, indent=2) + "\n").encode())

    on_first_rank(write)


def _of_experts(
    name: str, a: dict[str, Tensor], b: dict[str, Tensor], adapter: Any
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """PEFT's names and matrices [experts * rank, in] and [out, rank * experts] of the adapters of a layer's experts.

    Args:
        a: [experts, rank, in] by input. b: [experts, out, rank] by weight, those of one input in transformers' order.
    """
    number = name.split(".")[1]
    theirs = next(theirs for theirs, ours in adapter.from_hf_map.items() if ours and ".inner_experts." in ours)
    path = theirs.partition(".mlp.experts")[0].format(number).replace(*IN_MEMORY)
    up = [x for own, x in b.items() if own in ("w1_EFD", "w3_EFD", "mlp1_weight_EGD")]
    (down,) = (x for own, x in b.items() if own in ("w2_EDF", "mlp2_weight_EDF"))
    for place, first, second in ((".base_layer", a["up"], torch.cat(up, 1)), ("", a["down"], down)):
        yield f"{path}.mlp.experts{place}", first.flatten(0, 1), second.permute(1, 2, 0).flatten(1)


def _targets(layers: list[list[str]], has_experts: bool) -> dict[str, list[str]]:
    """What adapter_config.json says of the layers with adapters.

    PEFT takes names as ``gate_proj`` for those of experts where a model may have some. Its ``target_parameters`` take
    them for what they are. Where a model sees pictures, other layers have the same names but in ``self_attn`` and
    ``mlp``.

    Args:
        layers: their names, at the dots.
    """
    found: dict[str, list[str]] = {"target_modules": [], "target_parameters": []}
    for *_, parent, name in layers:
        if "experts" in (parent, name):
            found["target_parameters"] += ["experts.gate_up_proj", "experts.down_proj"]
        elif has_experts and name in FEED_FORWARD:
            found["target_parameters"].append(f"{parent}.{name}.weight")
        else:
            found["target_modules"].append(f"{parent}.{name}" if "language_model" in layers[0] else name)
    return {kind: list(dict.fromkeys(names)) for kind, names in found.items() if names or kind == "target_modules"}


def _patterns(layers: list[str], lora: LoRA, adapter: Any) -> dict[str, dict[str, float]]:
    """What adapter_config.json says of layers that are several in torchtitan, each with an adapter of its own: their
    adapters make one of a larger rank.

    Args:
        layers: their names.
    """
    parts = Counter(getattr(adapter, "joined", {}).values())
    names = {theirs.rpartition("{}.")[2].removesuffix(".weight"): number for theirs, number in parts.items()}
    found = {name: number for name, number in names.items() if any(layer.endswith(name) for layer in layers)}
    ranks, alphas = ({name: number * x for name, number in found.items()} for x in (lora.rank, lora.alpha))
    return {"rank_pattern": ranks, "alpha_pattern": alphas} if found else {}


def _gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks, on rank 0: in a pipeline they have layers of their own. Each comes from one rank."""
    rank, size = rank_and_size()
    names = gathered(list(tensors))
    own = set(names[rank]).difference(*names[:rank])
    mine = {name: tensor for name, tensor in tensors.items() if name in own}
    found: list[Any] = [None] * size
    dist.gather_object(mine, found if rank == 0 else None)
    return {name: tensor for part in found if part for name, tensor in part.items()}


def _whole_parameters(part: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: whole(x).detach().cpu().to(dtype) for name, x in part.named_parameters()}


def _of_linear(
    name: str, a: dict[str, Tensor], b: dict[str, Tensor], adapter: Any
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """transformers' linear layers in one of torchtitan's, each with A and its rows of B as transformers has them."""
    attention = adapter.model_config.first_attention
    heads = {"wq": attention.n_heads, "wk": getattr(attention, "n_kv_heads", None) or attention.n_heads}
    names = {ours: theirs for theirs, ours in adapter.from_hf_map.items() if ours} | getattr(adapter, "joined", {})
    path, _, last = name.rpartition(".")
    for own, rows in (_split_qkv(b["weight"], *heads.values()) if last == "wqkv" else {last: b["weight"]}).items():
        if own in heads and hasattr(adapter, "_permute"):  # Llama's rows
            rows = adapter._permute(rows, heads[own], *rows.shape)
        number = path.split(".")[1]
        theirs = names[re.sub(r"[.][0-9]+[.]", ".{}.", f"{path}.{own}.weight", count=1)]
        yield theirs.format(number).removesuffix(".weight").replace(*IN_MEMORY), a["weight"], rows


def _split_qkv(b: Tensor, heads: int, heads_kv: int) -> dict[str, Tensor]:
    """The rows of queries, keys and values of the fused projection's B."""
    per_group = b.view(heads_kv, heads // heads_kv + 2, -1, b.shape[1])
    parts = per_group[:, :-2], per_group[:, -2:-1], per_group[:, -1:]
    return {name: part.flatten(0, 2) for name, part in zip(("wq", "wk", "wv"), parts, strict=True)}
