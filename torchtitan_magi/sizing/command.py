"""Answers of a run whether it fits and how long it takes, on GPUs that you do not have yet.

Of a run's TOML file it predicts memory and the time of a step, by part, and
says what would be faster. Of documents alone it plans packs for the
context-parallel GPUs of --cp: the balance, the bytes that travel, the stages
and the time of one layer's attention, beside other strategies. No GPU is
needed.

examples:
  torchtitan-magi size my.toml
  torchtitan-magi size my.toml --gpu H200 --gpus 16 --cp 4 8 16
  torchtitan-magi size histogram --total 512k --cp 8 16 32 64
  torchtitan-magi size data/conversations.jsonl --total 128k --cp 8 \\
      --tokenizer assets/hf/Llama-3.1-8B-Instruct --heads 32:8
"""

import argparse
import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchtitan_magi.commands.parser import CommandParser, check_output, count_of_tokens, print_text, write_output
from torchtitan_magi.machine import raise_open_files
from torchtitan_magi.masks.geometry import Int64Array
from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.planning.cost_model import H200, CostModel, Heads
from torchtitan_magi.sizing.answer import Answer, answer_html, answer_json, answer_lines, memory_lines
from torchtitan_magi.sizing.gpus import GPUS, gpu_named
from torchtitan_magi.sizing.predicted_run import Place, faster, predict_run, with_keeping
from torchtitan_magi.sizing.run_file import (
    NO_DATA,
    RunFile,
    check_length,
    missing_data,
    notes_on,
    options_of,
    reading_of,
    setup_of_file,
    steps_of,
)
from torchtitan_magi.sizing.run_setup import Setup
from torchtitan_magi.sizing.sample_packs import DISTRIBUTIONS, PACKS, Sample, make_packs, pairs_of, sample
from torchtitan_magi.sizing.strategies.size import Sizing, check_layout, size_run
from torchtitan_magi.sizing.strategies.table import as_json, report_lines
from torchtitan_magi.wording import one_line, quoted

GPU = "H100"  # of a run, if none is given
SHAPE = ("heads", "head_dim", "value_dim")  # of a layer


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a report, or predicted memory, and writes the files that are asked for.

    Args:
        arguments: of the command line; None: those of this process.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    raise_open_files()
    try:
        path, run, is_of_run = options.source, None, False
        if path.endswith(".toml"):
            run = RunFile(path)
            from_file = options_of(run, with_heads=options.heads is None and not options.memory)
            parser.set_defaults(**from_file)
            options = parser.parse_args(arguments)
            is_of_run = all(getattr(options, name) == from_file.get(name) for name in SHAPE)
            options.source = NO_DATA if missing_data(run, options.tokenizer) else from_file["source"]
            run.set("magi.share_prefixes", options.share_prefixes)
            run.set("training.dataset", options.dataset)
            for cp_size in options.cp:
                check_layout(count_of_tokens(options.total, "--total"), cp_size, gpus_in_node(options, cp_size))
                check_length(run, count_of_tokens(options.total, "--total"), cp_size)
        if options.total is None or options.cp is None:
            raise ValueError("--total and --cp are missing; give both, or a run's TOML file")
        _check_outputs(options)
        if options.gpus is not None and options.gpus < 1:
            raise ValueError(f"--gpus is {options.gpus}; give at least 1")
        of_run = {"--memory": options.memory, "--gpu": options.gpu, "--gpus": options.gpus}
        options.gpu = options.gpu or GPU
        if run is None:
            if flag := next((flag for flag, value in of_run.items() if value), None):
                raise ValueError(f"{flag} is of a run's TOML file, but SOURCE is {quoted(path)}")
        elif options.memory:
            _check_memory_alone(parser, options)
            _print(memory_lines(_setups(run, options)))
            return
        _report(run, is_of_run, options)  # heads of one's own are of no run
    except ValueError as error:
        parser.error(one_line(error, 2000))


