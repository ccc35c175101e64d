"""The layout of a rollout: one switch at a time, each under its lease, and single workers again in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from longtail.cluster.messages import Alive, Switch, Switched
from longtail.core.config import Pipeline
from longtail.core.events import MoveEnded, MoveMade, Note
from longtail.core.types import Layout
from longtail.planner.order import Work
from longtail.rl.tasks import Example
from longtail.runtime.leases import LeaseBook, Leases
from longtail.runtime.live import KnownLengths
from longtail.runtime.step import StepBatch
from longtail.runtime.widen import StepWiden
from planner.rollouts import table

FASTER = table({1: (0.02, 0.001, 0.0), 2: (0.011, 0.0006, 0.0), 4: (0.006, 0.0004, 0.0)}, kv_heads=4)
"""Steps of wide groups are shorter, but narrow groups get more done together."""
SLOWER = table({1: (0.02, 0.001, 0.0), 2: (0.2, 0.001, 0.0)}, kv_heads=4)


@dataclass
class Bench:
    """A StepWiden between a lease book and workers that do as they are told, when the test says so."""

    workers: int = 2
    tp: int | str = "auto"
    costs: object = FASTER
    contended: bool = False
    lengths: tuple[int, ...] = (5, 6, 90, 8)
    sent: list[tuple[int, Switch]] = field(default_factory=list)
    events: list = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.book = LeaseBook()
        rollout = {"tp": self.tp, "prompts": len(self.lengths) // 2, "max_tokens": 100}
        config = Pipeline.model_validate(
            {"model": "tiny", "task": "collatz", "algorithm": {"group_size": 2}, "rollout": rollout}
        )
        self.widen = StepWiden(
            SimpleNamespace(name="a", config=config, kv_heads=4, tables=SimpleNamespace(find=lambda: self.costs)),
            workers=self.workers,
            send=lambda worker, command: self.sent.append((worker, command)),
            emit=self.events.append,
            leases=Leases(self.book, "a", contended=lambda: self.contended),
            clock=SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now),
        )
        prompts = [np.arange(4)] * (len(self.lengths) // 2)
        self.batch = StepBatch.of(0, [Example("p", {}) for _ in prompts], prompts, 2)
        self.requests = self.batch.requests(config, SimpleNamespace(max_tokens=100), self.workers)

    def begin(self) -> bool:
        samples = np.array([r.samples for r in self.requests])
        work = Work.known(samples, np.full(len(samples), 4), np.array(self.lengths))
        return self.widen.begin(self.batch, self.requests, work, KnownLengths(np.array(self.lengths)))

    def grant(self) -> bool:
        (lease,) = self.book.grant()
        return self.widen.granted(lease, attempt=1)

    def hear(self, generated: dict[int, list[list[int]]]) -> None:
        """What each leader reports: of each of its requests the tokens of each sample."""
        requests = iter(self.requests)
        for worker, counts in generated.items():
            mine = [next(requests) for _ in counts]
            report = Alive(
                worker=worker, pipeline="a", attempt=1, step=0,
                request_ids=tuple(r.request_id for r in mine), generated=tuple(np.array(c) for c in counts),
            )  # fmt: skip
            self.widen.alive(report, dispatched=True)

    def end(self, *samples: int) -> None:
        for number in samples:
            self.widen.ended(number // 2, number % 2, tokens=self.lengths[number], cut_off=False)

    def switched(self, refused: str | None = None) -> None:
        """All members of the switch that was sent last report it."""
        _, command = self.sent[-1]
        singles = tuple((w,) for w in command.lease.workers)
        groups = singles if refused else command.groups
        for worker in command.lease.workers:
            report = Switched(
                worker=worker, pipeline="a", attempt=1, step=0, lease_id=command.lease.lease_id, groups=groups,
                duration_s=0.1 * (worker + 1), sequences=2, moved_bytes=10, recomputed_tokens=3, refused=refused,
            )  # fmt: skip
            self.widen.switched(report)
            if all(len(group) == 1 for group in groups):
                self.book.member_done("a", worker, command.lease.lease_id)

    def of_kind(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


def in_the_tail(**options) -> Bench:
    """One sample is left, of a rollout that began narrow because others had work then."""
    bench = Bench(**options)
    bench.contended, contended = True, bench.contended
    assert bench.begin()
    bench.contended = contended
    bench.end(0, 1, 3)
    bench.now = 1.0
    bench.hear({0: [[-1, -1]], 1: [[8, -1]]})
    return bench


def test_a_fixed_degree_is_taken_before_the_first_request_goes_out():
    bench = Bench(workers=4, tp=2, lengths=(5,) * 8)
    assert not bench.begin()
    assert bench.grant()
    assert bench.widen.layout == Layout(((0, 1), (2, 3)))
    assert [worker for worker, _ in bench.sent] == [0, 1, 2, 3]
    assert {command.groups for _, command in bench.sent} == {((0, 1), (2, 3))}


def test_where_wide_groups_are_faster_from_the_start_the_rollout_begins_wide():
    bench = Bench()
    assert not bench.begin()
    assert bench.grant()
    (made,) = bench.of_kind(MoveMade)
    assert (made.move, made.layout, made.workers) == ("widen", "TP2", [0, 1])
    assert made.predicted_gain_s > 0
    bench.switched()
    bench.now = 2.0
    bench.end(0, 1, 2, 3)
    bench.widen.rollout_over()
    bench.switched()
    bench.widen.finish()
    (ended,) = bench.of_kind(MoveEnded)
    assert ended.rest_s == pytest.approx(2.0)
    assert ended.cost_s == pytest.approx(0.2)
    assert (ended.moved_bytes, ended.recomputed_tokens) == (20, 3)


def test_where_they_are_slower_nothing_is_ever_switched():
    bench = in_the_tail(costs=SLOWER)
    assert bench.sent == []
    assert bench.book.grant() == []


def test_the_tail_is_widened_under_a_lease_and_dissolved_when_the_rollout_is_over():
    bench = in_the_tail()
    assert not bench.grant()
    assert [worker for worker, _ in bench.sent] == [0, 1]
    bench.switched()
    assert bench.widen.layout == Layout(((0, 1),))
    bench.book.ask("other", (1,))
    assert bench.book.grant() == []
    bench.now = 3.0
    bench.end(2)
    bench.widen.rollout_over()
    assert bench.sent[-1][0] == 0
    assert bench.sent[-1][1].groups == ((0,), (1,))
    bench.switched()
    assert bench.widen.layout == Layout.narrow(2)
    assert [lease.pipeline for lease in bench.book.grant()] == ["other"]
    bench.widen.finish()
    (ended,) = bench.of_kind(MoveEnded)
    assert ended.rest_s == pytest.approx(2.0)
    assert ended.gain_s == pytest.approx(82 * 0.021 - 2.0, rel=0.01)


def test_nothing_is_decided_before_every_live_sample_has_been_heard_of():
    bench = Bench(contended=True)
    bench.begin()
    bench.contended = False
    bench.end(0, 1)
    bench.hear({0: [[-1, -1]]})
    assert bench.book.grant() == []


def test_a_rollout_that_ends_while_it_waits_for_its_lease_asks_no_more():
    bench = in_the_tail()
    bench.end(2)
    bench.widen.rollout_over()
    assert bench.book.grant() == []
    assert bench.sent == []


def test_a_rollout_that_ends_while_its_switch_is_under_way_is_dissolved_afterwards():
    bench = in_the_tail()
    bench.grant()
    bench.end(2)
    bench.widen.rollout_over()
    assert len(bench.sent) == 2
    bench.switched()
    assert bench.sent[-1][1].groups == ((0,), (1,))
    bench.switched()
    bench.book.ask("a", (0, 1))
    assert [lease.purpose for lease in bench.book.grant()] == ["update"]


def test_a_refused_switch_is_told_once_and_not_tried_again_in_this_step():
    bench = in_the_tail()
    bench.grant()
    bench.switched(refused="there is no room")
    assert bench.widen.layout == Layout.narrow(2)
    bench.hear({0: [[-1, -1]], 1: [[9, -1]]})
    assert bench.book.grant() == []
    assert [note.level for note in bench.of_kind(Note)] == ["warning"]
    bench.end(2)
    bench.widen.rollout_over()
    bench.widen.finish()
    (ended,) = bench.of_kind(MoveEnded)
    assert ended.refused == "there is no room"
    assert ended.gain_s is None


def test_while_others_have_work_nothing_is_widened():
    bench = in_the_tail(contended=True)
    assert bench.book.grant() == []


def test_a_long_tail_gives_its_workers_back_when_others_come_to_need_them():
    costs = table({1: (0.02, 0.001, 0.0), 2: (0.018, 0.001, 0.0)}, kv_heads=4)
    bench = in_the_tail(costs=costs)
    bench.grant()
    bench.switched()
    bench.contended = True
    bench.hear({0: [[-1, -1], [9, -1]]})
    assert not bench.grant()
    assert bench.sent[-1][1].groups == ((0,), (1,))
    assert bench.of_kind(MoveMade)[-1].move == "narrow"
    bench.switched()
    bench.book.ask("other", (0, 1))
    assert [lease.pipeline for lease in bench.book.grant()] == ["other"]


def test_an_abandoned_step_leaves_no_lease_behind():
    bench = in_the_tail()
    bench.grant()
    bench.widen.abandon()
    bench.book.ask("other", (0, 1))
    assert [lease.pipeline for lease in bench.book.grant()] == ["other"]


def test_a_threshold_merges_pairs_on_their_own():
    bench = Bench(workers=4, tp="threshold:3", lengths=(9, 9, 9, 9, 50, 5, 50, 5))
    assert bench.begin()
    bench.end(5, 7)
    bench.hear({0: [[6, 6]], 1: [[6, 6]], 2: [[6, -1]], 3: [[6, -1]]})
    bench.grant()
    assert {command.groups for _, command in bench.sent} == {((2, 3),)}
    assert [worker for worker, _ in bench.sent] == [2, 3]
