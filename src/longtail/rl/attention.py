"""Attention of the training forward: whole groups in one flat batch, each prompt computed once.

A micro-batch lies flat as ``[prompt | c1 | c2 | ...]`` per group. A *segment* is one prompt or one completion. The
attention of a completion is the softmax over two key sets, its prompt and itself, computed apart and joined by their
log-sum-exps: ``own`` (causal, within each segment, segments of like length padded to one batch) and ``prompt``
(dense, all completions of a group at once over its prompt, without padding or copies). The backward pass of each
part gets the *joined* output and log-sum-exp, which makes the partial gradients exact (the algebra of ring
attention, arXiv 2310.01889).

Shape suffixes beyond ``engine/model.py``: B lanes (KV heads of the segments) of a bucket, L padded length, N rows of
a gather, W = (R + 2) * H width of one lane of one token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longtail.engine.config import ModelConfig
from longtail.engine.model import RopeTable, rms_norm


class Group(NamedTuple):
    """Where one group lies in the flat batch: prompt ``start .. middle``, its completions ``middle .. end``."""

    start: int
    middle: int
    end: int


class Segment(NamedTuple):
    """A prompt or a completion in the flat batch, and the prompt before it (``prefix`` 0 tokens for prompts)."""

    start: int
    length: int
    prefix_start: int
    prefix: int


class Bucket(NamedTuple):
    """Segments of like length as padded rows of their places ``index_SL`` in the flat batch (T for padding)."""

    segments: tuple[Segment, ...]
    longest: int
    index_SL: Tensor


@dataclass(frozen=True)
class Layout:
    """Where everything lies in a flat batch of ``tokens`` tokens; built once, used by all layers."""

    tokens: int
    groups: tuple[Group, ...]
    buckets: tuple[Bucket, ...]
    positions_T: Tensor
    longest: int


def lay_out(groups: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> Layout:
    """The layout of groups given as (prompt tokens, tokens of each completion); completions may have none."""
    places: list[Group] = []
    segments: list[Segment] = []
    at = 0
    for prompt, lengths in groups:
        start = at
        for length, prefix in [(prompt, 0), *((n, prompt) for n in lengths)]:
            segments.append(Segment(at, length, start, prefix))
            at += length
        places.append(Group(start, start + prompt, at))
    positions_T = torch.cat([torch.arange(s.prefix, s.prefix + s.length) for s in segments])
    return Layout(
        tokens=at,
        groups=tuple(places),
        buckets=tuple(_bucket(alike, at, device) for alike in _similar(segments)),
        positions_T=positions_T.to(device),
        longest=int(positions_T.max()) + 1,
    )


def padded_index(ranges: Sequence[tuple[int, int]], width: int, padding: int) -> Tensor:
    """``[len(ranges), width]``: each row counts from ``start`` for ``length`` numbers, then holds ``padding``."""
    starts = torch.tensor([start for start, _ in ranges]).unsqueeze(1)
    lengths = torch.tensor([length for _, length in ranges]).unsqueeze(1)
    offsets = torch.arange(width).unsqueeze(0)
    return torch.where(offsets < lengths, starts + offsets, padding)


def _similar(segments: list[Segment]) -> list[list[Segment]]:
    """Segments by falling length, cut where padding would cost more than one more kernel call."""
    buckets: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: -s.length):
        if segment.length == 0:
            break
        if not buckets or 8 * segment.length < 7 * buckets[-1][0].length:
            buckets.append([])
        buckets[-1].append(segment)
    return buckets


def _bucket(alike: list[Segment], tokens: int, device: torch.device) -> Bucket:
    longest = alike[0].length
    index_SL = padded_index([(s.start, s.length) for s in alike], longest, tokens)
    return Bucket(tuple(alike), longest, index_SL.to(device))


class GroupAttend:
    """The :class:`longtail.engine.model.Attend` of training on CPU: differentiable, over the groups of one layout."""

    def __init__(self, layout: Layout, config: ModelConfig, rope: RopeTable) -> None:
        self.layout, self.config = layout, config
        self.cos_T1W, self.sin_T1W = rotations(rope, layout, config.heads_per_kv)
        G = config.kv_heads
        lanes_G = torch.arange(G, device=layout.positions_T.device)
        self.lane_rows = [
            (b.index_SL[:, None, :] * G + lanes_G[None, :, None]).flatten() for b in layout.buckets
        ]  # per bucket [S * G * L]: rows of the flat batch seen as [T * G, W]

    def __call__(self, layer: int, qkv_TE: Tensor, q_norm_H: Tensor | None, k_norm_H: Tensor | None) -> Tensor:
        return _GroupAttention.apply(normed_lanes(qkv_TE, q_norm_H, k_norm_H, self.config), self)


class _GroupAttention(torch.autograd.Function):
    """RoPE, then both parts of attention; saves the rotated lanes, the output and the log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, qkv_TGXH: Tensor, plan: GroupAttend) -> Tensor:
        T, G, X, H = qkv_TGXH.shape
        R = X - 2
        # The row after the last token is what padding gathers; zeros there can never overflow.
        x_TGXH = qkv_TGXH.new_empty(T + 1, G, X, H)
        rotate(qkv_TGXH, plan.cos_T1W, plan.sin_T1W, out=x_TGXH[:T])
        x_TGXH[T] = 0
        o_TGRH = qkv_TGXH.new_empty(T + 1, G, R, H)
        lse: Tensor | None = None
        for bucket, rows_N in zip(plan.layout.buckets, plan.lane_rows, strict=True):
            q_BRLH, k_BRLH, v_BRLH = _lanes(x_TGXH, rows_N, bucket.longest)
            o_BRLH, lse_BRL = attend(q_BRLH, k_BRLH, v_BRLH, causal=True)
            if lse is None:
                lse = lse_BRL.new_zeros(T + 1, G, R)
            _scatter(o_TGRH, rows_N, o_BRLH)
            lse.view(-1, R).index_copy_(0, rows_N, lse_BRL.transpose(1, 2).reshape(-1, R))
        o_TGRH[T] = 0
        assert lse is not None
        for start, middle, end in _with_completions(plan.layout):
            q_GRCH, k_GRPH, v_GRPH = _over_prompt(x_TGXH, start, middle, end)
            o_GRCH, lse_GRC = attend(q_GRCH, k_GRPH, v_GRPH, causal=False)
            _join(o_TGRH[middle:end], lse[middle:end], o_GRCH.permute(2, 0, 1, 3), lse_GRC.permute(2, 0, 1))
        ctx.save_for_backward(x_TGXH, o_TGRH, lse)
        ctx.plan = plan
        return o_TGRH[:T].flatten(1)

    @staticmethod
    def backward(ctx: Any, grad_TQ: Tensor) -> tuple[Tensor, None]:
        plan: GroupAttend = ctx.plan
        saved: tuple[Tensor, Tensor, Tensor] = ctx.saved_tensors
        x_TGXH, o_TGRH, lse_TGR = saved
        T, (G, R, H) = len(grad_TQ), o_TGRH.shape[1:]
        g_TGRH = grad_TQ.new_empty(T + 1, G, R, H)
        g_TGRH[:T] = grad_TQ.reshape(T, G, R, H)
        g_TGRH[T] = 0
        dx_TGXH = torch.empty_like(x_TGXH)  # every token lies in one bucket, so all of it gets written
        for bucket, rows_N in zip(plan.layout.buckets, plan.lane_rows, strict=True):
            q, k, v = _lanes(x_TGXH, rows_N, bucket.longest)
            o_BRLH = _gather(o_TGRH, rows_N, bucket.longest)
            g_BRLH = _gather(g_TGRH, rows_N, bucket.longest)
            lse_BRL = lse_TGR.view(-1, R).index_select(0, rows_N).view(-1, bucket.longest, R).transpose(1, 2)
            dq, dk, dv = attend_grad(g_BRLH, q, k, v, o_BRLH, lse_BRL.contiguous(), causal=True)
            _scatter(dx_TGXH, rows_N, dq, dk.sum(1, keepdim=True), dv.sum(1, keepdim=True))
        for start, middle, end in _with_completions(plan.layout):
            q, k, v = _over_prompt(x_TGXH, start, middle, end)
            o_GRCH = o_TGRH[middle:end].permute(1, 2, 0, 3)
            g_GRCH = g_TGRH[middle:end].permute(1, 2, 0, 3)
            lse_GRC = lse_TGR[middle:end].permute(1, 2, 0).contiguous()
            dq, dk, dv = attend_grad(g_GRCH, q, k, v, o_GRCH, lse_GRC, causal=False)
            dx_TGXH[middle:end, :, :R] += dq.permute(2, 0, 1, 3)
            dx_TGXH[start:middle, :, R] += dk.sum(1).transpose(0, 1)
            dx_TGXH[start:middle, :, R + 1] += dv.sum(1).transpose(0, 1)
        d_TGXH = torch.empty_like(dx_TGXH[:T])
        rotate(dx_TGXH[:T], plan.cos_T1W, -plan.sin_T1W, out=d_TGXH)
        return d_TGXH, None


