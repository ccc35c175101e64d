"""Late binding: a request goes to a worker when the worker has room for it, not before.

Predictions of lengths are never exact, so workers run dry earlier or later than planned; whoever does takes from the
others' queues. Enough is sent ahead that no worker waits for an answer.

Invariant: every request is handed out exactly once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from longtail.planner.order import Placement


class Dispatch:
    """Hands out the requests of a :class:`~longtail.planner.order.Placement`; the caller says when samples end.

    ``samples[r]`` are the samples of request r, ``slots`` how many a worker decodes at once. A worker is sent requests
    until it has a request's samples more than that.

    >>> dispatch = Dispatch(placement, samples=[8] * 64, slots=32)
    >>> for worker, requests in enumerate(dispatch.start()): ...
    >>> more = dispatch.ended(worker)  # one of its samples has ended
    """

    def __init__(self, placement: Placement, *, samples: Sequence[int], slots: int) -> None:
        self._queues = [deque(queue) for queue in placement.queues]
        self._expected, self._samples, self._late = placement.expected_tokens, samples, placement.late
        self._room = slots + max(samples, default=0)
        self._held = [0] * len(self._queues)
        self._left = [sum(self._expected[r] for r in queue) for queue in self._queues]

    def start(self) -> list[list[int]]:
        """What each worker gets first."""
        if not self._late:
            everything = [list(queue) for queue in self._queues]
            for queue in self._queues:
                queue.clear()
            return everything
        own = [self._take(worker, steals=False) for worker in range(len(self._queues))]
        return [mine + self._take(worker, steals=True) for worker, mine in enumerate(own)]

    @property
    def empty(self) -> bool:
        """Whether every request has been handed out."""
        return not any(self._queues)

    def ended(self, worker: int) -> list[int]:
        """A sample of ``worker`` has ended: what it gets next."""
        self._held[worker] -= 1
        return self._take(worker, steals=True)

    def _take(self, worker: int, *, steals: bool) -> list[int]:
        taken = []
        while self._held[worker] < self._room:
            victim = worker
            if not self._queues[worker]:
                victim = max(range(len(self._left)), key=self._left.__getitem__)
                if not steals or not self._queues[victim]:
                    break
            request = self._queues[victim].popleft()
            self._left[victim] = self._left[victim] - self._expected[request] if self._queues[victim] else 0.0
            self._held[worker] += self._samples[request]
            taken.append(request)
        return taken
