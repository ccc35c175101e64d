"""Which part of a model each rank of a tensor-parallel group computes.

Every projection is split by its *output rows*, and so is the vocabulary: a rank's weights are contiguous row views of
the full ones, each output element is computed whole by one rank, and no sum runs over ranks. So the layout changes no
bit.

Ranges are cut by halving: the ranks are split in two halves (the first has the larger part), the units in proportion,
and so on. Halving a group of 2 ranks into 4 hence splits each rank's part in two.
"""

from __future__ import annotations

from typing import NamedTuple

from longtail.core.errors import ModelError
from longtail.core.split import Bounds, halved
from longtail.engine.config import ModelConfig
from longtail.engine.sampling import BLOCK

CACHE_LINE = 16
"""Columns are dealt in multiples of this, so that no two ranks write to one cache line (of float32)."""


class Shard(NamedTuple):
    """The part of one rank: KV ``heads``, columns of the ``hidden`` size, blocks of the MLP (``config.mlp_block``), and
    tokens of the ``vocab`` (whole blocks of ``sampling.BLOCK``). All but ``heads`` may be empty in a tiny model."""

    rank: int
    size: int
    heads: Bounds
    hidden: Bounds
    mlp: Bounds
    vocab: Bounds

    def rows(self, config: ModelConfig) -> Rows:
        """Where the rank's rows stand in the fused weights."""
        qkv, gate_up = config.qkv_rows_per_kv, 2 * config.mlp_block
        return Rows(
            qkv=slice(self.heads[0] * qkv, self.heads[1] * qkv),
            o=slice(*self.hidden),
            gate_up=slice(self.mlp[0] * gate_up, self.mlp[1] * gate_up),
            down=slice(*self.hidden),
        )

    def query_columns(self, config: ModelConfig) -> Bounds:
        """Where the rank's heads stand in the attention output ``[T, Q]``."""
        width = config.heads_per_kv * config.head_dim
        return self.heads[0] * width, self.heads[1] * width

    def mlp_columns(self, config: ModelConfig) -> Bounds:
        """Where the rank's blocks stand in the MLP's activation ``[T, F]``."""
        return self.mlp[0] * config.mlp_block, self.mlp[1] * config.mlp_block


class Rows(NamedTuple):
    """Rows of each fused weight of a layer, and of its bias."""

    qkv: slice
    o: slice
    gate_up: slice
    down: slice


def shard_of(config: ModelConfig, rank: int, size: int) -> Shard:
    """The part of ``rank`` in a group of ``size``. Raises :class:`ModelError` if there are more ranks than KV heads."""
    return shards_of(config, size)[rank]


def shards_of(config: ModelConfig, size: int) -> list[Shard]:
    """The parts of all ranks, in order; raises as :func:`shard_of` does."""
    if size > config.kv_heads:
        raise ModelError(
            f"tensor parallelism over {size} workers needs as many KV heads, and the model has {config.kv_heads}: "
            f"a KV head cannot be split, so use a degree of {config.kv_heads} or less"
        )
    heads = head_bounds(config.kv_heads, size)
    hidden = cut(config.hidden_size, CACHE_LINE, size)
    mlp = halved(config.intermediate_size // config.mlp_block, size)
    vocab = cut(config.vocab_size, BLOCK, size)
    return [Shard(rank, size, heads[rank], hidden[rank], mlp[rank], vocab[rank]) for rank in range(size)]


def head_bounds(kv_heads: int, size: int) -> list[Bounds]:
    """KV heads of each rank, ``size <= kv_heads``: every rank has at least one, and no two differ by more than one."""
    return halved(kv_heads, size)


def cut(total: int, unit: int, size: int) -> list[Bounds]:
    """``total`` in whole units, of which the last may be shorter; parts may be empty."""
    return [(min(a * unit, total), min(b * unit, total)) for a, b in halved(-(-total // unit), size)]
