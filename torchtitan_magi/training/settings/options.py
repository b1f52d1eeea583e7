"""The options of the ``[magi]`` section of a TOML file."""

from dataclasses import dataclass, field
from typing import Any, Literal

SFT_DATASET = "sft"
DPO_DATASET = "dpo"
ROLLOUTS_DATASET = "rollouts"
OUR_DATASETS = (SFT_DATASET, DPO_DATASET, ROLLOUTS_DATASET)
DEFAULT_STEPS = 10_000  # torchtitan's; with magi.epochs they count as not given


@dataclass(frozen=True)
class DPO:
    """Direct preference optimisation (arXiv 2305.18290), for dataset "dpo"."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss of a pair's margin: "sigmoid" (DPO), "ipo" (arXiv 2310.12036, by means over tokens) or "hinge" (arXiv
    2305.10425)."""

    beta: float = 0.1
    """How strongly the policy is held to the reference, above 0 (no unit). It is also the scale of the rewards."""

    label_smoothing: float = 0.0
    """Assumed fraction of pairs whose labels are swapped, 0 to 0.5 (exclusive). For loss "sigmoid" only."""

    reference: Literal["model", "file"] = "model"
    """Source of the reference log-probabilities: a frozen copy of the initial weights ("model") or a file ("file").
    "model": sharded by FSDP2 like the policy. "file": computed once before training and kept, so training holds no
    second model in memory; a file of another model or other data is refused."""

    reference_path: str = ""
    """Path of the file for reference "file"; "": ``<file of pairs>.reference.npz`` beside the data. Validation has one
    beside it, with ".validation" in its name. Several models on the same pairs need a path each."""

    shared_prompt: bool = True
    """Compute each prompt once, with all its answers attending to it. false: each answer is a document with the
    prompt."""


@dataclass(frozen=True)
class Rollouts:
    """Clipped policy gradient on sampled answers (arXiv 1707.06347, 2402.03300), for dataset "rollouts"."""

    normalization: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """What the loss is a mean over: all tokens of a step ("dapo", arXiv 2503.14476), its answers, each by the mean over
    its tokens ("grpo"), or its answers, each by the sum over its tokens / max_length ("dr_grpo", arXiv 2503.20783,
    which does not divide rewards by their standard deviation either)."""

    max_length: int = 0
    """Tokens that an answer could have when it was sampled, for normalization "dr_grpo"."""

    clip_low: float = 0.2
    """How far the ratio of new to old probability counts below 1 (no unit)."""

    clip_high: float = 0.2
    """The same above 1. DAPO takes 0.28."""

    beta: float = 0.0
    """Weight of the KL divergence to the initial weights (no unit). 0: none, and no reference in memory."""

    on_policy: bool = False
    """Train answers without log-probabilities, as if the weights that each step begins with had sampled them."""


EXPERTS = "experts"  # in LoRA.target_modules


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters (arXiv 2106.09685) beside frozen weights, by torchtitan 0.3."""

    rank: int = 0
    """Rank of the adapters' matrices (a count). 0: none, all weights are trained."""

    alpha: float = 16.0
    """Scale of what adapters add: alpha / rank (no unit)."""

    target_modules: list[str] = field(
        default_factory=lambda: [
            *("wqkv", "wq_a", "wq_b", "wq", "wkv_a", "wkv_b", "wkv", "wk", "wv", "wo"),
            *("in_proj_qkv", "in_proj_z", "out_proj", "w1", "w2", "w3"),
        ]
    )
    """torchtitan's names of the linear layers that get one; the default, as far as the model has them. Projections of
    queries, keys and values, in one or apart, that of attention's output, those of linear attention (where
    "in_proj_qkv" stands for three layers), and the three of a feed-forward, also of experts that every token goes to.
    Besides, "experts": those that tokens are sent to, each with its own adapters."""


