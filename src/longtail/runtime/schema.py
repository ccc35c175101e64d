"""What the job file allows, key by key, in words: read from the models of ``core/config.py``.

Errors (``jobfile.py``) and the configuration reference (``docs/configuration.md``) say the same because both ask here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from longtail.core.config import Jobs

ANY = "*"
"""Stands in a key's path for the name of a pipeline."""


class Required:
    """The default of keys that have none."""


class Word(NamedTuple):
    """``auto``, or a pattern such as ``threshold:K`` with a sentence about K."""

    text: str
    hint: str = ""


WORDS: dict[tuple[str, ...], tuple[Word, ...]] = {
    ("pipelines", ANY, "rollout", "tp"): (
        Word("auto"),
        Word("oracle"),
        Word("threshold:K", "K is a whole number from 1 to 9999999, such as threshold:16."),
    ),
}
"""What may stand instead of a number: for the models that is any text that passes their checks."""


@dataclass(frozen=True)
class Key:
    """One key of the job file.

    ``path`` holds ``*`` for a pipeline's name; ``nouns`` are the kinds of value in words ("a whole number"), ``bounds``
    the range ("at least 1", or empty), ``choices`` the allowed words (or none), ``words`` those that may stand instead
    of a number.
    """

    path: tuple[str, ...]
    nouns: tuple[str, ...]
    bounds: str
    choices: tuple[str, ...]
    nullable: bool
    default: Any
    description: str
    unit: str = ""
    is_section: bool = False
    words: tuple[Word, ...] = ()

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def allowed(self) -> str:
        """Everything that the value may be, e.g. "a number above 0 and at most 10 or null"."""
        last = ("null",) if self.nullable else ()
        if self.choices:
            return either(self.choices + last)
        *others, noun = self.nouns
        ranged = f"{noun} {'of ' if self.bounds.startswith('at') else ''}{self.bounds}".strip()
        return either((*others, ranged, *(word.text for word in self.words), *last))


@cache
def keys() -> dict[tuple[str, ...], Key]:
    """All keys by path, in the order of the models; e.g. ``("pipelines", "*", "train", "lr")``."""
    schema = Jobs.model_json_schema()
    return {key.path: key for key in _walk(schema, schema["$defs"], ())}


def find(path: tuple[str | int, ...]) -> Key | None:
    """The key that a path of a real file belongs to (pipeline names and list indices allowed)."""
    names = [str(p) for p in path if not isinstance(p, int)]
    if len(names) > 1 and names[0] == "pipelines":
        names[1] = ANY
    return keys().get(tuple(names))


def children(path: tuple[str | int, ...]) -> list[str]:
    """Names of the keys that a section may have."""
    section = find(path)
    prefix = section.path if section else ()
    return [p[-1] for p in keys() if p[:-1] == prefix]


def either(words: tuple[str, ...]) -> str:
    """``a, b or c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _walk(section: dict[str, Any], defs: dict[str, Any], prefix: tuple[str, ...]) -> Iterator[Key]:
    required = section.get("required", [])
    for name, field in section["properties"].items():
        path = (*prefix, name)
        default = Required if name in required else field.get("default")
        inner = defs[field["$ref"].rsplit("/", 1)[-1]] if "$ref" in field else None
        yield _key(path, {**(inner or {}), **field}, default)
        if inner:
            yield from _walk(inner, defs, path)
        elif path == ("pipelines",):
            pipeline = defs["Pipeline"]
            yield _key((*path, ANY), pipeline, Required)
            yield from _walk(pipeline, defs, (*path, ANY))


def _key(path: tuple[str, ...], field: dict[str, Any], default: Any) -> Key:
    options = [o for o in field.get("anyOf", [field]) if o.get("type") != "null"]
    words = WORDS.get(path, ())
    return Key(
        path=path,
        nouns=tuple(_noun(o) for o in options if not (words and o.get("type") == "string")),
        bounds=_bounds(options[0]),
        choices=tuple(options[0].get("enum", [options[0]["const"]] if "const" in options[0] else [])),
        nullable=len(options) < len(field.get("anyOf", [field])),
        default=default,
        description=" ".join(field.get("description", "").split()),
        unit=field.get("unit", ""),
        is_section="properties" in field or path == ("pipelines",),
        words=words,
    )


def _noun(field: dict[str, Any]) -> str:
    match field.get("type"):
        case "integer":
            return "a whole number"
        case "number":
            return "a number"
        case "string":
            return "text"
        case "boolean":
            return "true or false"
        case "array" if "prefixItems" in field:
            return f"a list of {len(field['prefixItems'])} numbers"
        case "array":
            return "a list of texts"
        case _:
            return "a section of keys"


def _bounds(field: dict[str, Any]) -> str:
    """The range in words; ``from 1 to 9``, ``at least 1``, ``above 0 and at most 10``."""
    if field.get("minLength"):
        return "that is not empty"
    if field.get("type") == "array" and "prefixItems" in field:
        return f"each {_bounds(field['prefixItems'][0])}"
    low, high = field.get("minimum"), field.get("maximum")
    above, below = field.get("exclusiveMinimum"), field.get("exclusiveMaximum")
    if field.get("type") == "integer":
        low = above + 1 if above is not None else low
        high = below - 1 if below is not None else high
        above = below = None
    if low is not None and high is not None:
        return f"from {number(low)} to {number(high)}"
    parts = [f"at least {number(low)}"] if low is not None else []
    parts += [f"above {number(above)}"] if above is not None else []
    parts += [f"at most {number(high)}"] if high is not None else []
    parts += [f"below {number(below)}"] if below is not None else []
    return " and ".join(parts)


def number(value: float) -> str:
    """A number as people write it: 1, 0.5, 1e-06 as 1e-6."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    text = repr(value)
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
