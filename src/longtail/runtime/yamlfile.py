"""YAML text to plain values, each with the line it stands on.

Scalars follow YAML 1.2, more strictly, so that a file means what it looks like:

* Numbers are decimal: ``12``, ``-3``, ``0.5``, ``.5``, ``1e-6``, ``1.0E-6``; ``1_000``, ``0x10``, ``010`` and ``1:30``
  are text.
* Only ``true`` and ``false`` are booleans; ``yes``, ``no``, ``on`` and ``off`` are text, and so are dates.
* ``null``, ``~`` and nothing at all are null.
* A key that appears twice is an error; anchors, aliases and ``<<`` merges work; tags (``!!float``) are refused.

Unquoted text that other YAML readers take for a number or a boolean is listed in :attr:`Document.ambiguous`, so that
places without a declared type can refuse it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

Path_ = tuple[str | int, ...]

NULL = {"", "~", "null", "Null", "NULL"}
BOOL = {w: w[0] in "tT" for w in ("true", "True", "TRUE", "false", "False", "FALSE")}
INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
NONFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
AMBIGUOUS = re.compile(
    r"(?i:y|n|yes|no|on|off)|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])*(\.[0-9_]*)?([eE][-+]?[0-9]+)?|[-+]?0[xob][0-9a-fA-F_]+"
)
MAX_NODES = 100_000


class Problem(NamedTuple):
    """Something wrong on a line (1-based; 0 for the file as a whole)."""

    line: int
    message: str


@dataclass
class Document:
    """``data`` in plain Python values; ``lines`` and ``sources`` (scalars as written) by path."""

    data: Any = None
    lines: dict[Path_, int] = field(default_factory=dict)
    sources: dict[Path_, str] = field(default_factory=dict)
    ambiguous: set[Path_] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def line(self, path: Path_) -> int:
        """The line of the nearest enclosing thing that has one; 0 if none."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)


def read(text: str, *, most_nodes: int | None = MAX_NODES) -> Document:
    """Parse ``text``. Never raises: what is wrong is in ``problems``, also if aliases make more than ``most_nodes``
    values of it."""
    document = Document()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        document.problems += [
            Problem(line, f"tags such as {tag} are not used here; write the plain value.") for line, tag in loader.tags
        ]
        if node is not None:
            document.data = _Converter(document, most_nodes).value(node, ())
    except yaml.MarkedYAMLError as error:
        document.problems.append(_syntax_problem(error, text))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        document.problems.append(
            Problem(line, f"the character U+{ord(text[error.position]):04X} is not allowed in YAML.")
        )
    except RecursionError:
        document.problems.append(Problem(0, "the file is nested too deeply."))
    document.problems = list(dict.fromkeys(document.problems))
    return document


def scalar(text: str) -> Any:
    """The value of an unquoted scalar."""
    if text in NULL:
        return None
    if text in BOOL:
        return BOOL[text]
    if INT.fullmatch(text) and len(text) < 1000:
        return int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    if NONFINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


class _Loader(yaml.BaseLoader):
    """Composes nodes without giving meaning to scalars, and notes explicit tags as (line, tag)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tags: list[tuple[int, str]] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        if tag is not None and not isinstance(event, yaml.AliasEvent):
            self.tags.append((event.start_mark.line + 1, tag.replace("tag:yaml.org,2002:", "!!")))
        return super().compose_node(parent, index)


class _Converter:
    """Turns nodes into values, filling the document's lines, sources and problems on the way."""

    def __init__(self, document: Document, most_nodes: int | None) -> None:
        self.document, self.most_nodes = document, most_nodes
        self.nodes = 0
        self.open: set[int] = set()

    def value(self, node: yaml.Node, path: Path_) -> Any:
        self.nodes += 1
        if self.nodes == self.most_nodes:
            self._problem(node, path, "the file expands to too many values through its aliases.")
        if self.most_nodes is not None and self.nodes >= self.most_nodes:
            return None
        if id(node) in self.open:
            self._problem(node, path, "an alias refers to the value that it is part of.")
            return None
        self.document.lines.setdefault(path, _line(node))
        self.open.add(id(node))
        try:
            match node:
                case yaml.MappingNode():
                    return self._mapping(node, path)
                case yaml.SequenceNode():
                    return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
                case _:
                    return self._scalar(node, path)
        finally:
            self.open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode, path: Path_) -> Any:
        text = node.value
        if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):
            self._problem(node, path, "the text contains a character that no file or tokenizer can hold.")
            return "?"
        if node.style is not None:
            return text
        self.document.sources[path] = text
        value = scalar(text)
        if isinstance(value, str) and AMBIGUOUS.fullmatch(text):
            self.document.ambiguous.add(path)
        return value

    def _mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, (key_node, value) in self._entries(node, path).items():
            self.document.lines[(*path, key)] = _line(key_node)
            result[key] = self.value(value, (*path, key))
        return result

    def _entries(self, node: yaml.MappingNode, path: Path_) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """A mapping's entries by key: its own, then those that it merges with ``<<`` and does not have."""
        entries: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, path, "a key must be plain text.")
            elif key_node.value == "<<" and key_node.style is None:
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if not isinstance(source, yaml.MappingNode) or id(source) in self.open:
                        self._problem(value, path, "'<<' merges a section, such as *name of one with the anchor &name.")
                        continue
                    self.open.add(id(source))
                    for key, entry in self._entries(source, path).items():
                        merged.setdefault(key, entry)
                    self.open.discard(id(source))
            elif key_node.value in entries:
                first = _line(entries[key_node.value][0])
                self._problem(key_node, path, f"the key '{key_node.value}' appears twice, first on line {first}.")
            else:
                entries[key_node.value] = (key_node, value)
        return {**entries, **{k: e for k, e in merged.items() if k not in entries}}

    def _problem(self, node: yaml.Node, path: Path_, message: str) -> None:
        where = "".join(f"{p}." if isinstance(p, str) else "" for p in path)[:-1]
        line = self.document.lines.get(path, _line(node)) if id(node) in self.open else _line(node)
        self.document.problems.append(Problem(line, f"{where}: {message}" if where else message))


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _syntax_problem(error: yaml.MarkedYAMLError, text: str) -> Problem:
    """A syntax error in words; the common ones with what to do."""
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 0
    shown = text.splitlines()[line - 1] if 0 < line <= len(text.splitlines()) else ""
    problem, context = str(error.problem or ""), str(error.context or "")
    if "\\t" in problem or "\t" in shown[: len(shown) - len(shown.lstrip())]:
        return Problem(line, "a tab indents this line; YAML is indented with spaces.")
    if "mapping values are not allowed" in problem:
        return Problem(line, "a ':' is not expected here; check the indentation, or quote text that contains ': '.")
    if "expected a single document" in context:
        return Problem(line, "a second document begins here ('---'); a job file has one.")
    if "undefined alias" in problem:
        return Problem(line, f"no anchor defines the alias in '{shown.strip()}'.")
    if "duplicate anchor" in context:
        return Problem(line, "the anchor is defined twice.")
    if "while scanning a quoted scalar" in context:
        start = (error.context_mark.line + 1) if error.context_mark else line
        return Problem(start, "the quote that opens on this line is not closed or holds an unknown escape.")
    if "block mapping" in context and "<block end>" in problem:
        return Problem(line, f"'{shown.strip()}' is not indented like its neighbours, or lacks a ':'.")
    return Problem(line, f"this is not valid YAML: {' '.join(filter(None, (context, problem)))}.")
