"""Whatever is asked of simulated workers in whatever order, and whoever dies, nothing is lost, doubled or stuck."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine_models import prompt_of, request
from longtail.cluster.messages import (
    DropWork,
    LeaseBroken,
    Lost,
    Profile,
    Profiled,
    Report,
    Sampled,
    Save,
    Saved,
    Stopped,
    Switched,
    TrainBatches,
    Trained,
    Updated,
)
from longtail.core.types import Layout, Lease, Request, StepTotals, TrainGroup, TrainSample
from longtail.rl.packing import MicroBatch
from simulated_driven import Driven, config

WORKERS = 4
NARROW = Layout.narrow(WORKERS).groups
LAYOUTS = [
    NARROW,
    ((0, 1), (2,), (3,)),
    ((0,), (1,), (2, 3)),
    ((0, 1), (2, 3)),
    ((0, 1, 2, 3),),
    ((0, 1, 2), (3,)),  # of a degree that nobody knows: refused
]
TRAIN = MicroBatch(
    (
        TrainGroup(
            prompt=np.zeros(100, np.int32),
            samples=(TrainSample(tokens=np.zeros(900, np.int32), logprobs=np.zeros(900, np.float32), advantage=1.0),),
        ),
    )
)
NAMES = st.sampled_from("pq")
ACTIONS = st.one_of(
    st.tuples(
        st.just("generate"), NAMES, st.integers(0, WORKERS - 1), st.integers(1, 60),
        st.lists(st.integers(1, 60), min_size=1, max_size=4),
    ),
    st.tuples(st.just("switch"), NAMES, st.sampled_from(LAYOUTS), st.sampled_from(["move", "recompute", "auto"])),
    st.tuples(st.just("switch"), NAMES, st.sampled_from(LAYOUTS), st.sampled_from(["move", "recompute", "auto"])),
    st.tuples(st.just("together"), NAMES, st.sampled_from(["update", "profile"])),
    st.tuples(st.just("train"), NAMES, st.integers(0, WORKERS - 1)),
    st.tuples(st.just("save"), NAMES, st.integers(0, WORKERS - 1)),
    st.tuples(st.just("drop"), NAMES),
    st.tuples(st.just("kill"), st.integers(0, WORKERS - 1)),
)  # fmt: skip
PAUSES = st.one_of(st.just(0.0), st.floats(0.0, 0.01), st.floats(0.0, 1.0))


class Chaos:
    """Asks simulated workers for what a controller may ask, and recovers from losses as it does; checks all reports."""

    def __init__(self, folder: str) -> None:
        self.driven = Driven(
            WORKERS, pipelines={"p": config(max_running=3), "q": config(max_running=5)}, message_s=0.002
        )
        self._folder = folder
        self._names = list(self.driven.pipelines)
        self.layout = dict.fromkeys(self._names, NARROW)
        self.held: dict[str, Lease] = {}
        self.awaited: dict[str, set[int]] = {name: set() for name in self._names}
        """Who has not yet answered to what was sent under the pipeline's lease."""
        self.requests: dict[str, list[Request]] = {name: [] for name in self._names}
        self.ended: Counter[tuple[str, int, str, int]] = Counter()
        self.answered: Counter[tuple[type, int, int]] = Counter()
        self.promised: dict[tuple[int, int], bool] = {}
        """By lease and worker: whether it has answered, or died."""
        self.quanta: Counter[tuple[str, int, int]] = Counter()
        """Trainings and saves that are asked for and not done, by pipeline, attempt and worker."""
        self._number = 0

    # What happens

    def run(self, seconds: float) -> None:
        until = self.driven.now + seconds
        while True:
            reports = self.driven.cluster.poll(until - self.driven.now)
            if not reports:
                return
            for report in reports:
                self._take(report)
            lost = [report.worker for report in reports if isinstance(report, Lost)]
            if lost:
                self._recover(lost)

    def _take(self, report: Report) -> None:
        match report:
            case Sampled():
                for completion in report.completions:
                    key = report.pipeline, report.attempt, completion.request_id, completion.sample
                    self.ended[key] += 1
                    assert self.ended[key] == 1, f"{key} ended twice"
                    (asked,) = (r for r in self.requests[report.pipeline] if r.request_id == completion.request_id)
                    assert len(completion.tokens) == asked.forced_lengths[completion.sample]
            case Switched() | Updated() | Profiled():
                self._answer(report)
                self._went(report)
            case LeaseBroken():
                self._answer(report)
                for lease_id, worker in self.promised:
                    if worker == report.worker:
                        self.promised[lease_id, worker] = True
            case Trained() | Saved():
                self.quanta[report.pipeline, report.attempt, report.worker] -= 1

    def _answer(self, report: Switched | Updated | Profiled | LeaseBroken) -> None:
        key = type(report), report.lease_id, report.worker
        self.answered[key] += 1
        assert self.answered[key] == 1, f"{key} was reported twice"
        self.promised[report.lease_id, report.worker] = True

    def _went(self, report: Switched | Updated | Profiled) -> None:
        name = report.pipeline
        if report.attempt != self.driven.attempts[name]:
            return
        assert report.lease_id == self.held[name].lease_id
        self.awaited[name].remove(report.worker)
        if self.awaited[name]:
            return
        if isinstance(report, Switched):
            self.layout[name] = Layout(self.layout[name]).replaced(report.groups).groups
        if not isinstance(report, Switched) or all(len(group) == 1 for group in report.groups):
            del self.held[name]

    def _recover(self, lost: list[int]) -> None:
        for worker in lost:
            self.driven.cluster.restart(worker)
            self.promised |= {key: True for key in self.promised if key[1] == worker}
        self.driven.connect()
        for name in self._names:
            self.driven.open(name)
            self._begin_anew(name)

    def _begin_anew(self, name: str) -> None:
        """The attempt has just begun: nothing is held, and all requests are wanted again."""
        self.held.pop(name, None)
        self.layout[name], self.awaited[name] = NARROW, set()
        for i, item in enumerate(self.requests[name]):
            self.driven.generate(i % WORKERS, item, name=name)

    # What is asked

    def generate(self, name: str, worker: int, prompt: int, lengths: list[int]) -> None:
        self._number += 1
        leader = next(group[0] for group in self.layout[name] if worker in group)
        item = request(f"{self._number}", prompt_of(prompt), samples=len(lengths), forced=tuple(lengths), max_tokens=99)
        self.requests[name].append(item)
        self.driven.generate(leader, item, name=name)

    def switch(self, name: str, layout: tuple[tuple[int, ...], ...], how: str) -> None:
        mine = set(self.held[name].workers) if name in self.held else set()
        changed = {worker for group in set(layout) ^ set(self.layout[name]) for worker in group}
        workers = mine | changed
        others = {w for other, lease in self.held.items() if other != name for w in lease.workers}
        if self.awaited[name] or not changed or workers & others:
            return
        groups = tuple(group for group in layout if set(group) <= workers)
        before = [group for group in self.layout[name] if set(group) <= workers]
        self._promise(name, self.driven.switch(before, groups, name, how=how))

    def together(self, name: str, what: str) -> None:
        if self.held:
            return
        if what == "update":
            lease = self.driven.update(name)
        else:
            lease = self.driven.lease(range(WORKERS), name, "profile")
            command = Profile(**self.driven.of(name), lease=lease, degrees=(1, 2, 4), fine=False)
            self.driven.send(range(WORKERS), command)
        self._promise(name, lease)

    def _promise(self, name: str, lease: Lease) -> None:
        self.held[name], self.awaited[name] = lease, set(lease.workers)
        self.promised |= {(lease.lease_id, worker): False for worker in lease.workers}

    def train(self, name: str, worker: int) -> None:
        key = name, self.driven.attempts[name], worker
        if not self.quanta[key]:
            self.quanta[key] += 1
            totals = StepTotals(samples=1, tokens=900, max_tokens=900)
            train = TrainBatches(**self.driven.of(name), step=0, batches=((0, TRAIN),), totals=totals)
            self.driven.send([worker], train)

    def save(self, name: str, worker: int) -> None:
        self.quanta[name, self.driven.attempts[name], worker] += 1
        self.driven.send([worker], Save(**self.driven.of(name), step=0, folder=self._folder, source=""))

    def drop(self, name: str) -> None:
        self.driven.attempts[name] += 1
        self.driven.send(range(WORKERS), DropWork(**self.driven.of(name)))
        self._begin_anew(name)

    def kill(self, worker: int) -> None:
        self.driven.cluster.kill(worker)

    # The end

    def finish(self) -> None:
        for _ in range(50):
            self.run(20.0)
            for name in self._names:
                self.switch(name, NARROW, "auto")
            if not self.held and not self._missing():
                break
        assert not self.held, "a lease came to no end"
        assert not self._missing(), "a sample is lost, or a worker is stuck"
        for name in self._names:
            self.together(name, "update")
            self.run(20.0)
            assert not self.held, "an update came to no end"
        assert all(self.promised.values())
        attempts = self.driven.attempts
        assert not any(count for (name, attempt, _), count in self.quanta.items() if attempt == attempts[name])
        self.driven.stop()
        assert {report.worker for report in self.driven.all(Stopped)} == set(range(WORKERS))

    def _missing(self) -> list[tuple[str, str, int]]:
        return [
            (name, item.request_id, sample)
            for name in self._names
            for item in self.requests[name]
            for sample in range(item.samples)
            if not self.ended[name, self.driven.attempts[name], item.request_id, sample]
        ]


@settings(max_examples=150, deadline=None)
@given(actions=st.lists(st.tuples(PAUSES, ACTIONS), min_size=3, max_size=30))
def test_every_sample_ends_exactly_once_or_with_its_attempt_and_every_lease_comes_to_an_end(tmp_path_factory, actions):
    chaos = Chaos(str(tmp_path_factory.getbasetemp()))
    for pause_s, (action, *arguments) in actions:
        chaos.run(pause_s)
        getattr(chaos, action)(*arguments)
    chaos.finish()
