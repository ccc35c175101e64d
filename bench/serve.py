"""What ordering by predicted length does to latency, on real servers: vLLM, our engine, and any server in hold mode.

    python bench/serve.py                   # full, about an hour: prints its plan first
    python bench/serve.py --quick           # one small burst on each server
    python bench/serve.py --resume FILE     # goes on with what an interrupted run has saved

Servers (SmolLM2-135M-Instruct in float32, 16 answers at once, all on this machine):

  vllm    vLLM's CPU build with `--scheduling-policy priority` and our middleware; no prefix cache, because every arm
          asks the same prompts
  engine  `longtail serve`
  hold    `longtail gateway --mode hold --window 16` before a vLLM that serves first come first served

Works are in serve_work.py, load and figures in serve_load.py. All arms of a work use one server, and differ in the
priority that a request brings along:

  fcfs           the time of its arrival
  ranked         none: the server scores the prompt
  prompt length, random, oracle    the virtual deadline with the quantile of the prompt's length, of chance, or of the
                 true length of the answer; the same head start as the server's

Arrivals: all at once (burst), Poisson, or bursty (Gamma gaps, coefficient of variation 3), at a load relative to the
capacity that a closed run with 16 requests under way measures first on the same server. The same requests arrive at the
same times in all arms. In a burst, what fcfs comes to hangs on where the shortest answers happen to stand, so it also
runs in the reverse order, and its figures are of both runs together (except for the hard work, which has no target for
them). At load 0.7, fcfs and ranked run twice, in the order A B B A: a queue is rare there, and 3 % is near what two
runs of one arm differ by. How far two rounds are apart is in the result (`between_rounds`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
import serve_figures as figures
import serve_load as load
import serve_work
from serve_figures import LOW, PROCESSES
from serve_load import Answer, Ask, Server
from serve_work import BURST, Work

KINDS = tuple(PROCESSES)
WORKS = ("larger model", "mix", "hard")
ARMS = ("fcfs", "ranked", "prompt length", "random", "oracle")
MAIN_ARMS = ("fcfs", "ranked", "oracle")
LOADS = (LOW, 1.0, 1.3)
SLOTS = 16
TOKENS_PER_S, START_S = 150, 45
"""For the estimate only."""


@dataclass(frozen=True)
class Run:
    """One arm under one load; ``arrivals`` is ``burst``, or a process and a load. A burst of round 1 has the reverse
    order."""

    kind: str
    work: str
    arrivals: str
    arm: str
    round: int = 0

    @property
    def key(self) -> str:
        return f"{self.kind} / {self.work} / {self.arrivals} / {self.arm} / {self.round}"

    @property
    def process(self) -> str:
        return self.arrivals.split()[0]

    @property
    def load(self) -> float:
        return float(self.arrivals.split()[1])


def plan(kinds: Sequence[str], works: Sequence[str], *, quick: bool) -> list[Run]:
    """In the order in which they run. Arrivals other than the burst are for the first of the works only."""
    runs: list[Run] = []
    for kind in kinds:
        for work in works[:1] if quick else works:
            arms = MAIN_ARMS[:2] if quick else ARMS if kind == "vllm" else MAIN_ARMS
            runs += [Run(kind, work, "burst", arm) for arm in arms]
            runs += [] if quick or work == "hard" else [Run(kind, work, "burst", "fcfs", 1)]
            if quick or work != works[0]:
                continue
            for process in PROCESSES[kind]:
                for level in LOADS if kind == "vllm" else (LOW,):
                    arrivals = f"{process} {level}"
                    if level != LOW:
                        runs += [Run(kind, work, arrivals, arm) for arm in MAIN_ARMS]
                        continue
                    runs += [Run(kind, work, arrivals, arm) for arm in ("fcfs", "ranked")]
                    runs += [Run(kind, work, arrivals, "oracle")] if kind == "vllm" else []
                    runs += [Run(kind, work, arrivals, arm, 1) for arm in ("ranked", "fcfs")]
    return runs


# -- servers ---------------------------------------------------------------------------------------------------------


def vllm(args, more: Sequence[str] = (), env: dict[str, str] | None = None) -> Server:
    from longtail.engine.models import resolve_model

    command = [
        args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(resolve_model("smollm2-135m")),
        "--served-model-name", "smollm2-135m", "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager",
        "--max-num-seqs", str(SLOTS), "--no-enable-prefix-caching", "--disable-uvicorn-access-log", "--port", "PORT",
        *more,
    ]  # fmt: skip
    settings = {
        "OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    return Server("vllm", command, {**settings, **(env or {})})


@contextmanager
def serving(kind: str, ranker: Path, args) -> Iterator[Server]:
    order = ["--ranker", str(ranker), "--max-head-start", str(args.head_start), "--trust-priority"]
    longtail = [sys.executable, "-m", "longtail"]
    with ExitStack() as stack:
        if kind == "vllm":
            flags = ["--scheduling-policy", "priority", "--middleware", "longtail.serve.vllm.RankMiddleware"]
            env = {
                "PYTHONPATH": str(common.ROOT / "src"), "LONGTAIL_RANKER": str(ranker),
                "LONGTAIL_MAX_HEAD_START": str(args.head_start), "LONGTAIL_TRUST_PRIORITY": "1",
            }  # fmt: skip
            server = vllm(args, flags, env)
        elif kind == "engine":
            command = ["serve", "smollm2-135m", "--port", "PORT", "--slots", str(SLOTS), "--order", "ranked", *order]
            server = Server("engine", [*longtail, *command], {"OMP_NUM_THREADS": str(args.threads)})
        else:
            upstream = stack.enter_context(vllm(args))
            command = ["gateway", "--upstream", upstream.url, "--mode", "hold", "--window", str(SLOTS)]
            server = Server("gateway", [*longtail, *command, "--port", "PORT", *order], {"OMP_NUM_THREADS": "1"})
        yield stack.enter_context(server)


# -- runs ------------------------------------------------------------------------------------------------------------


class Saved:
    """Runs by key, one a line of a file, so that what has been measured outlives a kill. The first line holds the
    settings; those of a file to go on with must be the same."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.runs, self.unscored = path, {}, {}
        if not path.exists():
            path.write_text(json.dumps(settings) + "\n")
            return
        first, *rest = path.read_text().splitlines()
        if json.loads(first) != settings:
            raise SystemExit(f"{path} was measured with {first}, not {json.dumps(settings)}")
        for row in map(json.loads, rest):
            self.runs[row["run"]] = [Answer(*answer) for answer in row["answers"]]
            self.unscored[row["run"]] = row["unscored"]

    def __contains__(self, key: str) -> bool:
        return key in self.runs

    def add(self, key: str, answers: list[Answer], *, unscored: float = 0) -> None:
        """``unscored``: so many requests the server could not score in time."""
        self.runs[key], self.unscored[key] = answers, unscored
        with self.path.open("a") as file:
            file.write(json.dumps({"run": key, "unscored": unscored, "answers": answers}) + "\n")


