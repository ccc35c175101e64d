"""Beliefs about remaining lengths: do the intervals cover what they promise, how sharp are they, how fast are they?

Every length is predicted before it is seen: the sequences of a step start, are asked about, run in lockstep to half of
the token cap, are asked about again, end, and only then are learnt from. Coverage counts the share of randomised
PIT values u = F(t-1) + V (F(t) - F(t-1)), V uniform, inside the central interval: where lengths have atoms (the cap,
ties) no interval of whole tokens can hold exactly 50 %, but u is uniform exactly if the belief is right. The literal
share of lengths inside the returned interval is reported beside it.

* r1: lengths drawn from the quantiles of DeepSeek-R1's production traffic, at caps that cut off 0, 10 and 30 %.
* alpaca: 24 models' answers (words) to 600 prompts; 8 of them are the samples of a group, the others follow in two
  later epochs. Arms: nothing but the population of lengths; + group-mates; + history; + a ranker's quantile.
* smollm2: SmolLM2-135M's own lengths, one sample a prompt, 27 % cut off at 768; with and without a ranker.

Speed is the time of one core (thread time; wall time beside it, which other work on the machine stretches) for one
progress(), one 90 % interval() and one expected() of 10,000 live sequences.

The ranker of the last two data sets is TF-IDF with ridge regression on log length, always trained on other prompts
(5 folds).
Data: ../shared/data, or the folder that LONGTAIL_DATA names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
from longtail.lengths.beliefs import Beliefs

LEVELS = (0.5, 0.9)
PINBALL = np.arange(1, 20) / 20
GROUP = 8
WARM_UP = 3


def data(name: str) -> Path:
    folder = Path(os.environ.get("LONGTAIL_DATA", common.ROOT.parent / "shared" / "data"))
    if not (folder / name).exists():
        sys.exit(f"{folder / name} is missing; set LONGTAIL_DATA to the folder that holds the length data")
    return folder / name


class Step(NamedTuple):
    """Sequences that start together: ``lengths`` [n] before any cap, prompt ``keys``, ranker ``quantiles`` or None."""

    lengths: np.ndarray
    keys: np.ndarray
    quantiles: np.ndarray | None
    epoch: int


class Tally:
    """PIT values, interval hits, widths and pinball losses of one kind of question."""

    def __init__(self) -> None:
        self.pit: list[np.ndarray] = []
        self.hits: dict[float, list[np.ndarray]] = {level: [] for level in LEVELS}
        self.widths: dict[float, list[np.ndarray]] = {level: [] for level in LEVELS}
        self.pinball: list[np.ndarray] = []
        self.error: list[np.ndarray] = []

    def take(self, beliefs: Beliefs, left: dict[int, int], rng: np.random.Generator) -> None:
        belief = beliefs.remaining()
        truth = np.array([left[i] for i in belief.ids.tolist()], np.int64)
        if not len(truth):
            return
        below, here = 1.0 - belief.survives(truth - 1), 1.0 - belief.survives(truth)
        self.pit.append(below + rng.random(len(truth)) * (here - below))
        for level in LEVELS:
            low, high = belief.interval(level)
            self.hits[level].append((low <= truth) & (truth <= high))
            self.widths[level].append(high - low)
        losses = [(truth - belief.quantile(p)) for p in PINBALL.tolist()]
        self.pinball.append(np.mean([np.maximum(p * d, (p - 1) * d) for p, d in zip(PINBALL, losses, strict=True)], 0))
        self.error.append(belief.expected() - truth)

    def summary(self) -> dict | None:
        if not self.pit:
            return None
        pit = np.concatenate(self.pit)
        out: dict = {"n": len(pit)}
        for level in LEVELS:
            inside = np.abs(pit - 0.5) < level / 2
            out[f"coverage_{round(level * 100)}"] = round(float(inside.mean()), 4)
            out[f"literal_{round(level * 100)}"] = round(float(np.concatenate(self.hits[level]).mean()), 4)
            out[f"width_{round(level * 100)}"] = round(float(np.concatenate(self.widths[level]).mean()), 1)
        # Twice the mean pinball loss over evenly spaced levels is the CRPS, up to the spacing.
        out["crps"] = round(2 * float(np.concatenate(self.pinball).mean()), 2)
        error = np.concatenate(self.error)
        out["mean_error"] = round(float(error.mean()), 2)
        out["mean_abs_error"] = round(float(np.abs(error).mean()), 2)
        return out


def predict(steps: list[Step], cap: int, *, tau: float, seed: int, tallies: dict[str, Tally], by_epoch: bool) -> dict:
    """Run ``steps`` through fresh beliefs; adds to ``tallies`` ("start", "half", with the epoch where asked)."""
    rng = np.random.default_rng(seed)
    beliefs = Beliefs(cap, tau=tau)
    following = 0
    for number, step in enumerate(steps):
        ids = np.arange(following, following + len(step.lengths))
        following += len(ids)
        ends = np.minimum(step.lengths, cap)
        beliefs.add(ids, step.keys, step.quantiles)
        suffix = f"_epoch{step.epoch}" if by_epoch else ""
        counted = number >= WARM_UP
        if counted:
            tallies.setdefault("start" + suffix, Tally()).take(
                beliefs, dict(zip(ids.tolist(), ends.tolist(), strict=True)), rng
            )
        half = cap // 2
        early = step.lengths <= half
        beliefs.end(ids[early], ends[early])
        beliefs.progress(np.full(len(ids) - int(early.sum()), half))
        if counted:
            left = dict(zip(ids[~early].tolist(), (ends[~early] - half).tolist(), strict=True))
            tallies.setdefault("half" + suffix, Tally()).take(beliefs, left, rng)
        late = ~early
        beliefs.end(ids[late], ends[late], step.lengths[late] > cap)
        beliefs.next_step()
    p = beliefs.params
    return {name: round(getattr(p, name), 3) for name in ("rho", "within", "tilt", "outlier", "drift")}


def summaries(tallies: dict[str, Tally], **more) -> dict:
    return {**more, **{name: tally.summary() for name, tally in tallies.items()}}


def r1(seeds: list[int], steps: int) -> dict:
    quantiles = np.array(
        json.loads(data("traces/deepseek_r1_output_quantiles.json").read_text())["output_tokens_quantiles"]
    )
    arms = {}
    for name, cap in (("cut_0", int(quantiles[-1])), ("cut_10", int(quantiles[900])), ("cut_30", int(quantiles[700]))):
        tallies: dict[str, Tally] = {}
        for seed in seeds:
            rng = np.random.default_rng(seed)
            run = []
            for number in range(steps):
                lengths = np.interp(rng.random(512), np.linspace(0, 1, len(quantiles)), quantiles).astype(np.int64)
                run.append(Step(lengths, np.arange(512) + 512 * number, None, 1))
            predict(run, cap, tau=0.0, seed=seed, tallies=tallies, by_epoch=False)
        arms[f"r1_{name}"] = summaries(tallies, cap=cap)
        print(f"r1_{name}: {json.dumps(arms[f'r1_{name}'])}", flush=True)
    return arms


def ranked(prompts: list[str], targets: np.ndarray, seed: int) -> tuple[np.ndarray, float]:
    """A ranker's quantiles [n] of prompts that it was not trained on, and its Kendall tau with ``targets``."""
    from scipy.stats import kendalltau, rankdata
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import KFold
    from sklearn.pipeline import make_pipeline

    score = np.empty(len(prompts))
    texts = np.array(prompts, dtype=object)
    for train, test in KFold(5, shuffle=True, random_state=seed).split(texts):
        model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2), Ridge(alpha=1.0))
        score[test] = model.fit(texts[train], targets[train]).predict(texts[test])
    return (rankdata(score) - 0.5) / len(score), float(kendalltau(score, targets).statistic)


