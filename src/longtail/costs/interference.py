"""How much longer work takes beside the work of other pipelines.

A factor comes on top of what a cost table says: 1.2 means that a quantum takes 1.2 times as long. It is for work of one
(model, class) beside work of another, and is of one of two kinds:

* ``same``: quanta of both in turns on one worker. Each finds caches full of the other's data when it begins, so it
  depends on the share of the worker's time that the work has: who has most of it is interrupted rarely. At a share of 1
  it is 1.
* ``neighbour``: the other one on another worker of the machine, with which memory's bandwidth is shared. The table was
  measured with the same work on all workers, so a factor below 1 says that the other is easier to live with.

What is not known is 1. Pairs of models are measured by ``longtail profile`` (``interference_file.py``), and learnt
while pipelines share workers (``interference_log.py``); of one model, its own cost table knows something.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from longtail.core.types import BURST_S, SubStage
from longtail.costs.table import CostTable, TableKey

Work = tuple[str, str]
"""(model, class): :func:`model_of`, and one of :data:`CLASSES`."""
On = Literal["same", "neighbour"]

CLASSES = ("prefill", "decode_small", "decode_large", "train")
"""A small batch of decode steps costs mainly the reading of weights, a large one multiplying."""
SMALL_BATCH = 4
"""Sequences that a small batch has at most: kernels take rows in tiles of so many."""
SHARES = (1 / 3, 1 / 2, 2 / 3)
"""Of a worker's time: those at which work is measured in turns with other work."""
QUANTUM_S = 0.15
"""What quanta of prefill and training take at most while the interference within one model is measured."""

ROUNDING = 1e-6

Shared = tuple[float, float, float]
"""Factors at each of ``SHARES``."""
ALONE: Shared = (1.0, 1.0, 1.0)


def model_of(key: TableKey) -> str:
    """What work is called by here. Machine, communicator and threads are the same for all that runs together."""
    return f"{key.model}, {key.dtype}"


def work_class(substage: str, batch: float) -> str | None:
    """The class of quanta with ``batch`` sequences each; None: of a kind whose interference is not known."""
    match substage:
        case SubStage.DECODE:
            return "decode_small" if batch <= SMALL_BATCH else "decode_large"
        case SubStage.PREFILL | SubStage.TRAIN:
            return str(substage)
    return None


@dataclass(frozen=True, kw_only=True)
class Interference:
    """``same[a, b]`` and ``neighbour[a, b]`` are for work a beside work b; see the module."""

    same: Mapping[tuple[Work, Work], Shared] = field(default_factory=dict)
    neighbour: Mapping[tuple[Work, Work], float] = field(default_factory=dict)

    def factor(self, work: Work, beside: Work, *, on: On, share: float = 0.5) -> float:
        """By what the table's seconds of ``work`` are to be multiplied beside ``beside``.

        With ``on`` ``same``, ``work`` has that ``share`` of the worker's time, in [0, 1]. Of a pair that is not known,
        the same classes within the model of ``work`` are taken.
        """
        alike = (work[0], beside[1])
        if on == "neighbour":
            return self.neighbour.get((work, beside), self.neighbour.get((work, alike), 1.0))
        if not -ROUNDING <= share <= 1.0 + ROUNDING:
            raise ValueError(f"a share of a worker's time is in [0, 1], not {share}")
        known = self.same.get((work, beside), self.same.get((work, alike)))
        return 1.0 if known is None else _at(known, share)

    def shared(self, work: Work, beside: Work) -> Shared:
        """:meth:`factor` on the same worker, at each of ``SHARES``."""
        return self.same.get((work, beside), self.same.get((work, (work[0], beside[1])), ALONE))

    def among(self, work: Work, beside: Mapping[Work, float], *, share: float) -> float:
        """The factor of ``work`` with a ``share`` of a worker on which others are too, by their parts of the rest."""
        total = sum(beside.values())
        if total <= 0.0:
            return 1.0
        logs = (part * math.log(self.factor(work, b, on="same", share=share)) for b, part in beside.items())
        return math.exp(sum(logs) / total)

    def joined(self, other: Interference) -> Interference:
        """Both; where both know something, the ``other`` is believed."""
        return Interference(same={**self.same, **other.same}, neighbour={**self.neighbour, **other.neighbour})


UNKNOWN = Interference()


def _at(factors: Shared, share: float) -> float:
    """Linear between ``SHARES``, to 1 at a share of 1, and below them as at the lowest."""
    low, middle, high = SHARES
    if share <= low:
        return factors[0]
    if share <= middle:
        return _line(share, low, middle, factors[0], factors[1])
    if share <= high:
        return _line(share, middle, high, factors[1], factors[2])
    return _line(min(share, 1.0), high, 1.0, factors[2], 1.0)


def _line(x: float, x0: float, x1: float, y0: float, y1: float) -> float:
    part = (x - x0) / (x1 - x0)
    return (1.0 - part) * y0 + part * y1


def within_models(tables: Iterable[CostTable]) -> Interference:
    """What cost tables know of work beside other work of the same model.

    They have quanta that took turns one by one, each after one of the other kind: that is what the first quantum after
    other work takes. At a share of the worker's time, so many are first ones as the lengths of turns allow: of a
    quantum, or of as many as make a burst.
    """
    same: dict[tuple[Work, Work], Shared] = {}
    neighbour: dict[tuple[Work, Work], float] = {}
    for table in tables:
        model = model_of(table.key)
        for a, beside in table.same_worker.items():
            for b, first in beside.items():
                if a in CLASSES and b in CLASSES:
                    own_s = max(_quantum_s(table, a), BURST_S)
                    lengths, each = own_s / max(_quantum_s(table, b), BURST_S), _quantum_s(table, a) / own_s
                    low, middle, high = (
                        1.0 + max(0.0, first - 1.0) * each * min(1.0, lengths * (1.0 - share) / share)
                        for share in SHARES
                    )
                    same[(model, a), (model, b)] = (low, middle, high)
        for a, beside in table.neighbour_worker.items():
            like = beside.get(a)
            for b, factor in beside.items():
                if like is not None:
                    neighbour[(model, a), (model, b)] = factor / like
    return Interference(same=same, neighbour=neighbour)


def _quantum_s(table: CostTable, work: str) -> float:
    """About what a quantum of the class took when the table was measured."""
    grid, prefill = table.decode[1], table.prefill[1]
    middle = len(grid.contexts) // 2
    match work:
        case "prefill":
            return max(prefill.token_s, min(QUANTUM_S, prefill.chunk_tokens[-1] * prefill.token_s))
        case "decode_small":
            return grid.seconds[0][middle]
        case "decode_large":
            return grid.seconds[-1][middle]
    return QUANTUM_S
