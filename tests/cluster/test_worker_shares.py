"""A worker shares its time between pipelines by weight, whatever quanta take, whoever sleeps, whatever changes."""

from __future__ import annotations

import queue
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.cluster import worker as worker_module
from longtail.cluster.fair import FairShare
from longtail.cluster.messages import ClosePipeline, Shares
from longtail.cluster.tenant import Quantum
from longtail.cluster.worker import Worker
from longtail.core.types import SubStage

NAMES = "abc"
SECONDS = st.floats(0.001, 10.0)
WEIGHTS = st.fixed_dictionaries({name: st.floats(0.05, 20.0) for name in NAMES})


class Sharing:
    """Serves pipelines as a worker would; ``lags[f, g]`` are seconds over weight of f less those of g, from the start
    and after each quantum."""

    def __init__(self, fair: FairShare, weights: dict[str, float], longest: dict[str, float]) -> None:
        self.fair, self.weights, self.longest = fair, weights, longest
        self.served = dict.fromkeys(weights, 0.0)
        self.lags = {(f, g): [0.0] for f in weights for g in weights if f < g}

    def serve(self, quanta: dict[str, float]) -> None:
        name = self.fair.next(quanta)
        assert name is not None
        assert quanta[name] <= self.longest[name]
        self.fair.used(name, quanta[name], [other for other in quanta if other != name])
        self.served[name] += quanta[name] / self.weights[name]
        for (f, g), lags in self.lags.items():
            lags.append(self.served[f] - self.served[g])

    def assert_fair(self) -> None:
        """Over every stretch of time, no two differ by more than a quantum of each."""
        for (f, g), lags in self.lags.items():
            bound = self.longest[f] / self.weights[f] + self.longest[g] / self.weights[g]
            assert max(lags) - min(lags) <= bound * (1 + 1e-9)


QUANTA = st.lists(st.fixed_dictionaries(dict.fromkeys(NAMES, SECONDS)), min_size=1, max_size=80)


def longest(*quanta: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(q[name] for some in quanta for q in some) for name in NAMES}


@settings(deadline=None)
@given(weights=WEIGHTS, quanta=QUANTA)
def test_times_are_in_proportion_to_weights_to_within_a_quantum_over_any_stretch_of_time(weights, quanta):
    fair = FairShare()
    fair.weigh(weights.items())
    sharing = Sharing(fair, weights, longest(quanta))
    for each in quanta:
        sharing.serve(each)
    sharing.assert_fair()


@settings(deadline=None)
@given(before=WEIGHTS, after=WEIGHTS, quanta=QUANTA, more=QUANTA)
def test_new_weights_hold_from_the_next_quantum_on_and_give_nobody_a_burst(before, after, quanta, more):
    fair, most = FairShare(), longest(quanta, more)
    fair.weigh(before.items())
    earlier = Sharing(fair, before, most)
    for each in quanta:
        earlier.serve(each)
    fair.weigh(after.items())
    later = Sharing(fair, after, most)
    for each in more:
        later.serve(each)
    later.assert_fair()


@settings(deadline=None)
@given(weights=WEIGHTS, asleep=QUANTA, awake=QUANTA)
def test_a_pipeline_that_has_slept_is_level_with_the_others_and_claims_nothing(weights, asleep, awake):
    fair, most = FairShare(), longest(asleep, awake)
    fair.weigh(weights.items())
    without_c = Sharing(fair, weights, most)
    for each in asleep:
        without_c.serve({name: each[name] for name in "ab"})
    all_three = Sharing(fair, weights, most)
    for each in awake:
        all_three.serve(each)
    all_three.assert_fair()


def test_who_used_time_while_nobody_else_had_work_owes_nothing_for_it():
    fair = FairShare()
    fair.weigh([("a", 0.01)])
    fair.used("a", 100.0, waiting=[])
    fair.used("b", 1.0, waiting=["a"])
    assert fair.next("ab") == "a"


def test_who_was_served_out_of_turn_waits_until_the_others_have_had_as_much():
    fair = FairShare()
    fair.used("a", 5.0, waiting=["b"])  # an update, say
    order = []
    for _ in range(6):
        order.append(name := fair.next("ab"))
        fair.used(name, 1.0, waiting=[other for other in "ab" if other != name])
    assert order == list("bbbbba")


def test_a_weight_outlives_its_pipeline_and_the_first_is_1():
    fair = FairShare()
    fair.weigh([("a", 3.0)])
    fair.used("a", 1.0, waiting=["b"])
    fair.forget("a")
    assert (fair.weight("a"), fair.weight("b")) == (3.0, 1.0)
    assert fair.next([]) is None


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_positive_number_is_refused_with_its_pipeline(weight):
    with pytest.raises(ValueError, match="weight of pipeline a"):
        Shares(weights=(("b", 1.0), ("a", weight)))


class Tenant:
    """Always has work; a quantum takes ``seconds`` of the clock that ``now`` is."""

    attempt, group, lease_id, follows, runnable = 0, None, None, False, True
    hurries = expects = False
    next_substage = SubStage.DECODE

    def __init__(self, name: str, seconds: float, now: list[float]) -> None:
        self.name, self.used_s = name, 0.0
        self._seconds, self._now = seconds, now
        self.engine = SimpleNamespace(waiting=0, running=1, lanes=SimpleNamespace(used=0, total=0))

    def run_quantum(self) -> Quantum:
        self._now[0] += self._seconds
        self.used_s += self._seconds
        return Quantum(SubStage.DECODE, 0, 1, 1, [])

    def alive(self) -> None:
        return None

    def close(self) -> None:
        pass


