"""Drives a cluster to measure what pipelines' work costs: one pipeline after the other, all workers on each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longtail.cluster.measure import NOTES, Tell, silent
from longtail.cluster.measure_progress import Profiling
from longtail.cluster.messages import (
    ClosePipeline,
    Command,
    Connect,
    LeaseBroken,
    Lost,
    Opened,
    OpenPipeline,
    PipelineFailed,
    PipelineReport,
    Profile,
    Profiled,
    Report,
)
from longtail.cluster.protocol import Cluster
from longtail.core.config import Pipeline
from longtail.core.errors import LongtailError, PeerLost
from longtail.core.types import Lease
from longtail.costs.table import CostTable
from longtail.costs.table_file import from_plain
from longtail.engine.models import cache_dir
from longtail.planner.tree import possible_degrees

GENERATION = -1
"""Of the communicator: a run that follows on the same cluster begins with 0."""
POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A pipeline whose work is to be measured; see :class:`longtail.runtime.plan.PipelinePlan`."""

    name: str
    config: Pipeline
    model_folder: Path
    kv_blocks: int
    kv_heads: int

    @property
    def samples(self) -> int:
        """Of each step."""
        return self.config.rollout.prompts * self.config.algorithm.group_size


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A subject's ``table``, and what a fine profile found beside it: see :class:`longtail.cluster.measure.Notes`."""

    subject: Subject
    table: CostTable
    notes: dict[str, Any] = field(default_factory=dict)


def default_folder() -> Path:
    """Where this machine's tables are kept, unless the job file names a folder (``costs``)."""
    return cache_dir() / "costs"


def degrees_of(config: Pipeline, *, workers: int, kv_heads: int) -> tuple[int, ...]:
    """Tensor-parallel degrees that a pipeline may come to sample at: all that layouts can have, and a fixed one."""
    degrees = set(possible_degrees(workers, min(workers, kv_heads)))
    tp = config.rollout.tp
    return tuple(sorted(degrees | ({tp} if isinstance(tp, int) and tp <= min(workers, kv_heads) else set())))


class Profiler:
    """Over a ``cluster`` on which nothing else runs. It is not stopped or closed here."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._workers = tuple(range(cluster.workers))
        self._leases = 0
        self._connected = False

    def profile(self, subject: Subject, *, fine: bool, tell: Tell = silent) -> Measured:
        """Measure one subject, which is open on the workers only meanwhile.

        Raises :class:`PeerLost` when a worker dies, and :class:`LongtailError` when the pipeline fails on one.
        """
        if not self._connected:
            self._send(Connect(generation=GENERATION, store=self._cluster.rendezvous(GENERATION)))
            self._connected = True
        tell("loading the model", 0.0)
        self._send(self._open(subject))
        self._await(subject, Opened, tell)
        lease = Lease(lease_id=self._leases, pipeline=subject.name, workers=self._workers, purpose="profile")
        self._leases += 1
        tell("measuring", 0.0)
        degrees = degrees_of(subject.config, workers=len(self._workers), kv_heads=subject.kv_heads)
        self._send(Profile(pipeline=subject.name, attempt=0, lease=lease, degrees=degrees, fine=fine))
        reports = self._await(subject, Profiled, tell)
        self._send(ClosePipeline(pipeline=subject.name, attempt=0))
        plain = next(r.table for r in reports if isinstance(r, Profiled) and r.table is not None)
        notes = plain.pop(NOTES, {})
        return Measured(subject=subject, table=from_plain(plain), notes=notes)

    def _open(self, subject: Subject) -> OpenPipeline:
        return OpenPipeline(
            pipeline=subject.name,
            attempt=0,
            config=subject.config,
            weights=str(subject.model_folder),
            optimizer=None,
            reference=str(subject.model_folder) if subject.config.algorithm.beta > 0 else None,
            kv_blocks=subject.kv_blocks,
        )

    def _send(self, command: Command) -> None:
        for worker in self._workers:
            self._cluster.send(worker, [command])

    def _await(self, subject: Subject, kind: type[PipelineReport], tell: Tell) -> list[Report]:
        """One report of ``kind`` from every worker."""
        arrived: dict[int, Report] = {}
        while len(arrived) < len(self._workers):
            for report in self._cluster.poll(POLL_S):
                match report:
                    case Lost():
                        raise PeerLost(
                            f"worker {report.worker} was lost while {subject.name} was profiled: {report.reason}"
                        )
                    case LeaseBroken():
                        raise PeerLost(f"{subject.name} could not be profiled: {report.error}")
                    case PipelineFailed():
                        text = f"{subject.name} could not be profiled: {report.error}\n{report.traceback}"
                        raise LongtailError(text.strip())
                    case Profiling():
                        tell(report.what, report.share)
                    case _ if isinstance(report, kind):
                        arrived[report.worker] = report
        return list(arrived.values())
