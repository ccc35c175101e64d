"""Reads a job file: YAML with line numbers, checked against the models of ``core/config.py``.

Every problem of a file is found in one go and told in one sentence each, in the order of the file. What only other
parts can know (does the model exist, does it fit) is checked by ``check.py``, which begins its sentences with
:meth:`JobFile.where`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from longtail.core.config import Jobs, check_name
from longtail.core.errors import ConfigError
from longtail.runtime import schema, yamlfile
from longtail.runtime.explain import dotted, explain, get, locate
from longtail.runtime.yamlfile import FLOAT, NONFINITE, Document, Path_, Problem

MAX_BYTES = 1 << 20
EXPANDED = {
    ("runs_dir",),
    ("costs",),
    ("pipelines", schema.ANY, "model"),
    ("pipelines", schema.ANY, "task"),
    ("pipelines", schema.ANY, "rollout", "ranker"),
}
"""Keys in which ``~`` and ``$VARIABLE`` are replaced."""


@dataclass(frozen=True)
class JobFile:
    """A valid job file. ``path`` is what the user gave; relative task files and reward modules lie beside it."""

    jobs: Jobs
    path: Path
    run_name: str
    lines: dict[Path_, int] = field(default_factory=dict, repr=False)
    folder: Path | None = None

    @property
    def base(self) -> Path:
        """The folder of the job file, or the one that stands in for it where the file is another machine's."""
        return self.folder or self.path.absolute().parent

    def line(self, *keys: str | int) -> int:
        """The line of a key, or of the nearest section around it; 0 if the file has neither."""
        return Document(lines=self.lines).line(keys)

    def where(self, *keys: str | int) -> str:
        """How a sentence about a key begins: ``jobs.yaml:9: pipelines.sums.rollout.max_tokens``.

        Only the key if the jobs come from Python or from the command line.
        """
        line = self.line(*keys)
        return f"{self.path}:{line}: {dotted(keys)}" if line else dotted(keys)


def load_jobs(path: Path | str, *, name: str | None = None, workers: int | None = None) -> JobFile:
    """Read and validate a job file; ``name`` and ``workers``, if given, replace those keys.

    Raises :class:`ConfigError` with all problems of the file, one per line.
    """
    path = Path(path)
    document = yamlfile.read(read_text(path))
    jobs = validated(document, path)
    lines = {p: n for p, n in document.lines.items() if p != ("workers",) or workers is None}
    jobs = jobs.model_copy(update={k: v for k, v in (("name", name), ("workers", workers)) if v is not None})
    return JobFile(jobs, path, run_name(jobs, path), lines)


def validated(document: Document, path: Path) -> Jobs:
    """The jobs that a document holds. Raises :class:`ConfigError` with all its problems, one per line; they begin with
    ``path``."""
    if not document.problems and not isinstance(document.data, dict):
        what = "is empty" if document.data is None else "is not a mapping of keys"
        document.problems.append(Problem(0, f"the file {what}; a job file begins with keys such as 'pipelines:'."))
    jobs = _validate(document) if isinstance(document.data, dict) else None
    if document.problems or jobs is None:
        ordered = sorted(dict.fromkeys(document.problems), key=lambda problem: problem.line)
        raise ConfigError("\n".join(f"{path}:{line}: {text}" if line else f"{path}: {text}" for line, text in ordered))
    return jobs


def jobs_from_python(jobs: Jobs, run_name: str) -> JobFile:
    """The jobs of a Python program, as a job file in the working directory would be.

    Raises :class:`ConfigError` if ``run_name`` cannot be a folder name.
    """
    try:
        return JobFile(jobs, Path.cwd() / "jobs.yaml", check_name(run_name))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def dump_resolved(jobs: Jobs, path: Path) -> None:
    """Write every key with its value to ``path`` (atomically), such that :func:`load_resolved` gives equal jobs."""
    data = jobs.model_dump(mode="json")
    pipelines = {name: json.dumps({name: pipeline}) for name, pipeline in data.pop("pipelines").items()}
    sections = "".join(textwrap.indent(_as_yaml(section), "  ") for section in pipelines.values())
    text = f"{_as_yaml(json.dumps(data))}pipelines:\n{sections}"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(f"# Every key of this run with its value; see docs/configuration.md.\n{text}", "utf-8")
    temporary.replace(path)


