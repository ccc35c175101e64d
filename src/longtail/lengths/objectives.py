"""What a ranker is trained for: four objectives behind one interface, for any backend that maps prompts to numbers.

=============== =========== ==================================================================================
objective       outputs     source
=============== =========== ==================================================================================
margin          1           PARS (arXiv 2510.03243): margin ranking loss on pairs that differ by at least delta
listmle         1           vllm-ltr (arXiv 2408.15792): Plackett-Luce likelihood of the order by length
pointwise       1           regression on the log length
classification  deciles     classes of equal frequency; the expected class is the score
=============== =========== ==================================================================================

An objective deals the rows of a data set into batches with the targets of their loss (NumPy), and computes the loss of
a model's outputs on a batch (torch). What always holds:

* Rows of different sources are never compared: their units may differ.
* A censored length (the response hit its cap) is a lower bound. Such a row is taken as longer than others, never as
  shorter, and a regression or a class only pulls its prediction up.
* Batches are a function of the data and the state of ``rng``.
* Within a batch every prompt stands once, so it is encoded once.

Lengths are float64 [n] in any unit, sources int [n], censored bool [n].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from longtail.core.errors import RankerError

if TYPE_CHECKING:
    from torch import Tensor

ObjectiveName = Literal["margin", "listmle", "pointwise", "classification"]
OBJECTIVES: tuple[ObjectiveName, ...] = ("margin", "listmle", "pointwise", "classification")
Pairing = Literal["in-batch", "paper"]


class Batch(NamedTuple):
    """``rows`` int64 [b]: distinct rows of the data. ``target``: what the objective's loss needs, see there."""

    rows: np.ndarray
    target: np.ndarray


