"""Which tensor-parallel groups there may be: the nodes of binary trees over neighbouring workers.

Workers are dealt out in blocks as large as the widest group may be, and a block is halved again and again, the first
half taking the larger part: of three, (0, 1) and (2,). A layout is a set of nodes that has each worker once. So every
group is a range of neighbours, two groups that merge are the halves of their node, and a rank's KV heads in the wider
group are among those that it had in the narrower one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from longtail.core.split import halved
from longtail.core.types import Layout

Group = tuple[int, ...]
"""Workers in the order of their ranks."""


def halves(group: Group) -> tuple[Group, Group]:
    """The two groups that ``group`` (two workers or more) is made of."""
    middle = (len(group) + 1) // 2
    return group[:middle], group[middle:]


def head_ranges(heads: int, ranks: int) -> list[range]:
    """Which of ``heads`` KV heads each of ``ranks`` ranks (not more) holds."""
    return [range(*bounds) for bounds in halved(heads, ranks)]


@dataclass(frozen=True)
class Tree:
    """The nodes over ``workers`` (neighbours, ascending); only those with a size in ``degrees`` (1 among them) may be
    groups."""

    workers: Group
    degrees: frozenset[int]

    @classmethod
    def over(cls, workers: Iterable[int], degrees: Collection[int]) -> Tree:
        """``degrees`` beyond the number of workers are left out."""
        everyone = tuple(sorted(workers))
        return cls(everyone, frozenset(d for d in degrees if d <= len(everyone)) | {1})

    @cached_property
    def blocks(self) -> tuple[Group, ...]:
        """The roots: groups as wide as may be, the last one narrower where the number of workers asks for it."""
        most = max(self.degrees)
        return tuple(self.workers[i : i + most] for i in range(0, len(self.workers), most))

    def may_be(self, group: Group) -> bool:
        """Whether this node may be a group."""
        return len(group) in self.degrees

    def path(self, group: Group) -> Iterator[Group]:
        """The nodes that contain the first worker of ``group``, from its block down."""
        node = next((block for block in self.blocks if group[0] in block), None)
        while node is not None:
            yield node
            node = next((half for half in halves(node) if group[0] in half), None) if len(node) > 1 else None

    def has(self, groups: Iterable[Group]) -> bool:
        """Whether all ``groups`` are nodes."""
        return all(group in self.path(group) for group in groups)

    def split(self, node: Group, degree: int) -> tuple[Group, ...]:
        """The widest groups of at most ``degree`` workers that ``node`` is made of."""
        if len(node) <= degree and self.may_be(node):
            return (node,)
        return tuple(part for half in halves(node) for part in self.split(half, degree))

    def layout(self, degree: int) -> Layout:
        """All workers in groups of at most ``degree``."""
        return Layout(tuple(group for block in self.blocks for group in self.split(block, degree)))


def possible_degrees(workers: int, most: int) -> tuple[int, ...]:
    """The degrees, ascending, that groups of up to ``most`` of so many workers may have.

    All workers make one block where ``most`` allows it, else blocks of a power of two, which halve evenly.
    """
    block = workers if workers <= most else 1 << (min(workers, most).bit_length() - 1)
    sizes = {block}
    while max(smaller := {part for size in sizes for part in (size // 2, size - size // 2)} - sizes - {0}, default=0):
        sizes |= smaller
    return tuple(sorted(sizes))
