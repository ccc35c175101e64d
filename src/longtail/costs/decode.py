"""What sampling costs on one worker: decode steps by batch and context, prefill by tokens.

    decode step = base_s + per_sequence_s * batch + per_context_token_s * tokens in the batch's KV lanes
    prefill     = per_prompt_token_s * prompt tokens

Reading the weights is the first term, computing and sampling the second, reading the KV cache the third.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from longtail.core.events import Span
from longtail.core.types import SubStage

HALF_LIFE_QUANTA = 2000
"""Decode steps after which a measurement weighs half: a minute or less, so that costs follow a machine's load."""
LEAST_QUANTA = 20
"""A worker with fewer decode steps than this is taken to be like the others."""


@dataclass(frozen=True, kw_only=True)
class DecodeCosts:
    """All in seconds; ``per_context_token_s`` is for each token of context of each running sequence."""

    base_s: float
    per_sequence_s: float
    per_context_token_s: float = 0.0
    per_prompt_token_s: float = 0.0

    def step_s(self, batch: int, context: int = 0) -> float:
        """One decode step of ``batch`` sequences that have ``context`` tokens together."""
        return self.base_s + self.per_sequence_s * batch + self.per_context_token_s * context

    def steps_s(self, steps: int, batch: int, context: int = 0) -> float:
        """``steps`` decode steps of the same ``batch`` sequences, with ``context`` tokens at the first of them."""
        tokens = steps * context + batch * (steps * (steps - 1) // 2)
        return steps * (self.base_s + self.per_sequence_s * batch) + self.per_context_token_s * tokens


UNMEASURED = DecodeCosts(base_s=1.0, per_sequence_s=0.02, per_prompt_token_s=0.002)
"""Proportions of a memory-bound decoder, for deciding before anything is measured; its seconds mean nothing."""


@dataclass
class _Sums:
    """Weighted sums over decode steps of batch x and step time y, and over prefilled tokens."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    prompt_tokens: float = 0.0
    prompt_s: float = 0.0

    def fade(self, factor: float) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) * factor)

    @classmethod
    def total(cls, parts: Sequence[_Sums]) -> _Sums:
        return cls(**{name: sum(getattr(p, name) for p in parts) for name in vars(cls())})

    def fit(self) -> DecodeCosts | None:
        """Least squares with both coefficients at least 0; None without a decode step.

        As long as the batch has hardly varied, the split between the two is that of :data:`UNMEASURED`.
        """
        if self.weight <= 0:
            return None
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = max(0.0, self.xx / self.weight - mean_x**2)
        if spread > (0.02 * mean_x) ** 2:
            slope = (self.xy / self.weight - mean_x * mean_y) / spread
        else:
            proportion = UNMEASURED.base_s / UNMEASURED.per_sequence_s
            slope = mean_y / (proportion + mean_x)
        slope = min(max(0.0, slope), mean_y / max(mean_x, 1e-9))
        return DecodeCosts(
            base_s=max(0.0, mean_y - slope * mean_x),
            per_sequence_s=slope,
            per_prompt_token_s=self.prompt_s / self.prompt_tokens if self.prompt_tokens else 0.0,
        )


@dataclass
class DecodeFit:
    """Learns the :class:`DecodeCosts` of one pipeline on each worker from the spans that workers report.

    A span gives its mean step time at its mean batch. Older spans fade by :data:`HALF_LIFE_QUANTA`. Time of other
    pipelines on the same worker is not in a span's ``busy_s``, so these are costs of the pipeline alone.
    """

    _by_worker: dict[int, _Sums] = field(default_factory=dict)

    def observe(self, span: Span) -> None:
        """Take in a ``decode`` or ``prefill`` span of a worker on its own; others are ignored."""
        if span.quanta < 1 or span.tp > 1:
            return
        sums = self._by_worker.setdefault(span.worker, _Sums())
        if span.substage == SubStage.DECODE:
            sums.fade(0.5 ** (span.quanta / HALF_LIFE_QUANTA))
            n, x, y = span.quanta, span.batch, span.busy_s / span.quanta
            sums.weight += n
            sums.x += n * x
            sums.y += n * y
            sums.xx += n * x * x
            sums.xy += n * x * y
        elif span.substage == SubStage.PREFILL:
            sums.prompt_tokens += span.tokens
            sums.prompt_s += span.busy_s

    def costs(self, workers: int) -> list[DecodeCosts] | None:
        """For each worker; None before the first decode step of any."""
        shared = _Sums.total(list(self._by_worker.values())).fit()
        if shared is None:
            return None
        fits = []
        for worker in range(workers):
            sums = self._by_worker.get(worker)
            own = sums.fit() if sums is not None and sums.weight >= LEAST_QUANTA else None
            fits.append(own or shared)
        return fits

    def state_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {str(worker): dict(vars(sums)) for worker, sums in self._by_worker.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._by_worker = {int(worker): _Sums(**sums) for worker, sums in state.items()}
