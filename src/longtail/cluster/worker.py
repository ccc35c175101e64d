"""The loop of one worker: take commands, run one quantum, report; never wait for a peer except under a lease.

Invariants: commands of one worker are applied in the order they were sent, always between two quanta. An error in
a pipeline's work ends that pipeline on this worker, gives its memory back, and touches nothing else. Time is shared
between the runnable pipelines by weight (``cluster/fair.py``), so one with long quanta gets fewer of them, and none is
much longer than ``SLICE_S`` (on CUDA, than a micro-batch); but what other workers wait for goes first, and those
that it overtakes catch up. A worker that is in a tensor-parallel group
works for that group alone; if it follows there, it does what the leader orders, and its own commands wait until the
group is dissolved.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from longtail.cluster.connections import Connections
from longtail.cluster.fair import FairShare
from longtail.cluster.messages import (
    ClosePipeline,
    Command,
    Connect,
    DropWork,
    Generate,
    Happened,
    Hurry,
    LeaseBroken,
    Opened,
    OpenPipeline,
    PipelineCommand,
    PipelineFailed,
    Profile,
    Refresh,
    Report,
    Save,
    SaveFailed,
    Shares,
    Stop,
    Stopped,
    Switch,
    TrainBatches,
    Update,
)
from longtail.cluster.spans import SpanRecorder
from longtail.cluster.tenant import Quantum, Tenant
from longtail.core.errors import CheckpointError, Diverged, LongtailError, PeerLost
from longtail.core.events import Event, Progress
from longtail.core.types import SubStage

PROGRESS_EVERY_S = 0.25
PATIENCE_S = 0.02
"""So long a worker waits for a micro-batch that is on its way, rather than give its turn to another pipeline's."""
ALIVE_EVERY_S, ALIVE_IN_GROUP_EVERY_S = 0.1, 1.0
"""How often the controller learns how far sequences are. A decision about workers on their own is that old at most;
in a group there is hardly one to make, and whatever takes a core from one member stops all of them."""

Connector = Callable[[Connect], Connections]


class Outbox:
    """Reports on their way to the controller; thread-safe. ``take`` waits for something urgent or a time-out."""

    def __init__(self) -> None:
        self._reports: list[Report] = []
        self._urgent = False
        self._ready = threading.Condition()

    def put(self, reports: list[Report], *, urgent: bool = True) -> None:
        with self._ready:
            self._reports += reports
            if urgent and reports:
                self._urgent = True
                self._ready.notify_all()

    def take(self, timeout_s: float) -> list[Report]:
        with self._ready:
            self._ready.wait_for(lambda: self._urgent, timeout_s)
            reports, self._reports, self._urgent = self._reports, [], False
            return reports


