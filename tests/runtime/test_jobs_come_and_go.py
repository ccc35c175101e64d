"""Whatever jobs come, go, fail and lose workers: what is to finish does, nothing happens twice, nobody is stuck."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longtail.core.config import Pipeline, SharingPolicy
from longtail.core.events import PipelineEnded, WorkerLost
from simulated_jobs import World, all_samples
from simulated_run import WIDE, pipeline

ROWS = 12
LONGEST_LEASE_S = 6.0
"""A profile takes 5 s."""


class Job(NamedTuple):
    """Comes at ``comes_s``; what may befall it is None where nothing does. ``again``: comes again when it is over."""

    steps: int
    prompts: int
    group_size: int
    max_running: int
    staleness: int
    tp: int | str
    comes_s: float
    fails_at: int | None
    stops_s: float | None
    again: bool

    def config(self, seed: int) -> Pipeline:
        return pipeline(
            seed=seed, steps=self.steps, rollout__prompts=self.prompts, algorithm__group_size=self.group_size,
            rollout__max_running=self.max_running, rollout__tp=self.tp, max_staleness=self.staleness,
            checkpoint__every=2,
        )  # fmt: skip


def sometimes(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(st.none(), st.none(), strategy)


TIMES = st.floats(0.0, 20.0)
JOBS = st.builds(
    Job,
    steps=st.integers(1, 3),
    prompts=st.integers(1, 4),
    group_size=st.integers(2, 4),
    max_running=st.integers(1, 8),
    staleness=st.sampled_from([0, 0, 1, 2]),
    tp=st.sampled_from([1, 1, 1, 2, 2, "threshold:2"]),
    comes_s=st.one_of(st.just(0.0), TIMES),
    fails_at=sometimes(st.integers(1, 3)),
    stops_s=sometimes(TIMES),
    again=st.booleans(),
)


def shape(seed: int) -> list[list[int]]:
    """Lengths with a long tail."""
    return np.minimum(np.random.default_rng(seed).lognormal(2.5, 1.2, (ROWS, 4)).astype(int) + 1, 200).tolist()


class Scene:
    """Plays ``jobs``: they come, are stopped and come again as they are to; workers die at the times in ``deaths``."""

    def __init__(self, folder: Path, jobs: list[Job], *, corun: str, workers: int, deaths: list[tuple[float, int]]):
        self.jobs = {f"job{i}": job for i, job in enumerate(jobs)}
        self.configs = {name: job.config(i) for i, (name, job) in enumerate(self.jobs.items())}
        self.world = World(
            folder, lengths=shape(0), workers=workers, policy=SharingPolicy(corun=corun),
            ends_after=len(jobs) + sum(job.again for job in jobs), costs=WIDE,
            fails_at={name: job.fails_at for name, job in self.jobs.items() if job.fails_at is not None},
        )  # fmt: skip
        for name, job in self.jobs.items():
            self.world.cluster.later(job.comes_s, lambda name=name: self._comes(name))
            if job.stops_s is not None:
                self.world.cluster.later(job.comes_s + job.stops_s, lambda name=name: self.world.controller.stop(name))
        self._to_come_again = {name for name, job in self.jobs.items() if job.again}
        for after_s, worker in deaths:
            self.world.cluster.kill(worker % workers, after_s=after_s)

    def _comes(self, name: str) -> None:
        self.world.submit(name, self.configs[name])
        self._look(name)

    def _look(self, name: str) -> None:
        """Is it time to come again?"""
        if name in self._to_come_again:
            if name in self.world.controller.ended:
                self._to_come_again.remove(name)
                self.world.submit(name, self.configs[name])
            else:
                self.world.cluster.later(0.5, lambda: self._look(name))

    def play(self) -> None:
        self.world.run()

    def check(self) -> None:
        samples, outcomes = self.world.samples(), self.world.controller.ended
        assert set(outcomes) == set(self.jobs)
        assert self.world.controller.drivers == {}
        gave_up = any("workers were lost" in (outcome.error or "") for outcome in outcomes.values())
        for name, job in self.jobs.items():
            outcome, config = outcomes[name], self.configs[name]
            reasons = [
                e.reason for e in self.world.record.events if isinstance(e, PipelineEnded) and e.pipeline == name
            ]
            assert len(reasons) == 1 + job.again
            assert reasons.count("interrupted") <= (job.stops_s is not None), "nobody stopped it"
            assert "failed" not in reasons or job.fails_at is not None or gave_up, outcome.error
            if outcome.stage == "finished":
                assert samples[name] == all_samples(config)
            elif outcome.stage == "interrupted":
                assert samples[name] >= all_samples(config, outcome.step)
        ends = {e.pipeline: e.t for e in self.world.record.events if isinstance(e, PipelineEnded)}
        for lease in self.world.controller._leases._held.values():
            # The run is over before workers have told that they are done with what a pipeline had begun when it ended.
            assert outcomes[lease.pipeline].stage != "finished"
            assert max(ends.values()) - ends[lease.pipeline] < LONGEST_LEASE_S
        assert self.world.controller._turns.holder is None
        assert not any(self.world.controller._turns.waits(name) for name in self.jobs)


POLICIES = st.sampled_from(["auto", "greedy", "stages", "serial"])
FAST = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FAST
@given(jobs=st.lists(JOBS, min_size=1, max_size=4), corun=POLICIES, workers=st.integers(1, 4))
def test_jobs_that_come_go_and_fail_at_any_time_leave_the_others_to_finish(tmp_path_factory, jobs, corun, workers):
    scene = Scene(tmp_path_factory.mktemp("jobs"), jobs, corun=corun, workers=workers, deaths=[])
    scene.play()
    scene.check()


@FAST
@given(
    jobs=st.lists(JOBS, min_size=1, max_size=3),
    corun=POLICIES,
    workers=st.integers(2, 4),
    deaths=st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(0, 3)), min_size=1, max_size=3),
)
def test_workers_that_die_meanwhile_cost_nobody_a_sample(tmp_path_factory, jobs, corun, workers, deaths):
    scene = Scene(tmp_path_factory.mktemp("deaths"), jobs, corun=corun, workers=workers, deaths=deaths)
    scene.play()
    scene.check()
    lost = sum(isinstance(e, WorkerLost) for e in scene.world.record.events)
    assert lost <= len(deaths)
