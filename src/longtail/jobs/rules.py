"""What a submitted job may name: code only of allowed modules, files by absolute paths or below the jobs folder.

Names are checked before anything is imported or opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from longtail.core.config import Pipeline
from longtail.core.errors import ConfigError
from longtail.engine.models import BUILT_IN, HUB_ID
from longtail.runtime.check_pipeline import Findings
from longtail.runtime.jobfile import JobFile

BUILT_IN_REWARDS = frozenset({"longtail.rl.rewards:final_number", "longtail.rl.rewards:exact_answer"})


@dataclass(frozen=True)
class AllowList:
    """Modules and packages, by import path, whose functions a submitted job may name as rewards."""

    modules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, names: Iterable[str]) -> AllowList:
        """Raises :class:`ConfigError` for what is no import path."""
        names = list(names)
        for name in names:
            if not _is_import_path(name):
                raise ConfigError(f"--allow {name!r}: must be the import path of a module or package, as my_rewards.")
        return cls(frozenset(names))

    def permits(self, reward: str) -> bool:
        """Whether a job may name ``module:function``. An allowed package stands for all in it; what begins with an
        underscore is its own business."""
        if reward in BUILT_IN_REWARDS:
            return True
        module, _, function = reward.partition(":")
        parts = module.split(".")
        if any(part.startswith("_") for part in (*parts, function)):
            return False
        return any(".".join(parts[:n]) in self.modules for n in range(1, len(parts) + 1))

    def __str__(self) -> str:
        return ", ".join(sorted(self.modules)) or "no module"


def check_rules(job_file: JobFile, allow: AllowList) -> None:
    """Raises :class:`ConfigError` with every name that a submitted job may not use, one per line."""
    findings = Findings(job_file)
    for name, pipeline in job_file.jobs.pipelines.items():
        for i, reward in enumerate(pipeline.rewards):
            where = ("reward", i) if isinstance(pipeline.reward, list) else ("reward",)
            module, _, function = reward.partition(":")
            if not _is_import_path(module) or not function.isidentifier():
                text = "a reward has the form module:function, for example my_rewards:chain"
                findings.problem(text, "pipelines", name, *where, value=reward)
            elif not allow.permits(reward):
                text = (
                    f"this code is not allowed here ({allow} is); the built-in tasks and rewards always are. "
                    "Start `longtail up` with --allow MODULE for more"
                )
                findings.problem(text, "pipelines", name, *where, value=reward)
        for keys, path in _paths(pipeline):
            if _leaves(path, job_file.base):
                text = f"a relative path must stay in the jobs folder {job_file.base}; else give an absolute one"
                findings.problem(text, "pipelines", name, *keys, value=path)
    if findings.problems:
        raise ConfigError("\n".join(text for _, text in sorted(findings.problems, key=lambda problem: problem[0])))


def _is_import_path(module: str) -> bool:
    return all(part.isidentifier() for part in module.split("."))


def _paths(pipeline: Pipeline) -> list[tuple[tuple[str, ...], str]]:
    """Keys that name files or folders, with what they name."""
    found: list[tuple[tuple[str, ...], str]] = []
    if pipeline.model not in BUILT_IN and (not HUB_ID.fullmatch(pipeline.model) or pipeline.model.startswith(".")):
        found.append((("model",), pipeline.model))
    if pipeline.task.endswith(".jsonl"):
        found.append((("task",), pipeline.task))
    if pipeline.rollout.ranker is not None:
        found.append((("rollout", "ranker"), pipeline.rollout.ranker))
    return found


def _leaves(path: str, base: Path) -> bool:
    whole = os.path.expanduser(path)
    return not os.path.isabs(whole) and not Path(os.path.normpath(base / whole)).is_relative_to(base)
