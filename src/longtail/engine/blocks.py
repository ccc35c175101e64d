"""The memory that lanes are made of: KV blocks of one worker, shared by all lane pools over them.

A block is memory and knows no head: a pool says which KV head each of its blocks holds. So when sequences change
hands between engines of one worker, the lanes that stay are named by the next engine's pool, and nothing is copied.

Invariants (:meth:`BlockStore.check`): a block's reference count is the number of table entries, of all pools, that
name it; a block is in the free list exactly when its count is 0; used + free = total; a block belongs to one pool
(except while one pool takes over from another); what capped pools may still take is free.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

from longtail.core.errors import CapacityError
from longtail.engine.config import ModelConfig

if TYPE_CHECKING:
    from longtail.engine.lanes import LanePool

MISSING = -1
"""In a table of block ids: no block."""


class BlockStore:
    """``k`` is ``[blocks, layers, H, block_tokens]`` (so that query x key vectorises over positions), ``v`` is
    ``[blocks, layers, block_tokens, H]``. ``free_list[:free]`` are the ids of the free blocks.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        blocks: int,
        block_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if blocks < 1 or block_tokens < 1:
            raise CapacityError(f"a lane pool needs at least one block of one token, got {blocks} x {block_tokens}")
        self.config = config
        self.block_tokens = block_tokens
        self.total = blocks
        # Zeros, not empty: attention multiplies unwritten positions by a weight of 0, and 0 x NaN is NaN.
        self.k = torch.zeros(blocks, config.layers, config.head_dim, block_tokens, dtype=dtype, device=device)
        self.v = torch.zeros(blocks, config.layers, block_tokens, config.head_dim, dtype=dtype, device=device)
        self.refs = np.zeros(blocks, np.int32)
        self.free_list = np.arange(blocks, dtype=np.int32)[::-1].copy()
        self.free = blocks
        self.pools: weakref.WeakSet[LanePool] = weakref.WeakSet()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of one KV head, all layers."""
        return self.k[0].nbytes + self.v[0].nbytes

    def reserved_beside(self, pool: LanePool | None) -> int:
        """Free blocks that the caps of all other pools promise to them."""
        return sum(p.total - p.used for p in self.pools if p.capped and p is not pool)

    def scrub(self) -> None:
        """Zero all keys and values, where a diverged model may have left NaN."""
        self.k.zero_()
        self.v.zero_()

    def check(self) -> None:
        """Lane conservation; raises ``AssertionError`` with a sentence."""
        refs, owners = np.zeros_like(self.refs), np.zeros_like(self.refs)
        held = [(pool, *np.unique(pool.tables[pool.tables >= 0], return_counts=True)) for pool in self.pools]
        for _, blocks, names in held:
            refs[blocks] += names.astype(np.int32)
            owners[blocks] += 1
        wrong = np.flatnonzero(refs != self.refs)
        assert not len(wrong), f"block {wrong[0]} is named {refs[wrong[0]]} times but counts {self.refs[wrong[0]]}"
        for pool, blocks, _ in held:
            pool.check_rows()
            assert pool.used == len(blocks), f"a pool counts {pool.used} blocks and names {len(blocks)}"
        assert not (owners > 1).any(), f"block {np.argmax(owners)} belongs to two pools"
        free = self.free_list[: self.free]
        assert len(np.unique(free)) == len(free), "a block is in the free list twice"
        assert not refs[free].any(), "a block is both free and in a lane"
        used = int((refs > 0).sum())
        assert used + self.free == self.total, f"{used} used + {self.free} free blocks are not {self.total}"
        reserved = self.reserved_beside(None)
        assert reserved <= self.free, f"{reserved} blocks are promised to capped pools and {self.free} are free"
