"""Drawing tokens where each rank of a group has the logits of its own part of the vocabulary.

The same draws as :mod:`longtail.engine.sampling`, bit for bit, from three small gathers: the largest logit of each row
(with its lowest id), the sums of each draw's weights over blocks of the vocabulary, and the token, which the rank that
has its block finds. Sums over blocks go in the order of the vocabulary on every rank. Draws with top-k or top-p are not
made here: they need all logits in one place.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch
from numba import carray
from torch import Tensor

from longtail.core.comm import Communicator
from longtail.engine.jit import callback, jit, one_process
from longtail.engine.sampling import (
    BLOCK,
    NOT_FINITE,
    PARALLEL_LOGITS,
    Draws,
    argmax,
    find,
    inverse_of,
    locate,
    logprob,
    plain_logits,
    uniform,
    weigh_block,
)
from longtail.engine.shard import Bounds
from longtail.engine.simd import as_pointer, fetch_add
from longtail.engine.team import NEXT, TICKET, Kernel, team_size, words

(_ITEMS, _PHASE, _V, _FIRST, _ROWS, _LOGITS, _INDEX, _SEEDS, _POSITIONS, _TEMPERATURE) = range(3, 13)
(_PEAKS, _SUMS, _BLOCKS, _DRAWN, _OWNERS, _SCRATCH) = range(13, 19)
_WORDS = 19
_Args = words(_WORDS)
_PEAK, _WEIGH, _DRAW = range(3)
"""Phases: items are rows of logits in the first, then draws."""
_EVERYONE = -1
"""Owner of a draw that every rank can make."""


class ShardedSampler:
    """Draws from logits of which rank r has the tokens ``vocab[r]``, whole blocks of ``sampling.BLOCK`` (the last may
    be shorter). Calls are collective, with arguments that are equal but for the logits; so are the results."""

    def __init__(self, comm: Communicator, vocab: list[Bounds]) -> None:
        self._comm = comm
        self._first, last = vocab[comm.rank]
        self._tokens = last - self._first
        self._blocks = [(first // BLOCK, -(-last // BLOCK)) if last > first else (0, 0) for first, last in vocab]
        self._total_blocks = -(-vocab[-1][1] // BLOCK)

    def __call__(
        self,
        logits_UN: Tensor,
        index: np.ndarray,
        *,
        seeds: np.ndarray,
        positions: np.ndarray,
        temperature: np.ndarray,
    ) -> Draws:
        """Draw i uses row ``index[i]`` of ``logits_UN`` and element i of every other array."""
        logits_UN = plain_logits(logits_UN)
        n, U, rank = len(index), len(logits_UN), self._comm.rank
        threads = team_size() if n > 1 and n * self._tokens > PARALLEL_LOGITS else 1
        first, last = self._blocks[rank]
        draw_of = [
            np.ascontiguousarray(index, np.int64),
            np.ascontiguousarray(seeds, np.uint64),
            np.ascontiguousarray(positions, np.int64),
            np.ascontiguousarray(temperature, np.float64),
        ]
        peaks_U2, sums_nB = np.empty((U, 2)), np.zeros((n, self._total_blocks))
        drawn_n2, owners = np.zeros((n, 2)), np.empty(n, np.int64)
        scratch = torch.empty(threads, BLOCK, dtype=logits_UN.dtype)
        args = _Args(*(0, 0, 0), U, _PEAK, self._tokens, self._first, U, logits_UN.data_ptr())
        args[_INDEX : _TEMPERATURE + 1] = [array.ctypes.data for array in draw_of]
        args[_PEAKS], args[_SUMS], args[_BLOCKS] = peaks_U2.ctypes.data, sums_nB.ctypes.data, self._total_blocks
        args[_DRAWN], args[_OWNERS], args[_SCRATCH] = drawn_n2.ctypes.data, owners.ctypes.data, scratch.data_ptr()

        def run(phase: int) -> None:
            args[NEXT] = args[TICKET] = 0
            args[_PHASE], args[_ITEMS] = phase, U if phase == _PEAK else n
            compiled(logits_UN.dtype).run(args, threads)

        run(_PEAK)
        peaks_RU2 = np.stack(self._gather(peaks_U2, [U * 2] * self._comm.size)).reshape(-1, U, 2)
        peaks_U2[:] = peaks_RU2[np.argmax(peaks_RU2[:, :, 0], axis=0), np.arange(U)]
        run(_WEIGH)
        widths = [last - first for first, last in self._blocks]
        parts = self._gather(sums_nB[:, first:last], [n * width for width in widths])
        np.concatenate([part.reshape(n, -1) for part in parts if len(part)], axis=1, out=sums_nB)
        run(_DRAW)
        if (owners != _EVERYONE).any():
            drawn_Rn2 = np.stack(self._gather(drawn_n2, [n * 2] * self._comm.size)).reshape(-1, n, 2)
            ranks = self._rank_of(owners)
            drawn_n2 = drawn_Rn2[np.where(owners == _EVERYONE, rank, ranks), np.arange(n)]
        return Draws(drawn_n2[:, 0].astype(np.int64), drawn_n2[:, 1].copy())

    def _rank_of(self, blocks: np.ndarray) -> np.ndarray:
        ends = np.maximum.accumulate([last for _, last in self._blocks])
        return np.searchsorted(ends, blocks, side="right")

    def _gather(self, part: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
        """What each rank has, flat."""
        ends = np.cumsum([0, *lengths]).tolist()
        bounds = list(itertools.pairwise(ends))
        device = getattr(self._comm, "device", torch.device("cpu"))
        flat = torch.empty(ends[-1], dtype=torch.float64)
        flat[slice(*bounds[self._comm.rank])] = torch.from_numpy(part).flatten()
        flat = flat.to(device)
        self._comm.all_gather_shards(flat, bounds)
        return [flat.cpu().numpy()[a:b] for a, b in bounds]


@functools.cache
def compiled(dtype: torch.dtype) -> Kernel:
    """The kernel for float32 or float64."""
    with one_process():
        return Kernel(_compile32() if dtype == torch.float32 else _compile64())


def _compile32():
    @callback
    def sharded_sample32(pointer):
        _team_member(pointer, np.float32)

    return sharded_sample32


def _compile64():
    @callback
    def sharded_sample64(pointer):
        _team_member(pointer, np.float64)

    return sharded_sample64


@jit
def _team_member(pointer, dtype):
    """Do items of one phase until none is left."""
    args = carray(pointer, _WORDS, np.int64)
    phase, items, rows = args[_PHASE], args[_ITEMS], args[_ROWS]
    V, first, blocks = args[_V], args[_FIRST], args[_BLOCKS]
    logits = carray(as_pointer(args[_LOGITS]), rows * V, dtype)
    peaks = carray(as_pointer(args[_PEAKS]), (rows, 2), np.float64)
    index = carray(as_pointer(args[_INDEX]), items, np.int64)
    seeds = carray(as_pointer(args[_SEEDS]), items, np.uint64)
    positions = carray(as_pointer(args[_POSITIONS]), items, np.int64)
    temperature = carray(as_pointer(args[_TEMPERATURE]), items, np.float64)
    sums = carray(as_pointer(args[_SUMS]), (items, blocks), np.float64)
    drawn = carray(as_pointer(args[_DRAWN]), (items, 2), np.float64)
    owners = carray(as_pointer(args[_OWNERS]), items, np.int64)
    ticket = fetch_add(args, TICKET, 1)
    weights = carray(as_pointer(args[_SCRATCH] + ticket * BLOCK * logits.itemsize), BLOCK, dtype)
    mine = first // BLOCK
    while True:
        i = fetch_add(args, NEXT, 1)
        if i >= items:
            return
        if phase == _PEAK:
            peaks[i, 0], peaks[i, 1] = -np.inf, first
            if V > 0:
                best = argmax(logits, i * V, V, dtype(-np.inf))
                if not np.isnan(logits[i * V + best]):  # a NaN shows in the sums
                    peaks[i, 0], peaks[i, 1] = logits[i * V + best], first + best
            continue
        at, T = index[i] * V, temperature[i]
        top, inverse = dtype(peaks[index[i], 0]), dtype(inverse_of(T))
        if phase == _WEIGH:
            for b in range((V + BLOCK - 1) // BLOCK):
                sums[i, mine + b] = weigh_block(logits, at, V, b, top, inverse, weights, 0)
            continue
        mass = 0.0
        for b in range(blocks):
            mass += sums[i, b]
        owners[i] = _EVERYONE
        if not np.isfinite(mass):
            drawn[i, 0], drawn[i, 1] = NOT_FINITE, np.nan
        elif T <= 0:
            drawn[i, 0], drawn[i, 1] = peaks[index[i], 1], logprob(top, top, T, mass)
        else:
            target = uniform(seeds[i], positions[i]) * mass
            block, running = locate(sums[i], blocks, target)
            owners[i] = block
            if mine <= block < mine + (V + BLOCK - 1) // BLOCK:
                weigh_block(logits, at, V, block - mine, top, inverse, weights, 0)
                token = (block - mine) * BLOCK + find(weights, 0, running, target)
                drawn[i, 0], drawn[i, 1] = first + token, logprob(logits[at + token], top, T, mass)
