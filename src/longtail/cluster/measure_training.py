"""Seconds of a training micro-batch, without training anything."""

from __future__ import annotations

import math
import time

import numpy as np

from longtail.core.types import StepTotals, TrainGroup, TrainSample
from longtail.rl.packing import MicroBatch
from longtail.rl.trainer import Trainer


class Training:
    """Forward and backward passes over one made-up micro-batch of about ``tokens`` tokens.

    Groups of a prompt and two answers of the same length, as long as the context and ``max_tokens`` allow.
    :meth:`run` leaves weights and optimizer as they are, and no gradient.
    """

    def __init__(self, trainer: Trainer, tokens: int, *, max_tokens: int) -> None:
        longest = trainer.model.config.max_context
        # Of a group's tokens three eighths are an answer, and prompt and answer must fit into the context.
        groups = -(-tokens // min(longest, max(8, 8 * max_tokens // 3)))
        size = -(-tokens // groups)
        answer = min(max_tokens, max(1, size * 3 // 8))
        group = _group(max(1, size - 2 * answer), answer, trainer.model.config.vocab_size)
        self._trainer = trainer
        self._batch = MicroBatch((group,) * groups)
        self._totals = StepTotals(samples=2 * groups, tokens=2 * answer * groups, max_tokens=max_tokens)

    @property
    def tokens(self) -> int:
        return self._batch.tokens

    def run(self) -> float:
        """Seconds of one micro-batch."""
        start = time.perf_counter()
        self._trainer.micro_batch(self._batch, self._totals)
        seconds = time.perf_counter() - start
        self._trainer.zero_gradients()
        return seconds


def _group(prompt: int, answer: int, vocab_size: int) -> TrainGroup:
    return TrainGroup(
        prompt=_tokens(prompt, vocab_size),
        samples=tuple(
            TrainSample(
                tokens=_tokens(answer, vocab_size),
                logprobs=np.full(answer, -math.log(vocab_size), np.float32),
                advantage=advantage,
            )
            for advantage in (1.0, -1.0)
        ),
    )


def _tokens(count: int, vocab_size: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32) % vocab_size
