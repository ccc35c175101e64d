"""The decoder as one rank of a tensor-parallel group runs it, over any communicator.

Each rank computes its columns of every layer (``engine/shard.py``) and gathers those of the others: attention output,
residual stream after attention, MLP activation, residual stream; no sum runs over ranks. Where ranks share memory and
the kernels serve, ``engine/program.py`` does all that inside one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.core.comm import Communicator
from longtail.core.errors import ModelError
from longtail.engine import linear as fused
from longtail.engine.model import Attend, Decoder, Layer, RunsLayers, linear, rms_norm
from longtail.engine.shard import Bounds, shards_of


class ShardedDecoder:
    """A rank's part of ``model``. Every rank makes the same calls, in inference mode; they are collective, and raise
    :class:`longtail.core.errors.PeerLost`.

    ``kv_heads`` are those of the rank's lanes: :class:`ModelError` if they are not its shard's. ``vocab`` says whose
    tokens each rank has the logits of.
    """

    def __init__(self, model: Decoder, comm: Communicator, kv_heads: Sequence[int]) -> None:
        self._model, self._comm = model, comm
        c, shards = model.config, shards_of(model.config, comm.size)
        self._shard = shards[comm.rank]
        own = list(range(*self._shard.heads))
        if list(kv_heads) != own:
            raise ModelError(
                f"rank {comm.rank} of {comm.size} computes the KV heads {own}, but its lanes hold {list(kv_heads)}"
            )
        self._heads = [shard.query_columns(c) for shard in shards]
        self._hidden = [shard.hidden for shard in shards]
        self._mlp = [shard.mlp_columns(c) for shard in shards]
        self.vocab = [shard.vocab for shard in shards]

    def __call__(self, tokens_T: Tensor, attend: Attend) -> Tensor:
        """Final hidden states ``[T, D]``, normed and whole; ``attend`` is over the lanes of the rank's heads."""
        if isinstance(attend, RunsLayers):
            return self._model(tokens_T, attend)
        c = self._model.config
        x_TD = F.embedding(tokens_T, self._model.embed)
        fast = fused.serves(x_TD, c.heads * c.head_dim, c.intermediate_size)
        project, norm = (fused.linear, fused.rms_norm) if fast else (linear, rms_norm)
        rows, mine = self._shard.rows(c), slice(*self._shard.hidden)

        def part(x_TK: Tensor, weight: Tensor, bias: Tensor | None, of_rank: slice, **options) -> Tensor:
            if of_rank.start == of_rank.stop:
                return x_TK.new_empty(len(x_TK), 0)
            return project(x_TK, weight[of_rank], None if bias is None else bias[of_rank], **options)

        for i, layer in enumerate(cast("list[Layer]", self._model.layers)):
            normed = {"norm_K": layer.attn_norm, "eps": c.rms_eps}
            qkv_TE = part(x_TD, layer.qkv, layer.qkv_bias, rows.qkv, **normed)
            o_TQ = self._gather(attend(i, qkv_TE, layer.q_norm, layer.k_norm), self._heads)
            x_TN = part(o_TQ, layer.o, layer.o_bias, rows.o, residual_MN=x_TD[:, mine])
            x_TD = self._gather(x_TN, self._hidden)
            gated = {"norm_K": layer.mlp_norm, "eps": c.rms_eps, "swiglu_block": c.mlp_block}
            h_TF = self._gather(part(x_TD, layer.gate_up, layer.gate_up_bias, rows.gate_up, **gated), self._mlp)
            x_TN = part(h_TF, layer.down, layer.down_bias, rows.down, residual_MN=x_TD[:, mine])
            x_TD = self._gather(x_TN, self._hidden)
        return norm(x_TD, self._model.norm, c.rms_eps)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Those of the rank's tokens, ``[T, vocab of the shard]``, from whole hidden states; not collective."""
        head = self._model.head[slice(*self._shard.vocab)]
        return fused.linear(x_TD, head) if fused.serves(x_TD) else F.linear(x_TD, head)

    def all_logits(self, logits_UN: Tensor) -> Tensor:
        """``[U, V]`` from what :meth:`logits` gives each rank."""
        return self._gather(logits_UN, self.vocab)

    def _gather(self, part_TN: Tensor, columns: Sequence[Bounds]) -> Tensor:
        return gather_columns(self._comm, part_TN, columns)


def gather_columns(comm: Communicator, part_TN: Tensor, columns: Sequence[Bounds]) -> Tensor:
    """The parts of all ranks side by side: rank r's has ``columns[r]``."""
    T, width = len(part_TN), columns[-1][1]
    flat = part_TN.new_empty(T * width)
    bounds = [(T * first, T * last) for first, last in columns]
    flat[slice(*bounds[comm.rank])] = part_TN.flatten()
    comm.all_gather_shards(flat, bounds)
    return torch.cat([flat[a:b].view(T, (b - a) // T) for a, b in bounds], dim=1)
