"""Prompt lengths against the model's context, before step 1: the rows that are too long are named, or skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longtail.core.errors import DataError
from longtail.rl.tasks import Example, Task

SAMPLE = 64
"""How many examples of an endless task are looked at."""
REDRAW = 1 << 40
"""Distance in index between an example of an endless task and the one that stands in for it when it is too long."""
MAX_REDRAWS = 64

Encode = Callable[[Any], np.ndarray]


def prompt_lengths(task: Task, encode: Encode) -> list[int]:
    """Tokens of every prompt, or of the first :data:`SAMPLE` of an endless task.

    Raises :class:`DataError` naming the row of a prompt that cannot be encoded.
    """
    lengths = []
    for index in range(SAMPLE if task.size is None else task.size):
        try:
            lengths.append(len(encode(task.example(index).prompt)))
        except DataError as error:
            raise DataError(f"{row_name(task, index)}: {error}") from error
    return lengths


def row_name(task: Task, index: int) -> str:
    """How a person finds an example: ``row 3`` (from 1) of a file, ``example 2`` (from 0) of an endless task."""
    return f"example {index}" if task.size is None else f"row {index + 1}"


def describe_long(task: Task, lengths: Sequence[int], room: int) -> str:
    """``row 3 (5,000 tokens), row 7 (500 tokens) and 12 more`` for the prompts that have more than ``room`` tokens."""
    long = [i for i, length in enumerate(lengths) if length > room]
    names = [f"{row_name(task, i)} ({lengths[i]:,} tokens)" for i in long[:5]]
    if len(long) > 5:
        names.append(f"{len(long) - 5} more")
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""


@dataclass(frozen=True)
class KeptRows:
    """A task of given size without some of its rows; see :class:`longtail.rl.tasks.Task`."""

    task: Task
    rows: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def size(self) -> int:
        return len(self.rows)

    def example(self, index: int) -> Example:
        return self.task.example(self.rows[index])

    @property
    def score(self) -> Callable[..., list[float]] | None:
        return self.task.score


@dataclass(frozen=True)
class ShortPrompts:
    """An endless task in which an example whose prompt has more than ``room`` tokens is drawn again.

    Each index still stands for one example, whatever was asked for before.
    """

    task: Task
    encode: Encode
    room: int

    size = None

    @property
    def name(self) -> str:
        return self.task.name

    def example(self, index: int) -> Example:
        for redraw in range(MAX_REDRAWS):
            example = self.task.example(index + redraw * REDRAW)
            if len(self.encode(example.prompt)) <= self.room:
                return example
        raise DataError(
            f"{MAX_REDRAWS} examples of {self.name} in a row have prompts of more than {self.room} tokens: "
            "lower rollout.max_tokens"
        )

    @property
    def score(self) -> Callable[..., list[float]] | None:
        return self.task.score