class Worker:
    """One worker process's work, without any transport: ``inbox`` in, ``outbox`` out, :meth:`run` in between."""

    def __init__(self, worker: int, world: int, *, device: torch.device, connect: Connector) -> None:
        self.worker, self.world, self.device = worker, world, device
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._arrived: deque[Command] = deque()
        self.outbox = Outbox()
        self.tenants: dict[str, Tenant] = {}
        self._connect = connect
        self._connections: Connections | None = None
        self._spans = SpanRecorder(worker)
        self._shares = FairShare()
        self._leftovers = False
        """Whether a pipeline has failed whose memory is not given back yet."""
        self._waited_for: set[str] = set()
        """Pipelines whose next micro-batch did not come in time."""
        self._stopped = False
        self._next_progress = self._next_alive = 0.0

    def give(self, command: Command) -> None:
        """Put ``command`` into the inbox; from any thread."""
        if isinstance(command, Connect) and (connections := self._connections) is not None:
            connections.call_off()
        self.inbox.put(command)

    def run(self) -> None:
        """Loop until a :class:`Stop` command arrives."""
        while not self._stopped:
            self._turn()
        for tenant in self.tenants.values():
            tenant.close()
        self._tell(everything=True)
        self.outbox.put([Stopped(worker=self.worker)])
        self._disconnect()

    def _turn(self) -> None:
        self._give_back()
        if not self._bound():
            self._arrived += self._commands()
        while self._arrived and not self._bound():
            self._apply(self._arrived.popleft())
        tenant = self._choose()
        if tenant is not None and tenant.next_substage == SubStage.TRAIN and self._is_patient():
            self._arrived += self._commands(PATIENCE_S)
        elif tenant is not None:
            self._guarded(tenant, partial(self._quantum, tenant, tenant.run_quantum))
        self._tell()

    def _bound(self) -> bool:
        """Whether no command may be applied now: this worker follows, or has a switch to do first."""
        return any(t.follows or (t.group is not None and t.group.switches) for t in self.tenants.values())

    def die(self) -> None:
        """End the loop at once, from another thread, as a killed process would."""
        self._stopped = True
        self._disconnect()
        self.inbox.put(Stop())

    def _is_patient(self) -> bool:
        """Whether it is the turn of a pipeline whose micro-batch is on its way. Once for each."""
        contenders, expecting = self._contenders(), self._expecting()
        if not expecting or any(self.tenants[name].hurries for name in contenders):
            return False
        name = self._shares.next([*contenders, *expecting])
        if name not in expecting or name in self._waited_for:
            return False
        self._waited_for.add(name)
        return True

    def _expecting(self) -> list[str]:
        return [tenant.name for tenant in self.tenants.values() if tenant.expects]

    def _commands(self, within_s: float = 0.0) -> list[Command]:
        """All commands that have arrived; waits ``within_s`` for one, or longer while there is nothing else to do."""
        if not self._arrived and self._choose() is None:
            within_s = PROGRESS_EVERY_S
        commands: list[Command] = []
        try:
            commands.append(self.inbox.get(timeout=within_s) if within_s else self.inbox.get_nowait())
            while True:
                commands.append(self.inbox.get_nowait())
        except queue.Empty:
            return commands

    def _contenders(self) -> list[str]:
        """Those that have work, between which the next quantum is chosen; in a tensor-parallel group only its own."""
        grouped = any(t.group is not None for t in self.tenants.values())
        return [t.name for t in self.tenants.values() if t.runnable and (not grouped or t.group is not None)]

    def _choose(self) -> Tenant | None:
        names = self._contenders()
        name = self._shares.next([n for n in names if self.tenants[n].hurries] or names)
        return None if name is None else self.tenants[name]

    def _quantum(self, tenant: Tenant, work: Callable[[], Quantum]) -> None:
        """Run ``work`` and account for it. Raises whatever it raises."""
        waiting = [name for name in (*self._contenders(), *self._expecting()) if name != tenant.name]
        tenant.beside = bool(waiting)
        start = time.time()
        quantum = work()
        end = time.time()
        self._shares.used(tenant.name, end - start, waiting)
        self._spans.add(
            tenant.name,
            quantum.substage,
            quantum.step,
            start=start,
            end=end,
            tokens=quantum.tokens,
            batch=quantum.batch,
            quanta=quantum.quanta,
            context=quantum.context,
            tp=quantum.tp,
        )
        self.outbox.put(quantum.reports)

    def _guarded(self, tenant: Tenant, work: Callable[[], None]) -> None:
        """Run ``work``; an error of it ends this pipeline on this worker.

        But a peer that is lost breaks the lease, and any error except one that all members see alike breaks it for the
        others.
        """
        lease_id = tenant.lease_id
        try:
            work()
        except PeerLost as error:
            self._break_lease(tenant, tenant.lease_id if lease_id is None else lease_id, error)
        except Exception as error:
            self._give_up(tenant, error)

    def _give_up(self, tenant: Tenant, error: Exception) -> None:
        if tenant.lease_id is not None and not isinstance(error, LongtailError):
            self._disconnect()
        self._forget(tenant.name)
        self.outbox.put([self._failure(tenant.name, tenant.attempt, error)])

    def _break_lease(self, tenant: Tenant, lease_id: int | None, error: PeerLost) -> None:
        self._disconnect()
        tenant.abandon_group()
        broken = LeaseBroken(
            worker=self.worker,
            pipeline=tenant.name,
            attempt=tenant.attempt,
            lease_id=-1 if lease_id is None else lease_id,
            error=str(error),
        )
        self.outbox.put([broken])

    def _failure(self, pipeline: str, attempt: int, error: Exception) -> PipelineFailed:
        known = isinstance(error, LongtailError)
        sentence = str(error) if known else f"{type(error).__name__}: {error}"
        if _out_of_memory(error):
            sentence = (
                f"worker {self.worker} has not enough memory ({sentence.splitlines()[0]}): lower train.micro_tokens,"
                " rollout.max_running or rollout.kv_gib, or run fewer pipelines at once"
            )
        return PipelineFailed(
            worker=self.worker,
            pipeline=pipeline,
            attempt=attempt,
            error=sentence,
            traceback="" if known else "".join(traceback.format_exception(error)),
        )

    def _apply(self, command: Command) -> None:
        self._leave_groups(command)
        match command:
            case Stop():
                self._stopped = True
            case Shares():
                self._shares.weigh(command.weights)
            case Connect():
                self._reconnect(command)
            case OpenPipeline():
                self._open(command)
            case ClosePipeline():
                self._drop(command.pipeline)
            case PipelineCommand():
                tenant = self.tenants.get(command.pipeline)
                if tenant is None and isinstance(command, Switch | Profile | Update):
                    self._disconnect()  # it failed here: peers that wait for this worker learn that it does not come
                if tenant is None or (tenant.attempt != command.attempt and not isinstance(command, DropWork)):
                    return  # of a pipeline that failed here, or of an earlier attempt
                self._apply_to(tenant, command)

    def _apply_to(self, tenant: Tenant, command: PipelineCommand) -> None:
        match command:
            case DropWork():
                self._guarded(tenant, lambda: tenant.drop_work(command.attempt))
            case Generate():
                self._guarded(tenant, lambda: tenant.generate(command))
            case Switch():
                self._guarded(tenant, lambda: self._switch(tenant, command))
            case Profile():
                beside = self.tenants.get(command.beside or "")
                self._guarded(
                    tenant,
                    lambda: self._quantum(
                        tenant, lambda: tenant.profile(command, self._connected(), self.outbox.put, beside)
                    ),
                )
            case TrainBatches():
                self._waited_for.discard(tenant.name)
                tenant.train(command)
            case Hurry():
                tenant.hurry(command)
            case Refresh():
                self._guarded(tenant, lambda: self._quantum(tenant, lambda: tenant.refresh(command)))
            case Save():
                self._guarded(tenant, lambda: self._quantum(tenant, lambda: self._save(tenant, command)))
            case Update():
                self._guarded(tenant, lambda: self._update(tenant, command))

    def _save(self, tenant: Tenant, command: Save) -> Quantum:
        try:
            return tenant.save(command)
        except (CheckpointError, OSError) as error:
            failed = SaveFailed(
                worker=self.worker,
                pipeline=tenant.name,
                attempt=tenant.attempt,
                step=command.step,
                error=str(error),
            )
            return Quantum(SubStage.CHECKPOINT, command.step, 0, 0, [failed])

    def _update(self, tenant: Tenant, command: Update) -> None:
        """Reduce and step, with all members of the lease. Raises ``PeerLost``."""
        tenant.lease_id = command.lease.lease_id
        comm = self._connected().world
        self._quantum(tenant, lambda: tenant.update(command, comm))
        tenant.lease_id = None

    # Tensor-parallel groups

    def _switch(self, tenant: Tenant, command: Switch) -> None:
        """At once if this worker is on its own, else with the orders at the group's next conference."""
        if tenant.group is not None:
            tenant.group.order(switch=command)
        else:
            connections = self._connected()
            self._quantum(tenant, lambda: tenant.switch(command, connections))

    def _leave_groups(self, command: Command) -> None:
        """A command that ends what a group does must find it dissolved, on all of its members."""
        for tenant in list(self.tenants.values()):
            ends = isinstance(command, Stop | Connect) or (
                isinstance(command, OpenPipeline | ClosePipeline | DropWork) and command.pipeline == tenant.name
            )
            if ends and tenant.group is not None:
                try:
                    tenant.leave_group()
                except (PeerLost, Diverged):
                    self._disconnect()
                    tenant.abandon_group()
                except Exception as error:
                    self._give_up(tenant, error)

    def _connected(self) -> Connections:
        """Raises ``PeerLost`` between two generations."""
        if self._connections is None:
            raise PeerLost(f"worker {self.worker} is not connected to its peers")
        return self._connections

    def _disconnect(self) -> None:
        if self._connections is not None:
            self._connections.close()
        self._connections = None

    def _reconnect(self, command: Connect) -> None:
        self._disconnect()
        with contextlib.suppress(PeerLost):  # the controller learns of the lost peer and connects a new generation
            self._connections = self._connect(command)

    def _open(self, command: OpenPipeline) -> None:
        start = time.time()
        self._drop(command.pipeline)
        try:
            tenant = Tenant(
                command, worker=self.worker, world=self.world, device=self.device, connected=self._connected
            )
        except Exception as error:
            self._leftovers = True
            self.outbox.put([self._failure(command.pipeline, command.attempt, error)])
            return
        self.tenants[command.pipeline] = tenant
        end = time.time()
        self._spans.add(command.pipeline, SubStage.LOAD, 0, start=start, end=end, tokens=0, batch=0)
        opened = Opened(
            worker=self.worker,
            pipeline=command.pipeline,
            attempt=command.attempt,
            parameters=tenant.parameters,
            duration_s=end - start,
        )
        self.outbox.put([opened])

    def _drop(self, pipeline: str) -> None:
        """Forget a pipeline and give its memory back at once: the next one may need it."""
        if pipeline in self.tenants:
            self._forget(pipeline)
        self._give_back()

    def _forget(self, pipeline: str) -> None:
        tenant = self.tenants.pop(pipeline, None)
        if tenant is not None:
            tenant.close()
        self._shares.forget(pipeline)
        self._leftovers = True

    def _give_back(self) -> None:
        """Free what forgotten pipelines have left; not where an error of theirs is still being handled, whose frames
        hold on to tensors."""
        if self._leftovers:
            self._leftovers = False
            gc.collect()  # much of a pipeline is in cycles
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _tell(self, *, everything: bool = False) -> None:
        """Hand out spans and progress a few times a second."""
        now = time.time()
        if now >= self._next_alive:
            grouped = any(tenant.group is not None for tenant in self.tenants.values())
            news: list[Report] = [report for tenant in self.tenants.values() if (report := tenant.alive()) is not None]
            # However many pipelines there are, reports come as often.
            self._next_alive = now + (ALIVE_IN_GROUP_EVERY_S if grouped else ALIVE_EVERY_S) * max(1, len(news))
            self.outbox.put(news)
        if now < self._next_progress and not everything:
            return
        self._next_progress = now + PROGRESS_EVERY_S
        events: list[Event] = list(self._spans.take(now, everything=everything))
        events += [
            Progress(
                worker=self.worker,
                pipeline=tenant.name,
                substage=tenant.next_substage.value,
                waiting=tenant.engine.waiting,
                running=tenant.engine.running,
                lanes_used=tenant.engine.lanes.used,
                lanes_total=tenant.engine.lanes.total,
            )
            for tenant in self.tenants.values()
            if tenant.runnable
        ]
        if events:
            self.outbox.put([Happened(worker=self.worker, events=tuple(events))], urgent=False)


def _out_of_memory(error: Exception) -> bool:
    """torch has a class of its own for devices, and only words for the host's memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
