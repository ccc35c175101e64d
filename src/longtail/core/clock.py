"""What time it is for whoever drives a cluster: the module ``time``, or the virtual clock of a simulated one."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Seconds: ``time`` since the epoch, for time stamps; ``monotonic`` for durations."""

    def time(self) -> float: ...

    def monotonic(self) -> float: ...
