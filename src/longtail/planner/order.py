"""Order: which worker gets which requests of a rollout, and in which order.

Lengths are uncertain, so a placement is judged by its mean makespan over equally likely outcomes of them, and the rule
that orders the requests is chosen by that judgement, not fixed. Where lengths are known, longest first is near the
optimum (Graham's bound: at most 4/3 of it). Where each prompt has a long tail of its own that nobody can foretell, the
sample that ends last is one that began late and turned out long, and then it can be better to begin *many* samples
early (shortest first), or those most likely to surprise.

Invariants: every request is in exactly one queue; the placement chosen is never predicted to be slower than dealing
requests out as they come; equal arguments give equal placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from longtail.costs.decode import DecodeCosts
from longtail.planner.makespan import deal, makespan_s

TAIL_QUANTILE = 0.8
"""Tokens beyond this quantile of all lengths are what makes stragglers."""


class Rule(StrEnum):
    """How requests are ordered; the values are what people read."""

    FIFO = "as they come"
    ARRIVAL = "as they come, to whoever is free"
    LONGEST = "longest first"
    TALLEST = "longest sample first"
    SHORTEST = "shortest first"
    STRAGGLERS = "likeliest stragglers first"


@dataclass(frozen=True)
class Work:
    """The R requests of one step, in the order in which they came, with S samples in all.

    ``samples`` and ``prompt_tokens`` int64 [R]; ``lengths`` int64 [K, S]: K equally likely outcomes of the lengths of
    all samples, those of a request side by side. By these placements are judged; by the following [R] they are made:
    ``expected`` tokens of a request's samples together, of its ``tallest`` one, and those ``excess`` ones that lie
    beyond the :data:`TAIL_QUANTILE` of all lengths.
    """

    samples: np.ndarray
    prompt_tokens: np.ndarray
    lengths: np.ndarray
    expected: np.ndarray
    tallest: np.ndarray
    excess: np.ndarray

    @classmethod
    def known(cls, samples: np.ndarray, prompt_tokens: np.ndarray, lengths: np.ndarray) -> Work:
        """``lengths`` int64 [S] are those that the samples will have."""
        first = np.cumsum(samples) - samples
        beyond = np.maximum(lengths - np.quantile(lengths, TAIL_QUANTILE), 0.0)
        return cls(
            samples, prompt_tokens, lengths[None, :],
            expected=np.add.reduceat(lengths, first).astype(float),
            tallest=np.maximum.reduceat(lengths, first).astype(float),
            excess=np.add.reduceat(beyond, first),
        )  # fmt: skip

    @classmethod
    def uncertain(cls, samples: np.ndarray, prompt_tokens: np.ndarray, lengths: np.ndarray, levels: np.ndarray) -> Work:
        """``levels`` [R, L]: equally likely lengths of one sample of each request, ascending."""
        cdf = np.arange(levels.shape[1] + 1) / levels.shape[1]
        highest = np.diff(cdf[None, :] ** samples[:, None], axis=1)  # P(the largest of n draws is level l)
        beyond = np.maximum(levels - np.quantile(levels, TAIL_QUANTILE), 0.0)
        return cls(
            samples, prompt_tokens, lengths,
            expected=levels.mean(axis=1) * samples,
            tallest=(levels * highest).sum(axis=1),
            excess=beyond.mean(axis=1) * samples,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def first(self) -> np.ndarray:
        """int64 [R + 1]: the place of each request's first sample."""
        return np.append(0, np.cumsum(self.samples))


@dataclass(frozen=True)
class Placement:
    """``queues[w]``: indices of requests in the order in which worker w should get them.

    ``expected_tokens`` [R] is what the requests' samples are expected to have together. ``makespan_s`` and ``fifo_s``
    are means over the outcomes, of this placement and of dealing requests out as they come.
    """

    queues: tuple[tuple[int, ...], ...]
    rule: Rule
    expected_tokens: tuple[float, ...]
    makespan_s: float
    fifo_s: float

    @property
    def late(self) -> bool:
        """A request is sent when a worker has room for it, and a worker whose queue is empty takes from the others
        (:class:`~longtail.planner.dispatch.Dispatch`); else all are sent at once."""
        return self.rule != Rule.FIFO


def fifo(requests: int, workers: int) -> Placement:
    """Requests dealt out in turn, as they come, all at once; nothing is expected of them."""
    queues = tuple(tuple(range(w, requests, workers)) for w in range(workers))
    return Placement(queues, Rule.FIFO, (1.0,) * requests, makespan_s=0.0, fifo_s=0.0)


def place(work: Work, *, costs: Sequence[DecodeCosts], slots: int) -> Placement:
    """The placement of ``work`` with the least predicted makespan.

    ``costs`` has one entry for each worker; ``slots`` is how many sequences a worker decodes at once.
    """
    table = np.array([[c.base_s, c.per_sequence_s, c.per_context_token_s, c.per_prompt_token_s] for c in costs])
    first = work.first
    best: tuple[float, _Candidate] | None = None
    fifo_s = 0.0
    for candidate in _candidates(work, slots, table):
        late, ahead = candidate.rule != Rule.FIFO, int(work.samples.max())
        arguments = (first, work.prompt_tokens, work.expected, candidate.queue, candidate.bounds, late, slots, ahead)
        outcomes = [makespan_s(lengths, *arguments, table) for lengths in work.lengths]
        mean_s = sum(outcomes) / len(outcomes)
        if candidate.rule == Rule.FIFO:
            fifo_s = mean_s
        if best is None or mean_s < best[0]:
            best = mean_s, candidate
    assert best is not None
    mean_s, chosen = best
    queues = np.split(chosen.queue, chosen.bounds[1:-1])
    return Placement(
        queues=tuple(tuple(queue.tolist()) for queue in queues),
        rule=chosen.rule,
        expected_tokens=tuple(work.expected.tolist()),
        makespan_s=mean_s,
        fifo_s=fifo_s,
    )


class _Candidate(NamedTuple):
    """A placement to be judged: ``queue`` [R] has the requests of worker w from ``bounds[w]`` to ``bounds[w + 1]``."""

    rule: Rule
    queue: np.ndarray
    bounds: np.ndarray


def _candidates(work: Work, slots: int, table: np.ndarray) -> Iterator[_Candidate]:
    workers, requests = len(table), len(work)
    mean = work.expected / work.samples
    # Where all samples decode at once, KV memory is made for even numbers of requests; otherwise slots limit it.
    share = -(-requests // workers)
    most = share if share * int(work.samples.max()) <= slots else requests
    keys = {
        Rule.LONGEST: -mean,
        Rule.TALLEST: -work.tallest,
        Rule.SHORTEST: mean,
        # The box with the most to find per second of looking first; those with nothing in them, shortest first.
        Rule.STRAGGLERS: -(work.excess + 1e-3 * work.samples) / work.expected,
    }
    in_turn = np.arange(requests) % workers
    yield _queues(Rule.FIFO, np.arange(requests), in_turn, workers)
    for rule, key in keys.items():
        order = np.argsort(key, kind="stable")
        placed = deal(order, work.expected, most, slots, table)
        yield _queues(rule, order, placed[order], workers)
    yield _queues(Rule.ARRIVAL, np.arange(requests), in_turn, workers)


def _queues(rule: Rule, order: np.ndarray, placed: np.ndarray, workers: int) -> _Candidate:
    """``placed[i]`` is the worker of ``order[i]``."""
    bounds = np.append(0, np.cumsum(np.bincount(placed, minlength=workers)))
    return _Candidate(rule, order[np.argsort(placed, kind="stable")], bounds)
