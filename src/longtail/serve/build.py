"""Puts a front door together from what the command line says."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from longtail.core.errors import ConfigError
from longtail.lengths.ranker import Ranker
from longtail.serve.calls import Backend
from longtail.serve.document import document
from longtail.serve.front import DoorSettings, FrontDoor
from longtail.serve.hold import Hold
from longtail.serve.keys import Keys
from longtail.serve.queue import FairQueue
from longtail.serve.record import Recorder
from longtail.serve.scoring import Scorer

log = logging.getLogger("longtail.serve")

DOWN_GRACE_S = 10.0
"""So long requests wait for an upstream to come back; then they fail, which tells their clients to try elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `longtail serve` and `longtail gateway` have in common; times in seconds, sizes in bytes.

    ``max_wait_s``: whoever waited longer goes first, in hold mode. ``max_queue``: most requests that wait.
    ``score_within_s``: a score that takes longer is done without. ``record``: file for the lengths of what is served;
    ``record_prompts``: with the prompts instead of their features (with keys: of those keys that allow it).
    """

    door: DoorSettings = field(default_factory=DoorSettings)
    ranker: Path | None = None
    score_within_s: float = 0.05
    max_wait_s: float | None = 300.0
    max_queue: int = 2000
    keys: Path | None = None
    record: Path | None = None
    record_prompts: bool = False


def front_door(backend: Backend, options: Options, *, title: str, passes_through: bool = False) -> FrontDoor:
    """Raises ``LongtailError`` for keys, a ranker or a record file that cannot be used; nothing has started then."""
    if options.record_prompts and options.record is None:
        raise ConfigError("--record-prompts needs --record FILE.")
    if options.keys is not None and options.door.trust_priority:
        raise ConfigError("--trust-priority is for servers without --keys; with them say allow_priority in the file.")
    keys = None if options.keys is None else Keys.load(options.keys)
    ranker = Ranker.load(options.ranker) if options.door.ranked else None
    window = _Window(backend)
    queue = FairQueue(limit=options.max_queue, max_wait_s=options.max_wait_s)
    hold = window.hold = Hold(queue, (lambda: math.inf) if options.door.tag else window)
    recorder = None if options.record is None else Recorder(options.record, keep_prompts=options.record_prompts)
    door = FrontDoor(
        backend,
        hold,
        settings=options.door,
        keys=keys,
        recorder=recorder,
        document=document(title, keys=keys is not None),
        passes_through=passes_through,
    )
    if ranker is not None:
        door.scorer = Scorer(ranker, deadline_s=options.score_within_s, failed=door.not_scored)
    return door


class _Window:
    """The backend's window; without limit once nobody could answer for a while, so that what waits fails clearly."""

    def __init__(self, backend: Backend) -> None:
        self.hold: Hold | None = None
        self._backend = backend
        self._down_since_s: float | None = None

    def __call__(self) -> float:
        size = self._backend.window
        if size > 0:
            self._down_since_s = None
            return size
        now_s = time.monotonic()
        if self._down_since_s is None:
            self._down_since_s = now_s
            assert self.hold is not None
            asyncio.get_running_loop().call_later(DOWN_GRACE_S + 0.05, self.hold.release)
        return 0 if now_s - self._down_since_s < DOWN_GRACE_S else math.inf
