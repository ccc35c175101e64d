"""What an engine has in flight, as plain data that can travel: requests, samples so far, and where their KV is.

KV is named by *columns*. All lanes of a row look alike whatever their head, so the blocks that different KV heads hold
of the same positions of the same sequence form one column, and a lane is a list of columns. A column that several
samples list is a block of a prompt that they share. The numbers of columns say nothing of memory, so that the engines
of a tensor-parallel group, which hold other heads of the same sequences, export equal cargos but for ``columns``,
the blocks behind the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from longtail.core.types import Request
from longtail.engine.blocks import MISSING
from longtail.engine.lanes import LanePool
from longtail.engine.scheduler import Group, Scheduler
from longtail.engine.sequences import NO_ROW


@dataclass(frozen=True, kw_only=True)
class CargoSample:
    """A sample that has not ended: its place in the request, ``tokens`` int32 and ``logprobs`` float64 ``[generated]``.

    ``lanes`` int32 are the columns that hold the prompt and all tokens but the last; None: they must be computed again.
    """

    sample: int
    tokens: np.ndarray
    logprobs: np.ndarray
    preemptions: int
    lanes: np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class CargoGroup:
    """A request in flight, with the samples of it that are here. ``limits`` are the most tokens of each of its samples.

    ``fresh``: its prompt is not prefilled, and no sample has begun. ``prompt`` are the columns of a prompt that is kept
    for samples without lanes.
    """

    request: Request
    limits: tuple[int, ...]
    samples: tuple[CargoSample, ...]
    prompt: np.ndarray | None

    @property
    def fresh(self) -> bool:
        return not self.samples

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    def length(self, sample: CargoSample) -> int:
        """Positions whose KV the sample needs before it can go on: all but that of its last token."""
        return self.prompt_len + len(sample.tokens) - 1

    @property
    def final_length(self) -> int:
        """Positions that a sample here may reach."""
        limits = self.limits if self.fresh else [self.limits[s.sample] for s in self.samples]
        return self.prompt_len + max(limits) - 1


@dataclass(frozen=True, kw_only=True)
class Cargo:
    """``groups`` are the requests in flight, oldest first. ``columns`` int32 ``[C, heads]`` are the blocks of each
    column, one for each of ``heads``, the KV heads (of ``kv_heads``) that are here.

    ``free`` blocks could be filled at once, and ``room`` be held by another engine if this one let go of its lanes.
    """

    kv_heads: int
    heads: tuple[int, ...]
    block_tokens: int
    block_bytes: int
    free: int
    room: int
    max_running: int
    groups: tuple[CargoGroup, ...]
    columns: np.ndarray


def lanes_of(groups: Sequence[CargoGroup]) -> Iterator[np.ndarray]:
    """The columns of every row that ``groups`` hold: of each group its kept prompt, then its samples."""
    for group in groups:
        if group.prompt is not None:
            yield group.prompt
        yield from (sample.lanes for sample in group.samples if sample.lanes is not None)


def pack(lanes: LanePool, scheduler: Scheduler) -> Cargo:
    """What ``scheduler`` has in flight. A prefill that is not done counts as not begun."""
    sequences = scheduler.sequences
    filling = {fill.slot for fill in scheduler.fills}
    groups = sorted(scheduler.groups.values(), key=lambda group: group.number)
    slots = [slot for group in groups for slot in group.slots if slot not in filling]
    rows = {slot: int(sequences.row[slot]) for slot in slots if sequences.row[slot] != NO_ROW}
    prompts = {g.number: g.prompt_row for g in groups if g.prompt_row != NO_ROW}
    columns, numbers = _columns(lanes, [*rows.values(), *prompts.values()])
    held = dict(zip([*rows, *(("prompt", number) for number in prompts)], numbers, strict=True))

    def sample(slot: int) -> CargoSample:
        count = int(sequences.generated[slot])
        return CargoSample(
            sample=int(sequences.sample[slot]),
            tokens=sequences.tokens[slot, :count].copy(),
            logprobs=sequences.logprobs[slot, :count].copy(),
            preemptions=int(sequences.preemptions[slot]),
            lanes=held.get(slot),
        )

    def cargo(group: Group) -> CargoGroup:
        return CargoGroup(
            request=group.request,
            limits=tuple(group.limits),
            samples=tuple(sample(slot) for slot in sorted(group.slots, key=lambda s: int(sequences.sample[s]))),
            prompt=held.get(("prompt", group.number)),
        )

    store = lanes.store
    free = store.free - store.reserved_beside(lanes)
    return Cargo(
        kv_heads=lanes.config.kv_heads,
        heads=lanes.kv_heads,
        block_tokens=lanes.block_tokens,
        block_bytes=store.block_bytes,
        free=free,
        room=free + lanes.used,
        max_running=scheduler.max_running,
        groups=tuple(cargo(group) for group in groups),
        columns=columns,
    )


def _columns(lanes: LanePool, rows: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Blocks ``[C, heads]`` of the columns of ``rows``, in the order in which they are met, and each row's columns."""
    tables = lanes.tables[rows].transpose(0, 2, 1)
    held = tables[:, :, 0] != MISSING
    entries = tables[held]
    _, first, column = np.unique(entries[:, 0], return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty(len(order), np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    columns, at = entries[first[order]], number[column]
    assert (columns[at] == entries).all(), "the lanes of a row do not share their blocks alike"
    return columns, np.split(at, np.cumsum(held.sum(axis=1))[:-1]) if rows else []