def alpaca(seeds: list[int], caps: tuple[int, ...]) -> dict:
    rows = [json.loads(line) for line in data("alpaca_eval_lengths.jsonl").read_text().splitlines()]
    words = np.array([list(row["words"].values()) for row in rows], dtype=np.int64)
    quantiles, tau = ranked([row["prompt"] for row in rows], np.log1p(np.median(words, axis=1)), seeds[0])
    arms: dict[str, dict] = {}
    # Which knowledge each arm has: group-mates, history, ranker.
    knows = {
        "population": (False, False, False),
        "mates": (True, False, False),
        "mates_history": (True, True, False),
        "ranker": (False, False, True),
        "mates_history_ranker": (True, True, True),
    }
    per_step, epochs = 50, words.shape[1] // GROUP
    for cap in caps:
        for name, (mates, history, ranker) in knows.items():
            tallies: dict[str, Tally] = {}
            for seed in seeds:
                rng = np.random.default_rng(seed)
                answers = rng.permuted(words, axis=1)
                run = []
                for epoch in range(epochs):
                    order = rng.permutation(len(rows))
                    for start in range(0, len(rows), per_step):
                        prompts = np.repeat(order[start : start + per_step], GROUP)
                        lengths = answers[order[start : start + per_step], GROUP * epoch : GROUP * (epoch + 1)].ravel()
                        keys = prompts if history else prompts + len(rows) * epoch
                        if not mates:
                            keys = np.arange(len(prompts)) + 10**6 * (1 + len(run))
                        run.append(Step(lengths, keys, quantiles[prompts] if ranker else None, 1 + min(epoch, 1)))
                params = predict(run, cap, tau=tau if ranker else 0.0, seed=seed, tallies=tallies, by_epoch=True)
            arms[f"alpaca_{cap}_{name}"] = summaries(tallies, cap=cap, params=params, tau=round(tau, 3))
            print(f"alpaca_{cap}_{name}: {json.dumps(arms[f'alpaca_{cap}_{name}'])}", flush=True)
    return arms


