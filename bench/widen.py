"""Generation time of long-tailed rollouts: data parallel, tensor parallel, and layouts that change on the way.

Lengths are forced: as in `order.py`, answers of 24 models to AlpacaEval prompts are mapped by rank to the quantiles of
DeepSeek-R1's production lengths, scaled so that 5 % are cut off at the token cap. Prompts are short ones (14 tokens on
average). Models: SmolLM2-135M, and a Llama of 30M parameters with random weights and SmolLM2's tokenizer.

Arms: dp2 (two workers on their own), tp2 (one tensor-parallel group of both), threshold (on their own until at most K
samples are left, then one group, as DynRL does), auto (the planner, which knows the cost table and the lengths of
earlier steps), oracle (the same with the true lengths). All arms of a case are pipelines of one `longtail run` on two
real workers and take turns step by step (see `widen_runs.py`); prompts are dealt out as they come (`order: fifo`), and
rewards are all 0, so that nothing is learned but lengths and costs. Generation time is `rollout_s` of a step; the first
step of each run warms up and is left out. The cost tables are measured before, by `longtail profile`.

Then the same over gloo, where a gather costs a millisecond; what a switch costs (see `widen_switch.py`); and how well
the cost table foretells decode steps that are not in it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
import order
import widen_model
import widen_runs
import widen_switch
from widen_runs import ArmStep, Work

CUT, MOST_PROMPT_CHARACTERS = 0.05, 100
STATIC = ("dp2", "tp2")
PARTS = ("profile", "main", "gloo", "switch")
CALIBRATION_SEED = 1000
KV_GIB = 0.2
"""Room for all samples of a worker, of every arm at the same time."""


@dataclass(frozen=True)
class Case:
    """``threshold``: the K of that arm."""

    model: str
    batch: int
    threshold: int
    cap: int = 128

    @property
    def name(self) -> str:
        return f"{self.model}, batch {self.batch}"


CASES = [
    Case("smollm2-135m", 8, threshold=8),
    Case("smollm2-135m", 16, threshold=16),
    Case("smollm2-135m", 32, threshold=32),
    Case("30m", 8, threshold=8),
    Case("30m", 16, threshold=16),
    Case("30m", 32, threshold=32),
]
"""K is the batch: merge as soon as every sample has begun. `--only thresholds` compares it with smaller ones."""
GLOO_CASES = [Case("30m", 8, threshold=8), Case("30m", 16, threshold=16)]
CANDIDATES = {8: (2, 4, 8), 16: (4, 8, 16), 32: (8, 16, 32)}


def drawn_rows(case: Case, seed: int, steps: int) -> list[dict[str, Any]]:
    """Rows of a task for ``steps`` steps: a prompt, and lengths of which the first two are used. Each step's are drawn
    with a seed of its own."""
    prompts = case.batch // widen_runs.GROUP
    source = order.Case(case.name, workers=2, prompts=prompts, slots=case.batch, cut=CUT, cap=case.cap, rows=600)
    rows: list[dict[str, Any]] = []
    for step in range(steps):
        drawn = order.drawn_rows(source, 100 * seed + step)
        rows += [r for r in drawn if len(r["prompt"]) <= MOST_PROMPT_CHARACTERS][:prompts]
    return rows


# -- the arms --------------------------------------------------------------------------------------------------------


class Bench:
    """What all parts share: a folder for everything that is written, with the models and the cost tables."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.costs = folder / "costs"
        self._runs = 0
        widen_model.write_small_model(folder / "30m")

    def _new_folder(self) -> Path:
        self._runs += 1
        return self.folder / f"run{self._runs}"

    def _work(self, case: Case, seed: int, *, steps: int, communicator: str) -> Work:
        return Work(
            model=str(self.folder / "30m") if case.model == "30m" else case.model,
            rows=drawn_rows(case, seed, steps),
            prompts=case.batch // widen_runs.GROUP,
            steps=steps,
            seed=seed,
            rollout={"max_tokens": case.cap, "kv_gib": KV_GIB},
            communicator=communicator,
            costs=self.costs,
        )

    def run(
        self, case: Case, tp: Mapping[str, Any], seed: int, *, steps: int, communicator: str = "auto"
    ) -> dict[str, list[ArmStep]]:
        """All arms (name -> ``rollout.tp``) for ``steps`` steps, without the first one."""
        began = time.perf_counter()
        work = self._work(case, seed, steps=steps, communicator=communicator)
        done = widen_runs.run_in_turns(work, tp, self._new_folder())
        for arm, row in done.items():
            spans = " ".join(f"{s.rollout_s:.2f}" for s in row)
            switches = " ".join(str(len(s.moves)) for s in row)
            print(f"{case.name}, {communicator}, seed {seed}  {arm:12s} {spans} s   switches {switches}", flush=True)
        print(f"  ({time.perf_counter() - began:.0f} s)", flush=True)
        return {arm: row[1:] for arm, row in done.items()}

    def profile(self, model: str, *, communicator: str = "auto", coarse: bool = False) -> dict[str, Any]:
        """`longtail profile` for the largest batch: seconds, and the error on points that are not in the table."""
        began, folder = time.perf_counter(), self._new_folder()
        case = max((c for c in CASES if c.model == model), key=lambda c: c.batch)
        widen_runs.write_job(self._work(case, 0, steps=1, communicator=communicator), {"auto": "auto"}, folder)
        command = [sys.executable, "-m", "longtail", "profile", "jobs.yaml", *(["--coarse"] if coarse else [])]
        env = {**os.environ, "COLUMNS": "200"}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise RuntimeError(f"longtail profile ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        found: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 1)}
        error = re.search(
            r"error of the table\s+([\d.]+)%\s+median of (\d+) steps not in it\s+([\d.]+)%\s+90 % are below",
            done.stdout,
        )
        if error is None and not coarse:
            raise RuntimeError(f"longtail profile tells no error of its table:\n{done.stdout}")
        if error:
            found |= {"median_error": float(error[1]) / 100, "points": int(error[2])}
            found["error_of_90_percent"] = float(error[3]) / 100
        again = re.search(r"([\d.]+)%\s+median difference when the same steps", done.stdout)
        if again:
            found["measured_again"] = float(again[1]) / 100
        print(f"profile of {model}, {communicator}, {'coarse' if coarse else 'full'}: {found}", flush=True)
        print(done.stdout, flush=True)
        return found


def main_part(bench: Bench, cases: Sequence[Case], seeds: Sequence[int], *, steps: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, list[ArmStep]]]] = {case.name: [] for case in cases}
    for seed in seeds:
        for case in cases:
            arms = {"dp2": 1, "tp2": 2, "threshold": f"threshold:{case.threshold}", "auto": "auto", "oracle": "oracle"}
            runs[case.name].append(bench.run(case, arms, seed, steps=steps))
    return {case.name: {"threshold_k": case.threshold, **figures(runs[case.name])} for case in cases}


