"""Which team goes on with which samples when a layout changes: even loads, samples of a prompt together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from longtail.engine.cargo import CargoGroup

SPREAD = 0.1
"""Loads that differ by less than this share of their mean count as even: it is not worth a second copy of a prompt."""


class Share(NamedTuple):
    """Samples of one request that go from source team ``source`` to one target; ``position`` is its age there."""

    source: int
    position: int
    group: CargoGroup


def deal(
    groups: Sequence[Sequence[CargoGroup]],
    source: Sequence[tuple[int, ...]],
    target: Sequence[tuple[int, ...]],
) -> list[list[Share]]:
    """The shares of each target team, given the ranks of the teams and what each source team has in flight.

    A source team that lies within one target team goes there whole. Every other one is dealt out to the targets that
    have some of its ranks (or, if none has, to all): whole requests at first, longest first, to where least is; then
    single samples, while loads differ by more than ``SPREAD``. Load is tokens of context.
    """
    loads = [0] * len(target)
    dealt: list[list[Share]] = [[] for _ in target]
    split = []
    for number, ranks in enumerate(source):
        home = next((t for t, there in enumerate(target) if set(ranks) <= set(there)), None)
        if home is None:
            split.append(number)
            continue
        for position, group in enumerate(groups[number]):
            dealt[home].append(Share(number, position, group))
            loads[home] += load(group)
    for number in split:
        near = [t for t, there in enumerate(target) if not set(source[number]).isdisjoint(there)]
        for t, shares in _deal_out(number, groups[number], near or list(range(len(target))), loads).items():
            dealt[t] += shares
    return dealt


def load(group: CargoGroup) -> int:
    """Tokens of context of its samples together."""
    if group.fresh:
        return group.prompt_len * group.request.samples
    return sum(group.prompt_len + len(sample.tokens) for sample in group.samples)


def _deal_out(number: int, groups: Sequence[CargoGroup], to: list[int], loads: list[int]) -> dict[int, list[Share]]:
    """Deal one team's ``groups`` to the targets ``to``, adding to ``loads``."""
    # By target and position in age: the samples that go there; those of a fresh group are counted as one, -1.
    parts: dict[int, dict[int, list[int]]] = {t: {} for t in to}
    for position in sorted(range(len(groups)), key=lambda p: (-load(groups[p]), p)):
        lightest = min(to, key=lambda t: loads[t])
        group = groups[position]
        parts[lightest][position] = [s.sample for s in group.samples] or [-1]
        loads[lightest] += load(group)
    length = {
        (position, s.sample): group.prompt_len + len(s.tokens)
        for position, group in enumerate(groups)
        for s in group.samples
    }
    while True:
        heaviest, lightest = max(to, key=lambda t: loads[t]), min(to, key=lambda t: loads[t])
        gap = loads[heaviest] - loads[lightest]
        movable = [
            (position, sample)
            for position, samples in parts[heaviest].items()
            for sample in samples
            if 0 < length.get((position, sample), 0) < gap
        ]
        if gap * len(to) <= SPREAD * sum(loads[t] for t in to) or not movable:
            break
        position, sample = min(movable, key=lambda at: (abs(2 * length[at] - gap), at))
        parts[heaviest][position].remove(sample)
        parts[lightest].setdefault(position, []).append(sample)
        loads[heaviest] -= length[position, sample]
        loads[lightest] += length[position, sample]
    return {
        t: [Share(number, p, _only(groups[p], part[p])) for p in sorted(part) if part[p]] for t, part in parts.items()
    }


def _only(group: CargoGroup, samples: list[int]) -> CargoGroup:
    return replace(group, samples=tuple(s for s in group.samples if s.sample in samples))
