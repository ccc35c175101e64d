"""Makespan of long-tailed rollout batches: first come first served, ranked, with history, and with the truth.

Lengths over several epochs are real, jointly: the answers of 24 models to one AlpacaEval prompt stand for samples of
that prompt (8 in each of 3 epochs, models drawn anew for every prompt and seed), mapped by rank to the quantiles of
DeepSeek-R1's production lengths, scaled so that a given share is cut off at the token cap. Ranks are among all answers
of all models (pooled), so that a model's wordiness is noise within a prompt; in the cases that say "ranked by model"
they are among the answers of one model, so that all samples of a prompt have one distribution. A second source are
lengths that a trained model really produced: the built-in tiny model on Collatz chains, recorded in a run.

Arms: fifo (dealt out as they come), blind (late binding, nothing known of any prompt), ranked (the built-in ranker, no
history), history (ranker and earlier epochs: `order: ranked` as it is), oracle (true lengths). On two real workers
ranked is the first epoch of a run, history the later ones; blind and ranked beyond that exist only in simulation, which
runs the same controller and planner on simulated workers. A share is the part of the oracle's gain over fifo that an
arm reaches, over all seeds and the epochs from the second on. Makespan is `rollout_s` of a step.

`means` is no arm but a ceiling: what the planner makes of the true mean length of every prompt's samples.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

DATA = Path(os.environ.get("LONGTAIL_DATA", common.ROOT.parent / "shared" / "data"))
GROUP, EPOCHS = 8, 3
COLLATZ = {"max_n": 60}
COLLATZ_STEPS, COLLATZ_PROMPTS = 6, 32


@dataclass(frozen=True)
class Case:
    """``cut``: the share of answers that reach ``cap`` tokens. ``rows`` prompts make an epoch, ``prompts`` a step.
    ``by_model``: answers are ranked among those of their model, not among all."""

    name: str
    workers: int
    prompts: int
    slots: int
    cut: float = 0.01
    cap: int = 8192
    rows: int = 512
    by_model: bool = False


SIMULATED = [
    Case("8 workers, 4 waves", workers=8, prompts=128, slots=32),
    Case("8 workers, 8 waves", workers=8, prompts=512, slots=64),
    Case("64 workers, 4 waves", workers=64, prompts=512, slots=16),
    Case("64 workers, 1 wave", workers=64, prompts=512, slots=64),
    Case("8 workers, 4 waves, 5 % cut off", workers=8, prompts=128, slots=32, cut=0.05),
    Case("8 workers, 8 waves, 5 % cut off", workers=8, prompts=512, slots=64, cut=0.05),
    Case("64 workers, 4 waves, 5 % cut off", workers=64, prompts=512, slots=16, cut=0.05),
]
SIMULATED += [
    replace(case, name=f"{case.name}, ranked by model", by_model=True) for case in SIMULATED[:1] + SIMULATED[3:]
]
REAL = [
    Case("2 workers, 8 waves, 5 % cut off", workers=2, prompts=32, slots=16, cut=0.05, cap=256, rows=32),
    Case("2 workers, 2 waves, 5 % cut off", workers=2, prompts=8, slots=16, cut=0.05, cap=256, rows=32),
]


# -- lengths ---------------------------------------------------------------------------------------------------------


@cache
def alpaca(by_model: bool) -> tuple[list[str], np.ndarray]:
    """Prompts, and the rank in (0, 1) of each of 24 answers [prompts, 24] among all, or among those of its model."""
    path = DATA / "alpaca_eval_lengths.jsonl"
    if not path.exists():
        raise SystemExit(f"{path} is missing: set LONGTAIL_DATA to the folder that holds alpaca_eval_lengths.jsonl.")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    models = sorted(rows[0]["words"])
    words = np.array([[row["words"][m] for m in models] for row in rows], float)
    among = words if by_model else words.reshape(-1, 1)
    place = among.argsort(axis=0, kind="stable").argsort(axis=0, kind="stable")
    return [row["prompt"] for row in rows], ((place + 0.5) / len(among)).reshape(words.shape)


def drawn_rows(case: Case, seed: int) -> list[dict[str, Any]]:
    """Rows of a task: a prompt and 24 lengths, which three epochs of 8 samples use up."""
    prompts, ranks = alpaca(case.by_model)
    rng = np.random.default_rng(seed)
    record = json.loads((DATA / "traces" / "deepseek_r1_output_quantiles.json").read_text())
    quantiles = np.array(record["output_tokens_quantiles"], float)
    grid = np.linspace(0, 1, len(quantiles))
    scale = case.cap / np.interp(1 - case.cut, grid, quantiles)
    lengths = np.clip(np.round(scale * np.interp(ranks, grid, quantiles)), 1, case.cap).astype(int)
    # The tiny model reads characters and has a context of 1,024.
    short = [i for i in rng.permutation(len(prompts)) if len(prompts[i]) <= 600][: case.rows]
    return [{"prompt": prompts[i], "lengths": rng.permutation(lengths[i]).tolist()} for i in short]


# -- real workers ----------------------------------------------------------------------------------------------------


def write_task(rows: list[dict[str, Any]], folder: Path) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "flat.py").write_text("def flat(prompts, completions, **columns):\n    return [0.0] * len(completions)\n")
    return "rows.jsonl"


def run_real(order: str, rows: list[dict[str, Any]], case: Case, *, steps: int, seed: int) -> list[dict[str, float]]:
    """The metrics of each step of a real `longtail run` on the tiny model; rewards are all 0: nothing to train."""
    rollout = {
        "prompts": case.prompts, "max_tokens": case.cap, "max_running": case.slots,
        "order": order, "forced_lengths": "lengths", "prompt_format": "plain",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        job = {"task": write_task(rows, Path(folder)), "reward": "flat:flat", "rollout": rollout, "steps": steps}
        return [e.metrics for e in run_job(job, Path(folder), case.workers, seed) if e.kind == "step"]


def run_job(job: dict[str, Any], folder: Path, workers: int, seed: int) -> list[Any]:
    """All events of a run on the tiny model, in a process tree of its own."""
    import subprocess

    import yaml

    from longtail.observe.store import read_events

    common_keys = {
        "model": "tiny", "seed": seed, "algorithm": {"group_size": GROUP}, "train": {"lr": 1e-9},
        "checkpoint": {"every": 10_000},
    }  # fmt: skip
    jobs = {"workers": workers, "pipelines": {"job": {**common_keys, **job}}}
    (folder / "jobs.yaml").write_text(yaml.safe_dump(jobs))
    command = [sys.executable, "-m", "longtail", "run", "jobs.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"longtail run ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return list(read_events(folder / "runs" / "jobs"))


def record_collatz(seed: int, *, steps: int) -> list[dict[str, Any]]:
    """Rows for a task that replays a run of the tiny model on Collatz chains: one for each prompt of each step."""
    from longtail.rl.tasks import load_task

    rollout = {"prompts": COLLATZ_PROMPTS, "max_tokens": 320}
    job = {"task": "collatz", "task_args": COLLATZ, "rollout": rollout, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        events = run_job(job, Path(folder), 2, seed)
    task = load_task("collatz", COLLATZ, seed=seed, base=Path())
    rows = [{"prompt": task.example(i).prompt, "lengths": [0] * GROUP} for i in range(steps * COLLATZ_PROMPTS)]
    for event in events:
        if event.kind == "sequence":
            rows[event.step * COLLATZ_PROMPTS + event.prompt]["lengths"][event.sample] = event.tokens
    return rows


# -- simulated workers -----------------------------------------------------------------------------------------------


class Rows:
    """The rows as a task, and a tokenizer that counts 4 characters as a token."""

    name, score = "rows", None
    end_token_ids = (0,)

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        from longtail.rl.tasks import Example

        self.size = len(rows)
        self._examples = [Example(prompt=row["prompt"], columns={"lengths": row["lengths"]}) for row in rows]

    def example(self, index: int):
        return self._examples[index]

    def encode_prompt(self, prompt, *, chat=None) -> np.ndarray:
        return np.zeros(max(1, len(prompt) // 4), np.int32)


def gpu_costs():
    """Of the size that Llama-3-8B in bfloat16 has on one H100: weights 16 GB and KV 128 KiB a token at 3.35 TB/s plus
    2 ms of overhead, 30 us of compute and sampling a sequence, 500 TFLOP/s for prefill and 300 for training."""
    from longtail.costs.decode import DecodeCosts
    from longtail.costs.worker import WorkerCosts

    decode = DecodeCosts(base_s=6.8e-3, per_sequence_s=3e-5, per_context_token_s=4e-8, per_prompt_token_s=3.2e-5)
    return WorkerCosts(decode=decode, per_train_token_s=1.6e-4, update_s=0.5)


class Collector:
    """A sink that keeps the metrics of steps."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def write(self, event) -> None:
        if event.kind == "step":
            self.steps.append(event.metrics)

    def close(self) -> None:
        pass


