"""One pipeline on one simulated worker: what it would do next, and how long that takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from longtail.cluster.fair import FairShare
from longtail.cluster.messages import Alive, Generate, OpenPipeline, Report, Sampled, TrainBatches, Trained
from longtail.cluster.simulated_engine import Piece, Response, SimulatedEngine
from longtail.core.types import SLICE_S, Completion, FinishReason, Request, SubStage
from longtail.costs.decode import DecodeCosts
from longtail.costs.worker import WorkerCosts
from longtail.rl.packing import MicroBatch
from longtail.rl.trainer import MicroStats

EPSILON_S = 1e-9
Lengths = Callable[[str, int, Request], Sequence[int]]
"""(pipeline, step, request) -> tokens that each of its samples would have without a cap."""


class Group(NamedTuple):
    """A tensor-parallel group: its ``workers``, of whom the first leads, sample together under a lease."""

    workers: tuple[int, ...]
    lease_id: int


class SimulatedTenant:
    """``begin`` starts the next :class:`Piece`, ``finish`` ends it and gives the reports that come of it.

    In a ``group`` its leader's engine does the work of all; the others' are empty.
    """

    def __init__(self, command: OpenPipeline, *, worker: int, world: int, costs: WorkerCosts, lengths: Lengths) -> None:
        self.name, self.attempt, self.config = command.pipeline, command.attempt, command.config
        self.costs, self.step = costs, 0
        self.piece: Piece | None = None
        self.group: Group | None = None
        self._worker, self._lengths = worker, lengths
        self._accompanied = world > 1
        self._broken = False
        self.engine = self.make_engine(costs.decode)
        self.training_step = 0
        """The step of the micro-batch that was computed last."""
        self._batches: deque[tuple[int, int, MicroBatch]] = deque()
        """(step, number, micro-batch) of those that wait; the first may have been begun."""
        self._trained_s = 0.0
        """Of its work."""
        self._shared = False
        """Whether other work had its turn meanwhile."""
        self._shares = FairShare()

    def make_engine(self, costs: DecodeCosts) -> SimulatedEngine:
        """One that has no sequences."""
        return SimulatedEngine(self.config.rollout, costs)

    @property
    def follows(self) -> bool:
        """Whether the leader of a group decides what is done here."""
        return self.group is not None and self.group.workers[0] != self._worker

    # Commands

    def drop_work(self, attempt: int) -> None:
        self._forget_sequences()
        self._batches.clear()
        self._trained_s, self._shared = 0.0, False
        self.attempt = attempt

    def _forget_sequences(self) -> None:
        self.piece = None
        self.engine = self.make_engine(self.costs.decode)

    def leave_group(self) -> None:
        """On its own again; the group's sequences are forgotten."""
        self.group = None
        self._forget_sequences()

    def abandon(self) -> None:
        """A peer is gone: nothing here can be relied on until the pipeline is opened again."""
        self._broken = True
        self.leave_group()

    def generate(self, command: Generate, now: float) -> None:
        self.step = command.step
        for request in command.requests:
            forced = request.forced_lengths
            wanted = forced or self._lengths(self.name, command.step, request)
            cap = max(forced) if forced else request.params.max_tokens
            response = Response(
                lengths=tuple(max(1, min(int(n), cap)) for n in wanted),
                finishes=tuple(FinishReason.LENGTH if n >= cap and not forced else FinishReason.STOP for n in wanted),
                started=now,
            )
            self.engine.add(request, response)

    def train(self, command: TrainBatches) -> None:
        self._batches.extend((command.step, number, batch) for number, batch in command.batches)

    # Work

    def begin(self, now: float) -> None:
        """Start the next piece, if there is anything to do. Sampling and training share the time evenly; a group only
        samples."""
        if self._broken or self.follows:
            return
        work = self._shares.next(self._waiting)
        if work == SubStage.TRAIN:
            _, _, batch = self._batches[0]
            left_s = self._train_s(batch) - self._trained_s
            self.piece = Piece(SubStage.TRAIN, now, left_s, batch.samples, 0, slice_s=SLICE_S)
            if SubStage.DECODE in self._waiting:
                self.piece.limit(SLICE_S)
        elif work is not None:
            self.piece = self.engine.begin(now)
            if self.piece is not None and SubStage.TRAIN in self._waiting:
                self.piece.limit(SLICE_S)

    @property
    def _waiting(self) -> list[SubStage]:
        """What there is to do: sampling (as ``decode``), training, or both."""
        trains = bool(self._batches) and self.group is None
        return [SubStage.DECODE] * self.engine.has_work + [SubStage.TRAIN] * trains

    def _train_s(self, batch: MicroBatch) -> float:
        return batch.tokens * self.costs.per_train_token_s

    def finish(self, now: float, *, shared: bool = False) -> list[Report]:
        """The piece is done; ``shared``: beside work of other pipelines."""
        piece, self.piece = self.piece, None
        assert piece is not None
        work = SubStage.TRAIN if piece.substage == SubStage.TRAIN else SubStage.DECODE
        self._shares.used(work, piece.work_s, [other for other in self._waiting if other != work])
        if work == SubStage.TRAIN:
            return self._trained(piece, shared=shared or self.engine.has_work)
        ended = self.engine.finish(piece)
        return [self._sampled(ended, now)] if ended else []

    def _sampled(self, ended: list[tuple[Completion, float]], now: float) -> Sampled:
        return Sampled(
            worker=self._worker,
            pipeline=self.name,
            attempt=self.attempt,
            step=self.step,
            completions=tuple(completion for completion, _ in ended),
            started=tuple(started for _, started in ended),
            ended=now,
        )

    def _trained(self, piece: Piece, *, shared: bool) -> list[Report]:
        """A part of a micro-batch is done, or all of it."""
        self.training_step, number, batch = self._batches[0]
        whole_s, before_s = self._train_s(batch), self._trained_s
        self._shared |= shared
        self._trained_s += piece.work_s
        over = whole_s - self._trained_s <= EPSILON_S
        told = int(batch.tokens * before_s / whole_s) if before_s else 0
        piece.tokens = (batch.tokens if over else int(batch.tokens * self._trained_s / whole_s)) - told
        if not over:
            return []
        self._batches.popleft()
        shared, self._shared, self._trained_s = self._shared, False, 0.0
        trained = Trained(
            worker=self._worker,
            pipeline=self.name,
            attempt=self.attempt,
            step=self.training_step,
            number=number,
            stats=MicroStats(samples=batch.samples, tokens=batch.completion_tokens),
            shared=shared,
        )
        return [trained]

    # Reports

    @property
    def tells_progress(self) -> bool:
        """Whether :meth:`alive` has something to say: the controller may move what is in flight."""
        return self._accompanied and not self._broken and not self.follows and self.engine.has_work

    def alive(self, worked_s: float) -> Alive:
        """How far the samples are when the piece under way has had ``worked_s`` seconds more than ``done_s``."""
        steps = self.piece.steps_done(self.piece.done_s + worked_s) if self.piece is not None else 0
        progress = self.engine.progress(steps)
        return Alive(
            worker=self._worker,
            pipeline=self.name,
            attempt=self.attempt,
            step=self.step,
            request_ids=tuple(progress),
            generated=tuple(progress.values()),
        )
