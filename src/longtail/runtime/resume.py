"""What happens when a run is started again with a changed job file: each changed key is honoured or refused by name.

Refused is what the finished part of a run depends on so that going on would mix two experiments: the model, the
data and its order, the shape of a step, the number type. Everything else takes effect from the resumed step on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from longtail.core.config import Jobs

FIXED = {
    "model",
    "task",
    "task_args",
    "seed",
    "dtype",
    "algorithm.name",
    "algorithm.group_size",
    "rollout.prompts",
    "rollout.prompt_format",
    "rollout.forced_lengths",
}
"""Keys of a pipeline that cannot change within a run."""


class Changes(NamedTuple):
    """``problems``: why the run cannot resume, one sentence each. ``notes``: what will be different if it can."""

    problems: list[str]
    notes: list[str]


def compare_for_resume(old: Jobs, new: Jobs) -> Changes:
    """Compare the configuration that a run began with (or last resumed with) and the one it is started with now."""
    problems: list[str] = []
    notes: list[str] = []
    for name, pipeline in old.pipelines.items():
        if name not in new.pipelines:
            notes.append(f"pipelines.{name} is no longer in the job file: it stays at its last checkpoint.")
            continue
        for key, before, after in _differences(pipeline.model_dump(), new.pipelines[name].model_dump()):
            change = f"pipelines.{name}.{key} was {_shown(before)} when this run began and is {_shown(after)} now"
            if key in FIXED or key.partition(".")[0] in FIXED:
                problems.append(f"{change}, which would mix two experiments: undo it, or start over with --fresh.")
            else:
                notes.append(f"{change}: the new value holds from the resumed step on.")
    notes += [f"pipelines.{name} is new: it starts at step 0." for name in new.pipelines if name not in old.pipelines]
    top = {"name", "runs_dir", "pipelines"}
    for key, before, after in _differences(old.model_dump(exclude=top), new.model_dump(exclude=top)):
        notes.append(f"{key} was {_shown(before)} and is {_shown(after)} now: results stay the same up to rounding.")
    return Changes(problems, notes)


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of every leaf that differs; ``task_args`` counts as sections do."""
    for key in [*old, *(k for k in new if k not in old)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{key}.")
        elif before != after or type(before) is not type(after):
            yield f"{prefix}{key}", before, after


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(value)
