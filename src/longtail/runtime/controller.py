"""The controller's loop: take reports, move each pipeline on, grant leases, recover from lost workers.

It runs in one thread and never waits for anything but the next report. The same loop drives any
:class:`~longtail.cluster.protocol.Cluster`. Pipelines come (:meth:`Controller.submit`) and go while it runs.

Invariants: whatever goes wrong in one pipeline ends that pipeline, whose work and memory are then gone from all
workers, and nothing else. Where it has broken the connections between workers, no lease is granted until they are made
anew, and that happens when nobody holds one, so other pipelines keep what they have done.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from longtail.cluster.messages import (
    Command,
    Connect,
    Happened,
    LeaseBroken,
    Lost,
    PipelineFailed,
    PipelineReport,
    Profiled,
    Report,
    Shares,
    Stop,
    Stopped,
    Switched,
    Updated,
)
from longtail.cluster.protocol import Cluster
from longtail.core.clock import Clock
from longtail.core.config import SharingPolicy
from longtail.core.errors import CapacityError, LongtailError, PeerLost
from longtail.core.events import Event, Note, Sink, Span, WorkerLost
from longtail.runtime.leases import LeaseBook, Leases
from longtail.runtime.outcome import Outcome
from longtail.runtime.pipeline import PipelineDriver
from longtail.runtime.plan import PipelinePlan, Rewards
from longtail.runtime.turns import By, Turns

if TYPE_CHECKING:
    from longtail.runtime.conductor import Conductor

POLL_S = 0.5
BROKEN_LEASE_GRACE_S = 15.0
MOST_LOSSES_WITHOUT_PROGRESS = 3
STOP_S = 5.0
TURNS = {"stages": By.STAGE, "serial": By.STEP}
DEFAULT_POLICY = SharingPolicy()


class Controller:
    """Runs pipelines on a cluster until each has finished, failed or been interrupted.

    With ``keep_running`` it goes on without any, until :meth:`interrupt`. ``policy`` says how pipelines share the
    workers. ``clock`` is the cluster's time: the machine's, or a simulated one. ``drivers`` has the last pipeline of
    each name; with ``keep_running`` only those that are not over, and ``ended`` what the others came to. Both change in
    the loop's thread.
    """

    def __init__(
        self,
        cluster: Cluster,
        plans: Sequence[PipelinePlan],
        *,
        rewards: Rewards,
        sink: Sink,
        clock: Clock = time,
        policy: SharingPolicy = DEFAULT_POLICY,
        keep_running: bool = False,
    ) -> None:
        self._cluster, self._rewards, self._sink, self._clock = cluster, rewards, sink, clock
        self._keep_running = keep_running
        self._leases = LeaseBook()
        self._turns = Turns(TURNS.get(policy.corun, By.NOTHING))
        self._weights: dict[str, float] = {}
        """By which workers share their time, as they were told."""
        self._generation = 0
        self._broken: dict[str, float] = {}
        """Since when a live pipeline's lease is broken: a worker is gone, of which nothing has been heard yet."""
        self._unconnected = False
        """Whether some workers have given up their connections over a pipeline that has failed."""
        self._losses = 0
        self._progressed: set[str] = set()
        self._beyond_repair: str | None = None
        self._interrupted = False
        self._lock = threading.Lock()
        """For what other threads ask for: the queue of it, and whether the run has ended."""
        self._asked: deque[Callable[[], None]] = deque()
        self._coming: dict[str, PipelineDriver] = {}
        self._ended = False
        self.drivers: dict[str, PipelineDriver] = {plan.name: self._driver(plan) for plan in plans}
        self.ended: dict[str, Outcome] = {}
        self._conductor: Conductor | None = None
        if policy.corun in ("auto", "greedy") and cluster.workers > 1:
            from longtail.runtime.conductor import Conductor

            self._conductor = Conductor(
                drivers=self.drivers,
                workers=cluster.workers,
                policy=policy,
                turns=self._turns,
                send=self._send,
                emit=self._emit,
                clock=clock,
            )

    def _driver(self, plan: PipelinePlan) -> PipelineDriver:
        return PipelineDriver(
            plan,
            workers=self._cluster.workers,
            rewards=self._rewards,
            send=self._send,
            emit=self._emit,
            leases=Leases(self._leases, plan.name, contended=partial(self._contended, plan.name)),
            turns=self._turns,
            wake=self._cluster.wake,
            clock=self._clock,
        )

    # -- from any thread --------------------------------------------------------------------------------------

    def submit(self, *plans: PipelinePlan) -> None:
        """Begin more pipelines, all of them or none. Raises ``ValueError`` if one of such a name is not over yet, or
        the run is ending."""
        drivers = [self._driver(plan) for plan in plans]
        with self._lock:
            for name in (plan.name for plan in plans):
                known = self.drivers.get(name)
                if name in self._coming or (known is not None and not known.over):
                    raise ValueError(f"pipeline {name} is not over yet: stop it first, or take another name")
                if self._ended or self._interrupted:
                    raise ValueError(f"pipeline {name} comes too late: the run is ending")
            self._coming.update((driver.name, driver) for driver in drivers)
            self._asked.extend(partial(self._begin, driver) for driver in drivers)
        self._cluster.wake()

    def stop(self, name: str) -> None:
        """Let one pipeline save and end; others go on. Raises ``ValueError`` if there never was one of that name."""
        with self._lock:
            if name not in self.drivers and name not in self._coming and name not in self.ended:
                raise ValueError(f"there is no pipeline {name}")
            self._asked.append(partial(self._stop, name))
        self._cluster.wake()

    def interrupt(self) -> None:
        """Let every pipeline save and end, and then the run; callable from a signal handler too."""
        self._interrupted = True
        self._cluster.wake()

    # -- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises :class:`CapacityError` if it was to keep running and workers are lost that cannot be replaced."""
        self._connect()
        self._share_by_priority(list(self.drivers.values()))
        for driver in self.drivers.values():
            self._guarded(driver, driver.open)
        while self._goes_on():
            self._turn()
        self._stop_workers()
        if self._keep_running and self._beyond_repair is not None:
            raise CapacityError(self._beyond_repair)

    def _goes_on(self) -> bool:
        with self._lock:
            over = not self._keep_running or self._interrupted or self._beyond_repair is not None
            self._ended = over and not self._asked and not self._live()
            return not self._ended

    def _turn(self) -> None:
        reports = self._cluster.poll(POLL_S)
        lost = [r for r in reports if isinstance(r, Lost)]
        for report in reports:
            self._handle(report)
        if lost:
            self._replace(lost)
        else:
            self._mend()
        while self._asked:
            self._asked.popleft()()
        for driver in self._live():
            if self._interrupted:
                self._guarded(driver, driver.interrupt)
            self._guarded(driver, driver.collect_rewards)
        self._grant()
        if self._conductor is not None:
            self._conducting(self._conductor.turn)
        if self._keep_running:
            self._let_go()

    def _begin(self, driver: PipelineDriver) -> None:
        """A pipeline has come. Reports of an earlier one of its name may still be on their way: its attempts go on."""
        name = driver.name
        known = self.drivers.get(name) or self.ended.get(name)
        if known is not None:
            driver.attempt = known.attempt
        self._progressed.discard(name)
        with self._lock:
            self.drivers[name] = driver
            del self._coming[name]
            self.ended.pop(name, None)
        if self._beyond_repair is not None:
            driver.fail(self._beyond_repair, alone=False)
        else:
            self._share_by_priority([driver])
            self._guarded(driver, driver.open)

    def _share_by_priority(self, drivers: Sequence[PipelineDriver]) -> None:
        """Until it is planned otherwise, and where nothing is planned."""
        weights = tuple((d.name, d.plan.config.priority) for d in drivers)
        if any(weight != self._weights.get(name, 1.0) for name, weight in weights):
            for worker in range(self._cluster.workers):
                self._send(worker, Shares(weights=weights))

    def _stop(self, name: str) -> None:
        if (driver := self.drivers.get(name)) is not None:
            self._guarded(driver, driver.interrupt)

    def _let_go(self) -> None:
        """Keep of pipelines that are over what they came to, and nothing of their prompts, lengths and costs."""
        for driver in [d for d in self.drivers.values() if d.over]:
            with self._lock:
                self.ended[driver.name] = Outcome.of(driver)
                del self.drivers[driver.name]
            self._progressed.discard(driver.name)

    def outcomes(self) -> dict[str, Outcome]:
        """What each pipeline has come to, by name."""
        return self.ended | {name: Outcome.of(driver) for name, driver in self.drivers.items()}

    def _grant(self) -> None:
        if self._unconnected:
            return
        for lease in self._leases.grant():
            driver = self.drivers.get(lease.pipeline)
            if driver is None or driver.over:
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
                    if isinstance(event, Span) and (driver := self.drivers.get(event.pipeline)) is not None:
                        self._guarded(driver, partial(driver.observe, event))
                        self._observed(event)
            case LeaseBroken():
                driver = self.drivers.get(report.pipeline)
                self._leases.member_done(report.pipeline, report.worker)
                if driver is not None and report.attempt == driver.attempt and not driver.over:
                    self._broken.setdefault(driver.name, self._clock.monotonic())
                else:  # it has failed, or fallen back
                    self._unconnected = True
            case PipelineReport():
                if isinstance(report, PipelineFailed):
                    # An error inside a lease breaks it for the others, and they give up their connections.
                    self._unconnected |= self._leases.holds(report.pipeline)
                    self._leases.member_done(report.pipeline, report.worker)
                elif isinstance(report, Updated | Profiled) or (
                    isinstance(report, Switched) and all(len(group) == 1 for group in report.groups)
                ):
                    self._leases.member_done(report.pipeline, report.worker, report.lease_id)
                if isinstance(report, Updated):
                    self._progressed.add(report.pipeline)
                driver = self.drivers.get(report.pipeline)
                if driver is not None:
                    self._guarded(driver, partial(driver.handle, report))

    def _contended(self, pipeline: str) -> bool:
        """Whether another pipeline has, or is about to have, work for the workers."""
        others = [d for d in self._live() if d.name != pipeline]
        if self._conductor is not None and others:
            return self._conductor.contended(pipeline)
        return any(d.stage not in ("new", "score") and not self._turns.waits(d.name) for d in others)

    # -- what goes wrong --------------------------------------------------------------------------------------

    def _guarded(self, driver: PipelineDriver, work: Callable[[], None]) -> None:
        """Run ``work`` of one pipeline; an error in it (say, a task that cannot make its next prompt) ends that one."""
        try:
            work()
        except LongtailError as error:
            driver.fail(f"{driver.name}: {error}")
        except Exception as error:
            self._emit(Note(level="error", message=traceback.format_exc(), pipeline=driver.name))
            driver.fail(f"{driver.name}: {type(error).__name__}: {error}")

    def _conducting(self, work: Callable[[], None]) -> None:
        """Run ``work`` of the conductor; after an error in it pipelines run side by side, as they come."""
        try:
            work()
        except Exception:
            self._conductor = None
            self._emit(Note(level="error", message=f"sharing is not planned any more:\n{traceback.format_exc()}"))
            for driver in self.drivers.values():
                driver.begin_on = None
            self._share_by_priority(self._live())
            self._turns.change(By.NOTHING)

    def _observed(self, event: Event) -> None:
        if self._conductor is not None:
            self._conducting(partial(self._conductor.observe, event))
        elif isinstance(event, Span):  # no company is known of
            driver = self.drivers[event.pipeline]
            self._guarded(driver, partial(driver.widen.known.observe, event))

    def _mend(self) -> None:
        """Connections that were given up."""
        for name in [name for name in self._broken if name not in self.drivers or self.drivers[name].over]:
            del self._broken[name]
            self._unconnected = True
        now = self._clock.monotonic()
        if any(now - since > BROKEN_LEASE_GRACE_S for since in self._broken.values()):
            self._recover("a collective operation failed")
        elif self._unconnected and self._leases.idle:
            self._connect()

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
                if self._weights:
                    self._send(report.worker, Shares(weights=tuple(self._weights.items())))
        except CapacityError as error:
            self._beyond_repair = str(error)
            for driver in self._live():
                driver.fail(str(error), alone=False)
            return
        names = " and ".join(str(report.worker) for report in lost)
        self._recover(f"worker{'s' * (len(lost) > 1)} {names} lost ({lost[-1].reason})")

    def _recover(self, reason: str) -> None:
        """Reconnect all workers and let every pipeline go on from its last checkpoint."""
        self._broken.clear()
        self._leases.clear()
        self._connect()
        for driver in self._live():
            self._guarded(driver, partial(driver.open, reason=reason))

    def _connect(self) -> None:
        self._unconnected = False
        self._generation += 1
        try:
            store = self._cluster.rendezvous(self._generation)
        except PeerLost:
            return  # another worker is gone: its loss will be reported, and this is called again
        for worker in range(self._cluster.workers):
            self._send(worker, Connect(generation=self._generation, store=store))

    # -- words ------------------------------------------------------------------------------------------------

    def _send(self, worker: int, command: Command) -> None:
        if isinstance(command, Shares):
            self._weights.update(command.weights)
        self._cluster.send(worker, [command])

    def _stop_workers(self) -> None:
        """Let every worker tell its last spans, so that utilisation covers the whole run."""
        waiting = set(range(self._cluster.workers))
        for worker in waiting:
            self._send(worker, Stop())
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
        self._observed(event)
