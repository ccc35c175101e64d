"""The two halves of a job file: the workers, which `longtail up` starts once, and the pipelines, which come and go.

What comes from outside is text until here, and values of ``core/config.py`` from here on; nothing in it is code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longtail.core.config import Jobs
from longtail.core.errors import ConfigError
from longtail.runtime import schema, yamlfile
from longtail.runtime.explain import get
from longtail.runtime.jobfile import EXPANDED, JobFile, read_text, run_name, validated
from longtail.runtime.yamlfile import Document, Problem

NO_FILE = Path("up.yaml")
"""Stands for the cluster file where there is none; the run is named after it."""
_PLACEHOLDER = {"any": {"model": "tiny", "task": "reverse-text"}}


def cluster_file(path: Path | None, *, name: str | None = None, workers: int | None = None) -> JobFile:
    """A job file without pipelines; ``name`` and ``workers``, if given, replace those keys.

    Raises :class:`ConfigError` with all problems of the file, one per line.
    """
    document = Document(data={}) if path is None else yamlfile.read(read_text(path))
    path = path or NO_FILE
    if document.data is None:
        document.data = {}
    if isinstance(document.data, dict):
        if "pipelines" in document.data:
            text = "pipelines: `longtail up` starts workers only; put this section into a file for `longtail submit`."
            document.problems.append(Problem(document.line(("pipelines",)), text))
        document.data["pipelines"] = _PLACEHOLDER
    jobs = validated(document, path)
    costs = None if jobs.costs is None else str(path.absolute().parent / jobs.costs)
    changes: dict[str, Any] = {"name": name or jobs.name, "workers": workers or jobs.workers, "costs": costs}
    changes["pipelines"] = {}
    jobs = jobs.model_copy(update=changes)
    lines = {p: n for p, n in document.lines.items() if p != ("workers",) or workers is None}
    return JobFile(jobs, path, run_name(jobs, path), lines)


def submitted(text: str, shown: str, *, cluster: JobFile, base: Path) -> JobFile:
    """The pipelines of a text that somebody submitted, on the workers of ``cluster``; paths count from ``base``.

    ``shown`` is what the submitter calls the file. Raises :class:`ConfigError` with all problems, one per line.
    """
    path = Path(shown)
    document = yamlfile.read(text)
    known = set(schema.children(()))
    for key in document.data if isinstance(document.data, dict) else ():
        if key in known - {"pipelines"}:
            problem = f"{key}: this key belongs to `longtail up`, which has started the workers; leave it out here."
            document.problems.append(Problem(document.line((key,)), problem))
    _refuse_variables(document)
    if document.problems:
        ordered = sorted(document.problems, key=lambda problem: problem.line)
        raise ConfigError("\n".join(f"{path}:{line}: {said}" if line else f"{path}: {said}" for line, said in ordered))
    return on(cluster, validated(document, path), path, lines=document.lines, base=base)


def on(cluster: JobFile, jobs: Jobs, path: Path, *, lines: dict[yamlfile.Path_, int], base: Path) -> JobFile:
    """The pipelines of ``jobs`` with all else from ``cluster``."""
    both = cluster.jobs.model_copy(update={"pipelines": jobs.pipelines})
    return JobFile(both, path, cluster.run_name, lines, folder=base)


def _refuse_variables(document: Document) -> None:
    """The environment is this machine's, and none of a submitter's business."""
    for path in document.lines:
        key, value = schema.find(path), get(document.data, path)
        if key is not None and key.path in EXPANDED and isinstance(value, str) and "$" in value:
            where = ".".join(map(str, path))
            text = f"{where} = {value!r}: variables are not replaced in what is submitted; write out the path."
            document.problems.append(Problem(document.line(path), text))
