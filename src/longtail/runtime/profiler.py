"""Drives a cluster to measure what pipelines' work costs: one pipeline, or two, at a time, on all workers."""

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
from longtail.costs import interference_file, table_file
from longtail.costs.interference_file import PairTable
from longtail.costs.table import CostTable
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
        degrees = degrees_of(subject.config, workers=len(self._workers), kv_heads=subject.kv_heads)
        plain = self._profiled(subject, None, degrees=degrees, fine=fine, tell=tell)
        notes = plain.pop(NOTES, {})
        return Measured(subject=subject, table=table_file.from_plain(plain), notes=notes)

    def profile_pair(self, first: Subject, second: Subject, *, tell: Tell = silent) -> PairTable:
        """Measure what the work of two different models does to each other. Both are open on the workers only
        meanwhile, so memory must suffice for both. Raises as :meth:`profile` does."""
        return interference_file.from_plain(self._profiled(first, second, degrees=(), fine=True, tell=tell))

    def _profiled(
        self, subject: Subject, beside: Subject | None, *, degrees: tuple[int, ...], fine: bool, tell: Tell
    ) -> dict[str, Any]:
        """What the first worker found."""
        if not self._connected:
            self._send(Connect(generation=GENERATION, store=self._cluster.rendezvous(GENERATION)))
            self._connected = True
        subjects = [subject] if beside is None else [subject, beside]
        for one in subjects:
            tell("loading the model", 0.0)
            self._send(self._open(one))
            self._await(one, Opened, tell)
        lease = Lease(lease_id=self._leases, pipeline=subject.name, workers=self._workers, purpose="profile")
        self._leases += 1
        tell("measuring", 0.0)
        command = Profile(
            pipeline=subject.name,
            attempt=0,
            lease=lease,
            degrees=degrees,
            fine=fine,
            beside=beside.name if beside is not None else None,
        )
        self._send(command)
        reports = self._await(subject, Profiled, tell)
        for one in subjects:
            self._send(ClosePipeline(pipeline=one.name, attempt=0))
        return next(r.table for r in reports if isinstance(r, Profiled) and r.table is not None)

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
