"""Several pipelines on the same two workers: in turns, by stages, side by side, and as the planner decides.

Lengths are forced: as in `order.py`, answers of 24 models to AlpacaEval prompts are mapped by rank to the quantiles of
DeepSeek-R1's production lengths, scaled so that a given share is cut off at the token cap (1 % is the heaviest tail).
Prompts are short ones. All samples are trained on. Models: the built-in tiny one, and SmolLM2-135M.

Arms, one `longtail run` each, with the same jobs and seeds:

* serial: whole steps alternate, as separate jobs on the same machine would. Data parallel, and once more with static
  tensor parallelism over both workers (serial tp2).
* stages: all workers go to one pipeline for a rollout, or for a training; while it waits for rewards another may have
  them. With the better of the two layouts.
* greedy: everything side by side everywhere; tails are merged when few samples are left.
* look-ahead: the planner, without widening.
* all: the planner with all four moves.

Each pipeline also runs alone (with widening), for its slowdown. Throughput is samples per second from the moment when
all pipelines are loaded to the end of the last one. The bound is the least worker-seconds of the same work by the
measured cost table, with the samples of each step decoded together and no worker idle, over the number of workers.

A machine whose speed changes from minute to minute would decide such a comparison. So serial, stages and all four moves
are run several times, in turn, and medians compared; and each time is also given at the same pace: divided by what
training took per token in that run, over the median of the case's runs; the bound by what the table says of that.
What was learned (losses, rewards, final weights) must be the same bits in every arm: the bench fails if not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
import multiplex_bound
import multiplex_runs
import order
from multiplex_runs import GROUP, Job, Outcome

MOST_PROMPT_CHARACTERS = 60
WORKERS = 2
MAX_SLOWDOWN = 2.5
"""Of each pipeline; of the three in one case 3.5."""

SERIAL = {"corun": "serial", "merge": "off", "widen": "off"}
STAGES = {**SERIAL, "corun": "stages"}
GREEDY = {"corun": "greedy", "merge": "auto", "widen": "auto"}
LOOKAHEAD = {"corun": "auto", "merge": "auto", "widen": "off"}
ALL = {"corun": "auto", "merge": "auto", "widen": "auto"}


@dataclass(frozen=True)
class Spec:
    """A pipeline's work: ``cut`` is the share of samples that reach ``cap`` tokens."""

    model: str
    prompts: int
    cap: int
    cut: float
    steps: int
    kv_gib: float
    micro_tokens: int = 1024


TINY = Spec("tiny", prompts=8, cap=512, cut=0.05, steps=6, kv_gib=0.4)
HEAVY = Spec("tiny", prompts=6, cap=800, cut=0.01, steps=6, kv_gib=0.5)
SMOL = Spec("smollm2-135m", prompts=4, cap=128, cut=0.05, steps=3, kv_gib=0.3)


@dataclass(frozen=True)
class Case:
    """``rounds``: how often the arms are run that are compared."""

    name: str
    specs: tuple[Spec, ...]
    rounds: int = 3

    def jobs(self) -> list[Job]:
        most = MAX_SLOWDOWN if len(self.specs) == 2 else MAX_SLOWDOWN + len(self.specs) - 2
        return [job(f"{chr(ord('a') + i)}", spec, seed=i, max_slowdown=most) for i, spec in enumerate(self.specs)]


CASES = [
    Case("tiny + tiny, heaviest tail", (HEAVY, HEAVY)),
    Case("tiny + tiny", (TINY, TINY)),
    Case("three tiny", (TINY, TINY, TINY)),
    Case("tiny + SmolLM2", (replace(TINY, steps=12), SMOL), rounds=2),
    Case("SmolLM2 + SmolLM2", (SMOL, SMOL), rounds=2),
]


def job(name: str, spec: Spec, *, seed: int, max_slowdown: float) -> Job:
    source = order.Case(name, workers=WORKERS, prompts=spec.prompts, slots=256, cut=spec.cut, cap=spec.cap, rows=2000)
    rows = [r for r in order.drawn_rows(source, seed) if len(r["prompt"]) <= MOST_PROMPT_CHARACTERS]
    return Job(
        name=name, model=spec.model, rows=rows[: spec.prompts * spec.steps], prompts=spec.prompts, steps=spec.steps,
        seed=seed, cap=spec.cap, kv_gib=spec.kv_gib, micro_tokens=spec.micro_tokens,
        extra={"max_slowdown": max_slowdown},
    )  # fmt: skip


