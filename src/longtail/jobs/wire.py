"""What goes over the wire: JSON of these models, checked at both ends. No code and no pickles, ever."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from longtail.runtime.jobfile import MAX_BYTES

JOBS_PATH = "/v1/jobs"
BODY_LIMIT = 6 * MAX_BYTES + 4096
"""JSON may take six bytes for a character of the text."""

State = Literal["waiting", "running", "ending", "finished", "failed", "stopped"]
OVER: frozenset[State] = frozenset({"finished", "failed", "stopped"})


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Submission(_Wire):
    """``text`` is a job file's; ``file`` is what its submitter calls it; ``fresh``: do not resume what ended before."""

    text: Annotated[str, Field(max_length=MAX_BYTES)]
    file: Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]+$")] = "job.yaml"
    fresh: bool = False


class JobStatus(_Wire):
    """``step`` steps of ``steps`` are done; ``reward`` is the mean of the last step; ``since`` (Unix seconds) is when
    it came into this ``state``; ``stage`` is what a running one is at."""

    name: str
    state: State
    stage: str | None = None
    step: int = 0
    steps: int | None = None
    reward: float | None = None
    since: float = 0.0
    error: str | None = None
    checkpoint: str | None = None

    @property
    def over(self) -> bool:
        return self.state in OVER


class JobList(_Wire):
    """All jobs of a run folder, in the order in which they first came, and where they run."""

    run: str
    folder: str
    workers: int
    devices: list[str]
    jobs: list[JobStatus]


class Admitted(_Wire):
    """What was submitted, and what its submitter should read."""

    jobs: list[JobStatus]
    warnings: list[str]
