"""How much a server can hold at once, found out while it serves: the window of hold mode for servers that publish
how many requests they run and how many wait there.

What waits at the server is served in the server's order, not in ours; what the server could run and does not get is
wasted. So the window is as small as keeps the server's own queue just about empty: it grows while requests wait here
and none there, and falls to what runs there as soon as some wait there. Where they began to wait is remembered as the
server's capacity, and only rarely tried again. (A batch that is not capped has no capacity: then the window just grows,
and ordering cannot help, because nothing has to wait.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

FIRST, LEAST, MOST = 16, 1, 4096
GROWTH = 1.5
SLACK = 0.05
"""So many waiting at the server, as a share of those that run, are no queue."""
RETRY_AFTER = 60
"""Looks without a queue at the server before more than its known capacity is tried."""


class Load(NamedTuple):
    """Requests that a server runs, and that wait there, from all its clients."""

    running: int
    waiting: int


_GAUGES = (
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    ("longtail_in_flight", "longtail_waiting"),
    ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
)


def read_load(exposition: str) -> Load | None:
    """The load in a server's ``/metrics``; None if it publishes none that is known. Engines of one server add up."""
    for running, waiting in _GAUGES:
        found = _total(exposition, running), _total(exposition, waiting)
        if found[0] is not None and found[1] is not None:
            return Load(round(found[0]), round(found[1]))
    return None


def _total(exposition: str, name: str) -> float | None:
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}\n]*\}})?\s+([0-9.eE+-]+)\s*$", exposition, re.MULTILINE)
    return sum(map(float, values)) if values else None


@dataclass
class Window:
    """The window of one server; :meth:`look` once in a while (about every half second)."""

    size: int = FIRST
    capacity: int | None = None
    _calm: int = 0
    _ran: int = 0

    def look(self, load: Load, *, in_flight: int, held: int) -> int:
        """``in_flight``: our samples at the server; ``held``: requests that wait here. The new size."""
        others = max(0, load.running + load.waiting - in_flight)
        filling, self._ran = load.running > self._ran, load.running
        if load.waiting > 1 + SLACK * load.running:
            if filling:  # what waits there waits for its prompt to be read, not for a place
                return self.size
            self.capacity = max(LEAST, load.running)
            self.size = max(LEAST, self.capacity + 1 - others)
            self._calm = 0
            return self.size
        self._calm += 1
        if held and in_flight >= self.size:
            known = self.capacity is not None and self._calm < RETRY_AFTER
            limit = self.capacity + 1 - others if known and self.capacity is not None else MOST
            self.size = max(self.size, min(limit, MOST, int(self.size * GROWTH) + 1))
            if not known:
                self._calm, self.capacity = 0, None
        return self.size