def run_simulated(arm: str, rows: list[dict[str, Any]], case: Case, *, steps: int, seed: int) -> list[dict[str, float]]:
    """The metrics of each step of the same controller on simulated workers."""
    from longtail.cluster.simulated import SimulatedCluster
    from longtail.core.config import Pipeline
    from longtail.lengths.ranker import Ranker
    from longtail.runtime.controller import Controller
    from longtail.runtime.instant_rewards import InstantRewards
    from longtail.runtime.plan import PipelinePlan

    rollout = {
        "prompts": case.prompts, "max_tokens": case.cap, "max_running": case.slots, "forced_lengths": "lengths",
        "order": arm if arm in ("fifo", "oracle") else "ranked",
    }  # fmt: skip
    config = Pipeline.model_validate(
        {
            "model": "none", "task": "rows", "seed": seed, "steps": steps, "rollout": rollout,
            "algorithm": {"group_size": GROUP}, "train": {"micro_tokens": 65536}, "checkpoint": {"every": 10_000},
        }
    )  # fmt: skip
    task, costs, sink = Rows(rows), gpu_costs(), Collector()
    cluster = SimulatedCluster(case.workers, costs=lambda worker, pipeline: costs, lengths=lambda *_: ())
    with tempfile.TemporaryDirectory() as folder:
        plan = PipelinePlan(
            name="job", config=config, model_folder=Path(folder), folder=Path(folder) / "job", kv_blocks=1, task=task,
            tokenizer=task, ranker=Ranker.load() if arm in ("ranked", "history") else None,
        )  # fmt: skip
        controller = Controller(cluster, [plan], rewards=InstantRewards(), sink=sink, clock=cluster.clock)
        if arm in ("blind", "ranked"):
            controller.drivers["job"].order.remember(0)
        controller.run()
    return sink.steps


