"""Attention over lanes in plain torch operations: any device, dtype, head dimension and block size.

The same operation as :mod:`longtail.engine.attention`, which the tests hold it to. Blocks are gathered, so this costs a
copy of the context per step; it is what serves bfloat16 and CUDA until a paged kernel for one KV head is plugged in.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.engine.lanes import LanePool
from longtail.engine.model import RopeTable, apply_rope, rms_norm


class TorchLaneAttention:
    """Attention of the tokens that :meth:`begin` announced, for every layer in turn (the ``Attend`` protocol).

    S segments are padded to N query tokens and C context positions; shapes below: T flat tokens, G lanes, R query
    heads per lane, H head dimension.
    """

    def __init__(self, pool: LanePool, rope: RopeTable) -> None:
        self._pool, self._rope = pool, rope

    def begin(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Announce the flat batch: segment i is ``counts[i]`` tokens of row ``rows[i]`` from position ``starts[i]``.

        Raises ``ValueError`` if a lane does not reach a position that would be written.
        """
        if not self._pool.reaches(rows, starts + counts - 1):
            raise ValueError("a lane does not reach the positions to be written: grow or claim it first")
        pool = self._pool
        device, size = pool.k.device, pool.block_tokens
        segment = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(segment)) - (np.cumsum(counts) - counts)[segment]
        position = starts[segment] + within
        context = int((starts + counts).max())
        blocks = -(-context // size)
        tables = np.maximum(pool.tables[rows][:, :, :blocks], 0)

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self._block_TG = put(pool.tables[rows[segment], :, position // size].astype(np.int64))
        self._at_T1 = put((position % size)[:, None])
        self._tables_SGB = put(tables.astype(np.int64))
        self._segment_T, self._within_T = put(segment), put(within)
        self._shape = (len(counts), int(counts.max()), blocks * size)
        limit_SN = starts[:, None] + np.arange(int(counts.max()))
        self._mask_S1NC = put(np.arange(blocks * size) <= limit_SN[:, :, None]).unsqueeze(1)
        cos, sin = self._rope.upto(context)
        at = put(position)
        self._cos_TH2, self._sin_TH2 = cos[at], sin[at]

    def __call__(self, layer: int, qkv_TE: Tensor, q_norm_H: Tensor | None, k_norm_H: Tensor | None) -> Tensor:
        pool, c = self._pool, self._pool.config
        G, R, H = pool.heads, c.heads_per_kv, c.head_dim
        S, N, C = self._shape
        qkv_TGXH = qkv_TE.view(len(qkv_TE), G, R + 2, H)
        q_TQH, k_TGH, v_TGH = qkv_TGXH[:, :, :R].flatten(1, 2), qkv_TGXH[:, :, R], qkv_TGXH[:, :, R + 1]
        if q_norm_H is not None and k_norm_H is not None:
            q_TQH, k_TGH = rms_norm(q_TQH, q_norm_H, c.rms_eps), rms_norm(k_TGH, k_norm_H, c.rms_eps)
        q_TQH = apply_rope(q_TQH, self._cos_TH2, self._sin_TH2)
        k_TGH = apply_rope(k_TGH, self._cos_TH2, self._sin_TH2)
        pool.k[self._block_TG, layer, :, self._at_T1] = k_TGH
        pool.v[self._block_TG, layer, self._at_T1] = v_TGH
        k_SGCH = pool.k[self._tables_SGB, layer].transpose(-1, -2).reshape(S, G, C, H)
        v_SGCH = pool.v[self._tables_SGB, layer].reshape(S, G, C, H)
        q_SNQH = q_TQH.new_zeros(S, N, G * R, H)
        q_SNQH[self._segment_T, self._within_T] = q_TQH
        o_SQNH = F.scaled_dot_product_attention(
            q_SNQH.transpose(1, 2),
            k_SGCH.repeat_interleave(R, dim=1),
            v_SGCH.repeat_interleave(R, dim=1),
            attn_mask=self._mask_S1NC,
        )
        return o_SQNH.transpose(1, 2)[self._segment_T, self._within_T].flatten(1)