def normed_lanes(qkv_TE: Tensor, q_norm_H: Tensor | None, k_norm_H: Tensor | None, c: ModelConfig) -> Tensor:
    """The projections as lanes ``[T, G, R + 2, H]``, with QK-norm where the model has it."""
    qkv_TGXH = qkv_TE.unflatten(-1, (c.kv_heads, c.heads_per_kv + 2, c.head_dim))
    if q_norm_H is None or k_norm_H is None:
        return qkv_TGXH
    q_TGRH, k_TG1H, v_TG1H = qkv_TGXH.split((c.heads_per_kv, 1, 1), dim=2)
    return torch.cat((rms_norm(q_TGRH, q_norm_H, c.rms_eps), rms_norm(k_TG1H, k_norm_H, c.rms_eps), v_TG1H), dim=2)


def rotations(rope: RopeTable, layout: Layout, heads_per_kv: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines ``[T, 1, W]`` of each token's lanes: queries and key rotate, the value stays.

    Full-width rows keep the innermost loops long and contiguous, several times faster on a CPU than rotating halves.
    """
    cos, sin = (table[layout.positions_T].unsqueeze(1) for table in rope.upto(layout.longest))
    turning = heads_per_kv + 1
    still = cos.new_ones(layout.tokens, 1, 2 * cos.shape[-1])
    cos_T1W = torch.cat([cos, cos] * turning + [still], dim=-1)
    sin_T1W = torch.cat([-sin, sin] * turning + [torch.zeros_like(still)], dim=-1)
    return cos_T1W, sin_T1W


def rotate(x_TGXH: Tensor, cos_T1W: Tensor, sin_T1W: Tensor, *, out: Tensor) -> None:
    """RoPE of all lanes; with negated sines, its inverse."""
    swapped_TGW = x_TGXH.unflatten(-1, (2, -1)).flip(-2).flatten(2)
    torch.mul(x_TGXH.flatten(2), cos_T1W, out=out.flatten(2)).addcmul_(swapped_TGW, sin_T1W)


def _gather(x_TGXH: Tensor, rows_N: Tensor, longest: int) -> Tensor:
    """``[B, X, L, H]`` of the rows of a bucket."""
    X, H = x_TGXH.shape[2:]
    return x_TGXH.view(-1, X * H).index_select(0, rows_N).view(-1, longest, X, H).transpose(1, 2)


def _scatter(x_TGXH: Tensor, rows_N: Tensor, *parts: Tensor) -> None:
    """The inverse of :func:`_gather`, from ``[B, ., L, H]`` pieces that make up the X rows of each lane."""
    X, H = x_TGXH.shape[2:]
    B, _, L, _ = parts[0].shape
    x_BLXH = torch.empty(B, L, X, H, dtype=x_TGXH.dtype, device=x_TGXH.device)
    for piece, part in zip(x_BLXH.split([p.shape[1] for p in parts], dim=2), parts, strict=True):
        piece.copy_(part.transpose(1, 2))
    x_TGXH.view(-1, X * H).index_copy_(0, rows_N, x_BLXH.view(-1, X * H))


def _lanes(x_TGXH: Tensor, rows_N: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[B, R, L, H]`` of a bucket; keys and values are one head seen R times."""
    x_BXLH = _gather(x_TGXH, rows_N, longest)
    R = x_BXLH.shape[1] - 2
    return x_BXLH[:, :R], x_BXLH[:, R : R + 1].expand(-1, R, -1, -1), x_BXLH[:, R + 1 :].expand(-1, R, -1, -1)


def _over_prompt(x_TGXH: Tensor, start: int, middle: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[G, R, C, H]`` of a group's completions, keys and values ``[G, R, P, H]`` of its prompt; all views."""
    R = x_TGXH.shape[2] - 2
    q_GRCH = x_TGXH[middle:end, :, :R].permute(1, 2, 0, 3)
    k_GRPH, v_GRPH = (x_TGXH[start:middle, :, i].transpose(0, 1).unsqueeze(1).expand(-1, R, -1, -1) for i in (R, R + 1))
    return q_GRCH, k_GRPH, v_GRPH


def _with_completions(layout: Layout) -> itertools.filterfalse[Group]:
    return itertools.filterfalse(lambda g: g.middle == g.end, layout.groups)


def _join(o_CGRH: Tensor, lse_CGR: Tensor, more_o_CGRH: Tensor, more_lse_CGR: Tensor) -> None:
    """Attention over the union of two key sets, in place in the first."""
    joined_CGR = torch.logaddexp(lse_CGR, more_lse_CGR)
    o_CGRH.mul_((lse_CGR - joined_CGR).exp_().unsqueeze(-1))
    o_CGRH.addcmul_(more_o_CGRH, (more_lse_CGR - joined_CGR).exp_().unsqueeze(-1).to(o_CGRH.dtype))
    lse_CGR.copy_(joined_CGR)


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention output ``[B, R, L, H]`` and log-sum-exp ``[B, R, L]`` by the device's fused kernel."""
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return o, lse


def attend_grad(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, where ``o`` and ``lse`` may be over more keys than ``k`` holds."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, o, lse, 0.0, causal)