class Objective(Protocol):
    """``outputs`` is K, the numbers that a model must give for each prompt."""

    @property
    def outputs(self) -> int: ...

    def epoch(
        self, lengths: np.ndarray, sources: np.ndarray, censored: np.ndarray, rng: np.random.Generator
    ) -> list[Batch]:
        """The batches of one pass over the data, in training order.

        Raises :class:`RankerError` if the data holds no order to learn.
        """
        ...

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Scalar loss of ``outputs`` float [b, K], whose row i belongs to ``batch.rows[i]``."""
        ...

    def score(self, outputs: Tensor) -> Tensor:
        """Float [b], higher = longer, from float [b, K]."""
        ...


def objective(
    name: ObjectiveName,
    *,
    delta: float = 0.2,
    margin: float = 1.0,
    partners: int = 10,
    batch_size: int = 32,
    pairing: Pairing = "in-batch",
) -> Objective:
    """``batch_size`` is in prompts, for ``pairing="paper"`` in pairs. ``delta``, ``margin``, ``partners`` and
    ``pairing`` belong to the margin objective alone."""
    match name:
        case "margin":
            return Margin(delta=delta, margin=margin, partners=partners, batch_size=batch_size, pairing=pairing)
        case "listmle":
            return ListMLE(batch_size=batch_size)
        case "pointwise":
            return Pointwise(batch_size=batch_size)
        case "classification":
            return Classification(batch_size=batch_size)
    raise RankerError(f"unknown objective {name!r}: choose one of {', '.join(OBJECTIVES)}")


@dataclass(frozen=True, kw_only=True)
class Margin:
    """``mean(max(0, margin - (s_longer - s_shorter)))`` over pairs; target int64 [m, 2] of places in ``rows``, the
    longer one first.

    ``pairing="paper"`` draws pairs over the whole data set and cuts them into batches of ``batch_size`` pairs, as PARS
    does: a prompt is encoded about once for each of its pairs. ``"in-batch"`` deals the prompts into batches of
    ``batch_size`` prompts and pairs them there: as many pairs, each prompt encoded once an epoch.
    """

    delta: float = 0.2
    margin: float = 1.0
    partners: int = 10
    batch_size: int = 32
    pairing: Pairing = "in-batch"

    @property
    def outputs(self) -> int:
        return 1

    def epoch(
        self, lengths: np.ndarray, sources: np.ndarray, censored: np.ndarray, rng: np.random.Generator
    ) -> list[Batch]:
        require_order(lengths, sources, censored, delta=self.delta)
        batches = []
        if self.pairing == "paper":
            pairs = sample_pairs(lengths, sources, censored, delta=self.delta, partners=self.partners, rng=rng)
            for start in range(0, len(pairs), self.batch_size):
                rows, places = np.unique(pairs[start : start + self.batch_size], return_inverse=True)
                batches.append(Batch(rows, places.reshape(-1, 2)))
            return batches
        for rows in deal(sources, self.batch_size, rng):
            pairs = sample_pairs(
                lengths[rows], sources[rows], censored[rows], delta=self.delta, partners=self.partners, rng=rng
            )
            if len(pairs):
                batches.append(Batch(rows, pairs))
        return batches

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        score = outputs[:, 0]
        longer, shorter = _tensor(batch.target, outputs).unbind(1)
        return (self.margin - (score[longer] - score[shorter])).clamp(min=0).mean()

    def score(self, outputs: Tensor) -> Tensor:
        return outputs[:, 0]


@dataclass(frozen=True, kw_only=True)
class ListMLE:
    """Negative log likelihood of the order of a batch's prompts, longest first, in the Plackett-Luce model.

    The target is bool [b, b]: row i marks the prompts among which i was chosen, itself and all that are known to be no
    longer. Without ties and censoring these are the suffixes of the sorted list (Xia et al., ICML 2008). Tied prompts
    stand in each other's set (Breslow's rule); a censored prompt stands in no other's set, and its own holds what is
    shorter than its bound. Prompts with nothing to be chosen from are left out of the mean.
    """

    batch_size: int = 32

    @property
    def outputs(self) -> int:
        return 1

    def epoch(
        self, lengths: np.ndarray, sources: np.ndarray, censored: np.ndarray, rng: np.random.Generator
    ) -> list[Batch]:
        require_order(lengths, sources, censored)
        batches = []
        for rows in deal(sources, self.batch_size, rng):
            L, source = lengths[rows], sources[rows]
            no_longer = (L[None, :] <= L[:, None]) & ~censored[rows][None, :] & (source[None, :] == source[:, None])
            no_longer |= np.eye(len(rows), dtype=bool)
            if (no_longer.sum(1) > 1).any():
                batches.append(Batch(rows, no_longer))
        return batches

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        score = outputs[:, 0]
        choices = _tensor(batch.target, outputs)
        chosen = choices.sum(1) > 1
        total = score[None, :].masked_fill(~choices, float("-inf")).logsumexp(1)
        return (total - score)[chosen].mean()

    def score(self, outputs: Tensor) -> Tensor:
        return outputs[:, 0]


@dataclass(frozen=True, kw_only=True)
class Pointwise:
    """Smooth L1 on ``log(1 + length)``, standardised in each source; target float32 [b, 2] of (value, 1 if censored).

    A censored prompt costs nothing above its bound.
    """

    batch_size: int = 32

    @property
    def outputs(self) -> int:
        return 1

    def epoch(
        self, lengths: np.ndarray, sources: np.ndarray, censored: np.ndarray, rng: np.random.Generator
    ) -> list[Batch]:
        require_order(lengths, sources, censored)
        value = np.log1p(lengths)
        for rows in _rows_by_source(sources):
            value[rows] = (value[rows] - value[rows].mean()) / max(value[rows].std(), 1e-6)
        target = np.stack([value, censored], axis=1).astype(np.float32)
        return [Batch(rows, target[rows]) for rows in deal(sources, self.batch_size, rng)]

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        import torch

        value, censored = _tensor(batch.target, outputs).unbind(1)
        error = outputs[:, 0] - value
        error = torch.where(censored > 0, error.clamp(max=0), error)
        return torch.nn.functional.smooth_l1_loss(error, torch.zeros_like(error))

    def score(self, outputs: Tensor) -> Tensor:
        return outputs[:, 0]


@dataclass(frozen=True, kw_only=True)
class Classification:
    """Cross-entropy over ``classes`` of equal frequency in each source; target int64 [b, 2] of (class, 1 if censored).

    A censored prompt's likelihood is that of its class or a higher one. The score is the expected class.
    """

    batch_size: int = 32
    classes: int = 10

    @property
    def outputs(self) -> int:
        return self.classes

    def epoch(
        self, lengths: np.ndarray, sources: np.ndarray, censored: np.ndarray, rng: np.random.Generator
    ) -> list[Batch]:
        require_order(lengths, sources, censored)
        label = np.empty(len(lengths), dtype=np.int64)
        inner = np.arange(1, self.classes) / self.classes
        for rows in _rows_by_source(sources):
            label[rows] = np.searchsorted(np.quantile(lengths[rows], inner), lengths[rows], side="right")
        target = np.stack([label, censored], axis=1).astype(np.int64)
        return [Batch(rows, target[rows]) for rows in deal(sources, self.batch_size, rng)]

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        import torch

        label, censored = _tensor(batch.target, outputs).unbind(1)
        class_K = torch.arange(outputs.shape[1], device=outputs.device)
        possible = (class_K == label[:, None]) | ((censored[:, None] > 0) & (class_K >= label[:, None]))
        return (outputs.logsumexp(1) - outputs.masked_fill(~possible, float("-inf")).logsumexp(1)).mean()

    def score(self, outputs: Tensor) -> Tensor:
        return expected_class(outputs)


def expected_class(outputs: Tensor) -> Tensor:
    """Mean class [b] under the softmax of [b, K]; in [0, K - 1]."""
    import torch

    return outputs.softmax(1) @ torch.arange(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)


def sample_pairs(
    lengths: np.ndarray,
    sources: np.ndarray,
    censored: np.ndarray,
    *,
    delta: float,
    partners: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Int64 [m, 2] of (longer, shorter) rows in random order, no pair twice; up to ``partners`` drawn for each row.

    A pair (i, j) is eligible if both are of one source, j is not censored, ``lengths[j] < lengths[i]`` and
    ``lengths[j] <= (1 - delta) * lengths[i]``. Each row draws uniformly from its eligible partners, longer and shorter
    ones, with replacement; drawing takes O(n (partners + log n)) in time and memory.
    """
    found = [np.empty((0, 2), dtype=np.int64)]
    for rows in _rows_by_source(sources):
        ascending = rows[np.argsort(lengths[rows], kind="stable")]
        known = ascending[~censored[ascending]]
        # Shorter partners are the first of `known`, longer ones the last of `ascending`.
        L = lengths[rows]
        shorter = _shorter_count(lengths[known], L, delta)
        longest_out = _first_longer(lengths[ascending], L, delta)
        longer = np.where(censored[rows], 0, len(ascending) - longest_out)
        count = shorter + longer
        draw = np.floor(rng.random((len(rows), partners)) * count[:, None]).astype(np.int64)
        row, column = np.nonzero(np.broadcast_to(count[:, None] > 0, draw.shape))
        pick, me = draw[row, column], rows[row]
        below = pick < shorter[row]
        pairs = np.empty((len(pick), 2), dtype=np.int64)
        pairs[below] = np.stack([me[below], known[pick[below]]], axis=1)
        place = (longest_out[row] + pick - shorter[row])[~below]
        pairs[~below] = np.stack([ascending[place], me[~below]], axis=1)
        found.append(pairs)
    pairs = np.unique(np.concatenate(found), axis=0)
    return rng.permutation(pairs)


