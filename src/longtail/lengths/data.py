"""Prompts and how long their answers were: what rankers learn from and are judged by.

:func:`read_lengths` reads JSON lines, `datasets` folders, request logs and run stores. Several sources stay apart:
their units, models and limits differ, so a row of one is never compared with a row of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np

from longtail.core.errors import ConfigError, DataError
from longtail.lengths.data_columns import ColumnReader, Columns, RawSample
from longtail.lengths.data_logs import LogReader, is_log, join_batches
from longtail.lengths.data_rows import Row, is_datasets_folder, read_rows
from longtail.lengths.data_values import Input, LengthData, Sample, digest, join, split
from longtail.lengths.messages import whole_text
from longtail.lengths.units import CountTokens, Unit

__all__ = ["Columns", "LengthData", "ReadRun", "Sample", "join", "read_lengths", "split"]

Format = Literal["auto", "jsonl", "openai", "datasets", "run"]
HEAD = 100
"""So many rows are looked at to choose columns."""
COUNT_AT_ONCE = 512
WIDE_WORDS = 15
"""More characters a word than any language has that writes spaces; 4 to 8 are usual."""


ReadRun = Callable[[Path], Mapping[str, Iterable[Sample]]]
"""The samples of a run folder by source name, in tokens; ``runtime/rank_data.py`` has one."""


def read_lengths(
    path: str | Path | Sequence[str | Path],
    *,
    unit: str | None = None,
    format: Format = "auto",
    columns: Columns | None = None,
    model: str | None = None,
    split: str | None = None,
    skip_bad: bool = False,
    count_tokens: CountTokens | None = None,
    read_run: ReadRun | None = None,
) -> LengthData:
    """Read one or several files or folders; each is a source of its own (a run folder: each of its pipelines).

    ``unit``: tokens, words, chars or tokens:MODEL; None takes what the data gives, or counts words. ``model`` keeps
    the answers of one model where rows name several. ``split`` chooses a split of a `datasets` folder. With
    ``skip_bad``, bad rows are left out and told in ``notes``. ``count_tokens`` is needed for tokens:MODEL and
    ``read_run`` for run folders.

    Raises :class:`DataError` naming file and line of the first bad row, :class:`ConfigError` for options that cannot
    work.
    """
    paths = [Path(p) for p in ([path] if isinstance(path, (str, Path)) else path)]
    reader = _Reader(
        unit=None if unit is None else Unit.parse(unit),
        format=format,
        columns=columns or Columns(),
        model=model,
        split=split,
        skip_bad=skip_bad,
        count_tokens=count_tokens,
        read_run=read_run,
    )
    parts = [source for p in paths for source in reader.open(p)]
    reader.join_logs(parts)
    return join([source.finish() for source in parts])


# -- reading --------------------------------------------------------------------------------------------------------


@dataclass
class _Source:
    """The rows of one source while they are read: samples by the prompt's digest, and what there is to tell."""

    name: str
    path: Path
    skip_bad: bool
    unit: Unit = field(default_factory=lambda: Unit("tokens"))
    log: LogReader | None = None
    inputs: dict[int, Input] = field(default_factory=dict)
    samples: dict[int, list[tuple[float, bool]]] = field(default_factory=dict)
    rows: int = 0
    bad: list[str] = field(default_factory=list)
    replaced: int = 0
    surrogates: int = 0
    other_model: int = 0
    counted_words: int = 0
    counted_chars: int = 0

    def add(self, prompt: Input, length: float, censored: bool) -> None:
        clean = whole_text(prompt) if isinstance(prompt, str) else prompt
        self.surrogates += clean != prompt
        key = digest(clean)
        self.inputs.setdefault(key, clean)
        self.samples.setdefault(key, []).append((length, censored))

    def problem(self, where: str, text: str) -> None:
        """Raise, or count if bad rows are to be left out."""
        message = f"{where}: {text}"
        if not self.skip_bad:
            raise DataError(f"{message}. Mend the row, or leave out such rows with --skip-bad.")
        self.bad.append(message)

    def finish(self) -> LengthData:
        if not self.samples:
            raise DataError(self._why_empty())
        medians = [_median(samples) for samples in self.samples.values()]
        return LengthData(
            inputs=list(self.inputs.values()),
            lengths=np.array([length for length, _ in medians], dtype=np.float64),
            sources=np.zeros(len(medians), dtype=np.int32),
            source_names=[self.name],
            unit=str(self.unit),
            censored=np.array([censored for _, censored in medians], dtype=bool),
            notes=tuple(self._notes()),
        )

    def _why_empty(self) -> str:
        if self.bad:
            return f"{self.path}: not one of {self.rows:,} rows can be used; the first: {self.bad[0]}"
        if self.log is not None and self.log.unanswered:
            return f"{self.path}: these are requests without answers: give the Batch API's output file too"
        return f"{self.path} has no rows"

    def _notes(self) -> Iterator[str]:
        if self.bad:
            yield f"{self.name}: {len(self.bad):,} of {_rows(self.rows)} left out as bad, the first is {self.bad[0]}"
        if self.replaced:
            yield f"{self.name}: {_rows(self.replaced)} had bytes that are not UTF-8; U+FFFD stands for them"
        if self.surrogates:
            yield f"{self.name}: {_rows(self.surrogates)} had halves of surrogate pairs; U+FFFD stands for them"
        if self.other_model:
            yield f"{self.name}: {_rows(self.other_model)} of other models left out"
        if self.counted_chars > WIDE_WORDS * max(1, self.counted_words) and self.counted_words:
            yield (
                f"{self.name}: words are what white space separates, and these responses have hardly any: count them "
                "with --unit chars or tokens:MODEL"
            )
        if self.log is not None and self.log.failed:
            yield f"{self.name}: {self.log.failed:,} failed requests left out: they have no answer"
        if self.log is not None and self.log.unanswered:
            yield f"{self.name}: {self.log.unanswered:,} requests without an answer left out"


