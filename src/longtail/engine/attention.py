"""Attention over lanes on the CPU: QK-norm, RoPE, writing K and V, and paged attention, without padding or gathers.

A work item is (segment tile, KV head): up to ``TILE`` consecutive tokens of one sequence and all R query heads of one
KV head, so keys and values are read once. Softmax is online over chunks of ``CHUNK`` positions that start at absolute
multiples of ``CHUNK``; each query row's arithmetic depends on its own position alone. Hence a token's result has the
same bits in a decode step, in a prefill chunk of any size, and beside any neighbours.

Layout of the rows: token-major, then query head (row i of a tile is token ``i // R``, head ``i % R``).
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from longtail.engine.lanes import LanePool
from longtail.engine.model import RopeTable
from longtail.engine.simd import (
    TILE_ROWS,
    TILE_VECTORS,
    VECTOR_BYTES,
    add,
    as_pointer,
    exp,
    fetch_add,
    gemm_tile,
    largest,
    load,
    maximum,
    mul,
    splat,
    store,
    sub,
    total,
)
from longtail.engine.team import run, team_size

TILE = 16
"""Tokens of one work item of a prefill."""
CHUNK = 256
"""Positions whose scores are held at once; a multiple of every supported block size up to itself."""
_ALIGN = 16
_PARALLEL_WORK = 200_000
"""Multiply-adds of one layer below which waking a second thread costs more than it brings."""

# Words of a kernel's argument block. The floats follow at _EPS and _SCALE as float64 bits.
(_NEXT, _TICKET, _LAYER, _WRITE, _ATTEND, _ITEMS, _QKV, _OUT, _TOKENS, _HEADS, _R, _H) = range(12)
(_K, _V, _BLOCKS, _LAYERS, _BLOCK_TOKENS, _TABLES, _ROWS, _WIDTH) = range(12, 20)
(_SEGMENTS, _COS, _SIN, _ROPE_ROWS, _Q_NORM, _K_NORM, _SCRATCH, _SCRATCH_WORDS, _EPS, _SCALE) = range(20, 30)
_WORDS = 32


def supports(pool: LanePool) -> bool:
    """Whether the kernels here serve ``pool``; :mod:`longtail.engine.attention_torch` serves every other."""
    return (
        pool.k.device.type == "cpu"
        and pool.k.dtype in (torch.float32, torch.float64)
        and pool.config.head_dim % (2 * _ALIGN) == 0
        and pool.block_tokens % _ALIGN == 0
        and CHUNK % pool.block_tokens == 0
    )


class LaneAttention:
    """Attention of the tokens that :meth:`begin` announced, for every layer in turn (the ``Attend`` protocol)."""

    def __init__(self, pool: LanePool, rope: RopeTable) -> None:
        self._pool, self._rope = pool, rope
        c = pool.config
        self._kernel = _kernel(pool.k.dtype)
        self._numpy = np.float32 if pool.k.dtype == torch.float32 else np.float64
        self._args = np.zeros(_WORDS, np.int64)
        self._floats = self._args.view(np.float64)
        self._scratch = np.empty((0, 0), self._numpy)
        self._keep: tuple = ()
        self._one = np.ones(c.head_dim, self._numpy)

    def begin(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Announce the flat batch: segment i is ``counts[i]`` tokens of lane row ``rows[i]`` from position ``starts[i]``.

        The lanes must already reach every position that is written.
        """
        pool, c, args = self._pool, self._pool.config, self._args
        segments = _tiles(rows.astype(np.int64), starts.astype(np.int64), counts.astype(np.int64), TILE)
        last = int((starts + counts).max())
        cos, sin = self._rope.upto(last)
        R, H = c.heads_per_kv, c.head_dim
        self._decode = bool((counts == 1).all())
        self._tokens = int(counts.sum())
        work = int((segments[:, 2] * (segments[:, 1] + segments[:, 2])).sum()) * c.heads * H * 2
        self._threads = team_size() if work > _PARALLEL_WORK else 1
        tile = 1 if self._decode else TILE
        words = tile * R * (2 * H + CHUNK + 2) + 2 * H
        if self._scratch.shape[0] < self._threads or self._scratch.shape[1] < words:
            self._scratch = np.empty((self._threads, words), self._numpy)
        args[_ITEMS] = len(segments) * pool.heads
        args[_TOKENS], args[_HEADS], args[_R], args[_H] = self._tokens, pool.heads, R, H
        args[_K], args[_V] = pool.k.data_ptr(), pool.v.data_ptr()
        args[_BLOCKS], args[_LAYERS], args[_BLOCK_TOKENS] = pool.total, c.layers, pool.block_tokens
        args[_TABLES], args[_ROWS], args[_WIDTH] = pool.tables.ctypes.data, len(pool.tables), pool.tables.shape[2]
        args[_SEGMENTS] = segments.ctypes.data
        args[_COS], args[_SIN], args[_ROPE_ROWS] = cos.data_ptr(), sin.data_ptr(), len(cos)
        args[_SCRATCH], args[_SCRATCH_WORDS] = self._scratch.ctypes.data, self._scratch.shape[1]
        self._floats[_EPS], self._floats[_SCALE] = c.rms_eps, H**-0.5
        self._keep = (segments, cos, sin, pool.tables)

    def __call__(self, layer: int, qkv_TE: Tensor, q_norm_H: Tensor | None, k_norm_H: Tensor | None) -> Tensor:
        qkv_TE = qkv_TE.contiguous()
        args, c = self._args, self._pool.config
        out_TQ = torch.empty(
            self._tokens, self._pool.heads * c.heads_per_kv * c.head_dim, dtype=qkv_TE.dtype, device=qkv_TE.device
        )
        args[_LAYER], args[_QKV], args[_OUT] = layer, qkv_TE.data_ptr(), out_TQ.data_ptr()
        args[_Q_NORM] = 0 if q_norm_H is None else q_norm_H.data_ptr()
        args[_K_NORM] = 0 if k_norm_H is None else k_norm_H.data_ptr()
        if self._decode:
            args[_WRITE] = args[_ATTEND] = 1
            run(self._kernel, args, self._threads)
        else:
            # All keys of the chunk must be in place before the first query of it.
            args[_WRITE], args[_ATTEND] = 1, 0
            run(self._kernel, args, self._threads)
            args[_WRITE], args[_ATTEND] = 0, 1
            run(self._kernel, args, self._threads)
        return out_TQ


