"""Task arguments: the fields of a task's dataclass, checked by name, type and sense."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from longtail.core.errors import ConfigError

T = TypeVar("T")


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or the whole list where nothing is near; made to end a sentence."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=2, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    return f"; known: {', '.join(known)}" if known else "; it takes none"


def build(kind: Callable[..., T], spec: str, args: dict[str, Any], seed: int) -> T:
    """An instance of the task dataclass ``kind``, whose fields beside ``seed`` are all integers.

    Raises :class:`ConfigError` for unknown names and wrong types; ``__post_init__`` of ``kind`` for impossible values.
    """
    known = [field.name for field in dataclasses.fields(kind) if field.name != "seed"]  # type: ignore[arg-type]
    for name, value in args.items():
        if name not in known:
            raise ConfigError(f"task {spec} has no argument {name!r}{nearest(str(name), known)}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"task {spec}: {name} must be a whole number, not {value!r}")
    return kind(seed=seed, **args)


def require_range(spec: str, low: tuple[str, int], high: tuple[str, int], *, floor: int, ceiling: int) -> None:
    """Check ``floor <= low <= high <= ceiling`` for two named values. Raises :class:`ConfigError`."""
    for name, value in (low, high):
        if not floor <= value <= ceiling:
            raise ConfigError(f"task {spec}: {name} = {value} must be from {floor} to {ceiling}")
    if low[1] > high[1]:
        raise ConfigError(f"task {spec}: {low[0]} = {low[1]} is more than {high[0]} = {high[1]}")