def deal(sources: np.ndarray, size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Every row once, in random batches of at most ``size``. Rows of one source stay together as far as they go: a
    source is cut into as few, nearly equal parts as fit, and small parts of several sources share a batch."""
    parts = []
    for rows in _rows_by_source(sources):
        parts += np.array_split(rng.permutation(rows), -(-len(rows) // size))
    batch: list[np.ndarray] = []
    for place in rng.permutation(len(parts)):
        if sum(map(len, batch)) + len(parts[place]) > size:
            yield np.concatenate(batch)
            batch = []
        batch.append(parts[place])
    if batch:
        yield np.concatenate(batch)


def require_order(lengths: np.ndarray, sources: np.ndarray, censored: np.ndarray, *, delta: float = 0.0) -> None:
    """Raises :class:`RankerError` unless some row is known to be longer than another of its source, by ``delta``."""
    for rows in _rows_by_source(sources):
        known = lengths[rows][~censored[rows]]
        if len(known) and _shorter_count(np.sort(known), lengths[rows], delta).any():
            return
    by = f"by at least {delta:.0%} of the longer one" if delta else "at all"
    raise RankerError(
        f"no two of the {len(lengths)} prompts are known to differ in length {by} within one source, so there is no "
        "order to learn: give more prompts, several samples of each, or a higher token cap"
        + (", or lower delta" if delta else "")
    )


def _shorter_count(ascending: np.ndarray, lengths: np.ndarray, delta: float) -> np.ndarray:
    """For each length, how many of ``ascending`` are shorter by ``delta``."""
    limit = np.searchsorted(ascending, (1.0 - delta) * lengths, side="right")
    return np.minimum(limit, np.searchsorted(ascending, lengths, side="left"))


def _first_longer(ascending: np.ndarray, lengths: np.ndarray, delta: float) -> np.ndarray:
    """For each length, the first place in ``ascending`` that is longer by ``delta``."""
    limit = np.searchsorted((1.0 - delta) * ascending, lengths, side="left")
    return np.maximum(limit, np.searchsorted(ascending, lengths, side="right"))


def _rows_by_source(sources: np.ndarray) -> list[np.ndarray]:
    """Rows of each source, ascending."""
    order = np.argsort(sources, kind="stable")
    return np.split(order, np.nonzero(np.diff(sources[order]))[0] + 1) if len(order) else []


def _tensor(target: np.ndarray, outputs: Tensor) -> Tensor:
    import torch

    return torch.from_numpy(target).to(outputs.device)
