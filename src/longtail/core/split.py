"""How things are dealt out over the ranks of a group: by halves, so that wider groups split what narrower ones have."""

from __future__ import annotations

Bounds = tuple[int, int]
"""First, and one after the last."""


def halved(units: int, ranks: int, first: int = 0) -> list[Bounds]:
    """Consecutive parts of ``units`` from ``first`` on, one for each rank, of which no two differ by more than one."""
    if ranks == 1:
        return [(first, first + units)]
    left = (ranks + 1) // 2
    mine = -(-units * left // ranks)
    return halved(mine, left, first) + halved(units - mine, ranks - left, first + mine)
