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
from numba import carray
from torch import Tensor

from longtail.engine.jit import callback, jit, one_process
from longtail.engine.lanes import LanePool
from longtail.engine.model import RopeTable
from longtail.engine.simd import (
    TILE_ROWS,
    TILE_VECTORS,
    VECTOR_BYTES,
    add,
    as_pointer,
    div,
    exp,
    fetch_add,
    fma,
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
from longtail.engine.team import FINISHED, NEXT, TICKET, Kernel, float_word, team_size, words

TILE = 16
"""Tokens of one work item of a prefill."""
CHUNK = 256
"""Positions whose scores are held at once; a multiple of every supported block size up to itself."""
_ALIGN = 16
_AHEAD = 2
"""Blocks between the one that is computed and the one that is fetched from memory."""
_PARALLEL_WORK = 200_000
"""Multiply-adds of one layer below which waking a second thread costs more than it brings."""

# Words of a kernel's argument block. The floats follow at _EPS and _SCALE as float64 bits.
(LAYER, WRITE, ATTEND, ITEMS, QKV, QKV_STRIDE, OUT, OUT_STRIDE, _TOKENS, _HEADS, _R, _H) = range(3, 15)
(_K, _V, _BLOCKS, _LAYERS, _BLOCK_TOKENS, _TABLES, _ROWS, _WIDTH) = range(15, 23)
(_SEGMENTS, _COS, _SIN, _ROPE_ROWS, Q_NORM, K_NORM, _SCRATCH, _SCRATCH_WORDS, _EPS, _SCALE) = range(23, 33)
WORDS = 33


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
        self._args = words(WORDS)()
        self._scratch = torch.empty(0, 0, dtype=pool.k.dtype)
        self._tokens, self._threads, self.decode = 0, 1, True
        self._alive: tuple = ()

    def begin(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Announce the flat batch: segment i is ``counts[i]`` tokens of row ``rows[i]`` from position ``starts[i]``.

        Raises ``ValueError`` if a lane does not reach a position that would be written.
        """
        if not self._pool.reaches(rows, starts + counts - 1):
            raise ValueError("a lane does not reach the positions to be written: grow or claim it first")
        pool, c, args = self._pool, self._pool.config, self._args
        R, H = c.heads_per_kv, c.head_dim
        ends = starts + counts
        self._tokens = int(counts.sum())
        self.decode = self._tokens == len(counts)
        segments = _tiles(rows, starts, counts, 1 if self.decode else TILE)
        self._threads = team_size() if int(counts @ ends) * pool.heads * R * H > _PARALLEL_WORK else 1
        tile_rows = (1 if self.decode else TILE) * R
        scratch_words = tile_rows * (2 * H + CHUNK + 2) + 2 * H
        if self._scratch.shape[0] < team_size() or self._scratch.shape[1] < scratch_words:
            self._scratch = torch.empty(team_size(), scratch_words, dtype=pool.k.dtype)
        cos, sin = self._rope.upto(int(ends.max()))
        self._alive = (segments, cos, sin, pool.tables)
        args[ITEMS] = len(segments) * pool.heads
        args[_TOKENS], args[_HEADS], args[_R], args[_H] = self._tokens, pool.heads, R, H
        args[_K], args[_V] = pool.k.data_ptr(), pool.v.data_ptr()
        args[_BLOCKS], args[_LAYERS], args[_BLOCK_TOKENS] = len(pool.k), c.layers, pool.block_tokens
        args[_TABLES], args[_ROWS], args[_WIDTH] = pool.tables.ctypes.data, len(pool.tables), pool.tables.shape[2]
        args[_SEGMENTS] = segments.ctypes.data
        args[_COS], args[_SIN], args[_ROPE_ROWS] = cos.data_ptr(), sin.data_ptr(), len(cos)
        args[_SCRATCH], args[_SCRATCH_WORDS] = self._scratch.data_ptr(), self._scratch.shape[1]
        args[_EPS], args[_SCALE] = float_word(c.rms_eps), float_word(H**-0.5)

    def __call__(self, layer: int, qkv_TE: Tensor, q_norm_H: Tensor | None, k_norm_H: Tensor | None) -> Tensor:
        qkv_TE = qkv_TE.contiguous()
        args, c = self._args, self._pool.config
        out_TQ = torch.empty(self._tokens, self._pool.heads * c.heads_per_kv * c.head_dim, dtype=qkv_TE.dtype)
        args[LAYER] = layer
        args[QKV], args[QKV_STRIDE] = qkv_TE.data_ptr(), qkv_TE.shape[1]
        args[OUT], args[OUT_STRIDE] = out_TQ.data_ptr(), out_TQ.shape[1]
        args[Q_NORM] = 0 if q_norm_H is None else q_norm_H.data_ptr()
        args[K_NORM] = 0 if k_norm_H is None else k_norm_H.data_ptr()
        if self.decode:
            self._run(write=1, attend=1)
        else:
            # All keys of the chunk must be in place before the first query of it.
            self._run(write=1, attend=0)
            self._run(write=0, attend=1)
        return out_TQ

    def announced(self) -> np.ndarray:
        """Words of the argument block that hold for every layer of this batch."""
        return np.ctypeslib.as_array(self._args)

    def _run(self, write: int, attend: int) -> None:
        args = self._args
        args[NEXT] = args[TICKET] = args[FINISHED] = 0
        args[WRITE], args[ATTEND] = write, attend
        compiled(self._pool.k.dtype).run(args, self._threads)


def _tiles(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, tile: int) -> np.ndarray:
    """int64 ``[n, 4]``: (row, first position, tokens, first flat token) of each tile, longest context first."""
    pieces = -(-counts // tile)
    owner = np.repeat(np.arange(len(counts)), pieces)
    within = (np.arange(len(owner)) - (np.cumsum(pieces) - pieces)[owner]) * tile
    segments = np.empty((len(owner), 4), np.int64)
    segments[:, 0] = rows[owner]
    segments[:, 1] = starts[owner] + within
    segments[:, 2] = np.minimum(counts[owner] - within, tile)
    segments[:, 3] = (np.cumsum(counts) - counts)[owner] + within
    return segments[np.argsort(-segments[:, 1], kind="stable")]


@functools.cache
def compiled(dtype: torch.dtype) -> Kernel:
    """The kernel for float32 or float64."""
    with one_process():
        return Kernel(_compile32() if dtype == torch.float32 else _compile64())


def _compile32():
    @callback
    def kernel32(pointer):
        attention_items(pointer, np.float32)

    return kernel32


def _compile64():
    @callback
    def kernel64(pointer):
        attention_items(pointer, np.float64)

    return kernel64


@jit
def attention_items(pointer, dtype):
    """A thread's part: take items until none is left.

    Returns the number of items; those that are done are counted in ``FINISHED``.
    """
    args = carray(pointer, WORDS, np.int64)
    heads, R, H = args[_HEADS], args[_R], args[_H]
    tokens, block_tokens = args[_TOKENS], args[_BLOCK_TOKENS]
    E, out_stride = args[QKV_STRIDE], args[OUT_STRIDE]
    qkv = carray(as_pointer(args[QKV]), tokens * E, dtype)
    out = carray(as_pointer(args[OUT]), tokens * out_stride, dtype)
    pool = args[_BLOCKS] * args[_LAYERS] * H * block_tokens
    k = carray(as_pointer(args[_K]), pool, dtype)
    v = carray(as_pointer(args[_V]), pool, dtype)
    tables = carray(as_pointer(args[_TABLES]), (args[_ROWS], heads, args[_WIDTH]), np.int32)
    segments = carray(as_pointer(args[_SEGMENTS]), (args[ITEMS] // heads, 4), np.int64)
    cos = carray(as_pointer(args[_COS]), args[_ROPE_ROWS] * (H // 2), dtype)
    sin = carray(as_pointer(args[_SIN]), args[_ROPE_ROWS] * (H // 2), dtype)
    q_norm = carray(as_pointer(args[Q_NORM]), H, dtype)
    k_norm = carray(as_pointer(args[K_NORM]), H, dtype)
    normed = args[Q_NORM] != 0
    words = args[_SCRATCH_WORDS]
    ticket = fetch_add(args, TICKET, 1)
    scratch = carray(as_pointer(args[_SCRATCH] + ticket * words * out.itemsize), words, dtype)
    floats = carray(pointer, WORDS, np.float64)
    eps, scale, one = dtype(floats[_EPS]), dtype(floats[_SCALE]), dtype(1.0)
    lanes, key = VECTOR_BYTES // scratch.itemsize, words - H
    no_lane = tables[0, 0, :0]
    done = 0
    item = fetch_add(args, NEXT, 1)
    while item < args[ITEMS]:
        # The next item is claimed already, so that its first blocks can be fetched while this one is computed.
        next_item = fetch_add(args, NEXT, 1)
        next_lane = tables[segments[next_item // heads, 0], next_item % heads] if next_item < args[ITEMS] else no_lane
        segment, head = segments[item // heads], item % heads
        row, start, count, flat = segment[0], segment[1], segment[2], segment[3]
        lane = tables[row, head]
        group = flat * E + head * (R + 2) * H
        if args[WRITE] != 0:
            for i in range(count):
                source = group + i * E + R * H
                at = (start + i) * (H // 2)
                _norm_rope(qkv, source, scratch, key, H, k_norm, normed, eps, cos, sin, at, one)
                if args[ATTEND] == 0:
                    block = lane[(start + i) // block_tokens] * args[_LAYERS] + args[LAYER]
                    _write(scratch, key, qkv, source + H, k, v, block, (start + i) % block_tokens, H, block_tokens)
        if args[ATTEND] != 0:
            for i in range(count):
                at = (start + i) * (H // 2)
                for r in range(R):
                    source, target = group + i * E + r * H, (i * R + r) * H
                    _norm_rope(qkv, source, scratch, target, H, q_norm, normed, eps, cos, sin, at, scale)
            value = group + (R + 1) * H if args[WRITE] != 0 else -1
            _attend(
                scratch,
                k,
                v,
                lane,
                next_lane,
                start,
                count,
                R,
                H,
                block_tokens,
                args[LAYER],
                args[_LAYERS],
                one,
                key,
                qkv,
                value,
            )
            rows = count * R
            for i in range(count):
                target = (flat + i) * out_stride + head * R * H
                for j in range(0, R * H, lanes):
                    store(out, target + j, load(scratch, (rows + i * R) * H + j))
        done += 1
        item = next_item
    fetch_add(args, FINISHED, done)
    return args[ITEMS]


@jit
def _norm_rope(source, at, target, to, H, weight, normed, eps, cos, sin, angle, scale):
    """RMS norm (if any), rotation of (i, i + H/2) pairs, and the softmax scale, of one head."""
    lanes = VECTOR_BYTES // source.itemsize
    half = H // 2
    factor = splat(scale)
    if normed:
        squares = sub(factor, factor)
        for h in range(0, H, lanes):
            x = load(source, at + h)
            squares = fma(x, x, squares)
        factor = splat(scale / np.sqrt(total(squares) / source.dtype.type(H) + eps))
    for h in range(0, half, lanes):
        a, b = mul(load(source, at + h), factor), mul(load(source, at + half + h), factor)
        if normed:
            a, b = mul(a, load(weight, h)), mul(b, load(weight, half + h))
        c, s = load(cos, angle + h), load(sin, angle + h)
        store(target, to + h, sub(mul(a, c), mul(b, s)))
        store(target, to + half + h, fma(b, c, mul(a, s)))


@jit
def _write(key, key_at, value, value_at, k, v, block, at, H, block_tokens):
    """Put one key and value at position ``at`` of a block (of a layer)."""
    base = block * H * block_tokens
    for h in range(H):
        k[base + h * block_tokens + at] = key[key_at + h]
    for h in range(0, H, VECTOR_BYTES // v.itemsize):
        store(v, base + at * H + h, load(value, value_at + h))


@jit
def _attend(
    scratch, k, v, lane, next_lane, start, count, R, H, block_tokens, layer, layers, one, key_at, value, value_at
):
    """Softmax attention of ``count * R`` query rows, at ``scratch[0:]``, into ``scratch[rows * H :]``.

    The rest of ``scratch`` holds scores ``[rows, CHUNK]``, and each row's running maximum and sum. A key and value of
    the last position that are still to be written (``value_at`` >= 0) are, when their block has come into cache.
    """
    lanes, zero = VECTOR_BYTES // scratch.itemsize, one - one
    rows = count * R
    out, scores = rows * H, 2 * rows * H
    top, mass = scores + rows * CHUNK, scores + rows * CHUNK + rows
    for i in range(0, rows * H, lanes):
        store(scratch, out + i, splat(zero))
    for i in range(rows):
        scratch[top + i] = -np.inf
        scratch[mass + i] = zero
    size = H * block_tokens
    end = start + count
    # Blocks lie anywhere in memory: keys are fetched two blocks ahead, then the first values, and so on.
    values = (v.ctypes.data - k.ctypes.data) // k.itemsize
    for chunk in range(0, end, CHUNK):
        first = chunk // block_tokens
        blocks = min(CHUNK, end - chunk + block_tokens - 1) // block_tokens
        for b in range(blocks):
            base = (lane[first + b] * layers + layer) * size
            if b + _AHEAD < blocks:
                ahead = (lane[first + b + _AHEAD] * layers + layer) * size - base
            else:
                ahead = (lane[first + max(0, b + _AHEAD - blocks)] * layers + layer) * size - base + values
            if value_at >= 0 and chunk + (b + 1) * block_tokens >= end:
                at = (end - 1) % block_tokens
                _write(scratch, key_at, value, value_at, k, v, base // size, at, H, block_tokens)
            to = scores + b * block_tokens
            _gemm(False, rows, block_tokens, scratch, 0, H, k, base, block_tokens, ahead, scratch, to, CHUNK, H)
        for i in range(rows):
            valid = min(start + i // R + 1 - chunk, blocks * block_tokens)
            row = scores + i * CHUNK
            _softmax_row(scratch, row, blocks * block_tokens, valid, top + i, mass + i, out + i * H, H, zero)
        for b in range(blocks):
            base = (lane[first + b] * layers + layer) * size
            ahead = 0
            if b + _AHEAD < blocks:
                ahead = (lane[first + b + _AHEAD] * layers + layer) * size - base
            elif chunk + CHUNK < end:
                ahead = (lane[first + b + _AHEAD] * layers + layer) * size - base - values
            elif b + _AHEAD - blocks < len(next_lane) and next_lane[b + _AHEAD - blocks] >= 0:
                ahead = (next_lane[b + _AHEAD - blocks] * layers + layer) * size - base - values
            weights = scores + b * block_tokens
            _gemm(True, rows, H, scratch, weights, CHUNK, v, base, H, ahead, scratch, out, H, block_tokens)
    for i in range(rows):
        inverse = div(splat(one), splat(scratch[mass + i]))
        for h in range(0, H, lanes):
            store(scratch, out + i * H + h, mul(load(scratch, out + i * H + h), inverse))


@jit
def _softmax_row(scratch, row, width, valid, top, mass, out, H, nothing):
    """Turn the first ``valid`` scores of a row into weights, the others into 0; rescale what is summed so far."""
    lanes = VECTOR_BYTES // scratch.itemsize
    zero = splat(nothing)
    if valid <= 0:
        for j in range(0, width, lanes):
            store(scratch, row + j, zero)
        return
    for j in range(valid, width):
        scratch[row + j] = -np.inf
    high = load(scratch, row)
    for j in range(lanes, width, lanes):
        high = maximum(high, load(scratch, row + j))
    old = scratch[top]
    new = max(largest(high), old)
    shift, summed = splat(new), zero
    for j in range(0, width, lanes):
        weight = exp(sub(load(scratch, row + j), shift))
        store(scratch, row + j, weight)
        summed = add(summed, weight)
    if new > old:
        decay = exp(splat(old - new))
        scratch[mass] *= largest(decay)
        for h in range(0, H, lanes):
            store(scratch, out + h, mul(load(scratch, out + h), decay))
        scratch[top] = new
    scratch[mass] += total(summed)


@jit
def _gemm(accumulate, rows, columns, a, a_at, a_stride, b, b_at, b_stride, ahead, c, c_at, c_stride, depth):
    """``c[rows, columns] (+)= a[rows, depth] @ b[depth, columns]``; ``columns`` is a multiple of a vector.

    Meanwhile what lies ``ahead`` of ``b`` is fetched into cache.
    """
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
                ahead if i == 0 else 0,
                c,
                c_at + i * c_stride + j,
                c_stride,
                depth,
            )
        j += vectors * lanes