def gloo_part(bench: Bench, cases: Sequence[Case], seeds: Sequence[int], *, steps: int) -> dict[str, Any]:
    arms = {"dp2": 1, "tp2": 2, "auto": "auto"}
    runs = {case.name: [bench.run(case, arms, s, steps=steps, communicator="gloo") for s in seeds] for case in cases}
    return {name: figures(found) for name, found in runs.items()}


def thresholds(bench: Bench, cases: Sequence[Case], *, steps: int) -> None:
    """Print how long each K takes, on a seed that no figure is from."""
    for case in cases:
        arms = {f"threshold{k}": f"threshold:{k}" for k in CANDIDATES[case.batch]}
        done = bench.run(case, arms, CALIBRATION_SEED, steps=steps)
        print(case.name, {arm: round(sum(s.rollout_s for s in row), 2) for arm, row in done.items()}, flush=True)


# -- figures ---------------------------------------------------------------------------------------------------------


def figures(runs: Sequence[Mapping[str, Sequence[ArmStep]]]) -> dict[str, Any]:
    """Of one case, over seeds (``runs``): for each arm its median and what else it did, and the ratios of arms."""
    totals = {arm: [sum(s.rollout_s for s in run[arm]) for run in runs] for arm in runs[0]}
    best = min(STATIC, key=lambda arm: sum(totals[arm]))
    found: dict[str, Any] = {"best_static": best, "arms": {}, "ratios": {}}
    for arm in runs[0]:
        found["arms"][arm] = arm_figures([step for run in runs for step in run[arm]])
        found["arms"][arm]["over_dp2"] = median_ratio(totals[arm], totals["dp2"])
    found["ratios"]["auto_over_dp2"] = median_ratio(totals["auto"], totals["dp2"])
    found["ratios"]["auto_over_best_static"] = median_ratio(totals["auto"], totals[best])
    for other in ("threshold", "oracle"):
        if other in totals:
            found["ratios"][f"auto_over_{other}"] = median_ratio(totals["auto"], totals[other])
    return found


