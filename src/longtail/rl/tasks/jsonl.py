"""Tasks from a file: one JSON object per line, a prompt column, and columns for the reward functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longtail.core.errors import ConfigError, DataError
from longtail.rl.tasks.arguments import nearest
from longtail.rl.tasks.base import Example

RESERVED = ("prompts", "completions")
"""Names of the arguments that every reward function gets; no column may have them."""


class JsonlTask:
    """The rows of a file, in order; it has no reward of its own, so the job names one."""

    score = None

    def __init__(self, name: str, examples: list[Example]) -> None:
        self.name = name
        self.size = len(examples)
        self._examples = examples

    def example(self, index: int) -> Example:
        return self._examples[index]


def load_jsonl(spec: str, args: dict[str, Any], base: Path) -> JsonlTask:
    """Read and check all rows of the file ``spec``, relative to ``base``.

    ``args``: ``prompt`` names the prompt's column (a text or a list of messages), ``answer`` the one that rewards
    get as ``answer``. All other columns keep their names; a row without one of them has None there. Empty lines are
    skipped.
    """
    for key, value in args.items():
        if key not in ("prompt", "answer"):
            raise ConfigError(f"task {spec} has no argument {key!r}{nearest(str(key), ['prompt', 'answer'])}")
        if not isinstance(value, str) or not value:
            raise ConfigError(f"task {spec}: {key} must be the name of a column, not {value!r}")
    path = base / Path(spec).expanduser()
    rows = _read_rows(path, spec)
    prompt, answer = args.get("prompt", "prompt"), args.get("answer")
    names = dict.fromkeys(key for _, row in rows for key in row if key != prompt)
    examples = []
    for where, row in rows:
        if answer is not None and answer not in row:
            raise DataError(_missing(where, answer, row, "answer"))
        columns = {name: row.get(name) for name in names}
        if answer is not None:
            columns["answer"] = row[answer]
        examples.append(Example(prompt=_prompt(where, row, prompt), columns=columns))
    return JsonlTask(spec, examples)


def _read_rows(path: Path, spec: str) -> list[tuple[str, dict[str, Any]]]:
    """``(file:line, row)`` of every row that is not empty."""
    try:
        data = path.read_bytes()
    except OSError as error:
        near = ""
        if path.parent.is_dir() and not path.exists():
            files = sorted(p.name for p in path.parent.glob("*.jsonl"))
            near = nearest(path.name, files) if files else f"; {path.parent} has no .jsonl file"
        raise ConfigError(f"task {spec}: cannot read {path}: {error.strerror}{near}") from error
    rows = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            rows.append((f"{path}:{number}", _parse(f"{path}:{number}", line)))
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


def _parse(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start + 1} is not UTF-8; convert the file to UTF-8") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: each line must be a JSON object with columns, not {type(row).__name__}")
    for name in RESERVED:
        if name in row:
            raise DataError(f"{where}: rename the column {name!r}: reward functions get samples under that name")
    return row


def _missing(where: str, column: str, row: dict[str, Any], argument: str) -> str:
    return (
        f"{where}: no column {column!r}; the row has {', '.join(row) or 'none'} (task_args.{argument} names the column)"
    )


def _prompt(where: str, row: dict[str, Any], column: str) -> str | list[dict[str, Any]]:
    if column not in row:
        raise DataError(_missing(where, column, row, "prompt"))
    prompt = row[column]
    if isinstance(prompt, str):
        texts = [prompt]
    elif isinstance(prompt, list) and all(map(_is_message, prompt)):
        texts = [message["content"] for message in prompt]
    else:
        raise DataError(
            f"{where}: {column!r} must be a text or a list of messages "
            f'like {{"role": "user", "content": "..."}}, not {str(prompt)[:60]!r}'
        )
    if not any(text.strip() for text in texts):
        raise DataError(f"{where}: the prompt in {column!r} is empty; fill it in or remove the row")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {column!r} holds half of a surrogate pair, which is not text") from error
    return prompt


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