def smollm2(seeds: list[int]) -> dict:
    rows = [json.loads(line) for line in data("smollm2_lengths.jsonl").read_text().splitlines()]
    cap = max(row["output_tokens"] for row in rows)
    # One token beyond the cap says "cut off": nobody knows how long it would have been.
    lengths = np.array([row["output_tokens"] + row["censored"] for row in rows], dtype=np.int64)
    quantiles, tau = ranked([row["prompt"] for row in rows], np.log(lengths), seeds[0])
    arms = {}
    for name, ranker in (("population", False), ("ranker", True)):
        tallies: dict[str, Tally] = {}
        for seed in seeds:
            order = np.random.default_rng(seed).permutation(len(rows))
            run = []
            for start in range(0, len(rows), 32):
                mine = order[start : start + 32]
                run.append(Step(lengths[mine], mine, quantiles[mine] if ranker else None, 1))
            params = predict(run, cap, tau=tau if ranker else 0.0, seed=seed, tallies=tallies, by_epoch=False)
        arms[f"smollm2_{name}"] = summaries(tallies, cap=cap, params=params, tau=round(tau, 3))
        print(f"smollm2_{name}: {json.dumps(arms[f'smollm2_{name}'])}", flush=True)
    return arms


def speed(repeats: int) -> dict:
    """10,000 live sequences in groups of 8, some of whose mates have ended: progress + interval + expected tokens."""
    arms = {}
    for name, ended in (("all_alive", 0), ("6000_ended", 6000)):
        rng = np.random.default_rng(0)
        beliefs = Beliefs(16384, tau=0.36)
        count = 10_000 + ended
        keys = np.arange(count) // GROUP
        mean = rng.normal(size=count // GROUP + 1)[keys]
        for step in range(3):
            lengths = np.exp(6.7 + 1.3 * (0.7 * mean + 0.7 * rng.normal(size=count))).astype(np.int64) + 1
            ends, ids = np.minimum(lengths, 16384), np.arange(count) + count * step
            beliefs.add(ids, keys, rng.random(count // GROUP + 1)[keys])
            if step < 2:
                beliefs.end(ids, ends, lengths > 16384)
                beliefs.next_step()
        first = np.argsort(ends, kind="stable")[:ended]
        beliefs.end(ids[first], ends[first], lengths[first] > 16384)
        at = int(ends[first].max()) if ended else 200
        wall, cpu = [], []
        for i in range(repeats):
            generated = np.full(10_000, at + i)
            start, start_cpu = time.perf_counter(), time.thread_time()
            beliefs.progress(generated)
            belief = beliefs.remaining()
            belief.interval(0.9)
            belief.expected()
            wall.append(1e3 * (time.perf_counter() - start))
            cpu.append(1e3 * (time.thread_time() - start_cpu))
        arms[f"speed_{name}"] = {
            "wall_ms_median": round(float(np.median(wall)), 3),
            "wall_ms_p90": round(float(np.quantile(wall, 0.9)), 3),
            "core_ms_median": round(float(np.median(cpu)), 3),
            "core_ms_best": round(float(np.min(cpu)), 3),
            "machine_load": round(os.getloadavg()[0], 1),
        }
        print(f"speed_{name}: {json.dumps(arms[f'speed_{name}'])}", flush=True)
    return arms


def main() -> None:
    args = common.parser(__doc__).parse_args()
    seeds = [0] if args.quick else [0, 1, 2, 3]
    arms = speed(100 if args.quick else 500)
    arms |= r1(seeds, 20 if args.quick else 60)
    arms |= smollm2(seeds if args.quick else list(range(16)))
    arms |= alpaca(seeds, (512, 1024))
    targets = []
    for name, arm in arms.items():
        for question, answers in arm.items():
            if isinstance(answers, dict) and "coverage_50" in answers:
                for level in LEVELS:
                    value = answers[f"coverage_{round(level * 100)}"]
                    goal = f"{level} +- 0.05"
                    targets.append(common.target(f"{name}.{question}.{level}", value, goal, abs(value - level) <= 0.05))
    for name in ("speed_all_alive", "speed_6000_ended"):
        value = arms[name]["core_ms_median"]
        targets.append(common.target(f"{name}_core_ms", value, "< 5", value < 5))
    common.finish("beliefs", quick=args.quick, seeds=seeds, arms=arms, targets=targets)


if __name__ == "__main__":
    main()
