"""The training attention of any device, from public torch operations only; ``rl/attention.py`` is faster on a CPU.

Each completion is a padded row of queries over its prompt's and its own keys, rows of like length in one call of
``scaled_dot_product_attention`` (which fuses on CUDA), with a mask and torch's own gradients. The prompt's hidden
states are still computed once per group; only its keys are read again for each completion.

Shape suffixes as in ``rl/attention.py``: S segments of a bucket, L padded queries, K padded keys (prompt, then own).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.engine.config import ModelConfig
from longtail.engine.model import RopeTable
from longtail.rl.attention import Bucket, Layout, normed_lanes, padded_index, rotations


class _Rows(NamedTuple):
    """One bucket's gathers from the flat batch (T for padding) and its mask, True where a query sees a key."""

    queries_SL: Tensor
    keys_SK: Tensor
    mask_S1NK: Tensor


class PaddedAttend:
    """The :class:`longtail.engine.model.Attend` of training, differentiable, over the groups of one layout."""

    def __init__(self, layout: Layout, config: ModelConfig, rope: RopeTable) -> None:
        self.config = config
        self.cos_T1W, self.sin_T1W = rotations(rope, layout, config.heads_per_kv)
        self.rows = [_rows(bucket, layout.tokens, config.heads_per_kv) for bucket in layout.buckets]
        order_N = torch.cat([rows.queries_SL.flatten() for rows in self.rows])
        (self.real_N,) = torch.nonzero(order_N < layout.tokens, as_tuple=True)
        self.place_T = torch.argsort(order_N[self.real_N])

    def __call__(self, layer: int, qkv_TE: Tensor, q_norm_H: Tensor | None, k_norm_H: Tensor | None) -> Tensor:
        R = self.config.heads_per_kv
        x_TGXH = normed_lanes(qkv_TE, q_norm_H, k_norm_H, self.config)
        swapped_TGW = x_TGXH.unflatten(-1, (2, -1)).flip(-2).flatten(2)
        x_TGXH = (x_TGXH.flatten(2) * self.cos_T1W + swapped_TGW * self.sin_T1W).view_as(x_TGXH)
        x_TGXH = torch.cat((x_TGXH, torch.zeros_like(x_TGXH[:1])))
        outputs = []
        for queries_SL, keys_SK, mask_S1NK in self.rows:
            # Query heads of a KV head are more rows of queries, so each key is read once for all of them.
            q_SGNH = x_TGXH[:, :, :R][queries_SL].transpose(1, 2).flatten(2, 3)
            k_SGKH, v_SGKH = (x_TGXH[:, :, i][keys_SK].transpose(1, 2) for i in (R, R + 1))
            o_SGNH = F.scaled_dot_product_attention(q_SGNH, k_SGKH, v_SGKH, attn_mask=mask_S1NK)
            o_SLGRH = o_SGNH.unflatten(2, (-1, R)).transpose(1, 2)
            outputs.append(o_SLGRH.flatten(0, 1).flatten(1))
        return torch.cat(outputs)[self.real_N][self.place_T]


def _rows(bucket: Bucket, tokens: int, heads_per_kv: int) -> _Rows:
    device, L = bucket.index_SL.device, bucket.longest
    prefix = max(s.prefix for s in bucket.segments)
    prompts_SP = padded_index([(s.prefix_start, s.prefix) for s in bucket.segments], prefix, tokens).to(device)
    sees_prompt_S1P = (prompts_SP < tokens).unsqueeze(1)
    sees_own_1LL = torch.ones(1, L, L, dtype=torch.bool, device=device).tril()
    S = len(bucket.segments)
    mask_SLK = torch.cat((sees_prompt_S1P.expand(S, L, prefix), sees_own_1LL.expand(S, L, L)), dim=2)
    return _Rows(
        queries_SL=bucket.index_SL,
        keys_SK=torch.cat((prompts_SP, bucket.index_SL), dim=1),
        mask_S1NK=mask_SLK.repeat_interleave(heads_per_kv, dim=1).unsqueeze(1),
    )
