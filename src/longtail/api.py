"""``longtail.run``: from Python what ``longtail run`` is from a terminal."""

from __future__ import annotations

import datetime
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longtail.core.config import Jobs, Pipeline
from longtail.runtime.jobfile import JobFile, jobs_from_python, load_jobs

if TYPE_CHECKING:
    from longtail.launch import RunResult


def run(
    jobs: str | Path | Jobs | Sequence[Pipeline],
    *,
    workers: int | None = None,
    name: str | None = None,
    fresh: bool = False,
    quiet: bool = False,
) -> RunResult:
    """Train pipelines together and return when all have ended.

    ``jobs`` is a job file, a :class:`Jobs`, or a list of pipelines, which are named after their tasks. ``workers`` and
    ``name`` replace those keys. A run whose name has been used before resumes, unless ``fresh``; without a job file
    and a name each call is a new run, named after the time. Paths in ``jobs`` are relative to the job file, or else to
    the working directory.

    Raises ``ConfigError`` with one sentence per line if anything cannot work, before anything starts. A pipeline that
    fails later does not raise: see ``RunResult.errors``.
    """
    from longtail.launch import run_jobs
    from longtail.runtime.check import check_jobs

    job_file = to_job_file(jobs, workers=workers, name=name)
    return run_jobs(check_jobs(job_file), job_file, fresh=fresh, quiet=quiet)


def to_job_file(jobs: str | Path | Jobs | Sequence[Pipeline], *, workers: int | None, name: str | None) -> JobFile:
    """The job file that the arguments of :func:`run` stand for. Raises ``ConfigError``."""
    if isinstance(jobs, str | Path):
        return load_jobs(jobs, name=name, workers=workers)
    if not isinstance(jobs, Jobs):
        jobs = Jobs(pipelines=named_after_tasks(jobs))
    if workers is not None:
        jobs = Jobs.model_validate({**dict(jobs), "workers": workers})
    return jobs_from_python(jobs, name or jobs.name or new_name())


def named_after_tasks(pipelines: Sequence[Pipeline]) -> dict[str, Pipeline]:
    """``reverse-text``, ``chain_sum`` for ``reasoning_gym/chain_sum``, ``gsm8k`` for ``data/gsm8k.jsonl``; a second one
    with the same task is ``collatz-2``."""
    named: dict[str, Pipeline] = {}
    for pipeline in pipelines:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(pipeline.task).stem).strip("-._") or "pipeline"
        name, number = stem[:56], 1
        while name in named:
            number += 1
            name = f"{stem[:56]}-{number}"
        named[name] = pipeline
    return named


def new_name() -> str:
    """A run name that no other run has: the time and a random word, never drawn from a seeded generator."""
    return f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}-{secrets.token_hex(3)}"
