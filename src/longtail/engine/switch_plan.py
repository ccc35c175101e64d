"""What becomes of each sequence when ranks change their layout: a pure function of what their engines have in flight.

Widening (several engines become one tensor-parallel group), narrowing (a group becomes several engines) and migrating
(an engine's sequences go to others) are one question: which blocks must be on which rank, and which of them are there?
Each rank asks it for itself, from the same cargos, and gets the same answer, so that no rank tells another what to do.

A sequence keeps its lanes, or is computed again as a preempted one is, whichever is cheaper; lanes that are on the
right rank already cost nothing. Blocks arrive before any are given up. Where a rank is too short of them for that,
younger sequences are computed again, and wait until there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from longtail.engine.berths import Berth, Boarding, Fate, Room, Wish
from longtail.engine.cargo import Cargo
from longtail.engine.deal import Share, deal
from longtail.engine.teams import Team, exporting_teams, team_of


class How(StrEnum):
    """Whether lanes travel: ``AUTO`` sends those whose recomputation would take longer."""

    AUTO = "auto"
    MOVE = "move"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, kw_only=True)
class SwitchCosts:
    """Seconds for each byte that travels, for each token whose KV is computed again, and once if anything travels."""

    per_byte_s: float
    per_token_s: float
    fixed_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SwitchPlan:
    """``sent_bytes`` and ``received_bytes`` are by rank; ``recomputed_tokens`` are positions that had their KV."""

    source: tuple[Team, ...]
    berths: tuple[Berth, ...]
    fates: tuple[Fate, ...]
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    recomputed_tokens: int

    @property
    def moved_bytes(self) -> int:
        return sum(self.sent_bytes)

    def berth_of(self, rank: int) -> Berth | None:
        """What ``rank`` goes on with, or None if no target group has it."""
        return next((berth for berth in self.berths if rank in berth.team.ranks), None)


class Refusal(NamedTuple):
    """The switch cannot be, and nothing changes; ``reason`` is a sentence without its stop."""

    reason: str


def plan_switch(
    cargos: Sequence[Cargo],
    source: Sequence[Sequence[int]],
    target: Sequence[Sequence[int]],
    *,
    costs: SwitchCosts,
    how: How = How.AUTO,
    rebalance: bool = False,
) -> SwitchPlan | Refusal:
    """How the ranks with ``cargos`` go from the groups ``source`` to the groups ``target``.

    Every rank is in one source group; one that is in no target group gives everything away. With ``rebalance``
    the target groups get even loads also where sequences could have stayed (``engine/deal.py``). Raises
    :class:`longtail.core.errors.Diverged` if ranks of a source group do not have the same sequences.
    """
    kv_heads, members = cargos[0].kv_heads, [rank for ranks in target for rank in ranks]
    if len(set(members)) < len(members):
        raise ValueError(f"a rank can go on in one group only, not as in {target}")
    widest = max(len(ranks) for ranks in target)
    if widest > kv_heads:
        return Refusal(f"{widest} ranks cannot share {kv_heads} KV heads: each needs one at least")
    teams = exporting_teams(cargos, source)
    successors = [team_of(ranks, kv_heads) for ranks in target]
    groups = [cargos[team.ranks[0]].groups for team in teams]
    dealt = deal(groups, [team.ranks for team in teams], [team.ranks for team in successors], rebalance=rebalance)
    rooms = [Room(team, teams, cargos) for team in successors]
    for room, shares in zip(rooms, dealt, strict=True):
        for share in shares:
            reason = room.too_small_for(share.group)
            if reason is not None:
                return Refusal(reason)
    wishes = _wishes(dealt, rooms, costs, how)
    boardings = [
        [Boarding(room, *request) for request in _requests(shares, wished)]
        for room, shares, wished in zip(rooms, dealt, wishes, strict=True)
    ]
    for boarding in (boarding for row in boardings for boarding in row):
        boarding.keep_samples()
    for boarding in (boarding for row in boardings for boarding in row):
        boarding.keep_prompt()  # last, since prompts are the first to go when lanes are short
    berths = tuple(room.berth(tuple(b.group for b in row)) for room, row in zip(rooms, boardings, strict=True))
    flow = _flow(teams, berths, len(cargos)) * cargos[0].block_bytes
    return SwitchPlan(
        source=teams,
        berths=berths,
        fates=tuple(fate for number, row in enumerate(boardings) for b in row for fate in b.fates(number)),
        sent_bytes=tuple(flow.sum(axis=1).tolist()),
        received_bytes=tuple(flow.sum(axis=0).tolist()),
        recomputed_tokens=sum(b.recomputed_tokens for row in boardings for b in row),
    )


def _requests(shares: Sequence[Share], wishes: Sequence[Wish]) -> list[tuple[list[Share], list[Wish]]]:
    """Shares and wishes of each request, oldest first: by its age in the team where it is oldest, then by team."""
    by_id: dict[str, list[tuple[Share, Wish]]] = {}
    for share, wish in sorted(zip(shares, wishes, strict=True), key=lambda pair: pair[0][:2]):
        by_id.setdefault(share.group.request.request_id, []).append((share, wish))
    for request_id, parts in by_id.items():
        samples = [s.sample for share, _ in parts for s in share.group.samples]
        if len(set(samples)) < len(samples) or (len(parts) > 1 and any(share.group.fresh for share, _ in parts)):
            raise ValueError(f"samples of request {request_id!r} are in flight twice")
    ordered = sorted(by_id.values(), key=lambda parts: min((share.position, share.source) for share, _ in parts))
    return [([share for share, _ in parts], [wish for _, wish in parts]) for parts in ordered]


def _flow(teams: Sequence[Team], berths: Sequence[Berth], ranks: int) -> np.ndarray:
    """Blocks that travel, int64 ``[from, to]``."""
    flow = np.zeros((ranks, ranks), np.int64)
    for berth in berths:
        columns = np.bincount(berth.origin[:, 0], minlength=len(teams))
        for team, count in zip(teams, columns, strict=True):
            for giver in team.ranks:
                for receiver in berth.team.ranks:
                    flow[giver, receiver] += count * len(team.given(giver, receiver, berth.team))
    return flow


# What is cheaper

_NOTHING = Wish(frozenset(), False, 0.0)


def _wishes(dealt: Sequence[Sequence[Share]], rooms: Sequence[Room], costs: SwitchCosts, how: How) -> list[list[Wish]]:
    """For each share of each target team."""
    wishes = [[_wish(share, room, costs, how) for share in shares] for room, shares in zip(rooms, dealt, strict=True)]
    if how is not How.AUTO or sum(wish.gain_s for row in wishes for wish in row) >= costs.fixed_s:
        return wishes
    return [
        [wish if room.travel_bytes(share.source) == 0 else _NOTHING for wish, share in zip(row, shares, strict=True)]
        for row, room, shares in zip(wishes, rooms, dealt, strict=True)
    ]


def _wish(share: Share, room: Room, costs: SwitchCosts, how: How) -> Wish:
    group, travel_bytes = share.group, room.travel_bytes(share.source)
    lanes = {sample.sample: sample.lanes for sample in group.samples if sample.lanes is not None}
    kept = group.prompt is not None
    rows = [*lanes.values(), *([group.prompt] if group.prompt is not None else [])]
    if how is How.MOVE or travel_bytes == 0 or not rows:
        return Wish(frozenset(lanes), kept, 0.0)
    if how is How.RECOMPUTE:
        return _NOTHING
    # Common columns are the prompt's: all that stay need them, and whoever is computed again can start from them.
    common = np.bincount(np.concatenate(rows)) > 1
    whole = room.whole_blocks(group.prompt_len) if len(rows) > 1 else 0
    common_tokens = whole
    if group.prompt is not None:
        common[group.prompt], common_tokens = True, group.prompt_len
    column_s = travel_bytes * costs.per_byte_s
    move_s = {s: column_s * int((~common[lane]).sum()) for s, lane in lanes.items()}
    compute_s = {s.sample: costs.per_token_s * (group.length(s) - whole) for s in group.samples if s.sample in lanes}
    moved = frozenset(s for s in lanes if move_s[s] <= compute_s[s])
    gain_s = (
        costs.per_token_s * common_tokens
        - column_s * int(common.sum())
        + sum(compute_s[s] - move_s[s] for s in sorted(moved))
    )
    return Wish(moved, kept, gain_s) if (moved or kept) and gain_s >= 0 else _NOTHING