def arm_figures(steps: Sequence[ArmStep]) -> dict[str, Any]:
    """``predicted_gain_s`` and ``gain_s`` are means over switches; ``rest_error`` is the median of how far off the
    predicted rest of a rollout was."""
    ends = [e for step in steps for e in step.ends if not e.refused]
    predicted = [m.predicted_gain_s for step in steps for m in step.moves if m.predicted_gain_s is not None]
    gained = [e.gain_s for e in ends if e.gain_s is not None]
    errors = [abs(e.predicted_rest_s / e.rest_s - 1) for e in ends if e.predicted_rest_s is not None and e.rest_s]
    found = {
        "generation_s": round(statistics.median(s.rollout_s for s in steps), 3),
        "busy": round(statistics.mean(s.busy for s in steps), 3),
        "in_switches_s": round(statistics.mean(s.switch_s for s in steps), 4),
        "preemptions": sum(s.preemptions for s in steps),
        "switches_per_step": round(statistics.mean(len(s.moves) for s in steps), 2),
        "refused": sum(bool(e.refused) for step in steps for e in step.ends),
    }
    if ends:
        found |= {
            "switch_ms": round(1e3 * statistics.median(e.cost_s for e in ends), 2),
            "moved_mb_per_switch": round(statistics.mean(e.moved_bytes for e in ends) / 1e6, 2),
            "recomputed_tokens": sum(e.recomputed_tokens for e in ends),
        }
    if predicted and gained:
        found |= {
            "predicted_gain_s": round(statistics.mean(predicted), 3),
            "gain_s": round(statistics.mean(gained), 3),
        }
    if errors:
        found["rest_error"] = round(statistics.median(errors), 3)
    return found


