"""Sums of gradients that have the same bits in whatever order, and by whichever ranks, they are added up.

Every addend is first rounded to a multiple of ``GRID``, in float64 (reproducible summation by rounding before adding:
Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", 2013). A multiple of the grid of at most ``EXACT`` has
no more than 53 bits. So, as long as the magnitudes of an element's addends add up to no more than ``EXACT``, no
addition rounds: all orders, and all ways to share the addends out and add up the shares, end with the same bits.
Beyond that, additions round as those of float64 do, by 1e-16 of the sum: it is still right, but its last bits depend
on the order. NaN and infinities stay what they are.

Why 2**-45: losses are means over a step's tokens, and gradients are clipped to a norm near 1, so ``EXACT`` = 256 for a
single weight is far off. Below, an addend changes by at most 1.4e-14. AdamW divides by a root of mean squares plus
``eps``, so that moves a weight by 1.4e-6 of a learning rate at most, at the default ``eps`` of 1e-8. A float32 gradient
of 2.4e-7 or more is on the grid as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray
from torch import Tensor

from longtail.core.comm import Communicator
from longtail.engine.jit import callback, jit, one_process
from longtail.engine.simd import VECTOR_BYTES, as_pointer, fetch_add, fma, load, splat, total
from longtail.engine.simd import add as add_vectors
from longtail.engine.team import NEXT, Kernel, team_size, words

GRID = 2.0**-45
EXACT = 2.0**53 * GRID
BLOCK = 4096
"""Elements whose squares are added up together; bounds of shards are multiples of it."""
PIECE = 1 << 22
"""Elements (32 MiB) that a rank receives at once while sums are added up, and that CUDA rounds at once."""

_UP = 1 / GRID
_LANES = VECTOR_BYTES // 8
_ITEM = 16 * BLOCK
"""Elements of one work item of :func:`add`, and that :func:`narrow` rounds at once: they stay in cache."""
(COUNT, SUMS, SOURCE) = range(3, 6)
WORDS = 6
_Args = words(WORDS)


def add(sums: Tensor, addend: Tensor) -> None:
    """``sums += addend``, rounded to the grid; ``sums`` is float64, contiguous, and has as many elements."""
    sums, addend = sums.detach().view(-1), addend.detach().reshape(-1)
    if sums.numel() != addend.numel():
        raise ValueError(f"{addend.numel()} elements cannot be added to {sums.numel()}")
    if not sums.is_cpu:
        _add_elementwise(sums, addend)
        return
    if addend.dtype != torch.float64:
        addend = addend.float()
    args = _Args(0, 0, 0, sums.numel(), sums.data_ptr(), addend.data_ptr())
    _adder(addend.dtype).run(args, team_size() if sums.numel() > _ITEM else 1)


def _add_elementwise(sums: Tensor, addend: Tensor) -> None:
    """:func:`add` on any device."""
    for some, more in zip(sums.split(PIECE), addend.split(PIECE), strict=True):
        some.add_(more.to(torch.float64, copy=True).mul_(_UP).round_().mul_(GRID))


def reduce_shards(comm: Communicator, sums: Tensor, bounds: Sequence[tuple[int, int]]) -> None:
    """Add up ``sums[slice(*bounds[r])]`` of all ranks on rank r; outside its bounds a rank's ``sums`` stay as they are.

    Half the bytes of an ``all_reduce_sum``. The sums are exact as long as :func:`add` was, over all ranks together.
    """
    if comm.size == 1:
        return
    step = max(1, PIECE // comm.size)

    def part(rank: int, at: int) -> Tensor:
        start, end = bounds[rank]
        return sums[min(start + at, end) : min(start + at + step, end)]

    for at in range(0, max(end - start for start, end in bounds), step):
        mine = part(comm.rank, at)
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        arrived = {rank: torch.empty_like(mine) for rank in others}
        comm.exchange(
            [[part(rank, at)] if rank in arrived else [] for rank in range(comm.size)],
            [[arrived[rank]] if rank in arrived else [] for rank in range(comm.size)],
        )
        for addend in arrived.values():
            mine.add_(addend)


def global_norm(comm: Communicator, shard: Tensor) -> float:
    """The Euclidean norm of all ranks' shards, one after the other; the same bits however many ranks share them.

    Each shard but the last is a multiple of ``BLOCK`` elements. NaN or infinite if the sum of squares is.
    """
    squares = comm.all_gather_bytes(block_squares(shard).tobytes())
    try:
        return math.sqrt(math.fsum(np.frombuffer(b"".join(squares), np.float64).tolist()))
    except OverflowError:
        return math.inf


def narrow(sums: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``scale * sums``, rounded to ``dtype``, in the memory of ``sums``: what was in it is gone."""
    if dtype == sums.dtype:
        return sums.mul_(scale)
    out, step = sums.view(dtype)[: len(sums)], _ITEM if sums.is_cpu else PIECE
    for at in range(0, len(sums), step):  # ends no later in memory than what has been read
        out[at : at + step] = (sums[at : at + step] * scale).to(dtype)
    return out


