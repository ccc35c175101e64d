"""What one worker takes for each kind of work of one pipeline: what simulated workers go by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from longtail.costs.decode import DecodeCosts
from longtail.costs.table import CostTable, DecodeGrid, PrefillCosts, SwitchCosts, TableKey

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (128, 512, 2048, 8192)
CHUNKS = (64, 512)
FREE = SwitchCosts(handshake_s=0.0, move_s=0.0, move_byte_s=0.0)


@dataclass(frozen=True, kw_only=True)
class WorkerCosts:
    """Seconds, for one pipeline alone on one worker: ``per_train_token_s`` for each token of a forward and backward
    pass, ``update_s`` for the collective update of all workers (once all are there), ``load_s`` for opening the
    pipeline, ``save_s`` for a worker's part of a checkpoint, ``profile_s`` for measuring costs with all workers.

    ``decode`` is for a worker on its own, ``decode_by_degree`` for tensor-parallel groups of so many workers; other
    degrees cannot be. ``switch`` is what a change of layout takes when one token of one of ``kv_heads`` KV heads is
    ``kv_bytes`` bytes.
    """

    decode: DecodeCosts
    per_train_token_s: float
    update_s: float
    load_s: float = 1.0
    save_s: float = 1.0
    profile_s: float = 5.0
    decode_by_degree: Mapping[int, DecodeCosts] = field(default_factory=dict)
    switch: SwitchCosts = FREE
    kv_heads: int = 1
    kv_bytes: int = 1
    slowed: Callable[[str, str, str], float] | None = None
    """(sub-stage, another pipeline, its sub-stage) -> how many times longer work takes when the two share a worker;
    None: 1."""

    def __post_init__(self) -> None:
        for degree in self.decode_by_degree:
            if not 1 < degree <= self.kv_heads:
                raise ValueError(f"decode_by_degree has {degree}, which is not in 2 to {self.kv_heads} (kv_heads)")

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees whose costs are known, ascending."""
        return (1, *sorted(self.decode_by_degree))

    def sampling(self, degree: int) -> DecodeCosts:
        """What sampling costs in a group of ``degree``. Raises ``KeyError`` for one that is not known."""
        return self.decode if degree == 1 else self.decode_by_degree[degree]

    def slowdown(self, substage: str, others: Sequence[tuple[str, str]]) -> float:
        """How many times longer work takes beside the (pipeline, sub-stage) of ``others`` on its worker, over which the
        mean is taken (geometric)."""
        if self.slowed is None or not others:
            return 1.0
        return math.prod(self.slowed(substage, *other) for other in others) ** (1.0 / len(others))

    def table(self, key: TableKey, *, measured: str, degrees: Sequence[int], fine: bool) -> CostTable:
        """What a profiler without errors would find, for those of ``degrees`` that are known."""
        known = {degree: self.sampling(degree) for degree in self.degrees if degree == 1 or degree in degrees}
        return CostTable(
            key=key,
            measured=measured,
            detail="full" if fine else "coarse",
            kv_heads=self.kv_heads,
            kv_bytes=self.kv_bytes,
            decode={degree: _grid(costs) for degree, costs in known.items()},
            prefill={
                degree: PrefillCosts(
                    chunk_tokens=CHUNKS, seconds_per_token=(_measurable(costs.per_prompt_token_s),) * len(CHUNKS)
                )
                for degree, costs in known.items()
            },
            switch=self.switch,
            train_token_s=self.per_train_token_s,
        )


def slowest(costs: Sequence[DecodeCosts]) -> DecodeCosts:
    """Of workers that do every step together."""
    return DecodeCosts(
        base_s=max(c.base_s for c in costs),
        per_sequence_s=max(c.per_sequence_s for c in costs),
        per_context_token_s=max(c.per_context_token_s for c in costs),
        per_prompt_token_s=max(c.per_prompt_token_s for c in costs),
    )


def _grid(costs: DecodeCosts) -> DecodeGrid:
    rows = (tuple(_measurable(costs.step_s(batch, batch * context)) for context in CONTEXTS) for batch in BATCHES)
    return DecodeGrid(batches=BATCHES, contexts=CONTEXTS, seconds=tuple(rows))


def _measurable(seconds: float) -> float:
    """Nothing takes no time."""
    return max(seconds, 1e-9)