class Bench:
    """A folder for everything that is written, and the cost tables, by default in it."""

    def __init__(self, folder: Path, costs: Path | None) -> None:
        self.folder, self.costs = folder, costs.absolute() if costs else folder / "costs"
        self._runs = 0
        self._alone: dict[tuple[Any, ...], Outcome] = {}

    def run(self, title: str, jobs: Sequence[Job], policy: Mapping[str, Any], tp: Any) -> Outcome:
        self._runs += 1
        began = time.perf_counter()
        done = multiplex_runs.run(
            jobs, self.folder / f"run{self._runs}", policy=policy, tp=tp, costs=self.costs, workers=WORKERS
        )
        moves = {name: made for name, made in done.moves.items() if made}
        print(
            f"{title:44s} {done.seconds:7.2f} s  busy {done.busy:.0%}  moves {moves}  "
            f"({time.perf_counter() - began:.0f} s in all)",
            flush=True,
        )
        return done

    def alone(self, job: Job) -> Outcome:
        key = (job.model, job.seed, job.prompts, job.cap, job.steps, len(job.rows))
        if key not in self._alone:
            self._alone[key] = self.run(f"  {job.name} ({job.model}) alone", [job], ALL, "auto")
        return self._alone[key]

    def profile(self, jobs: Sequence[Job], *, coarse: bool) -> None:
        """`longtail profile`: a table for each model, and how much they slow each other down."""
        began, folder = time.perf_counter(), self.folder / f"profile{self._runs}"
        multiplex_runs.write(jobs, folder, policy=ALL, tp="auto", costs=self.costs, workers=WORKERS)
        command = [sys.executable, "-m", "longtail", "profile", "jobs.yaml", *(["--coarse"] if coarse else [])]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"longtail profile ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        print(f"profiles: {time.perf_counter() - began:.0f} s", flush=True)


def measure_case(bench: Bench, case: Case) -> dict[str, Any]:
    jobs = case.jobs()
    print(f"\n{case.name}", flush=True)
    alone = {job.name: bench.alone(job) for job in jobs}
    arms: dict[str, tuple[Mapping[str, Any], Any]] = {"serial": (SERIAL, 1), "serial tp2": (SERIAL, 2)}
    runs = {name: [bench.run(f"  {name}", jobs, policy, tp)] for name, (policy, tp) in arms.items()}
    best_serial = min(runs, key=lambda name: runs[name][0].seconds)
    best_tp = arms[best_serial][1]
    others: dict[str, tuple[Mapping[str, Any], Any]] = {
        "stages": (STAGES, best_tp),
        "greedy": (GREEDY, "auto"),
        "look-ahead": (LOOKAHEAD, "auto"),
        "all": (ALL, "auto"),
    }
    runs |= {name: [bench.run(f"  {name}", jobs, policy, tp)] for name, (policy, tp) in others.items()}
    # Those that are compared, again, in the other order each time.
    arms |= others
    again = [name for name in arms if name in {"serial", best_serial, "stages", "all"}]
    for number in range(2, case.rounds + 1):
        again.reverse()
        for name in again:
            runs[name].append(bench.run(f"  {name}, round {number}", jobs, *arms[name]))
    check_learned(case, {**runs, **{f"{name} alone": [done] for name, done in alone.items()}})
    update_s = {name: statistics.mean(m["update_s"] for m in done.metrics[name]) for name, done in alone.items()}
    bound = multiplex_bound.least_s(jobs, bench.costs, update_s, WORKERS)
    samples = sum(job.samples for job in jobs)
    usual = usual_train_token_s([*(done for found in runs.values() for done in found), *alone.values()])
    pace = {name: [pace_of(done.train_token_s, usual) for done in found] for name, found in runs.items()}
    paced_runs = {name: [r.seconds / p for r, p in zip(runs[name], pace[name], strict=True)] for name in runs}
    seconds = {name: statistics.median(done.seconds for done in found) for name, found in runs.items()}
    paced = {name: statistics.median(found) for name, found in paced_runs.items()}
    tables = {job.name: multiplex_bound.table_of(job.model, bench.costs).train_token_s for job in jobs}
    paced_bound = bound / pace_of(tables, usual)
    return {
        "samples": samples,
        "bound_s": round(bound, 2),
        "paced_bound_s": round(paced_bound, 2),
        "best_static_tp": best_tp,
        "alone": {name: figures([done], None) for name, done in alone.items()},
        "arms": {
            name: {
                **figures(found, alone),
                "runs_s": [round(done.seconds, 2) for done in found],
                "samples_per_s": round(samples / seconds[name], 3),
                **ratios(name, seconds, bound),
                "pace": [round(p, 4) for p in pace[name]],
                "paced": {
                    "seconds": round(paced[name], 2),
                    "runs_s": [round(s, 2) for s in paced_runs[name]],
                    **ratios(name, paced, paced_bound),
                },
            }
            for name, found in runs.items()
        },
    }