@dataclass(frozen=True, kw_only=True)
class _Reader:
    unit: Unit | None
    format: Format
    columns: Columns
    model: str | None
    split: str | None
    skip_bad: bool
    count_tokens: CountTokens | None
    read_run: ReadRun | None

    def open(self, path: Path) -> list[_Source]:
        """The sources of a path with all their rows read; halves of batch files wait for :meth:`join_logs`."""
        if self.format == "run" or (self.format == "auto" and (path / "events.jsonl").is_file()):
            return self._run_sources(path)
        if self.format == "datasets" and not is_datasets_folder(path):
            raise DataError(f"{path} is no folder that save_to_disk of the `datasets` library has made (--format)")
        rows = read_rows(path, split=self.split)
        head = list(islice(rows, HEAD))
        source = _Source(path.name or str(path), path, self.skip_bad)
        records = [row.record for row in head if row.record is not None]
        is_openai = self.format == "openai" or (self.format == "auto" and any(is_log(r) for r in records[:10]))
        if is_openai:
            self._read_log(source, chain(head, rows))
        else:
            self._read_columns(source, head, rows)
        return [source]

    def join_logs(self, sources: list[_Source]) -> None:
        """Give answers the prompts that stand in another file (the Batch API's input and output)."""
        logs = [(source, source.log) for source in sources if source.log is not None]
        for (source, log), samples in zip(logs, join_batches([log for _, log in logs]), strict=True):
            self._add(source, samples)
            for custom_id, answer in log.answers.items():
                text = f"no request, or several different ones, have the custom_id {custom_id!r} of this answer"
                source.problem(answer.where, f"{text}: give the Batch API's input file that belongs to it")
        served = [s for s in sources if s.log is None or s.samples or s.bad or not s.log.served]
        sources[:] = served

    def _run_sources(self, path: Path) -> list[_Source]:
        if not (path / "events.jsonl").is_file():
            raise DataError(f"{path} is no folder of a run: it has no events.jsonl (--format)")
        if self.read_run is None:
            raise ConfigError(f"{path} is a run folder: read it with `longtail rank`")
        if self.unit is not None and (self.unit.kind != "tokens" or self.unit.model is not None):
            raise ConfigError(
                f"{path}: a run keeps the lengths of its samples in tokens only, so --unit must be tokens"
            )
        sources = []
        for name, samples in self.read_run(path).items():
            source = _Source(name, path, self.skip_bad)
            for sample in samples:
                source.rows += 1
                source.add(sample.prompt, sample.length, sample.censored)
            sources.append(source)
        return sources

    def _read_columns(self, source: _Source, head: list[Row], rest: Iterable[Row]) -> None:
        records = [row.record for row in head if row.record is not None]
        if not records:
            for row in chain(head, rest):
                source.rows += 1
                source.problem(row.where, row.problem or "no row")
            return
        first = next(row.where for row in head if row.record is not None)
        reader = ColumnReader.choose(first, records, self.columns, unit=self.unit, model=self.model)
        source.unit = reader.unit
        self._read(source, chain(head, rest), lambda where, record: reader.read(record))
        self._check_model(source, reader.models)

    def _read_log(self, source: _Source, rows: Iterable[Row]) -> None:
        source.unit = self.unit or Unit("tokens")
        source.log = reader = LogReader(source.unit, self.model)
        self._read(source, rows, reader.read)
        self._check_model(source, reader.models)

    def _read(self, source: _Source, rows: Iterable[Row], read: Callable[[str, dict], list[RawSample]]) -> None:
        raws: list[RawSample] = []
        for row in rows:
            source.rows += 1
            source.replaced += row.replaced
            if row.record is None:
                source.problem(row.where, row.problem or "no row")
                continue
            try:
                found = read(row.where, row.record)
            except ValueError as error:
                source.problem(row.where, str(error))
                continue
            source.other_model += not found and source.log is None
            raws += found
            if len(raws) >= COUNT_AT_ONCE:
                self._add(source, raws)
                raws = []
        self._add(source, raws)

    def _add(self, source: _Source, raws: list[RawSample]) -> None:
        texts = [whole_text(raw.text) for raw in raws if raw.text is not None]
        counts = source.unit.count(texts, self.count_tokens) if texts else []
        if source.unit.kind == "words":
            source.counted_words += sum(counts)
            source.counted_chars += sum(map(len, texts))
        counted = iter(counts)
        for raw in raws:
            length = raw.length if raw.length is not None else float(next(counted))
            source.add(raw.prompt, length, raw.censored)

    def _check_model(self, source: _Source, met: set[str]) -> None:
        if self.model is None or source.samples or source.bad:
            return
        import difflib

        names = sorted(met)
        close = difflib.get_close_matches(self.model, names, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}?" if close else f"the rows name {', '.join(names[:10]) or 'none'}"
        raise DataError(f"{source.path} has no answers of a model {self.model!r} (--model); {hint}")


def _median(samples: list[tuple[float, bool]]) -> tuple[float, bool]:
    """Median length, and whether it is only a lower bound because a middle sample was cut off."""
    ordered = sorted(samples)
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return sum(length for length, _ in middle) / len(middle), any(censored for _, censored in middle)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
