"""Drawing tokens: a pure function of (logits row, parameters, seed, position), whatever else is in the batch.

Definition. With logits l, temperature T and m = max l, a token's weight is w = exp((l - m) / T). Order tokens by
(logit descending, id ascending); top-k keeps the first k, then top-p the shortest prefix that holds the share p of
their weight, and always one. With u = :func:`uniform` (seed, position) the drawn token is the first, in vocabulary
order, at which the running sum of kept weights exceeds u times their total. T = 0 takes the first in the order above.
``position`` counts from the start of the prompt: the n-th generated token (from 0) has position prompt length + n.

Log-probabilities are those of the full vocabulary at temperature T (1 for greedy), before any filter.

Sums are float64, in blocks of ``BLOCK`` tokens, then over blocks: ranks that hold whole blocks of the vocabulary need
exchange only the maximum (with its lowest id) and their block sums to draw the same token.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from longtail.engine.jit import callback, jit, one_process
from longtail.engine.simd import (
    VECTOR_BYTES,
    as_pointer,
    exp,
    fetch_add,
    largest,
    load,
    maximum,
    mul,
    splat,
    store,
    sub,
    total64,
)
from longtail.engine.team import NEXT, TICKET, Kernel, team_size, words

BLOCK = 256
_BINS = 1024
_LOWEST_WEIGHT_EXPONENT = 87.0
PARALLEL_LOGITS = 100_000
"""Logits of one call below which waking a second thread costs more than it brings."""

(_ITEMS, _V, _ROWS, _LOGITS, _INDEX, _SEEDS, _POSITIONS, _TEMPERATURE) = range(3, 11)
(_TOP_K, _TOP_P, _TOKENS, _LOGPROBS, _SCRATCH, _SUMS) = range(11, 17)
_WORDS = 17
_Args = words(_WORDS)

NOT_FINITE = -1


class Draws(NamedTuple):
    """``tokens`` int64 and ``logprobs`` float64, one per draw. A token is NOT_FINITE where the logits hold a NaN,
    an infinity, or nothing but -inf."""

    tokens: np.ndarray
    logprobs: np.ndarray


class Sampler:
    """Draws from logits over ``vocab_size`` tokens; holds scratch memory only."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._padded = -(-vocab_size // BLOCK) * BLOCK
        self._scratch: dict[type, np.ndarray] = {}
        self._sums = np.empty((0, 0), np.float64)

    def __call__(
        self,
        logits_UV: Tensor,
        index: np.ndarray,
        *,
        seeds: np.ndarray,
        positions: np.ndarray,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
    ) -> Draws:
        """Draw i uses row ``index[i]`` of ``logits_UV`` and element i of every other array."""
        logits_UV = plain_logits(logits_UV)
        n, V = len(index), self._vocab_size
        threads = team_size() if n > 1 and n * V > PARALLEL_LOGITS else 1
        dtype = np.float32 if logits_UV.dtype == torch.float32 else np.float64
        scratch = self._scratch.get(dtype)
        if scratch is None or len(scratch) < threads:
            scratch = self._scratch[dtype] = np.empty((threads, self._padded + BLOCK), dtype)
            self._sums = np.empty((threads, self._padded // BLOCK + 2 * _BINS), np.float64)
        arrays = [
            np.ascontiguousarray(index, np.int64),
            np.ascontiguousarray(seeds, np.uint64),
            np.ascontiguousarray(positions, np.int64),
            np.ascontiguousarray(temperature, np.float64),
            np.ascontiguousarray(top_k, np.int64),
            np.ascontiguousarray(top_p, np.float64),
        ]
        draws = Draws(np.empty(n, np.int64), np.empty(n, np.float64))
        args = _Args(
            *(0, 0, 0),
            n,
            V,
            logits_UV.shape[0],
            logits_UV.data_ptr(),
            *(a.ctypes.data for a in (*arrays, draws.tokens, draws.logprobs, scratch, self._sums)),
        )
        compiled(logits_UV.dtype).run(args, threads)
        return draws


def plain_logits(logits_UV: Tensor) -> Tensor:
    """As the kernels take them: contiguous, on the CPU, float32 or float64."""
    if logits_UV.dtype not in (torch.float32, torch.float64):
        logits_UV = logits_UV.float()
    return logits_UV.cpu().contiguous()


def filters(top_k: np.ndarray, top_p: np.ndarray, vocab_size: int) -> bool:
    """Whether any draw is from less than the whole vocabulary."""
    return bool((((top_k > 0) & (top_k < vocab_size)) | (top_p < 1)).any())


@jit
def _mix(z):
    """SplitMix64's output function."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@jit
def uniform(seed, position):
    """A float64 in [0, 1) for uint64 ``seed`` and ``position``: element ``position`` of SplitMix64's stream."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    bits = _mix(_mix(seed + golden) + golden * (np.uint64(position) + np.uint64(1)))
    return np.float64(bits >> np.uint64(11)) * 2.0**-53


@functools.cache
def compiled(dtype: torch.dtype) -> Kernel:
    """The kernel for float32 or float64."""
    with one_process():
        return Kernel(_compile32() if dtype == torch.float32 else _compile64())


def _compile32():
    @callback
    def sample32(pointer):
        _team_member(pointer, np.float32)

    return sample32


def _compile64():
    @callback
    def sample64(pointer):
        _team_member(pointer, np.float64)

    return sample64


@jit
def _team_member(pointer, dtype):
    """Draw until no draw is left."""
    args = carray(pointer, _WORDS, np.int64)
    n, V = args[_ITEMS], args[_V]
    logits = carray(as_pointer(args[_LOGITS]), args[_ROWS] * V, dtype)
    index = carray(as_pointer(args[_INDEX]), n, np.int64)
    seeds = carray(as_pointer(args[_SEEDS]), n, np.uint64)
    positions = carray(as_pointer(args[_POSITIONS]), n, np.int64)
    temperature = carray(as_pointer(args[_TEMPERATURE]), n, np.float64)
    top_k = carray(as_pointer(args[_TOP_K]), n, np.int64)
    top_p = carray(as_pointer(args[_TOP_P]), n, np.float64)
    tokens = carray(as_pointer(args[_TOKENS]), n, np.int64)
    logprobs = carray(as_pointer(args[_LOGPROBS]), n, np.float64)
    ticket = fetch_add(args, TICKET, 1)
    blocks = (V + BLOCK - 1) // BLOCK
    words = (blocks + 1) * BLOCK
    weights = carray(as_pointer(args[_SCRATCH] + ticket * words * logits.itemsize), words, dtype)
    sums = carray(as_pointer(args[_SUMS] + ticket * (blocks + 2 * _BINS) * 8), blocks + 2 * _BINS, np.float64)
    while True:
        i = fetch_add(args, NEXT, 1)
        if i >= n:
            return
        at = index[i] * V
        T = temperature[i]
        best = argmax(logits, at, V, dtype(-np.inf))
        top = logits[at + best]
        mass = _weigh(logits, at, V, top, dtype(inverse_of(T)), weights, sums)
        if not np.isfinite(mass):
            tokens[i] = NOT_FINITE
            logprobs[i] = np.nan
            continue
        token = best
        if T > 0:
            kept = mass
            if (0 < top_k[i] < V) or top_p[i] < 1:
                kept = _filter(logits, at, V, top, T, top_k[i], top_p[i], weights, sums)
            target = uniform(seeds[i], positions[i]) * kept
            block, running = locate(sums, blocks, target)
            token = block * BLOCK + find(weights, block * BLOCK, running, target)
        tokens[i] = token
        logprobs[i] = logprob(logits[at + token], top, T, mass)


@jit
def argmax(logits, at, V, lowest):
    """Lowest id of the largest logit (0 if there is none)."""
    lanes = VECTOR_BYTES // logits.itemsize
    best, where = lowest, 0
    for start in range(0, V, BLOCK):
        end = min(start + BLOCK, V)
        whole = start + (end - start) // lanes * lanes
        high = splat(lowest)
        for j in range(start, whole, lanes):
            high = maximum(load(logits, at + j), high)
        top = largest(high)
        for j in range(whole, end):
            top = max(top, logits[at + j])
        if top > best:
            best, where = top, start
    for j in range(where, min(where + BLOCK, V)):
        if logits[at + j] == best:
            return j
    return 0


@jit
def inverse_of(T):
    """What logits are multiplied by; greedy draws report the distribution at temperature 1."""
    return min(1.0 / T, 1e30) if T > 0 else 1.0


@jit
def logprob(logit, top, T, mass):
    return (np.float64(logit) - np.float64(top)) / (T if T > 0 else 1.0) - np.log(mass)


@jit
def _weigh(logits, at, V, top, inverse, weights, sums):
    """Fill ``weights`` (0 beyond V) and the sum of each block; returns the total."""
    everything = 0.0
    for b in range((V + BLOCK - 1) // BLOCK):
        sums[b] = weigh_block(logits, at, V, b, top, inverse, weights, b * BLOCK)
        everything += sums[b]
    return everything


@jit
def weigh_block(logits, at, V, b, top, inverse, weights, to):
    """Put the weights of block ``b`` (0 beyond V) at ``weights[to:]``; returns their sum."""
    lanes = VECTOR_BYTES // logits.itemsize
    shift, factor = splat(top), splat(inverse)
    block, first = 0.0, b * BLOCK
    for j in range(0, BLOCK, lanes):
        if first + j + lanes <= V:
            weight = exp(mul(sub(load(logits, at + first + j), shift), factor))
        else:
            for k in range(lanes):
                weights[to + j + k] = logits[at + first + j + k] if first + j + k < V else -np.inf
            weight = exp(mul(sub(load(weights, to + j), shift), factor))
        store(weights, to + j, weight)
        block += total64(weight)
    return block


@jit
def locate(sums, blocks, target):
    """The block of the first token at which the running sum exceeds ``target``, and the sum before it.

    If by rounding there is none, the last block with any weight, and -inf.
    """
    running, last = 0.0, 0
    for b in range(blocks):
        if running + sums[b] > target:
            return b, running
        running += sums[b]
        if sums[b] > 0:
            last = b
    return last, -np.inf


@jit
def find(weights, at, running, target):
    """In a block at ``weights[at:]``: the first token at which the sum exceeds ``target``; else, by rounding, the last
    one with any weight."""
    last = 0
    for j in range(BLOCK):
        if weights[at + j] > 0:
            last = j
            running += weights[at + j]
            if running > target:
                return j
    return last


@jit
def _filter(logits, at, V, top, T, top_k, top_p, weights, sums):
    """Set the weights of tokens outside top-k and top-p to 0; returns what the others weigh.

    The last kept token is found by a histogram over logits and by sorting the one bin that the limit falls into.
    """
    blocks = (V + BLOCK - 1) // BLOCK
    counts, masses = sums[blocks : blocks + _BINS], sums[blocks + _BINS : blocks + 2 * _BINS]
    counts[:] = 0
    masses[:] = 0
    width = 0.0
    for j in range(V):
        distance = np.float64(top) - np.float64(logits[at + j])
        if distance < np.inf and distance > width:
            width = distance
    width = min(width, _LOWEST_WEIGHT_EXPONENT * T)
    per = (_BINS - 1) / width if width > 1e-200 else 0.0
    for j in range(V):
        b = _bin(top, logits[at + j], per)
        if b >= 0:
            counts[b] += 1
            masses[b] += weights[j]
    k = np.sum(counts)
    if top_k > 0:
        k = min(k, np.float64(top_k))
    last_bin, seen, mass = 0, 0.0, 0.0
    for b in range(_BINS):
        if counts[b] > 0:
            last_bin = b
            if seen + counts[b] >= k:
                break
            seen += counts[b]
            mass += masses[b]
    members = _sorted_bin(logits, at, V, top, per, last_bin)
    count = min(len(members), int(k - seen))
    for j in members[:count]:
        mass += weights[j]
    cut = members[count - 1]
    if top_p < 1:
        goal, running = top_p * mass, 0.0
        p_bin = last_bin
        for b in range(last_bin):
            if counts[b] > 0 and running + masses[b] >= goal:
                p_bin = b
                break
            running += masses[b]
        if p_bin != last_bin:
            members = _sorted_bin(logits, at, V, top, per, p_bin)
            count = len(members)
        for j in members[:count]:
            cut = j
            running += weights[j]
            if running >= goal:
                break
    limit = logits[at + cut]
    kept = 0.0
    for b in range(blocks):
        block = 0.0
        for j in range(b * BLOCK, min((b + 1) * BLOCK, V)):
            logit = logits[at + j]
            if logit < limit or (logit == limit and j > cut):
                weights[j] = 0
            block += weights[j]
        sums[b] = block
        kept += block
    return kept


@jit
def _bin(top, logit, per):
    """Bin of a logit, falling with it; -1 for -inf."""
    distance = np.float64(top) - np.float64(logit)
    if distance == np.inf:
        return -1
    return int(min(_BINS - 1.0, distance * per))


@jit
def _sorted_bin(logits, at, V, top, per, which):
    """Tokens of one bin by (logit descending, id ascending)."""
    members = np.empty(V, np.int64)
    n = 0
    for j in range(V):
        if _bin(top, logits[at + j], per) == which:
            members[n] = j
            n += 1
    members = members[:n]
    keys = np.empty(n, np.float64)
    for i in range(n):
        keys[i] = -np.float64(logits[at + members[i]])
    return members[np.argsort(keys, kind="mergesort")]