@lru_cache(maxsize=4096)
def _as_yaml(data: str) -> str:
    """JSON as YAML; kept, because a long run writes the same pipelines again with each one that comes."""
    return yaml.dump(json.loads(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=118)


def load_resolved(path: Path) -> Jobs:
    """What :func:`dump_resolved` wrote, of any size. Raises :class:`ConfigError`."""
    return validated(yamlfile.read(read_text(path, most_bytes=None), most_nodes=None), path)


class _Dumper(yaml.SafeDumper):
    """Quotes all text that could be read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", text) and isinstance(yamlfile.scalar(text), str)
        style = None if plain and not yamlfile.AMBIGUOUS.fullmatch(text) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def read_text(path: Path, *, most_bytes: int | None = MAX_BYTES) -> str:
    """The file as text. Raises :class:`ConfigError`."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: this is a folder; give the job file in it, such as {path / 'jobs.yaml'}.")
        if most_bytes is not None and path.stat().st_size > most_bytes:
            raise ConfigError(f"{path}: the file is larger than 1 MiB, so it cannot be a job file.")
        data = path.read_bytes()
    except FileNotFoundError:
        near = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, near, n=1, cutoff=0.5)
        hint = f"; did you mean {path.parent / close[0]}?" if close else "."
        raise ConfigError(f"{path}: there is no such file{hint}") from None
    except OSError as error:
        raise ConfigError(f"{path}: the file cannot be read: {error.strerror}.") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: the file is not UTF-8 text; save it as UTF-8.") from None


def run_name(jobs: Jobs, path: Path) -> str:
    """The name that jobs give their run, else that of their file. Raises :class:`ConfigError` if it cannot be one."""
    try:
        return check_name(jobs.name if jobs.name is not None else path.stem)
    except ValueError as error:
        if jobs.name is not None:
            raise ConfigError(f"--name: {error}.") from None
        hint = "set 'name:' in the file or give --name"
        raise ConfigError(f"{path}: a run is named after its file, but {error}; {hint}.") from None


def _validate(document: Document) -> Jobs | None:
    """The jobs, or None and more ``document.problems``; mends on the way what people write (see :func:`_mend`)."""
    document.problems += [*_problems_of_task_args(document), *_expand_paths(document)]
    while True:
        try:
            return Jobs.model_validate(document.data)
        except ValidationError as error:
            errors = error.errors()
        mended = [_mend(document, error) for error in errors]
        if not any(mended):
            document.problems += explain(document, errors)
            return None


def _mend(document: Document, error: Any) -> bool:
    """An empty section means its defaults, and a quoted number is a number where a fraction may stand."""
    path, _ = locate(document.data, error)
    value = error["input"]
    if value is None and error["type"] in ("model_type", "dict_type", "list_type"):
        _set(document.data, path, [] if error["type"] == "list_type" else {})
    elif error["type"] == "float_type" and isinstance(value, str) and FLOAT.fullmatch(value.strip()):
        _set(document.data, path, float(value))
    else:
        return False
    return True


def _problems_of_task_args(document: Document) -> Iterator[Problem]:
    """Values below ``task_args`` have no declared type, so what other YAML readers take for one is refused there."""
    for path, source in document.sources.items():
        if len(path) > 3 and path[0] == "pipelines" and path[2] == "task_args":
            if path in document.ambiguous:
                advice = "write true or false" if source.isalpha() else "write the number in plain decimal digits"
                text = f"this is text; {advice}, or put it in quotes if text is meant."
                yield Problem(document.line(path), f"{dotted(path)} = {source}: {text}")
            elif NONFINITE.fullmatch(source):
                yield Problem(document.line(path), f"{dotted(path)} = {source}: must be a finite number.")


def _expand_paths(document: Document) -> Iterator[Problem]:
    """Replace ``~`` and ``$VARIABLE`` in place; yields a problem for each variable that is not set."""
    for path in document.lines:
        key, value = schema.find(path), get(document.data, path)
        if key is None or key.path not in EXPANDED or not isinstance(value, str):
            continue
        expanded = os.path.expanduser(os.path.expandvars(value))
        if missing := re.search(r"\$(\w+|\{[^}]*\})", expanded):
            text = f"{dotted(path)} = '{value}': the environment variable {missing[0]} is not set."
            yield Problem(document.line(path), text)
        _set(document.data, path, expanded)


def _set(data: Any, path: Path_, value: Any) -> None:
    for part in path[:-1]:
        data = data[part]
    data[path[-1]] = value
