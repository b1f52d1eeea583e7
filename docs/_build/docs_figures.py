"""Parts of the docs that are made from benchmarks/results/*.json: tables of figures. See write_docs.py."""

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("benchmarks", "tests/long")]
from check_prediction import comparisons  # noqa: E402
from compare_versions import LAYOUTS, VERSIONS, difference, shown  # noqa: E402
from plot_results import NAMES  # noqa: E402

from torchtitan_magi import make_plan  # noqa: E402
from torchtitan_magi.calibrate import recorded_samples  # noqa: E402
from torchtitan_magi.planning.cost_model import H200  # noqa: E402

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
CP_FILES = {
    2: ("cp_h200x2", "cp_h200x2_64k", "cp_h200x2_32_8", "cp_h200x2_32_8_64k", "cp_h200x2_32_32"),
    4: ("cp_h200x4", "cp_h200x4_64k", "cp_h200x4_32_32"),
}
TRAIN_FILES = ("train_8b_64k_h200x2", "train_h200x2", "train_h200x4")
MOE_FILES = ("train_moe_h200x2", "train_moe_balanced_h200x2")
OTHERS = ("all-gather", "all-gather balanced", "ring", "ulysses")

Row = dict[str, Any]


def result(name: str) -> dict[str, Any]:
    """benchmarks/results/NAME.json."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; None is an empty cell, numbers are set to the right."""
    rows = [["" if cell is None else str(cell) for cell in row] for row in rows]
    is_number = [all(re.fullmatch(r"[-+−]?[\d.,]*%?", row[i]) for row in rows) for i in range(len(columns))]
    lines = [columns, ["---:" if numbers else "---" for numbers in is_number], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sources(*names: str) -> str:
    """A line for each file: when, on what, at which version, by which command."""
    return "\n".join(_source(name) for name in names)


def _source(name: str) -> str:
    found = result(name)
    gpus = int(found.get("num_gpus") or found.get("gpus") or 1)
    device = found.get("device") or found["processor"]
    what = f"{gpus} x {device}, torch {found['torch']}" if "torch" in found else device
    command = re.sub(r" --(commit|output|json) \S+", "", found["command"])
    path = f"../../benchmarks/results/{name}.json"
    return f"- [{name}.json]({path}): {found['date']}, {what}, commit {found['commit'][:7]}, `{command}`"


def thousands(tokens: int) -> str:
    return f"{tokens // 1024}k"


def span(values: Sequence[float], digits: int) -> str:
    """The least to the greatest."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def total(row: Row) -> float:
    return float(row["fwd_ms"] + row["bwd_ms"])


# ---------------------------------------------------------------- the kernel


def kernel() -> str:
    rows = [row for row in result("kernel_h200")["rows"] if not row["case"].removeprefix("histogram ").isdigit()]
    cases: dict[tuple[str, str, int, int], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row["case"], row["heads"], row["head_dim"], row["tokens"]), {})[row["impl"]] = row

    def speed(row: Row | None, way: str) -> str | None:
        return f"{row[way + '_tflops']:.0f}" if row else None

    lines = []
    for (case, heads, head_dim, tokens), by in cases.items():
        forward = [speed(by.get(name), "fwd") for name in ("ours", "fa3", "cudnn", "varlen_attn")]
        backward = [speed(by.get(name), "bwd") for name in ("ours", "ours deterministic", "cudnn", "varlen_attn")]
        lines.append([mask_name(case), thousands(tokens), heads, head_dim, *forward, *backward])
    columns = ["mask", "tokens", "heads", "head_dim", "forward: ours", "FA3", "cuDNN", "varlen_attn"]
    columns += ["backward: ours", "deterministic", "cuDNN", "varlen_attn"]
    return f"{table(columns, lines)}\n\n{sources('kernel_h200')}"


def mask_name(case: str) -> str:
    return case.replace("histogram, all", "histogram, three packs").replace("varlen", "8 documents,")


def sustained() -> str:
    """Without pauses, beside FlashAttention-3's forward."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result("kernel_sustained_h200")["rows"]:
        case = tuple(row[field] for field in ("case", "tokens", "heads", "head_dim"))
        cases.setdefault(case, {})[row["impl"]] = row
    lines = []
    for (case, tokens, heads, head_dim), by in cases.items():
        ours, fa3, cudnn = (by.get(name) for name in ("ours", "fa3", "cudnn"))
        assert ours is not None
        forward = [f"{row['fwd_tflops']:.0f}" if row else None for row in (ours, fa3)]
        ratio = f"{ours['fwd_tflops'] / fa3['fwd_tflops']:.2f}" if fa3 else None
        clocks = [f"{row['fwd_clock']:.0f}" if row else None for row in (ours, fa3)]
        backward = [f"{row['bwd_tflops']:.0f}" if row else None for row in (ours, cudnn)]
        speedup = f"{ours['bwd_tflops'] / cudnn['bwd_tflops']:.2f}" if cudnn else None
        name = mask_name(case).replace("histogram 0", "histogram")
        lines.append([name, thousands(tokens), heads, head_dim, *forward, ratio, *clocks, *backward, speedup])
    columns = ["mask", "tokens", "heads", "head_dim", "forward: ours", "FA3", "ratio", "MHz: ours", "FA3"]
    columns += ["backward: ours", "cuDNN", "ratio"]
    return f"{table(columns, lines)}\n\n{sources('kernel_sustained_h200')}"


def variants() -> str:
    """Wide heads, softcap, sinks and a narrow window."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result("variants_h200")["rows"]:
        fields = ("head_dim", "value_dim", "heads", "tokens", "window", "softcap", "sinks")
        cases.setdefault(tuple(row[field] for field in fields), {})[row["impl"]] = row
    lines = []
    for (dim, value_dim, heads, tokens, window, softcap, sinks), by in cases.items():
        extras = [f"window {window}"] * bool(window) + [f"softcap {softcap:g}"] * bool(softcap) + ["sinks"] * sinks
        rows = [by.get(name) for name in ("ours", "ours without sinks", "cudnn", "fa3", "varlen_attn")]
        forward = [f"{row['fwd_tflops']:.0f}" if row else None for row in rows]
        backward = [f"{row['bwd_tflops']:.0f}" if row else None for row in (*rows[:3], rows[4])]
        lines.append([f"{dim}/{value_dim}", heads, thousands(tokens), ", ".join(extras), *forward, *backward])
    columns = ["head_dim of q, k / v", "heads", "tokens", ""]
    columns += ["forward: ours", "without sinks", "cuDNN", "FA3", "varlen_attn"]
    columns += ["backward: ours", "without sinks", "cuDNN", "varlen_attn"]
    return f"{table(columns, lines)}\n\n{sources('variants_h200')}"


def lists() -> str:
    rows = result("kernel_h200")["lists"]
    return table(
        ["tokens", "documents", "ms"],
        [[f"{r['tokens']:,}", f"{r['documents']:,}", f"{r['build_ms']:.2f}"] for r in rows],
    )


def check() -> str:
    found = result("check_kernel_h200")
    worst = max(found["worst_share_of_budget"].values())
    counts = f"{found['cases']:,} random cases, {found['failed']} failed; the worst error is {worst:.2f} of its budget."
    return f"{counts}\n\n{sources('check_kernel_h200')}"


# ---------------------------------------------------------------- context parallelism


def packs_of(name: str) -> dict[tuple[int, str, str, int], dict[str, Row]]:
    """(tokens per GPU, heads, kind of pack, seed) -> strategy -> its row."""
    packs: dict[tuple[int, str, str, int], dict[str, Row]] = {}
    for row in result(name)["rows"]:
        packs.setdefault((row["tokens_per_gpu"], row["heads"], row["pack"], row["seed"]), {})[row["strategy"]] = row
    return packs


def context_parallel(gpus: int) -> str:
    lines = []
    for name in CP_FILES[gpus]:
        settings: dict[tuple[int, str, str], list[dict[str, Row]]] = {}
        for (*setting, _), by in packs_of(name).items():
            settings.setdefault(tuple(setting), []).append(by)  # type: ignore[arg-type]
        for (tokens, heads, pack), packs in settings.items():
            ours = [total(by["ours"]) for by in packs]
            shares = [100 * total(by["ideal"]) / time for by, time in zip(packs, ours, strict=True)]
            others = [
                min(total(by[other]) for other in OTHERS if other in by) / time
                for by, time in zip(packs, ours, strict=True)
            ]
            exposed, unqueued = (
                mean(by["ours"][field] for by in packs) for field in ("exposed_comm_share", "speed_unqueued")
            )
            lines.append([
                thousands(tokens), heads, pack, len(packs), f"{mean(shares):.0f}%", f"{min(shares):.0f}%",
                f"{mean(others):.2f}", f"{100 * exposed:.1f}%", f"{unqueued:.2f}",
            ])  # fmt: skip
    columns = [
        "tokens per GPU",
        "heads",
        "pack",
        "packs",
        "of the ideal",
        "lowest",
        "against the best other",
        "exposed",
    ]
    return f"{table([*columns, 'nothing queued'], lines)}\n\n{sources(*CP_FILES[gpus])}"


def stack() -> str:
    """Layers with full and window attention in turn."""
    lines = []
    for row in result("cp_stack_h200x2")["rows"]:
        ideal, spent = row["ideal_fwd_ms"] + row["ideal_bwd_ms"], total(row)
        times = [f"{row[way]:.2f}" for way in ("fwd_ms", "bwd_ms")]
        pack = thousands(row["tokens_per_gpu"]), row["heads"], row["pack"], row["seed"]
        lines.append([*pack, *times, f"{100 * ideal / spent:.0f}%"])
    columns = ["tokens per GPU", "heads", "pack", "seed", "forward, ms", "backward, ms", "of the ideal"]
    return f"{table(columns, lines)}\n\n{sources('cp_stack_h200x2')}"


def pieces() -> str:
    lines = []
    for row in result("pieces_h200x2")["rows"]:
        times = (f"{min(row[way]):,.0f}" for way in ("fwd_ms", "bwd_ms"))
        lines.append([row["setting"], row["pieces"], f"{row['outside_bytes'] / 2**30:.1f}", *times])
    columns = ["exchange", "pieces", "GiB outside PyTorch", "forward, ms", "backward, ms"]
    return f"{table(columns, lines)}\n\n{sources('pieces_h200x2')}"


# ---------------------------------------------------------------- training


def training_rows(names: Sequence[str]) -> str:
    lines = []
    for name in names:
        found = result(name)
        for row in found["rows"]:
            options = found["options"]
            checkpointing = row.get("checkpointing") or re.search(r"checkpoint.mode (\w+)", options)[1]  # type: ignore[index]
            speed = row["tokens_per_s"] / found["num_gpus"]
            lines.append([
                found["num_gpus"], found["layers"], thousands(row["tokens_per_gpu"]), checkpointing,
                NAMES[row["strategy"]], f"{speed:,.0f}", f"{row['step_ms']:,.0f}", f"{row['peak_memory_gib']:.1f}",
            ])  # fmt: skip
    columns = [
        "GPUs",
        "layers",
        "tokens per GPU",
        "checkpointing",
        "attention",
        "tokens/s per GPU",
        "step, ms",
        "peak GiB",
    ]
    return f"{table(columns, lines)}\n\n{sources(*names)}"


def long_runs() -> str:
    """Runs of many steps: whether they keep their speed, and whether a step waits for data."""
    names = ("train_long_h200x2", "train_epochs_h200x2")
    lines = []
    for name in names:
        found = result(name)
        (row,) = found["rows"]
        steps = re.search(r"--steps (\d+)", found["command"])
        assert steps
        fifths = [f"{speed / found['num_gpus']:,.0f}" for speed in row["tokens_per_s_by_fifth"]]
        wait = f"{row['longest_data_wait_ms']:.1f}"
        lines.append([steps[1], thousands(row["tokens_per_gpu"]), ", ".join(fifths), row["ends_of_epochs"], wait])
    columns = ["steps", "tokens per GPU", "tokens/s per GPU, by fifths of the run", "ends of epochs"]
    return f"{table([*columns, 'longest wait for data, ms'], lines)}\n\n{sources(*names)}"


def cost_of_cp() -> str:
    """What a step takes beyond one without attention and the ideal attention."""
    lines = []
    for name in ("train_h200x2", "train_h200x4", "train_moe_balanced_h200x2"):
        found = result(name)
        by = {row["strategy"]: row for row in found["rows"]}
        step, without, ideal = by["ours"]["step_ms"], by["no attention"]["step_ms"], by["ours"]["ideal_attention_ms"]
        model = "Qwen3 30B-A3B's shapes" if "moe" in name else "Llama 3 8B's shapes"
        left = f"{100 * (step - without - ideal) / step:.1f}%"
        lines.append([model, found["num_gpus"], f"{step:,.0f}", f"{without:,.0f}", f"{ideal:,.0f}", left])
    return table(["model", "GPUs", "step, ms", "without attention, ms", "ideal attention, ms", "left for CP"], lines)


def checkpointing() -> str:
    names = ("train_checkpointing_h200x2", "train_8b_64k_h200x2")
    lines = []
    for name in names:
        found = result(name)
        for row in found["rows"]:
            lines.append([
                f"{row['tokens_per_gpu']:,}", row["checkpointing"], NAMES[row["strategy"]],
                f"{row['peak_memory_gib']:.1f}", f"{row['reserved_gib']:.1f}", f"{row['outside_gib']:.1f}",
                f"{row['tokens_per_s'] / found['num_gpus']:,.0f}", f"{row['step_ms']:,.0f}",
            ])  # fmt: skip
    columns = ["tokens per GPU", "checkpointing", "attention", "peak GiB", "reserved GiB", "outside PyTorch, GiB"]
    return f"{table([*columns, 'tokens/s per GPU', 'step, ms'], lines)}\n\n{sources(*names)}"


def losses() -> str:
    names = ("loss_curves_h200x4", "loss_curves_h200x2", "dpo_curves_h200x4", "dpo_curves_h200x2")
    lines = []
    for name in names:
        found = result(name)
        curves = {layout: [step["loss"] for step in steps] for layout, steps in found["runs"].items()}
        for layout, against in found["against"].items():
            if against and layout.startswith(("cp", "dp2_cp")):
                far = max(abs(a - b) for a, b in zip(curves[layout], curves[against], strict=True))
                task, steps = ("DPO" if name.startswith("dpo") else "SFT"), len(curves[layout])
                spread = found["spread"]
                lines.append(
                    [task, found["num_gpus"], layout, steps, f"{far:.4f}", f"{spread:.4f}", f"{far / spread:.2f}"]
                )
    columns = ["task", "GPUs", "layout", "steps", "largest difference", "spread", "difference / spread"]
    return f"{table(columns, lines)}\n\n{sources(*names)}"


# ---------------------------------------------------------------- placement


def placement() -> str:
    cases: dict[tuple[str, int, int], dict[str, list[Row]]] = {}
    for row in result("plan")["rows"]:
        cases.setdefault((row["distribution"], row["total"], row["cp"]), {}).setdefault(row["planner"], []).append(row)
    lines = []
    for (distribution, tokens, cp), by in cases.items():
        ours = by["ours"]
        bound = mean(row["lower_bound_mean"] for row in ours)
        received = [
            mean(row["recv_mean"] for row in by[planner]) for planner in ("ours", "min_heap", "zigzag", "contiguous")
        ]
        lines.append([
            distribution, f"{tokens:,}", cp, f"{max(row['imbalance_area'] for row in ours):.3f}",
            f"{max(row['imbalance_area'] for row in by['min_heap']):.3f}", f"{bound:.2f}",
            *(f"{share:.2f}" for share in received),
            f"{mean(row['plan_ms'] for row in ours):.0f}",
        ])  # fmt: skip
    columns = ["documents", "tokens", "GPUs", "imbalance: ours", "min-heap", "rows received: bound", "ours", "min-heap"]
    return f"{table([*columns, 'zigzag', 'contiguous', 'plan, ms'], lines)}\n\n{sources('plan')}"


def unseen_packs() -> str:
    """Packs on which placement was not tuned: sums over the packs of a setting."""
    packs: dict[tuple[str, int, int], dict[str, list[Row]]] = {}
    for row in result("plan")["unseen"]:
        packs.setdefault((row["distribution"], row["total"], row["cp"]), {}).setdefault(row["heads"], []).append(row)
    lines = []
    for (distribution, tokens, cp), by_heads in packs.items():
        for heads, rows in by_heads.items():
            least, received, layer, ideal = (
                sum(row[name] for row in rows) for name in ("rows_least", "rows_received", "layer_ms", "ideal_ms")
            )
            lines.append([
                distribution, f"{tokens:,}", cp, heads, f"{received / least:.2f}",
                f"{max(row['imbalance_area'] for row in rows):.3f}", f"{ideal / layer:.1%}",
                f"{mean(row['plan_without_index_ms'] for row in rows):.0f}",
            ])  # fmt: skip
    columns = ["documents", "tokens", "GPUs", "heads", "rows / bound", "imbalance", "share of the ideal"]
    return table([*columns, "plan without index data, ms"], lines)


# ---------------------------------------------------------------- prediction


def cost_model() -> str:
    """Errors of the kernel's predicted times in the cases of its benchmark."""
    errors: dict[str, list[float]] = {"forward": [], "backward": []}
    for sample in recorded_samples(RESULTS / "kernel_h200.json"):
        predicted = make_plan(sample.slices, sample.num_tokens, 1, heads=sample.heads).predict()
        for (name, found), times in zip(errors.items(), predicted, strict=True):
            found.append(100 * (times.seconds / getattr(sample, name) - 1))
    spans = " and ".join(f"{min(found):+.0f} to {max(found):+.0f}% {name}" for name, found in errors.items())
    sentence = f"The constants predict the cases of the [kernel benchmark](kernel.md) with errors of {spans}."
    return f"{sentence}\n\n{sources('kernel_h200', 'cost_h200x4')}"


def prediction() -> str:
    """Share of the ideal, predicted by today's cost model and plans less measured, in points."""
    lines = []
    for name in (*CP_FILES[2], *CP_FILES[4]):
        found = result(name)
        errors = [
            100 * (predicted - measured)
            for label, *_, measured, predicted in comparisons(found["rows"], H200)
            if label.split()[-1] == "ours"
        ]
        tokens = ", ".join(dict.fromkeys(thousands(row["tokens_per_gpu"]) for row in found["rows"]))
        heads = found["rows"][0]["heads"]
        least, most = (f"{error:+.1f}" for error in (min(errors), max(errors)))
        lines.append([found["num_gpus"], heads, tokens, len(errors), f"{mean(errors):+.1f}", least, most])
    columns = ["GPUs", "heads", "tokens per GPU", "packs", "mean", "least", "most"]
    return f"{table(columns, lines)}\n\n{sources(*CP_FILES[2], *CP_FILES[4])}"


# ---------------------------------------------------------------- data


def data() -> str:
    """Of benchmarks/bench_data.py."""
    if not (RESULTS / "data.json").exists():
        return "Not measured in this version."
    found = result("data")
    parts = []
    for name in ("tokenizing", "cold", "packing", "opening"):
        lines = [[label(key), figure(value)] for key, value in found[name].items()]
        parts.append(f"{name.capitalize()}:\n\n{table(['figure', 'value'], lines)}")
    for name in ("ranks", "fill"):
        rows = found[name]
        columns = [label(key) for key in rows[0]]
        parts.append(f"{name.capitalize()}:\n\n{table(columns, [list(map(figure, row.values())) for row in rows])}")
    return "\n\n".join([*parts, sources("data")])


def label(key: str) -> str:
    """A figure's name with its unit."""
    words = (
        f"{key} ".replace("_", " ").replace(" per cpu s ", " per second of CPU time").replace(" per s ", " per second")
    )
    words = words.replace("of encode batch", "share of encode_batch").replace(" busy", ", share of the CPU's time")
    for unit, name in (
        (" cpu ", " by CPU time"),
        (" s ", ", seconds"),
        ("mb ", "memory, MB"),
        ("gpus fed", "GPUs fed"),
    ):
        words = words.replace(unit, name)
    return words.strip().replace("encode batch", "encode_batch")


def figure(value: object) -> str:
    """A number in four digits."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def headline() -> str:
    """Three figures for the README: the kernel, context parallelism, a training step."""
    ours, torchs = (
        {(row["case"], row["tokens"]): row for row in result("kernel_h200")["rows"] if row["impl"] == implementation}
        for implementation in ("ours", "varlen_attn")
    )
    packs = [(ours[key], row) for key, row in torchs.items() if key in ours and key[0] == "histogram, all"]
    forward, backward = ([b[way] / a[way] for a, b in packs] for way in ("fwd_ms", "bwd_ms"))
    tokens = [row["tokens"] // 1024 for row, _ in packs]
    layers = packs_of("cp_h200x2")
    shares = [100 * total(by["ideal"]) / total(by["ours"]) for key, by in layers.items() if key[2] == "histogram"]
    step = {row["strategy"]: row for row in result("train_8b_64k_h200x2")["rows"]}
    faster = step["ours"]["tokens_per_s"] / step["flex"]["tokens_per_s"]
    saved = step["flex"]["peak_memory_gib"] - step["ours"]["peak_memory_gib"]
    return f"""
- **Kernel**: {span(forward, 1)} times the speed of torch's `varlen_attn` forward, {span(backward, 1)} times backward,
  on packs of {min(tokens)}k to {max(tokens)}k tokens (one H200, heads 64:8).
- **Context parallelism**: {span(shares, 0)}% of the ideal, one GPU's time divided by two, on packs of 8k and 16k tokens
  per GPU (two H200).
- **Training**: Llama 3.1 8B whole, 128k-token packs, two H200: {faster:.2f} times the tokens per second of torchtitan's
  own context parallelism over flex_attention, with {saved:.0f} GiB less on each GPU.
"""


def versions() -> str:
    """Losses of each layout with each torchtitan, beside those of one process and of the other."""
    files = {version: f"versions_{version}" for version in VERSIONS}
    found = {version: result(name)["layouts"] for version, name in files.items()}
    rows = []
    for layout in LAYOUTS:
        name, alone = str(layout), str(layout.one_process)
        runs = {version: of.get(name) for version, of in found.items()}
        pairs = [(run, found[version].get(alone)) for version, run in runs.items()]
        rows.append([name, *(shown(difference(*pair)) if all(pair) else "–" for pair in (*pairs, runs.values()))])
    columns = ["layout", *(f"{version}, from its one process" for version in VERSIONS), "0.3 from 0.2.2"]
    return f"{table(columns, rows)}\n\n{sources(*files.values())}"


def compatibility() -> str:
    """Verdicts of tests/long/compatibility.py with each torchtitan."""
    files = {version: f"compatibility_{version}" for version in VERSIONS}
    found = {version: result(name)["cells"] for version, name in files.items()}
    yes = {True: "yes", False: ""}
    lines, refused = [], {}
    for cells in zip(*found.values(), strict=True):
        cell, *_ = cells
        options = [cell[field] for field in ("model", "task", "layout", "precision", "packs", "accumulation")]
        options += [cell["checkpointing"], yes[cell["compile"]], yes[cell["validation"]]]
        verdicts = [each["detail"] if each["verdict"] == "works" else f"**{each['verdict']}**" for each in cells]
        lines.append([cell["number"], *options, *verdicts])
        refused |= {each["detail"]: cell["layout"] for each in cells if each["verdict"] == "refused"}
    works = ", ".join(
        f"{sum(cell['verdict'] == 'works' for cell in cells)} of {len(cells)} with {version}"
        for version, cells in found.items()
    )
    columns = ["#", "model", "task", "layout", "precision", "packs", "accumulation", "checkpointing", "compile"]
    parts = [f"Trained: {works}.", table([*columns, "validation", *VERSIONS], lines)]
    parts += [
        "Refused:",
        "\n".join(f"- {layout}: {line}" for line, layout in refused.items()),
        sources(*files.values()),
    ]
    return "\n\n".join(parts)


def v03_gpu(name: str, on: str) -> str:
    """Losses with torchtitan 0.3 on GPUs, beside those on a CPU."""
    found = result(name)
    rows = [
        [task, *(" ".join(f"{loss:.4f}" for loss in of[where]) for where in ("gpu", "cpu"))]
        for task, of in found["losses"].items()
    ]
    return f"{table(['run', f'{on}, bfloat16', 'CPU, float32'], rows)}\n\n{found['date']}, torch {found['torch']}."


def started() -> str:
    """When tests/long/start_configs.py ran last with each torchtitan."""
    said = []
    for version in VERSIONS:
        run, path = result(f"start_configs_{version}"), f"../../benchmarks/results/start_configs_{version}.json"
        said.append(f"[{run['date']}]({path}) with {version}, {len(run['losses'])} files")
    return "; ".join(said) + "."


PARTS: dict[str, Callable[[], str]] = {
    "compatibility": compatibility,
    "versions": versions,
    "v03-gpu": functools.partial(v03_gpu, "v03_h200", "one H200"),
    "v03-two-gpus": functools.partial(v03_gpu, "v03_h200x2", "two H200"),
    "started": started,
    "headline": headline,
    "kernel": kernel,
    "kernel-sustained": sustained,
    "kernel-variants": variants,
    "kernel-lists": lists,
    "kernel-check": check,
    "cp-two": functools.partial(context_parallel, 2),
    "cp-four": functools.partial(context_parallel, 4),
    "cp-stack": stack,
    "cp-pieces": pieces,
    "cost-model": cost_model,
    "cp-trace": functools.partial(sources, "trace_h200x4"),
    "training": functools.partial(training_rows, TRAIN_FILES),
    "training-long": long_runs,
    "training-moe": functools.partial(training_rows, MOE_FILES),
    "training-cp": cost_of_cp,
    "checkpointing": checkpointing,
    "losses": losses,
    "placement": placement,
    "placement-unseen": unseen_packs,
    "prediction": prediction,
    "data": data,
}
