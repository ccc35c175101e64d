"""Workers and times in the words of reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def places(begin: Mapping[str, Sequence[int]], workers: int) -> str:
    """On which of ``workers`` workers pipelines ``begin``."""
    if all(len(on) == workers for on in begin.values()):
        return "all workers"
    return ", ".join(f"{on_workers(on)} ({name})" for name, on in list(begin.items())[:4])


def on_workers(on: Sequence[int]) -> str:
    """``on`` ascends."""
    if len(on) == 1:
        return f"worker {on[0]}"
    if len(on) == on[-1] - on[0] + 1:
        return f"workers {on[0]} to {on[-1]}"
    return f"{len(on)} workers"


def lasting(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
