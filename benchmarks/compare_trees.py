"""An old tree against a new one on the same GPUs in one run: kernels and 2-rank context parallelism, by turns.

    git archive COMMIT | tar -x -C outputs/old
    python benchmarks/compare_trees.py --new . --old outputs/old --output compare_trees.json

Four processes live through the run: two ranks of each tree, with a process group per tree, on GPUs 0 and 1. One tree
works at a time: for every case old, new, in the next round new, old, and so on. A round's figure is the median over
timed calls (CUDA events; work queued ahead, an untimed call of the same kind and a flush of L2 before kernel calls).
Kernel cases run on both GPUs at once, each for itself: the mean of the two. Context parallelism: the slowest rank.

The last lines are a table: old and new median over rounds, their ratio, the spread of old against itself (max / min of
its rounds), and whether new is within max(1.5%, spread). torchtitan is not needed; --cpu tries the script itself.
"""

import argparse
import contextlib
import gc
import json
import os
import queue
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

RANKS = 2
HEAD_DIM = 128
SHARES = (0.31, 0.19, 0.14, 0.11, 0.09, 0.07, 0.05, 0.04)  # eight documents of a pack
HISTOGRAM = {
    10: 0.22, 50: 3.13, 100: 8.33, 200: 18.56, 500: 46.75, 1024: 71.38, 2048: 87.03, 4096: 94.37,
    8192: 97.42, 16384: 98.71, 32768: 99.56, 65536: 99.70, 131072: 99.86, 196608: 100.0,
}  # fmt: skip
LAYERS = 8  # calls that a host time is taken from


def list_cases(unit: int) -> list[dict]:
    """unit: tokens of "1k"."""
    masks = [("causal", 8), ("causal", 16), ("full", 8), ("varlen", 2), ("varlen", 8), ("varlen", 32),
             ("shared prompt", 16), ("window", 16)]  # fmt: skip
    cases = [
        {"kind": "kernel", "mask": mask, "tokens": k * unit, "heads": heads, "name": f"{mask} {k}k"}
        for heads in ([64, 8], [32, 8])
        for mask, k in masks
    ]
    for k in (8, 16):
        for seed in (0, 1, 2):
            cases.append(
                {"kind": "cp", "tokens": k * unit, "heads": [64, 8], "seed": seed, "name": f"cp {k}k pack {seed}"}
            )
    return cases


# -------------------------------------------------------------------------------------------------------------- worker


