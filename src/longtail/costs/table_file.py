"""Cost tables as JSON (``plain.py``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from longtail.costs import plain
from longtail.costs.plain import Node
from longtail.costs.table import CostTable, DecodeGrid, PrefillCosts, Slowdowns, SwitchCosts, TableKey

VERSION = 1
WHAT = "cost table"

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


def from_plain(value: Any, *, source: str = "the cost table") -> CostTable:
    """The inverse of :func:`to_plain`. Raises :class:`ConfigError`, which names ``source`` and the key."""
    return _read(Node(value, source, WHAT))


def load(path: Path) -> CostTable:
    """Raises :class:`ConfigError`, which names the file and the key."""
    return _read(plain.load(path, WHAT))


def save(table: CostTable, path: Path) -> None:
    """Write ``path`` whole or not at all. Raises ``OSError``."""
    plain.save(to_plain(table), path)


def _read(top: Node) -> CostTable:
    top.version("cost_table", VERSION)
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
        decode=_by_degree(top.take("decode"), _grid),
        prefill=_by_degree(top.take("prefill"), _prefill),
        switch=_switch(top.take("switch")),
        train_token_s=top.take("train_token_s").optional(Node.number),
        same_worker=_slowdowns(top.take("same_worker")),
        neighbour_worker=_slowdowns(top.take("neighbour_worker")),
    )
    top.done()
    return table


def _by_degree(node: Node, read: Callable[[Node], T]) -> dict[int, T]:
    values = {}
    for key in node.mapping():
        if not key.isascii() or not key.isdecimal() or int(key) < 1:
            node.child(key, None).fail("is no tensor-parallel degree")
        values[int(key)] = read(node.take(key))
    if 1 not in values:
        node.fail("must have degree 1")
    return values


def _grid(node: Node) -> DecodeGrid:
    batches, contexts = node.take("batches").ascending(), node.take("contexts").ascending()
    rows = node.take("seconds")
    seconds = tuple(row.row(len(contexts)) for row in rows.items())
    if len(seconds) != len(batches):
        rows.fail(f"must have {len(batches)} rows, one for each batch")
    node.done()
    return DecodeGrid(batches=batches, contexts=contexts, seconds=seconds)


def _prefill(node: Node) -> PrefillCosts:
    chunks = node.take("chunk_tokens").ascending()
    costs = PrefillCosts(chunk_tokens=chunks, seconds_per_token=node.take("seconds_per_token").row(len(chunks)))
    node.done()
    return costs


def _switch(node: Node) -> SwitchCosts:
    costs = SwitchCosts(
        handshake_s=node.take("handshake_s").number(),
        move_s=node.take("move_s").number(),
        move_byte_s=node.take("move_byte_s").number(),
    )
    node.done()
    return costs


def _slowdowns(node: Node) -> Slowdowns:
    return node.by_work(lambda factor: factor.number(positive=True))
