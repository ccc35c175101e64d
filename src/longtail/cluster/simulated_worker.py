"""One simulated worker: the rules of ``cluster/worker.py`` with costs in place of work.

Between two changes of what it does a worker's state is linear in time, so it is computed only when something changes:
a sequence ends, a prefill chunk or a micro-batch is done, a command arrives. Commands are applied between two quanta.
Runnable pipelines share the worker evenly, as real ones do when seen over many quanta; a pipeline alone is simulated
exactly. Updates, loads and saves have the worker to themselves.
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
    Report,
    Save,
    Saved,
    Stop,
    Stopped,
    TrainBatches,
    Update,
    Updated,
)
from longtail.cluster.simulated_tenant import Lengths, Piece, SimulatedTenant
from longtail.cluster.spans import SpanRecorder
from longtail.core.types import Lease, SubStage
from longtail.costs.worker import WorkerCosts
from longtail.rl.trainer import UpdateStats

if TYPE_CHECKING:
    from longtail.cluster.simulated import SimulatedCluster

__all__ = ["Lengths", "SimulatedWorker"]

SPAN_S = 2.0
"""Spans are longer than those of real workers: nobody watches, and there may be thousands of workers."""
EPSILON_S = 1e-9


class SimulatedWorker:
    """``receive`` takes commands; everything else happens when its cluster says that the time has come."""

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
        self._inbox: deque[Command] = deque()
        self._spans = SpanRecorder(index, window_s=SPAN_S)
        self._since = cluster.clock.now
        """Up to when the progress of pieces is accounted for."""
        self._alone: Callable[[], None] | None = None
        """What ends the work that has the worker to itself, if there is such."""
        self._updating: tuple[SimulatedTenant, Update] | None = None
        self._plan = 0
        self._stopped = False

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

    def collective_done(self) -> None:
        """All members of the lease were there, and the update is applied."""
        assert self._updating is not None
        (tenant, command), self._updating = self._updating, None
        self._account(tenant, SubStage.REDUCE, command.step, since=self._since)
        self._report(
            Updated(
                worker=self.index,
                pipeline=tenant.name,
                attempt=tenant.attempt,
                step=command.step,
                lease_id=command.lease.lease_id,
                stats=UpdateStats(grad_norm=0.0, lr=tenant.config.train.lr),
            )
        )
        self._free()

    def collective_broken(self, error: str) -> None:
        """A member is gone; the controller will connect a new generation."""
        assert self._updating is not None
        (tenant, command), self._updating = self._updating, None
        lease: Lease = command.lease
        self._report(
            LeaseBroken(
                worker=self.index,
                pipeline=tenant.name,
                attempt=tenant.attempt,
                lease_id=lease.lease_id,
                error=error,
            )
        )
        self._free()

    # Time

    def _busy(self) -> list[SimulatedTenant]:
        return [] if self._alone or self._updating else [t for t in self._tenants.values() if t.piece is not None]

    def _progress(self) -> None:
        """Account for the time since the last change."""
        now = self._cluster.clock.now
        busy = self._busy()
        for tenant in busy:
            assert tenant.piece is not None
            tenant.piece.done_s += (now - self._since) / len(busy)
        if not (self._alone or self._updating):
            self._since = now

    def _wait(self) -> None:
        """Come back when the first piece is done."""
        self._plan += 1
        plan, busy = self._plan, self._busy()
        if busy:
            left_s = min(t.piece.work_s - t.piece.done_s for t in busy if t.piece is not None)
            self._cluster.after(self, max(0.0, left_s) * len(busy), lambda: self._piece_done(plan))

    def _piece_done(self, plan: int) -> None:
        if plan != self._plan:
            return  # something came between
        self._progress()
        for tenant in self._busy():
            piece = tenant.piece
            if piece is not None and piece.work_s - piece.done_s <= EPSILON_S:
                self._finish(tenant, piece)
        self._go_on()

    def _finish(self, tenant: SimulatedTenant, piece: Piece) -> None:
        now = self._cluster.clock.now
        for report in tenant.finish(now):
            self._report(report)
        self._spans.add(
            tenant.name,
            piece.substage,
            tenant.step,
            start=piece.start,
            end=now,
            tokens=piece.tokens,
            batch=piece.batch,
            busy_s=piece.work_s,
            quanta=piece.quanta,
        )

    def _go_on(self) -> None:
        """Apply what has arrived, then begin the next pieces."""
        while self._inbox and not (self._alone or self._updating or self._stopped):
            self._apply(self._inbox.popleft())
        self._tell()
        if self._alone or self._updating or self._stopped:
            return
        for tenant in self._tenants.values():
            if tenant.piece is None:
                tenant.begin(self._cluster.clock.now)
        self._wait()

    def _occupy(self, seconds: float, done: Callable[[], None]) -> None:
        """Work that has the worker to itself for ``seconds``; then ``done``."""
        self._alone = done
        self._since = self._cluster.clock.now
        self._cluster.after(self, seconds, self._occupied)

    def _occupied(self) -> None:
        done = self._alone
        assert done is not None
        done()
        self._free()

    def _free(self) -> None:
        self._alone = None
        self._since = self._cluster.clock.now
        self._go_on()

    # Commands

    def _apply(self, command: Command) -> None:
        match command:
            case Stop():
                self._stopped = True
                self._tell(everything=True)
                self._report(Stopped(worker=self.index))
            case Connect():
                pass
            case OpenPipeline():
                self._open(command)
            case ClosePipeline():
                self._tenants.pop(command.pipeline, None)
            case PipelineCommand():
                tenant = self._tenants.get(command.pipeline)
                if tenant is None or (tenant.attempt != command.attempt and not isinstance(command, DropWork)):
                    return  # of an earlier attempt
                self._apply_to(tenant, command)

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
            case Update():
                self._updating = tenant, command
                self._since = self._cluster.clock.now
                self._cluster.join(self.index, command.lease, tenant.costs.update_s)

    def _open(self, command: OpenPipeline) -> None:
        self._tenants.pop(command.pipeline, None)
        costs = self._costs(self.index, command.pipeline)
        tenant = SimulatedTenant(command, worker=self.index, costs=costs, lengths=self._lengths)

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

    def _account(self, tenant: SimulatedTenant, substage: SubStage, step: int, *, since: float) -> None:
        now = self._cluster.clock.now
        self._spans.add(tenant.name, substage, step, start=since, end=now, tokens=0, batch=0)

    def _report(self, report: Report) -> None:
        self._cluster.report(report)

    def _tell(self, *, everything: bool = False) -> None:
        spans = self._spans.take(self._cluster.clock.now, everything=everything)
        if spans:
            self._report(Happened(worker=self.index, events=tuple(spans)))
