"""Why a job file is refused: pydantic's errors as sentences about keys, values and what is allowed.

pipelines.sums.steps = 0: must be at least 1.
pipelines.sums: unknown key 'reward_fn'; did you mean 'reward'?
"""

from __future__ import annotations

import difflib
from typing import Any

from longtail.runtime import schema
from longtail.runtime.yamlfile import INT, Document, Path_, Problem

RANGE_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


def explain(document: Document, errors: list[Any]) -> list[Problem]:
    """One problem for each of pydantic's ``errors``; of the branches of a union only the one that fits best."""
    best: dict[Path_, tuple[Path_, Any]] = {}
    for error in errors:
        path, field = locate(document.data, error)
        if field not in best or len(path) > len(best[field][0]):
            best[field] = (path, error)
    misspelt = {(*path[:-1], _nearest(path)) for path, error in best.values() if error["type"] == "extra_forbidden"}
    return [
        _problem(document, path, error)
        for path, error in best.values()
        if error["type"] != "missing" or path not in misspelt
    ]


def locate(data: Any, error: Any) -> tuple[Path_, Path_]:
    """Where an error is: its path in the file, and the path of the declared field that it belongs to.

    Pydantic's own marks (``[key]``, names of union branches) are left out of both.
    """
    path: list[str | int] = []
    union: int | None = None
    names_absent_key = error["type"] in ("missing", "extra_forbidden")
    for i, part in enumerate(error["loc"]):
        if part == "[key]":
            continue
        if isinstance(data, dict) and (part in data or (names_absent_key and i == len(error["loc"]) - 1)):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part] if part < len(data) else None
        else:
            union = len(path)
            continue
        path.append(part)
    return tuple(path), tuple(path[:union])


