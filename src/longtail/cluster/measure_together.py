"""Measuring with several workers at once: they start together, repeat equally often, and the slowest one counts.

Whatever is decided on the way (how often to repeat, when to stop) follows from times that all have exchanged, so that
all workers decide alike.
"""

from __future__ import annotations

import statistics
import struct
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from longtail.core.comm import Communicator
from longtail.core.errors import CapacityError, ModelError

Work = Callable[[], float]
"""Does something once and says how many seconds it took."""

T = TypeVar("T")


class Pace(NamedTuple):
    """How often to repeat a measurement: for about ``target_s``, but ``least`` to ``most`` times. With ``least`` 0, one
    that is much longer is done once, and that is its result."""

    target_s: float
    least: int
    most: int

    def repeats(self, seconds: float) -> int:
        """How often, after the first time, if each takes ``seconds``."""
        return max(self.least, min(self.most, round(self.target_s / max(seconds, 1e-9))))


class Together:
    """All workers of a lease, connected by ``comm``; every method is collective, and raises ``PeerLost``."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size

    def barrier(self) -> None:
        self._comm.barrier()

    def all(self, value: float) -> list[float]:
        """What each worker gave."""
        return [struct.unpack("d", data)[0] for data in self._comm.all_gather_bytes(struct.pack("d", value))]

    def slowest(self, seconds: float) -> float:
        return max(self.all(seconds))

    def median_s(self, work: Work | None, pace: Pace) -> float:
        """Median seconds of ``work`` on the slowest worker; a worker without ``work`` only waits.

        The first time is for warming up, and for seeing how often is often enough.
        """
        self.barrier()
        first = self.slowest(work() if work is not None else 0.0)
        repeats = pace.repeats(first)
        if repeats == 0:
            return first
        times = [work() for _ in range(repeats)] if work is not None else [0.0]
        return self.slowest(statistics.median(times))

    def attempt(self, make: Callable[[], T]) -> tuple[T | None, str]:
        """What ``make`` gives, and no reason; or None and why, if it does not fit on some worker."""
        made, why = None, ""
        try:
            made = make()
        except (CapacityError, ModelError) as error:
            why = str(error)
        reasons = [data.decode() for data in self._comm.all_gather_bytes(why.encode())]
        return made, next((reason for reason in reasons if reason), "")
