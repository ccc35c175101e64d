"""From the runs of the serve bench to its figures: summaries, ratios to fcfs, targets, and where nothing is gained."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
import serve_load as load
from serve_load import Answer

Figures = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""By server, work, arrivals and arm: a summary."""
PROCESSES = {"vllm": ("poisson", "bursty"), "engine": ("poisson",), "hold": ("poisson",)}
"""Arrivals at a rate, by server."""
LONGEST = "longest_decile_p99_latency_s"
LOW = 0.7
"""The load at which ordering must not cost anything."""


def add(found: Figures, kind: str, work: str, arrivals: str, arm: str, rounds: Sequence[Sequence[Answer]]) -> None:
    """Several rounds count as one run. ``between_rounds`` is the largest ratio between figures of the first two: noise,
    and in bursts luck with the order of arrival."""
    figures = load.summary(load.end_to_end(rounds))
    if len(rounds) > 1:
        between = ratios(load.summary(rounds[0]), load.summary(rounds[1]))
        figures["between_rounds"] = max((max(r, 1 / r) for r in between.values()), default=None)
    found.setdefault(kind, {}).setdefault(work, {}).setdefault(arrivals, {})[arm] = figures


def ratios(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """``mine`` over ``theirs`` for each of the twelve figures and the longest tenth's p99 latency (below 1 is better);
    empty if one side is missing."""
    if not all(LONGEST in side for side in (mine, theirs)):
        return {}
    by_figure = {f"{name} {p}": mine[name][p] / theirs[name][p] for name in load.FIGURES for p in mine[name]}
    return {**by_figure, "longest tenth's p99 latency": mine[LONGEST] / theirs[LONGEST]}


def targets(found: Figures, kinds: Sequence[str], works: Sequence[str]) -> list[dict[str, Any]]:
    """What could not be measured is listed all the same, as such. The gains are asked of all works but the hard one."""
    listed = []

    def at_least(limit: float, name: str, value: float | None) -> None:
        listed.append(common.target(name, value, f">= {limit}", None if value is None else value >= limit))

    def at_most(limit: float, name: str, value: float | None) -> None:
        listed.append(common.target(name, value, f"<= {limit}", None if value is None else value <= limit))

    for kind in kinds:
        for work in works:
            arms = found.get(kind, {}).get(work, {}).get("burst", {})
            if work != "hard":
                gain, most = (gain_over_fcfs(arms, arm) for arm in ("ranked", "oracle"))
                at_least(2.0, f"{kind}, {work}, burst: fcfs over ranked, mean normalized latency", gain)
                share = math.log(gain) / math.log(most) if gain and most else None
                at_least(0.5, f"{kind}, {work}, burst: share of the oracle's gain (log ratio)", share)
            slowdown = ratios(arms.get("ranked", {}), arms.get("fcfs", {})).get("longest tenth's p99 latency")
            at_most(1.3, f"{kind}, {work}, burst: longest tenth's p99 latency over fcfs", slowdown)
        for process in PROCESSES[kind]:
            arms = found.get(kind, {}).get(works[0], {}).get(f"{process} {LOW}", {})
            worst = max(ratios(arms.get("ranked", {}), arms.get("fcfs", {})).values(), default=None)
            at_most(1.03, f"{kind}, {process} {LOW}: worst figure over fcfs", worst)
    summaries = [
        s for by_work in found.values() for by in by_work.values() for arms in by.values() for s in arms.values()
    ]
    at_most(0, "errors", float(sum(s["errors"] for s in summaries)))
    return listed


def gain_over_fcfs(arms: dict[str, Any], arm: str) -> float | None:
    """How many times better the mean normalized latency is."""
    if not all(LONGEST in arms.get(a, {}) for a in ("fcfs", arm)):
        return None
    return arms["fcfs"]["normalized_s"]["mean"] / arms[arm]["normalized_s"]["mean"]


def no_help(found: Figures) -> dict[str, dict[str, float]]:
    """Where ranked is not at least 3 % better than fcfs: the ratios of those figures, by server, work and arrivals."""
    where = {}
    for kind, by_work in found.items():
        for work, by in by_work.items():
            for arrivals, arms in by.items():
                compared = ratios(arms.get("ranked", {}), arms.get("fcfs", {}))
                if flat := {figure: round(r, 3) for figure, r in compared.items() if r > 0.97}:
                    where[f"{kind} / {work} / {arrivals}"] = flat
    return where


def show(found: Figures) -> None:
    """Of each figure mean, p50, p90 and p99 in seconds."""
    for kind, by_work in found.items():
        for work, by in by_work.items():
            for arrivals, arms in by.items():
                print(f"\n{kind}, {work}, {arrivals}: mean, p50, p90, p99 of {', '.join(load.FIGURES)}")
                for arm, s in arms.items():
                    cells = ["".join(f"{v:8.3f}" for v in s[name].values()) for name in load.FIGURES if name in s]
                    longest = s.get(LONGEST, math.nan)
                    print(f"  {arm:14s} {'  |'.join(cells)}  | longest tenth p99 {longest:.1f}", flush=True)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
