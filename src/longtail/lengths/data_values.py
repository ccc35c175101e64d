"""The values of ``data.py``: prompts with the lengths of their answers, put together and split.

A prompt is known by its text, or by features of it alone (``feature_rows.py``), which the light backend reads as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from longtail.core.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False, slots=True)
class PromptFeatures:
    """What was kept of a prompt instead of its text: all that the light backend sees.

    ``digest`` of the text; ``buckets`` int32 [m], ascending, with ``values`` float32 [m], and ``shape`` float32 [SHAPE]
    as in ``features.py``; ``words`` float32 [DIMENSIONS], the mean word vector of ``words.py``.
    """

    digest: int
    buckets: np.ndarray
    values: np.ndarray
    shape: np.ndarray
    words: np.ndarray


Input = str | PromptFeatures
"""A prompt as far as it is known."""


def digest(prompt: Input) -> int:
    """64 bits that say whether two prompts are the same, whichever way each is known."""
    if isinstance(prompt, PromptFeatures):
        return prompt.digest
    return int.from_bytes(hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def texts(inputs: Sequence[Input]) -> list[str]:
    """The prompts themselves, for what must read them. Raises :class:`DataError` if only features of one are known."""
    found = [prompt for prompt in inputs if isinstance(prompt, str)]
    if len(found) < len(inputs):
        which = "these" if not found else f"{len(inputs) - len(found):,} of {len(inputs):,}"
        raise DataError(f"{which} rows hold features, not prompts; only the light backend can read them, no encoder")
    return found


class Sample(NamedTuple):
    """One answer: its prompt, its length, and whether it was cut off at a limit."""

    prompt: str
    length: float
    censored: bool


@dataclass(frozen=True)
class LengthData:
    """n rows, one for each different prompt of a source, in the order of the files.

    ``inputs`` are the prompts or their features; ``prompts`` are the texts, refused if a row has none.
    ``lengths`` float64 [n] is the median over a prompt's samples; ``censored`` bool [n] says that the median hit a
    limit, so that the true length is at least that. ``sources`` int32 [n] indexes ``source_names`` and ``units``;
    ``unit`` is the common unit, or all of them joined. ``notes`` are sentences about what was left out or mended.
    """

    inputs: list[Input]
    lengths: np.ndarray
    sources: np.ndarray
    source_names: list[str]
    unit: str
    censored: np.ndarray
    units: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.units:
            object.__setattr__(self, "units", (self.unit,) * len(self.source_names))

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def prompts(self) -> list[str]:
        """Raises :class:`DataError` if only features of a prompt are known."""
        return texts(self.inputs)

    def take(self, rows: np.ndarray) -> LengthData:
        """The rows at ``rows`` (indices, or a mask), sources numbered as before."""
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        return replace(
            self,
            inputs=[self.inputs[i] for i in rows],
            lengths=self.lengths[rows],
            sources=self.sources[rows],
            censored=self.censored[rows],
        )


def join(parts: Sequence[LengthData]) -> LengthData:
    """All rows of ``parts``, each keeping its sources apart from the others'."""
    names = [name for part in parts for name in part.source_names]
    units = tuple(unit for part in parts for unit in part.units)
    starts = np.cumsum([0, *(len(part.source_names) for part in parts)])
    return LengthData(
        inputs=[prompt for part in parts for prompt in part.inputs],
        lengths=np.concatenate([np.empty(0), *(part.lengths for part in parts)]),
        sources=np.concatenate(
            [np.empty(0, np.int32), *(part.sources + start for part, start in zip(parts, starts, strict=False))]
        ).astype(np.int32),
        source_names=_distinct(names),
        unit=", ".join(dict.fromkeys(units)),
        censored=np.concatenate([np.empty(0, bool), *(part.censored for part in parts)]),
        units=units,
        notes=tuple(note for part in parts for note in part.notes),
    )


def split(data: LengthData, *, test: float, seed: int) -> tuple[LengthData, LengthData]:
    """``(train, test)``: the share ``test`` of the different prompts, and all their rows, go to the second.

    Equal prompts go to one side, whatever their source and the way they are known. Which ones is a function of (seed,
    digest of the prompt), so adding rows moves few. Both sides get at least one prompt where there are two. Raises
    :class:`ConfigError` unless 0 < test < 1.
    """
    if not 0 < test < 1:
        raise ConfigError(f"the test share must lie between 0 and 1, not at {test}")
    digests = [digest(prompt) for prompt in data.inputs]
    distinct = sorted(set(digests), key=lambda number: _split_key(seed, number))
    count = max(1, min(len(distinct) - 1, round(test * len(distinct)))) if len(distinct) > 1 else 0
    chosen = set(distinct[:count])
    in_test = np.array([number in chosen for number in digests], dtype=bool)
    return data.take(~in_test), data.take(in_test)


def _split_key(seed: int, number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "big"), digest_size=8, salt=_salt(seed)).digest()


def _salt(seed: int) -> bytes:
    return hashlib.blake2b(str(seed).encode(), digest_size=16).digest()


def _distinct(names: list[str]) -> list[str]:
    """The names, with a number where one comes again."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    count: dict[str, int] = {}
    out = []
    for name in names:
        count[name] = count.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name} ({count[name]})")
    return out
