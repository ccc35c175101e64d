"""One pipeline on one simulated worker: what it would do next, and how long that takes.

Sequences are admitted as ``engine/scheduler.py`` admits them, by number: a prompt is prefilled when one place is free,
then all samples of its group draw their first token, and those without a place wait for one. There is no limit of KV
memory, so nothing is preempted.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from longtail.cluster.messages import Generate, OpenPipeline, Report, Sampled, TrainBatches, Trained
from longtail.core.types import Completion, FinishReason, Request, SubStage
from longtail.costs.decode import DecodeCosts
from longtail.costs.worker import WorkerCosts
from longtail.rl.packing import MicroBatch
from longtail.rl.trainer import MicroStats

Lengths = Callable[[str, int, Request], Sequence[int]]
"""(pipeline, step, request) -> tokens that each of its samples would have without a cap."""

PROMPT = -1


@dataclass(eq=False)
class _Group:
    """A request in flight; ``lengths`` are those its samples will have, ``prefilled`` tokens of its prompt are done."""

    request: Request
    number: int
    started: float
    lengths: list[int]
    finishes: list[FinishReason]
    prefilled: int = 0


class _Waiting(NamedTuple):
    """A place in the queue: a group whose prompt is not prefilled (``sample`` PROMPT), or one sample."""

    number: int
    sample: int
    group: _Group

    def __lt__(self, other: object) -> bool:
        return isinstance(other, _Waiting) and self.number < other.number


class _Running(NamedTuple):
    """Ends after the decode step number ``last``."""

    last: int
    number: int
    sample: int
    group: _Group

    def __lt__(self, other: object) -> bool:
        return isinstance(other, _Running) and (self.last, self.number) < (other.last, other.number)


@dataclass
class Piece:
    """Work without an event inside: some decode steps of one batch, a prefill chunk, or a micro-batch.

    ``work_s`` is what it takes alone, of which ``done_s`` is done.
    """

    substage: SubStage
    start: float
    work_s: float
    batch: int
    tokens: int
    quanta: int = 1
    done_s: float = 0.0
    context: int = 0
    costs: DecodeCosts | None = None
    prefilled: list[tuple[_Group, int]] = field(default_factory=list)

    def cut(self) -> None:
        """End with the quantum under way."""
        if self.costs is None or self.quanta == 1:
            return
        low, high = 1, self.quanta
        while low < high:  # the first step that ends at done_s or later
            middle = (low + high) // 2
            if self.costs.steps_s(middle, self.batch, self.context) >= self.done_s - 1e-12:
                high = middle
            else:
                low = middle + 1
        self.quanta, self.tokens = low, low * self.batch
        self.work_s = self.costs.steps_s(low, self.batch, self.context)


class SimulatedTenant:
    """``begin`` starts the next :class:`Piece`, ``finish`` ends it and gives the reports that come of it."""

    def __init__(self, command: OpenPipeline, *, worker: int, costs: WorkerCosts, lengths: Lengths) -> None:
        self.name, self.attempt, self.config = command.pipeline, command.attempt, command.config
        self.costs, self.step = costs, 0
        self.piece: Piece | None = None
        self._worker, self._lengths = worker, lengths
        self._rollout = command.config.rollout
        self._clear()
        self._next_number = 0
        self._decoded = 0
        """Decode steps so far."""

    def _clear(self) -> None:
        self.piece = None
        self._waiting: list[_Waiting] = []
        self._fills: list[_Group] = []
        self._running: list[_Running] = []
        self._context = 0
        """Tokens in the lanes of running sequences."""
        self._batches: deque[MicroBatch] = deque()
        self._training: TrainBatches | None = None
        self._stats = MicroStats()

    # Commands

    def drop_work(self, attempt: int) -> None:
        self._clear()
        self.attempt = attempt

    def generate(self, command: Generate, now: float) -> None:
        self.step = command.step
        for request in command.requests:
            forced = request.forced_lengths
            wanted = forced or self._lengths(self.name, command.step, request)
            cap = max(forced) if forced else request.params.max_tokens
            group = _Group(
                request,
                self._next_number,
                now,
                lengths=[max(1, min(int(n), cap)) for n in wanted],
                finishes=[FinishReason.LENGTH if n >= cap and not forced else FinishReason.STOP for n in wanted],
            )
            self._next_number += request.samples
            insort(self._waiting, _Waiting(group.number, PROMPT, group))

    def train(self, command: TrainBatches) -> None:
        self.step = command.step
        self._training = command
        self._batches.extend(command.batches)
        self._stats = MicroStats()

    # Work

    def begin(self, now: float) -> None:
        """Start the next piece, if there is anything to do: prefill before decode, sampling before training."""
        self._admit()
        if self._fills:
            self.piece = self._prefill(now)
        elif self._running:
            steps, batch = self._running[0].last - self._decoded, len(self._running)
            decode = self.costs.decode
            self.piece = Piece(
                SubStage.DECODE, now, decode.steps_s(steps, batch, self._context), batch, steps * batch,
                quanta=steps, context=self._context, costs=decode,
            )  # fmt: skip
        elif self._training is not None:
            tokens, samples = (self._batches[0].tokens, self._batches[0].samples) if self._batches else (0, 0)
            self.piece = Piece(SubStage.TRAIN, now, tokens * self.costs.per_train_token_s, samples, tokens)

    def finish(self, now: float) -> list[Report]:
        """The piece is done."""
        piece, self.piece = self.piece, None
        assert piece is not None
        match piece.substage:
            case SubStage.PREFILL:
                ended = self._prefilled(piece)
            case SubStage.DECODE:
                ended = self._decode(piece)
            case _:
                return self._trained()
        return [self._sampled(ended, now)] if ended else []

    def _admit(self) -> None:
        places = self._rollout.max_running - len(self._running) - sum(g.request.samples for g in self._fills)
        count = 0
        for waiting in self._waiting:
            if places < 1:
                break
            places -= waiting.group.request.samples if waiting.sample == PROMPT else 1
            count += 1
        admitted, self._waiting = self._waiting[:count], self._waiting[count:]
        for number, sample, group in admitted:
            if sample == PROMPT:
                self._fills.append(group)
            else:
                length = group.lengths[sample]
                heapq.heappush(self._running, _Running(self._decoded + length - 1, number, sample, group))
                self._context += len(group.request.prompt) + 1

    def _prefill(self, now: float) -> Piece:
        budget = self._rollout.chunk_tokens
        chunk = []
        for group in self._fills:
            count = min(budget, len(group.request.prompt) - group.prefilled)
            chunk.append((group, count))
            budget -= count
            if budget == 0:
                break
        tokens = sum(count for _, count in chunk)
        work_s = tokens * self.costs.decode.per_prompt_token_s
        return Piece(SubStage.PREFILL, now, work_s, len(chunk), tokens, prefilled=chunk)

    def _prefilled(self, piece: Piece) -> list[_Running]:
        """Samples of prompts that are complete draw their first token; some end with it."""
        ended = []
        for group, count in piece.prefilled:
            group.prefilled += count
            if group.prefilled < len(group.request.prompt):
                continue
            self._fills.remove(group)
            for sample, length in enumerate(group.lengths):
                if length == 1:
                    ended.append(_Running(self._decoded, group.number + sample, sample, group))
                else:
                    insort(self._waiting, _Waiting(group.number + sample, sample, group))
        return ended

    def _decode(self, piece: Piece) -> list[_Running]:
        self._decoded += piece.quanta
        self._context += piece.quanta * piece.batch
        ended = []
        while self._running and self._running[0].last <= self._decoded:
            sequence = heapq.heappop(self._running)
            self._context -= len(sequence.group.request.prompt) + sequence.group.lengths[sequence.sample]
            ended.append(sequence)
        return ended

    def _sampled(self, ended: list[_Running], now: float) -> Sampled:
        return Sampled(
            worker=self._worker,
            pipeline=self.name,
            attempt=self.attempt,
            step=self.step,
            completions=tuple(_completion(s.group, s.sample) for s in ended),
            started=tuple(s.group.started for s in ended),
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


def _completion(group: _Group, sample: int) -> Completion:
    """A response of the right length; its arrays are views of one number, whatever their length."""
    length = group.lengths[sample]
    return Completion(
        request_id=group.request.request_id,
        sample=sample,
        tokens=np.broadcast_to(np.int32(0), (length,)),
        logprobs=np.broadcast_to(np.float32(0.0), (length,)),
        text="",
        finish=group.finishes[sample],
    )
