"""What the light ranker sees of a prompt: hashed n-grams of its words, and a few numbers about its shape.

One pass over the UTF-8 bytes of the prompt, compiled by Numba: about 10 microseconds for a prompt of 50 words.

* **Words** are runs of ASCII letters, digits and ``_``, runs of non-ASCII letters, or single characters from U+3000 on
  (scripts without spaces). Some punctuation that says what kind of prompt it is counts as a word too. ASCII is lowered.
* **n-grams**: single words, pairs of neighbours, and the opening (the first one, two and three words, marked as such,
  since it mostly says what is asked for). Each is hashed into one of ``2 ** bits`` buckets; its value is
  ``1 + log(count)``, later weighted by the bucket's inverse document frequency and scaled to unit length.
* **Shape**: ``SHAPE`` numbers in fixed order, see :data:`SHAPE_NAMES`.

Of a long prompt only the first ``HEAD_CHARS`` and last ``TAIL_CHARS`` characters are read, so a prompt of 1 MB costs no
more than a long one; its whole length still counts as a number. Any text has features: empty, NUL, broken surrogates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from longtail.lengths.data_values import Input, PromptFeatures

BITS = 17
"""Of the buckets of rankers that ``rank train`` makes, and of prompts that are kept as features."""
HEAD_CHARS, TAIL_CHARS = 3000, 600
MAX_WORDS = 800
SHAPE_NAMES = (
    "characters", "words", "lines", "questions", "code fences", "digit share", "capital share", "commas",
    "sentences", "colons", "mean word length", "ends with a question", "non-ASCII share", "list items", "braces",
    "quotes",
)  # fmt: skip
SHAPE = len(SHAPE_NAMES)
_FNV, _PRIME, _MIX = np.uint32(2166136261), np.uint32(16777619), np.uint32(0x9E3779B1)
_OPENING = np.uint32(0x51ED270B)
_SCRATCH_BITS = 13
"""Distinct n-grams of one prompt, at most ``3 + 2 * MAX_WORDS``, must fill well under half of the table."""


class Features(NamedTuple):
    """Of n prompts, as sparse rows: row i has ``buckets[start[i]:start[i + 1]]``, ascending, with ``values``.

    ``start`` int64 [n + 1], ``buckets`` int32 [m], ``values`` float32 [m], ``shape`` float32 [n, SHAPE].
    """

    start: np.ndarray
    buckets: np.ndarray
    values: np.ndarray
    shape: np.ndarray


def features(prompts: Sequence[Input], *, bits: int) -> Features:
    """The features of prompts, in order; see the module. Raises ``TypeError`` for what is no prompt, and ``ValueError``
    for one that is kept as features unless ``bits`` is :data:`BITS`."""
    rows = [_row(prompt, bits) for prompt in prompts]
    start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row[0]) for row in rows], out=start[1:])
    return Features(
        start,
        np.concatenate([np.empty(0, np.int32), *(row[0] for row in rows)]),
        np.concatenate([np.empty(0, np.float32), *(row[1] for row in rows)]),
        np.array([row[2] for row in rows], dtype=np.float32).reshape(-1, SHAPE),
    )


def _row(prompt: Input, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if isinstance(prompt, PromptFeatures):
        if bits != BITS:
            raise ValueError(f"prompts are kept as features of {BITS} bits, not {bits}")
        return prompt.buckets, prompt.values, prompt.shape
    buckets, values, shape = extract(as_bytes(prompt), len(prompt), bits)
    order = np.argsort(buckets)
    return buckets[order], values[order], shape


def ngrams(prompt: str, *, bits: int) -> dict[int, str]:
    """Bucket -> the n-grams of the prompt that fall into it, as text: for explanations, slow."""
    text = as_bytes(prompt)
    words = _words(text)
    named: dict[int, list[str]] = {}
    shift = np.uint32(32 - bits)
    opening = _OPENING
    opened: list[str] = []
    for i, (h, word) in enumerate(words):
        grams = [(h, word)]
        if i > 0:
            grams.append((_mix(words[i - 1][0], h), f"{words[i - 1][1]} {word}"))
        if i < 3:
            opening, opened = _mix(opening, h), [*opened, word]
            grams.append((opening, f"^{' '.join(opened)}"))
        for gram, name in grams:
            names = named.setdefault(int(_bucket(np.uint32(gram), shift)), [])
            if name not in names:
                names.append(name)
    return {bucket: " / ".join(names) for bucket, names in named.items()}


def _words(text: np.ndarray) -> list[tuple[np.uint32, str]]:
    starts, ends, hashes, _ = _tokens(text)
    words = [bytes(text[a:b]).decode("utf-8", "replace").lower() for a, b in zip(starts, ends, strict=True)]
    return [(h, word.replace("\n", "\\n")) for h, word in zip(hashes, words, strict=True)]


def as_bytes(prompt: str) -> np.ndarray:
    """The bytes that are read of a prompt, uint8 [b]; head and tail of a long one are separated by a line end."""
    if not isinstance(prompt, str):
        raise TypeError(f"a prompt must be a string, got {type(prompt).__name__}")
    if len(prompt) > HEAD_CHARS + TAIL_CHARS:
        prompt = prompt[:HEAD_CHARS] + "\n" + prompt[-TAIL_CHARS:]
    return np.frombuffer(prompt.encode("utf-8", "replace"), dtype=np.uint8)


@njit(cache=True)
def _is_letter(c):
    return (97 <= c <= 122) or (65 <= c <= 90) or (48 <= c <= 57) or c == 95 or c >= 128


@njit(cache=True)
def _is_mark(c):
    """Marks that are words of their own: line ends and ? ! : ` # * { | = " <; other marks only separate."""
    return (
        c == 10 or c == 63 or c == 33 or c == 58 or c == 96 or c == 35 or c == 42 or c == 123 or c == 124 or c == 61
        or c == 34 or c == 60
    )  # fmt: skip


@njit(cache=True)
def _mix(a, b):
    """Numba widens products of 32-bit integers to 64 bits; a hash must not."""
    return np.uint32(np.uint32(np.uint32(a * _PRIME) ^ b) * _MIX)


@njit(cache=True)
def _bucket(h, shift):
    h = np.uint32(h)
    return np.int32(np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * _MIX) >> shift)


@njit(cache=True)
def _add(table_keys, table_counts, order, used, bucket):
    """Count a bucket in the open-addressing table; ``order`` keeps places by first appearance."""
    mask = len(table_keys) - 1
    place = np.int64(np.uint32(np.uint32(bucket) * _MIX) >> np.uint32(32 - _SCRATCH_BITS))
    while table_keys[place] >= 0:
        if table_keys[place] == bucket:
            table_counts[place] += 1
            return used
        place = (place + 1) & mask
    table_keys[place] = bucket
    table_counts[place] = 1
    order[used] = place
    return used + 1


@njit(cache=True)
def _tokens(text):
    """``(starts, ends int64 [w], hashes uint32 [w], shape float32 [SHAPE])`` of one prompt; shape[:2] are not set."""
    starts = np.empty(MAX_WORDS, np.int64)
    ends = np.empty(MAX_WORDS, np.int64)
    hashes = np.empty(MAX_WORDS, np.uint32)
    words = letters = all_words = 0
    digits = capitals = lines = questions = fences = commas = sentences = colons = foreign = items = braces = quotes = 0
    line_start = True
    last = np.uint8(0)
    n = len(text)
    i = 0
    while i < n:
        c = text[i]
        h = _FNV
        start = i
        if _is_letter(c):
            wide = c >= 0xE3
            while i < n and _is_letter(text[i]):
                d = text[i]
                if i > start and d >= 0xC0 and (wide or d >= 0xE3):  # a character of a script without spaces
                    break
                if 65 <= d <= 90:
                    capitals += 1
                    d = d + np.uint8(32)
                elif 48 <= d <= 57:
                    digits += 1
                elif d >= 128:
                    foreign += 1
                h = np.uint32(np.uint32(h ^ d) * _PRIME)
                i += 1
            letters += i - start
            all_words += 1
            last = text[i - 1]
            if line_start and i < n and 48 <= c <= 57 and (text[i] == 46 or text[i] == 41):
                items += 1
            line_start = False
        else:
            i += 1
            if c == 32 or c == 9 or c == 13:
                continue
            while i < n and text[i] == c and i - start < 3:
                i += 1
            if c == 10:
                lines += i - start
            elif c == 63:
                questions += 1
            elif c == 96 and i - start == 3:
                fences += 1
            elif c == 44:
                commas += 1
            elif c == 46 or c == 33:
                sentences += 1
            elif c == 58:
                colons += 1
            elif c == 34:
                quotes += 1
            elif c == 123 or c == 125 or c == 59:
                braces += 1
            if line_start and (c == 45 or c == 42):
                items += 1
            line_start = c == 10
            if c != 10:
                last = c
            if not _is_mark(c):
                continue
            h = np.uint32(np.uint32(h ^ c) * _PRIME)
            if c == 96 or c == 10:  # one line end or a blank line, a quoted name or a code block
                h = np.uint32(np.uint32(h ^ np.uint32(i - start)) * _PRIME)
        if words < MAX_WORDS:
            starts[words], ends[words], hashes[words] = start, i, h
            words += 1
    size = max(1, n)
    shape = np.zeros(SHAPE, np.float32)
    shape[2] = np.log1p(lines)
    shape[3] = np.log1p(questions)
    shape[4] = np.log1p(fences)
    shape[5] = digits / size
    shape[6] = capitals / size
    shape[7] = np.log1p(commas)
    shape[8] = np.log1p(sentences)
    shape[9] = np.log1p(colons)
    shape[10] = letters / max(1, all_words)
    shape[11] = 1.0 if last == 63 else 0.0
    shape[12] = foreign / size
    shape[13] = np.log1p(items)
    shape[14] = np.log1p(braces)
    shape[15] = np.log1p(quotes)
    return starts[:words], ends[:words], hashes[:words], shape


@njit(cache=True)
def _value(count):
    return np.float32(1.0 + np.log(np.float32(count)))


@njit(cache=True)
def values_of(counts):
    """Float32 [m], the values of n-grams that occur so often, int32 [m]: the same bits as :func:`extract` gives."""
    values = np.empty(len(counts), np.float32)
    for j in range(len(counts)):
        values[j] = _value(counts[j])
    return values


@njit(cache=True)
def extract(text, characters, bits):
    """``(buckets int32 [m], values float32 [m], shape float32 [SHAPE])`` of one prompt's bytes; ``characters`` is the
    length of the whole prompt. The order of buckets is that of first appearance."""
    _, _, hashes, shape = _tokens(text)
    words = len(hashes)
    shape[0] = np.log1p(characters)
    shape[1] = np.log1p(words)
    shift = np.uint32(32 - bits)
    keys = np.full(1 << _SCRATCH_BITS, -1, np.int32)
    counts = np.zeros(1 << _SCRATCH_BITS, np.int32)
    order = np.empty(2 * MAX_WORDS + 3, np.int32)
    used = 0
    opening = _OPENING
    for i in range(words):
        h = hashes[i]
        used = _add(keys, counts, order, used, _bucket(h, shift))
        if i > 0:
            used = _add(keys, counts, order, used, _bucket(_mix(hashes[i - 1], h), shift))
        if i < 3:
            opening = _mix(opening, h)
            used = _add(keys, counts, order, used, _bucket(opening, shift))
    buckets = np.empty(used, np.int32)
    values = np.empty(used, np.float32)
    for j in range(used):
        buckets[j] = keys[order[j]]
        values[j] = _value(counts[order[j]])
    return buckets, values, shape
