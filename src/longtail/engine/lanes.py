"""KV lanes: the KV cache of one (sequence, KV head), as a table of blocks in a pool.

A block holds ``block_tokens`` positions of ONE KV head for all layers, so a lane can be released, refilled or sent
elsewhere alone, and an uneven split of heads over workers needs nothing special. The pool knows neither tokens nor
lengths: a *row* is the set of lanes of one sequence over the pool's KV heads, and its owner says up to which position
they must reach.

Invariants (:meth:`LanePool.check`): a block's reference count is the number of table entries that name it; a block
is in the free list exactly when its count is 0; used + free = total. A block with several references is never
written: :meth:`LanePool.claim` copies it first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from longtail.core.errors import CapacityError
from longtail.engine.config import ModelConfig
from longtail.engine.jit import jit

MISSING = -1


class LanePool:
    """Blocks of the local KV heads.

    ``k`` is ``[blocks, layers, H, block_tokens]`` (so that query x key vectorises over positions), ``v`` is
    ``[blocks, layers, block_tokens, H]``. ``kv_heads`` lists which of the model's KV heads live here (default: all).
    ``tables`` is int32 ``[rows, len(kv_heads), width]`` of block ids, ``MISSING`` beyond a lane's end.
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
        if blocks < 1 or block_tokens < 1:
            raise CapacityError(f"a lane pool needs at least one block of one token, got {blocks} x {block_tokens}")
        self.config = config
        self.kv_heads = tuple(range(config.kv_heads)) if kv_heads is None else tuple(kv_heads)
        self.block_tokens = block_tokens
        self.total = blocks
        # Zeros, not empty: attention multiplies unwritten positions by a weight of 0, and 0 x NaN is NaN.
        self.k = torch.zeros(blocks, config.layers, config.head_dim, block_tokens, dtype=dtype, device=device)
        self.v = torch.zeros(blocks, config.layers, block_tokens, config.head_dim, dtype=dtype, device=device)
        self.refs = np.zeros(blocks, np.int32)
        self._free = np.arange(blocks, dtype=np.int32)[::-1].copy()
        self.free = blocks
        self.tables = np.full((16, len(self.kv_heads), 16), MISSING, np.int32)
        self._free_rows = list(range(len(self.tables)))[::-1]
        self._open = np.zeros(len(self.tables), bool)

    @staticmethod
    def block_bytes(config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of one block: keys and values of one KV head, all layers."""
        return 2 * config.layers * config.head_dim * block_tokens * dtype.itemsize

    @property
    def used(self) -> int:
        return self.total - self.free

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
        self.free = _release(self.tables[row, head], self.refs, self._free, self.free)

    def grow(self, row: int, tokens: int) -> None:
        """Give every lane of ``row`` the blocks to reach ``tokens`` positions.

        Raises :class:`CapacityError`, changing nothing, when too few are free.
        """
        count = self.blocks_of(tokens)
        self._widen(count)
        table = self.tables[row]
        missing = int((table[:, :count] == MISSING).sum())
        if missing > self.free:
            raise CapacityError(f"{missing} KV blocks wanted, {self.free} of {self.total} free")
        self.free = _grow(table, count, self.refs, self._free, self.free)

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
        if wanted > self.free:
            raise CapacityError(f"{wanted} KV blocks wanted, {self.free} of {self.total} free")
        copies = np.empty((2, wanted), np.int64)
        self.free, n = _claim(self.tables, self.refs, self._free, self.free, rows, positions, self.block_tokens, copies)
        if n:
            source, target = torch.from_numpy(copies[:, :n]).to(self.k.device)
            self.k[target] = self.k[source]
            self.v[target] = self.v[source]

    def scrub(self) -> None:
        """Zero all keys and values, where a diverged model may have left NaN."""
        self.k.zero_()
        self.v.zero_()

    def check(self) -> None:
        """Lane conservation (design 7.4); raises ``AssertionError`` with a sentence."""
        refs = np.zeros_like(self.refs)
        held = self.tables[self.tables != MISSING]
        np.add.at(refs, held, 1)
        wrong = np.flatnonzero(refs != self.refs)
        assert not len(wrong), f"block {wrong[0]} is named {refs[wrong[0]]} times but counts {self.refs[wrong[0]]}"
        free = self._free[: self.free]
        assert len(np.unique(free)) == len(free), "a block is in the free list twice"
        assert not refs[free].any(), "a block is both free and in a lane"
        used = int((refs > 0).sum())
        assert used + self.free == self.total, f"{used} used + {self.free} free blocks are not {self.total}"
        closed = self.tables[~self._open]
        assert (closed == MISSING).all(), "a closed row still names a block"

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
