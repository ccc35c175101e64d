"""Where the rows of separate Hugging Face projections stand in the fused weights.

Pure functions of tensors. All accept weights ``[rows, D]`` and, where biases exist, biases ``[rows]``. Whatever is
called a view shares storage with its argument: reading and writing through it is exact. Which of the fused rows belong
to a rank says ``engine/shard.py``.

Shapes as in ``engine/model.py``: G KV heads, R query heads per KV head, H head dimension, D hidden size, F MLP size,
B rows of an MLP block (``config.mlp_block``), N = F / B blocks. Fused QKV rows: ``[G, R + 2, H]`` with the R query
heads first, then K, then V. Fused gate/up rows: ``[N, 2, B]``, gate then up.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from longtail.engine.config import ModelConfig


class QkvViews(NamedTuple):
    """Views of fused rows: ``q`` ``[G, R, H, ...]``, ``k`` and ``v`` ``[G, H, ...]``."""

    q: Tensor
    k: Tensor
    v: Tensor


class GateUpViews(NamedTuple):
    """Views of fused rows, each ``[N, B, ...]``."""

    gate: Tensor
    up: Tensor


def split_qkv(qkv: Tensor, config: ModelConfig) -> QkvViews:
    """The three projections inside fused rows, as views; flattening their leading dimensions gives natural order."""
    heads = qkv.unflatten(0, (-1, config.heads_per_kv + 2, config.head_dim))
    return QkvViews(heads[:, :-2], heads[:, -2], heads[:, -1])


def split_gate_up(gate_up: Tensor, config: ModelConfig) -> GateUpViews:
    """The two projections inside fused rows, as views."""
    blocks = gate_up.unflatten(0, (-1, 2, config.mlp_block))
    return GateUpViews(blocks[:, 0], blocks[:, 1])


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, config: ModelConfig) -> Tensor:
    """Fused rows ``[G * (R + 2) * H, ...]`` from ``q [G * R * H, ...]`` and ``k``, ``v`` ``[G * H, ...]``."""
    qkv = q.new_empty(config.kv_heads * config.qkv_rows_per_kv, *q.shape[1:])
    for view, part in zip(split_qkv(qkv, config), (q, k, v), strict=True):
        view.copy_(part.view(view.shape))
    return qkv


def unfuse_qkv(qkv: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of :func:`fuse_qkv`, bit for bit."""
    q, k, v = split_qkv(qkv, config)
    return q.flatten(0, 2), k.flatten(0, 1), v.flatten(0, 1)


def fuse_gate_up(gate: Tensor, up: Tensor, config: ModelConfig) -> Tensor:
    """Fused rows ``[2 * F, ...]`` from ``gate`` and ``up`` ``[F, ...]``."""
    gate_up = gate.new_empty(2 * config.intermediate_size, *gate.shape[1:])
    for view, part in zip(split_gate_up(gate_up, config), (gate, up), strict=True):
        view.copy_(part.view(view.shape))
    return gate_up


def unfuse_gate_up(gate_up: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`fuse_gate_up`, bit for bit."""
    gate, up = split_gate_up(gate_up, config)
    return gate.flatten(0, 1), up.flatten(0, 1)