def _report(run: RunFile | None, has_answer: bool, options: argparse.Namespace) -> None:
    """Prints and writes the answers of a run, if there is one, and the table of strategies."""
    packs, cost, answers = _packs(options, run), None, []
    if run is not None:
        cost = gpu_named(options.gpu).cost
        answers = [_answer(run, cp_size, packs, options) for cp_size in options.cp if has_answer]
        for answer in answers:
            _print([*answer_lines(answer), ""])
        if answers and (kind := _one_layer(answers[0].run.setup.model)):
            _print([f"Strategies for a layer {kind}:"])
        # tensor-parallel ranks take their share of a node
        options.gpus_per_node = max(1, options.gpus_per_node // run.read("parallelism.tensor_parallel_degree", 1))
    sizings = _sizings(packs.packs, cost, options)
    _print(report_lines(sizings))
    _write(sizings, answers, options)


def _one_layer(model: ModelConfig) -> str:
    """Which layers of several kinds strategies are compared for; empty if all are alike."""
    if windows := model.windows:
        return f"without a window, {windows.count(0)} of {len(windows)}"
    return f"that attends, {model.num_attention_layers} of {model.num_layers}" if model.linear else ""


def _print(lines: list[str]) -> None:
    print_text("\n".join([*lines, ""]))


def _packs(options: argparse.Namespace, run: RunFile | None) -> Sample:
    total, shares = count_of_tokens(options.total, "--total"), options.share_prefixes
    if run is not None and options.source in DISTRIBUTIONS:  # the data are not there
        documents = sample(options.source, total, options.packs, options.seed)
        return pairs_of(documents) if options.dataset == "dpo" else documents
    reading = {} if run is None else reading_of(run, options.dataset)
    of_records = options.tokenizer, options.dataset, shares, reading
    return sample(options.source, total, options.packs, options.seed, *of_records)


def _answer(run: RunFile, cp_size: int, packs: Sample, options: argparse.Namespace) -> Answer:
    """Whether a run with that many context-parallel GPUs fits, and how long it takes."""
    total, num_gpus = count_of_tokens(options.total, "--total"), options.gpus
    notes = list(notes_on(run, options.tokenizer))
    run.set("parallelism.context_parallel_degree", cp_size)
    run.set("training.seq_len", total)
    if num_gpus is None:  # whole nodes, if the degrees leave it open
        least = setup_of_file(run).world_size
        is_open = run.read("parallelism.data_parallel_shard_degree", -1) < 1
        num_gpus = max(least, options.gpus_per_node // least * least) if is_open else least
        if num_gpus > least:
            notes.append(
                f"parallelism.data_parallel_shard_degree is -1, so the run is sized on {num_gpus} GPUs of a node; "
                "--gpus gives another number"
            )
    setup = setup_of_file(run, num_gpus)
    place = Place(gpu_named(options.gpu), _node_of(setup, options), tuple(packs.packs), packs.learned, _cost(options))
    found = predict_run(setup, place)
    steps = steps_of(run, found.setup.packs_per_step, packs.per_epoch)
    return Answer(found, faster(found), steps, packs.per_epoch, packs.counts, notes)


def _node_of(setup: Setup, options: argparse.Namespace) -> int:
    """GPUs in each node; --nodes are those of context-parallel ranks, each with its tensor-parallel ones."""
    return options.gpus_per_node if options.nodes is None else gpus_in_node(options, setup.cp) * setup.tp


def _cost(options: argparse.Namespace) -> CostModel | None:
    """That of --cost, if it is given."""
    return None if options.cost is None else CostModel.load(options.cost)


def _write(sizings: list[Sizing], answers: list[Answer], options: argparse.Namespace) -> None:
    """Writes the files that are asked for."""
    if options.json:
        reports = [as_json(sizing) for sizing in sizings]
        for report, answer in zip(reports, answers, strict=False):
            report["run"] = answer_json(answer)
        write_output(options.json, (json.dumps(reports if len(reports) > 1 else reports[0], indent=1) + "\n").encode())
    if options.html or options.png:
        from torchtitan_magi.sizing.strategies import picture

        if options.html:
            begin = answer_html(answers[0]) if answers else ""
            write_output(options.html, picture.html_page(sizings[0], begin).encode())
        if options.png:
            write_output(options.png, picture.png(sizings[0]))


def _setups(run: RunFile, options: argparse.Namespace) -> list[Setup]:
    """The setup of a run for each number of context-parallel GPUs."""
    total, found = count_of_tokens(options.total, "--total"), []
    run.set("training.seq_len", total)
    for cp_size in options.cp:
        run.set("parallelism.context_parallel_degree", cp_size)
        setup = setup_of_file(run, options.gpus or 0)
        packs = tuple(make_packs(NO_DATA, total, options.packs, options.seed))
        place = Place(gpu_named(options.gpu), _node_of(setup, options), packs, cost=_cost(options))
        found.append(with_keeping(replace(setup, cp_per_machine=place.cp_in_node(cp_size, setup.tp)), place))
    return found


def _sizings(packs: list[Int64Array], of_gpu: CostModel | None, options: argparse.Namespace) -> list[Sizing]:
    """A sizing for each number of GPUs, all of the same packs. of_gpu: what a layer costs where no file says it."""
    heads = heads_of(options.heads or "64:8", options.head_dim, options.value_dim)
    cost = _cost(options) or of_gpu or H200
    total = count_of_tokens(options.total, "--total")
    nodes = [gpus_in_node(options, cp_size) for cp_size in options.cp]
    layouts = zip(options.cp, nodes, strict=True)
    return [size_run(options.source, packs, total, *layout, heads, cost) for layout in layouts]


def gpus_in_node(options: argparse.Namespace, cp_size: int) -> int:
    """GPUs per node. Raises ValueError for a number of nodes that does not divide the GPUs."""
    if options.nodes is None:
        return options.gpus_per_node
    if options.nodes < 1 or cp_size % options.nodes:
        raise ValueError(f"--nodes is {options.nodes} for --cp {cp_size}; give a number that divides it")
    return cp_size // options.nodes


def _check_memory_alone(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Raises ValueError for an option that memory alone does not hear."""
    for name in (*SHAPE, "tokenizer"):
        if getattr(options, name) != parser.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} has no effect on --memory, which goes by the model's config.json; leave it out")


def _check_outputs(options: argparse.Namespace) -> None:
    for path in filter(None, (options.json, options.html, options.png)):
        check_output(path)
    if options.memory and (options.json or options.html or options.png):
        raise ValueError("--memory writes no file; leave out --json, --html and --png")
    if options.html or options.png:
        if len(options.cp) > 1:
            raise ValueError(f"--cp is {options.cp}; pictures are of one layout: give one number of GPUs")
        try:
            importlib.import_module("matplotlib")
        except ImportError:
            raise ValueError("--html and --png need matplotlib; install it, or torchtitan_magi[report]") from None


def heads_of(text: str, head_dim: int, value_dim: int) -> Heads:
    """'64:8' -> 64 query heads and 8 K/V heads; '32' -> as many of both. Raises ValueError for anything else."""
    query, _, keys = text.partition(":")
    if not (query.isdecimal() and (keys or query).isdecimal()):
        raise ValueError(f"--heads is {quoted(text)}; write query heads : K/V heads, as 64:8")
    return Heads(int(query), int(keys or query), head_dim, value_dim)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("report", "%(prog)s SOURCE [--total TOKENS] [--cp GPUS [GPUS ...]] [options]", __doc__)
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        help=f"documents: a distribution ({', '.join(DISTRIBUTIONS)}), a file of lengths in tokens (text or .npy), or "
        "records as in training.dataset_path, with --tokenizer; or a run's TOML file, which says all that the options "
        "below do not",
    )
    add("--total", metavar="TOKENS", help="tokens per pack: 300000, 512k (x 1,024), 1M (x 1,048,576)")
    add(
        "--cp",
        type=int,
        nargs="+",
        metavar="GPUS",
        help="number of GPUs that share a pack; several numbers are compared",
    )
    add("--gpu", metavar="NAME", help=f"kind of GPU of a run: {', '.join(GPUS)} (default: {GPU})")
    add("--gpus", type=int, metavar="N", help="GPUs of a run in all (default: whole nodes, or what its degrees need)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--gpus-per-node", type=int, default=8, metavar="N", help="GPUs in each node (default: %(default)s)"
    )
    where.add_argument("--nodes", type=int, metavar="N", help="instead: number of nodes, with equally many GPUs each")
    add(
        "--heads",
        metavar="Q:KV",
        help="query heads : K/V heads of a layer on one GPU, after tensor parallelism (default: 64:8; with a TOML file "
        "those of the model's config.json)",
    )
    add("--head-dim", type=int, default=128, metavar="D", help="elements of a query or key (default: %(default)s)")
    add("--value-dim", type=int, default=0, metavar="D", help="elements of a value (default: as many)")
    add("--packs", type=int, default=PACKS, metavar="N", help="number of packs to draw (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the draw (default: %(default)s)")
    add("--tokenizer", metavar="DIR", help="for records: folder of the model's tokenizer.json and chat template")
    add(
        "--dataset",
        choices=("sft", "dpo", "rollouts"),
        default="sft",
        help="for records: sft; dpo for preference pairs, rollouts for sampled answers (default: %(default)s)",
    )
    add(
        "--share-prefixes",
        action="store_true",
        help="for records: pack those that begin with the same tokens as trees, as magi.share_prefixes does",
    )
    add(
        "--cost",
        type=Path,
        metavar="FILE",
        help="cost model of your machine, from -m torchtitan_magi.calibrate (default: that of the H200)",
    )
    add(
        "--memory",
        action="store_true",
        help="predict instead what training by the TOML file takes of each GPU's memory; of config.json, without data",
    )
    add("--json", type=Path, metavar="FILE", help="also write all figures, of each rank too")
    add("--html", type=Path, metavar="FILE", help="also write a web page with table and pictures (needs matplotlib)")
    add("--png", type=Path, metavar="FILE", help="also write the pictures (needs matplotlib)")
    return parser


if __name__ == "__main__":
    main()