def share_with_true_means(rows: list[dict[str, Any]], case: Case, *, steps: int, seed: int) -> tuple[float, float]:
    """(gain, the oracle's gain) in seconds, by the planner's own reckoning, if every prompt's mean were known."""
    from longtail.planner.makespan import makespan_s
    from longtail.planner.order import Work, fifo, place
    from longtail.rl.tasks import prompt_indices

    task, costs = Rows(rows), [gpu_costs().decode] * case.workers
    table = np.array([[c.base_s, c.per_sequence_s, c.per_context_token_s, c.per_prompt_token_s] for c in costs])

    def seconds(placement, truth: Work) -> float:
        queue = np.array([r for q in placement.queues for r in q], np.int64)
        bounds = np.append(0, np.cumsum([len(q) for q in placement.queues]))
        expected = np.array(placement.expected_tokens)
        arguments = (
            truth.first,
            truth.prompt_tokens,
            expected,
            queue,
            bounds,
            placement.late,
            case.slots,
            GROUP,
            table,
        )
        return makespan_s(truth.lengths[0], *arguments)

    gain = most = 0.0
    per_epoch = len(rows) // case.prompts
    for step in range(per_epoch, steps):
        indices = prompt_indices(task, step=step, prompts=case.prompts, seed=seed)
        epoch = step * case.prompts // len(rows)
        lengths = np.array([rows[i]["lengths"][epoch * GROUP :][:GROUP] for i in indices])
        samples = np.full(len(indices), GROUP)
        prompt_tokens = np.array([len(task.encode_prompt(rows[i]["prompt"])) for i in indices])
        truth = Work.known(samples, prompt_tokens, lengths.ravel())
        means = np.repeat(np.maximum(1, lengths.mean(axis=1).round().astype(int)), GROUP)
        arrival = seconds(fifo(len(indices), case.workers), truth)
        by_mean = place(Work.known(samples, prompt_tokens, means), costs=costs, slots=case.slots)
        oracle = place(truth, costs=costs, slots=case.slots)
        gain += arrival - seconds(by_mean, truth)
        most += arrival - seconds(oracle, truth)
    return gain, most


