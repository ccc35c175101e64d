"""Which sequences hold lanes: admission, sharing of prompts, preemption.

Everything is ordered by *number*, the order in which samples were added. Invariants:

* The schedule is a function of the requests added and the steps done: no clock, no set or hash order.
* The oldest sequence that holds lanes is never preempted, and a request is only accepted if the pool could hold any of
  its samples alone; so the oldest always ends, then the next.
* A preempted sequence keeps its tokens; only its KV is computed again. It returns only if the pool has room for it and
  all that run to grow by ``max(HEADROOM_TOKENS, length / 2)`` tokens more. Hence its length grows geometrically from
  one recomputation to the next, and all recomputation together is at most a small multiple of what was generated.
* A prompt is prefilled once for its group. When it is done, *all* samples draw their first token, and a sample that has
  no lanes yet waits like a preempted one; the group keeps the prompt's lanes until none of its samples waits.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

import numpy as np

from longtail.core.types import Request
from longtail.engine.lanes import LanePool
from longtail.engine.sequences import NO_ROW, Sequences

HEADROOM_TOKENS = 64
FRESH = -1


@dataclass(eq=False, slots=True)
class Group:
    """A request in flight. ``prompt_row`` holds the prefilled prompt while samples wait for lanes.

    ``slots`` are those of its samples that have begun, have not ended, and are here: others may be with other engines.
    """

    request: Request
    number: int
    limits: tuple[int, ...]
    prompt_row: int = NO_ROW
    waiting: int = 0
    slots: list[int] = field(default_factory=list)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)


@dataclass(order=True, slots=True)
class Waiting:
    """A place in the queue: a whole group whose prompt is not prefilled (``slot`` FRESH), or one sample."""

    number: int
    slot: int = field(compare=False)
    group: Group = field(compare=False)


@dataclass(eq=False, slots=True)
class Fill:
    """KV to compute for ``row``: ``tokens[done:]``. ``slot`` is FRESH for a group's prompt."""

    number: int
    slot: int
    group: Group
    row: int
    tokens: np.ndarray
    done: int


