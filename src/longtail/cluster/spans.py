"""Turns the quanta of a worker into few spans: consecutive quanta of one (pipeline, sub-stage, step,
TP degree) make one."""

from __future__ import annotations

from dataclasses import dataclass

from longtail.core.events import Span
from longtail.core.types import SubStage


@dataclass(slots=True)
class _Open:
    start: float
    end: float
    busy_s: float = 0.0
    quanta: int = 0
    tokens: int = 0
    sequences: float = 0.0
    context: int = 0


class SpanRecorder:
    """Collects quanta and gives out spans no longer than ``window_s``.

    A span ends when its window is full or when no quantum of its kind ran for ``window_s / 4``. Invariant: the
    ``busy_s`` of all spans given out and still open is the sum of all quanta recorded.
    """

    def __init__(self, worker: int, *, window_s: float = 0.5) -> None:
        self._worker = worker
        self._window_s = window_s
        self._open: dict[tuple[str, SubStage, int, int], _Open] = {}

    def add(
        self,
        pipeline: str,
        substage: SubStage,
        step: int,
        *,
        start: float,
        end: float,
        tokens: int,
        batch: float,
        quanta: int = 1,
        busy_s: float | None = None,
        context: int = 0,
        tp: int = 1,
    ) -> None:
        """``quanta`` of ``batch`` sequences each that computed ``tokens`` tokens between two Unix times.

        ``context`` tokens were in their lanes, summed over quanta; ``busy_s`` is what they took, if others had a part
        of that time; ``tp`` workers did them together.
        """
        key = (pipeline, substage, step, tp)
        span = self._open.setdefault(key, _Open(start, end))
        span.end = end
        span.busy_s += end - start if busy_s is None else busy_s
        span.quanta += quanta
        span.tokens += tokens
        span.sequences += quanta * batch
        span.context += context

    def take(self, now: float, *, everything: bool = False) -> list[Span]:
        """Remove and return the spans that are complete at ``now``."""
        done = [
            key
            for key, span in self._open.items()
            if everything or now - span.start >= self._window_s or now - span.end >= self._window_s / 4
        ]
        return [self._close(key) for key in done]

    def _close(self, key: tuple[str, SubStage, int, int]) -> Span:
        pipeline, substage, step, tp = key
        span = self._open.pop(key)
        return Span(
            t=span.end,
            worker=self._worker,
            pipeline=pipeline,
            substage=substage.value,
            step=step,
            start=span.start,
            end=span.end,
            busy_s=span.busy_s,
            quanta=span.quanta,
            tokens=span.tokens,
            batch=span.sequences / span.quanta,
            context=span.context / span.quanta,
            tp=tp,
        )
