"""Whether a ranker is judged by prompts it was trained on: digests of a sample of them, kept in its card.

The sample is chosen by the digest itself, so that any part of the training prompts is recognised at its true share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longtail.lengths.data_values import Input, digest

SAMPLE = 512
"""About so many digests are kept, 16 characters each."""
LEAST = 10
"""With fewer prompts that could be in the sample, nothing is said."""


def fingerprint(prompts: Sequence[Input]) -> dict[str, Any]:
    """Plain JSON for a card: every ``one_in``-th of the prompts, by digest."""
    distinct = {digest(prompt) for prompt in prompts}
    one_in = max(1, len(distinct) // SAMPLE)
    return {"one_in": one_in, "digests": [f"{d:016x}" for d in sorted(distinct) if d % one_in == 0]}


def seen_share(print_: Mapping[str, Any] | None, prompts: Sequence[Input]) -> float | None:
    """The share of ``prompts`` that a fingerprint's training data had, about; None if it cannot be told."""
    if print_ is None:
        return None
    try:
        one_in, known = int(print_["one_in"]), {int(d, 16) for d in print_["digests"]}
        sample = [d for d in map(digest, prompts) if d % one_in == 0]
    except (TypeError, KeyError, ValueError, ZeroDivisionError):
        return None  # a ranker that was made without one, or with something else there
    if len(sample) < (1 if one_in == 1 else LEAST):
        return None
    return sum(d in known for d in sample) / len(sample)
