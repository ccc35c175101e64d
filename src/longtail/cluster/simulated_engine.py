"""What an engine would do, by number: which sequences run, and when each ends.

Sequences are admitted as ``engine/scheduler.py`` admits them: a prompt is prefilled when one place is free, then all
samples of its group draw their first token, and those without a place wait for one. There is no limit of KV memory, so
nothing is preempted; but a sequence that comes from another engine may have to be computed again.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from longtail.core.config import Rollout
from longtail.core.types import Completion, FinishReason, Request, SubStage
from longtail.costs.decode import DecodeCosts
from longtail.engine.cargo import CargoGroup, CargoSample

PROMPT = -1
BLOCK_TOKENS = 16
"""As real lanes have them: what is shared, and what travels, are whole blocks."""


class Response(NamedTuple):
    """What comes of a request: the tokens that each sample will have and why it will end, and when it was taken up."""

    lengths: tuple[int, ...]
    finishes: tuple[FinishReason, ...]
    started: float


@dataclass(eq=False, slots=True)
class _Group:
    """A request in flight. ``generated`` has the samples that are here and have not ended, each with its tokens so far
    (of one that runs: when it began to); it is empty until the prompt is prefilled. ``waiting`` and ``running`` count
    samples; ``kept``: the prompt's own lanes are kept for those that wait; samples that were ``recomputed`` have the
    prompt's last block for themselves.
    """

    request: Request
    number: int
    response: Response
    generated: dict[int, int] = field(default_factory=dict)
    waiting: int = 0
    running: int = 0
    kept: bool = False
    recomputed: set[int] = field(default_factory=set)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    def length(self, sample: int) -> int:
        """Positions to be in the lanes before ``sample`` (or PROMPT) can decode."""
        return self.prompt_len if sample == PROMPT else self.prompt_len + self.generated[sample] - 1

    def shared(self, sample: int) -> int:
        """Leading positions that lanes of the group hold already."""
        if sample == PROMPT or not (self.kept or self.running):
            return 0
        if self.kept and self.generated[sample] == 1:
            return self.prompt_len
        return self.prompt_len // BLOCK_TOKENS * BLOCK_TOKENS


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


@dataclass(eq=False, slots=True)
class _Fill:
    """Positions to compute: ``done`` of ``tokens`` are there."""

    number: int
    sample: int
    group: _Group
    tokens: int
    done: int


@dataclass
class Piece:
    """Work without an event inside: some decode steps of one batch, a prefill chunk, or a micro-batch.

    ``work_s`` is what it takes alone, of which ``done_s`` is done; ``lost_s`` went by because of others. ``context``
    are the tokens in the lanes of its first quantum. A micro-batch may be left after each ``slice_s`` of work.
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
    chunk: list[tuple[_Fill, int]] = field(default_factory=list)
    lost_s: float = 0.0
    slice_s: float = math.inf

    @property
    def contexts(self) -> int:
        """Tokens in the lanes, summed over quanta."""
        return self.quanta * self.context + self.batch * (self.quanta * (self.quanta - 1) // 2)

    def cut(self) -> None:
        """End with the quantum under way: the first step that ends at ``done_s`` or later."""
        self.limit(self.done_s - 1e-12)

    def limit(self, seconds: float) -> None:
        """End with the first quantum that is over after so many seconds of work."""
        if self.slice_s < math.inf:
            self.work_s = min(self.work_s, max(1, math.ceil(seconds / self.slice_s)) * self.slice_s)
        if self.costs is None or self.quanta == 1:
            return
        self.quanta = self._steps(seconds, 1, self.quanta)
        self.tokens = self.quanta * self.batch
        self.work_s = self.costs.steps_s(self.quanta, self.batch, self.context)

    def steps_done(self, done_s: float) -> int:
        """Decode steps that are over after ``done_s`` seconds of work, but for the last one, with which it ends."""
        if self.costs is None:
            return 0
        return self._steps(done_s + 1e-12, 1, self.quanta) - 1

    def _steps(self, seconds: float, low: int, high: int) -> int:
        """The fewest steps of ``low`` to ``high`` that take ``seconds``; ``high`` if none do."""
        assert self.costs is not None
        while low < high:
            middle = (low + high) // 2
            if self.costs.steps_s(middle, self.batch, self.context) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low


class SimulatedEngine:
    """``begin`` starts the next :class:`Piece`, ``finish`` ends it and gives the samples that end with it.

    ``costs`` are those of all that is sampled here: of one worker, or of a tensor-parallel group.
    """

    def __init__(self, rollout: Rollout, costs: DecodeCosts) -> None:
        self._rollout, self.costs = rollout, costs
        self._groups: dict[str, _Group] = {}
        self._waiting: list[_Waiting] = []
        self._fills: list[_Fill] = []
        self._running: list[_Running] = []
        self._context = 0
        """Tokens in the lanes of running sequences."""
        self._decoded = 0
        """Decode steps so far."""
        self._next_number = 0

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    @property
    def max_running(self) -> int:
        return self._rollout.max_running

    def add(self, request: Request, response: Response) -> None:
        group = self._take_in(request, response)
        insort(self._waiting, _Waiting(group.number, PROMPT, group))

    def _take_in(self, request: Request, response: Response) -> _Group:
        group = _Group(request, self._next_number, response)
        self._next_number += request.samples
        self._groups[request.request_id] = group
        return group

    # Work

    def begin(self, now: float) -> Piece | None:
        """The next piece, if there is anything to do: prefill before decode."""
        self._admit()
        if self._fills:
            return self._prefill(now)
        if not self._running:
            return None
        steps, batch = self._running[0].last - self._decoded, len(self._running)
        return Piece(
            SubStage.DECODE, now, self.costs.steps_s(steps, batch, self._context), batch, steps * batch,
            quanta=steps, context=self._context, costs=self.costs,
        )  # fmt: skip

    def finish(self, piece: Piece) -> list[tuple[Completion, float]]:
        """``piece`` is done. Returns the samples that end with it, and when the request of each was taken up."""
        ended = self._prefilled(piece) if piece.substage == SubStage.PREFILL else self._decode(piece)
        for group, sample in ended:
            del group.generated[sample]
            if not group.generated:
                del self._groups[group.request.request_id]
        return [(_completion(group, sample), group.response.started) for group, sample in ended]

    def _admit(self) -> None:
        places = self._rollout.max_running - len(self._running) - sum(_places(f.sample, f.group) for f in self._fills)
        filling = {fill.group.number for fill in self._fills}
        count = 0
        for number, sample, group in self._waiting:
            # What a sample computes of the prompt, its siblings wait for.
            if places < 1 or (sample != PROMPT and group.number in filling):
                break
            done, tokens = group.shared(sample), group.length(sample)
            places -= _places(sample, group)
            count += 1
            if sample != PROMPT:
                group.waiting -= 1
                group.kept &= group.waiting > 0
            if done < tokens:
                filling.add(group.number)
                self._fills.append(_Fill(number, sample, group, tokens, done))
            else:
                self._run(group, number, sample)
        del self._waiting[:count]
        self._fills.sort(key=lambda fill: fill.number)

    def _run(self, group: _Group, number: int, sample: int) -> None:
        generated = group.generated[sample]
        last = self._decoded + group.response.lengths[sample] - generated
        heapq.heappush(self._running, _Running(last, number, sample, group))
        group.running += 1
        self._context += group.prompt_len + generated

    def _prefill(self, now: float) -> Piece:
        budget = self._rollout.chunk_tokens
        chunk = []
        for fill in self._fills:
            count = min(budget, fill.tokens - fill.done)
            chunk.append((fill, count))
            budget -= count
            if budget == 0:
                break
        tokens = sum(count for _, count in chunk)
        context = sum(fill.done + count for fill, count in chunk)
        work_s = tokens * self.costs.per_prompt_token_s
        return Piece(SubStage.PREFILL, now, work_s, len(chunk), tokens, context=context, chunk=chunk)

    def _prefilled(self, piece: Piece) -> list[tuple[_Group, int]]:
        """Samples of prompts that are complete draw their first token; some end with it."""
        ended = []
        for fill, count in piece.chunk:
            fill.done += count
            if fill.done < fill.tokens:
                continue
            self._fills.remove(fill)
            group = fill.group
            if fill.sample != PROMPT:
                group.recomputed.add(fill.sample)
                self._run(group, fill.number, fill.sample)
                continue
            for sample, length in enumerate(group.response.lengths):
                group.generated[sample] = 1
                if length == 1:
                    ended.append((group, sample))
                else:
                    self._wait(group, sample)
            group.kept = group.waiting > 0
        return ended

    def _wait(self, group: _Group, sample: int) -> None:
        group.waiting += 1
        number = group.number + sample
        insort(self._waiting, _Waiting(number, sample, group))

    def _decode(self, piece: Piece) -> list[tuple[_Group, int]]:
        self._decoded += piece.quanta
        self._context += piece.quanta * piece.batch
        ended = []
        while self._running and self._running[0].last <= self._decoded:
            _, _, sample, group = heapq.heappop(self._running)
            group.running -= 1
            self._context -= group.prompt_len + group.response.lengths[sample]
            ended.append((group, sample))
        return ended

    # How far it is

    def progress(self, steps: int = 0) -> dict[str, np.ndarray]:
        """As ``Engine.progress`` of the real one, after ``steps`` more decode steps, with which no sample ends."""
        generated = {name: dict(group.generated) for name, group in self._groups.items()}
        for last, _, sample, group in self._running:
            so_far = group.response.lengths[sample] - (last - self._decoded) + steps
            generated[group.request.request_id][sample] = so_far
        samples = {name: range(group.request.samples) for name, group in self._groups.items()}
        return {
            name: np.array([here.get(sample, -1) for sample in samples[name]] if here else [], np.int32)
            for name, here in generated.items()
        }

    # Changing hands

    def export(self) -> tuple[tuple[CargoGroup, ...], int]:
        """Everything in flight, as :class:`longtail.engine.cargo.Cargo` lists it, and how many columns hold its KV.

        A prefill that is not done counts as not begun.
        """
        columns = _Columns()
        running = {(group.number, sample): last for last, _, sample, group in self._running}
        return tuple(self._cargo(group, running, columns) for group in self._groups.values()), columns.taken

    def _cargo(self, group: _Group, running: Mapping[tuple[int, int], int], columns: _Columns) -> CargoGroup:
        """Samples share the whole blocks of the prompt, and its last one until they decode."""
        held = columns.take(_blocks(group.prompt_len) if group.running or group.kept else 0)
        whole = held[: group.prompt_len // BLOCK_TOKENS]

        def cargo(sample: int, so_far: int) -> CargoSample:
            last = running.get((group.number, sample))
            tokens = so_far if last is None else group.response.lengths[sample] - (last - self._decoded)
            lanes = held
            if tokens > 1 or sample in group.recomputed:
                lanes = np.concatenate([whole, columns.take(_blocks(group.prompt_len + tokens - 1) - len(whole))])
            return CargoSample(
                sample=sample,
                tokens=np.broadcast_to(np.int32(0), (tokens,)),
                logprobs=np.broadcast_to(0.0, (tokens,)),
                preemptions=0,
                lanes=None if last is None else lanes,
            )

        return CargoGroup(
            request=group.request,
            limits=group.response.lengths,
            samples=tuple(cargo(sample, so_far) for sample, so_far in sorted(group.generated.items())),
            prompt=held if group.kept else None,
        )

    def adopt(self, groups: Sequence[CargoGroup], responses: Mapping[str, Response]) -> None:
        """Go on with ``groups``, oldest first, whose samples with lanes run at once; this engine must be empty."""
        assert not self._groups
        for cargo in groups:
            response = responses[cargo.request.request_id]
            if cargo.fresh:
                self.add(cargo.request, response)
                continue
            group = self._take_in(cargo.request, response)
            group.generated = {sample.sample: len(sample.tokens) for sample in cargo.samples}
            for sample in cargo.samples:
                if sample.lanes is not None:
                    self._run(group, group.number + sample.sample, sample.sample)
                else:
                    self._wait(group, sample.sample)
            group.kept = cargo.prompt is not None and group.waiting > 0

    @property
    def responses(self) -> dict[str, Response]:
        """Of all requests in flight."""
        return {name: group.response for name, group in self._groups.items()}


def _blocks(positions: int) -> int:
    return -(-positions // BLOCK_TOKENS)


def _places(sample: int, group: _Group) -> int:
    return group.request.samples if sample == PROMPT else 1


class _Columns:
    """Numbers for columns, each taken once."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, count: int) -> np.ndarray:
        first, self.taken = self.taken, self.taken + count
        return np.arange(first, self.taken, dtype=np.int32)


def _completion(group: _Group, sample: int) -> Completion:
    """A response of the right length; its arrays are views of one number, whatever their length."""
    length = group.response.lengths[sample]
    return Completion(
        request_id=group.request.request_id,
        sample=sample,
        tokens=np.broadcast_to(np.int32(0), (length,)),
        logprobs=np.broadcast_to(np.float32(0.0), (length,)),
        text="",
        finish=group.response.finishes[sample],
    )