class Worker:
    """One rank of one tree."""

    def __init__(self, cpu: bool, unit: int) -> None:
        import torch
        import torch.distributed as dist

        import torchtitan_magi

        self.torch, self.dist, self.magi, self.cpu, self.unit = torch, dist, torchtitan_magi, cpu, unit
        tree = os.environ["PYTHONPATH"]
        assert Path(torchtitan_magi.__file__).is_relative_to(tree), f"{torchtitan_magi.__file__} is not in {tree}"
        self.rank = int(os.environ["RANK"])
        if cpu:
            torch.set_num_threads(1)
            self.device, self.dtype = torch.device("cpu"), torch.float32
            dist.init_process_group("gloo")
        else:
            self.device, self.dtype = torch.device("cuda", self.rank), torch.bfloat16
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", device_id=self.device)
            self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        self.cases = list_cases(unit)
        self.masks = [self.mask(case) for case in self.cases]
        self.plans: dict[int, object] = {}
        gc.disable()

    def serve(self, request: dict) -> object:
        if request["do"] == "check":
            return self.check()
        result = getattr(self, request["do"])(request["case"], **request.get("options", {}))
        gc.collect()
        return result

    def check(self) -> dict:
        torch, where = self.torch, self.magi.__file__
        device = "CPU" if self.cpu else torch.cuda.get_device_name()
        foreign = sorted({name.partition(".")[0] for name in sys.modules} & {"torchtitan", "datasets", "transformers"})
        return {"device": device, "torch": torch.__version__, "python": sys.version.split()[0], "package": where,
                "imported besides": foreign}  # fmt: skip

    # ---- inputs

    def mask(self, case: dict) -> object:
        import numpy as np

        magi, n = self.magi, case["tokens"]
        if case["kind"] == "cp":
            cu = histogram_pack(n * RANKS, case["seed"])
            return magi.varlen_causal(cu)
        if case["mask"] == "causal":
            return magi.varlen_causal([0, n])
        if case["mask"] == "full":
            return magi.varlen_full([0, n])
        if case["mask"] == "window":
            return magi.sliding_window([0, n], max(2, self.unit))
        if case["mask"] == "varlen":
            lengths = [int(n * share) | 1 for share in SHARES]
            lengths[0] += n - sum(lengths)
            return magi.varlen_causal([0, *np.cumsum(lengths).tolist()])
        pairs = [(n // 4, n // 8, n // 8), (n // 8, n // 16, n // 16), (n // 16, n // 8, n // 16)]
        return magi.shared_prompt(pairs)

    def inputs(self, number: int) -> tuple:
        """q, k, v with gradients, dout, and the attention of (q, k, v)."""
        torch, magi, case, slices = self.torch, self.magi, self.cases[number], self.masks[number]
        tokens = case["tokens"] * (RANKS if case["kind"] == "cp" else 1)
        generator = torch.Generator(self.device).manual_seed(number)

        def rand(heads: int) -> object:
            shape = tokens, heads, HEAD_DIM if not self.cpu else 16
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

        heads_q, heads_kv = case["heads"] if not self.cpu else (case["heads"][0] // 8, 1)
        tensors = [rand(heads) for heads in (heads_q, heads_kv, heads_kv, heads_q)]
        if case["kind"] == "cp":
            group = self.dist.group.WORLD
            if number not in self.plans:
                heads = magi.Heads(heads_q, heads_kv, tensors[0].shape[-1])
                self.plans[number] = magi.make_plan(slices, tokens, RANKS, heads=heads)
            plan = self.plans[number]
            tensors = [magi.dispatch(x, plan, group) for x in tensors]

            def attend(q: object, k: object, v: object) -> object:
                return magi.cp_varlen_attn(q, k, v, plan, group)
        else:

            def attend(q: object, k: object, v: object) -> object:
                return magi.flex_flash_attn(q, k, v, slices)[0]

        q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
        return q, k, v, tensors[3], attend

    def runs(self, number: int) -> tuple:
        q, k, v, dout, attend = self.inputs(number)
        out = attend(q, k, v)

        def forward() -> None:
            with self.torch.no_grad():
                attend(q, k, v)

        def backward() -> object:
            return self.torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        return out, forward, backward

    # ---- requests

    def warm(self, number: int) -> dict:
        """Compiles, builds lists, and says how long calls take, ms, and what the results are."""
        torch, case = self.torch, self.cases[number]
        out, forward, backward = self.runs(number)
        grads = backward()
        bits = out.detach().view(torch.int32 if self.cpu else torch.int16).long().sum()
        facts = {"bits": int(bits), "norms": [float(x.float().norm()) for x in grads]}
        if case["kind"] == "cp":
            plan = self.plans[number]
            stages = [len(getattr(plan, name, ())) for name in ("forward", "backward")]
            facts |= {"received_max": int(plan.received_rows.max()), "stages": stages}
        for name, run in (("forward", forward), ("backward", backward)):
            facts[name] = statistics.median(self.once(run, case["kind"]) for _ in range(3))
        return facts

    def time(self, number: int, forward: int, backward: int) -> dict:
        """Median ms of so many calls."""
        torch, kind = self.torch, self.cases[number]["kind"]
        _, run_forward, run_backward = self.runs(number)
        found = {}
        with torch.autograd.set_multithreading_enabled(False):
            for name, run, repeats in (("forward", run_forward, forward), ("backward", run_backward, backward)):
                self.once(run, kind)
                times = torch.tensor([self.once(run, kind) for _ in range(repeats)], device=self.device)
                if kind == "cp":
                    self.dist.all_reduce(times, op=self.dist.ReduceOp.MAX)
                found[name] = float(times.median())
            if kind == "cp":
                for name, run in (("forward", run_forward), ("backward", run_backward)):
                    times = torch.tensor([self.host_ms(run) for _ in range(8)], device=self.device)
                    self.dist.all_reduce(times, op=self.dist.ReduceOp.MAX)
                    found[f"host {name}"] = float(times.min())
        return found

    def once(self, run: object, kind: str) -> float:
        torch, cuda = self.torch, self.torch.cuda
        if kind == "cp":
            self.dist.barrier()
        if self.cpu:
            begin = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - begin)
        cuda.synchronize()
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        if kind == "cp":  # ranks begin together: so many cycles take one GPU longer than another
            cuda._sleep(6_000_000)
            self.dist.all_reduce(torch.zeros(1, device=self.device))
        else:
            cuda._sleep(2_000_000)
            run()
            self.flush.zero_()
        start.record()
        run()
        end.record()
        cuda.synchronize()
        return start.elapsed_time(end)

    def host_ms(self, run: object) -> float:
        """Host time of one of LAYERS calls while the device is busy."""
        self.dist.barrier()
        if not self.cpu:
            self.torch.cuda.synchronize()
            self.torch.cuda._sleep(6_000_000)
        begin = time.perf_counter()
        for _ in range(LAYERS if not self.cpu else 1):
            run()
        return 1e3 * (time.perf_counter() - begin) / LAYERS


def histogram_pack(total: int, seed: int) -> object:
    """benchmarks/bench_cp.py's packs."""
    import numpy as np

    edges, percent = [0, *HISTOGRAM], [0, *HISTOGRAM.values()]
    draw = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        bin_ = int(np.searchsorted(percent, draw.uniform(0, 100), side="left"))
        length = int(draw.integers(edges[bin_ - 1] + 1, edges[bin_] + 1))
        lengths.append(min(length, total // 4, total - sum(lengths)))
    draw.shuffle(lengths)
    return np.cumsum([0, *lengths])


def work(cpu: bool, unit: int) -> None:
    """Answers requests, a line of JSON each, until "quit" or the end of stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anybody prints goes to stderr
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "quit":
                worker.dist.destroy_process_group()
                answers.write('{"ok": null}\n')
                return
            if worker is None:
                worker = Worker(cpu, unit)
            if request["do"] == os.environ.get("AB_FAIL") and worker.rank == 1:  # tries out how a failure ends
                raise RuntimeError("failing as AB_FAIL asks")
            answers.write(json.dumps({"ok": worker.serve(request)}) + "\n")
        except BaseException:
            answers.write(json.dumps({"error": traceback.format_exc()}) + "\n")
            os._exit(1)
    os._exit(1)  # the driver is gone


# -------------------------------------------------------------------------------------------------------------- driver


class Failure(Exception):
    pass


class Tree:
    """Both ranks of one tree."""

    def __init__(self, name: str, root: Path, cpu: bool, unit: int, cache: Path) -> None:
        self.name, self.root, self.processes = name, root.resolve(), []
        self.answers: queue.Queue = queue.Queue()
        if not (self.root / "torchtitan_magi" / "__init__.py").exists():
            raise Failure(f"{self.root} holds no torchtitan_magi")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(RANKS):
            environment = os.environ | {
                "PYTHONPATH": str(self.root), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "TORCHTITAN_MAGI_CACHE": str(cache / name), "NCCL_NVLS_ENABLE": "0",
                "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1",
            }  # fmt: skip
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--unit", str(unit)]
            process = subprocess.Popen(
                command + ["--cpu"] * cpu, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                start_new_session=True,
            )  # fmt: skip
            self.processes.append(process)
            threading.Thread(target=self._read, args=(rank, process), daemon=True).start()

    def _read(self, rank: int, process: subprocess.Popen) -> None:
        for line in process.stdout:
            self.answers.put((rank, json.loads(line)))
        self.answers.put((rank, {"error": f"the process ended, exit code {process.wait()}"}))

    def tell(self, requests: list[dict]) -> None:
        for process, request in zip(self.processes, requests, strict=True):
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # its reader says why

    def hear(self, seconds: float) -> list:
        """The answer of each rank. Raises Failure for an error, an end or a long silence of any of them."""
        found: dict[int, object] = {}
        until = time.monotonic() + seconds
        while len(found) < RANKS:
            try:
                rank, answer = self.answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise Failure(
                    f"{self.name}: no answer of ranks {set(range(RANKS)) - set(found)} in {seconds} s"
                ) from None
            if "error" in answer:
                raise Failure(f"{self.name}, rank {rank}:\n{answer['error']}")
            found[rank] = answer["ok"]
        return [found[rank] for rank in range(RANKS)]

    def ask(self, seconds: float = 90, **request: object) -> list:
        self.tell([request] * RANKS)
        return self.hear(seconds)

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def drive(options: argparse.Namespace, trees: dict[str, Tree], unit: int) -> None:
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {text}", flush=True)

    cases = list_cases(unit)
    for tree in trees.values():
        tree.tell([{"do": "check"}] * RANKS)
    facts = {name: tree.hear(120) for name, tree in trees.items()}
    for name, (first, *_) in facts.items():
        say(f"{name}: {first}")

    # All four compile at once, the ranks of a tree from both ends of the list.
    warm: dict[str, list] = {name: [[None] * len(cases) for _ in range(RANKS)] for name in trees}
    kernel = [i for i, case in enumerate(cases) if case["kind"] == "kernel"]
    for a, b in zip(kernel, reversed(kernel), strict=True):
        for tree in trees.values():
            tree.tell([{"do": "warm", "case": a}, {"do": "warm", "case": b}])
        for name, tree in trees.items():
            for rank, (i, answer) in enumerate(zip((a, b), tree.hear(150), strict=True)):
                warm[name][rank][i] = answer
    say("kernels are compiled")
    for i, case in enumerate(cases):
        if case["kind"] == "cp":
            for name, tree in trees.items():
                for rank, answer in enumerate(tree.ask(do="warm", case=i)):
                    warm[name][rank][i] = answer
    say("all is warm")

    def repeats(i: int, which: str) -> int:
        """So many calls that they take about options.ms; the same for both trees."""
        longest = max(warm[name][rank][i][which] for name in trees for rank in range(RANKS))
        calls = 2 if cases[i]["kind"] == "kernel" else 1
        return max(5, min(15, round(options.ms / (calls * longest)))) if not options.cpu else 2

    counts = [{which: repeats(i, which) for which in ("forward", "backward")} for i in range(len(cases))]
    times: dict[tuple[int, str], dict[str, list[float]]] = {}
    rounds = 0
    while rounds < options.rounds:
        started = time.monotonic()
        for i in range(len(cases)):
            for name in ("old", "new") if (rounds + i) % 2 == 0 else ("new", "old"):
                answers = trees[name].ask(do="time", case=i, options=counts[i])
                for which in answers[0]:
                    value = statistics.mean(answer[which] for answer in answers)  # of cp: the same on all ranks
                    times.setdefault((i, which), {"old": [], "new": []})[name].append(value)
        rounds += 1
        last = time.monotonic() - started
        say(f"round {rounds} took {last:.1f} s")
        if rounds >= options.least and time.monotonic() - begin + last > options.seconds:
            say(f"no time for more than {rounds} of {options.rounds} rounds")
            break

    rows = []
    for (i, which), found in times.items():
        case = cases[i]
        old, new = (statistics.median(found[name]) for name in ("old", "new"))
        spread = max(found["old"]) / min(found["old"])
        allowed = max(1.015, spread)
        rows.append({
            "case": case["name"], "heads": "{}:{}".format(*case["heads"]), "what": which, "old_ms": old, "new_ms": new,
            "ratio": new / old, "old_spread": spread, "allowed": allowed, "within": new / old <= allowed,
            "rounds": found,
        })  # fmt: skip
    same = {
        "forward_bits": [warm["old"][r][i]["bits"] == warm["new"][r][i]["bits"] for i in kernel for r in range(RANKS)],
        "plans": [
            all(warm["old"][0][i][key] == warm["new"][0][i][key] for key in ("received_max", "stages"))
            for i, case in enumerate(cases) if case["kind"] == "cp"
        ],
    }  # fmt: skip
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        roots = {name: str(tree.root) for name, tree in trees.items()}
        result = {"facts": facts, "trees": roots, "num_rounds": rounds, "rows": rows, "warm": warm}
        options.output.write_text(json.dumps(result, indent=1))
    for tree in trees.values():
        tree.tell([{"do": "quit"}] * RANKS)
    try:
        for tree in trees.values():
            tree.hear(20)
    except Failure as error:
        say(f"at the end: {error}")

    print(f"{'case':20s} {'heads':5s} {'what':13s} {'old ms':>9s} {'new ms':>9s} {'ratio':>6s} {'spread':>6s}  verdict")
    for row in rows:
        verdict = "within" if row["within"] else "SLOWER"
        print(
            f"{row['case']:20s} {row['heads']:5s} {row['what']:13s} {row['old_ms']:9.4f} {row['new_ms']:9.4f} "
            f"{row['ratio']:6.3f} {row['old_spread']:6.3f}  {verdict}"
        )
    print(f"{rounds} rounds; kernel forwards with the same bits in both trees: {sum(same['forward_bits'])} of "
          f"{len(same['forward_bits'])}; same stages and most rows received: {sum(same['plans'])} of "
          f"{len(same['plans'])} plans")  # fmt: skip
    for title, chosen in (
        ("kernel", ("forward", "backward")),
        ("cp", ("forward", "backward")),
        ("cp", ("host forward", "host backward")),
    ):
        some = [r for r in rows if r["what"] in chosen and r["case"].startswith("cp ") == (title == "cp")]
        total = {name: sum(r[f"{name}_ms"] for r in some) for name in ("old", "new")}
        slow = [f"{r['case']} {r['heads']} {r['what']}" for r in some if not r["within"]]
        print(f"{title} {chosen[0]}, {chosen[1]}: new / old {total['new'] / total['old']:.4f} in the sum; "
              f"{len(slow)} of {len(some)} slower than allowed{': ' + ', '.join(slow) if slow else ''}")  # fmt: skip
    say("done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new", type=Path, default=Path("."), help="root of the new tree (default: %(default)s)")
    parser.add_argument(
        "--old", type=Path, default=Path("outputs/old"), help="root of the old tree (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=10, help="at most (default: %(default)s)")
    parser.add_argument("--least", type=int, default=6, help="rounds, however long they take (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=215, help="no further round that would end later (default: %(default)s)"
    )
    parser.add_argument(
        "--ms", type=float, default=60, help="GPU time of a measurement in a round (default: %(default)s)"
    )
    parser.add_argument("--cpu", action="store_true", help="tiny sizes over gloo, to try the script")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--unit", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unit = options.unit or (32 if options.cpu else 1024)
    if options.worker:
        work(options.cpu, unit)
        return
    trees: dict[str, Tree] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failure = None
    try:
        cache = Path(tempfile.mkdtemp(prefix="ab_cache_"))
        for name in ("old", "new"):
            trees[name] = Tree(name, getattr(options, name), options.cpu, unit, cache)
        drive(options, trees, unit)
    except Failure as error:
        failure = error
    finally:
        for tree in trees.values():
            tree.end()
    if failure is not None:
        sys.exit(f"FAILED: {failure}")


if __name__ == "__main__":
    main()