def worker_with(monkeypatch, **seconds: float) -> tuple[Worker, dict[str, Tenant]]:
    now = [0.0]
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(time=lambda: now[0]))
    worker = Worker(0, 1, device=torch.device("cpu"), connect=lambda command: pytest.fail("nobody connects"))
    tenants = {name: Tenant(name, each, now) for name, each in seconds.items()}
    worker.tenants.update(tenants)
    return worker, tenants


def test_pipelines_with_quanta_of_different_lengths_get_the_same_time(monkeypatch):
    worker, tenants = worker_with(monkeypatch, short=0.01, long=1.0)
    for _ in range(1010):
        worker._turn()
    assert tenants["short"].used_s == pytest.approx(tenants["long"].used_s, abs=1.01)


def test_what_other_workers_wait_for_goes_first_and_the_others_catch_up(monkeypatch):
    worker, tenants = worker_with(monkeypatch, a=0.5, b=0.01)
    worker._turn()
    worker._turn()  # each has had one
    tenants["a"].hurries = True
    worker._turn()
    assert (tenants["a"].used_s, tenants["b"].used_s) == (pytest.approx(1.0), pytest.approx(0.01))
    tenants["a"].hurries = False
    for _ in range(99):
        worker._turn()
    assert (tenants["a"].used_s, tenants["b"].used_s) == (pytest.approx(1.0), pytest.approx(1.0))


class Trainee(Tenant):
    """Has one micro-batch at a time; the next one arrives while the worker waits for it, or is ``lost``."""

    next_substage = SubStage.TRAIN
    lost = False

    def run_quantum(self) -> Quantum:
        self.runnable, self.expects = False, True
        return super().run_quantum()

    def get(self, timeout: float) -> Shares:
        """As the worker's inbox."""
        assert timeout == worker_module.PATIENCE_S
        self._now[0] += timeout
        if self.lost:
            raise queue.Empty
        self.arrive()
        return Shares(weights=())

    def arrive(self) -> None:
        self.runnable, self.expects = True, False


def trainees(monkeypatch, *, short_s: float, long_s: float) -> tuple[Worker, Trainee, Trainee]:
    """Both train; micro-batches of ``long`` are always there."""
    worker, _ = worker_with(monkeypatch)
    now = [0.0]
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(time=lambda: now[0]))
    short, long = Trainee("short", short_s, now), Trainee("long", long_s, now)
    worker.tenants.update(short=short, long=long)
    long.run_quantum = lambda: Tenant.run_quantum(long)
    nothing = queue.SimpleQueue()
    worker.inbox = SimpleNamespace(get=short.get, get_nowait=nothing.get_nowait)
    return worker, short, long


def test_a_pipeline_whose_micro_batches_come_one_by_one_keeps_its_share(monkeypatch):
    worker, short, long = trainees(monkeypatch, short_s=0.05, long_s=0.4)
    for _ in range(900):
        if short.expects and short._now[0] % 0.7 < 0.3:
            short.arrive()  # in time, now and then
        worker._turn()
        worker._waited_for.clear()  # as each of its micro-batches does
    assert short.used_s == pytest.approx(long.used_s, rel=0.05)


def test_a_worker_waits_once_for_a_micro_batch_that_does_not_come(monkeypatch):
    worker, short, long = trainees(monkeypatch, short_s=0.05, long_s=0.4)
    short.lost = True
    for _ in range(30):
        worker._turn()
    assert (short.used_s, short._now[0]) == (0.05, pytest.approx(0.05 + worker_module.PATIENCE_S + long.used_s))


def test_a_worker_obeys_shares_between_two_quanta_and_keeps_those_of_who_is_not_named(monkeypatch):
    worker, tenants = worker_with(monkeypatch, a=0.03, b=0.02, c=0.05)
    worker.give(Shares(weights=(("a", 3.0), ("later", 2.0))))
    for _ in range(2000):
        worker._turn()
    assert tenants["a"].used_s / tenants["b"].used_s == pytest.approx(3.0, rel=0.02)
    assert tenants["b"].used_s == pytest.approx(tenants["c"].used_s, rel=0.02)
    before = {name: tenant.used_s for name, tenant in tenants.items()}
    worker.give(Shares(weights=(("b", 6.0),)))
    for _ in range(2000):
        worker._turn()
    had = {name: tenant.used_s - before[name] for name, tenant in tenants.items()}
    assert had["b"] / had["a"] == pytest.approx(2.0, rel=0.02)
    assert had["a"] / had["c"] == pytest.approx(3.0, rel=0.02)


def test_a_pipeline_that_comes_later_or_again_has_the_weight_that_its_name_was_given(monkeypatch):
    worker, tenants = worker_with(monkeypatch, a=0.03, b=0.02)
    worker.give(Shares(weights=(("a", 4.0),)))
    worker._turn()
    worker.give(ClosePipeline(pipeline="a", attempt=0))
    worker._turn()
    assert set(worker.tenants) == {"b"}
    worker.tenants["a"] = again = Tenant("a", 0.03, tenants["b"]._now)
    before = tenants["b"].used_s
    for _ in range(2000):
        worker._turn()
    assert again.used_s / (tenants["b"].used_s - before) == pytest.approx(4.0, rel=0.02)


def test_reports_of_progress_come_no_more_often_for_more_pipelines(monkeypatch):
    worker, tenants = worker_with(monkeypatch, **dict.fromkeys("abcd", 0.01))
    times = []
    for tenant in tenants.values():
        tenant.alive = lambda tenant=tenant: times.append(tenant._now[0]) or SimpleNamespace()
    for _ in range(400):
        worker._turn()
    told = sorted(set(times))
    assert min(b - a for a, b in pairwise(told)) >= 4 * worker_module.ALIVE_EVERY_S - 1e-9
