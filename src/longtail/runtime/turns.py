"""Who may begin: pipelines side by side, or in turns, each with all workers to itself.

Turns are taken by stage (a rollout; a training with its update) or by whole step, first come, first served. Whoever has
the turn keeps it until it says that it is done. Scoring needs no worker and no turn.

Invariant: in turns at most one pipeline has the turn, and whoever asks gets it in the end, as long as others let go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple


class By(StrEnum):
    """What a turn lasts for."""

    NOTHING = "nothing"
    """No turns: everybody may begin at once."""
    STAGE = "stage"
    STEP = "step"


class _Asked(NamedTuple):
    pipeline: str
    go: Callable[[], None]


class Turns:
    """The controller's record of whose turn it is."""

    def __init__(self, by: By = By.NOTHING) -> None:
        self._by = by
        self._holder: str | None = None
        self._queue: deque[_Asked] = deque()

    @property
    def by(self) -> By:
        return self._by

    @property
    def holder(self) -> str | None:
        """Who has the turn."""
        return self._holder

    def change(self, by: By) -> None:
        """From now on; who has begun goes on."""
        self._by = by
        if by is By.NOTHING:
            self._holder = None
        self._serve()

    def ask(self, pipeline: str, go: Callable[[], None]) -> None:
        """Call ``go`` when ``pipeline`` may begin its next stage: now, or later. Who has the turn may.

        ``go`` may be called inside of another pipeline's call, which an error in it would hit: it must not raise.
        """
        self._queue.append(_Asked(pipeline, go))
        self._serve()

    def stage_done(self, pipeline: str) -> None:
        """``pipeline`` has ended a stage that it asked for, and is at no other."""
        if self._by is By.STAGE and self._holder == pipeline:
            self._holder = None
            self._serve()

    def step_done(self, pipeline: str) -> None:
        """``pipeline`` has ended a step."""
        if self._holder == pipeline:
            self._holder = None
            self._serve()

    def forget(self, pipeline: str) -> None:
        """``pipeline`` has dropped what it was at, and what it asked for."""
        self._queue = deque(asked for asked in self._queue if asked.pipeline != pipeline)
        self.step_done(pipeline)

    def waits(self, pipeline: str) -> bool:
        """Whether ``pipeline`` has asked for something that it did not get yet."""
        return any(asked.pipeline == pipeline for asked in self._queue)

    def _serve(self) -> None:
        while (asked := self._next()) is not None:
            self._queue.remove(asked)
            if self._by is not By.NOTHING:
                self._holder = asked.pipeline
            asked.go()

    def _next(self) -> _Asked | None:
        if self._by is By.NOTHING or self._holder is None:
            return self._queue[0] if self._queue else None
        return next((asked for asked in self._queue if asked.pipeline == self._holder), None)