# -- the experiment --------------------------------------------------------------------------------------------------


def compare(
    case: Case, seeds, source, run, arms: tuple[str, ...], *, steps: int, first: int, rounds: int = 1
) -> dict[str, Any]:
    """Every arm with every seed; ``first`` steps make the first epoch. Of several rounds the faster one counts, step by
    step: they do the same work, and what else the machine does can only slow it down."""
    steps_of: dict[str, list[list[dict[str, float]]]] = {arm: [] for arm in arms}
    spread: list[float] = []
    for seed in seeds:
        rows = source(seed)
        runs: dict[str, list[list[dict[str, float]]]] = {arm: [] for arm in arms}
        for arm in [arm for _ in range(rounds) for arm in arms]:
            began = time.perf_counter()
            runs[arm].append(run(arm, rows, case, steps=steps, seed=seed))
            spans = " ".join(f"{m['rollout_s']:.1f}" for m in runs[arm][-1])
            print(f"{case.name}  seed {seed}  {arm:8s} {spans} s   ({time.perf_counter() - began:.0f} s)", flush=True)
        for arm, repeated in runs.items():
            by_step = [sorted(step, key=lambda m: m["rollout_s"]) for step in zip(*repeated, strict=True)]
            steps_of[arm].append([step[0] for step in by_step])
            spread += [step[-1]["rollout_s"] / step[0]["rollout_s"] for step in by_step]
    found = summary(steps_of, first=first)
    if rounds > 1:
        found["noise"] = {"slower_over_faster_round": round(statistics.median(spread), 3)}
    return found


def summary(steps_of: dict[str, list[list[dict[str, float]]]], *, first: int) -> dict[str, Any]:
    spans = {arm: np.array([[m["rollout_s"] for m in run] for run in runs]) for arm, runs in steps_of.items()}
    result: dict[str, Any] = {}
    for arm, seconds in spans.items():
        early, late = slice(None, first), slice(first, None)
        result[arm] = {
            "makespan_s": round(float(np.median(seconds[:, late].mean(axis=1))), 3),
            "first_epoch_over_fifo": median_ratio(seconds[:, early], spans["fifo"][:, early]),
            "later_over_fifo": median_ratio(seconds[:, late], spans["fifo"][:, late]),
            "first_epoch_share": share(spans, arm, early),
            "later_share": share(spans, arm, late),
            "idle_s": round(float(np.mean([m["rollout_idle_s"] for run in steps_of[arm] for m in run[first:]])), 3),
        }
        taus = [m["length_tau"] for run in steps_of[arm] for m in run[first:] if "length_tau" in m]
        if taus:
            result[arm]["length_tau"] = round(statistics.mean(taus), 3)
    return result


