"""The light backend of the ranker: no transformer, no torch, some 20 microseconds a prompt.

The score of a prompt x is a sum of three parts, each of them linear in its weights:

    s(x) = w_n . tfidf(n-grams of x)                       what is asked for, word by word
         + w_s . shape(x)                                  sizes, marks, digits
         + sum_m a_m exp(-||u(x) - l_m||^2 / 2)            what it resembles: M prompts of the training data

``tfidf`` has unit length; ``u`` joins the standardised mean word vector (``words.py``) and the standardised shape; the
last sum is a Nystroem approximation of a kernel machine (Williams and Seeger, NIPS 2000). With K outputs (an objective
of classes) all weights have K columns and the score is the expected class.

Shapes: n prompts, B = 2 ** bits buckets, S shape numbers, D = word vector dimensions, M landmarks, K outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numba import njit

from longtail.core.errors import RankerError
from longtail.lengths import features
from longtail.lengths.backend import WEIGHTS_FILE
from longtail.lengths.data_values import PromptFeatures
from longtail.lengths.words import mean_vector, word_table

SHAPE_LIMIT = 3.0
"""Standardised shape numbers are held within +- this, so that a prompt of 1 MB is just a long one."""


@dataclass(frozen=True, kw_only=True)
class LightWeights:
    """What is learnt. ``ngrams`` float16 [B, K] holds weight x inverse document frequency, ``rarity`` float16 [B] the
    latter alone (for the unit length; 0 leaves a bucket out); ``shape`` float32 [S, K]; ``landmarks`` float32
    [M, D + S] with ``amounts`` float32 [M, K]; ``bias`` float32 [K]; ``shape_mean``, ``shape_std`` float32 [S];
    ``word_mean`` float32 [D], ``word_std``, ``shape_share`` float32 [1] scale ``u``.
    """

    ngrams: np.ndarray
    rarity: np.ndarray
    shape: np.ndarray
    landmarks: np.ndarray
    amounts: np.ndarray
    bias: np.ndarray
    shape_mean: np.ndarray
    shape_std: np.ndarray
    word_mean: np.ndarray
    word_std: np.ndarray
    shape_share: np.ndarray

    @property
    def bits(self) -> int:
        return int(self.ngrams.shape[0]).bit_length() - 1

    def check(self) -> None:
        """Raises ``ValueError`` if shapes do not fit together or a number is not finite."""
        buckets, outputs = self.ngrams.shape
        landmarks, dims = self.landmarks.shape
        wanted = {
            "rarity": (buckets,),
            "shape": (features.SHAPE, outputs),
            "amounts": (landmarks, outputs),
            "bias": (outputs,),
            "shape_mean": (features.SHAPE,),
            "shape_std": (features.SHAPE,),
            "word_mean": (dims - features.SHAPE,),
            "word_std": (1,),
            "shape_share": (1,),
        }
        for name, size in wanted.items():
            if getattr(self, name).shape != size:
                raise ValueError(f"tensor {name} has shape {getattr(self, name).shape}, expected {size}")
        if buckets != 1 << self.bits or not 8 <= self.bits <= 24:
            raise ValueError(f"tensor ngrams has {buckets} rows, expected a power of two")
        for field in fields(self):
            if not np.isfinite(getattr(self, field.name)).all():
                raise ValueError(f"tensor {field.name} holds numbers that are not finite")


class LightBackend:
    """Scores prompts one by one; see the module. Thread-safe after the first call."""

    name: ClassVar[str] = "light"

    def __init__(self, weights: LightWeights) -> None:
        weights.check()
        self.weights = weights
        self._table = word_table()
        w = weights
        # Numba compiles for concrete types: float32 in rows, for speed (float16 is for the file).
        self._parameters = (
            np.ascontiguousarray(w.ngrams, np.float32),
            np.ascontiguousarray(w.rarity, np.float32),
            np.ascontiguousarray(w.shape, np.float32),
            np.ascontiguousarray(w.landmarks, np.float32),
            np.ascontiguousarray(w.amounts, np.float32),
            np.ascontiguousarray(w.bias, np.float32),
            np.ascontiguousarray(w.shape_mean, np.float32),
            np.ascontiguousarray(w.shape_std, np.float32),
            np.ascontiguousarray(w.word_mean, np.float32),
            np.float32(w.word_std[0]),
            np.float32(w.shape_share[0]),
        )
        self._arguments = (w.bits, *self._table, *self._parameters)

    def score(self, prompts: Sequence[str]) -> np.ndarray:
        """float32 [n], higher = longer."""
        out = np.empty(len(prompts), np.float32)
        for i, prompt in enumerate(prompts):
            out[i] = _score(features.as_bytes(prompt), len(prompt), *self._arguments)
        return out

    def score_features(self, prompts: Sequence[PromptFeatures]) -> np.ndarray:
        """float32 [n]: the scores of the prompts that these were kept of, but for rounding. Raises
        :class:`RankerError` if this ranker's buckets are others."""
        if self.weights.bits != features.BITS:
            raise RankerError(
                f"this ranker has {1 << self.weights.bits:,} buckets, and prompts are kept as features of "
                f"{1 << features.BITS:,}: it can score prompts only"
            )
        out = np.empty(len(prompts), np.float32)
        for i, prompt in enumerate(prompts):
            out[i] = _total(prompt.buckets, prompt.values, prompt.shape, prompt.words, *self._parameters)
        return out

    def explain(self, prompt: str) -> list[tuple[str, float]]:
        """What each n-gram, each number of the shape, and the resemblance to known prompts add to the score.

        Empty for a classifier, whose score is not a sum.
        """
        w = self.weights
        if w.ngrams.shape[1] > 1:
            return []
        found = features.features([prompt], bits=w.bits)
        norm = max(float(np.linalg.norm(found.values * w.rarity[found.buckets].astype(np.float32))), 1e-9)
        by_bucket = dict(zip(found.buckets.tolist(), found.values.tolist(), strict=True))
        parts = []
        for bucket, words in features.ngrams(prompt, bits=w.bits).items():
            parts.append((words, float(w.ngrams[bucket, 0]) * by_bucket[bucket] / norm))
        standard = standard_shape(found.shape, w.shape_mean, w.shape_std)[0]
        parts += [
            (f"[{name}]", float(v)) for name, v in zip(features.SHAPE_NAMES, standard * w.shape[:, 0], strict=True)
        ]
        whole = float(self.score([prompt])[0])
        parts.append(("[resembles known prompts]", whole - sum(v for _, v in parts) - float(w.bias[0])))
        parts.append(("[every prompt]", float(w.bias[0])))
        return parts

    def save(self, folder: Path) -> list[Path]:
        from safetensors.numpy import save_file

        tensors = {f.name: np.ascontiguousarray(getattr(self.weights, f.name)) for f in fields(self.weights)}
        path = folder / WEIGHTS_FILE
        try:
            save_file(tensors, path)
        except OSError as error:
            raise RankerError(f"{path}: cannot be written: {error.strerror or error}") from error
        return [path]

    @classmethod
    def load(cls, folder: Path) -> Self:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = folder / WEIGHTS_FILE
        try:
            weights = LightWeights(**load_file(path))
            return cls(weights)
        except FileNotFoundError as error:
            raise RankerError(
                f"{path}: the ranker's weights are missing; train it again or restore the file"
            ) from error
        except (OSError, SafetensorError, TypeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RankerError(
                f"{path}: the weights are corrupt ({reason}); train the ranker again or restore the file"
            ) from error


def standard_shape(shape: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """float32 [n, S], standardised and limited."""
    return np.clip((shape - mean) / std, -SHAPE_LIMIT, SHAPE_LIMIT)


@njit(cache=True, fastmath=True)
def _score(
    text, characters, bits, keys, vectors, scale, piece_rarity, ngrams, rarity, shape_w, landmarks, amounts, bias,
    shape_mean, shape_std, word_mean, word_std, shape_share,
):  # fmt: skip
    buckets, values, shape = features.extract(text, characters, bits)
    mean = mean_vector(text, keys, vectors, scale, piece_rarity)
    return _total(
        buckets, values, shape, mean, ngrams, rarity, shape_w, landmarks, amounts, bias, shape_mean, shape_std,
        word_mean, word_std, shape_share,
    )  # fmt: skip


@njit(cache=True, fastmath=True)
def _total(
    buckets, values, shape, mean, ngrams, rarity, shape_w, landmarks, amounts, bias, shape_mean, shape_std, word_mean,
    word_std, shape_share,
):  # fmt: skip
    outputs = len(bias)
    total = np.zeros(outputs, np.float32)
    norm = np.float32(0)
    for j in range(len(buckets)):
        b = buckets[j]
        v = values[j] * rarity[b]
        norm += v * v
        for k in range(outputs):
            total[k] += values[j] * ngrams[b, k]
    norm = np.sqrt(norm)
    for k in range(outputs):
        total[k] = bias[k] + (total[k] / norm if norm > 0 else np.float32(0))
    dims = landmarks.shape[1]
    words = dims - len(shape)
    u = np.empty(dims, np.float32)
    for d in range(words):
        u[d] = (mean[d] - word_mean[d]) / word_std
    for s in range(len(shape)):
        x = (shape[s] - shape_mean[s]) / shape_std[s]
        x = min(max(x, np.float32(-SHAPE_LIMIT)), np.float32(SHAPE_LIMIT))
        u[words + s] = x * shape_share
        for k in range(outputs):
            total[k] += x * shape_w[s, k]
    for m in range(landmarks.shape[0]):
        distance = np.float32(0)
        for d in range(dims):
            difference = u[d] - landmarks[m, d]
            distance += difference * difference
        near = np.exp(np.float32(-0.5) * distance)
        for k in range(outputs):
            total[k] += near * amounts[m, k]
    if outputs == 1:
        return total[0]
    top = total.max()
    weights = np.exp(total - top)
    expected = np.float32(0)
    for k in range(outputs):
        expected += k * weights[k]
    return expected / weights.sum()