class Scheduler:
    """Moves samples between waiting, filling and running. Does no tensor work but copy on write."""

    def __init__(self, lanes: LanePool, sequences: Sequences, max_running: int) -> None:
        self.lanes = lanes
        self.sequences = sequences
        self.max_running = max_running
        self.waiting: list[Waiting] = []
        self.fills: list[Fill] = []
        self.running = np.empty(0, np.int64)
        """Slots, oldest first."""
        self.groups: dict[int, Group] = {}
        """By number."""
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.group_of: dict[int, Group] = {}
        """By slot."""
        self._planned: int | None = None

    # What comes in and goes out

    def submit(self, group: Group) -> None:
        self.groups[group.number] = group
        self._enqueue(group, FRESH, group.number)

    def resume(self, group: Group) -> None:
        """``group`` comes from another engine, with its samples so far: those whose slot has a row run, others wait."""
        self.groups[group.number] = group
        for slot in group.slots:
            if self.sequences.row[slot] != NO_ROW:
                self._run(slot)
            else:
                self._enqueue(group, slot, int(self.sequences.number[slot]))

    def adopt(self, group: Group, slot: int) -> None:
        """``slot`` is a sample of ``group`` from now on, until :meth:`finish`."""
        group.slots.append(slot)
        self.group_of[slot] = group

    def prompt_done(self, fill: Fill, slots: list[int]) -> None:
        """The prompt of a group is in ``fill.row`` and ``slots`` are its samples that have not ended."""
        group = fill.group
        self._drop_fill(fill)
        group.prompt_row = fill.row
        for slot in slots:
            self._enqueue(group, slot, int(self.sequences.number[slot]))
        if not slots:
            self._drop_prompt(group)

    def refill_done(self, fill: Fill) -> None:
        self._drop_fill(fill)
        self._run(fill.slot)

    def finish(self, group: Group, slot: int) -> None:
        """A running sample, or one that ended with its first token, is over."""
        if self.sequences.row[slot] != NO_ROW:
            self.lanes.close(int(self.sequences.row[slot]))
            self.running = self.running[self.running != slot]
        self._forget(group, slot)

    def abort(self, group: Group) -> None:
        """Remove a group and everything it holds."""
        self._planned = None
        self.waiting = [w for w in self.waiting if w.group is not group]
        group.waiting = 0
        for fill in [f for f in self.fills if f.group is group]:
            self.fills.remove(fill)
            self.lanes.close(fill.row)
            if fill.slot != FRESH:
                self.sequences.row[fill.slot] = NO_ROW
        self._drop_prompt(group)
        for slot in list(group.slots):
            self.finish(group, slot)
        self.groups.pop(group.number, None)

    # The quantum ahead

    def prefills_next(self) -> bool:
        """Whether the next quantum is a prefill; changes nothing."""
        if self.fills:
            return True
        return any(self._length(w) > self._shared_tokens(w) for w in self.waiting[: self._plan()])

    def admit(self) -> None:
        """Give lanes to those at the head of the queue for whom there is room."""
        count = self._plan()
        self._planned = None
        admitted, self.waiting = self.waiting[:count], self.waiting[count:]
        for waiting in admitted:
            self._start(waiting)

    def make_room(self) -> None:
        """Preempt until every running sequence can write its next position, and give it the block for it."""
        while True:
            rows, positions = self.sequences.row[self.running], self.sequences.positions(self.running)
            if self.lanes.wanted(rows, positions) <= self.lanes.free:
                break
            self._reclaim()
        self.lanes.claim(rows, positions)

    # Admission

    def _plan(self) -> int:
        """How many at the head of the queue have room now."""
        if self._planned is None:
            self._planned = self._count_admissible()
        return self._planned

    def _count_admissible(self) -> int:
        places = self.max_running - len(self.running) - sum(self._places(f.slot, f.group) for f in self.fills)
        if not self.waiting or places < 1:
            return 0
        lanes, seq = self.lanes, self.sequences
        free = lanes.free
        lengths = seq.positions(self.running)
        finals = seq.prompt_len[self.running] + seq.limit[self.running] - 1
        for fill in self.fills:
            lengths, finals = np.append(lengths, len(fill.tokens)), np.append(finals, self._final(fill))
        filling = {f.group.number for f in self.fills}
        for count, waiting in enumerate(self.waiting):
            if places < 1 or (waiting.slot != FRESH and waiting.group.number in filling):
                return count
            length, shared = self._length(waiting), self._shared_tokens(waiting)
            needed = lanes.heads * (lanes.blocks_of(length) - lanes.blocks_of(shared))
            lengths, finals = np.append(lengths, length), np.append(finals, self._final(waiting))
            # Alone, the oldest may have the whole pool: prompts that are kept for waiting samples give way.
            if len(lengths) > 1:
                growth = self._growth(lengths, finals, max(HEADROOM_TOKENS, length // 2)) + (shared > 0)
                if needed + lanes.heads * growth > free:
                    return count
            free -= needed
            places -= self._places(waiting.slot, waiting.group)
            if length > shared:
                filling.add(waiting.group.number)
        return len(self.waiting)

    @staticmethod
    def _places(slot: int, group: Group) -> int:
        return group.request.samples if slot == FRESH else 1

    def _length(self, waiting: Waiting) -> int:
        """Positions to be in the lanes before the sample can decode."""
        return (
            waiting.group.prompt_len
            if waiting.slot == FRESH
            else int(self.sequences.positions(np.array([waiting.slot]))[0])
        )

    def _final(self, item: Waiting | Fill) -> int:
        """Positions that the sample may reach at most; its last token is never written."""
        limit = max(item.group.limits) if item.slot == FRESH else int(self.sequences.limit[item.slot])
        return item.group.prompt_len + limit - 1

    def _growth(self, lengths: np.ndarray, finals: np.ndarray, tokens: int) -> int:
        """Blocks per head that sequences of these lengths take to grow by ``tokens``, or to their final lengths."""
        size = self.lanes.block_tokens
        then = np.minimum(lengths + tokens, finals)
        return int((-(-then // size) - -(-lengths // size)).sum())

    def _shared_tokens(self, waiting: Waiting) -> int:
        """Leading positions that need not be computed, because the group's lanes hold them."""
        group = waiting.group
        if waiting.slot == FRESH:
            return 0
        if group.prompt_row != NO_ROW and self._length(waiting) == group.prompt_len:
            return group.prompt_len
        if group.prompt_row == NO_ROW and self._donor(group) is None:
            return 0
        # Whoever has more to compute would write into the prompt's last block, which others share.
        return group.prompt_len // self.lanes.block_tokens * self.lanes.block_tokens

    def _donor(self, group: Group) -> int | None:
        """A row of a running sibling: its whole blocks of the prompt can be shared."""
        filling = {f.slot for f in self.fills}
        for slot in group.slots:
            if self.sequences.row[slot] != NO_ROW and slot not in filling:
                return int(self.sequences.row[slot])
        return None

    def _start(self, waiting: Waiting) -> None:
        group, slot, lanes = waiting.group, waiting.slot, self.lanes
        done = self._shared_tokens(waiting)
        if slot == FRESH:
            row, tokens = lanes.open(), group.request.prompt
        else:
            group.waiting -= 1
            row, tokens = self._share(group, done), self._computed_tokens(group, slot)
        missing = lanes.heads * (lanes.blocks_of(len(tokens)) - lanes.blocks_of(done))
        while lanes.free < missing:
            self._drop_prompt(self._youngest_kept_prompt())
        lanes.grow(row, len(tokens))
        if slot != FRESH:
            self.sequences.row[slot] = row
            self.recomputed_tokens += len(tokens) - done
        if done == len(tokens):
            self._run(slot)
        else:
            self.fills.append(Fill(waiting.number, slot, group, row, tokens, done))

    def _share(self, group: Group, tokens: int) -> int:
        """A row that starts with ``tokens`` shared positions; the last sample to start takes the prompt's own."""
        if group.prompt_row != NO_ROW:
            if not group.waiting and tokens == group.prompt_len:
                row, group.prompt_row = group.prompt_row, NO_ROW
                return row
            row = self.lanes.fork(group.prompt_row, tokens)
            if not group.waiting:
                self._drop_prompt(group)
            return row
        donor = self._donor(group)
        return self.lanes.open() if donor is None else self.lanes.fork(donor, tokens)

    def _computed_tokens(self, group: Group, slot: int) -> np.ndarray:
        """Prompt and all generated tokens but the last, whose KV the next decode step computes."""
        generated = self.sequences.tokens[slot, : self.sequences.generated[slot] - 1]
        return np.concatenate([group.request.prompt, generated])

    # Preemption and bookkeeping

    def _reclaim(self) -> None:
        """Free lanes: a prompt kept for waiting samples (youngest first), else the youngest running sequence."""
        if any(g.prompt_row != NO_ROW for g in self.groups.values()):
            self._drop_prompt(self._youngest_kept_prompt())
            return
        assert len(self.running) > 1, "the oldest sequence does not fit an otherwise empty pool"
        slot = int(self.running[-1])
        self.running = self.running[:-1]
        self.lanes.close(int(self.sequences.row[slot]))
        self.sequences.row[slot] = NO_ROW
        self.sequences.preemptions[slot] += 1
        self.preemptions += 1
        self._enqueue(self.group_of[slot], slot, int(self.sequences.number[slot]))

    def _youngest_kept_prompt(self) -> Group:
        return max((g for g in self.groups.values() if g.prompt_row != NO_ROW), key=lambda g: g.number)

    def _run(self, slot: int) -> None:
        self._planned = None
        at = int(np.searchsorted(self.sequences.number[self.running], self.sequences.number[slot]))
        self.running = np.insert(self.running, at, slot)

    def _enqueue(self, group: Group, slot: int, number: int) -> None:
        self._planned = None
        group.waiting += slot != FRESH
        insort(self.waiting, Waiting(number, slot, group))

    def _drop_fill(self, fill: Fill) -> None:
        self._planned = None
        self.fills.remove(fill)

    def _drop_prompt(self, group: Group) -> None:
        if group.prompt_row != NO_ROW:
            self.lanes.close(group.prompt_row)
            group.prompt_row = NO_ROW

    def _forget(self, group: Group, slot: int) -> None:
        self._planned = None
        group.slots.remove(slot)
        del self.group_of[slot]
        self.sequences.close(slot)
        if not group.slots:
            self._drop_prompt(group)
            self.groups.pop(group.number, None)
