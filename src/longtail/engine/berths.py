"""What a team goes on with after a switch: which sequences bring their lanes, by age, while there is room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from longtail.engine.cargo import Cargo, CargoGroup
from longtail.engine.deal import Share
from longtail.engine.teams import Team


class Way(StrEnum):
    """What becomes of a sequence's lanes."""

    STAYED = "stayed"
    """No byte travels for its sake."""
    MOVED = "moved"
    RECOMPUTED = "recomputed"
    WAITED = "waited"
    """It had none, and has none."""


class Fate(NamedTuple):
    """What becomes of one sample (``sample`` -1: of a request whose prompt is not prefilled), in team ``target``.

    ``travel_bytes`` are those that travel for its sake; a shared block travels for the oldest that needs it.
    """

    request_id: str
    sample: int
    target: int
    way: Way
    travel_bytes: int


@dataclass(frozen=True, kw_only=True)
class Berth:
    """What a team goes on with: ``groups``, oldest first, whose lanes list columns of its own.

    ``origin`` int64 ``[C, 2]`` says of each column which source team it comes from, and which column it was there.
    ``columns`` is the cap of each rank's pool (None: no cap).
    """

    team: Team
    columns: int | None
    groups: tuple[CargoGroup, ...]
    origin: np.ndarray


class Wish(NamedTuple):
    """Which samples of a share would keep their lanes, and whether its kept prompt would.

    ``gain_s`` is what that saves, where anything travels for it, against computing all of it again.
    """

    samples: frozenset[int]
    prompt: bool
    gain_s: float


class Room:
    """The room that ``team`` has, and the columns that were given a place in it so far.

    ``columns`` is how many each of its ranks can hold. ``_fresh[s, i]`` are the blocks of a column of source team s
    that its rank i does not have; they must be free before others are given up.
    """

    def __init__(self, team: Team, sources: Sequence[Team], cargos: Sequence[Cargo]) -> None:
        mine = [cargos[rank] for rank in team.ranks]
        self.team = team
        self.columns = min(cargo.room // len(heads) for cargo, heads in zip(mine, team.heads, strict=True))
        self.places = min(cargo.max_running for cargo in mine)
        self.block_tokens, self.block_bytes = mine[0].block_tokens, mine[0].block_bytes
        self._free = np.array([cargo.free for cargo in mine])
        self._fresh = np.array(
            [[sum(len(s.given(giver, rank, team)) for giver in s.ranks) for rank in team.ranks] for s in sources]
        )
        self._number = [np.full(len(cargos[s.ranks[0]].columns), -1, np.int32) for s in sources]
        self._origin = [np.empty((0, 2), np.int64)]
        self._held = 0

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def whole_blocks(self, tokens: int) -> int:
        """The tokens among the first ``tokens`` that fill blocks."""
        return tokens // self.block_tokens * self.block_tokens

    def travel_bytes(self, source: int) -> int:
        """What travels for one column of team ``source``."""
        return int(self._fresh[source].sum()) * self.block_bytes

    def take(self, source: int, lanes: np.ndarray) -> tuple[np.ndarray, int] | None:
        """Give a place to the columns ``lanes`` of team ``source``.

        Returns what they are called here, and the bytes that travel for them; None, changing nothing, if some of those
        that have no place yet find no room.
        """
        number = self._number[source]
        new = lanes[number[lanes] < 0]
        free = self._free - len(new) * self._fresh[source]
        if self._held + len(new) > self.columns or (free < 0).any():
            return None
        number[new] = np.arange(self._held, self._held + len(new))
        self._origin.append(np.stack([np.full(len(new), source), new.astype(np.int64)], axis=1))
        self._held += len(new)
        self._free = free
        return number[lanes], len(new) * self.travel_bytes(source)

    def berth(self, groups: tuple[CargoGroup, ...]) -> Berth:
        cap = self.columns if len(self.team.ranks) > 1 else None
        return Berth(team=self.team, columns=cap, groups=groups, origin=np.concatenate(self._origin))

    def too_small_for(self, group: CargoGroup) -> str | None:
        """The sentence that says so, if a sample of ``group`` could not grow to its end with all of the room."""
        wanted = self.blocks_of(group.final_length)
        if wanted <= self.columns:
            return None
        ranks = f"rank{'s' * (len(self.team.ranks) > 1)} {', '.join(map(str, self.team.ranks))}"
        return (
            f"request {group.request.request_id!r} may grow to {group.final_length} tokens, which take {wanted} KV "
            f"blocks of each head, and there is room for {self.columns} on {ranks}"
        )


class Boarding:
    """One request on its way into ``room``: its shares of several teams are one again, and find places or do not."""

    def __init__(self, room: Room, shares: Sequence[Share], wishes: Sequence[Wish]) -> None:
        self._room, self._shares, self._wishes = room, shares, wishes
        self._samples = sorted(
            (sample.sample, share.source, sample.sample in wish.samples, sample)
            for share, wish in zip(shares, wishes, strict=True)
            for sample in share.group.samples
        )
        """(index, source team, whether it would keep its lanes, sample)."""
        self._lanes: dict[int, np.ndarray] = {}
        """By sample: its lanes here."""
        self._bytes: dict[int, int] = {}
        self._prompt: np.ndarray | None = None

    def keep_samples(self) -> None:
        """Give places to the samples that wish for them, oldest first."""
        for index, source, wish, sample in self._samples:
            if wish and sample.lanes is not None and self._room.places > 0:
                taken = self._room.take(source, sample.lanes)
                if taken is not None:
                    self._room.places -= 1
                    self._lanes[index], self._bytes[index] = taken

    def keep_prompt(self) -> None:
        """Give a place to one kept prompt, if samples wait for it."""
        if len(self._lanes) == len(self._samples):
            return
        for share, wish in zip(self._shares, self._wishes, strict=True):
            if wish.prompt and share.group.prompt is not None:
                taken = self._room.take(share.source, share.group.prompt)
                if taken is not None:
                    self._prompt = taken[0]
                    return

    @property
    def group(self) -> CargoGroup:
        samples = tuple(replace(sample, lanes=self._lanes.get(index)) for index, *_, sample in self._samples)
        return replace(self._shares[0].group, samples=samples, prompt=self._prompt)

    def fates(self, target: int) -> Iterator[Fate]:
        request_id = self._shares[0].group.request.request_id
        if not self._samples:
            yield Fate(request_id, -1, target, Way.WAITED, 0)
        for index, *_, sample in self._samples:
            travelled = self._bytes.get(index, 0)
            if sample.lanes is None:
                way = Way.WAITED
            elif index not in self._lanes:
                way = Way.RECOMPUTED
            else:
                way = Way.MOVED if travelled else Way.STAYED
            yield Fate(request_id, index, target, way, travelled)

    @property
    def recomputed_tokens(self) -> int:
        """Positions that will be computed again although the source teams had their KV."""
        group = self._shares[0].group
        lost = [sample for index, *_, sample in self._samples if sample.lanes is not None and index not in self._lanes]
        whole = self._room.whole_blocks(group.prompt_len)
        tokens = sum(group.length(sample) - whole for sample in lost)
        if self._lanes or self._prompt is not None:
            return tokens
        if lost:
            return tokens + whole
        return group.prompt_len if any(share.group.prompt is not None for share in self._shares) else 0
