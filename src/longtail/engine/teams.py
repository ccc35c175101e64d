"""Which rank holds which KV heads, and which of them it must hand over when another layout follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from longtail.core.errors import Diverged
from longtail.engine.cargo import Cargo, CargoGroup
from longtail.engine.shard import head_bounds


class Team(NamedTuple):
    """Ranks that serve the same sequences; ``heads[i]`` are the KV heads of ``ranks[i]``."""

    ranks: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]

    def heads_of(self, rank: int) -> tuple[int, ...]:
        return self.heads[self.ranks.index(rank)] if rank in self.ranks else ()

    def given(self, giver: int, receiver: int, successor: Team) -> tuple[int, ...]:
        """Heads of this team's sequences that ``giver`` sends to ``receiver`` when ``successor`` goes on with them."""
        if giver == receiver:
            return ()
        return tuple(head for head in successor.heads_of(receiver) if head in self.heads_of(giver))


def team_of(ranks: Sequence[int], kv_heads: int) -> Team:
    """Raises :class:`longtail.core.errors.ModelError` if there are more ranks than KV heads."""
    return Team(tuple(ranks), tuple(tuple(range(*bounds)) for bounds in head_bounds(kv_heads, len(ranks))))


def exporting_teams(cargos: Sequence[Cargo], groups: Sequence[Sequence[int]]) -> tuple[Team, ...]:
    """The teams that the ranks with ``cargos`` form.

    Raises :class:`Diverged` if ranks of a group, which have the same sequences, do not agree on them.
    """
    if sorted(rank for ranks in groups for rank in ranks) != list(range(len(cargos))):
        raise ValueError(f"each of {len(cargos)} ranks must be in one group, not {groups}")
    teams = tuple(Team(tuple(ranks), tuple(cargos[rank].heads for rank in ranks)) for ranks in groups)
    for team in teams:
        if sorted(head for heads in team.heads for head in heads) != list(range(cargos[0].kv_heads)):
            raise ValueError(f"ranks {team.ranks} hold the KV heads {team.heads}: not each of them once")
        leader, *others = team.ranks
        for rank in others:
            if _seen(cargos[leader].groups) != _seen(cargos[rank].groups):
                raise Diverged(f"ranks {leader} and {rank} of a tensor-parallel group do not have the same sequences")
    return teams


def _seen(groups: Sequence[CargoGroup]) -> list[object]:
    """What the ranks of a team must have alike."""
    return [
        (g.request.request_id, _bytes(g.prompt), [(s.sample, _bytes(s.tokens), _bytes(s.lanes)) for s in g.samples])
        for g in groups
    ]


def _bytes(array: np.ndarray | None) -> bytes | None:
    return None if array is None else array.tobytes()