@dataclass(frozen=True)
class Magi:
    """Varlen context parallelism and packed data: datasets "sft", "dpo" and "rollouts"."""

    backend: Literal["auto", "ffa", "flex"] = "auto"
    """Attention kernel: ours for Hopper GPUs ("ffa") or torch's flex_attention ("flex": any machine, slower). "auto":
    ffa on CUDA, flex on CPU; it never falls back from one to the other."""

    overlap_stages: int = -1
    """Number of stages in which remote K/V arrive while attention runs, 0 to 16; -1: chosen. 0: one attention call
    over all K/V; inside a node our kernel starts before they have arrived. -1: the cost model
    chooses for each microbatch, for the forward and for the backward: inside a node 0, and more where one document is
    so long that its rows and their sums would take more than 16 GiB."""

    cost_model: str = ""
    """File from ``torchrun ... -m torchtitan_magi.calibrate``, by which stages are chosen. "": measured on H200 GPUs;
    between nodes an estimate for 400 Gb/s per GPU."""

    deterministic: bool = False
    """Repeat forward and backward bit for bit on a fixed layout; slower. debug.deterministic asks for it as well."""

    fp32_reduce: bool = False
    """Send dK and dV between ranks in float32 instead of the training dtype. They are summed in float32 either way."""

    keep: str = ""
    """What layers keep for their backward under activation_checkpoint.mode "auto", such as "attention", "20 inputs
    offloaded, 12 all" or "8 products offloaded among 24 products": numbers of layers, from the first on, each with
    "all", "products" (every other matrix product and attention), "attention" or "inputs" alone, on the GPU or
    "offloaded" to the host's memory. "": the fastest that fits, by predicted time and memory."""

    positions: Literal["auto", "document", "pack"] = "auto"
    """Rotary positions restart at 0 in every document ("document") or run over the whole pack ("pack"). "auto":
    document for our datasets, pack for torchtitan's own."""

    long_documents: Literal["truncate", "split"] = "truncate"
    """Cut documents longer than training.seq_len tokens at the end, or split them into several. For dataset "sft"."""

    share_prefixes: bool = False
    """Compute the common beginnings of records once: records that are packed together and begin with the same 128
    tokens or more become a tree, whose losses and gradients are those of each record by itself. A step takes more
    records then; the run says how many. For dataset "sft"."""

    epochs: int = -1
    """Number of passes over the data, which sets training.steps and the schedule of the learning rate; -1: no end.
    Lower training.steps end both earlier; left at 10,000 they count as not given. For our datasets."""

    shuffle: bool = True
    """A new seeded order in every epoch. false: the order of the files, as far as packing allows. For our datasets."""

    bad_records: Literal["error", "skip"] = "error"
    """Malformed records stop the run ("error") or are left out, counted and named ("skip"). "error" stops it before the
    first step where that can be told. "skip" logs the first of them with file and line. For our datasets."""

    findings: Literal["error", "warn"] = "error"
    """What surely goes wrong in the chat template, or in each of the few records that are looked at before the first
    step, stops the run ("error") or is logged ("warn"): BOS or EOS twice, no end of turn that is learned, nothing or
    everything learned, a template of another model. What may be meant is logged. For datasets "sft" and "dpo"."""

    template_date: str = ""
    """Date that the chat template prints if it prints one, such as "2024-07-26". "": that of the run's first start,
    which is kept in job.dump_folder."""

    token_cache: str = ""
    """Folder of the tokens, which are made once for all ranks and later runs. "": ``tokens/`` in
    $TORCHTITAN_MAGI_CACHE, else ~/.cache/torchtitan_magi/tokens. Machines may share it."""

    loss_per: Literal["token", "document"] = "token"
    """The loss is a mean over the labels of a step ("token") or over its documents ("document"). Each document counts
    by the mean over its labels, so that short answers weigh as much as long ones. For dataset "sft"."""

    verify_checkpoint: bool = True
    """Compare every byte of a checkpoint with its digests before it is loaded. The ranks together read each file once.
    false: only the sizes of its files are checked."""

    random_weights: bool = False
    """Train random weights although model.hf_assets_path holds a model's, which otherwise ends the run unless
    [checkpoint] loads them."""

    imports: list[str] = field(default_factory=list)
    """Modules of your own that add flavors, converters or datasets; imported before these are looked up."""

    dpo: DPO = field(default_factory=DPO)
    rollouts: Rollouts = field(default_factory=Rollouts)
    lora: LoRA = field(default_factory=LoRA)


def has_reference(job_config: Any) -> bool:
    """Whether the loss compares the policy with the initial weights."""
    dataset, magi = job_config.training.dataset, job_config.magi
    return dataset == DPO_DATASET or (dataset == ROLLOUTS_DATASET and magi.rollouts.beta > 0)


def check_schedule(total: int | None, steps: int) -> None:
    """Checks that the learning rate is planned for all steps of a run: behind its last one torchtitan's is negative.

    Args:
        total: lr_scheduler.total_steps.
        steps: of the run.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    if total is not None and total < steps:
        raise ValueError(
            f"lr_scheduler.total_steps is {total}, but the run has {steps} steps; use at least as many, or leave it out"
        )
