"""Look ahead: how should pipelines share the workers from now on?

The planner simulates the next steps of all pipelines (``fluid.py``) for many ways of sharing, takes the best, carries
out only what is to be done now, and looks again at the next event (a receding horizon, as JigsawRL, arXiv 2604.23838,
does for pairs). It chooses where the next rollouts begin (on all workers, or on fewer: the sequences of a rollout cost
least together), by a beam search over the pipelines; what is done with the rollouts under way (merge, spread, or
nothing); and by which weights time is shared (by priority, more for a pipeline that would be slowed too much).

A choice is judged by its value: the work that is done in the horizon, in seconds that it takes alone, times priority,
over the seconds of the horizon. Taking turns, each step with all workers to itself and in the best layout, is worth 1.
Sharing must beat that by a margin, in its prediction, and must keep within every ``max_slowdown``, or exceed it less
than turns would; otherwise pipelines *hold*: they take turns. Whether to hold is a matter of what steps are like, not
of what happens to be under way: :func:`in_general` is the state to ask that of, whenever steps have ended.

Invariants: by its own model the decision is never worth less than taking turns; equal arguments give equal decisions,
as long as the clock leaves time; the last decision is kept unless another one is better by a margin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from longtail.planner import cells, fluid, greedy, merge, solo, step_ahead, tail
from longtail.planner.merge import Alternative, What
from longtail.planner.outlook import Begin, Choice, Outlook
from longtail.planner.plans import MARGIN, MARGIN_STEPS
from longtail.planner.state import NOBODY, ClusterState, Mode, PipelineState, Relocation, Sharing, Stage
from longtail.planner.words import lasting, on_workers, places

SHARE_MARGIN = 0.03
"""What sharing must be worth above taking turns: the table is right to a few per cent."""
KEEP_MARGIN = 0.02
"""What another way must be worth above the last one, which is kept otherwise."""
BEAM = 2
MOST_ENTRIES, FEWEST_SIMULATIONS = 1000, 8
"""Simulations of a search, times entries (cells times pipelines) of each; but not fewer simulations than that."""
PASSES, FEW_CELLS = 3, 2
MANY_STEPS = 8
BOOSTS = (2.0, 4.0, 8.0, 16.0)
"""By so much the weight of a pipeline may be raised that would be slowed too much."""

Clock = Callable[[], float]


def share(
    state: ClusterState,
    *,
    corun: str = "auto",
    merge: bool = True,
    budget_s: float = 0.05,
    trust: bool = True,
    before: Sharing | None = None,
    may_hold: bool = True,
    clock: Clock = time.perf_counter,
) -> Sharing:
    """What to do from now on.

    ``corun``, ``auto`` or ``greedy``, and ``merge`` are the job's policy (``core/config.py``; where it says turns,
    nothing is left to decide). Without ``trust`` in the predictions, or if the ``budget_s`` seconds of ``clock`` are
    over before anything has been compared, ``greedy.py`` decides; but who takes turns goes on with that. ``before`` is
    the last decision. ``may_hold`` is False where it has been decided that pipelines share.
    """
    working = [p for p in state.pipelines if p.steps_left > 0]
    if not working:
        return Sharing(mode=Mode.SHARE, reason="no pipeline has work to do")
    if len(working) == 1 and corun == "auto":
        return _alone(state, merge=merge)
    if corun == "greedy":
        return greedy.share(state, merge=merge)
    if not trust:
        why = "predictions have been wrong lately"
        if may_hold and before is not None and before.mode is Mode.HOLD:
            return _in_turns(state, f"in turns, each with all workers to itself: {why}")
        return greedy.share(state, merge=merge, why=f"{why}, so greedy")
    until_s = clock() + budget_s
    search = _Search(state, merge=merge, before=before, may_hold=may_hold, over=lambda: clock() >= until_s)
    if search.over():
        return greedy.share(state, merge=merge, why="planning took too long, so greedy")
    return search.decide()


def in_general(state: ClusterState) -> ClusterState:
    """The same pipelines, as if each were about to begin one of many typical steps."""
    return replace(state, pipelines=tuple(_in_general(p) for p in state.pipelines))


def _in_general(pipeline: PipelineState) -> PipelineState:
    return replace(
        pipeline, stage=Stage.READY, steps_left=max(pipeline.steps_left, MANY_STEPS), elapsed_s=0.0,
        step=pipeline.typical, live=NOBODY, workers=(), degree=1, train_left=pipeline.typical.train_tokens,
    )  # fmt: skip


def warm_up() -> None:
    """Compile the kernels, which takes seconds the first time on a machine, or load them."""
    solo.warm_up()
    cells.warm_up()
    merge.warm_up()
    tail.warm_up()
    step_ahead.warm_up()
    fluid.warm_up()


@dataclass
class _Search:
    state: ClusterState
    merge: bool
    before: Sharing | None
    may_hold: bool
    over: Callable[[], bool]

    def __post_init__(self) -> None:
        # Rollouts spread only when a pipeline has come or gone: what one look merges, the next one must not take apart
        # because a prediction has changed.
        same = self.before is not None and set(self.before.weights) == {p.name for p in self.state.pipelines}
        self.outlook = Outlook(self.state, merges=self.merge, spreads=not same)
        self.cells = self.outlook.cells
        self.names = [p.state.name for p in self.outlook.prospects]
        self.limits = np.array([p.state.max_slowdown or np.inf for p in self.outlook.prospects])
        self.limited = bool(np.isfinite(self.limits).any())
        self._costs: dict[Choice, tuple[float, int]] = {}
        entries = self.cells.count * len(self.names)
        self.most = max(FEWEST_SIMULATIONS, MOST_ENTRIES // entries)

    def decide(self) -> Sharing:
        seeds = sorted(self._seeds(), key=self._cost)
        # What is done with the rollouts under way, and where the next ones begin, depend on each other.
        nows = self._present(seeds[0]).nows
        best = self._best_begins(sorted((seed._replace(nows=nows) for seed in seeds), key=self._cost)[:BEAM])
        best = self._present(self._kept(best)._replace(nows=seeds[0].nows))
        best, within = self._within_slowdowns(best)
        value = self.outlook.value(best)
        if self.may_hold:
            was_shared = self.before is not None and self.before.mode is Mode.SHARE and bool(self.before.rates)
            margin = 0.0 if was_shared else SHARE_MARGIN
            if not within and self._excess(best).max() > self._excess_in_turns():
                return self._hold(f"sharing would slow {self._too_slow(best)} more than its max_slowdown")
            if value <= 1.0 + margin:
                return self._hold(f"the best sharing found would do {value:.2f} times the work of taking turns")
        return self._shared(best, value)

    # -- where rollouts begin ---------------------------------------------------------------------------------

    def _best_begins(self, beam: list[Choice]) -> Choice:
        """A beam search: one pipeline after the other tries all sizes, each where others want least; then each tries
        whether its tails are better merged. Again, as long as that helps."""
        for _ in range(PASSES):
            before = self._cost(beam[0])
            for i in self._order:
                found = dict.fromkeys(beam)
                for choice in beam:
                    for begin in self._begins(choice, i):
                        if self._enough():
                            return min(found, key=self._cost)
                        other = _with_begin(choice, i, begin)
                        self._cost(other)
                        found[other] = None
                beam = sorted(found, key=self._cost)[:BEAM]
            for i in self._order if self.merge else ():
                if self._enough():
                    break
                begin = beam[0].begins[i]
                other = _with_begin(beam[0], i, begin._replace(merged=not begin.merged))
                if self._cost(other) < self._cost(beam[0]):
                    beam = [other, *beam[: BEAM - 1]]
            if self._cost(beam[0]) == before:
                break
        return beam[0]

    def _enough(self) -> bool:
        return self.over() or self.outlook.simulations >= self.most

    def _seeds(self) -> Iterator[Choice]:
        """Everyone everywhere, everyone apart, tails merged or not; and what was decided last."""
        n = len(self.names)
        weights = tuple(p.state.priority for p in self.outlook.prospects)
        for merged in (False, True)[: 1 + self.merge]:
            for begins in ((Begin(0, self.cells.count, merged),) * n, self._apart(merged)):
                yield Choice(begins, (0,) * n, weights)
        for kept in self._begins_before:
            yield Choice(kept, (0,) * n, weights)

    def _apart(self, merged: bool) -> tuple[Begin, ...]:
        """Everyone on cells of their own, the more the longer their steps; on one each where there are too few."""
        n, count, order = len(self.names), self.cells.count, self._order
        if n > count:
            return tuple(Begin(order.index(i) % count, 1, merged) for i in range(n))
        sizes = dict.fromkeys(order, next(c for c in self.cells.counts if c * n <= count))
        left = count - sum(sizes.values())
        for i in order:
            if sizes[i] <= left:
                left -= sizes[i]
                sizes[i] *= 2
        firsts, first = {}, 0
        for i in sorted(order, key=lambda i: (-sizes[i], -self.outlook.prospects[i].at[0], i)):
            firsts[i] = first
            first += sizes[i]
        return tuple(Begin(firsts[i], sizes[i], merged) for i in range(n))

    @cached_property
    def _begins_before(self) -> list[tuple[Begin, ...]]:
        """Where the last decision had rollouts begin, tails merged or not; nothing if that does not fit any more."""
        if self.before is None or self.before.mode is Mode.HOLD:
            return []
        ranges = [self.cells.range_of(self.before.begin.get(name, ())) for name in self.names]
        found = [r for r in ranges if r is not None]
        if len(found) < len(ranges):
            return []
        return [tuple(Begin(*r, merged) for r in found) for merged in (False, True)[: 1 + self.merge]]

    def _begins(self, choice: Choice, i: int) -> Iterator[Begin]:
        """Of each size, where others want least of the time; of equals, where pipeline ``i`` is. Of few cells each
        place is tried."""
        prospects = self.outlook.prospects
        others = np.zeros(self.cells.count)
        for j, begin in enumerate(choice.begins):
            if j != i:
                others += prospects[j].typical.density(begin)
        if self.cells.count <= FEW_CELLS:
            for count in self.cells.counts:
                for first in range(self.cells.count - count + 1):
                    yield Begin(first, count, choice.begins[i].merged)
            return
        for count in self.cells.counts:
            yield Begin(cells.least(others, prospects[i].at, count), count, choice.begins[i].merged)

    @cached_property
    def _order(self) -> list[int]:
        """Pipelines with the longest steps first."""
        return sorted(range(len(self.names)), key=lambda i: (-self.outlook.prospects[i].alone.total_s, i))

    def _kept(self, best: Choice) -> Choice:
        """The last decision's choice instead, unless ``best`` is better by a margin."""
        last = min((best._replace(begins=begins) for begins in self._begins_before), key=self._cost, default=best)
        return best if self.outlook.value(best) > self.outlook.value(last) * (1.0 + KEEP_MARGIN) else last

    # -- rollouts under way -----------------------------------------------------------------------------------

    def _present(self, best: Choice) -> Choice:
        """Merge or spread rollouts that are under way, one after the other, where that does more work by a margin, and
        no less than to do it later."""
        most = self.outlook.simulations + FEWEST_SIMULATIONS
        for i in self._promising():
            found, stay = self.outlook.alternatives[i], best
            for now in self._worth_trying(found):
                if self.over() or self.outlook.simulations >= most:
                    return best
                other = _with_now(stay, i, now)
                gain_s = self._done_s(other) - self._done_s(stay)
                if found[now].what is What.LATER:
                    needed_s = 0.0
                else:
                    step_s = self.outlook.prospects[i].steps.base_s[0, 1]
                    needed_s = max(MARGIN * found[0].end_s, MARGIN_STEPS * step_s)
                if gain_s > needed_s and self._done_s(other) > self._done_s(best):
                    best = other
        return best

    def _promising(self) -> list[int]:
        """Pipelines with a rollout for which something could be done, those first that could save most."""
        saved_s = {
            i: found[0].work_s - min(a.work_s for a in found[1:])
            for i, found in enumerate(self.outlook.alternatives)
            if len(found) > 1
        }
        return sorted(saved_s, key=lambda i: (-saved_s[i], i))

    def _worth_trying(self, found: list[Alternative]) -> list[int]:
        """Of merges, that to fewest worker-seconds and the mildest."""
        merges = [i for i, a in enumerate(found) if a.what is What.MERGE]
        best = min(merges, key=lambda i: found[i].work_s, default=0)
        left_out = {i for i in merges if i not in (best, merges[0])}
        return [i for i in range(1, len(found)) if i not in left_out]

    def _done_s(self, choice: Choice) -> float:
        """Work done in a horizon, seconds."""
        return self.outlook.value(choice) * self.outlook.horizon_s

    # -- slowdowns --------------------------------------------------------------------------------------------

    def _within_slowdowns(self, best: Choice) -> tuple[Choice, bool]:
        """With more weight for those that would be slowed too much, as far as that helps; and whether it does."""
        for boost in BOOSTS:
            slow = self._excess(best)
            if not slow.any() or self.over():
                break
            weights = tuple(
                p.state.priority * boost if slow[i] else w
                for i, (p, w) in enumerate(zip(self.outlook.prospects, best.weights, strict=True))
            )
            best = best._replace(weights=weights)
        return best, not self._excess(best).any()

    def _excess(self, choice: Choice) -> np.ndarray:
        """[P]: by how much the slowest of the next steps of each pipeline exceeds what it may take."""
        return np.maximum(self.outlook.flow(choice).slow - self.limits, 0.0)

    def _excess_in_turns(self) -> float:
        """The same if steps take turns, of the pipeline that is worst off."""
        slow = np.array([1.0 / max(rate, 1e-9) for rate in self.outlook.turns().values()])
        return float(np.maximum(slow - self.limits, 0.0).max())

    def _too_slow(self, choice: Choice) -> str:
        slow, excess = self.outlook.flow(choice).slow, self._excess(choice)
        i = int(excess.argmax())
        return f"{self.names[i]} {slow[i]:.2f} times,"

    def _cost(self, choice: Choice) -> tuple[float, int]:
        """What the search minimises: excess slowdowns count as lost work. Of equals, fewer cells."""
        cost = self._costs.get(choice)
        if cost is None:
            lost = float(self._excess(choice) @ self.outlook.priorities) if self.limited else 0.0
            cells = sum(begin.cells for begin in choice.begins)
            cost = self._costs[choice] = round(lost - self.outlook.value(choice), 9), cells
        return cost

    # -- what is handed out -----------------------------------------------------------------------------------

    def _shared(self, choice: Choice, value: float) -> Sharing:
        rates = self.outlook.rates(choice)
        begin = {name: self.cells.members(b.first, b.cells) for name, b in zip(self.names, choice.begins, strict=True)}
        everyone = tuple(range(self.state.workers))
        speeds = ", ".join(f"{name} {rate:.2f}" for name, rate in list(rates.items())[:4])
        return Sharing(
            mode=Mode.SHARE,
            reason=f"side by side, {value:.2f} times the work of taking turns (each of its speed alone: {speeds}); "
            f"rollouts begin on {places(begin, self.state.workers)}",
            begin={p.name: begin.get(p.name, everyone) for p in self.state.pipelines},
            relocations=tuple(self._relocations(choice)),
            weights={p.name: p.priority for p in self.state.pipelines}
            | dict(zip(self.names, choice.weights, strict=True)),
            rates=rates,
        )

    def _relocations(self, choice: Choice) -> Iterator[Relocation]:
        for i, now in enumerate(choice.nows):
            found = self.outlook.alternatives[i]
            if not found or found[now].what in (What.STAY, What.LATER):
                continue
            stay, chosen = found[0], found[now]
            n, rest_s = len(self.outlook.prospects[i].present), float(self.outlook.flow(choice).rollout_s[i])
            stay_s = float(self.outlook.flow(_with_now(choice, i, 0)).rollout_s[i])
            net_s = stay.work_s - chosen.work_s
            if chosen.what is What.SPREAD:
                net_s = max(net_s, self._done_s(choice) - self._done_s(_with_now(choice, i, 0)))
            yield Relocation(
                pipeline=self.names[i],
                kind=str(chosen.what),
                to=chosen.to,
                reason=f"{n} samples left: on {on_workers(chosen.to)} they take {lasting(chosen.work_s)} of workers' "
                f"time instead of {lasting(stay.work_s)}, {lasting(chosen.cost_work_s)} for the move included; the "
                f"end is in {lasting(rest_s)} instead of {lasting(stay_s)}",
                gain_s=net_s + chosen.cost_s,
                cost_s=chosen.cost_s,
                rest_s=rest_s,
            )

    def _hold(self, why: str) -> Sharing:
        return _in_turns(self.state, f"in turns, each with all workers to itself: {why}", self.outlook.turns())


