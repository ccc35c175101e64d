"""How built-in tasks turn a text into a number: partial credit that rises smoothly with what is right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion, which for chat prompts is a list with the assistant's message (as in TRL)."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def matched(written: Sequence[str], truth: Sequence[str]) -> float:
    """Length of the longest correct prefix, over the length of the longer sequence; in [0, 1], 1 only if equal.

    Whatever stands after the first mistake earns nothing, and more elements than the truth has cost.
    """
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(written, truth, strict=False)))
    return right / max(len(written), len(truth), 1)


def last_number(text: str) -> str | None:
    """The last number in ``text`` in a canonical form (no thousands separators, no trailing zeros), or None."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    number = found[-1].replace(",", "")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    digits = digits.lstrip("0") or "0"
    if digits.startswith("."):
        digits = "0" + digits
    return "0" if digits == "0" else sign + digits
