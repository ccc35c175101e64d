"""The micro-batches that one pipeline has to do on one worker, in slices between which other work has its turn."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import NamedTuple

from longtail.cluster.messages import TrainBatches
from longtail.cluster.slices import Slices
from longtail.core.types import SLICE_S, StepTotals, trains_in_slices
from longtail.rl.packing import MicroBatch
from longtail.rl.trainer import MicroStats, Trainer

EXPECTING_S = 0.1
"""So long after a micro-batch the next one is expected."""


class Slice(NamedTuple):
    """A slice of micro-batch ``number`` of ``step``, in which ``tokens`` of it were done, out of ``samples`` samples.
    ``stats``: what came of all of it, if this was the last slice; ``shared`` tells whether any of it had company."""

    step: int
    number: int
    tokens: int
    samples: int
    stats: MicroStats | None
    shared: bool


class _ToTrain(NamedTuple):
    step: int
    number: int
    batch: MicroBatch
    totals: StepTotals


class Training:
    """Micro-batches in the order in which they came; the first one may be under way. True while there are any."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._waiting: deque[_ToTrain] = deque()
        self._slices: Slices[MicroStats] | None = None
        self._told = 0
        self._shared = False
        self._hurries = self._more = False
        self._last_end = -math.inf

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, command: TrainBatches) -> None:
        self._hurries, self._more = False, command.more
        self._waiting.extend(_ToTrain(command.step, number, batch, command.totals) for number, batch in command.batches)

    def hurry(self, step: int) -> None:
        """Other workers wait for those of ``step``."""
        self._hurries = any(batch.step == step for batch in self._waiting)

    @property
    def hurries(self) -> bool:
        """Whether other workers wait for what there is."""
        return self._hurries and bool(self._waiting)

    @property
    def expects(self) -> bool:
        """Whether there is none, but the next one is on its way."""
        return self._more and not self._waiting and time.perf_counter() - self._last_end < EXPECTING_S

    def run(self, *, company: bool) -> Slice:
        """:data:`~longtail.core.types.SLICE_S` of the first one, or the rest of it. ``company``: whether other work
        waits for the worker."""
        step, number, batch, totals = self._waiting[0]
        if self._slices is None:
            self._slices = self._sliced(batch, totals)
            self._told, self._shared = 0, False
        self._shared |= company
        over = self._slices.run(SLICE_S)
        told = batch.tokens if over else int(batch.tokens * self._slices.share)
        tokens, self._told = told - self._told, told
        stats = None
        if over:
            stats, self._slices = self._slices.result, None
            self._waiting.popleft()
            self._last_end = time.perf_counter()
        return Slice(step, number, tokens, batch.samples, stats, self._shared)

    def end(self) -> None:
        """Give up the one under way, whose gradient is then one of a part, and forget the others."""
        if self._slices is not None:
            self._slices.cancel()
        self._slices = None
        self._waiting.clear()

    def _sliced(self, batch: MicroBatch, totals: StepTotals) -> Slices[MicroStats]:
        """Where that cannot be, it is one slice."""
        if trains_in_slices(self._trainer.model.device.type):
            return Slices(lambda pause: self._trainer.micro_batch(batch, totals, pause=pause))
        return Slices(lambda pause: self._trainer.micro_batch(batch, totals))
