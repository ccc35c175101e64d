"""Cost tables as JSON: strict to read, easy to look at.

A table that cannot be what the profiler wrote (another version, a missing or unknown key, a number that cannot be) is a
:class:`~longtail.core.errors.ConfigError` that names the file and the key: planning with half a table would be silent
nonsense, and measuring anew takes seconds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from longtail.core.errors import ConfigError
from longtail.costs.table import CostTable, DecodeGrid, PrefillCosts, Slowdowns, SwitchCosts, TableKey

VERSION = 1

T = TypeVar("T")


def to_plain(table: CostTable) -> dict[str, Any]:
    """The table as JSON takes it."""
    return {
        "cost_table": VERSION,
        **table.key._asdict(),
        "measured": table.measured,
        "detail": table.detail,
        "kv_heads": table.kv_heads,
        "kv_bytes": table.kv_bytes,
        "decode": {
            str(degree): {
                "batches": [*grid.batches],
                "contexts": [*grid.contexts],
                "seconds": [*map(list, grid.seconds)],
            }
            for degree, grid in sorted(table.decode.items())
        },
        "prefill": {
            str(degree): {"chunk_tokens": [*costs.chunk_tokens], "seconds_per_token": [*costs.seconds_per_token]}
            for degree, costs in sorted(table.prefill.items())
        },
        "switch": dict(vars(table.switch)),
        "train_token_s": table.train_token_s,
        "same_worker": {work: dict(beside) for work, beside in table.same_worker.items()},
        "neighbour_worker": {work: dict(beside) for work, beside in table.neighbour_worker.items()},
    }


def from_plain(plain: Any, *, source: str = "the cost table") -> CostTable:
    """The inverse of :func:`to_plain`. Raises :class:`ConfigError`, which names ``source`` and the key."""
    top = _Node(plain, source)
    version = top.take("cost_table").whole(0)
    if version != VERSION:
        top.fail(f"is of version {version}, this Longtail reads version {VERSION}; measure again: longtail profile")
    table = CostTable(
        key=TableKey(
            machine=top.take("machine").text(),
            model=top.take("model").text(),
            dtype=top.take("dtype").text(),
            communicator=top.take("communicator").text(),
            threads=top.take("threads").whole(1),
        ),
        measured=top.take("measured").text(),
        detail=top.take("detail").one_of("coarse", "full"),
        kv_heads=top.take("kv_heads").whole(1),
        kv_bytes=top.take("kv_bytes").whole(1),
        decode=top.take("decode").by_degree(_grid),
        prefill=top.take("prefill").by_degree(_prefill),
        switch=_switch(top.take("switch")),
        train_token_s=top.take("train_token_s").optional(_Node.seconds),
        same_worker=_slowdowns(top.take("same_worker")),
        neighbour_worker=_slowdowns(top.take("neighbour_worker")),
    )
    top.done()
    return table


def load(path: Path) -> CostTable:
    """Raises :class:`ConfigError`, which names the file and the key."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: this cost table cannot be read ({e.strerror}).") from e
    except ValueError as e:
        raise ConfigError(f"{path}: this cost table is no JSON ({e}); measure again: longtail profile") from e
    return from_plain(plain, source=str(path))


def save(table: CostTable, path: Path) -> None:
    """Write ``path`` whole or not at all. Raises ``OSError``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(_lines(to_plain(table)) + "\n", encoding="utf-8")
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


class _Node:
    """A value of the file and the way to it; readers return what is there, or fail with the key."""

    def __init__(self, value: Any, source: str, key: str = "") -> None:
        self.value, self._source, self._key = value, source, key
        self._taken: set[str] = set()

    def fail(self, problem: str) -> NoReturn:
        raise ConfigError(f"{self._source}: {self._key or 'the cost table'} {problem}.")

    def child(self, key: str, value: Any) -> _Node:
        return _Node(value, self._source, f"{self._key}.{key}" if self._key else key)

    def take(self, key: str) -> _Node:
        if key not in self.mapping():
            self.child(key, None).fail("is missing")
        self._taken.add(key)
        return self.child(key, self.value[key])

    def done(self) -> None:
        """Fail if there is a key that nobody took."""
        for key in self.mapping():
            if key not in self._taken:
                self.child(key, None).fail("is unknown")

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

    def seconds(self, *, positive: bool = False) -> float:
        number = self.value
        ok = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
        if not ok or number < 0 or (positive and number == 0):
            self.fail("must be a number above 0" if positive else "must be a number of at least 0")
        return float(number)

    def optional(self, read: Callable[[_Node], float]) -> float | None:
        return None if self.value is None else read(self)

    def items(self) -> list[_Node]:
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
        numbers = tuple(item.seconds(positive=True) for item in self.items())
        if len(numbers) != n:
            self.fail(f"must have {n} numbers")
        return numbers

    def by_degree(self, read: Callable[[_Node], T]) -> dict[int, T]:
        values = {}
        for key in self.mapping():
            if not key.isascii() or not key.isdecimal() or int(key) < 1:
                self.child(key, None).fail("is no tensor-parallel degree")
            values[int(key)] = read(self.take(key))
        if 1 not in values:
            self.fail("must have degree 1")
        return values


def _grid(node: _Node) -> DecodeGrid:
    batches, contexts = node.take("batches").ascending(), node.take("contexts").ascending()
    rows = node.take("seconds")
    seconds = tuple(row.row(len(contexts)) for row in rows.items())
    if len(seconds) != len(batches):
        rows.fail(f"must have {len(batches)} rows, one for each batch")
    node.done()
    return DecodeGrid(batches=batches, contexts=contexts, seconds=seconds)


def _prefill(node: _Node) -> PrefillCosts:
    chunks = node.take("chunk_tokens").ascending()
    costs = PrefillCosts(chunk_tokens=chunks, seconds_per_token=node.take("seconds_per_token").row(len(chunks)))
    node.done()
    return costs


def _switch(node: _Node) -> SwitchCosts:
    costs = SwitchCosts(
        handshake_s=node.take("handshake_s").seconds(),
        move_s=node.take("move_s").seconds(),
        move_byte_s=node.take("move_byte_s").seconds(),
    )
    node.done()
    return costs


def _slowdowns(node: _Node) -> Slowdowns:
    def inner(work: _Node) -> Mapping[str, float]:
        return {beside: work.take(beside).seconds(positive=True) for beside in work.mapping()}

    return {work: inner(node.take(work)) for work in node.mapping()}
