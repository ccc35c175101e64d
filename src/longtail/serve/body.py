"""Request bodies: read without losing anything, changed in one field only.

A gateway must not re-serialise what it passes on: fields it does not know, numbers and their digits, and the order of
keys reach the server as the client wrote them. So a body is parsed for reading, and spliced for writing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from longtail.lengths.messages import prompt_text, whole_text
from longtail.serve.calls import COMPLETIONS, RESPONSES
from longtail.serve.errors import ApiError

PRIORITY = "priority"
MOST_SAMPLES = 1024
"""Where the number of answers that a body asks for is not believed any more."""
_SPACE = " \t\n\r"


def parse(body: bytes) -> dict[str, Any]:
    """The object in ``body``. Raises :class:`ApiError` (400 ``bad_json``) for anything else."""
    try:
        fields = json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ApiError(400, "The request body is not UTF-8.", code="bad_json") from None
    except RecursionError:
        raise ApiError(400, "The request body is nested too deeply.", code="bad_json") from None
    except ValueError as error:
        reason = str(error).splitlines()[0][:120]
        raise ApiError(400, f"The request body is not valid JSON: {reason}.", code="bad_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "The request body must be a JSON object.", code="bad_json")
    return fields


def prompts_of(path: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts that say how long the answers will be; empty for token ids and for what no server will accept."""
    if not path.endswith(COMPLETIONS):
        try:
            return (whole_text(prompt_text(fields.get("input" if path.endswith(RESPONSES) else "messages", []))),)
        except ValueError:
            return ()
    prompt = fields.get("prompt")
    texts = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, list) else []
    return tuple(map(whole_text, texts)) if all(isinstance(text, str) for text in texts) else ()


def samples_of(path: str, fields: Mapping[str, Any]) -> int:
    """How many answers are wanted: ``n`` for each prompt; at least 1, whatever the body says."""
    prompt = fields.get("prompt")
    prompts = 1
    if path.endswith(COMPLETIONS) and isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompts = len(prompt)
    return min(MOST_SAMPLES, prompts * (_whole(fields.get("n")) or 1))


def token_limit_of(fields: Mapping[str, Any]) -> int | None:
    """The most tokens that one answer may have; None if the body does not say."""
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    return next((limit for name in names if (limit := _whole(fields.get(name))) is not None), None)


def given_priority(fields: Mapping[str, Any], header: bytes | None) -> int | None:
    """The priority that a client asks for, by header (which wins) or body; None if it is no int64."""
    try:
        value = int(header) if header is not None else fields.get(PRIORITY)
    except ValueError:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        return None
    return value


def with_priority(body: bytes, priority: int | None) -> bytes:
    """The object in ``body`` with this ``priority`` and no other (None: with none); all else stays byte for byte.

    ``body`` must be what :func:`parse` accepts.
    """
    text = body.decode()
    if PRIORITY in text or "\\u" in text:  # the name may be spelt with escapes
        text = _without_member(text, PRIORITY)
    if priority is None:
        return text.encode()
    end = text.rindex("}")
    comma = "" if text[:end].rstrip(_SPACE).endswith("{") and _is_empty(text) else ", "
    return f'{text[:end]}{comma}"{PRIORITY}": {priority}{text[end:]}'.encode()


def _is_empty(text: str) -> bool:
    return not text.strip(_SPACE)[1:-1].strip(_SPACE)


def _without_member(text: str, name: str) -> str:
    """The object with every member ``name`` of its top level cut out; as it was if it has none."""
    decoder = json.JSONDecoder()
    at = text.index("{") + 1
    kept: list[str] = []
    members = 0
    while True:
        start = at = _skip(text, at)
        if text[at] == "}":
            break
        key, at = decoder.raw_decode(text, at)
        at = _skip(text, at) + 1  # the colon
        _, at = decoder.raw_decode(text, _skip(text, at))
        members += 1
        if key != name:
            kept.append(text[start:at])
        at = _skip(text, at)
        if text[at] == ",":
            at += 1
    return text if len(kept) == members else "{" + ", ".join(kept) + "}"


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
