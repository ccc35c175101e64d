"""The controller's loop: take reports, move each pipeline on, grant leases, recover from lost workers.

It runs in one thread and never waits for anything but the next report. The same loop drives any
:class:`~longtail.cluster.protocol.Cluster`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from longtail.cluster.messages import (
    Command,
    Connect,
    Happened,
    LeaseBroken,
    Lost,
    PipelineFailed,
    PipelineReport,
    Report,
    Stop,
    Updated,
)
from longtail.cluster.protocol import Cluster
from longtail.core.errors import CapacityError, LongtailError
from longtail.core.events import Event, Note, Sink, WorkerLost
from longtail.rl.reward_pool import RewardPool
from longtail.runtime.leases import LeaseBook
from longtail.runtime.pipeline import PipelineDriver, PipelinePlan

POLL_S = 0.5
BROKEN_LEASE_GRACE_S = 15.0
MOST_RESTARTS_WITHOUT_PROGRESS = 3


class Controller:
    """Runs pipelines on a cluster until each has finished, failed or been interrupted.

    ``interrupt()`` may be called from a signal handler: the loop then lets every pipeline save and end.
    """

    def __init__(self, cluster: Cluster, plans: Sequence[PipelinePlan], *, rewards: RewardPool, sink: Sink) -> None:
        self._cluster, self._sink = cluster, sink
        self._leases = LeaseBook()
        self._generation = 0
        self._broken_since: float | None = None
        self._restarts = 0
        self._interrupted = False
        everyone = tuple(range(cluster.workers))
        self.drivers = {
            plan.name: PipelineDriver(
                plan,
                workers=cluster.workers,
                rewards=rewards,
                send=lambda worker, command: cluster.send(worker, [command]),
                emit=self._emit,
                ask_lease=lambda name: self._leases.ask(name, everyone),
                wake=cluster.wake,
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
        for worker in range(self._cluster.workers):
            self._cluster.send(worker, [Stop()])
        self._drain_last_events()

    def _turn(self) -> None:
        for report in self._cluster.poll(POLL_S):
            self._handle(report)
        if self._broken_since is not None and time.monotonic() - self._broken_since > BROKEN_LEASE_GRACE_S:
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
                driver.granted(lease)

    def _live(self) -> list[PipelineDriver]:
        return [d for d in self.drivers.values() if not d.over]

    def _handle(self, report: Report) -> None:
        match report:
            case Happened():
                for event in report.events:
                    self._emit(event)
            case Lost():
                self._lost(report)
            case LeaseBroken():
                self._broken_since = self._broken_since or time.monotonic()
            case PipelineReport():
                if isinstance(report, Updated | PipelineFailed):
                    self._leases.member_done(report.pipeline, report.worker)
                if isinstance(report, Updated):
                    self._restarts = 0
                driver = self.drivers[report.pipeline]
                self._guarded(driver, partial(driver.handle, report))

    def _guarded(self, driver: PipelineDriver, work: Callable[[], None]) -> None:
        """Run ``work`` of one pipeline; an error in it (say, a task that cannot make its next prompt) ends that one."""
        try:
            work()
        except LongtailError as error:
            driver.fail(f"{driver.name}: {error}")
        except Exception as error:
            self._emit(Note(level="error", message=traceback.format_exc(), pipeline=driver.name))
            driver.fail(f"{driver.name}: {type(error).__name__}: {error}")

    def _lost(self, report: Lost) -> None:
        self._emit(WorkerLost(worker=report.worker, reason=report.reason))
        self._restarts += 1
        try:
            if self._restarts > MOST_RESTARTS_WITHOUT_PROGRESS:
                raise CapacityError(
                    f"worker {report.worker} died {self._restarts} times without a finished update in between"
                    f" (last: {report.reason})."
                )
            self._cluster.restart(report.worker)
        except CapacityError as error:
            for driver in self._live():
                driver.fail(str(error))
            return
        self._recover(f"worker {report.worker} was lost ({report.reason})")

    def _recover(self, reason: str) -> None:
        """Reconnect all workers and let every pipeline go on from its last checkpoint."""
        self._broken_since = None
        self._leases.clear()
        self._connect()
        for driver in self._live():
            driver.open(reason=reason)

    def _connect(self) -> None:
        self._generation += 1
        command: Command = Connect(generation=self._generation, store=self._cluster.rendezvous(self._generation))
        for worker in range(self._cluster.workers):
            self._cluster.send(worker, [command])

    def _drain_last_events(self) -> None:
        """The workers' last spans, so that utilisation covers the whole run."""
        for report in self._cluster.poll(POLL_S):
            if isinstance(report, Happened):
                self._handle(report)

    def _emit(self, event: Event) -> None:
        self._sink.write(event)
