"""Prompts without lengths: for scoring, and for asking a server. Lines of text, or rows with a prompt column."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from longtail.core.errors import DataError
from longtail.lengths.data_columns import CONVERSATIONS, PROMPTS, find_column, listed
from longtail.lengths.data_rows import Row, line_row, read_rows
from longtail.lengths.messages import ASSISTANT, first_exchange, prompt_text, turns, whole_text

ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")

Prompt = str | list[dict[str, str]]
"""A text, or messages of OpenAI's shape that end with what is to be answered."""


def read_prompts(path: str | Path, *, column: str | None = None, split: str | None = None) -> Iterator[Prompt]:
    """The prompts of a file or folder, or of standard input (``-``), one by one as they come.

    If the first line is a JSON object, every line must be one; otherwise each line that is not blank is a prompt.
    Conversations that hold their answer give their first user message. Raises :class:`DataError` naming the line.
    """
    if str(path) == "-":
        yield from _of_lines("standard input", sys.stdin.buffer, column)
        return
    path = Path(path)
    if not path.is_file() or split is not None:
        yield from _of_rows(read_rows(path, split=split), column)
        return
    try:
        with path.open("rb") as raw:
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            with gzip.GzipFile(fileobj=raw) if zipped else raw as unzipped:
                file = io.BufferedReader(unzipped) if isinstance(unzipped, gzip.GzipFile) else unzipped
                start = file.peek(256)
                if start.startswith(b"PAR1") or ARRAY.match(start):
                    yield from _of_rows(read_rows(path), column)
                else:
                    yield from _of_lines(str(path), file, column)
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _of_lines(name: str, lines: Iterable[bytes], column: str | None) -> Iterator[Prompt]:
    numbered: Iterator[tuple[int, bytes]] = ((n, line) for n, line in enumerate(lines, start=1) if line.strip())
    head = list(islice(numbered, 1))
    if not head:
        return
    numbered = chain([(head[0][0], head[0][1].removeprefix(b"\xef\xbb\xbf"))], numbered)
    if column is not None or _is_object(head[0][1]):
        yield from _of_rows((line_row(f"{name}:{n}", line) for n, line in numbered), column)
    else:
        for _, line in numbered:
            yield line.decode(errors="replace").rstrip("\r\n")


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8-sig", "replace"), strict=False), dict)
    except (ValueError, RecursionError):
        return False


def _of_rows(rows: Iterable[Row], column: str | None) -> Iterator[Prompt]:
    chosen = column
    for row in rows:
        if row.record is None:
            raise DataError(f"{row.where}: {row.problem}")
        names = list(row.record)
        chosen = chosen or find_column(names, PROMPTS) or find_column(names, CONVERSATIONS)
        if chosen is None:
            raise DataError(f"{row.where}: no column was recognised as the prompt{listed(names)}; name it with "
                            "--prompt-column")  # fmt: skip
        if row.record.get(chosen) is None:
            raise DataError(f"{row.where}: there is no prompt in column {chosen!r}{listed(names, chosen)}")
        try:
            yield _prompt(row.record[chosen])
        except ValueError as error:
            raise DataError(f"{row.where}: {chosen!r}: {error}") from None


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return whole_text(value)
    all_turns = turns(value)
    if not all_turns:
        raise ValueError("there are no messages")
    if all_turns[-1].role in ASSISTANT:
        exchange = first_exchange(value)
        return whole_text(exchange[0] if exchange else prompt_text(value))
    if isinstance(value, Mapping) or any(not isinstance(message.get("role"), str) for message in value):
        return whole_text(prompt_text(value))
    return [{"role": turn.role, "content": whole_text(turn.text)} for turn in all_turns]
