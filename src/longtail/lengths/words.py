"""The meaning of a prompt in 64 numbers: the mean of its word pieces' vectors, weighted by how rare each is.

The vectors are the input embeddings of all-MiniLM-L6-v2 (Apache-2.0), projected on their 64 leading principal
directions and rounded to 8 bits; ``scripts/make_ranker.py`` makes the file. They bring what a few hundred labelled
prompts cannot teach: that an essay and an article are much the same. A table lookup, no transformer.

Pieces are found as BERT's uncased tokenizer finds them, without its accent stripping: longest match first, later pieces
of a word from a set of their own. What matches nothing is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit

from longtail.lengths.data_values import Input, PromptFeatures
from longtail.lengths.features import as_bytes

DIMENSIONS = 64
WORDS_FILE = Path(__file__).parent.parent / "data" / "ranker" / "words.safetensors"
MAX_PIECES = 512
MAX_WORD_BYTES = 64
_FNV, _PRIME = np.uint64(14695981039346656037), np.uint64(1099511628211)
_LATER = np.uint64(0x2323)


class WordTable(NamedTuple):
    """``keys`` uint64 [V], ascending; ``vectors`` int8 [V, DIMENSIONS], a value is ``vectors * scale``; ``scale``
    float32 [DIMENSIONS]; ``rarity`` float32 [V], the weight of a piece in the mean."""

    keys: np.ndarray
    vectors: np.ndarray
    scale: np.ndarray
    rarity: np.ndarray


@cache
def word_table() -> WordTable:
    """The table of the package."""
    from safetensors.numpy import load_file

    tensors = load_file(WORDS_FILE)
    return WordTable(tensors["keys"], tensors["vectors"], tensors["scale"], tensors["rarity"].astype(np.float32))


def mean_vectors(prompts: Sequence[Input]) -> np.ndarray:
    """Float32 [n, DIMENSIONS], one row a prompt; what was kept of a prompt has its row already."""
    table = word_table()
    rows = [p.words if isinstance(p, PromptFeatures) else mean_vector(as_bytes(p), *table) for p in prompts]
    return np.array(rows, dtype=np.float32).reshape(-1, DIMENSIONS)


@njit(cache=True)
def piece_key(text, later):
    """The key of a word piece, uint8 [b] of lower-case UTF-8; ``later``: written ``##piece`` in BERT's vocabulary."""
    h = _FNV ^ _LATER if later else _FNV
    for byte in text:
        h = (h ^ np.uint64(byte)) * _PRIME
    return h


@njit(cache=True)
def _in_word(c):
    return (97 <= c <= 122) or (65 <= c <= 90) or (48 <= c <= 57) or c >= 128


@njit(cache=True)
def _find(keys, key):
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low if low < len(keys) and keys[low] == key else -1


@njit(cache=True)
def pieces(text, keys):
    """The rows of ``keys`` that a prompt's bytes, uint8 [b], consist of, in order: int64 [at most MAX_PIECES]."""
    rows = np.empty(MAX_PIECES, np.int64)
    hashes = np.empty(MAX_WORD_BYTES, np.uint64)
    used = 0
    n = len(text)
    i = 0
    while i < n and used < MAX_PIECES:
        c = text[i]
        if c <= 32:
            i += 1
            continue
        end = i + 1
        if _in_word(c):
            while end < n and _in_word(text[end]):
                end += 1
        later = False
        while i < end and used < MAX_PIECES:
            h = _FNV ^ _LATER if later else _FNV
            length = min(end - i, MAX_WORD_BYTES)
            for j in range(length):
                d = text[i + j]
                if 65 <= d <= 90:
                    d = d + np.uint8(32)
                h = (h ^ np.uint64(d)) * _PRIME
                hashes[j] = h
            found = -1
            while length > 0:
                found = _find(keys, hashes[length - 1])
                if found >= 0:
                    break
                length -= 1
            if found >= 0:
                rows[used] = found
                used += 1
                i += length
            else:  # leave out one character
                i += 1
                while i < end and (text[i] & 0xC0) == 0x80:
                    i += 1
            later = True
    return rows[:used]


@njit(cache=True, fastmath=True)
def mean_vector(text, keys, vectors, scale, rarity):
    """Float32 [DIMENSIONS] of a prompt's bytes, uint8 [b]; zeros if no piece is known."""
    total = np.zeros(vectors.shape[1], np.float32)
    weight = np.float32(0)
    for row in pieces(text, keys):
        weight += rarity[row]
        for k in range(len(total)):
            total[k] += rarity[row] * vectors[row, k]
    if weight > 0:
        for k in range(len(total)):
            total[k] *= scale[k] / weight
    return total