def _in_turns(state: ClusterState, reason: str, rates: Mapping[str, float] | None = None) -> Sharing:
    everyone = tuple(range(state.workers))
    return Sharing(
        mode=Mode.HOLD,
        reason=reason,
        begin={p.name: everyone for p in state.pipelines},
        weights={p.name: p.priority for p in state.pipelines},
        widens=frozenset(p.name for p in state.pipelines if p.may_widen),
        rates=rates or {},
    )


def _alone(state: ClusterState, *, merge: bool) -> Sharing:
    """One pipeline has all the work: all workers are its own."""
    everyone = tuple(range(state.workers))
    (one,) = (p for p in state.pipelines if p.steps_left > 0)
    return Sharing(
        mode=Mode.SHARE,
        reason=f"{one.name} has all {state.workers} workers to itself",
        begin={p.name: everyone for p in state.pipelines},
        relocations=tuple(_spread_alone(state)) if merge else (),
        weights={p.name: p.priority for p in state.pipelines},
        widens=frozenset([one.name]) if one.may_widen else frozenset(),
        rates={one.name: 1.0},
    )


def _spread_alone(state: ClusterState) -> Iterator[Relocation]:
    """A rollout that has become alone goes to all workers, if it ends earlier for it."""
    outlook = Outlook(state, merges=False)
    found = outlook.alternatives[0]
    for chosen in found[1:]:
        if chosen.what is What.SPREAD:
            stay = found[0]
            yield Relocation(
                pipeline=outlook.prospects[0].state.name,
                kind=str(What.SPREAD),
                to=chosen.to,
                reason=f"{len(outlook.prospects[0].present)} samples left, and no other pipeline has work: "
                f"on {on_workers(chosen.to)} they should end in {lasting(chosen.end_s)} "
                f"instead of {lasting(stay.end_s)}",
                gain_s=stay.end_s - (chosen.end_s - chosen.cost_s),
                cost_s=chosen.cost_s,
                rest_s=chosen.end_s,
            )


def _with_begin(choice: Choice, i: int, begin: Begin) -> Choice:
    return choice._replace(begins=(*choice.begins[:i], begin, *choice.begins[i + 1 :]))


def _with_now(choice: Choice, i: int, now: int) -> Choice:
    return choice._replace(nows=(*choice.nows[:i], now, *choice.nows[i + 1 :]))