def median_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Over seeds, of the sums over steps."""
    return round(statistics.median(a / b for a, b in zip(seconds, base, strict=True)), 4)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.mean(math.log(v) for v in values))


def switch_part(*, quick: bool) -> dict[str, Any]:
    """8 sequences of 512 tokens; seconds, and decode steps of the group over shared memory."""
    found: dict[str, Any] = {}
    for kind in ("shm", "gloo"):
        rounds = {"moves": 2 if quick else 7, "recomputes": 1 if quick or kind == "gloo" else 3}
        found[kind] = widen_switch.measure_switch(kind=kind, sequences=8, tokens=512, **rounds)
        print(f"switch over {kind}: {found[kind]}", flush=True)
    step_s = found["shm"]["decode_step_s"]
    for values in found.values():
        for way in ("moving", "recomputing"):
            values[f"widen_by_{way}_in_steps"] = round(values[f"widen_by_{way}_s"] / step_s, 2)
    return found


# -- report ----------------------------------------------------------------------------------------------------------


def targets_of(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    def worst(part: str, ratio: str) -> tuple[str, float]:
        name = max(results[part], key=lambda case: results[part][case]["ratios"][ratio])
        return name, results[part][name]["ratios"][ratio]

    if "main" in results:
        mean = geometric_mean([case["ratios"]["auto_over_dp2"] for case in results["main"].values()])
        yield common.target("auto_over_dp2, geometric mean over cases", mean, "<= 0.80", mean <= 0.80)
        for ratio, most in (("auto_over_best_static", 1.03), ("auto_over_oracle", 1.05)):
            name, value = worst("main", ratio)
            yield common.target(f"{ratio}, worst case ({name})", value, f"<= {most}", value <= most)
    if "gloo" in results:
        name, value = worst("gloo", "auto_over_dp2")
        yield common.target(f"gloo: auto_over_dp2, worst case ({name})", value, "<= 1.03", value <= 1.03)
    if "switch" in results:
        steps = results["switch"]["shm"]["widen_by_moving_in_steps"]
        yield common.target("widening 8 x 512 tokens, in decode steps", steps, "<= 2", steps <= 2)
    for name, found in results.get("profile", {}).items():
        error = found.get("median_error")
        if error is not None:
            yield common.target(f"median error of the cost table, {name}", error, "<= 0.05", error <= 0.05)


def print_tables(results: Mapping[str, Any]) -> None:
    """As docs/benchmarks.md shows them."""
    for part in ("main", "gloo"):
        if part not in results:
            continue
        arms = [*next(iter(results[part].values()))["arms"]]
        print(
            f"\n| {part} | DP2 | {' | '.join(arms[1:])} | auto / best static |{' auto / oracle |' * ('oracle' in arms)}"
        )
        print("|" + "---|" * (len(arms) + 2 + ("oracle" in arms)))
        for name, case in results[part].items():
            ratios = " | ".join(f"{case['arms'][arm]['over_dp2']:.2f}" for arm in arms[1:])
            more = f" {case['ratios']['auto_over_oracle']:.2f} |" if "oracle" in arms else ""
            best = f"{case['ratios']['auto_over_best_static']:.2f} ({case['best_static']})"
            print(f"| {name} | {case['arms']['dp2']['generation_s']:.2f} s | {ratios} | {best} |{more}")
        print("\n| case | arm | busy | switches a step | a switch | predicted gain | gain | error of the rest |")
        print("|---|---|---|---|---|---|---|---|")
        for name, case in results[part].items():
            for arm, found in case["arms"].items():
                cells = [
                    f"{found['busy']:.0%}", f"{found['switches_per_step']:.1f}", in_words(found, "switch_ms", "ms"),
                    in_words(found, "predicted_gain_s", "s"), in_words(found, "gain_s", "s"),
                    in_words(found, "rest_error", ""),
                ]  # fmt: skip
                print(f"| {name} | {arm} | {' | '.join(cells)} |")
    if "switch" in results:
        print("\n| communicator | widen by moving | in decode steps | by recomputing | in steps | back | moved |")
        print("|---|---|---|---|---|---|---|")
        for kind, s in results["switch"].items():
            cells = [
                f"{1e3 * s['widen_by_moving_s']:.0f} ms", f"{s['widen_by_moving_in_steps']:.1f}",
                f"{1e3 * s['widen_by_recomputing_s']:.0f} ms", f"{s['widen_by_recomputing_in_steps']:.0f}",
                f"{1e3 * s['narrow_by_moving_s']:.0f} ms", f"{s['moved_bytes'] / 1e6:.0f} MB",
            ]  # fmt: skip
            print(f"| {kind} | {' | '.join(cells)} |")
    print()


def in_words(found: Mapping[str, Any], key: str, unit: str) -> str:
    return f"{found[key]:.3g} {unit}".strip() if key in found else ""


def main() -> None:
    p = common.parser(__doc__ or "")
    p.add_argument("--runs", type=int, default=1, help="runs of each case")
    p.add_argument("--steps", type=int, default=4, help="steps of a run, each with its own seed; the first warms up")
    p.add_argument("--only", choices=[*PARTS, "thresholds"], nargs="*", help="only these parts")
    p.add_argument("--models", choices=["smollm2-135m", "30m"], nargs="*", help="only these models")
    args = p.parse_args()
    load, began = os.getloadavg()[0], time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="longtail-widen-") as folder:
        results = measure(Bench(Path(folder)), args)
    print_tables(results)
    runs, steps = (1, 3) if args.quick else (args.runs, args.steps)
    common.finish(
        "widen", quick=args.quick or bool(args.only or args.models),
        seeds=[100 * run + step for run in range(runs) for step in range(1, steps)],
        arms=results, targets=list(targets_of(results)), steps=steps, group_size=widen_runs.GROUP, cut=CUT,
        cap=CASES[0].cap, load_at_start=round(load, 2), seconds=round(time.perf_counter() - began),
    )  # fmt: skip


def measure(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """The results of each part."""
    parts = args.only or list(PARTS)
    seeds = range(1 if args.quick else args.runs)
    steps = 3 if args.quick else args.steps
    models = args.models or (["30m"] if args.quick else ["smollm2-135m", "30m"])
    cases = [case for case in CASES if case.model in models][: 1 if args.quick else None]
    results: dict[str, Any] = {}
    if "switch" in parts:
        results["switch"] = switch_part(quick=args.quick)
    if set(parts) & {"profile", "main", "thresholds"}:
        results["profile"] = {model: bench.profile(model, coarse=args.quick) for model in models}
    if "thresholds" in parts:
        thresholds(bench, cases, steps=steps)
    if "main" in parts:
        results["main"] = main_part(bench, cases, seeds, steps=steps)
    if "gloo" in parts:
        gloo = GLOO_CASES[: 1 if args.quick else None]
        results["profile"] = results.get("profile", {}) | {
            f"{model}, gloo": bench.profile(model, communicator="gloo", coarse=True)
            for model in sorted({case.model for case in gloo})
        }
        results["gloo"] = gloo_part(bench, gloo, seeds[:2], steps=steps)
    print(json.dumps(results, indent=1), flush=True)
    return results


if __name__ == "__main__":
    main()
