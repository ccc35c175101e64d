"""Rows out of files and folders: JSON lines (also gzipped), JSON arrays, parquet, `datasets` folders, plain folders.

What a file is is seen from its first bytes, not from its name. Files are read once, front to back, so pipes work too.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from longtail.core.errors import ConfigError, DataError

SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".parquet")
"""Files of a plain folder that hold rows; ``.json`` and ``.json.gz`` count only where there are none of these."""
BATCH = 1024
MOST_LEVELS = 4
"""So deep a plain folder is searched: the wrong folder should not mean a whole disk."""
CSV_NAME = re.compile(rb'\s*"?[\w .-]{1,40}"?\s*')
INSTALL_DATASETS = "pip install 'longtail[datasets]'"


class Row(NamedTuple):
    """One row and where it stands. Either ``record`` or ``problem`` is set."""

    where: str
    record: dict[str, Any] | None
    problem: str | None = None
    replaced: bool = False
    """Some of its bytes were no UTF-8; U+FFFD stands for them."""


def read_rows(path: Path, *, split: str | None = None) -> Iterator[Row]:
    """All rows of a file or folder, in order; blank lines are none. A bad row is yielded with its problem.

    ``split`` chooses among the splits of a `datasets` folder, or the files of a plain folder by the start of their
    names. Raises :class:`DataError` for what cannot be read at all, :class:`ConfigError` for a split that is not there.
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder{_near(path)}")
    if path.is_dir():
        return _folder_rows(path, split)
    if split is not None:
        raise ConfigError(f"{path} is a file and has no splits: leave out --split")
    return _file_rows(path)


def _near(path: Path) -> str:
    import difflib

    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


# -- files ----------------------------------------------------------------------------------------------------------


def _file_rows(path: Path) -> Iterator[Row]:
    with _opened(path) as file:
        start = file.peek(4096)[:4096]
        if start.startswith(b"PAR1"):
            yield from _parquet_rows(path)
            return
        _refuse_other_formats(path, start)
        bom = start.startswith(b"\xef\xbb\xbf")
        if start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            yield from _array_rows(path, file.read())
            return
        for number, line in enumerate(_lines(path, file), start=1):
            if bom and number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield line_row(f"{path}:{number}", line)


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """The file's bytes, unzipped if they are gzip."""
    try:
        with path.open("rb") as raw:
            if raw.peek(2)[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=raw) as unzipped:
                    yield io.BufferedReader(unzipped)
            else:
                yield raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: the gzip data is damaged or cut off ({error}): fetch the file again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _lines(path: Path, file: io.BufferedReader) -> Iterator[bytes]:
    number = 0
    try:
        for number, line in enumerate(file, start=1):  # noqa: B007
            yield line
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path}:{number + 1}: the gzip data is damaged or cut off here: fetch it again") from error


def line_row(where: str, line: bytes) -> Row:
    text, replaced = _decode(line)
    try:
        value = json.loads(text, strict=False)  # not strict: raw control characters inside strings are common in logs
    except RecursionError:
        return Row(where, None, "nested too deeply to be data")
    except ValueError as error:
        return Row(where, None, f"not JSON ({_json_reason(error)}); each line must be one JSON object")
    return _row(where, value, replaced)


def _array_rows(path: Path, data: bytes) -> Iterator[Row]:
    """The items of one JSON array, one by one: an array that is cut off gives the items before the cut."""
    text, replaced = _decode(data.removeprefix(b"\xef\xbb\xbf"))
    decoder = json.JSONDecoder(strict=False)
    line, counted = 1, 0
    place = _skip(text, text.index("[") + 1, " \t\r\n")
    while place < len(text) and text[place] != "]":
        line += text.count("\n", counted, place)
        counted = place
        where = f"{path}:{line}"
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            reason = _json_reason(error) if isinstance(error, ValueError) else "nested too deeply"
            yield Row(where, None, f"the JSON array is damaged or cut off from this item on ({reason})")
            return
        yield _row(where, value, replaced)
        replaced = False  # counted once: nobody knows which item it was
        place = _skip(text, place, " \t\r\n,")
    if place >= len(text):
        yield Row(f"{path}:{line}", None, "the JSON array is cut off: it has no closing bracket")


def _skip(text: str, place: int, what: str) -> int:
    while place < len(text) and text[place] in what:
        place += 1
    return place


def _row(where: str, value: Any, replaced: bool) -> Row:
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a text", type(None): "null", bool: "true or false"}.get(type(value), "a number")
        return Row(where, None, f"each row must be a JSON object with columns, not {kind}")
    return Row(where, value, None, replaced)


def _decode(data: bytes) -> tuple[str, bool]:
    try:
        return data.decode(), False
    except UnicodeDecodeError:
        return data.decode(errors="replace"), True


def _json_reason(error: ValueError) -> str:
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)[:80]


