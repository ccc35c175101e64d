"""Measurements as JSON files: strict to read, easy to look at.

What cannot be what the profiler wrote (another version, a missing or unknown key, a number that cannot be) is a
:class:`~longtail.core.errors.ConfigError` that names the file and the key: planning with half a table would be silent
nonsense, and measuring anew takes seconds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from longtail.core.errors import ConfigError

T = TypeVar("T")


class Node:
    """A value of the file and the way to it; readers return what is there, or fail with the key.

    ``what`` is what the file holds, in words: ``cost table``.
    """

    def __init__(self, value: Any, source: str, what: str, key: str = "") -> None:
        self.value, self._source, self._what, self._key = value, source, what, key
        self._taken: set[str] = set()

    def fail(self, problem: str) -> NoReturn:
        raise ConfigError(f"{self._source}: {self._key or f'the {self._what}'} {problem}.")

    def child(self, key: str, value: Any) -> Node:
        return Node(value, self._source, self._what, f"{self._key}.{key}" if self._key else key)

    def take(self, key: str) -> Node:
        if key not in self.mapping():
            self.child(key, None).fail("is missing")
        self._taken.add(key)
        return self.child(key, self.value[key])

    def done(self) -> None:
        """Fail if there is a key that nobody took."""
        for key in self.mapping():
            if key not in self._taken:
                self.child(key, None).fail("is unknown")

    def version(self, key: str, known: int) -> None:
        """Fail unless the number under ``key`` is the ``known`` one."""
        found = self.take(key).whole(0)
        if found != known:
            self.fail(f"is of version {found}, this Longtail reads version {known}; measure again: longtail profile")

    def mapping(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            self.fail("must be an object with keys")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            self.fail("must be text")
        return self.value

    def one_of(self, *words: str) -> Any:
        if self.value not in words:
            self.fail(f"must be {' or '.join(words)}")
        return self.value

    def whole(self, least: int) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < least:
            self.fail(f"must be a whole number of at least {least}")
        return self.value

    def number(self, *, positive: bool = False) -> float:
        """One of at least 0."""
        number = self.value
        ok = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
        if not ok or number < 0 or (positive and number == 0):
            self.fail("must be a number above 0" if positive else "must be a number of at least 0")
        return float(number)

    def optional(self, read: Callable[[Node], float]) -> float | None:
        return None if self.value is None else read(self)

    def items(self) -> list[Node]:
        if not isinstance(self.value, list):
            self.fail("must be a list")
        return [self.child(str(i), item) for i, item in enumerate(self.value)]

    def ascending(self) -> tuple[int, ...]:
        """At least two whole numbers above 0."""
        numbers = tuple(item.whole(1) for item in self.items())
        if len(numbers) < 2 or any(a >= b for a, b in pairwise(numbers)):
            self.fail("must have at least two numbers, ascending")
        return numbers

    def row(self, n: int) -> tuple[float, ...]:
        """``n`` positive numbers."""
        numbers = tuple(item.number(positive=True) for item in self.items())
        if len(numbers) != n:
            self.fail(f"must have {n} numbers")
        return numbers

    def by_work(self, read: Callable[[Node], T]) -> dict[str, dict[str, T]]:
        """``[a][b]``: what is known of work of class a beside work of class b."""
        return {
            work: {other: read(beside.take(other)) for other in beside.mapping()}
            for work, beside in ((work, self.take(work)) for work in self.mapping())
        }


def load(path: Path, what: str) -> Node:
    """What is in the file. Raises :class:`ConfigError`, which names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: this {what} cannot be read ({e.strerror}).") from e
    except ValueError as e:
        raise ConfigError(f"{path}: this {what} is no JSON ({e}); measure again: longtail profile") from e
    return Node(value, str(path), what)


def save(plain: dict[str, Any], path: Path) -> None:
    """Write ``path`` whole or not at all. Raises ``OSError``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(_lines(plain) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _lines(value: Any, indent: str = "") -> str:
    """JSON in which a list of numbers is one line."""
    deeper = indent + "  "
    if isinstance(value, dict) and value:
        body = ",\n".join(f"{deeper}{json.dumps(key)}: {_lines(item, deeper)}" for key, item in value.items())
        return f"{{\n{body}\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        return "[\n" + ",\n".join(deeper + _lines(item, deeper) for item in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)