def dotted(path: Path_) -> str:
    """``pipelines.sums.train.betas[1]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def get(data: Any, path: Path_) -> Any:
    """The value at ``path``, or None."""
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _problem(document: Document, path: Path_, error: Any) -> Problem:
    kind, context = error["type"], error.get("ctx", {})
    section = f"{dotted(path[:-1])}: " if len(path) > 1 else ""
    if kind == "extra_forbidden":
        return Problem(document.line(path), section + _unknown(path))
    if kind in ("missing", "too_long") and path and isinstance(path[-1], int):
        path = path[:-1]  # a list of the wrong length
    if kind == "missing" and (key := schema.find(path)) and path not in document.lines:
        meaning = f"{key.description[:1].lower()}{key.description[1:]}" if key.description else "it has no default."
        return Problem(document.line(path[:-1]), f"{section}the key '{path[-1]}' is missing: {meaning}")
    if kind == "too_short" and path == ("pipelines",):
        return Problem(
            document.line(path), "pipelines: at least one pipeline is needed, such as 'sums:' with its keys."
        )
    if isinstance(context.get("key"), tuple):
        path = (*path, *context["key"])
        text = f"{error['msg']}."
    elif kind == "value_error" and not ((key := schema.find(path)) and key.words):
        text = f"{context['error']}."
        if error["loc"][-1] == "[key]":
            return Problem(document.line(path), f"{dotted(path)}: {text}")
    else:
        text = _allowed(document, path, error)
    return Problem(document.line(path), f"{dotted(path)} = {_shown(document, path)}: {text}")


def _allowed(document: Document, path: Path_, error: Any) -> str:
    """ "must be ..." for a wrong type or a value out of range, with what to write instead where that is clear."""
    kind, value = error["type"], get(document.data, path)
    key = schema.find(path)
    if key is None:
        return f"{error['msg'][:1].lower()}{error['msg'][1:]}."
    if key.words and value is not None:
        return _no_such_word(document, path, key, value)
    if kind == "finite_number":
        return "must be a finite number."
    if kind == "literal_error" and value is not None:
        close = difflib.get_close_matches(value.lower(), key.choices, n=1) if isinstance(value, str) else []
        return f"must be {key.allowed}" + (f"; did you mean '{close[0]}'?" if close else ".")
    if kind in RANGE_ERRORS:
        return f"must be {key.bounds.removeprefix('each ')}."
    if kind == "string_too_short":
        return "must not be empty."
    if value is None:
        default = "it has no default" if key.default is schema.Required else f"or leave it out for {key.default}"
        return f"has no value; give {key.allowed} ({default})."
    if isinstance(path[-1], int):
        noun = "text" if kind.startswith("string") else "a number"
        return f"must be {noun}, not {_kind(value)}.{_advice(document, path, (noun,), value)}"
    not_what = "" if isinstance(value, float) or kind in ("too_long", "missing") else f", not {_kind(value)}"
    return f"must be {key.allowed}{not_what}.{_advice(document, path, key.nouns, value)}"


def _no_such_word(document: Document, path: Path_, key: schema.Key, value: Any) -> str:
    """ "must be ..." where a number or one of some words may stand, and ``value`` is neither."""
    text = f"must be {key.allowed}"
    if isinstance(value, bool | list | dict):
        return f"{text}, not {_kind(value)}."
    if not isinstance(value, str):
        return f"{text}.{_advice(document, path, key.nouns, value)}"
    for word, hint in key.words:
        if hint and value.lower().startswith(word.partition(":")[0]):
            return f"{text}. {hint}"
    close = difflib.get_close_matches(value.lower(), [word.text for word in key.words], n=1)
    return f"{text}; did you mean '{close[0]}'?" if close else f"{text}.{_advice(document, path, key.nouns, value)}"


def _advice(document: Document, path: Path_, nouns: tuple[str, ...], value: Any) -> str:
    """ " Write ..." where a slip of notation can be guessed, else empty."""
    if isinstance(value, float) and value.is_integer() and "a whole number" in nouns:
        return f" Write {int(value)}."
    if isinstance(value, str) and any("number" in noun for noun in nouns):
        if path in document.ambiguous and value[:1] in "+-0123456789":
            return " Numbers are written in plain decimal digits, such as 1000, 0.5 or 1e-6."
        if INT.fullmatch(value):
            return " Remove the quotes."
    if "text" in nouns and isinstance(value, bool | int | float):
        return f' Put it in quotes: "{document.sources.get(path, value)}".'
    if isinstance(value, str) and "a list of texts" in nouns:
        return f" Write [{value!r}]."
    return ""


def _unknown(path: Path_) -> str:
    nearest = _nearest(path)
    known = ", ".join(schema.children(path[:-1]))
    hint = f"did you mean '{nearest}'?" if nearest else f"known keys are {known}."
    if nearest == path[-1]:
        hint = "it stands at the top of the file, beside 'pipelines'."
    return f"unknown key '{path[-1]}'; {hint}"


def _nearest(path: Path_) -> str | None:
    """The key that was probably meant: that name in another section, or but for a letter, or a similar one here, or
    there."""
    section, name = path[:-1], str(path[-1])
    here, elsewhere = schema.children(section), _elsewhere(section)
    if name in elsewhere:
        return elsewhere[name]
    if (slip := difflib.get_close_matches(name, [*here, *elsewhere], n=1, cutoff=0.9)) and slip[0] not in here:
        return elsewhere[slip[0]]
    close = difflib.get_close_matches(name, here, n=1)
    close += [k for k in here if name.startswith(f"{k}_") or k.startswith(f"{name}_")]
    if close:
        return close[0]
    far = difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.75)
    return elsewhere[far[0]] if far else None


def _elsewhere(section: Path_) -> dict[str, str]:
    """Keys of other sections by name, each as the user would write it: from the pipeline down, or from the top."""
    here = schema.find(section)
    prefix = here.path if here else ()
    found: dict[str, str] = {}
    for path, key in schema.keys().items():
        if key.is_section or path[:-1] == prefix:
            continue
        names = list(path)
        if path[:2] == ("pipelines", schema.ANY):
            if section[:1] == ("pipelines",) and len(section) > 1:
                names = names[2:] if len(path) > 3 else ["pipelines", str(section[1]), path[2]]
            else:
                names[1] = "NAME"
        found.setdefault(key.name, ".".join(names))
    return found


def _shown(document: Document, path: Path_) -> str:
    """A value as the user wrote it, shortened."""
    value = get(document.data, path)
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    text = repr(value) if isinstance(value, str | list) else document.sources.get(path, repr(value))
    return (text if len(text) <= 60 else f"{text[:57]}...") or "(empty)"


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "true or false"
        case str():
            return "text"
        case int() | float():
            return "a number"
        case list():
            return "a list"
        case _:
            return "a section of keys"
