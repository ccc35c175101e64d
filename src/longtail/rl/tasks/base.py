"""What a task is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Messages = list[dict[str, Any]]
Prompts = Sequence[str | Messages]
Completions = Sequence[str | Messages]


@dataclass(frozen=True)
class Example:
    """One prompt: a text, or messages for the model's chat template.

    ``columns`` are the values that reward functions get for each sample of it, by name.
    """

    prompt: str | Messages
    columns: dict[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """A source of examples, each a pure function of (task, seed, index), and usually a reward for them."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None:
        """Number of examples; None if there is one for every index."""

    def example(self, index: int) -> Example:
        """The example at ``index`` >= 0 (and below ``size``)."""

    @property
    def score(self) -> Callable[..., list[float]] | None:
        """The task's own reward function, with TRL's signature, or None where the job must name one."""