def asks(work: Work, arm: str, count: int, *, seed: int, head_start_s: float) -> list[Ask]:
    rows = work.draw(count)
    if arm == "ranked":
        quantiles = [None] * len(work.asked.prompts)
    elif arm == "fcfs":
        quantiles, head_start_s = [0.0] * len(work.asked.prompts), 0.0
    else:
        quantiles = work.quantiles(arm, seed).tolist()
    prompts, tokens = work.asked.prompts, work.asked.lengths
    return [Ask(prompts[i], int(tokens[i]), quantiles[i], head_start_s) for i in rows]


def measure(runs: Sequence[Run], saved: Saved, args) -> None:
    """All runs that are not in ``saved``; a server lives for those of one kind and work. One that does not come up, or
    fails at the warm-up, is told and left out."""
    for kind, name in dict.fromkeys((run.kind, run.work) for run in runs):
        mine = [run for run in runs if (run.kind, run.work) == (kind, name) and run.key not in saved]
        if not mine:
            continue
        work = serve_work.load_work(name, seed=args.seed)
        try:
            with serving(kind, serve_work.ranker_for(work), args) as server:
                warm_up(server, work, args)
                measure_all(mine, server, work, saved, args)
        except RuntimeError as problem:
            print(f"{kind}, {name}: {problem}", flush=True)


