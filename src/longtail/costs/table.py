"""The cost table: what work of one model costs on one machine, as measured by the profiler.

Of a decode step is known, for each tensor-parallel degree and each measured batch, a line in the tokens of its lanes:

    step = seconds without context + seconds per token x tokens in the lanes of the batch

Reading weights, multiplying and sampling make the first term, attention the second. Between measured batches both are
linear; beyond them the first goes on as between the last two, and the second stays. Compute kernels work in tiles, so
that a step's time has steps too: measure 1, 2, 4, 8, 16 and so on to the largest batch in use, and wherever a kernel
takes another path (above all the batches up to 4, in which a rollout's tail is spent).

Invariants: no cost is negative; none falls as context grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from longtail.costs.decode import DecodeCosts


class TableKey(NamedTuple):
    """What a table holds for: nothing measured under one key says anything about another."""

    machine: str
    model: str
    dtype: str
    communicator: str
    threads: int
    """Threads of each worker."""


class StepCosts(NamedTuple):
    """Decode steps of batches 0 to B: seconds without context, and seconds per token of context, float64 [B + 1] each.

    A step of n sequences with c tokens in their lanes takes ``base_s[n] + context_s[n] * c``.
    """

    base_s: np.ndarray
    context_s: np.ndarray


@dataclass(frozen=True, kw_only=True)
class DecodeGrid:
    """Measured decode steps: ``seconds[i][j]`` of ``batches[i]`` sequences with ``contexts[j]`` tokens each.

    Both ascend and have at least two entries.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @cached_property
    def lines(self) -> StepCosts:
        """Of each measured batch: the line that is nearest in relative terms."""
        tokens = np.array(self.batches, float)[:, None] * np.array(self.contexts, float)
        return StepCosts(*_lines(tokens, np.array(self.seconds)))

    def at(self, batch: np.ndarray) -> StepCosts:
        """Of each ``batch`` (numbers above 0, not necessarily whole)."""
        known, lines = np.array(self.batches, float), self.lines
        base = np.interp(batch, known, lines.base_s)
        before = (lines.base_s[1] - lines.base_s[0]) / (known[1] - known[0])
        beyond = (lines.base_s[-1] - lines.base_s[-2]) / (known[-1] - known[-2])
        base -= np.clip(before * np.maximum(known[0] - batch, 0.0), 0.0, base)
        base += max(beyond, 0.0) * np.maximum(batch - known[-1], 0.0)
        return StepCosts(base, np.interp(batch, known, lines.context_s))

    def scaled(self, factor: float) -> DecodeGrid:
        return replace(self, seconds=tuple(tuple(factor * s for s in row) for row in self.seconds))


