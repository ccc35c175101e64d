"""How much longer work takes beside other work: on a neighbouring worker, or in turns with it on the same worker.

Neighbours share the memory's bandwidth and the last cache; quanta in turns on one worker leave each other cold caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from itertools import combinations_with_replacement, permutations

from longtail.cluster.measure_together import Together, Work

Classes = Mapping[str, Work]
Slowdowns = dict[str, dict[str, float]]
WINDOW_QUANTA = 4
"""A window lasts for so many quanta of the slower class."""
LEAST_WINDOW_S, MOST_WINDOW_S = 0.05, 3.0


def alone(together: Together, classes: Classes) -> dict[str, float]:
    """Median seconds of a quantum of each class on the first worker, while the others wait."""
    seconds = {}
    for name, work in classes.items():
        times = [work() for _ in range(1 + WINDOW_QUANTA)][1:] if together.rank == 0 else []
        together.barrier()
        seconds[name] = together.all(statistics.median(times) if times else 0.0)[0]
    return seconds


def beside_neighbours(
    together: Together, classes: Classes, alone_s: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """``[a][b]``: how many times longer a takes while neighbours run b: every second worker runs a, the others b."""
    slowdowns: Slowdowns = {name: {} for name in classes}
    for a, b in combinations_with_replacement(classes, 2):
        window_s = _window_s(alone_s[a], alone_s[b])
        mine = a if together.rank % 2 == 0 else b
        together.barrier()
        times = together.all(_median_within(classes[mine], window_s))
        slowdowns[b][a] = statistics.median(times[1::2]) / alone_s[b]
        slowdowns[a][b] = statistics.median(times[::2]) / alone_s[a]
    return slowdowns


def in_turns(together: Together, classes: Classes, alone_s: Mapping[str, float]) -> Slowdowns:
    """``[a][b]``: how many times longer a takes when each of its quanta follows one of b, on the first worker."""
    slowdowns: Slowdowns = {name: {} for name in classes}
    for a, b in permutations(classes, 2):
        times = [(classes[b](), classes[a]())[1] for _ in range(WINDOW_QUANTA)] if together.rank == 0 else []
        together.barrier()
        slowdowns[a][b] = together.all(statistics.median(times) if times else 0.0)[0] / alone_s[a]
    return slowdowns


def _window_s(*quanta_s: float) -> float:
    return min(max(WINDOW_QUANTA * max(quanta_s), LEAST_WINDOW_S), MOST_WINDOW_S)


def _median_within(work: Work, window_s: float) -> float:
    """Median of the quanta that end while all workers are at work: they go on until ``window_s`` are over."""
    start, times = time.perf_counter(), list[float]()
    while True:
        seconds = work()
        within = time.perf_counter() - start < window_s
        if within or not times:
            times.append(seconds)
        if not within:
            return statistics.median(times)