def measure_all(runs: Sequence[Run], server: Server, work: Work, saved: Saved, args) -> None:
    kind = runs[0].kind
    if any(run.process != "burst" for run in runs) and capacity_key(kind, work.name) not in saved:
        requests = asks(work, "fcfs", args.burst // 2, seed=args.seed, head_start_s=0.0)
        answers = asyncio.run(load.run_closed(server.url, server.model, requests, SLOTS))
        saved.add(capacity_key(kind, work.name), answers)
        print(f"{kind}, {work.name}: capacity {capacity(saved, kind, work.name):.2f} requests/s", flush=True)
    for run in runs:
        before = server.counter("longtail_unscored_total")
        answers = measure_one(run, server, work, saved, args)
        saved.add(run.key, answers, unscored=server.counter("longtail_unscored_total") - before)
        tell(run, answers, saved.unscored[run.key])


def warm_up(server: Server, work: Work, args) -> None:
    few = [ask for arm in ("fcfs", "ranked") for ask in asks(work, arm, SLOTS // 2, seed=args.seed, head_start_s=0.0)]
    answers = asyncio.run(load.run_closed(server.url, server.model, few, SLOTS))
    for problem in {a.error for a in answers if a.error}:
        raise RuntimeError(f"{server.name} fails at the warm-up: {problem} (see {server.log})")


def measure_one(run: Run, server: Server, work: Work, saved: Saved, args) -> list[Answer]:
    if run.process == "burst":
        times = load.arrival_times("burst", args.burst, rate=0.0, seed=args.seed)
    else:
        rate = run.load * capacity(saved, run.kind, run.work)
        count = max(SLOTS, round(rate * 60 * args.minutes))
        times = load.arrival_times(run.process, count, rate=rate, seed=args.seed)
    requests = asks(work, run.arm, len(times), seed=args.seed, head_start_s=args.head_start)
    if run.process == "burst" and run.round:
        requests.reverse()
    return asyncio.run(load.run_open(server.url, server.model, requests, times))


def capacity_key(kind: str, work: str) -> str:
    return f"{kind} / {work} / capacity"


def capacity(saved: Saved, kind: str, work: str) -> float:
    return load.capacity_per_s(saved.runs[capacity_key(kind, work)])


def tell(run: Run, answers: list[Answer], unscored: float) -> None:
    found = load.summary(answers)
    if "latency_s" in found:
        means = "  ".join(f"{name} {found[name]['mean']:.3f}" for name in load.FIGURES)
        print(f"{run.key:55s} mean {means}  {found['tokens_per_s']:.0f} tok/s in {found['span_s']:.0f} s", flush=True)
    if run.arm == "ranked" and unscored:
        print(f"{unscored:.0f} of {len(answers)} requests could not be scored in time", flush=True)
    if found["errors"]:
        print(f"{found['errors']} errors, the first: {next(a.error for a in answers if a.error)}", flush=True)


# -- the experiment --------------------------------------------------------------------------------------------------


def estimate_s(runs: Sequence[Run], about: dict[str, dict[str, Any]], args) -> float:
    seconds = 0.0
    for run in runs:
        burst_s = args.burst * about[run.work]["mean_tokens"] / TOKENS_PER_S
        seconds += burst_s if run.process == "burst" else 60 * args.minutes * max(1.0, run.load) + 6
    servers = {(run.kind, run.work) for run in runs}
    closed = {(run.kind, run.work) for run in runs if run.process != "burst"}
    return seconds + START_S * len(servers) + 30 * len(closed)


def main() -> None:
    p = common.parser(__doc__ or "")
    p.add_argument("--only", choices=KINDS, nargs="*", default=list(KINDS), help="only these servers")
    p.add_argument("--works", choices=WORKS, nargs="*", default=list(WORKS), help="only these works")
    p.add_argument("--minutes", type=float, default=0.5, help="length of each run with arrivals at a rate")
    p.add_argument("--resume", type=Path, help="file of saved runs to go on with")
    p.add_argument("--head-start", type=float, help="seconds (default: as longtail serve)")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the model")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--vllm-python",
        default=os.environ.get("LONGTAIL_VLLM_PYTHON", str(common.ROOT / ".venv-vllm" / "bin" / "python")),
    )
    args = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped
    args.burst = 24 if args.quick else BURST
    if args.head_start is None:
        from longtail.serve.front import DoorSettings

        args.head_start = DoorSettings().head_start_s
    if not Path(args.vllm_python).exists():
        print(f"no {args.vllm_python}: vLLM is left out (see bench/README.md)", flush=True)
        args.only = [kind for kind in args.only if kind == "engine"]
    runs = plan(args.only, args.works, quick=args.quick)
    about = {name: describe(name, args.seed) for name in dict.fromkeys(run.work for run in runs)}
    settings = {
        "slots": SLOTS, "head_start_s": args.head_start, "burst": args.burst, "minutes": args.minutes,
        "threads": args.threads, "seed": args.seed, "most_prompt_chars": serve_work.MOST_CHARS, "caps": serve_work.CAPS,
    }  # fmt: skip
    saved = Saved(args.resume or Path(tempfile.mkdtemp(prefix="longtail-serve-")) / "runs.jsonl", settings)
    missing = [run for run in runs if run.key not in saved]
    print(f"{len(missing)} of {len(runs)} runs to go, about {estimate_s(missing, about, args) / 60:.0f} minutes")
    print(f"saved in {saved.path}; go on after an interruption with --resume {saved.path}", flush=True)
    began, machine_load = time.perf_counter(), os.getloadavg()[0]
    measure(runs, saved, args)
    print(f"measured in {(time.perf_counter() - began) / 60:.0f} minutes", flush=True)
    report(runs, saved, about, args, settings=settings, load_at_start=round(machine_load, 2))


def describe(name: str, seed: int) -> dict[str, Any]:
    from longtail.lengths.ranker import Ranker

    work = serve_work.load_work(name, seed=seed)
    found = serve_work.about(work, Ranker.load(serve_work.ranker_for(work)).score)
    print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found.items()), flush=True)
    return found


def report(runs: Sequence[Run], saved: Saved, about: dict[str, Any], args, **more: Any) -> None:
    found: figures.Figures = {}
    keys: dict[tuple[str, str, str, str], list[str]] = {}
    for run in (run for run in runs if run.key in saved):
        keys.setdefault((run.kind, run.work, run.arrivals, run.arm), []).append(run.key)
    for case, rounds in keys.items():
        figures.add(found, *case, [saved.runs[key] for key in rounds])
        if case[-1] == "ranked":
            kind, work, arrivals, arm = case
            found[kind][work][arrivals][arm]["unscored"] = sum(saved.unscored[key] for key in rounds)
    figures.show(found)
    of_work = dict.fromkeys((run.kind, run.work) for run in runs if run.process != "burst")
    common.finish(
        "serve",
        quick=args.quick,
        seeds=[args.seed],
        arms=figures.rounded(found),
        targets=figures.targets(found, args.only, args.works),
        works=about,
        no_help=figures.no_help(found),
        capacity_requests_per_s={
            kind: round(capacity(saved, kind, work), 3) for kind, work in of_work if capacity_key(kind, work) in saved
        },
        **more,
    )


if __name__ == "__main__":
    main()
