"""What one worker takes for each kind of work of one pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from longtail.costs.decode import DecodeCosts


@dataclass(frozen=True, kw_only=True)
class WorkerCosts:
    """Seconds, for one pipeline alone on one worker: ``per_train_token_s`` for each token of a forward and backward
    pass, ``update_s`` for the collective update of all workers (once all are there), ``load_s`` for opening the
    pipeline, ``save_s`` for a worker's part of a checkpoint.
    """

    decode: DecodeCosts
    per_train_token_s: float
    update_s: float
    load_s: float = 1.0
    save_s: float = 1.0
