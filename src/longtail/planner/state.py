"""What the planner knows when it decides how pipelines share the workers, frozen; and what it decides.

Seconds are solo seconds of one worker, as the cost table has them, unless something else is said: what work would take
if the worker did nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from longtail.costs.interference import UNKNOWN, Interference
from longtail.costs.table import CostTable


class Stage(StrEnum):
    """What a pipeline is at. ``READY``: it waits for its turn to begin a step."""

    READY = "ready"
    ROLLOUT = "rollout"
    SCORE = "score"
    TRAIN = "train"
    UPDATE = "update"


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """A step of a pipeline, as it was or as it is expected.

    ``lengths`` int64 [n]: tokens of each response; ``prompts`` int64 [n]: of the prompt of each. ``prefill_tokens`` are
    computed for prompts (once for all samples of one), ``train_tokens`` by the trainer. ``score_s``: from the last
    sample to the last reward. ``update_s``: gradient reduction and optimizer, all workers together.
    ``reference_tokens`` are computed by a reference model, where there is one.
    """

    lengths: np.ndarray
    prompts: np.ndarray
    prefill_tokens: int
    train_tokens: int
    score_s: float
    update_s: float
    reference_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Live:
    """The samples of a rollout that have not ended, n of them.

    ``worker`` [n]: who has each (the leader, in a tensor-parallel group); ``context`` [n]: tokens so far, prompt
    included; ``lanes`` [n]: those a move would have to take along, 0 while it waits; ``remaining`` [n]: tokens that are
    expected to come, at least 1. All int64. Of what has not been handed to a worker yet, ``worker`` is -1.
    """

    worker: np.ndarray
    context: np.ndarray
    lanes: np.ndarray
    remaining: np.ndarray

    def __len__(self) -> int:
        return len(self.worker)


_NONE = np.empty(0, np.int64)
NOBODY = Live(worker=_NONE, context=_NONE, lanes=_NONE, remaining=_NONE)


@dataclass(frozen=True, kw_only=True)
class PipelineState:
    """One pipeline now. ``step`` is the present step (or the next, at ``READY``), ``typical`` those to come; it has
    ``steps_left``, the present one among them.

    ``live`` is empty outside of a rollout. ``workers``: those on which its rollout runs, or last ran; ``degree``: their
    tensor-parallel degree. ``train_left``: tokens still to be trained on in this step. ``elapsed_s``: real seconds
    since the step began. ``merges_left``: how often this rollout may still be moved to fewer workers. ``costs`` are
    corrected. ``slots``: sequences that a worker runs at once. ``may_widen``: whether tensor-parallel groups are
    allowed. ``stale_steps``: how many steps its rollout may be ahead of its training; if it is, ``stage`` is that of
    the training. ``micro_tokens``: of the training that others may have to wait for (0: no wait is expected), a usual
    micro-batch or what is done of it in one go."""

    name: str
    priority: float
    max_slowdown: float | None
    stage: Stage
    steps_left: int
    elapsed_s: float
    step: StepShape
    typical: StepShape
    live: Live
    workers: tuple[int, ...]
    degree: int
    train_left: int
    merges_left: int
    costs: CostTable
    slots: int
    may_widen: bool
    stale_steps: int = 0
    micro_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """All pipelines that are not over, on ``workers`` workers; ``interference`` is what is known of how much longer the
    work of one takes beside that of another."""

    workers: int
    pipelines: tuple[PipelineState, ...]
    interference: Interference = UNKNOWN


class Mode(StrEnum):
    SHARE = "share"
    HOLD = "hold"
    """In turns, each with all workers to itself: sharing would lose."""


@dataclass(frozen=True, kw_only=True)
class Relocation:
    """Move a rollout's samples to ``to``, which are fewer workers than have them now (``merge``) or more (``spread``).

    ``cost_s``: real seconds that the move itself takes. ``gain_s`` less ``cost_s`` are the worker-seconds that it is
    predicted to save over all pipelines. ``rest_s``: real seconds to the end of this rollout with it."""

    pipeline: str
    kind: str
    to: tuple[int, ...]
    reason: str
    gain_s: float
    cost_s: float
    rest_s: float


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What to do from now on, until something changes.

    ``begin``: on which workers the next rollout of each pipeline begins. ``relocations``: to be made now, at most one
    of a pipeline. ``weights``: by which workers share their time. ``widens``: the pipelines that have the workers to
    themselves, so that their rollouts may form tensor-parallel groups. ``rates``: predicted progress of each pipeline
    as a share of what it would make alone."""

    mode: Mode
    reason: str
    begin: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    relocations: tuple[Relocation, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    widens: frozenset[str] = frozenset()
    rates: Mapping[str, float] = field(default_factory=dict)
