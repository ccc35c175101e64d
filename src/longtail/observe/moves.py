"""Moves as people see them: a decision and what came of it are one thing, in a line or in sums."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from longtail.core.events import MoveEnded, MoveMade
from longtail.observe.text import brief, one_line, signed, size

KINDS = ("place", "merge", "spread", "widen", "narrow", "hold")
"""Moves that are counted, in the order in which they are listed."""
EVERY_STEP = "order"
"""Made in every step of every pipeline, and not counted."""
ROUTINE_MOVES = {EVERY_STEP, "hold"}
"""Moves that are in the log, and not worth a line of a display."""
SWITCHES = {"merge", "spread", "widen", "narrow"}
"""Moves whose outcome is told at the end of their step; without one they have not been carried out (yet)."""
RELOCATIONS = {"merge", "spread"}
"""Moves of samples to other workers, which are those that the move names."""


@dataclass(eq=False)
class Move:
    """At least one of the two is there."""

    made: MoveMade | None = None
    ended: MoveEnded | None = None

    @property
    def told(self) -> MoveMade | MoveEnded:
        """The latest that is known of it."""
        told = self.ended or self.made
        assert told is not None
        return told

    @property
    def predicted_net_s(self) -> float | None:
        """The predicted gain less the predicted cost; an outcome's ``gain_s`` has the cost taken off too."""
        if self.made is None or self.made.predicted_gain_s is None:
            return None
        return self.made.predicted_gain_s - (self.made.predicted_cost_s or 0.0)

    @property
    def predicted_cost_s(self) -> float | None:
        if self.ended is not None and self.ended.predicted_cost_s is not None:
            return self.ended.predicted_cost_s
        return self.made.predicted_cost_s if self.made is not None else None


class OpenMoves:
    """Finds the decision that an outcome belongs to: the first of the same pipeline, step, kind and workers."""

    def __init__(self) -> None:
        self._open: dict[str, list[Move]] = {}

    def made(self, event: MoveMade) -> Move:
        move = Move(event)
        if event.move in SWITCHES:
            kept = [m for m in self._open.get(event.pipeline, []) if m.told.step == event.step]
            self._open[event.pipeline] = [*kept, move]
        return move

    def ended(self, event: MoveEnded) -> Move:
        """The move, of which nothing more will come; one without a decision if that is not known."""
        waiting = self._open.get(event.pipeline, [])
        for i, move in enumerate(waiting):
            if _same(move.told, event):
                move.ended = event
                del waiting[i]
                return move
        return Move(ended=event)

    def forget(self, pipeline: str) -> None:
        """What was decided for ``pipeline`` has no outcome any more."""
        self._open.pop(pipeline, None)


def _same(a: MoveMade | MoveEnded, b: MoveEnded) -> bool:
    return (a.step, a.move, sorted(a.workers)) == (b.step, b.move, sorted(b.workers))


