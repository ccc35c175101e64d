"""One pipeline on one worker: its model, engine, trainer, and the work that waits for quanta."""

from __future__ import annotations

import copy
import math
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from longtail.cluster.connections import Connections
from longtail.cluster.fair import FairShare
from longtail.cluster.group import Group
from longtail.cluster.measure_progress import Profiling
from longtail.cluster.messages import (
    Alive,
    Generate,
    Hurry,
    OpenPipeline,
    Profile,
    Profiled,
    Refresh,
    Report,
    Sampled,
    Save,
    Saved,
    Switch,
    Switched,
    TrainBatches,
    Trained,
    Update,
    Updated,
)
from longtail.cluster.training import Training
from longtail.core.comm import Communicator
from longtail.core.errors import CapacityError
from longtail.core.types import BURST_S, Completion, Request, SubStage
from longtail.engine.blocks import BlockStore
from longtail.engine.cargo import Cargo
from longtail.engine.checkpoint import load_model
from longtail.engine.engine import Engine
from longtail.engine.handoff import carry_out
from longtail.engine.lanes import LanePool
from longtail.engine.model import DTYPES
from longtail.engine.switch_plan import How, Refusal, SwitchCosts, SwitchPlan, plan_switch
from longtail.engine.tokenizer import Tokenizer
from longtail.rl import checkpoint
from longtail.rl.trainer import Trainer

MOST_STEPS = 64
"""Of a burst."""


@dataclass(frozen=True)
class Quantum:
    """What one quantum was and what came of it, or a burst of ``quanta`` of them, of ``batch`` sequences on average, by
    ``tp`` workers.

    ``context`` counts the tokens in the lanes that were worked on, summed over quanta.
    """

    substage: SubStage
    step: int
    tokens: int
    batch: float
    reports: list[Report]
    quanta: int = 1
    context: int = 0
    tp: int = 1


