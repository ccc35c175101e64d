"""The controller's loop: take reports, move each pipeline on, grant leases, recover from lost workers.

It runs in one thread and never waits for anything but the next report. The same loop drives any
:class:`~longtail.cluster.protocol.Cluster`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from longtail.cluster.messages import (
    Connect,
    Happened,
    LeaseBroken,
    Lost,
    PipelineFailed,
    PipelineReport,
    Profiled,
    Report,
    Stop,
    Stopped,
    Switched,
    Updated,
)
from longtail.cluster.protocol import Cluster
from longtail.core.clock import Clock
from longtail.core.errors import CapacityError, LongtailError, PeerLost
from longtail.core.events import Event, Note, Sink, Span, WorkerLost
from longtail.runtime.leases import LeaseBook, Leases
from longtail.runtime.pipeline import PipelineDriver
from longtail.runtime.plan import PipelinePlan, Rewards

POLL_S = 0.5
BROKEN_LEASE_GRACE_S = 15.0
MOST_LOSSES_WITHOUT_PROGRESS = 3
STOP_S = 5.0


class Controller:
    """Runs pipelines on a cluster until each has finished, failed or been interrupted.

    ``interrupt()`` may be called from a signal handler: the loop then lets every pipeline save and end. ``clock`` is
    the cluster's time: the machine's, or a simulated one.
    """

    def __init__(
        self,
        cluster: Cluster,
        plans: Sequence[PipelinePlan],
        *,
        rewards: Rewards,
        sink: Sink,
        clock: Clock = time,
    ) -> None:
        self._cluster, self._sink, self._clock = cluster, sink, clock
        self._leases = LeaseBook()
        self._generation = 0
        self._broken_since: float | None = None
        self._losses = 0
        self._progressed: set[str] = set()
        self._interrupted = False
        self.drivers = {
            plan.name: PipelineDriver(
                plan,
                workers=cluster.workers,
                rewards=rewards,
                send=lambda worker, command: cluster.send(worker, [command]),
                emit=self._emit,
                leases=Leases(self._leases, plan.name, contended=partial(self._contended, plan.name)),
                wake=cluster.wake,
                clock=clock,
            )
            for plan in plans
        }

    def interrupt(self) -> None:
        self._interrupted = True
        self._cluster.wake()

    def run(self) -> None:
        self._connect()
        for driver in self.drivers.values():
            driver.open()
        while not all(d.over for d in self.drivers.values()):
            self._turn()
        self._stop_workers()

    def _turn(self) -> None:
        reports = self._cluster.poll(POLL_S)
        lost = [r for r in reports if isinstance(r, Lost)]
        for report in reports:
            self._handle(report)
        if lost:
            self._replace(lost)
        elif self._broken_since is not None and self._clock.monotonic() - self._broken_since > BROKEN_LEASE_GRACE_S:
            self._recover("a collective operation failed")
        for driver in self._live():
            if self._interrupted:
                driver.interrupt()
            self._guarded(driver, driver.collect_rewards)
        for lease in self._leases.grant():
            driver = self.drivers[lease.pipeline]
            if driver.over:
                self._leases.release(lease.lease_id)
            else:
                self._guarded(driver, partial(driver.granted, lease))

    def _live(self) -> list[PipelineDriver]:
        return [d for d in self.drivers.values() if not d.over]

    def _handle(self, report: Report) -> None:
        match report:
            case Happened():
                for event in report.events:
                    self._sink.write(event)
                    if isinstance(event, Span) and event.pipeline in self.drivers:
                        self.drivers[event.pipeline].observe(event)
            case LeaseBroken():
                driver = self.drivers[report.pipeline]
                self._leases.member_done(report.pipeline, report.worker)
                if report.attempt == driver.attempt and not driver.over:  # else an earlier recovery has seen to it
                    self._broken_since = self._broken_since or self._clock.monotonic()
            case PipelineReport():
                if isinstance(report, PipelineFailed):
                    self._leases.member_done(report.pipeline, report.worker)
                elif isinstance(report, Updated | Profiled) or (
                    isinstance(report, Switched) and all(len(group) == 1 for group in report.groups)
                ):
                    self._leases.member_done(report.pipeline, report.worker, report.lease_id)
                if isinstance(report, Updated):
                    self._progressed.add(report.pipeline)
                driver = self.drivers[report.pipeline]
                self._guarded(driver, partial(driver.handle, report))

    def _contended(self, pipeline: str) -> bool:
        """Whether another pipeline has, or is about to have, work for the workers."""
        return any(d.name != pipeline and d.stage not in ("new", "score") for d in self._live())

    def _guarded(self, driver: PipelineDriver, work: Callable[[], None]) -> None:
        """Run ``work`` of one pipeline; an error in it (say, a task that cannot make its next prompt) ends that one."""
        try:
            work()
        except LongtailError as error:
            driver.fail(f"{driver.name}: {error}")
        except Exception as error:
            self._emit(Note(level="error", message=traceback.format_exc(), pipeline=driver.name))
            driver.fail(f"{driver.name}: {type(error).__name__}: {error}")

    def _replace(self, lost: Sequence[Lost]) -> None:
        """Start fresh processes for lost workers; gives up when losses repeat before every pipeline has progressed."""
        for report in lost:
            self._emit(WorkerLost(worker=report.worker, reason=report.reason))
        if all(d.name in self._progressed for d in self._live()):
            self._losses = 0
        self._progressed.clear()
        self._losses += 1
        try:
            if self._losses > MOST_LOSSES_WITHOUT_PROGRESS:
                raise CapacityError(
                    f"workers were lost {self._losses} times before every pipeline had finished an update"
                    f" (the last: worker {lost[-1].worker}, {lost[-1].reason})."
                )
            for report in lost:
                self._cluster.restart(report.worker)
        except CapacityError as error:
            for driver in self._live():
                driver.fail(str(error), alone=False)
            return
        names = " and ".join(str(report.worker) for report in lost)
        self._recover(f"worker{'s' * (len(lost) > 1)} {names} lost ({lost[-1].reason})")

    def _recover(self, reason: str) -> None:
        """Reconnect all workers and let every pipeline go on from its last checkpoint."""
        self._broken_since = None
        self._leases.clear()
        self._connect()
        for driver in self._live():
            self._guarded(driver, partial(driver.open, reason=reason))

    def _connect(self) -> None:
        self._generation += 1
        try:
            store = self._cluster.rendezvous(self._generation)
        except PeerLost:
            return  # another worker is gone: its loss will be reported, and this is called again
        for worker in range(self._cluster.workers):
            self._cluster.send(worker, [Connect(generation=self._generation, store=store)])

    def _stop_workers(self) -> None:
        """Let every worker tell its last spans, so that utilisation covers the whole run."""
        waiting = set(range(self._cluster.workers))
        for worker in waiting:
            self._cluster.send(worker, [Stop()])
        deadline = self._clock.monotonic() + STOP_S
        while waiting and self._clock.monotonic() < deadline:
            for report in self._cluster.poll(POLL_S):
                if isinstance(report, Happened):
                    self._handle(report)
                elif isinstance(report, Stopped | Lost):
                    waiting.discard(report.worker)

    def _emit(self, event: Event) -> None:
        """An event of the controller's own, which is stamped with the cluster's time."""
        self._sink.write(event if self._clock is time else replace(event, t=self._clock.time()))
