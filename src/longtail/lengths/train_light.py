"""Training the light backend: any objective, convex in the weights, optionally taught by an encoder.

The score is linear in all that is learnt (``light.py``), so training is one convex problem:

    objective(scores of the labelled prompts) + distil * mean((teacher - score)^2 over all prompts) + l2 / n * |w|^2

solved with Adam over the whole data. The teacher's scores, if any, cover the labelled prompts and ``unlabelled`` ones:
an encoder that was fine-tuned on a few hundred labels knows how thousands of other prompts compare, and that can be
learnt word by word. All linear algebra is NumPy and SciPy; torch is used for the gradient of the objective alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_matrix

from longtail.lengths import features
from longtail.lengths.light import LightBackend, LightWeights, standard_shape
from longtail.lengths.objectives import Batch, Objective, objective, require_order
from longtail.lengths.words import mean_vectors

if TYPE_CHECKING:
    from longtail.lengths.data import LengthData
    from longtail.lengths.data_values import Input
    from longtail.lengths.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the weights are found. ``l2`` is divided by the number of prompts: more data, less restraint."""

    bits: int = features.BITS
    landmarks: int = 512
    steps: int = 240
    lr: float = 0.05
    l2: float = 1.5
    distil: float = 1.0
    redraw: int = 10
    """Steps for which one draw of pairs is kept."""
    shape_share: float = 0.15
    """Weight of one shape number beside the whole word vector, in what two prompts have in common."""
    kernel_share: float = 1.0
    batch: int = 4096
    """Most prompts that an objective looks at together."""
    list_batch: int = 512
    """The same for lists, whose cost grows with the square."""


@dataclass(frozen=True)
class Teacher:
    """Scores float [n] of the labelled prompts and float [u] of ``unlabelled`` ones, higher = longer, in any unit."""

    labelled: np.ndarray
    unlabelled: Sequence[str]
    scores: np.ndarray


