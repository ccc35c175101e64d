"""Workers that share their time among pipelines, one quantum after the other: what ``planner/fluid.py`` is an idea
of."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from longtail.costs.table import CostTable
from longtail.planner.solo import Sequences


@dataclass
class Job:
    """A synchronous pipeline that does the same step again and again: ``sequences`` on its workers (each a range of a
    :class:`Sequences`), then ``score_s``, then micro-batches of ``micro_s`` each on whoever has time, then an
    update."""

    costs: CostTable
    sequences: Sequences
    score_s: float
    micro_s: float
    micros: int
    update_s: float
    weight: float = 1.0
    running: list[list[list[int]]] = field(default_factory=list)
    ready_s: float = -1.0
    pool: int = 0
    training: int = 0
    trains: bool = False
    begun_s: float = 0.0
    steps: list[float] = field(default_factory=list)
    """How long each step took."""

    def begin(self, time_s: float) -> None:
        s = self.sequences
        self.begun_s, self.ready_s, self.trains = time_s, -1.0, False
        self.running = [
            [[int(s.left[i]), int(s.context[i])] for i in range(s.bounds[w], s.bounds[w + 1])] for w in range(s.workers)
        ]


class Quanta:
    def __init__(self, workers: int, jobs: list[Job]) -> None:
        self.workers, self.jobs = workers, jobs
        self.used = [[0.0] * len(jobs) for _ in range(workers)]
        self.had_work = [[False] * len(jobs) for _ in range(workers)]
        for job in jobs:
            job.begin(0.0)

    def run(self, horizon_s: float) -> None:
        busy: list[tuple[float, int, int, bool]] = []  # ends, worker, job, whether it trains
        idle, time_s = set(range(self.workers)), 0.0
        while time_s < horizon_s:
            for job in self.jobs:
                if job.ready_s >= 0 and job.ready_s <= time_s and not job.trains:
                    job.trains, job.pool = True, job.micros
            updates = [j for j, job in enumerate(self.jobs) if job.trains and job.pool == 0 and job.training == 0]
            if updates:
                if busy:  # all workers meet: nobody begins anything
                    time_s = self._finish(heapq.heappop(busy), idle)
                    continue
                for j in updates:
                    job = self.jobs[j]
                    time_s += job.update_s
                    job.steps.append(time_s - job.begun_s)
                    job.begin(time_s)
                continue
            for worker in sorted(idle):
                if (chosen := self._choose(worker)) is not None:
                    j, trains, seconds = chosen
                    self.used[worker][j] += seconds / self.jobs[j].weight
                    heapq.heappush(busy, (time_s + seconds, worker, j, trains))
                    idle.discard(worker)
            timers = [job.ready_s for job in self.jobs if job.ready_s > time_s and not job.trains]
            if busy and (not timers or busy[0][0] <= min(timers)):
                time_s = self._finish(heapq.heappop(busy), idle)
            else:
                time_s = min(timers)

    def _choose(self, worker: int) -> tuple[int, bool, float] | None:
        used, had = self.used[worker], self.had_work[worker]
        work = [bool(job.running[worker]) or (job.trains and job.pool > 0) for job in self.jobs]
        active = [used[j] for j in range(len(work)) if work[j] and had[j]]
        for j in range(len(work)):
            if work[j] and not had[j] and active:
                used[j] = max(used[j], min(active))
            had[j] = work[j]
        candidates = [j for j in range(len(work)) if work[j]]
        if not candidates:
            return None
        j = min(candidates, key=lambda j: (used[j], j))
        job = self.jobs[j]
        if job.running[worker]:
            batch = job.running[worker]
            return j, False, job.costs.decode_s(1, len(batch), sum(context for _, context in batch))
        job.pool -= 1
        job.training += 1
        return j, True, job.micro_s

    def _finish(self, quantum: tuple[float, int, int, bool], idle: set[int]) -> float:
        time_s, worker, j, trains = quantum
        job = self.jobs[j]
        idle.add(worker)
        if trains:
            job.training -= 1
        else:
            for sequence in job.running[worker]:
                sequence[0] -= 1
                sequence[1] += 1
            job.running[worker] = [sequence for sequence in job.running[worker] if sequence[0]]
            if not any(job.running):
                job.ready_s = time_s + job.score_s
        return time_s