def _refuse_other_formats(path: Path, start: bytes) -> None:
    kinds = {
        b"\x28\xb5\x2f\xfd": "compressed with zstd: decompress it first",
        b"BZh": "compressed with bzip2: decompress it first",
        b"\xfd7zXZ": "compressed with xz: decompress it first",
        b"PK\x03\x04": "a zip archive: unpack it first",
        b"ARROW1": "an Arrow file: give the `datasets` folder it lies in",
        b"\xff\xff\xff\xff": "an Arrow stream: give the `datasets` folder it lies in",
        b"\xff\xfe": "UTF-16 text: convert it to UTF-8",
        b"\xfe\xff": "UTF-16 text: convert it to UTF-8",
        b"SQLite format": "an SQLite database: export it as JSON lines",
    }
    for magic, what in kinds.items():
        if start.startswith(magic):
            raise DataError(f"{path} is {what}")
    if _is_csv(start.removeprefix(b"\xef\xbb\xbf")):
        raise DataError(f"{path} looks like CSV: convert it to JSON lines, objects with a prompt and a length")


def _is_csv(start: bytes) -> bool:
    """A line of names and a line with as many fields; JSON begins with a bracket or a quote."""
    lines = start.split(b"\n")
    if len(lines) < 2 or lines[0].lstrip()[:1] in b'{["':
        return False
    names = lines[0].strip().split(b",")
    return len(names) > 1 and lines[1].count(b",") >= len(names) - 1 and all(CSV_NAME.fullmatch(n) for n in names)


def _parquet_rows(path: Path, where: str | None = None) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise _needs_datasets(f"{path} is a parquet file") from error
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches(BATCH):
            for record in batch.to_pylist():
                number += 1
                yield Row(f"{where or path}:row {number}", record)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: the parquet file is damaged: {' '.join(str(error).split())[:160]}") from error


def _needs_datasets(what: str) -> DataError:
    return DataError(f"{what}, which needs a package that is not installed: {INSTALL_DATASETS}")


# -- folders --------------------------------------------------------------------------------------------------------


def is_datasets_folder(path: Path) -> bool:
    """Whether ``save_to_disk`` of `datasets` made this folder (a Dataset or a DatasetDict)."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _folder_rows(path: Path, split: str | None) -> Iterator[Row]:
    if is_datasets_folder(path):
        yield from _datasets_rows(path, split)
        return
    for file in _data_files(path, split):
        yield from _file_rows(file)


def _datasets_rows(path: Path, split: str | None) -> Iterator[Row]:
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError as error:
        raise _needs_datasets(f"{path} is a folder of the `datasets` library") from error
    try:
        data = load_from_disk(str(path))
    except Exception as error:  # Arrow's, the file system's and the library's own kinds
        raise DataError(f"{path}: the `datasets` folder is damaged: {' '.join(str(error).split())[:160]}") from error
    where = str(path)
    if isinstance(data, DatasetDict):
        name = _choose_split(path, list(data), split)
        data, where = data[name], f"{path}[{name}]"
    elif split is not None:
        raise ConfigError(f"{path} holds one dataset without splits: leave out --split")
    number = 0
    for table in data.with_format("arrow").iter(BATCH):  # as Arrow, so that images and audio are not decoded
        for record in table.to_pylist():
            number += 1
            yield Row(f"{where}:row {number}", record)


def _choose_split(path: Path, names: list[str], wanted: str | None) -> str:
    if wanted in names:
        return str(wanted)
    listed = ", ".join(names)
    if wanted is not None:
        raise ConfigError(f"{path} has no split {wanted!r}; it has {listed}")
    if len(names) == 1:
        return names[0]
    raise ConfigError(f"{path} has several splits; choose one with --split: {listed}")


def _data_files(path: Path, split: str | None) -> list[Path]:
    files = sorted(_walk(path))
    runs = [p.parent for p in files if p.name == "events.jsonl" and (p.parent / "config.yaml").is_file()]
    if runs:
        raise DataError(f"{path} is a folder of runs: give one of them, for example {runs[0]}")
    chosen = [p for p in files if p.name.endswith(SUFFIXES)]
    chosen = chosen or [p for p in files if p.name.endswith((".json", ".json.gz")) and _is_array(p)]
    if not chosen:
        raise DataError(f"{path} has no data: a folder must hold .jsonl, .jsonl.gz, .parquet or JSON array files")
    if split is None:
        return chosen
    of_split = [p for p in chosen if p.name.startswith(split) or split in p.relative_to(path).parts[:-1]]
    if not of_split:
        names = ", ".join(p.name for p in chosen[:5])
        raise ConfigError(f"{path} has no file whose name begins with {split!r}; it has {names}")
    return of_split


def _walk(path: Path) -> Iterator[Path]:
    """The files below ``path``, without hidden ones and hidden folders."""
    for folder, folders, names in os.walk(path):
        here = Path(folder)
        folders[:] = [
            f for f in folders if not f.startswith(".") and len(here.relative_to(path).parts) + 1 < MOST_LEVELS
        ]
        yield from (here / name for name in names if not name.startswith("."))


def _is_array(path: Path) -> bool:
    with _opened(path) as file:
        return file.peek(64)[:64].removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