def block_squares(shard: Tensor) -> np.ndarray:
    """The sum of squares of each ``BLOCK`` elements, in an order that depends on nothing else, float64.

    ``shard`` is float64, 1-D; its last block may be shorter.
    """
    blocks = -(-len(shard) // BLOCK)
    if shard.is_cpu:
        whole = len(shard) // (4 * _LANES) * 4 * _LANES
        if whole < len(shard):
            raise ValueError(f"a shard of {len(shard)} elements is no multiple of {4 * _LANES}")
        out = np.empty(blocks)
        args = _Args(0, 0, 0, len(shard), out.ctypes.data, shard.data_ptr())
        _squarer().run(args, team_size() if len(shard) > _ITEM else 1)
        return out
    return _block_squares_elementwise(shard).cpu().numpy()


def _block_squares_elementwise(shard: Tensor) -> Tensor:
    """:func:`block_squares` on any device: elementwise, so that the order of additions is known."""
    sums = []
    for part in shard.split(PIECE):
        squares = F.pad(part * part, (0, -len(part) % BLOCK)).view(-1, BLOCK)
        while squares.shape[1] > 1:
            half = squares.shape[1] // 2
            squares = squares[:, :half] + squares[:, half:]
        sums.append(squares[:, 0])
    return torch.cat(sums)


@functools.cache
def _adder(dtype: torch.dtype) -> Kernel:
    with one_process():
        return Kernel(_compile_add32() if dtype == torch.float32 else _compile_add64())


def _compile_add32():
    @callback
    def add32(pointer):
        _add_items(pointer, np.float32)

    return add32


def _compile_add64():
    @callback
    def add64(pointer):
        _add_items(pointer, np.float64)

    return add64


@jit
def _add_items(pointer, dtype):
    args = carray(pointer, WORDS, np.int64)
    count = args[COUNT]
    sums = carray(as_pointer(args[SUMS]), count, np.float64)
    source = carray(as_pointer(args[SOURCE]), count, dtype)
    while True:
        start = fetch_add(args, NEXT, 1) * _ITEM
        if start >= count:
            break
        end = min(count, start + _ITEM)
        some, more = sums[start:end], source[start:end]
        for i in range(end - start):
            some[i] += np.rint(np.float64(more[i]) * _UP) * GRID


@functools.cache
def _squarer() -> Kernel:
    with one_process():
        return Kernel(_compile_squares())


def _compile_squares():
    @callback
    def squares(pointer):
        _square_items(pointer)

    return squares


@jit
def _square_items(pointer):
    """Four chains of additions per lane, and a fixed tree over them."""
    args = carray(pointer, WORDS, np.int64)
    count = args[COUNT]
    out = carray(as_pointer(args[SUMS]), (count + BLOCK - 1) // BLOCK, np.float64)
    source = carray(as_pointer(args[SOURCE]), count, np.float64)
    while True:
        block = fetch_add(args, NEXT, 1)
        if block * BLOCK >= count:
            break
        a = splat(np.float64(0.0))
        b, c, d = a, a, a
        for at in range(block * BLOCK, min(count, (block + 1) * BLOCK), 4 * _LANES):
            v = load(source, at)
            a = fma(v, v, a)
            v = load(source, at + _LANES)
            b = fma(v, v, b)
            v = load(source, at + 2 * _LANES)
            c = fma(v, v, c)
            v = load(source, at + 3 * _LANES)
            d = fma(v, v, d)
        out[block] = total(add_vectors(add_vectors(a, b), add_vectors(c, d)))