def ratios(arm: str, seconds: Mapping[str, float], bound_s: float) -> dict[str, float]:
    """How many times the throughput of others, of all ``seconds`` by arm."""
    return {
        "over_bound": round(bound_s / seconds[arm], 4),
        "over_serial": round(seconds["serial"] / seconds[arm], 4),
        "over_best_serial": round(min(seconds["serial"], seconds["serial tp2"]) / seconds[arm], 4),
        "over_stages": round(seconds["stages"] / seconds[arm], 4),
    }


def usual_train_token_s(runs: Sequence[Outcome]) -> dict[str, float]:
    """Of each pipeline, in the median run."""
    names = {name for done in runs for name in done.train_token_s}
    return {n: statistics.median(d.train_token_s[n] for d in runs if n in d.train_token_s) for n in sorted(names)}


def pace_of(train_token_s: Mapping[str, float], usual: Mapping[str, float]) -> float:
    """How many times longer than usual training took."""
    return statistics.fmean(seconds / usual[name] for name, seconds in train_token_s.items())


def check_learned(case: Case, runs: Mapping[str, Sequence[Outcome]]) -> None:
    """Raises ``RuntimeError`` if an arm learned something else than another, or than in another round."""
    for name in {name for found in runs.values() for done in found for name in done.learned}:
        digests = {
            f"{arm}, {i}": done.learned[name]
            for arm, found in runs.items() for i, done in enumerate(found) if name in done.learned
        }  # fmt: skip
        if len(set(digests.values())) > 1:
            raise RuntimeError(f"{case.name}: what {name} learned differs between arms: {digests}")


def figures(runs: Sequence[Outcome], alone: Mapping[str, Outcome] | None) -> dict[str, Any]:
    """Medians of ``runs``; moves and planning are those of the last."""
    done = runs[-1]
    step_s = {name: statistics.median(statistics.mean(r.steps_s[name]) for r in runs) for name in done.steps_s}
    found: dict[str, Any] = {
        "seconds": round(statistics.median(r.seconds for r in runs), 2),
        "busy": round(statistics.median(r.busy for r in runs), 4),
        "busy_later": round(statistics.median(r.busy_later for r in runs), 4),
        "step_s": {name: round(seconds, 3) for name, seconds in step_s.items()},
        "moves": done.moves,
    }
    if alone is not None:
        found["slowdown"] = {
            name: round(seconds / statistics.mean(alone[name].steps_s[name]), 3) for name, seconds in step_s.items()
        }
    if done.planned:
        found["planning_ms"] = {
            "median": round(1e3 * statistics.median(p.duration_s for p in done.planned), 2),
            "max": round(1e3 * max(p.duration_s for p in done.planned), 2),
        }
        found["held"] = round(statistics.mean(p.mode == "hold" for p in done.planned), 3)
    predicted = [abs(math.log(m["slowdown"] * p)) for r in runs for m, p in predictions(r)]
    if predicted:
        found["prediction_error"] = round(statistics.median(predicted), 3)
    return found


def predictions(done: Outcome) -> Iterator[tuple[dict[str, float], float]]:
    """Each step's metrics, with the mean speed that was predicted for its pipeline meanwhile."""
    for name, steps in done.metrics.items():
        rates = [p.rates[name] for p in done.planned if p.rates.get(name)]
        for metrics in steps:
            if rates and metrics.get("slowdown"):
                yield metrics, statistics.mean(rates)


# -- report ----------------------------------------------------------------------------------------------------------