def _tiles(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, tile: int) -> np.ndarray:
    """int64 ``[n, 4]``: (row, first position, tokens, first flat token) of each tile, longest context first."""
    offsets = np.cumsum(counts) - counts
    if (counts == 1).all():
        segments = np.stack([rows, starts, counts, offsets], axis=1)
    else:
        per = -(-counts // tile)
        owner = np.repeat(np.arange(len(counts)), per)
        within = (np.arange(len(owner)) - (np.cumsum(per) - per)[owner]) * tile
        segments = np.stack(
            [
                rows[owner],
                starts[owner] + within,
                np.minimum(counts[owner] - within, tile),
                offsets[owner] + within,
            ],
            axis=1,
        )
    return np.ascontiguousarray(segments[np.argsort(-segments[:, 1], kind="stable")])


@functools.cache
def _kernel(dtype: torch.dtype):
    return {torch.float32: _compile32, torch.float64: _compile64}[dtype]()


def _compile32():
    @cfunc(types.void(types.voidptr), cache=True)
    def kernel32(pointer):
        _team_member(pointer, np.float32)

    return kernel32


def _compile64():
    @cfunc(types.void(types.voidptr), cache=True)
    def kernel64(pointer):
        _team_member(pointer, np.float64)

    return kernel64


@njit(cache=True, error_model="numpy")
def _team_member(pointer, dtype):
    """Take items until none is left."""
    args = carray(pointer, _WORDS, np.int64)
    floats = carray(pointer, _WORDS, np.float64)
    heads, R, H = args[_HEADS], args[_R], args[_H]
    tokens, block_tokens = args[_TOKENS], args[_BLOCK_TOKENS]
    E = heads * (R + 2) * H
    qkv = carray(as_pointer(args[_QKV]), tokens * E, dtype)
    out = carray(as_pointer(args[_OUT]), tokens * heads * R * H, dtype)
    pool = args[_BLOCKS] * args[_LAYERS] * H * block_tokens
    k = carray(as_pointer(args[_K]), pool, dtype)
    v = carray(as_pointer(args[_V]), pool, dtype)
    tables = carray(as_pointer(args[_TABLES]), (args[_ROWS], heads, args[_WIDTH]), np.int32)
    segments = carray(as_pointer(args[_SEGMENTS]), (args[_ITEMS] // heads, 4), np.int64)
    cos = carray(as_pointer(args[_COS]), (args[_ROPE_ROWS], H // 2), dtype)
    sin = carray(as_pointer(args[_SIN]), (args[_ROPE_ROWS], H // 2), dtype)
    q_norm = carray(as_pointer(args[_Q_NORM]), H, dtype)
    k_norm = carray(as_pointer(args[_K_NORM]), H, dtype)
    normed = args[_Q_NORM] != 0
    words = args[_SCRATCH_WORDS]
    ticket = fetch_add(args, _TICKET, 1)
    scratch = carray(as_pointer(args[_SCRATCH] + ticket * words * out.itemsize), words, dtype)
    eps, scale = dtype(floats[_EPS]), dtype(floats[_SCALE])
    block_words = H * block_tokens
    while True:
        item = fetch_add(args, _NEXT, 1)
        if item >= args[_ITEMS]:
            return
        segment, head = segments[item // heads], item % heads
        row, start, count, flat = segment[0], segment[1], segment[2], segment[3]
        lane = tables[row, head]
        if args[_WRITE] != 0:
            for i in range(count):
                block = lane[(start + i) // block_tokens]
                base = (block * args[_LAYERS] + args[_LAYER]) * block_words
                at = (start + i) % block_tokens
                source = (flat + i) * E + (head * (R + 2) + R) * H
                _norm_rope(qkv, source, scratch, 0, H, k_norm, normed, eps, cos[start + i], sin[start + i], dtype(1.0))
                for h in range(H):
                    k[base + h * block_tokens + at] = scratch[h]
                for h in range(H):
                    v[base + at * H + h] = qkv[source + H + h]
        if args[_ATTEND] != 0:
            for i in range(count):
                for r in range(R):
                    source = (flat + i) * E + (head * (R + 2) + r) * H
                    _norm_rope(
                        qkv,
                        source,
                        scratch,
                        (i * R + r) * H,
                        H,
                        q_norm,
                        normed,
                        eps,
                        cos[start + i],
                        sin[start + i],
                        scale,
                    )
            _attend(scratch, k, v, lane, start, count, R, H, block_tokens, args[_LAYER], args[_LAYERS], dtype(0.0))
            rows = count * R
            for i in range(count):
                for r in range(R):
                    target = ((flat + i) * heads + head) * R * H + r * H
                    source = rows * H + (i * R + r) * H
                    for h in range(H):
                        out[target + h] = scratch[source + h]


@njit(cache=True, error_model="numpy")
def _norm_rope(source, at, target, to, H, weight, normed, eps, cos, sin, scale):
    """RMS norm (if any), rotation of (i, i + H/2) pairs, and the softmax scale, of one head."""
    factor = scale
    half = H // 2
    if normed:
        square = scale - scale
        for h in range(H):
            square += source[at + h] * source[at + h]
        root = 1 / np.sqrt(square / H + eps)
        for h in range(half):
            a = source[at + h] * root * weight[h]
            b = source[at + half + h] * root * weight[half + h]
            target[to + h] = (a * cos[h] - b * sin[h]) * factor
            target[to + half + h] = (b * cos[h] + a * sin[h]) * factor
    else:
        for h in range(half):
            a, b = source[at + h], source[at + half + h]
            target[to + h] = (a * cos[h] - b * sin[h]) * factor
            target[to + half + h] = (b * cos[h] + a * sin[h]) * factor


@njit(cache=True, error_model="numpy")
def _attend(scratch, k, v, lane, start, count, R, H, block_tokens, layer, layers, zero):
    """Softmax attention of ``count * R`` query rows, at ``scratch[0:]``, into ``scratch[rows * H :]``.

    The rest of ``scratch`` holds scores ``[rows, CHUNK]``, and each row's running maximum and sum.
    """
    rows = count * R
    o, s = rows * H, 2 * rows * H
    m, l = s + rows * CHUNK, s + rows * CHUNK + rows
    for i in range(rows * H):
        scratch[o + i] = zero
    for i in range(rows):
        scratch[m + i] = -np.inf
        scratch[l + i] = zero
    block_words = H * block_tokens
    last = start + count
    for chunk in range(0, last, CHUNK):
        blocks = min(CHUNK, last - chunk + block_tokens - 1) // block_tokens
        first = chunk // block_tokens
        for b in range(blocks):
            base = (lane[first + b] * layers + layer) * block_words
            _gemm(
                False, rows, block_tokens, scratch, 0, H, k, base, block_tokens, scratch, s + b * block_tokens, CHUNK, H
            )
        for i in range(rows):
            valid = min(start + i // R + 1 - chunk, blocks * block_tokens)
            _softmax_row(scratch, s + i * CHUNK, blocks * block_tokens, valid, m + i, l + i, o + i * H, H, zero)
        for b in range(blocks):
            base = (lane[first + b] * layers + layer) * block_words
            _gemm(True, rows, H, scratch, s + b * block_tokens, CHUNK, v, base, H, scratch, o, H, block_tokens)
    for i in range(rows):
        inverse = 1 / scratch[l + i]
        for h in range(H):
            scratch[o + i * H + h] *= inverse


@njit(cache=True, error_model="numpy", inline="never")
def _softmax_row(scratch, s, width, valid, m, l, o, H, nothing):
    """Turn the first ``valid`` scores of a row into weights, the others into 0; rescale what is summed so far."""
    zero = splat(nothing)
    lanes = VECTOR_BYTES // scratch.itemsize
    if valid <= 0:
        for j in range(0, width, lanes):
            store(scratch, s + j, zero)
        return
    for j in range(valid, width):
        scratch[s + j] = -np.inf
    top = load(scratch, s)
    for j in range(lanes, width, lanes):
        top = maximum(top, load(scratch, s + j))
    old = scratch[m]
    new = max(largest(top), old)
    shift = splat(new)
    summed = zero
    for j in range(0, width, lanes):
        weight = exp(sub(load(scratch, s + j), shift))
        store(scratch, s + j, weight)
        summed = add(summed, weight)
    if new > old:
        decay = exp(splat(old - new))
        scratch[l] *= largest(decay)
        for h in range(0, H, lanes):
            store(scratch, o + h, mul(load(scratch, o + h), decay))
        scratch[m] = new
    scratch[l] += total(summed)


@njit(cache=True, error_model="numpy")
def _gemm(accumulate, rows, columns, a, a_at, a_stride, b, b_at, b_stride, c, c_at, c_stride, depth):
    """``c[rows, columns] (+)= a[rows, depth] @ b[depth, columns]``; ``columns`` is a multiple of a vector."""
    lanes = VECTOR_BYTES // b.itemsize
    j = 0
    while j < columns:
        left = (columns - j) // lanes
        vectors = TILE_VECTORS if left >= TILE_VECTORS else (2 if left >= 2 else 1)
        for i in range(0, rows, TILE_ROWS):
            gemm_tile(
                min(TILE_ROWS, rows - i),
                vectors,
                accumulate,
                a,
                a_at + i * a_stride,
                a_stride,
                b,
                b_at + j,
                b_stride,
                c,
                c_at + i * c_stride + j,
                c_stride,
                depth,
            )
        j += vectors * lanes
