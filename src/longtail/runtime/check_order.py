"""Start-up checks of how a rollout is placed: the ranker loads, forced lengths are there and possible, and the model
can be split as asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longtail.core.config import Rollout
from longtail.core.errors import DataError
from longtail.engine.config import ModelConfig
from longtail.rl.tasks import Task
from longtail.runtime.plan import Ranks
from longtail.runtime.prompts import SAMPLE, row_name


def why_not_oracle(rollout: Rollout) -> str | None:
    """What is wrong with ``order: oracle``; None if nothing is."""
    if rollout.order != "oracle" or rollout.forced_lengths is not None:
        return None
    return (
        "the true lengths are known only in fixed-length mode; name the column of the task's data that holds them in"
        " forced_lengths, or use ranked"
    )


def why_not_tp(rollout: Rollout, model: ModelConfig, workers: int) -> str | None:
    """What is wrong with ``tp`` for this model on so many workers; None if nothing is."""
    tp = rollout.tp
    if isinstance(tp, int) and tp > model.kv_heads:
        can = "1" if model.kv_heads == 1 else f"1 to {model.kv_heads}"
        heads = f"{model.kv_heads} KV head{'s' * (model.kv_heads > 1)}"
        return f"the model has {heads}, and each worker of a group needs one, so tp can be {can} (or auto)"
    if isinstance(tp, int) and tp > workers:
        return f"there are only {workers} workers, so tp can be 1 to {workers} (or auto)"
    if tp == "oracle" and rollout.forced_lengths is None:
        return (
            "the true lengths are known only in fixed-length mode; name the column of the task's data that holds them"
            " in forced_lengths, or use auto"
        )
    return None


def check_forced_lengths(task: Task, column: str, max_tokens: int) -> None:
    """Every example (of an endless task the first :data:`SAMPLE`) has a list of possible lengths in ``column``.

    Raises :class:`DataError` naming the first row that has not.
    """
    for index in range(SAMPLE if task.size is None else task.size):
        columns = task.example(index).columns
        if column not in columns:
            names = ", ".join(map(repr, columns)) or "none"
            raise DataError(f"the task's data have no column {column!r}; its columns are {names}")
        lengths = columns[column]
        if not isinstance(lengths, list) or not lengths or not all(_is_length(n, max_tokens) for n in lengths):
            raise DataError(
                f"{row_name(task, index)}: {column!r} must be a list of whole numbers from 1 to max_tokens ="
                f" {max_tokens:,}, not {str(lengths)[:60]}"
            )


def _is_length(value: Any, max_tokens: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= max_tokens


def load_ranker(rollout: Rollout, *, base: Path) -> Ranks | None:
    """The ranker that ``rollout`` asks for; None if it asks for none. Raises ``RankerError`` if it cannot be used."""
    if rollout.order != "ranked":
        return None
    from longtail.lengths.ranker import Ranker

    return Ranker.load(None if rollout.ranker is None else base / Path(rollout.ranker))