def median_ratio(seconds: np.ndarray, fifo: np.ndarray) -> float:
    """Over seeds, of the sum over steps."""
    return round(float(np.median(seconds.sum(axis=1) / fifo.sum(axis=1))), 3)


def share(spans: dict[str, np.ndarray], arm: str, steps: slice) -> float | None:
    """The part of the oracle's gain over fifo; None where the oracle gains less than 1 %."""
    fifo, oracle, mine = (spans[a][:, steps].sum() for a in ("fifo", "oracle", arm))
    return round(float((fifo - mine) / (fifo - oracle)), 3) if fifo - oracle > 0.01 * fifo else None


def main() -> None:
    p = common.parser(__doc__ or "")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--only", choices=["real", "simulated", "collatz"], nargs="*", help="only these parts")
    args = p.parse_args()
    parts = args.only or ["simulated", "real", "collatz"]
    seeds = range(1 if args.quick else args.seeds)
    load = os.getloadavg()[0]
    arms = ("fifo", "blind", "ranked", "history", "oracle")
    results: dict[str, dict[str, Any]] = {}
    if "simulated" in parts:
        for case in [SIMULATED[0], SIMULATED[6]] if args.quick else SIMULATED:
            per_epoch = case.rows // case.prompts
            source = cache(lambda seed, case=case: drawn_rows(case, seed))
            found = compare(case, seeds, source, run_simulated, arms, steps=EPOCHS * per_epoch, first=per_epoch)
            gains = [share_with_true_means(source(s), case, steps=EPOCHS * per_epoch, seed=s) for s in seeds]
            found["means"] = {"later_share": round(sum(g for g, _ in gains) / sum(m for _, m in gains), 3)}
            results[f"simulated: {case.name}"] = found
    if "real" in parts:
        for case in REAL[:1] if args.quick else REAL:
            per_epoch = case.rows // case.prompts
            found = compare(
                case, seeds, lambda seed, case=case: drawn_rows(case, seed), run_real, ("fifo", "ranked", "oracle"),
                steps=EPOCHS * per_epoch, first=per_epoch, rounds=1 if args.quick else 2,
            )  # fmt: skip
            results[f"real: {case.name}"] = found
    if "collatz" in parts:
        steps = 3 if args.quick else COLLATZ_STEPS
        source = cache(lambda seed: record_collatz(seed, steps=steps))
        rows = steps * COLLATZ_PROMPTS
        two = Case("2 workers, 8 waves, Collatz", 2, COLLATZ_PROMPTS, slots=16, cap=320, rows=rows)
        results[f"real: {two.name}"] = compare(
            two,
            seeds,
            source,
            run_real,
            ("fifo", "ranked", "oracle"),
            steps=steps,
            first=1,
            rounds=1 if args.quick else 2,
        )
        eight = Case("8 workers, 4 waves, Collatz", 8, COLLATZ_PROMPTS, slots=8, cap=320, rows=rows)
        results[f"simulated: {eight.name}"] = compare(eight, seeds, source, run_simulated, arms, steps=steps, first=1)
    report(results, quick=args.quick, seeds=seeds, load=load)


def report(results: dict[str, dict[str, Any]], *, quick: bool, seeds, load: float) -> None:
    targets = []
    for name, arms in results.items():
        reached = arms.get("history", arms["ranked"])["later_share"]
        met = None if reached is None else reached >= 0.8
        targets.append(common.target(f"history_share_of_oracle_gain, {name}", reached, ">= 0.8", met))
        print(f"\n{name}")
        for arm, figures in arms.items():
            print(f"  {arm:8s} {figures}")
    common.finish(
        "order", quick=quick, seeds=seeds, arms=results, targets=targets, epochs=EPOCHS, group_size=GROUP,
        load_at_start=round(load, 2),
        costs="simulated: an assumed H100 with Llama-3-8B; real: the tiny model on one CPU core a worker",
    )  # fmt: skip


if __name__ == "__main__":
    main()
