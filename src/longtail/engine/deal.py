"""Which team goes on with which samples when a layout changes: even loads, samples of a prompt together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from longtail.engine.cargo import CargoGroup

SPREAD = 0.1
"""Loads that differ by less than this share of their mean count as even: it is not worth a second copy of a prompt."""
FRESH = -1
"""Stands for all samples of a request that has not begun: they stay together."""


class Share(NamedTuple):
    """Samples of one request that go from source team ``source`` to one target; ``position`` is its age there."""

    source: int
    position: int
    group: CargoGroup


def deal(
    groups: Sequence[Sequence[CargoGroup]],
    source: Sequence[tuple[int, ...]],
    target: Sequence[tuple[int, ...]],
    *,
    rebalance: bool = False,
) -> list[list[Share]]:
    """The shares of each target team, given the ranks of the teams and what each source team has in flight.

    A source team that lies within one target team goes there whole. Every other one is dealt out to the targets that
    have some of its ranks (or, if none has, to all): whole requests at first, longest first, to where least is; then
    single samples, while loads differ by more than ``SPREAD``. With ``rebalance`` whatever is left of such a difference
    is evened out in the same way over all targets, at the cost of those that would have stayed. Load is tokens of
    context.
    """
    hands = _Hands(groups, len(target))
    everywhere = range(len(target))
    split = []
    for number, ranks in enumerate(source):
        home = next((t for t, there in enumerate(target) if set(ranks) <= set(there)), None)
        if home is None:
            split.append(number)
        else:
            hands.give_all(number, home)
    for number in split:
        near = [t for t in everywhere if not set(source[number]).isdisjoint(target[t])] or list(everywhere)
        hands.deal_out(number, near)
        hands.even_out(near, {number}, whole=False)
    if rebalance:
        everyone = range(len(source))
        hands.even_out(everywhere, everyone, whole=True)
        hands.even_out(everywhere, everyone, whole=False)
    return [hands.shares(t) for t in everywhere]


def load(group: CargoGroup) -> int:
    """Tokens of context of its samples together."""
    if group.fresh:
        return group.prompt_len * group.request.samples
    return sum(group.prompt_len + len(sample.tokens) for sample in group.samples)


_Part = tuple[int, int]
"""A request of a source team: the number of the team, and the position of the request there."""


class _Hands:
    """What each target team has been dealt so far, and how much that is."""

    def __init__(self, groups: Sequence[Sequence[CargoGroup]], targets: int) -> None:
        self._groups = groups
        self._held: list[dict[_Part, list[int]]] = [{} for _ in range(targets)]
        self._loads = [0] * targets
        self._load = {
            (number, position, s.sample): group.prompt_len + len(s.tokens)
            for number, row in enumerate(groups)
            for position, group in enumerate(row)
            for s in group.samples
        } | {
            (number, position, FRESH): load(group)
            for number, row in enumerate(groups)
            for position, group in enumerate(row)
            if group.fresh
        }

    def give_all(self, number: int, target: int) -> None:
        for position in range(len(self._groups[number])):
            self._give((number, position), target)

    def deal_out(self, number: int, to: Sequence[int]) -> None:
        """Whole requests of one team, longest first, each to where least is."""
        groups = self._groups[number]
        for position in sorted(range(len(groups)), key=lambda p: (-load(groups[p]), p)):
            self._give((number, position), min(to, key=lambda t: self._loads[t]))

    def _give(self, part: _Part, target: int) -> None:
        group = self._groups[part[0]][part[1]]
        self._held[target][part] = [s.sample for s in group.samples] or [FRESH]
        self._loads[target] += load(group)

    def even_out(self, to: Sequence[int], teams: Collection[int], *, whole: bool) -> None:
        """Move requests of ``teams``, as far as they are in one place (``whole``), or single samples, from where most
        is to where least is, until loads differ by no more than ``SPREAD`` or nothing would make them differ less."""
        while True:
            heaviest, lightest = max(to, key=lambda t: self._loads[t]), min(to, key=lambda t: self._loads[t])
            gap = self._loads[heaviest] - self._loads[lightest]
            if gap * len(to) <= SPREAD * sum(self._loads[t] for t in to):
                return
            movable = [
                (tokens, part, samples)
                for part, held in self._held[heaviest].items()
                if part[0] in teams
                for samples in ([held] if whole else [[s] for s in held])
                if 0 < (tokens := self._tokens(part, samples)) < gap
            ]
            if not movable:
                return
            tokens, part, samples = min(movable, key=lambda m: (abs(2 * m[0] - gap), m[0], m[1], m[2]))
            left = [s for s in self._held[heaviest][part] if s not in samples]
            if left:
                self._held[heaviest][part] = left
            else:
                del self._held[heaviest][part]
            self._held[lightest].setdefault(part, []).extend(samples)
            self._loads[heaviest] -= tokens
            self._loads[lightest] += tokens

    def _tokens(self, part: _Part, samples: Sequence[int]) -> int:
        return sum(self._load[(*part, sample)] for sample in samples)

    def shares(self, target: int) -> list[Share]:
        """By team, then oldest first."""
        return [
            Share(number, position, _only(self._groups[number][position], samples))
            for (number, position), samples in sorted(self._held[target].items())
        ]


def _only(group: CargoGroup, samples: Collection[int]) -> CargoGroup:
    return replace(group, samples=tuple(s for s in group.samples if s.sample in samples))