@dataclass(frozen=True, kw_only=True)
class MoveTotals:
    """Sums over moves of one kind: ``count`` were carried out, ``refused`` were not.

    ``net_s`` and ``predicted_net_s``, gains less costs, are over the ``judged`` ones, of which both are known;
    ``foretold_net_s`` is predicted of the ``foretold`` ones, of which no more is known. ``cost_s`` is over all,
    ``predicted_cost_s`` over the ``priced`` ones.
    """

    count: int = 0
    refused: int = 0
    judged: int = 0
    net_s: float = 0.0
    predicted_net_s: float = 0.0
    foretold: int = 0
    foretold_net_s: float = 0.0
    cost_s: float = 0.0
    priced: int = 0
    predicted_cost_s: float = 0.0

    @classmethod
    def of(cls, move: Move) -> MoveTotals:
        predicted_net_s, predicted_cost_s = _known(move.predicted_net_s), _known(move.predicted_cost_s)
        foretold = cls(count=1, foretold=int(predicted_net_s is not None), foretold_net_s=predicted_net_s or 0.0)
        if move.ended is None:
            return foretold
        if move.ended.refused is not None:
            return cls(refused=1)
        total = replace(
            foretold,
            cost_s=_known(move.ended.cost_s) or 0.0,
            priced=int(predicted_cost_s is not None),
            predicted_cost_s=predicted_cost_s or 0.0,
        )
        net_s = _known(move.ended.gain_s)
        if net_s is None or predicted_net_s is None:
            return total
        return replace(total, foretold=0, foretold_net_s=0.0, judged=1, net_s=net_s, predicted_net_s=predicted_net_s)

    def __add__(self, other: MoveTotals) -> MoveTotals:
        return MoveTotals(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def add(totals: dict[str, MoveTotals], kind: str, more: MoveTotals) -> None:
    """Add to the sums by kind, in place."""
    totals[kind] = totals.get(kind, MoveTotals()) + more


def listed(totals: dict[str, MoveTotals]) -> dict[str, MoveTotals]:
    """The same sums, the kinds in the order in which they are shown."""
    return {kind: totals[kind] for kind in sorted(totals, key=lambda kind: (*KINDS, kind).index(kind))}


def describe(move: Move) -> str:
    """What is decided, and why; or, once it is known, what came of it.

    ``merge sums to w0: predicted +1.8 s, cost 0.02 s; 2 samples left``
    ``widen sums on w0,w1 to TP2: gained +1.6 s net (predicted +1.8 s), cost 3.0 ms (predicted 0.02 s), 1.2 MiB moved``
    """
    told, made, ended = move.told, move.made, move.ended
    workers = ",".join(f"w{w}" for w in told.workers[:8]) + (",..." if len(told.workers) > 8 else "")
    layout = f" to {made.layout}" if made is not None and made.layout else ""
    on = "to" if told.move in RELOCATIONS else "on"
    head = f"{told.move} {told.pipeline} {on} {workers}{layout}"
    if ended is not None:
        return one_line(f"{head} refused: {ended.refused}" if ended.refused else f"{head}: {_outcome(move, ended)}")
    assert made is not None
    parts = [f"predicted {signed(made.predicted_gain_s)}"] if made.predicted_gain_s is not None else []
    parts += [f"cost {brief(made.predicted_cost_s)}"] if made.predicted_cost_s is not None else []
    return one_line(f"{head}: {'; '.join([*([', '.join(parts)] if parts else []), made.reason])}")


def _outcome(move: Move, ended: MoveEnded) -> str:
    cost, net, expected = move.predicted_cost_s, ended.gain_s, move.predicted_net_s
    parts = []
    if net is not None:
        parts.append(f"gained {signed(net)} net" + (f" (predicted {signed(expected)})" if expected is not None else ""))
    parts.append(f"cost {brief(ended.cost_s)}" + (f" (predicted {brief(cost)})" if cost is not None else ""))
    if ended.moved_bytes:
        parts.append(f"{size(ended.moved_bytes)} moved")
    if ended.recomputed_tokens:
        parts.append(f"{ended.recomputed_tokens:,} tokens recomputed")
    return ", ".join(parts)


def count(totals: dict[str, MoveTotals]) -> str:
    """``merge 12, widen 41, narrow 3``; empty if none was carried out."""
    return ", ".join(f"{kind} {total.count}" for kind, total in listed(totals).items() if total.count)


def account(total: MoveTotals) -> str:
    """``gained +58.0 s net (predicted +62.1 s), cost 0.90 s (predicted 0.80 s), 2 refused``; empty if nothing is
    known."""
    parts = []
    if total.judged:
        of = f" in {total.judged} of {total.count}" if total.judged < total.count else ""
        parts.append(f"gained {signed(total.net_s)} net{of} (predicted {signed(total.predicted_net_s)})")
    elif total.foretold:
        parts.append(f"predicted {signed(total.foretold_net_s)} net")
    if total.cost_s or total.priced:
        predicted = f" (predicted {brief(total.predicted_cost_s)})" if total.priced == total.count else ""
        parts.append(f"cost {brief(total.cost_s)}{predicted}")
    if total.refused:
        parts.append(f"{total.refused} refused")
    return ", ".join(parts)
