"""What the ``longtail rank`` commands read: data with lengths, and rankers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from longtail.cli_common import stderr
from longtail.core.errors import ConfigError
from longtail.lengths.data import Columns, Format, LengthData, Sample, read_lengths
from longtail.lengths.units import UNSTATED, CountTokens, Unit
from longtail.observe.text import one_line
from longtail.rank_console import counted, warn

if TYPE_CHECKING:
    from longtail.lengths.ranker import Ranker


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where lengths come from, as :func:`read_lengths` takes it."""

    paths: Sequence[Path]
    unit: str | None = None
    format: Format = "auto"
    columns: Columns = field(default_factory=Columns)
    model: str | None = None
    split: str | None = None
    skip_bad: bool = False


def read(options: DataOptions) -> LengthData:
    """The lengths, with what was left out or mended told on stderr."""
    paths = [path.resolve() for path in options.paths]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ConfigError(f"{options.paths[number]} is given twice")
    with stderr.status("reading data"):
        data = read_lengths(
            list(options.paths),
            unit=options.unit,
            format=options.format,
            columns=options.columns,
            model=options.model,
            split=options.split,
            skip_bad=options.skip_bad,
            count_tokens=_token_counter(options.unit),
            read_run=_read_run,
        )
    for note in data.notes:
        warn(note)
    for number, name in enumerate(data.source_names):
        rows = data.sources == number
        kept = sum(not isinstance(data.inputs[i], str) for i in np.flatnonzero(rows))
        low, middle, high = np.quantile(data.lengths[rows], [0.05, 0.5, 0.95])
        cut = int(data.censored[rows].sum())
        unit = data.units[number] if data.units[number] != UNSTATED else "length (--unit says in what)"
        text = f"{unit} {low:,.0f} / {middle:,.0f} / {high:,.0f} (5 %, median, 95 %)" + (
            f", {cut:,} cut off" * bool(cut)
        )
        known = f" ({kept:,} as features)" * bool(kept)
        stderr.print(Text(f"{one_line(name)}: {counted(int(rows.sum()), 'prompt')}{known}, {text}"))
    return data


def load(folder: Path | None) -> Ranker:
    """The ranker of a folder, or the one that ships with the package."""
    from longtail.lengths.ranker import Ranker

    if folder is not None and folder.is_file():
        raise ConfigError(f"--ranker {folder}: this is a file; give the folder it lies in")
    return Ranker.load(folder)


def _token_counter(unit: str | None) -> CountTokens | None:
    model = None if unit is None else Unit.parse(unit).model
    if model is None:
        return None
    from longtail.engine.models import resolve_model
    from longtail.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_model(model))

    def count(texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in tokenizer.hf(list(texts), add_special_tokens=False, verbose=False)["input_ids"]]

    return count


def _read_run(folder: Path) -> Mapping[str, Sequence[Sample]]:
    from longtail.observe.store import read_events
    from longtail.runtime.rank_data import samples_of_run

    return samples_of_run(folder, read_events(folder))
