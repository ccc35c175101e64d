"""Prompts kept as features, so that served requests can teach a ranker without their texts being stored.

:func:`encode` makes of a prompt what goes into a row of JSON lines, about 1 KB, and :func:`decode` makes of that what
the light backend trains on and scores. Nothing is rounded: rows teach exactly the weights that their prompts teach.

    {"version": 1,
     "digest":  "64 bits, hexadecimal",                        which rows have the same prompt
     "ngrams":  "uint32 [m]: count << 17 | bucket, ascending by bucket",
     "shape":   "float32 [SHAPE]",
     "words":   "float32 [DIMENSIONS]"}                        arrays are little-endian, in base64

**Privacy.** The text is not in the row, and the n-grams are sorted, so that their order says nothing. That is no
anonymisation. The hashes have no key: who has the rows can hash a dictionary to learn most of the words, chain them by
the hashed pairs, and tell by the digest whether a prompt that he guesses is among them. What no dictionary has (names,
numbers) is harder to learn, not safe. Guard such files as you would guard the prompts.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from longtail.lengths.backend import Backend
from longtail.lengths.data_values import Input, PromptFeatures, digest, texts
from longtail.lengths.features import BITS, SHAPE, features, values_of
from longtail.lengths.messages import whole_text
from longtail.lengths.words import DIMENSIONS, mean_vectors

VERSION = 1
"""Another one whenever buckets, shape or the word table change their meaning: old rows do not fit then."""
MOST = 1e6
"""No number of shape or words is as large, so that a damaged row cannot drown the others."""


def encode(prompt: str) -> dict[str, Any]:
    """Plain JSON. What :func:`whole_text` mends in a prompt is mended first, as reading a file with the prompt does."""
    prompt = whole_text(prompt)
    found = features([prompt], bits=BITS)
    counts = np.rint(np.exp(found.values - 1)).astype(np.uint32)  # a value is 1 + log(count)
    return {
        "version": VERSION,
        "digest": f"{digest(prompt):016x}",
        "ngrams": _to_text(counts << BITS | found.buckets.astype(np.uint32), "<u4"),
        "shape": _to_text(found.shape[0], "<f4"),
        "words": _to_text(mean_vectors([prompt])[0], "<f4"),
    }


def decode(row: Mapping[str, Any]) -> PromptFeatures:
    """The inverse of :func:`encode`. Raises ``ValueError`` for what it has not made."""
    version = row.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ValueError(f"the features are of version {version}, newer than this longtail knows: upgrade it")
    if version != VERSION:
        raise ValueError("the features have no known version: they must stand as longtail recorded them")
    number = row.get("digest")
    if not isinstance(number, str) or not re.fullmatch("[0-9a-f]{16}", number):
        raise ValueError("'digest' of the features must be 16 hexadecimal digits")
    ngrams = _from_text(row, "ngrams", "<u4")
    buckets, counts = (ngrams & ((1 << BITS) - 1)).astype(np.int32), (ngrams >> BITS).astype(np.int32)
    if (counts == 0).any() or (np.diff(buckets) <= 0).any():
        raise ValueError("'ngrams' of the features is damaged")
    return PromptFeatures(
        digest=int(number, 16),
        buckets=buckets,
        values=values_of(counts),
        shape=_numbers(row, "shape", SHAPE),
        words=_numbers(row, "words", DIMENSIONS),
    )


def score_inputs(backend: Backend, inputs: Sequence[Input]) -> np.ndarray:
    """float32 [n], higher = longer, of prompts and prompts kept as features alike.

    Raises :class:`DataError` if there are features and the backend reads texts only.
    """
    scorer = getattr(backend, "score_features", None)
    if scorer is None:
        return backend.score(texts(inputs))
    kept = np.array([isinstance(prompt, PromptFeatures) for prompt in inputs], bool)
    scores = np.empty(len(inputs), np.float32)
    scores[~kept] = backend.score([prompt for prompt in inputs if isinstance(prompt, str)])
    if kept.any():
        scores[kept] = scorer([prompt for prompt in inputs if isinstance(prompt, PromptFeatures)])
    return scores


def _to_text(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")


def _from_text(row: Mapping[str, Any], name: str, dtype: str) -> np.ndarray:
    """As the machine's own numbers, writable: what Numba has compiled for."""
    try:
        values = np.frombuffer(base64.b64decode(row[name], validate=True), dtype)
    except KeyError:
        raise ValueError(f"{name!r} of the features is missing") from None
    except (TypeError, ValueError, binascii.Error):
        raise ValueError(f"{name!r} of the features is damaged") from None
    return values.astype(values.dtype.newbyteorder("="))


def _numbers(row: Mapping[str, Any], name: str, size: int) -> np.ndarray:
    values = _from_text(row, name, "<f4")
    if len(values) != size or not (np.abs(values) < MOST).all():
        raise ValueError(f"{name!r} of the features must be {size} finite numbers")
    return values
