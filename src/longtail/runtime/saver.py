"""One pipeline's checkpoints, from the controller's side: open a folder, wait for all workers' parts, publish.

At most one is in the making. Training goes on meanwhile: workers write their parts between two quanta, before any
later update can reach them, so a checkpoint is always of one step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtail.cluster.messages import Saved
from longtail.core.clock import Clock
from longtail.rl import checkpoint


@dataclass
class _InProgress:
    step: int
    folder: Path
    waiting: set[int]
    started: float
    bytes: int = 0


@dataclass(frozen=True)
class Published:
    """A checkpoint that is complete on disk."""

    step: int
    path: Path
    bytes: int
    duration_s: float


class Saver:
    """``root`` holds the checkpoints of one pipeline; the newest ``keep`` stay."""

    def __init__(self, root: Path, *, workers: int, keep: int, clock: Clock) -> None:
        self._root, self._workers, self._keep, self._clock = root, workers, keep, clock
        self._now: _InProgress | None = None
        self.last_step = -1
        """Steps that the newest complete checkpoint holds (0 at the start of a pipeline, -1 before it is known)."""
        self.last_path: Path | None = None

    @property
    def busy(self) -> bool:
        return self._now is not None

    @property
    def step_in_progress(self) -> int | None:
        return self._now.step if self._now else None

    def find(self) -> checkpoint.Found:
        """The newest complete checkpoint, from which the pipeline goes on; forgets a half-made one."""
        self._now = None
        found = checkpoint.latest(self._root)
        self.last_step, self.last_path = found.step, found.path
        return found

    def begin(self, step: int) -> Path:
        """A folder into which all workers are to write. Raises :class:`CheckpointError`."""
        folder = checkpoint.begin(self._root, step)
        self._now = _InProgress(step, folder, set(range(self._workers)), self._clock.time())
        return folder

    def part_written(self, report: Saved, state: Callable[[int], dict[str, Any]]) -> Published | None:
        """Count a worker's part; publishes with the last one. ``state(step)`` is what the controller stores.

        Raises :class:`CheckpointError`, leaving the earlier checkpoints as they are; then :meth:`give_up`.
        """
        now = self._now
        if now is None or report.step != now.step:
            return None
        now.waiting.discard(report.worker)
        now.bytes += report.bytes
        if now.waiting:
            return None
        path = checkpoint.publish(now.folder, state(now.step), keep=self._keep)
        self._now = None
        self.last_step, self.last_path = now.step, path
        return Published(now.step, path, now.bytes, self._clock.time() - now.started)

    def give_up(self) -> None:
        """The checkpoint in the making cannot be had; on a full disk, what there is of it is in others' way."""
        if self._now is not None:
            checkpoint.discard(self._now.folder)
        self._now = None
