"""One simulated worker: the rules of ``cluster/worker.py`` with costs in place of work.

Between two changes of what it does a worker's state is linear in time, so it is computed only when something changes:
a sequence ends, a prefill chunk or a micro-batch is done, a command arrives. Commands are applied between two quanta.
Runnable pipelines share the worker by weight, as real ones do when seen over many quanta; a pipeline alone is simulated
exactly. So nobody overtakes anybody (``Hurry`` has no effect), and nobody's turn is lost while a micro-batch is on its
way. Updates, loads and saves have the worker to themselves, and a change of layout waits for the quanta under way.

In a tensor-parallel group the leader takes the commands and does the work, at the costs of the group, and the others
account for the same work. What other pipelines have to do there waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longtail.cluster.messages import (
    ClosePipeline,
    Command,
    Connect,
    DropWork,
    Generate,
    Happened,
    LeaseBroken,
    Opened,
    OpenPipeline,
    PipelineCommand,
    Profile,
    Report,
    Save,
    Saved,
    Shares,
    Stop,
    Stopped,
    Switch,
    TrainBatches,
    Update,
)
from longtail.cluster.simulated_engine import Piece
from longtail.cluster.simulated_tenant import EPSILON_S, Lengths, SimulatedTenant
from longtail.cluster.simulated_together import Visit
from longtail.cluster.spans import SpanRecorder
from longtail.core.types import SubStage
from longtail.costs.worker import WorkerCosts

if TYPE_CHECKING:
    from longtail.cluster.simulated import SimulatedCluster

__all__ = ["Lengths", "SimulatedWorker"]

SPAN_S = 2.0
"""Spans are longer than those of real workers: nobody watches, and there may be thousands of workers."""


class SimulatedWorker:
    """``receive`` takes commands; everything else happens when its cluster says that the time has come.

    ``visit`` is what it is at together with others, or waits for them to begin.
    """

    def __init__(
        self,
        index: int,
        *,
        world: int,
        cluster: SimulatedCluster,
        costs: Callable[[int, str], WorkerCosts],
        lengths: Lengths,
    ) -> None:
        self.index, self._world, self._cluster = index, world, cluster
        self._costs, self._lengths = costs, lengths
        self._tenants: dict[str, SimulatedTenant] = {}
        self._weights: dict[str, float] = {}
        """Of pipelines that do not have 1."""
        self._inbox: deque[Command] = deque()
        self._spans = SpanRecorder(index, window_s=SPAN_S)
        self._since = cluster.clock.now
        """Up to when the progress of pieces is accounted for."""
        self._alone: Callable[[], None] | None = None
        """What ends the work that has the worker to itself, if there is such."""
        self.visit: Visit | None = None
        self._plan = 0
        self._alive_planned = False
        self._stopped = False

    @property
    def team(self) -> tuple[int, ...]:
        """The tensor-parallel group that this worker is in, or itself alone."""
        return next((t.group.workers for t in self._tenants.values() if t.group is not None), (self.index,))

    def tenant(self, pipeline: str) -> SimulatedTenant:
        """Raises ``KeyError`` if it is not open here."""
        return self._tenants[pipeline]

    # What happens to it

    def receive(self, commands: Sequence[Command]) -> None:
        """Commands arrive: they are applied when the quantum under way is over, or at once if there is none."""
        self._inbox.extend(commands)
        self._progress()
        for tenant in self._busy():
            assert tenant.piece is not None
            tenant.piece.cut()
        if not self._busy():
            self._go_on()
        else:
            self._wait()

    def pause(self, seconds: float) -> None:
        """Do nothing for a while (a process that starts)."""
        self._occupy(seconds, lambda: None)

    def leave(self, visit: Visit, substage: SubStage, step: int, report: Report) -> None:
        """What ``visit`` was for is done (this worker's own, or that of its leader); :meth:`free` follows."""
        self._account(visit.tenant, substage, step, since=visit.since, tp=len(visit.team))
        self._report(report)
        self.visit = None

    def broken(self, error: str) -> None:
        """A member of the lease is gone; the controller will connect a new generation."""
        if self.visit is not None:
            tenant, lease_id = self.visit.tenant, self.visit.command.lease.lease_id
        else:
            tenant, lease_id = next((t, t.group.lease_id) for t in self._tenants.values() if t.group is not None)
        self.visit = None
        tenant.abandon()
        self._report(
            LeaseBroken(worker=self.index, pipeline=tenant.name, attempt=tenant.attempt, lease_id=lease_id, error=error)
        )
        self._resume()

    def released(self, pipeline: str) -> None:
        """The leader has dissolved the group."""
        self._tenants[pipeline].leave_group()
        self._resume()

    def followed(self, pipeline: str, piece: Piece) -> None:
        """The group has done ``piece``."""
        self._record(self._tenants[pipeline], piece)
        self._tell()

    # Time

    @property
    def _blocked(self) -> bool:
        """Whether it takes no commands."""
        return self._stopped or self._alone is not None or self.visit is not None or self._follows

    @property
    def _follows(self) -> bool:
        return any(tenant.follows for tenant in self._tenants.values())

    @property
    def _waits_for_quanta(self) -> bool:
        """Whether the next command is one before which all quanta under way must end."""
        if not self._inbox or not isinstance(self._inbox[0], Switch | Profile) or not self._is_current(self._inbox[0]):
            return False
        return any(tenant.piece is not None for tenant in self._tenants.values())

    def _busy(self) -> list[SimulatedTenant]:
        return [] if self._blocked else [t for t in self._tenants.values() if t.piece is not None]

    def _shares(self) -> dict[SimulatedTenant, float]:
        """Who works now, and at which share of the worker: by weight, 1 together."""
        weights = {tenant: self._weights.get(tenant.name, 1.0) for tenant in self._busy()}
        together = sum(weights.values())
        return {tenant: weight / together for tenant, weight in weights.items()}

    def _speeds(self) -> dict[SimulatedTenant, float]:
        """What each does in a second, in seconds of its work alone: its share, less what the others cost it."""
        shares = self._shares()
        works = {tenant: (tenant.name, str(tenant.piece.substage)) for tenant in shares if tenant.piece is not None}
        return {
            tenant: shares[tenant] / tenant.costs.slowdown(work[1], [w for t, w in works.items() if t is not tenant])
            for tenant, work in works.items()
        }

    def _progress(self) -> None:
        """Account for the time since the last change."""
        now = self._cluster.clock.now
        shares = self._shares()
        for tenant, speed in self._speeds().items():
            assert tenant.piece is not None
            tenant.piece.done_s += (now - self._since) * speed
            tenant.piece.lost_s += (now - self._since) * (shares[tenant] - speed)
        if not self._blocked:
            self._since = now

    def _wait(self) -> None:
        """Come back when the first piece is done."""
        self._plan += 1
        plan = self._plan
        left_s = [
            (t.piece.work_s - t.piece.done_s) / speed for t, speed in self._speeds().items() if t.piece is not None
        ]
        if left_s:
            self._cluster.after(self, max(0.0, min(left_s)), lambda: self._piece_done(plan))

    def _piece_done(self, plan: int) -> None:
        if plan != self._plan:
            return  # something came between
        self._progress()
        busy = self._busy()
        for tenant in busy:
            piece = tenant.piece
            if piece is not None and piece.work_s - piece.done_s <= EPSILON_S:
                self._finish(tenant, piece, shared=len(busy) > 1)
        self._go_on()

    def _finish(self, tenant: SimulatedTenant, piece: Piece, *, shared: bool) -> None:
        for report in tenant.finish(self._cluster.clock.now, shared=shared):
            self._report(report)
        self._record(tenant, piece)
        if tenant.group is not None:
            for follower in tenant.group.workers[1:]:
                self._cluster.worker(follower).followed(tenant.name, piece)

    def _record(self, tenant: SimulatedTenant, piece: Piece) -> None:
        self._spans.add(
            tenant.name,
            piece.substage,
            tenant.training_step if piece.substage == SubStage.TRAIN else tenant.step,
            start=piece.start,
            end=self._cluster.clock.now,
            tokens=piece.tokens,
            batch=piece.batch,
            busy_s=piece.work_s + piece.lost_s,
            quanta=piece.quanta,
            context=piece.contexts,
            tp=len(tenant.group.workers) if tenant.group is not None else 1,
        )

    def _go_on(self) -> None:
        """Apply what has arrived, then begin the next pieces."""
        while self._inbox and not self._blocked and not self._waits_for_quanta:
            self._apply(self._inbox.popleft())
        self._tell()
        if self._blocked:
            return
        if not self._inbox:
            grouped = [t for t in self._tenants.values() if t.group is not None]
            for tenant in grouped or self._tenants.values():
                if tenant.piece is None:
                    tenant.begin(self._cluster.clock.now)
        self._wait()
        self._plan_alive()

    def _occupy(self, seconds: float, done: Callable[[], None]) -> None:
        """Work that has the worker to itself for ``seconds``; then ``done``."""
        self._alone = done
        self._since = self._cluster.clock.now
        self._cluster.after(self, seconds, self._occupied)

    def _occupied(self) -> None:
        done, self._alone = self._alone, None
        assert done is not None
        done()
        self.free()

    def free(self) -> None:
        """What had the worker to itself is over."""
        self._since = self._cluster.clock.now
        self._go_on()

    def _resume(self) -> None:
        """Go on at this moment, but after all that happens now."""
        if self._alone is None:
            self._since = self._cluster.clock.now
        self._cluster.after(self, 0.0, self._resumed)

    def _resumed(self) -> None:
        self._progress()
        self._go_on()

    # Commands

    def _apply(self, command: Command) -> None:
        self._leave_group(command)
        match command:
            case Stop():
                self._stopped = True
                self._tell(everything=True)
                self._report(Stopped(worker=self.index))
                self._cluster.connections.disconnect(self, f"worker {self.index} has stopped")
            case Shares():
                self._weights.update(command.weights)
            case Connect():
                self._cluster.connections.connect(self, command.generation)
            case OpenPipeline():
                self._open(command)
            case ClosePipeline():
                self._tenants.pop(command.pipeline, None)
            case PipelineCommand():
                if self._is_current(command):
                    self._apply_to(self._tenants[command.pipeline], command)

    def _is_current(self, command: PipelineCommand) -> bool:
        """Whether it is not of an earlier attempt."""
        tenant = self._tenants.get(command.pipeline)
        return tenant is not None and (tenant.attempt == command.attempt or isinstance(command, DropWork))

    def _apply_to(self, tenant: SimulatedTenant, command: PipelineCommand) -> None:
        match command:
            case DropWork():
                tenant.drop_work(command.attempt)
            case Generate():
                tenant.generate(command, self._cluster.clock.now)
            case TrainBatches():
                tenant.train(command)
            case Save():
                self._occupy(tenant.costs.save_s, lambda: self._saved(tenant, command))
            case Update() | Switch() | Profile():
                self._since = self._cluster.clock.now
                self.visit = Visit(tenant, command, self._since, self.team)
                self._cluster.connections.meet(self, command.lease)

    def _leave_group(self, command: Command) -> None:
        """A command that ends what a group does must find it dissolved, on all of its members."""
        for tenant in self._tenants.values():
            ends = isinstance(command, Stop | Connect) or (
                isinstance(command, OpenPipeline | ClosePipeline | DropWork) and command.pipeline == tenant.name
            )
            if ends and tenant.group is not None:
                followers = tenant.group.workers[1:]
                tenant.leave_group()
                for follower in followers:
                    self._cluster.worker(follower).released(tenant.name)

    def _open(self, command: OpenPipeline) -> None:
        self._tenants.pop(command.pipeline, None)
        costs = self._costs(self.index, command.pipeline)
        tenant = SimulatedTenant(command, worker=self.index, world=self._world, costs=costs, lengths=self._lengths)

        def opened() -> None:
            self._tenants[command.pipeline] = tenant
            self._account(tenant, SubStage.LOAD, 0, since=self._since)
            self._report(
                Opened(
                    worker=self.index,
                    pipeline=command.pipeline,
                    attempt=command.attempt,
                    parameters=0,
                    duration_s=costs.load_s,
                )
            )

        self._occupy(costs.load_s, opened)

    def _saved(self, tenant: SimulatedTenant, command: Save) -> None:
        """Leave the files that make a checkpoint complete, with nothing in them."""
        folder = Path(command.folder)
        names = [f"optimizer-{self.index}-of-{self._world}.safetensors"]
        if self.index == 0:
            names += ["config.json", "model.safetensors"]
        for name in names:
            (folder / name).touch()
        self._account(tenant, SubStage.CHECKPOINT, command.step, since=self._since)
        self._report(Saved(worker=self.index, pipeline=tenant.name, attempt=tenant.attempt, step=command.step, bytes=0))

    # Reports

    def _account(self, tenant: SimulatedTenant, substage: SubStage, step: int, *, since: float, tp: int = 1) -> None:
        now = self._cluster.clock.now
        self._spans.add(tenant.name, substage, step, start=since, end=now, tokens=0, batch=0, tp=tp)

    def _report(self, report: Report) -> None:
        self._cluster.report(report)

    def _tell(self, *, everything: bool = False) -> None:
        spans = self._spans.take(self._cluster.clock.now, everything=everything)
        if spans:
            self._report(Happened(worker=self.index, events=tuple(spans)))

    def _plan_alive(self) -> None:
        """Say how far rollouts are after a while, as long as there are such."""
        if not self._alive_planned and any(tenant.tells_progress for tenant in self._tenants.values()):
            self._alive_planned = True
            self._cluster.after(self, self._cluster.alive_s, self._say_alive)

    def _say_alive(self) -> None:
        self._alive_planned = False
        if self._stopped:
            return
        if self._alone is None and self.visit is None:
            speeds, passed_s = self._speeds(), self._cluster.clock.now - self._since
            for tenant in self._tenants.values():
                if tenant.tells_progress:
                    self._report(tenant.alive(speeds.get(tenant, 0.0) * passed_s))
        self._plan_alive()
