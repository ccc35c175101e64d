"""How far a profile is: what its first worker says while all of them measure."""

from __future__ import annotations

from dataclasses import dataclass

from longtail.cluster.messages import PipelineReport


@dataclass(frozen=True, kw_only=True)
class Profiling(PipelineReport):
    """``what`` is being measured now; the ``share`` of all that is done, in [0, 1]."""

    what: str
    share: float
