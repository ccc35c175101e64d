"""What the head start H trades, on a simulated server: 16 slots, prompts, lengths and ranker of the serve bench's first
work.

Time goes in decode steps of 40 ms + 3.3 ms for each running answer, and 60 ms for each prompt that is read: about what
vLLM takes for SmolLM2-135M on two CPU cores. Waiting requests go by virtual deadline (`planner/deadline.py`). Figures
are ratios to H = 0, first come first served, on the same arrivals: medians over seeds. It is a simulation; serve.py
measures.
"""

from __future__ import annotations

import heapq
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
import serve_load as load
import serve_work

SLOTS = 16
HEAD_STARTS_S = (2.0, 5.0, 10.0, 20.0, 60.0)
CASES = [("burst", 0.0, 200)] + [(process, at, 300) for process in ("poisson", "bursty") for at in (0.7, 1.0, 1.3)]


def step_s(batch: int) -> float:
    return 0.040 + 0.0033 * batch


PREFILL_S = 0.060


def simulate(arrival_s: np.ndarray, tokens: np.ndarray, deadline_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(time to first token, latency), seconds [n]."""
    n, next_, now_s = len(arrival_s), 0, 0.0
    waiting: list[tuple[float, int]] = []
    left: dict[int, int] = {}
    first_s, end_s = np.zeros(n), np.zeros(n)
    while next_ < n or waiting or left:
        if not waiting and not left:
            now_s = max(now_s, arrival_s[next_])
        while next_ < n and arrival_s[next_] <= now_s:
            heapq.heappush(waiting, (deadline_s[next_], next_))
            next_ += 1
        while waiting and len(left) < SLOTS:
            _, i = heapq.heappop(waiting)
            left[i] = int(tokens[i])
            now_s += PREFILL_S
        now_s += step_s(len(left))
        for i in list(left):
            if left[i] == tokens[i]:
                first_s[i] = now_s
            left[i] -= 1
            if left[i] == 0:
                end_s[i] = now_s
                del left[i]
    return first_s - arrival_s, end_s - arrival_s


def figures(arrival_s: np.ndarray, tokens: np.ndarray, quantile: np.ndarray, head_start_s: float) -> dict[str, float]:
    ttft_s, latency_s = simulate(arrival_s, tokens, arrival_s + head_start_s * quantile)
    found: dict[str, float] = {}
    for name, values in (("ttft", ttft_s), ("latency", latency_s), ("normalized", latency_s / tokens)):
        found[f"{name} mean"] = float(values.mean())
        found |= {f"{name} p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)}
    longest = tokens >= np.quantile(tokens, 0.9)
    found["longest tenth p99 latency"] = float(np.percentile(latency_s[longest], 99))
    return found


def main() -> None:
    p = common.parser(__doc__ or "")
    p.add_argument("--seeds", type=int, default=12)
    args = p.parse_args()
    seeds = range(2 if args.quick else args.seeds)
    from longtail.lengths.ranker import Ranker

    work = serve_work.load_work("larger model", seed=0)
    all_tokens = np.asarray(work.asked.lengths).astype(int)
    all_quantiles = Ranker.load(serve_work.ranker_for(work)).quantile(work.asked.prompts).astype(float)
    capacity_per_s = 1 / (all_tokens.mean() * step_s(SLOTS) / SLOTS + PREFILL_S)
    arms: dict[str, dict[str, dict[str, float]]] = {}
    for process, at, count in CASES:
        case = process if process == "burst" else f"{process} {at}"
        ratios: dict[float, list[dict[str, float]]] = {h: [] for h in HEAD_STARTS_S}
        for seed in seeds:
            rows = np.random.default_rng(seed).choice(len(all_tokens), count, replace=count > len(all_tokens))
            arrival_s = np.asarray(load.arrival_times(process, count, rate=at * capacity_per_s, seed=seed), float)
            tokens, quantile = all_tokens[rows], all_quantiles[rows]
            base = figures(arrival_s, tokens, quantile, 0.0)
            for h in HEAD_STARTS_S:
                mine = figures(arrival_s, tokens, quantile, h)
                ratios[h].append({name: mine[name] / base[name] for name in base})
        arms[case] = {
            f"H = {h:g} s": {name: round(float(np.median([r[name] for r in found])), 3) for name in found[0]}
            for h, found in ratios.items()
        }
        for h, found in arms[case].items():
            print(f"{case:12s} {h:10s} " + "  ".join(f"{k} {v:.2f}" for k, v in found.items()), flush=True)
    common.finish(
        "head_start", quick=args.quick, seeds=seeds, arms=arms, targets=[], capacity_per_s=round(capacity_per_s, 2)
    )


if __name__ == "__main__":
    main()