class Tenant:
    """A pipeline's state on one worker; every method runs in the worker's loop, between or as quanta.

    ``step`` is the one that is sampled. Sampling and training that wait both share the pipeline's time evenly.
    ``model`` is trained; ``sampler`` is the same, or with a ``max_staleness`` a copy that stays as it is until
    :meth:`refresh`.
    ``group`` is the tensor-parallel group in which it samples now, under the lease ``lease_id``; None: on its own.
    ``connected`` gives the worker's present connections.
    """

    def __init__(
        self,
        command: OpenPipeline,
        *,
        worker: int,
        world: int,
        device: torch.device,
        connected: Callable[[], Connections],
    ) -> None:
        config, dtype = command.config, DTYPES[command.config.dtype]
        self.name, self.attempt, self.worker = command.pipeline, command.attempt, worker
        self.step = 0
        self.group: Group | None = None
        self.lease_id: int | None = None
        self._connected = connected
        self._broken = False
        self.beside = False
        """Whether other pipelines have work for the worker, too."""
        self._accompanied = world > 1
        model = load_model(Path(command.weights), dtype=dtype, device=device)
        reference = load_model(Path(command.reference), dtype=dtype, device=device) if command.reference else None
        self.sampler = copy.deepcopy(model) if config.max_staleness else model
        self.tokenizer = Tokenizer.load(Path(command.weights))
        self.trainer = Trainer(
            model,
            algorithm=config.algorithm,
            train=config.train,
            temperature=config.rollout.temperature,
            steps=config.steps,
            rank=worker,
            world=world,
            reference=reference,
        )
        if command.optimizer:
            checkpoint.load_optimizer(self.trainer, Path(command.optimizer))
        self.model = model
        self.store = BlockStore(model.config, blocks=command.kv_blocks, dtype=dtype, device=device)
        self.rollout = config.rollout
        self._started: dict[str, float] = {}
        self._training = Training(self.trainer)
        self._shares = FairShare()
        self.engine = self._narrow_engine()

    def _narrow_engine(self) -> Engine:
        """One that has no sequences, for this worker alone."""
        return self._make_engine(LanePool.over(self.store, range(self.model.config.kv_heads)))

    def _make_engine(self, lanes: LanePool, comm: Communicator | None = None) -> Engine:
        return Engine(
            self.sampler,
            lanes,
            detokenize=self.tokenizer.decode,
            max_running=self.rollout.max_running,
            chunk_tokens=self.rollout.chunk_tokens,
            comm=comm,
        )

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def follows(self) -> bool:
        """Whether the leader of a group decides what is done here."""
        return self.group is not None and not self.group.leads

    @property
    def runnable(self) -> bool:
        if self._broken:
            return False
        if self.group is not None:
            return self.follows or self.engine.has_work or self.group.has_orders
        return self.engine.has_work or bool(self._training)

    @property
    def next_substage(self) -> SubStage:
        samples = self.engine.has_work and (self.group is not None or self._next != SubStage.TRAIN)
        return self.engine.next_substage() if samples else SubStage.TRAIN

    def alive(self) -> Alive | None:
        """What the controller needs to know to move what is in flight, or to weigh it against other pipelines."""
        if not self._accompanied or self._broken or self.follows or not self.engine.has_work:
            return None
        progress = self.engine.progress()
        return Alive(
            worker=self.worker,
            pipeline=self.name,
            attempt=self.attempt,
            step=self.step,
            request_ids=tuple(progress),
            generated=tuple(progress.values()),
        )

    def generate(self, command: Generate) -> None:
        self.step = command.step
        now = time.time()
        for request in command.requests:
            if self.group is not None:
                self.group.take_in(request, now)
            else:
                self._add(request, now)

    def _add(self, request: Request, arrived: float) -> None:
        self._started[request.request_id] = arrived
        self.engine.add(request)

    def train(self, command: TrainBatches) -> None:
        self._training.add(command)

    def hurry(self, command: Hurry) -> None:
        """Micro-batches first, as long as there are any."""
        self._training.hurry(command.step)

    @property
    def hurries(self) -> bool:
        """Whether other workers wait for what is next here."""
        return self._training.hurries and self.group is None

    @property
    def expects(self) -> bool:
        """Whether its next micro-batch is on its way."""
        return self._training.expects and self.group is None

    def refresh(self, command: Refresh) -> Quantum:
        """Sample with the present weights from now on."""
        with torch.no_grad():
            for sampled, trained in zip(self.sampler.parameters(), self.model.parameters(), strict=True):
                sampled.copy_(trained)
        return Quantum(SubStage.LOAD, command.updates, 0, 0, [])

    def drop_work(self, attempt: int) -> None:
        """Back to idle with the same weights; gradients of a half-done step are forgotten."""
        self.attempt = attempt
        self._forget_sequences()
        self.close()
        self.trainer.zero_gradients()

    def close(self) -> None:
        """Forget the micro-batches; the gradient of one that is under way is one of a part."""
        self._training.end()

    def _forget_sequences(self) -> None:
        for request_id in self.engine.request_ids:
            self.engine.abort(request_id)
        self._started.clear()

    def run_quantum(self) -> Quantum:
        """A decode step or prefill chunk, and more of them while :data:`BURST_S` has time for them; or a slice of
        a training micro-batch; in a group, as many steps as the leader orders."""
        if self.group is not None:
            return self._burst(self.group)
        waiting, work = self._waiting, self._next
        start = time.perf_counter()
        quantum = self._train() if work == SubStage.TRAIN else self._sample(MOST_STEPS, BURST_S)
        self._shares.used(work, time.perf_counter() - start, [other for other in waiting if other != work])
        return quantum

    @property
    def _waiting(self) -> list[SubStage]:
        """What there is to do, on its own: sampling (as ``decode``), training, or both."""
        return [SubStage.DECODE] * self.engine.has_work + [SubStage.TRAIN] * bool(self._training)

    @property
    def _next(self) -> str:
        """Which of it is next."""
        if self.hurries:
            return SubStage.TRAIN
        return self._shares.next(self._waiting) or SubStage.TRAIN

    def _sample(self, steps: int, within_s: float = math.inf) -> Quantum:
        """Up to ``steps`` engine steps of one kind, fewer when a sample ends or another one would not end in time."""
        substage = self.engine.next_substage()
        done = tokens = sequences = context = 0
        reports: list[Report] = []
        began, step_s = time.perf_counter(), 0.0
        while done < steps and not reports and self.engine.has_work and self.engine.next_substage() == substage:
            start = time.perf_counter()
            if done and start + step_s > began + within_s:
                break
            result = self.engine.step()
            step_s = time.perf_counter() - start
            done, tokens, context = done + 1, tokens + result.tokens, context + result.context
            sequences += result.batch
            if self.group is not None:
                self.group.stepped(result, step_s)
            if result.completions:
                reports.append(self._sampled(result.completions))
        if not self.engine.has_work:
            self._started.clear()
        return Quantum(
            substage, self.step, tokens, sequences / max(done, 1), [] if self.follows else reports,
            quanta=done, context=context, tp=len(self.group.workers) if self.group else 1,
        )  # fmt: skip

    def _sampled(self, completions: list[Completion]) -> Sampled:
        return Sampled(
            worker=self.worker,
            pipeline=self.name,
            attempt=self.attempt,
            step=self.step,
            completions=tuple(completions),
            started=tuple(self._started[c.request_id] for c in completions),
            ended=time.time(),
        )

    def _train(self) -> Quantum:
        """A slice of the next micro-batch."""
        done = self._training.run(company=self.beside or self.engine.has_work)
        reports: list[Report] = []
        if done.stats is not None:
            reports.append(
                Trained(
                    worker=self.worker,
                    pipeline=self.name,
                    attempt=self.attempt,
                    step=done.step,
                    number=done.number,
                    stats=done.stats,
                    shared=done.shared,
                )
            )
        return Quantum(SubStage.TRAIN, done.step, done.tokens, done.samples, reports)

    def update(self, command: Update, comm: Communicator) -> Quantum:
        """Reduce gradients with the other members of the lease and apply the optimizer. Raises ``PeerLost``."""
        stats = self.trainer.update(comm, step=command.step)
        report = Updated(
            worker=self.worker,
            pipeline=self.name,
            attempt=self.attempt,
            step=command.step,
            lease_id=command.lease.lease_id,
            stats=stats,
        )
        return Quantum(SubStage.REDUCE, command.step, 0, 0, [report])

    def save(self, command: Save) -> Quantum:
        """Write this worker's files of a checkpoint. Raises ``CheckpointError``."""
        folder = Path(command.folder)
        written = checkpoint.write_optimizer_shard(folder, self.trainer)
        if self.worker == 0:
            written += checkpoint.write_weights(folder, self.model, source=Path(command.source))
        report = Saved(worker=self.worker, pipeline=self.name, attempt=self.attempt, step=command.step, bytes=written)
        return Quantum(SubStage.CHECKPOINT, command.step, 0, 0, [report])

    def profile(
        self,
        command: Profile,
        connections: Connections,
        put: Callable[[list[Report]], None],
        beside: Tenant | None = None,
    ) -> Quantum:
        """Measure what work costs (or what it and that of ``beside`` do to each other), together with the other members
        of the lease; the first one lets the controller know through ``put`` how far it is. Raises ``PeerLost``."""
        from longtail.cluster.measure import measure
        from longtail.cluster.measure_pair import measure_pair

        lease = command.lease

        def tell(what: str, share: float) -> None:
            if self.worker == lease.workers[0]:
                put([Profiling(worker=self.worker, pipeline=self.name, attempt=self.attempt, what=what, share=share)])

        self.lease_id = lease.lease_id
        if beside is not None:
            table = measure_pair(self, beside, connections, tell=tell)
        else:
            world = len(lease.workers)
            table = measure(self, connections, world=world, degrees=command.degrees, fine=command.fine, tell=tell)
        self.lease_id = None
        report = Profiled(
            worker=self.worker, pipeline=self.name, attempt=self.attempt, lease_id=lease.lease_id, table=table
        )
        return Quantum(SubStage.PROFILE, self.step, 0, 0, [report])

    # Tensor-parallel groups

    def _burst(self, group: Group) -> Quantum:
        """Confer, and do what the leader orders."""
        orders = group.confer(busy=self.engine.has_work)
        if orders.leave:
            self._dissolve()
            return Quantum(SubStage.SWITCH, self.step, 0, 0, [], tp=len(group.workers))
        for request, arrived in orders.requests:
            self._add(request, arrived)
        if orders.switch is not None:
            return self.switch(orders.switch, self._connected())
        if self.engine.has_work:
            return self._sample(max(1, orders.steps))
        return Quantum(SubStage.SWITCH, self.step, 0, 0, [], tp=len(group.workers))

    def leave_group(self) -> None:
        """As its leader, dissolve the group; its sequences are forgotten. Raises ``PeerLost``."""
        assert self.group is not None
        self.group.order(leave=True)
        self._burst(self.group)

    def abandon_group(self) -> None:
        """A peer is gone: nothing here can be relied on until the pipeline is opened again."""
        self._broken = True
        self.group = self.lease_id = None

    def _dissolve(self) -> None:
        self._started.clear()
        self.engine.let_go()
        self.engine = self._narrow_engine()
        self.group = self.lease_id = None

    def switch(self, command: Switch, connections: Connections) -> Quantum:
        """Go over to another layout with all sequences, together with all members of the lease; out of all groups, this
        worker goes on alone and without a sequence.

        Raises ``PeerLost``, or ``Diverged`` on all members alike.
        """
        workers, self.step = command.lease.workers, command.step
        self.lease_id = command.lease.lease_id
        everyone = connections.group(workers)
        cargo = self.engine.export()
        before = self.group.workers if self.group is not None else (self.worker,)
        said = pickle.dumps((before, cargo, self._started))
        arrived = [pickle.loads(data) for data in everyone.all_gather_bytes(said)]
        start = time.perf_counter()
        groups = tuple(sorted({group for group, _, _ in arrived}))
        plan = plan_switch(
            [cargo for _, cargo, _ in arrived],
            [[workers.index(w) for w in group] for group in groups],
            [[workers.index(w) for w in group] for group in command.groups],
            costs=SwitchCosts(per_byte_s=command.per_byte_s, per_token_s=command.per_token_s),
            how=How(command.how),
            rebalance=command.rebalance,
        )
        refused, received, recomputed = None, 0, 0
        if isinstance(plan, Refusal):
            refused = plan.reason
        else:
            mine = next((group for group in command.groups if self.worker in group), (self.worker,))
            try:
                comm = self._join(mine, connections, everyone)
                self._go_over(plan, everyone, cargo, comm)
            except CapacityError as error:  # of shared memory, and then on all members alike
                refused = str(error)
            else:
                groups = command.groups
                received, recomputed = plan.received_bytes[everyone.rank], plan.recomputed_tokens
                started = {name: at for _, _, started in arrived for name, at in started.items()}
                self._started = started if mine in groups else {}
                self.group = Group(mine, comm, command.lease.lease_id) if len(mine) > 1 else None
        if all(len(group) == 1 for group in groups) or not any(self.worker in group for group in groups):
            self.lease_id = None
        report = Switched(
            worker=self.worker,
            pipeline=self.name,
            attempt=self.attempt,
            step=command.step,
            lease_id=command.lease.lease_id,
            groups=groups,
            duration_s=time.perf_counter() - start,
            sequences=sum(
                len(group.samples)
                for worker, (holders, held, _) in zip(workers, arrived, strict=True)
                if worker == holders[0]
                for group in held.groups
            ),
            moved_bytes=received,
            recomputed_tokens=recomputed,
            refused=refused,
        )
        return Quantum(SubStage.SWITCH, self.step, 0, 0, [report], tp=len(before))

    @staticmethod
    def _join(group: tuple[int, ...], connections: Connections, everyone: Communicator) -> Communicator:
        """That of ``group``. Raises ``CapacityError`` on all members of the lease alike if one of them has no room."""
        comm, shortage = None, ""
        try:
            comm = connections.group(group)
        except CapacityError as error:
            shortage = str(error)
        reasons = [reason for reason in everyone.all_gather_bytes(shortage.encode()) if reason]
        if comm is None or reasons:
            raise CapacityError(reasons[0].decode())
        return comm

    def _go_over(self, plan: SwitchPlan, everyone: Communicator, cargo: Cargo, comm: Communicator) -> None:
        engine = carry_out(plan, everyone, self.engine, cargo, lambda lanes: self._make_engine(lanes, comm))
        self.engine = engine if engine is not None else self._narrow_engine()
