"""KV lanes: the KV cache of one (sequence, KV head), as a table of blocks in a pool.

A block holds ``block_tokens`` positions of ONE KV head for all layers, so a lane can be released, refilled or sent
elsewhere alone, and an uneven split of heads over workers needs nothing special. The pool knows neither tokens nor
lengths: a *row* is the set of lanes of one sequence over the pool's KV heads, and its owner says up to which position
they must reach. The blocks are those of a :class:`longtail.engine.blocks.BlockStore`, its own or one that it shares
with other pools.

A block with several references is never written: :meth:`LanePool.claim` copies it first. What must hold of blocks and
references is written, and checked, in ``blocks.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from longtail.core.errors import CapacityError
from longtail.engine.blocks import MISSING, BlockStore
from longtail.engine.config import ModelConfig
from longtail.engine.jit import jit

__all__ = ["MISSING", "LanePool"]


class LanePool:
    """Tables over the blocks of ``store``, for some of the model's KV heads.

    ``kv_heads`` lists which of the model's KV heads live here (default: all). ``tables`` is int32
    ``[rows, len(kv_heads), width]`` of block ids, ``MISSING`` beyond a lane's end. ``k``, ``v`` and ``refs`` are the
    store's. Built by its constructor, a pool has a store of its own; :meth:`over` makes one on a shared store.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        blocks: int,
        block_tokens: int = 16,
        kv_heads: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        store = BlockStore(config, blocks=blocks, block_tokens=block_tokens, dtype=dtype, device=device)
        self._begin(store, range(config.kv_heads) if kv_heads is None else kv_heads, None)

    @classmethod
    def over(cls, store: BlockStore, kv_heads: Sequence[int], columns: int | None = None) -> LanePool:
        """A pool on a shared store. With ``columns``, it may hold so many blocks of each of its heads, and these are
        its own to take: pools of different stores with the same ``columns`` then have the same ``free / heads`` after
        the same calls, whatever their heads and whatever else the stores hold.
        """
        pool = cls.__new__(cls)
        pool._begin(store, kv_heads, columns)
        return pool

    def _begin(self, store: BlockStore, kv_heads: Sequence[int], columns: int | None) -> None:
        self.store, self.config, self.block_tokens = store, store.config, store.block_tokens
        self.k, self.v, self.refs = store.k, store.v, store.refs
        self.kv_heads = tuple(kv_heads)
        self.capped = columns is not None
        self.total = store.total if columns is None else columns * len(self.kv_heads)
        """Blocks that the pool can hold at most."""
        self.used = 0
        """Blocks that its tables name."""
        self.tables = np.full((16, len(self.kv_heads), 16), MISSING, np.int32)
        self._free_rows = list(range(len(self.tables)))[::-1]
        self._open = np.zeros(len(self.tables), bool)
        store.pools.add(self)

    @staticmethod
    def block_bytes(config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of one block: keys and values of one KV head, all layers."""
        return 2 * config.layers * config.head_dim * block_tokens * dtype.itemsize

    @property
    def free(self) -> int:
        """Blocks that may be taken now."""
        if self.capped:
            return min(self.total - self.used, self.store.free)
        return max(0, self.store.free - self.store.reserved_beside(self))

    @property
    def heads(self) -> int:
        return len(self.kv_heads)

    def blocks_of(self, tokens: int) -> int:
        """Blocks of ONE lane that reaches ``tokens`` positions."""
        return -(-tokens // self.block_tokens)

    # Rows

    def open(self) -> int:
        """A new row without blocks."""
        if not self._free_rows:
            rows = len(self.tables)
            self.tables = np.concatenate([self.tables, np.full_like(self.tables, MISSING)])
            self._open = np.concatenate([self._open, np.zeros(rows, bool)])
            self._free_rows = list(range(rows, 2 * rows))[::-1]
        row = self._free_rows.pop()
        self._open[row] = True
        return row

    def close(self, row: int) -> None:
        """Release all lanes of ``row``, and the row."""
        for head in range(self.heads):
            self.release(row, head)
        self._open[row] = False
        self._free_rows.append(row)

    def release(self, row: int, head: int) -> None:
        """Give back the blocks of one lane; ``head`` is an index into ``kv_heads``. :meth:`grow` refills it."""
        store = self.store
        self._took(store, _release(self.tables[row, head], self.refs, store.free_list, store.free))

    def grow(self, row: int, tokens: int) -> None:
        """Give every lane of ``row`` the blocks to reach ``tokens`` positions.

        Raises :class:`CapacityError`, changing nothing, when too few are free.
        """
        count = self.blocks_of(tokens)
        self._widen(count)
        table = self.tables[row]
        missing = int((table[:, :count] == MISSING).sum())
        self._must_be_free(missing)
        store = self.store
        self._took(store, _grow(table, count, self.refs, store.free_list, store.free))

    def fork(self, source: int, tokens: int) -> int:
        """A new row that shares the blocks of ``source`` covering its first ``tokens`` positions."""
        row = self.open()
        count = self.blocks_of(tokens)
        shared = self.tables[source, :, :count]
        if (shared == MISSING).any():
            raise ValueError(f"row {source} does not reach {tokens} positions")
        self.tables[row, :, :count] = shared
        np.add.at(self.refs, shared.ravel(), 1)
        return row

    def reaches(self, rows: np.ndarray, positions: np.ndarray) -> bool:
        """Whether every lane of each row has the block of its position."""
        at = positions // self.block_tokens
        return bool(at.max() < self.tables.shape[2] and (self.tables[rows, :, at] != MISSING).all())

    # Writing

    def wanted(self, rows: np.ndarray, positions: np.ndarray) -> int:
        """Blocks that :meth:`claim` may take at most: for lanes that end before, or share, the block of a position."""
        self._widen(int(positions.max()) // self.block_tokens + 1)
        return int(_wanted(self.tables, self.refs, rows, positions, self.block_tokens))

    def claim(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Make the block of ``positions[i]`` in every lane of ``rows[i]`` present and unshared (copy on write)."""
        wanted = self.wanted(rows, positions)
        if wanted == 0:
            return
        self._must_be_free(wanted)
        copies = np.empty((2, wanted), np.int64)
        store, size = self.store, self.block_tokens
        free, n = _claim(self.tables, self.refs, store.free_list, store.free, rows, positions, size, copies)
        self._took(store, free)
        if n:
            source, target = torch.from_numpy(copies[:, :n]).to(self.k.device)
            self.k[target] = self.k[source]
            self.v[target] = self.v[source]

    # Changing hands

    def place(self, columns: np.ndarray, lanes: Sequence[np.ndarray]) -> list[int]:
        """Open a row for each of ``lanes``: row i reaches over the blocks ``columns[lanes[i]]``.

        ``columns`` is int32 ``[C, heads]`` of block ids; each ``MISSING`` is replaced, in the array, by a free block.
        The others are those of a pool of the same store that will :meth:`vacate`: until then both pools name them,
        and nothing may be written. Every column is in some lane.

        Raises :class:`CapacityError`, changing nothing, when too few are free; what is reserved for other pools counts
        as free here, since a pool about to leave may have reserved it.
        """
        missing = columns == MISSING
        count, store = int(missing.sum()), self.store
        if count > store.free or self.used + columns.size > self.total:
            raise CapacityError(
                f"{columns.size} KV blocks are to be placed, {count} of them new, and {store.free} of {self.total} "
                "are free"
            )
        store.free -= count
        columns[missing] = store.free_list[store.free : store.free + count]
        rows = []
        for lane in lanes:
            row = self.open()
            self._widen(len(lane))
            self.tables[row, :, : len(lane)] = columns[lane].T
            np.add.at(self.refs, columns[lane].ravel(), 1)
            rows.append(row)
        self.used += columns.size
        return rows

    def vacate(self) -> None:
        """Close all rows and leave the store. The pool is of no use afterwards."""
        for row in np.flatnonzero(self._open).tolist():
            self.close(row)
        self.used = 0
        self.store.pools.discard(self)

    # Health

    def scrub(self) -> None:
        """Zero all keys and values of the store, where a diverged model may have left NaN."""
        self.store.scrub()

    def check(self) -> None:
        """Lane conservation over the whole store; raises ``AssertionError`` with a sentence."""
        self.store.check()

    def check_rows(self) -> None:
        closed = self.tables[~self._open]
        assert (closed == MISSING).all(), "a closed row still names a block"
        assert self.used <= self.total, f"{self.used} blocks are more than the pool's {self.total}"

    def _must_be_free(self, blocks: int) -> None:
        if blocks > self.free:
            raise CapacityError(f"{blocks} KV blocks wanted, {self.free} of {self.total} free")

    def _took(self, store: BlockStore, free: int) -> None:
        """The store has ``free`` free blocks now: the difference is what the pool took, or gave back."""
        self.used += store.free - free
        store.free = free

    def _widen(self, count: int) -> None:
        width = self.tables.shape[2]
        if count > width:
            pad = np.full((*self.tables.shape[:2], max(count, 2 * width) - width), MISSING, np.int32)
            self.tables = np.concatenate([self.tables, pad], axis=2)


@jit
def _release(lane, refs, free_list, free):
    for i in range(len(lane)):
        block = lane[i]
        if block < 0:
            break
        lane[i] = -1
        refs[block] -= 1
        if refs[block] == 0:
            free_list[free] = block
            free += 1
    return free


@jit
def _grow(table, count, refs, free_list, free):
    for head in range(table.shape[0]):
        for i in range(count):
            if table[head, i] < 0:
                free -= 1
                table[head, i] = free_list[free]
                refs[free_list[free]] = 1
    return free


@jit
def _wanted(tables, refs, rows, positions, block_tokens):
    n = 0
    for i in range(len(rows)):
        b = positions[i] // block_tokens
        for head in range(tables.shape[1]):
            block = tables[rows[i], head, b]
            if block < 0 or refs[block] > 1:
                n += 1
    return n


@jit
def _claim(tables, refs, free_list, free, rows, positions, block_tokens, copies):
    n = 0
    for i in range(len(rows)):
        b = positions[i] // block_tokens
        for head in range(tables.shape[1]):
            block = tables[rows[i], head, b]
            if block >= 0 and refs[block] == 1:
                continue
            free -= 1
            fresh = free_list[free]
            refs[fresh] = 1
            tables[rows[i], head, b] = fresh
            if block >= 0:
                refs[block] -= 1
                copies[0, n] = block
                copies[1, n] = fresh
                n += 1
    return free, n
