"""What the controller tells workers (commands) and what workers tell the controller (reports).

Commands only enqueue work; a worker takes them in order, between two quanta. Every command and report about a
pipeline carries its ``attempt``: it grows when the pipeline falls back to a checkpoint, and whatever still
arrives from an earlier attempt is dropped by the receiver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from longtail.core.config import Pipeline
from longtail.core.events import Event
from longtail.core.types import Completion, Lease, Request, StepTotals
from longtail.rl.packing import MicroBatch
from longtail.rl.trainer import MicroStats, UpdateStats


@dataclass(frozen=True, kw_only=True)
class Command:
    """Base of what a worker can be told."""


@dataclass(frozen=True, kw_only=True)
class Connect(Command):
    """Join the communicator of ``generation`` over all workers; ``store`` is where its members meet.

    ``store`` is a file path on one machine, or ``host:port`` of the TCP store that worker 0 serves.
    """

    generation: int
    store: str


@dataclass(frozen=True, kw_only=True)
class PipelineCommand(Command):
    pipeline: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class OpenPipeline(PipelineCommand):
    """Load a pipeline's weights and optimizer, replacing what an earlier attempt left.

    ``weights`` is a model folder or a checkpoint; ``optimizer`` a checkpoint, or None at the start.
    ``reference`` is the model folder of the KL reference, if one is needed.
    """

    config: Pipeline
    weights: str
    optimizer: str | None
    reference: str | None
    kv_blocks: int


@dataclass(frozen=True, kw_only=True)
class ClosePipeline(PipelineCommand):
    """Drop the pipeline and free its memory."""


@dataclass(frozen=True, kw_only=True)
class DropWork(PipelineCommand):
    """Forget all queued and half-done work of the pipeline; keep its weights and optimizer."""


@dataclass(frozen=True, kw_only=True)
class Generate(PipelineCommand):
    """Sample these requests with the present weights."""

    step: int
    requests: tuple[Request, ...]


@dataclass(frozen=True, kw_only=True)
class Switch(PipelineCommand):
    """Go over to ``groups`` of the lease's workers at the next quantum boundary, with all sequences; a worker that is
    in none of them gives its sequences away.

    It is sent to the leaders of the present groups, who pass it on. Sequences of a group that lies within one of
    ``groups`` go there, unless they are to be dealt out evenly over all of ``groups`` (``rebalance``). ``how`` says by
    which means lanes get to where they are needed: ``move``, ``recompute``, or by sequence whichever is cheaper
    (``auto``), at ``per_byte_s`` seconds for a byte moved and ``per_token_s`` for a token recomputed.
    """

    step: int
    lease: Lease
    groups: tuple[tuple[int, ...], ...]
    rebalance: bool = False
    how: str = "auto"
    per_byte_s: float = 0.0
    per_token_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Profile(PipelineCommand):
    """Measure what work of this pipeline costs, as a member of ``lease`` over all workers, at each of ``degrees``; or
    what it and the work of the pipeline ``beside``, open on all workers too, do to each other."""

    lease: Lease
    degrees: tuple[int, ...]
    fine: bool
    beside: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainBatches(PipelineCommand):
    """Accumulate the gradient of these micro-batches, each with its number in the step; a report follows each.

    Which worker computes which micro-batch changes no bit of the step's gradient (``rl/trainer.py``). ``more``: others
    are left, and will be sent when these are done.
    """

    step: int
    batches: tuple[tuple[int, MicroBatch], ...]
    totals: StepTotals
    more: bool = False


@dataclass(frozen=True, kw_only=True)
class Hurry(PipelineCommand):
    """There is a worker with nothing left to do of this pass over ``step``: do its micro-batches before other work."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Refresh(PipelineCommand):
    """From now on sample with the weights as they are trained now: those after ``updates`` steps. Only pipelines with
    ``max_staleness`` above 0 have a copy for sampling."""

    updates: int


@dataclass(frozen=True, kw_only=True)
class Shares(Command):
    """By which weights the worker shares its time between the pipelines that have work: a pipeline of weight 2 gets
    twice the compute time of one of weight 1. Who is not named keeps what it has; the first is 1."""

    weights: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        for name, weight in self.weights:
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of pipeline {name} must be a positive number, not {weight}")


@dataclass(frozen=True, kw_only=True)
class Update(PipelineCommand):
    """Reduce gradients and apply the optimizer, as a member of ``lease``."""

    step: int
    lease: Lease


@dataclass(frozen=True, kw_only=True)
class Save(PipelineCommand):
    """Write this worker's part of the checkpoint into ``folder`` (worker 0 also writes the weights)."""

    step: int
    folder: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Stop(Command):
    """End the worker's loop."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Base of what a worker says; ``worker`` is its index."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class Stopped(Report):
    """The worker's last word: its loop has ended and all its events are told."""


@dataclass(frozen=True, kw_only=True)
class PipelineReport(Report):
    pipeline: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Opened(PipelineReport):
    parameters: int
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class Sampled(PipelineReport):
    """Samples that ended in one quantum; ``started[i]`` is when sample i's request was taken up (Unix seconds)."""

    step: int
    completions: tuple[Completion, ...]
    started: tuple[float, ...]
    ended: float


@dataclass(frozen=True, kw_only=True)
class Alive(PipelineReport):
    """What is in flight on a worker, or in the group that it leads: ``generated[i]`` int32 [samples] are the tokens
    that each sample of the request ``request_ids[i]`` has so far, -1 if it has ended, and none if its prompt waits."""

    step: int
    request_ids: tuple[str, ...]
    generated: tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True)
class Switched(PipelineReport):
    """This worker is in the group of the layout that was asked for; or it is not, since the switch was ``refused``.

    ``moved_bytes`` came in from others; ``duration_s`` is from the moment it stopped sampling to the moment it can go
    on, without waiting for others to stop. ``sequences`` are all of the lease's.
    """

    step: int
    lease_id: int
    groups: tuple[tuple[int, ...], ...]
    duration_s: float
    sequences: int
    moved_bytes: int
    recomputed_tokens: int
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class Profiled(PipelineReport):
    """``table`` is a cost table as plain data (``costs/table.py``), or what was measured of two pipelines
    (``costs/interference_file.py``); only the lease's first worker has one."""

    lease_id: int
    table: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Trained(PipelineReport):
    """Micro-batch ``number`` of the step is done; ``stats`` are sums over its tokens. ``shared``: whether there was
    other work for the worker meanwhile, which may go on when this pipeline has none."""

    step: int
    number: int
    stats: MicroStats
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class Updated(PipelineReport):
    step: int
    lease_id: int
    stats: UpdateStats


@dataclass(frozen=True, kw_only=True)
class Saved(PipelineReport):
    step: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class SaveFailed(PipelineReport):
    """The checkpoint could not be written; training goes on."""

    step: int
    error: str


@dataclass(frozen=True, kw_only=True)
class PipelineFailed(PipelineReport):
    """The pipeline cannot go on (``error`` is one sentence); the worker has dropped it and serves the others."""

    error: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class LeaseBroken(PipelineReport):
    """A collective failed because a peer is gone; the controller recovers when it learns which one."""

    lease_id: int
    error: str


@dataclass(frozen=True, kw_only=True)
class Lost(Report):
    """Made by the cluster, not by the worker: the worker's process is gone."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Happened(Report):
    """Events for the run's sinks (spans, progress)."""

    events: tuple[Event, ...]