def targets_of(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each ratio of times as measured, and at the same pace."""

    def of(ratio: str, *, paced: bool) -> dict[str, float]:
        found = {name: case["arms"]["all"] for name, case in results.items()}
        return {name: (arm["paced"] if paced else arm)[ratio] for name, arm in found.items()}

    def least(values: Mapping[str, float]) -> tuple[str, float]:
        name = min(values, key=lambda n: values[n])
        return name, values[name]

    for paced, pace in ((False, ""), (True, ", at the same pace")):
        worst, value = least(of("over_bound", paced=paced))
        yield common.target(
            f"all four moves over the bound, worst case ({worst}){pace}", value, ">= 0.92", value >= 0.92
        )
        for ratio, goal, words in (("over_serial", 1.2, "serial"), ("over_stages", 1.1, "stage time-slicing")):
            mean = math.exp(statistics.mean(math.log(v) for v in of(ratio, paced=paced).values()))
            yield common.target(f"all four moves over {words}, mean of cases{pace}", mean, f">= {goal}", mean >= goal)
        if CASES[0].name in results:
            value = of("over_serial", paced=paced)[CASES[0].name]
            yield common.target(f"all four moves over serial, heaviest tail{pace}", value, ">= 1.35", value >= 1.35)
        for ratio, words in (("over_serial", "serial"), ("over_best_serial", "the best serial")):
            worst, value = least(of(ratio, paced=paced))
            yield common.target(f"all four moves over {words}, worst case ({worst}){pace}", value, ">= 1", value >= 1)
    slowdowns = {
        f"{name}, {p}": s / (MAX_SLOWDOWN + len(case["alone"]) - 2)
        for name, case in results.items() for p, s in case["arms"]["all"]["slowdown"].items()
    }  # fmt: skip
    worst = max(slowdowns, key=lambda n: slowdowns[n])
    yield common.target(f"slowdown over max_slowdown, worst ({worst})", slowdowns[worst], "<= 1", slowdowns[worst] <= 1)
    for key, when in (("busy", ""), ("busy_later", ", once each has done a step")):
        worst, value = least({name: case["arms"]["all"][key] for name, case in results.items()})
        name = f"workers busy while there is work for all{when}, worst ({worst})"
        yield common.target(name, value, ">= 0.95", value >= 0.95)
    made = [moves for case in results.values() for run in case["alone"].values() for moves in run["moves"].values()]
    merged = sum(moves.get("merge", 0) + moves.get("place", 0) for moves in made)
    widened = sum(moves.get("widen", 0) for moves in made)
    yield common.target("merges of pipelines alone", merged, "== 0", merged == 0)
    yield common.target("widenings of pipelines alone", widened, "> 0", widened > 0)


def print_tables(results: Mapping[str, Any]) -> None:
    """As docs/benchmarks.md shows them."""
    arms = [*next(iter(results.values()))["arms"]]
    ratios = ("over_bound", "over_serial", "over_best_serial", "over_stages")
    for pace in (False, True):
        print(f"\n{'at the same pace' if pace else 'as measured'}")
        print(f"\n| case | bound | {' | '.join(arms)} | {' | '.join(f'all / {r[5:]}' for r in ratios)} |")
        print("|" + "---|" * (len(arms) + 6))
        for name, case in results.items():
            found = {arm: case["arms"][arm]["paced"] if pace else case["arms"][arm] for arm in arms}
            cells = [f"{case['paced_bound_s' if pace else 'bound_s']:.1f} s"]
            cells += [f"{found[arm]['seconds']:.1f} s" for arm in arms]
            cells += [f"{found['all'][ratio]:.2f}" for ratio in ratios]
            print(f"| {name} | {' | '.join(cells)} |")
    heads = (
        "case",
        "arm",
        "pace",
        "busy",
        "busy later",
        "slowdowns",
        "moves",
        "prediction error",
        "planning, median and most",
    )
    print(f"\n| {' | '.join(heads)} |")
    print("|" + "---|" * len(heads))
    for name, case in results.items():
        for arm, found in case["arms"].items():
            slow = ", ".join(f"{p} {s:.2f}" for p, s in found["slowdown"].items())
            totals: dict[str, int] = {}
            for made in found["moves"].values():
                for kind, count in made.items():
                    totals[kind] = totals.get(kind, 0) + count
            moves = ", ".join(f"{kind} {count}" for kind, count in totals.items()) or "-"
            error = f"{found['prediction_error']:.0%}" if "prediction_error" in found else "-"
            ms = found.get("planning_ms")
            planning = f"{ms['median']:.1f} ms, {ms['max']:.0f} ms" if ms else "-"
            cells = [
                name,
                arm,
                ", ".join(f"{p:.2f}" for p in found["pace"]),
                f"{found['busy']:.0%}",
                f"{found['busy_later']:.0%}",
                slow,
                moves,
                error,
                planning,
            ]
            print(f"| {' | '.join(cells)} |")
    print()


def main() -> None:
    p = common.parser(__doc__ or "")
    p.add_argument("--cases", type=int, nargs="*", help="only these cases, by number from 0")
    p.add_argument(
        "--costs", type=Path, help="folder of cost tables that were measured before, not to be measured again"
    )
    args = p.parse_args()
    load, began = os.getloadavg()[0], time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="longtail-multiplex-") as folder:
        results = measure(Bench(Path(folder), args.costs), args)
    print_tables(results)
    common.finish(
        "multiplex", quick=args.quick or bool(args.cases), seeds=[0, 1, 2], arms=results,
        targets=list(targets_of(results)), group_size=GROUP, load_at_start=round(load, 2),
        seconds=round(time.perf_counter() - began),
    )  # fmt: skip


def measure(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    cases = [CASES[i] for i in args.cases] if args.cases else CASES[1:2] if args.quick else CASES
    if args.quick:
        cases = [Case(c.name, tuple(replace(s, steps=2) for s in c.specs), rounds=1) for c in cases]
    by_model = {job.model: job for case in cases for job in case.jobs()}
    if args.costs is None:
        bench.profile([*by_model.values()], coarse=args.quick)
    results = {}
    for case in cases:
        results[case.name] = measure_case(bench, case)
        print(json.dumps({case.name: results[case.name]}), flush=True)  # so that a long run that is cut off leaves some
    return results


if __name__ == "__main__":
    main()
