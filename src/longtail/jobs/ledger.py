"""Who has which memory on each worker: a ledger, so that nothing depends on what happens to be free at a moment.

Invariants: what is granted never exceeds the budget, whoever asks at the same time; a grant is all that was asked for
or nothing, so a job has the KV cache that it would have alone, whatever starts beside it.
All figures are bytes on one worker, in the terms of ``runtime/memory.py``: quanta of different jobs never overlap
there, so of their peaks only the largest counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from longtail.core.errors import CapacityError
from longtail.runtime.memory import USABLE, Footprint, gib


class Ledger:
    """``free_bytes`` is what a worker had when nothing ran; None where that is not known (a cluster), and everything is
    granted. ``foreign`` tells how much of it programs that are not ours have taken since."""

    def __init__(self, free_bytes: int | None, *, workers: int, foreign: Callable[[], int] = lambda: 0) -> None:
        self._free_bytes, self._workers, self._foreign = free_bytes, workers, foreign
        self._granted: dict[str, Footprint] = {}
        self._lock = threading.Lock()

    @property
    def granted(self) -> dict[str, Footprint]:
        with self._lock:
            return dict(self._granted)

    def grant(self, wanted: Mapping[str, Footprint]) -> None:
        """Give all of ``wanted`` (by name, with ``kv`` set) what it takes, or raise :class:`CapacityError` with the sum
        for the first that does not fit, and give nothing."""
        with self._lock:
            taken = dict(self._granted)
            if self._free_bytes is not None:
                budget = int(max(0, self._free_bytes - self._foreign()) * USABLE)
                for name, footprint in wanted.items():
                    if _sum({**taken, name: footprint}) > budget:
                        raise CapacityError(self._refusal(name, footprint, taken, budget))
                    taken[name] = footprint
            self._granted.update(wanted)

    def release(self, name: str) -> None:
        """The workers have dropped it; safe to call twice."""
        with self._lock:
            self._granted.pop(name, None)

    def _refusal(self, name: str, f: Footprint, taken: Mapping[str, Footprint], budget: int) -> str:
        left = budget - sum(_held(g) for g in taken.values())
        peak = max([f.peak, *(g.peak for g in taken.values())])
        workers = f"each of {self._workers} workers" if self._workers > 1 else "the worker"
        parts = f"weights {gib(f.weights)} + gradients {gib(f.gradients)} + optimizer {gib(f.optimizer)}"
        text = f"{name} does not fit: {parts} + KV {gib(f.kv)} + training {gib(f.training + peak)} on {workers}, "
        text += f"{gib(left)} free" if left > 0 else "nothing free"
        if taken:
            text += f" beside {' and '.join(f'{other} ({gib(_held(g))})' for other, g in taken.items())}"
        if (foreign := self._foreign()) > 0:
            text += f", {gib(foreign)} taken by other programs"
        advice = "lower rollout.max_tokens or train.micro_tokens, use bfloat16"
        room = left - peak - f.resident
        if room >= f.kv_least and room > 0:
            advice = f"set rollout.kv_gib to at most {_floor_gib(room)}"
        waiting = ", or wait until another job has ended" if taken else ""
        return f"{text}. {advice[0].upper()}{advice[1:]}{waiting}."


def _held(f: Footprint) -> int:
    return f.resident + f.kv


def _sum(granted: Mapping[str, Footprint]) -> int:
    return sum(map(_held, granted.values())) + max((f.peak for f in granted.values()), default=0)


def _floor_gib(size: int) -> str:
    """Digits enough for small ones, and never rounded up."""
    thousandths = size * 1000 // (1 << 30)
    return f"{thousandths / 1000:g}"
