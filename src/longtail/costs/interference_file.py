"""What was measured of two models beside each other, as a file beside their cost tables."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from longtail.core.errors import ConfigError
from longtail.costs import plain
from longtail.costs.interference import CLASSES, SHARES, UNKNOWN, Interference, Shared, Work, model_of
from longtail.costs.plain import Node
from longtail.costs.table import Slowdowns, TableKey

VERSION = 1
WHAT = "interference table"


@dataclass(frozen=True, kw_only=True)
class Half:
    """Work of the model of ``key`` beside work of the other one: ``same_worker[a][b]`` and ``neighbour_worker[a][b]``
    are the factors of its class a beside class b of the other; see :class:`Interference`."""

    key: TableKey
    same_worker: Mapping[str, Mapping[str, Shared]]
    neighbour_worker: Slowdowns


@dataclass(frozen=True, kw_only=True)
class PairTable:
    """Two models on the same machine, with the same communicator and threads. ``measured`` is an ISO date and time."""

    measured: str
    halves: tuple[Half, Half]

    def __post_init__(self) -> None:
        one, two = (half.key for half in self.halves)
        if _of_both(one) != _of_both(two) or model_of(one) == model_of(two):
            raise ValueError(f"{one} and {two} are not two models on one machine")

    @property
    def interference(self) -> Interference:
        same: dict[tuple[Work, Work], Shared] = {}
        neighbour: dict[tuple[Work, Work], float] = {}
        for mine, other in (self.halves, self.halves[::-1]):
            model, beside = model_of(mine.key), model_of(other.key)
            same |= {((model, a), (beside, b)): f for a, row in mine.same_worker.items() for b, f in row.items()}
            neighbour |= {
                ((model, a), (beside, b)): f for a, row in mine.neighbour_worker.items() for b, f in row.items()
            }
        return Interference(same=same, neighbour=neighbour)

    def fits(self, one: TableKey, two: TableKey) -> bool:
        """Whether this is of these two, whichever comes first."""
        return {half.key for half in self.halves} == {one, two}


class Known(NamedTuple):
    """What the files of a folder say, and a sentence for each that is of no use."""

    interference: Interference
    warnings: tuple[str, ...]


def file_name(one: TableKey, two: TableKey) -> str:
    """Such as ``interference-llama-134.5M-5f2e90aa-llama-1.8M-03ab11cd-9c1b22d0.json``, whichever comes first.

    The last part tells machines apart, and how workers are set up.
    """
    keys = sorted((one, two))
    digest = hashlib.blake2b("\n".join(str(part) for key in keys for part in key).encode(), digest_size=4).hexdigest()
    words = re.sub(r"[^A-Za-z0-9._]+", "-", " ".join(key.model for key in keys)).strip("-.")
    return f"interference-{words}-{digest}.json"


def find(folder: Path, keys: Iterable[TableKey]) -> Known:
    """All that is known in ``folder`` of pairs of ``keys``."""
    found, warnings = UNKNOWN, []
    for one, two in combinations(sorted(set(keys)), 2):
        path = folder / file_name(one, two)
        try:
            if not path.is_file():
                continue
            pair = load(path)
        except ConfigError as error:
            warnings.append(f"{error} It is left out.")
            continue
        except OSError as error:  # a folder that this user may not enter
            warnings.append(f"{path}: this {WHAT} cannot be read ({error.strerror}); left out.")
            continue
        if pair.fits(one, two):
            found = found.joined(pair.interference)
        else:
            models = " and ".join(model_of(half.key) for half in pair.halves)
            machine = pair.halves[0].key.machine
            warnings.append(f"{path}: this {WHAT} was measured for something else ({models}, {machine}); left out.")
    return Known(found, tuple(warnings))


def load(path: Path) -> PairTable:
    """Raises :class:`ConfigError`, which names the file and the key."""
    return _read(plain.load(path, WHAT))


def save(folder: Path, pair: PairTable) -> Path:
    """Write the table into ``folder``, in place of an earlier one of the same two, and whole or not at all.

    Raises :class:`ConfigError` if it cannot be written.
    """
    path = folder / file_name(*(half.key for half in pair.halves))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plain.save(to_plain(pair), path)
    except OSError as error:
        raise ConfigError(f"{path}: the {WHAT} cannot be written: {error.strerror or error}.") from error
    return path


def to_plain(pair: PairTable) -> dict[str, Any]:
    """The table as JSON takes it."""
    machine, communicator, threads = _of_both(pair.halves[0].key)
    return {
        "interference": VERSION,
        "machine": machine,
        "communicator": communicator,
        "threads": threads,
        "measured": pair.measured,
        "shares": [*SHARES],
        **{name: _half(half) for name, half in zip(("first", "second"), pair.halves, strict=True)},
    }


def from_plain(value: Any, *, source: str = f"the {WHAT}") -> PairTable:
    """The inverse of :func:`to_plain`. Raises :class:`ConfigError`, which names ``source`` and the key."""
    return _read(Node(value, source, WHAT))


def _half(half: Half) -> dict[str, Any]:
    return {
        "model": half.key.model,
        "dtype": half.key.dtype,
        "same_worker": {a: {b: [*factors] for b, factors in row.items()} for a, row in half.same_worker.items()},
        "neighbour_worker": {a: dict(row) for a, row in half.neighbour_worker.items()},
    }


def _of_both(key: TableKey) -> tuple[str, str, int]:
    return key.machine, key.communicator, key.threads


def _read(top: Node) -> PairTable:
    top.version("interference", VERSION)
    machine, communicator = top.take("machine").text(), top.take("communicator").text()
    threads, measured = top.take("threads").whole(1), top.take("measured").text()
    shares = top.take("shares")
    if not all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(shares.row(len(SHARES)), SHARES, strict=True)):
        shares.fail(f"must be {', '.join(f'{share:.3f}' for share in SHARES)}")

    def half(node: Node) -> Half:
        key = TableKey(machine, node.take("model").text(), node.take("dtype").text(), communicator, threads)
        same = _classes(node.take("same_worker")).by_work(_shared)
        neighbour = _classes(node.take("neighbour_worker")).by_work(lambda factor: factor.number(positive=True))
        node.done()
        return Half(key=key, same_worker=same, neighbour_worker=neighbour)

    halves = half(top.take("first")), half(top.take("second"))
    top.done()
    try:
        return PairTable(measured=measured, halves=halves)
    except ValueError:
        top.child("second", None).fail("must be another model than first")


def _shared(node: Node) -> Shared:
    low, middle, high = node.row(len(SHARES))
    return low, middle, high


def _classes(node: Node) -> Node:
    """``node``, of which all keys, and theirs, are classes of work."""
    for work, row in node.mapping().items():
        beside = node.child(work, row)
        for name, where in ((work, beside), *((b, beside.child(b, None)) for b in beside.mapping())):
            if name not in CLASSES:
                where.fail(f"is no kind of work; there are {', '.join(CLASSES)}")
    return node
