"""One pipeline on one simulated worker: what it would do next, and how long that takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from longtail.cluster.messages import Alive, Generate, OpenPipeline, Report, Sampled, TrainBatches, Trained
from longtail.cluster.simulated_engine import Piece, Response, SimulatedEngine
from longtail.core.types import Completion, FinishReason, Request, SubStage
from longtail.costs.decode import DecodeCosts
from longtail.costs.worker import WorkerCosts
from longtail.rl.packing import MicroBatch
from longtail.rl.trainer import MicroStats

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
        self._adaptive = world > 1 and isinstance(self.config.rollout.tp, str) and len(costs.degrees) > 1
        self._broken = False
        self.engine = self.make_engine(costs.decode)
        self._clear_training()

    def make_engine(self, costs: DecodeCosts) -> SimulatedEngine:
        """One that has no sequences."""
        return SimulatedEngine(self.config.rollout, costs)

    def _clear_training(self) -> None:
        self._batches: deque[MicroBatch] = deque()
        self._training: TrainBatches | None = None
        self._stats = MicroStats()

    @property
    def follows(self) -> bool:
        """Whether the leader of a group decides what is done here."""
        return self.group is not None and self.group.workers[0] != self._worker

    # Commands

    def drop_work(self, attempt: int) -> None:
        self._forget_sequences()
        self._clear_training()
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
        self.step = command.step
        self._training = command
        self._batches.extend(command.batches)
        self._stats = MicroStats()

    # Work

    def begin(self, now: float) -> None:
        """Start the next piece, if there is anything to do: sampling before training, which a group does not do."""
        if self._broken or self.follows:
            return
        self.piece = self.engine.begin(now)
        if self.piece is None and self._training is not None and self.group is None:
            tokens, samples = (self._batches[0].tokens, self._batches[0].samples) if self._batches else (0, 0)
            self.piece = Piece(SubStage.TRAIN, now, tokens * self.costs.per_train_token_s, samples, tokens)

    def finish(self, now: float) -> list[Report]:
        """The piece is done."""
        piece, self.piece = self.piece, None
        assert piece is not None
        if piece.substage == SubStage.TRAIN:
            return self._trained()
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

    def _trained(self) -> list[Report]:
        assert self._training is not None
        if self._batches:
            batch = self._batches.popleft()
            self._stats += MicroStats(samples=batch.samples, tokens=batch.completion_tokens)
        if self._batches:
            return []
        training, self._training = self._training, None
        return [
            Trained(
                worker=self._worker,
                pipeline=self.name,
                attempt=self.attempt,
                step=training.step,
                stats=self._stats,
            )
        ]

    # Reports

    @property
    def tells_progress(self) -> bool:
        """Whether :meth:`alive` has something to say: the controller may switch the layout of what is in flight."""
        return self._adaptive and not self._broken and not self.follows and self.engine.has_work

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