def train_light(
    data: LengthData,
    config: TrainConfig,
    *,
    recipe: Recipe | None = None,
    teacher: Teacher | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> LightBackend:
    """Train on all of ``data``; ``progress(steps done, steps in all, loss)``. Deterministic on one machine.

    Raises :class:`RankerError` if the data holds no order.
    """
    recipe = recipe or Recipe()
    goal = objective(
        config.objective,
        delta=config.delta,
        margin=config.margin,
        partners=config.partners,
        batch_size=recipe.list_batch if config.objective == "listmle" else recipe.batch,
    )
    least = config.delta if config.objective == "margin" else 0.0
    require_order(data.lengths, data.sources, data.censored, delta=least)
    rng = np.random.default_rng(config.seed)
    prompts = [*data.inputs, *(teacher.unlabelled if teacher else ())]
    space = Space.fit(prompts, recipe, rng)
    weights, bias = _descend(space, data, goal, recipe, teacher, config.epochs, rng, progress)
    return LightBackend(space.weights(weights, bias))


@dataclass
class Space:
    """All prompts as rows of three blocks, ``(n-grams csr [n, B'], shape [n, S], resemblance [n, M])``, with what is
    needed to read their weights back. B' counts the buckets that occur in at least two prompts (``columns``).
    """

    ngrams: csr_matrix
    shape: np.ndarray
    kernel: np.ndarray
    columns: np.ndarray
    rarity: np.ndarray
    shape_mean: np.ndarray
    shape_std: np.ndarray
    word_mean: np.ndarray
    word_std: float
    landmarks: np.ndarray
    root: np.ndarray
    recipe: Recipe

    @classmethod
    def fit(cls, prompts: Sequence[Input], recipe: Recipe, rng: np.random.Generator) -> Space:
        found = features.features(prompts, bits=recipe.bits)
        n = len(prompts)
        seen = np.bincount(found.buckets, minlength=1 << recipe.bits)
        rarity = (np.log((1 + n) / (1 + seen)) + 1) * (seen >= 2)
        rarity = rarity.astype(np.float16).astype(np.float32)  # what the file keeps
        columns = np.flatnonzero(rarity)
        place = np.full(1 << recipe.bits, -1, np.int64)
        place[columns] = np.arange(len(columns))
        rows = np.repeat(np.arange(n), np.diff(found.start))
        values = found.values * rarity[found.buckets]
        norm = np.sqrt(np.bincount(rows, values**2, minlength=n))
        kept = place[found.buckets] >= 0
        ngrams = csr_matrix(
            ((values / np.maximum(norm, 1e-9)[rows])[kept], (rows[kept], place[found.buckets[kept]])),
            shape=(n, len(columns)),
            dtype=np.float32,
        )
        shape_mean, shape_std = found.shape.mean(0), np.maximum(found.shape.std(0), 1e-3)
        shape = standard_shape(found.shape, shape_mean, shape_std)
        words = mean_vectors(prompts)
        word_mean = words.mean(0)
        word_std = float(np.sqrt(((words - word_mean) ** 2).sum(1).mean())) or 1.0
        u = np.hstack([(words - word_mean) / word_std, recipe.shape_share * shape]).astype(np.float32)
        chosen = np.sort(rng.choice(n, min(recipe.landmarks, n), replace=False))
        landmarks = u[chosen]
        value, vector = np.linalg.eigh(near(landmarks, landmarks).astype(np.float64))
        root = vector / np.sqrt(np.maximum(value, 1e-5 * value.max()))
        kernel = (near(u, landmarks) @ root).astype(np.float32)
        return cls(
            ngrams, shape, kernel, columns, rarity, shape_mean, shape_std, word_mean, word_std, landmarks, root, recipe
        )

    def weights(self, blocks: list[np.ndarray], bias: np.ndarray) -> LightWeights:
        ngrams, shape, kernel = blocks
        table = np.zeros((1 << self.recipe.bits, ngrams.shape[1]), np.float32)
        table[self.columns] = ngrams * self.rarity[self.columns, None]
        return LightWeights(
            ngrams=table.astype(np.float16),
            rarity=self.rarity.astype(np.float16),
            shape=(SHAPE_SCALE * shape).astype(np.float32),
            landmarks=self.landmarks,
            amounts=(self.recipe.kernel_share * self.root @ kernel).astype(np.float32),
            bias=bias.astype(np.float32),
            shape_mean=self.shape_mean.astype(np.float32),
            shape_std=self.shape_std.astype(np.float32),
            word_mean=self.word_mean,
            word_std=np.array([self.word_std], np.float32),
            shape_share=np.array([self.recipe.shape_share], np.float32),
        )


SHAPE_SCALE = 0.1
"""A standardised shape number beside a unit-length n-gram vector: keeps the restraint on both comparable."""


def near(u: np.ndarray, landmarks: np.ndarray) -> np.ndarray:
    """``exp(-|u - l|^2 / 2)`` [n, M]."""
    distance = (u**2).sum(1)[:, None] + (landmarks**2).sum(1) - 2 * u @ landmarks.T
    return np.exp(-0.5 * np.maximum(distance, 0))


def _descend(
    space: Space,
    data: LengthData,
    goal: Objective,
    recipe: Recipe,
    teacher: Teacher | None,
    epochs: int | None,
    rng: np.random.Generator,
    progress: Callable[[int, int, float], None] | None,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Adam over the whole data with a cosine decay of its step; the weights of the three blocks, and the bias [K]."""
    import torch

    labelled, n, K = len(data), len(space.shape), goal.outputs
    blocks = [space.ngrams, SHAPE_SCALE * space.shape, recipe.kernel_share * space.kernel]
    transposed = [block.T.tocsr() if isinstance(block, csr_matrix) else block.T for block in blocks]
    sizes = [block.shape[1] for block in blocks]
    w = np.zeros((sum(sizes) + 1, K), np.float32)
    splits = np.cumsum(sizes)
    first, second = np.zeros_like(w), np.zeros_like(w)
    target = _standardised(teacher, labelled) if teacher else None
    steps = recipe.steps if epochs is None else max(1, epochs)
    l2 = np.float32(recipe.l2 / n)
    batches: list[Batch] = []
    for step in range(steps):
        if step % recipe.redraw == 0:
            batches = goal.epoch(data.lengths, data.sources, data.censored, rng)
        scores = sum(block @ part for block, part in zip(blocks, np.split(w[:-1], splits[:-1]), strict=True)) + w[-1]
        outputs = torch.from_numpy(np.ascontiguousarray(scores[:labelled])).requires_grad_()
        loss = torch.zeros(())
        for batch in batches:
            share = len(batch.rows) / labelled
            loss = loss + share * goal.loss(outputs[torch.from_numpy(batch.rows)], batch)
        loss.backward()
        slope = np.zeros((n, K), np.float32)
        assert outputs.grad is not None
        slope[:labelled] = outputs.grad.numpy()
        if target is not None:
            everything = torch.from_numpy(np.ascontiguousarray(scores)).requires_grad_()
            error = goal.score(everything) - torch.from_numpy(target)
            taught = recipe.distil * (error**2).mean()
            taught.backward()
            assert everything.grad is not None
            slope += everything.grad.numpy()
            loss = loss + taught
        gradient = np.concatenate([*(block @ slope for block in transposed), slope.sum(0, keepdims=True)])
        gradient[:-1] += l2 * w[:-1]
        first += 0.1 * (gradient - first)
        second += 0.001 * (gradient**2 - second)
        rate = recipe.lr * 0.5 * (1 + np.cos(np.pi * step / steps))
        t = step + 1
        w -= rate * (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
        if progress is not None:
            progress(t, steps, float(loss.detach()))
    return np.split(w[:-1], splits[:-1]), w[-1]


def _standardised(teacher: Teacher, labelled: int) -> np.ndarray:
    """float32 [n + u] with mean 0 and deviation 1."""
    scores = np.concatenate([teacher.labelled, teacher.scores])
    return ((scores - scores.mean()) / max(float(scores.std()), 1e-6)).astype(np.float32)
