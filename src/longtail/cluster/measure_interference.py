"""How much longer work takes beside other work: on a neighbouring worker, or in turns with it on the same worker.

Neighbours share the memory's bandwidth and the last cache; quanta in turns on one worker leave each other cold caches.
The machine's own speed varies by more than that from one second to the next, so what is compared is measured close
together, in several rounds, and believed as far as they agree (:func:`consistent`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations, product

from longtail.cluster.fair import FairShare
from longtail.cluster.measure_together import Together, Work
from longtail.core.types import BURST_S

Classes = Mapping[str, Work]
Slowdowns = dict[str, dict[str, float]]
Ratios = dict[tuple[str, str], list[float]]
WINDOW_QUANTA = 4
"""A window lasts for so many quanta of the slower class."""
LEAST_WINDOW_S, MOST_WINDOW_S = 0.05, 3.0
TURNS = 3
"""Within a model, quanta of each class after one of each other, in a round."""
ROUNDS, ROUND_CYCLES, ROUNDS_S = 3, 2, 1.0
"""Everything is measured in so many rounds. Of quanta by share, each share has in a round about so many turns of the
one that has fewest; fewer of both where quanta are long, so that all rounds of a share take about so many seconds, or
one cycle."""


def within_model(
    together: Together, classes: Classes, tell: Callable[[str, float], None]
) -> tuple[Slowdowns, Slowdowns]:
    """(in turns, beside neighbours): ``[a][b]`` is how many times longer than alone a takes when each of its quanta
    follows one of b on the first worker, and while neighbours run b (nothing for a single worker)."""
    turns: Ratios = {pair: [] for pair in permutations(classes, 2)}
    like: dict[str, list[float]] = {name: [] for name in classes}
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {pair: [] for pair in combinations(classes, 2)}
    for n in range(ROUNDS):
        tell("each kind of work alone", n / ROUNDS)
        alone_s = alone(together, classes)
        tell("in turns on one worker", (n + 0.2) / ROUNDS)
        for (a, b), ratios in turns.items():
            ratios.append(_after(together, classes[b], classes[a]) / alone_s[a])
        if together.size == 1:
            continue
        tell("beside neighbours", (n + 0.6) / ROUNDS)
        for name, (even_s, _) in _beside_like(together, classes, classes, pairs).items():
            like[name].append(even_s / alone_s[name])
    same: Slowdowns = {name: {} for name in classes}
    for (a, b), ratios in turns.items():
        same[a][b] = _in_company(ratios)
    if together.size == 1:
        return same, {}
    near: Slowdowns = {name: {name: consistent(like[name])} for name in classes}
    for (a, b), found in pairs.items():
        near[a][b] = near[a][a] * consistent([f for f, _ in found])
        near[b][a] = near[b][b] * consistent([f for _, f in found])
    return same, near


def beside_neighbours(
    together: Together, first: Classes, second: Classes, tell: Callable[[str, float], None]
) -> tuple[Slowdowns, Slowdowns]:
    """Of each side: ``[a][b]`` is how many times longer a takes while neighbours run b of the other side, than while
    they run a too."""
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {pair: [] for pair in product(first, second)}
    for n in range(ROUNDS):

        def say(what: str, share: float, done: int = n) -> None:
            tell(what, (done + share) / ROUNDS)

        _beside_like(together, first, second, pairs, say)
    ours: Slowdowns = {a: {} for a in first}
    theirs: Slowdowns = {b: {} for b in second}
    for (a, b), found in pairs.items():
        ours[a][b], theirs[b][a] = consistent([f for f, _ in found]), consistent([f for _, f in found])
    return ours, theirs


def consistent(ratios: Sequence[float]) -> float:
    """Of what the same comparison came to in several rounds, that which is nearest to 1; and 1 if they disagree on who
    is faster: a moment in which the machine was slow for everybody is not to be taken for an effect of company."""
    low, high = min(ratios), max(ratios)
    return low if low > 1.0 else min(high, 1.0)


def alone(together: Together, classes: Classes) -> dict[str, float]:
    """Median seconds of a quantum of each class on the first worker, while the others wait."""
    seconds = {}
    for name, work in classes.items():
        times = [work() for _ in range(1 + WINDOW_QUANTA)][1:] if together.rank == 0 else []
        together.barrier()
        seconds[name] = together.all(statistics.median(times) if times else 0.0)[0]
    return seconds


def beside(together: Together, even: Work, odd: Work) -> tuple[float, float]:
    """Median seconds of a quantum of each, while every second of at least two workers runs ``even``, the others
    ``odd``."""
    mine = even if together.rank % 2 == 0 else odd
    window_s = min(max(WINDOW_QUANTA * together.slowest(mine()), LEAST_WINDOW_S), MOST_WINDOW_S)
    together.barrier()
    times = together.all(_median_within(mine, window_s))
    return statistics.median(times[::2]), statistics.median(times[1::2])


def _beside_like(
    together: Together,
    first: Classes,
    second: Classes,
    pairs: Mapping[tuple[str, str], list[tuple[float, float]]],
    tell: Callable[[str, float], None] = lambda what, share: None,
) -> dict[str, tuple[float, float]]:
    """One round of ``pairs``: to each is added how many times longer its two take beside each other than beside their
    like. Returns what :func:`beside` says of each of ``first`` beside its like."""
    like = {name: beside(together, work, work) for name, work in first.items()}
    like_second = like if second is first else {name: beside(together, work, work) for name, work in second.items()}
    for n, ((a, b), ratios) in enumerate(pairs.items()):
        tell(f"{a}, {b}", n / len(pairs))
        even_s, odd_s = beside(together, first[a], second[b])
        ratios.append((even_s / like[a][0], odd_s / like_second[b][1]))
    return like


def _after(together: Together, before: Work, work: Work) -> float:
    """Median seconds of ``work`` on the first worker, each time after ``before``."""
    times = [(before(), work())[1] for _ in range(TURNS)] if together.rank == 0 else []
    together.barrier()
    return together.all(statistics.median(times) if times else 0.0)[0]


def in_shares(together: Together, first: Work, second: Work, shares: Sequence[float]) -> list[tuple[float, float]]:
    """For each of ``shares`` that ``first`` has of the first worker's time: how many times longer a quantum of it takes
    than alone, and one of ``second``, which has the rest.

    Whose turn it is follows from the rule of the workers, so that short quanta come in rows between long ones: those
    that follow their like find warm caches, and count as they come. Both are measured alone in each round anew, since
    a machine may become slower meanwhile.
    """
    found = _factors(first, second, shares) if together.rank == 0 else [(0.0, 0.0)] * len(shares)
    return [(together.all(a)[0], together.all(b)[0]) for a, b in found]


def _factors(first: Work, second: Work, shares: Sequence[float]) -> list[tuple[float, float]]:
    cycle_s = max(first(), second()) / min(min(share, 1.0 - share) for share in shares)
    rounds = max(1, min(ROUNDS, int(ROUNDS_S / cycle_s)))
    window_s = min(max(ROUND_CYCLES * cycle_s, LEAST_WINDOW_S), ROUNDS_S / rounds)
    factors: list[list[tuple[float, float]]] = [[] for _ in shares]
    for _ in range(rounds):
        alone_s = [_means_s([work], [1.0], window_s / 2)[0] for work in (first, second)]
        for share, found in zip(shares, factors, strict=True):
            a_s, b_s = _means_s([first, second], [share, 1.0 - share], window_s)
            found.append((a_s / alone_s[0], b_s / alone_s[1]))
    return [(_in_company([a for a, _ in found]), _in_company([b for _, b in found])) for found in factors]


def _in_company(ratios: Sequence[float]) -> float:
    """Turns of others leave nothing behind that makes work faster."""
    return max(1.0, consistent(ratios))


def _means_s(works: Sequence[Work], shares: Sequence[float], window_s: float) -> list[float]:
    """Mean seconds of a quantum of each in a window that begins when each has had one, and has at least one of each."""
    by_name = {str(number): work for number, work in enumerate(works)}
    fair = FairShare()
    fair.weigh(zip(by_name, shares, strict=True))
    times: dict[str, list[float]] = {name: [] for name in by_name}
    begun = math.inf
    while time.perf_counter() - begun < window_s or not all(times.values()):
        name = fair.next(by_name)
        assert name is not None
        burst = _burst(by_name[name])
        times[name] += burst
        fair.used(name, sum(burst), [other for other in by_name if other != name])
        if begun == math.inf and all(times.values()):
            begun, times = time.perf_counter(), {name: [] for name in by_name}
    return [statistics.fmean(taken) for taken in times.values()]


def _burst(work: Work) -> list[float]:
    """Seconds of each quantum of a turn, as a worker's turns are (``core/types.py``)."""
    times = [work()]
    while sum(times) + times[-1] <= BURST_S:
        times.append(work())
    return times


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