@dataclass(frozen=True, kw_only=True)
class PrefillCosts:
    """``seconds_per_token[i]`` when a prompt is computed in chunks of ``chunk_tokens[i]``; the chunks ascend, at least
    two.

    The largest chunk should be the one in use.
    """

    chunk_tokens: tuple[int, ...]
    seconds_per_token: tuple[float, ...]

    @property
    def token_s(self) -> float:
        """Seconds per token of something long."""
        return self.seconds_per_token[-1]

    def seconds(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds [n] for computing ``tokens`` [n]: by the seconds of a chunk, linear between those measured."""
        chunks = np.array(self.chunk_tokens, float)
        taken = chunks * np.array(self.seconds_per_token)
        slope = (taken[1] - taken[0]) / (chunks[1] - chunks[0])
        fixed = min(max(0.0, taken[0] - slope * chunks[0]), taken[0])
        short = np.interp(tokens, np.append(0.0, chunks), np.append(fixed, taken))
        return np.where(np.asarray(tokens) > 0, short + self.token_s * np.maximum(tokens - chunks[-1], 0.0), 0.0)

    def scaled(self, factor: float) -> PrefillCosts:
        return replace(self, seconds_per_token=tuple(factor * s for s in self.seconds_per_token))


@dataclass(frozen=True, kw_only=True)
class SwitchCosts:
    """Seconds of a change of layout.

    ``handshake_s`` is that of a switch with nothing to move; ``move_s`` comes once when any lane moves, ``move_byte_s``
    for each byte that the busiest worker takes in or gives away, whichever is more.
    """

    handshake_s: float
    move_s: float
    move_byte_s: float


Slowdowns = Mapping[str, Mapping[str, float]]
"""``slowdowns[a][b]``: how many times longer work of class a takes beside work of class b."""


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Costs of one model on one machine; see the module. JSON: ``costs/table_file.py``.

    ``decode`` and ``prefill`` are keyed by tensor-parallel degree: only degrees that are in both are known.
    ``kv_bytes`` are those of one token of one KV head, all layers. ``train_token_s`` is for each token of a forward and
    backward pass; None: not measured. ``measured`` is an ISO date and time.
    """

    key: TableKey
    measured: str
    detail: Literal["coarse", "full"]
    kv_heads: int
    kv_bytes: int
    decode: Mapping[int, DecodeGrid]
    prefill: Mapping[int, PrefillCosts]
    switch: SwitchCosts
    train_token_s: float | None = None
    same_worker: Slowdowns = field(default_factory=dict)
    neighbour_worker: Slowdowns = field(default_factory=dict)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that are known and possible, ascending: each rank needs a KV head."""
        return tuple(sorted(d for d in self.decode if d in self.prefill and d <= self.kv_heads))

    def fits(self, key: TableKey) -> bool:
        return self.key == key

    def decode_s(self, degree: int, batch: float, context_tokens: float) -> float:
        """One decode step of ``batch`` sequences that have ``context_tokens`` tokens in their lanes together.

        Raises ``KeyError`` for a degree that was not measured.
        """
        line = self.decode[degree].at(np.array([batch], float))
        return float(line.base_s[0] + line.context_s[0] * context_tokens)

    def arrays(self, degree: int, most: int) -> StepCosts:
        """The same for batches 0 to ``most``, as the planner's kernels take them; a batch of 0 costs nothing."""
        line = self.decode[degree].at(np.arange(1, most + 1, dtype=float))
        return StepCosts(np.append(0.0, line.base_s), np.append(0.0, line.context_s))

    def prefill_s(self, degree: int, tokens: np.ndarray) -> np.ndarray:
        """Seconds [n] for computing ``tokens`` [n] of prompts, or of sequences that lost their lanes."""
        return self.prefill[degree].seconds(tokens)

    def affine(self, degree: int, batches: range) -> DecodeCosts:
        """The :class:`DecodeCosts` that are nearest in these ``batches`` (from 1), for what places requests."""
        n = np.array(batches, float)
        line = self.decode[degree].at(n)
        base, per_sequence = _line(n, line.base_s)
        return DecodeCosts(
            base_s=base,
            per_sequence_s=per_sequence,
            per_context_token_s=float(line.context_s.mean()),
            per_prompt_token_s=self.prefill[degree].token_s,
        )

    def slowdown(self, work: str, beside: str, *, on: Literal["same", "neighbour"]) -> float | None:
        """How many times longer ``work`` takes beside work of another class on the same or a neighbouring worker; None:
        not measured."""
        table = self.same_worker if on == "same" else self.neighbour_worker
        return table.get(work, {}).get(beside)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(intercept, slope) with the least squared relative errors, both at least 0; ``y`` [n] is positive."""
    intercept, slope = _lines(x[None, :], y[None, :])
    return float(intercept[0]), float(slope[0])


def _lines(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same of each row of ``x`` and ``y`` [m, n]: ([m], [m])."""
    weight = 1.0 / y**2
    weight /= weight.sum(axis=1, keepdims=True)
    mean_x, mean_y = (weight * x).sum(axis=1), (weight * y).sum(axis=1)
    off = x - mean_x[:, None]
    spread = (weight * off * off).sum(axis=1)
    joint = (weight * off * (y - mean_y[:, None])).sum(axis=1)
    slope = np.maximum(0.0, np.divide(joint, spread, out=np.zeros_like(joint), where=spread > 0))
    intercept = mean_y - slope * mean_x
    if (below := intercept < 0).any():
        through = (weight * x * y).sum(axis=1) / (weight * x * x).sum(axis=1)
        intercept, slope = np.where(below, 0.0, intercept), np.where(below, through, slope)
    return intercept, slope
