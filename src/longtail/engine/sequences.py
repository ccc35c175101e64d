"""State of live sequences as arrays, so that one decode step of a whole batch is a handful of numpy calls.

A *slot* is an index into these arrays; it belongs to one sample from its first token to its end, whether it runs or
waits (preempted). Lanes are not part of it: ``row`` names the sequence's row in the :class:`LanePool`, or ``NO_ROW``.
"""

from __future__ import annotations

import numpy as np

from longtail.core.types import SamplingParams

NO_ROW = -1
_INITIAL_SLOTS, _INITIAL_TOKENS = 64, 64


class Sequences:
    """Parallel arrays over slots, grown on demand. Lengths and positions are in tokens.

    ``prompt_len``; ``generated``: tokens so far; ``limit``: most tokens it may generate; ``number``: age (smaller is
    older); ``tokens`` int32 and ``logprobs`` float64 ``[slots, width]``: what was generated; ``ends`` int32
    ``[slots, E]``: end tokens, padded with -1.
    """

    def __init__(self) -> None:
        n = _INITIAL_SLOTS
        self.row = np.full(n, NO_ROW, np.int64)
        self.number = np.zeros(n, np.int64)
        self.prompt_len = np.zeros(n, np.int64)
        self.generated = np.zeros(n, np.int64)
        self.limit = np.zeros(n, np.int64)
        self.last = np.zeros(n, np.int64)
        self.seed = np.zeros(n, np.uint64)
        self.temperature = np.zeros(n, np.float64)
        self.top_k = np.zeros(n, np.int64)
        self.top_p = np.zeros(n, np.float64)
        self.top_logprobs = np.zeros(n, np.int64)
        self.has_stop = np.zeros(n, bool)
        self.preemptions = np.zeros(n, np.int64)
        self.sample = np.zeros(n, np.int64)
        self.ends = np.full((n, 1), -1, np.int32)
        self.tokens = np.zeros((n, _INITIAL_TOKENS), np.int32)
        self.logprobs = np.zeros((n, _INITIAL_TOKENS), np.float64)
        self._free = list(range(n))[::-1]

    def open(
        self,
        *,
        number: int,
        sample: int,
        seed: int,
        prompt_len: int,
        limit: int,
        params: SamplingParams,
        forced: bool,
    ) -> int:
        """A slot for a sample without tokens yet. ``forced`` ignores end tokens and stop strings."""
        if not self._free:
            self._double()
        slot = self._free.pop()
        ends = () if forced else params.end_token_ids
        if len(ends) > self.ends.shape[1]:
            pad = np.full((len(self.ends), len(ends) - self.ends.shape[1]), -1, np.int32)
            self.ends = np.concatenate([self.ends, pad], axis=1)
        self.row[slot] = NO_ROW
        self.number[slot] = number
        self.sample[slot] = sample
        self.seed[slot] = seed
        self.prompt_len[slot] = prompt_len
        self.limit[slot] = limit
        self.generated[slot] = 0
        self.preemptions[slot] = 0
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.top_logprobs[slot] = params.top_logprobs
        self.has_stop[slot] = bool(params.stop) and not forced
        self.ends[slot] = -1
        self.ends[slot, : len(ends)] = ends
        return slot

    def resume(self, slot: int, *, tokens: np.ndarray, logprobs: np.ndarray, preemptions: int) -> None:
        """Give a slot that was just opened what its sample has generated so far (at least one token)."""
        count = len(tokens)
        self._widen(count)
        self.tokens[slot, :count], self.logprobs[slot, :count] = tokens, logprobs
        self.generated[slot], self.last[slot], self.preemptions[slot] = count, tokens[-1], preemptions

    def close(self, slot: int) -> None:
        self._free.append(slot)

    def positions(self, slots: np.ndarray) -> np.ndarray:
        """Where the KV of each sequence's last token goes: the next position to compute."""
        return self.prompt_len[slots] + self.generated[slots] - 1

    def append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Add one token to each of ``slots`` (distinct)."""
        at = self.generated[slots]
        if len(at):
            self._widen(int(at.max()) + 1)
        self.tokens[slots, at] = tokens
        self.logprobs[slots, at] = logprobs
        self.last[slots] = tokens
        self.generated[slots] = at + 1

    def _widen(self, tokens: int) -> None:
        """Make room for so many generated tokens."""
        while tokens > self.tokens.shape[1]:
            self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)], axis=1)
            self.logprobs = np.concatenate([self.logprobs, np.zeros_like(self.logprobs)], axis=1)

    def _double(self) -> None:
        n = len(self.row)
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self._free = list(range(n, 2 * n))[::-1]
