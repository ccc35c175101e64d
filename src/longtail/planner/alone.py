"""What a step takes alone, with all workers to itself, and the least that steps can take.

Alone, a rollout runs at every moment in the tensor-parallel degree whose steps are shortest (``widen.py`` decides that
in a run, and is about as good), its sequences spread evenly; narrow workers keep the requests that they were dealt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from longtail.costs.table import CostTable
from longtail.planner.cells import MOST_CELLS, Cells, Draft
from longtail.planner.graph import step_work, train_work_s
from longtail.planner.solo import Steps, solo, widened_s
from longtail.planner.state import Live, StepShape


@dataclass(frozen=True)
class Alone:
    """Seconds of a step, or of what is left of it, by stage."""

    rollout_s: float
    score_s: float
    train_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        return self.rollout_s + self.score_s + self.train_s + self.update_s


def alone_s(shape: StepShape, table: CostTable, *, workers: int, slots: int, widen: bool) -> float:
    """Seconds of a step with these lengths. ``widen``: tensor-parallel groups are allowed; ``slots``: sequences that a
    worker, or a group, runs at once."""
    return alone(shape, table, workers=workers, slots=slots, widen=widen).total_s


def alone(shape: StepShape, table: CostTable, *, workers: int, slots: int, widen: bool) -> Alone:
    """The same by stage."""
    draft = Draft.of(shape, table, Cells(workers, min(workers, MOST_CELLS)))
    steps = Steps.of(table, max(1, min(slots, len(shape.lengths))), workers)
    return alone_by_draft(shape, table, draft, steps, workers=workers, slots=slots, widen=widen)


def alone_by_draft(
    shape: StepShape, table: CostTable, draft: Draft, steps: Steps, *, workers: int, slots: int, widen: bool
) -> Alone:
    """The same, with the samples and the decode steps that are at hand."""
    work = step_work(shape, table, ())
    return Alone(
        rollout_s=_rollout_s(draft, steps, table, min(width_of(table, workers, widen), draft.cells), slots),
        score_s=shape.score_s,
        train_s=(work.logprob_s + work.train_s) / workers,
        update_s=shape.update_s,
    )


def alone_rollout_s(live: Live, table: CostTable, steps: Steps, *, workers: int, slots: int, widen: bool) -> float:
    """Seconds for the rest of a rollout, if its samples were spread evenly over all workers now."""
    if len(live) == 0:
        return 0.0
    width = width_of(table, workers, widen)
    longest = np.argsort(-live.remaining, kind="stable")[:: max(1, workers // width)]
    return widened_s(live.remaining[longest], live.context[longest], steps, slots, width)


def bound_s(steps: Iterable[tuple[StepShape, CostTable, int]], workers: int) -> float:
    """Seconds in which these steps (with the costs and the slots of each) could at best be done, of whatever pipelines
    they are: all samples of a step decode together at whatever degree and batch takes fewest worker-seconds, and no
    worker ever waits."""
    total_s = 0.0
    for shape, table, slots in steps:
        total_s += shape.prefill_tokens * table.prefill[1].token_s
        total_s += train_work_s(shape.train_tokens, table) + shape.reference_tokens * table.prefill[1].token_s
        total_s += workers * shape.update_s + _least_decode_s(shape, table, slots, workers)
    return total_s / workers


def _least_decode_s(shape: StepShape, table: CostTable, slots: int, workers: int) -> float:
    """Worker-seconds. A sequence costs least in the batch, up to all that are left, with the cheapest sequence."""
    if len(shape.lengths) == 0:
        return 0.0
    left = np.sort(shape.lengths) - 1  # the prefill draws the first token
    steps = Steps.of(table, min(slots, len(left)), workers)
    degrees = steps.degrees[:, None]
    batches = np.arange(1, steps.base_s.shape[1])
    each_s = np.minimum.accumulate((degrees * steps.base_s[:, 1:] / batches).min(axis=0))
    token_s = np.minimum.accumulate((degrees * steps.context_s[:, 1:]).min(axis=0))
    spans = np.diff(left, prepend=0)
    alive = len(left) - np.arange(len(left))
    batch = np.minimum(alive, len(batches)) - 1
    order = np.argsort(shape.lengths, kind="stable")
    prompts = np.cumsum(shape.prompts[order][::-1])[::-1]
    done = left - spans
    read = prompts + alive * (1 + done + (spans - 1) / 2)
    return float((spans * (alive * each_s[batch] + token_s[batch] * read)).sum())


def _rollout_s(draft: Draft, steps: Steps, table: CostTable, width: int, slots: int) -> float:
    if len(draft.left) == 0:
        return 0.0
    if width == 1:
        return float(solo(draft.on(draft.cells), steps, slots).seconds.max())
    blocks = draft.on(draft.cells // width)
    most_s = 0.0
    for first, last in zip(blocks.bounds[:-1].tolist(), blocks.bounds[1:].tolist(), strict=True):
        left, context = blocks.left[first:last], blocks.context[first:last]
        prefill_s = float(blocks.admit_s[first:last].sum()) / width
        decode_s = widened_s(left[left > 1] - 1, context[left > 1] + 1, steps, slots, width)
        most_s = max(most_s, prefill_s + decode_s)
    return most_s + table.switch.handshake_s


def width_of(table: CostTable, workers: int, widen: bool) -> int:
    """Workers of the widest group."""
    return max((d for d in table.degrees if d <= workers), default=1) if widen else 1
