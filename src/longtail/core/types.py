"""The values that the parts of Longtail hand to each other.

All are frozen and know nothing of torch or Ray, so that they pickle, compare and print as plain data.
Token arrays are ``numpy.int32``, log-probabilities ``numpy.float32``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

import numpy as np

Purpose = Literal["update", "switch", "profile"]


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end token or a stop string was produced (or a forced length was reached)."""
    LENGTH = "length"
    """``max_tokens`` or the model's context was reached: the sequence is truncated."""


class SubStage(StrEnum):
    """A kind of work with steady compute character; every quantum is of exactly one kind."""

    PREFILL = "prefill"
    DECODE = "decode"
    TRAIN = "train"
    REDUCE = "reduce"
    """Gradient reduction and optimizer step, under a lease."""
    CHECKPOINT = "checkpoint"
    LOAD = "load"
    SWITCH = "switch"
    """Going over to another layout, under a lease."""
    PROFILE = "profile"
    """Measuring what work costs, under a lease."""


BURST_S = 0.008
"""Short quanta of a pipeline are done several at a time, for so long: between two of them a worker looks for commands,
chooses and keeps account, which takes 0.15 ms, 4 % of a decode step of a small model."""
SLICE_S = 0.1
"""A training micro-batch is left, after the next layer or the vocabulary head, when it has had so long: others have
their turn, and what all workers do together need not wait for its end, which may be seconds away."""


def trains_in_slices(device: str) -> bool:
    """Not on CUDA: autograd has a thread of its own for all pipelines there, which must not be held up."""
    return device == "cpu"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are drawn.

    ``temperature`` 0 means greedy (lowest id on ties). ``top_k`` 0 and ``top_p`` 1 mean off.
    ``max_tokens`` counts generated tokens. ``end_token_ids`` end a sequence and are kept as its last token.
    A match of any of ``stop`` in the generated text ends it too. ``top_logprobs`` (0 to 20) is how many of the most
    likely tokens are to be named beside each drawn one.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    end_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and the group of samples wanted for it; the prompt is prefilled once.

    ``seeds[i]`` (uint64) keys all sampling noise of sample ``i``: a token depends on (seed, position) alone.
    ``forced_lengths[i]``, if given, ends sample ``i`` after exactly that many tokens, ignoring end tokens and
    stop strings (fixed-length mode of the benches).
    """

    request_id: str
    prompt: np.ndarray
    seeds: tuple[int, ...]
    params: SamplingParams
    forced_lengths: tuple[int, ...] | None = None

    @property
    def samples(self) -> int:
        return len(self.seeds)


class Emitted(NamedTuple):
    """One token that was just drawn. ``logprob`` is as in :class:`Completion`. ``top`` holds the ``top_logprobs`` most
    likely tokens under the same distribution as (token id, log-probability), most likely first; None if not asked for.
    """

    request_id: str
    sample: int
    token: int
    logprob: float
    top: list[tuple[int, float]] | None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished sample. ``logprobs[t]`` is the log-probability of ``tokens[t]`` under the full-vocabulary
    distribution at the request's temperature (temperature 1 for greedy), before any top-k or top-p filter.
    """

    request_id: str
    sample: int
    tokens: np.ndarray
    logprobs: np.ndarray
    text: str
    finish: FinishReason
    preemptions: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainSample:
    """One completion as the trainer sees it: ``tokens`` int32 [C], sampler ``logprobs`` float32 [C], ``advantage``."""

    tokens: np.ndarray
    logprobs: np.ndarray
    advantage: float


@dataclass(frozen=True, kw_only=True)
class TrainGroup:
    """Samples of one prompt; the trainer computes the prompt once for all of them."""

    prompt: np.ndarray
    samples: tuple[TrainSample, ...]

    @property
    def tokens(self) -> int:
        """Tokens that one forward pass computes: the prompt once, each completion once."""
        return len(self.prompt) + sum(len(s.tokens) for s in self.samples)


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts over the whole global batch of a step, the same on every worker: what losses are normalised by.

    ``samples`` counts the samples that take part in the loss; ``tokens`` their completion tokens.
    """

    samples: int
    tokens: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The controller's grant of a set of workers for work that needs all of them at once: an update, a profile, or
    sampling in tensor-parallel groups until they are dissolved (``switch``).

    A worker holds at most one lease; the controller grants it to all members or to none, so no two
    collectives can wait for each other.
    """

    lease_id: int
    pipeline: str
    workers: tuple[int, ...]
    purpose: Purpose = "update"


@dataclass(frozen=True)
class Layout:
    """Which workers sample together: each is in at most one tensor-parallel group of ``groups``, and one that is in
    none has no part in the rollout.

    A group lists its workers in the order of their ranks, neighbours that ascend; the first one leads.
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def narrow(cls, workers: int) -> Layout:
        """Every worker on its own: data parallel."""
        return cls.singles(range(workers))

    @classmethod
    def singles(cls, workers: Iterable[int]) -> Layout:
        """These workers, each on its own."""
        return cls(tuple((worker,) for worker in sorted(workers)))

    @classmethod
    def uniform(cls, workers: int, degree: int) -> Layout:
        """Groups of ``degree`` neighbours; the last one is smaller where ``workers`` is no multiple of it."""
        return cls(tuple(tuple(range(w, min(w + degree, workers))) for w in range(0, workers, degree)))

    @property
    def degree(self) -> int:
        """The largest tensor-parallel degree."""
        return max(len(group) for group in self.groups)

    @property
    def workers(self) -> tuple[int, ...]:
        """All that are in a group, ascending."""
        return tuple(sorted(worker for group in self.groups for worker in group))

    def group_of(self, worker: int) -> tuple[int, ...]:
        """The group that has ``worker``; one that is in none is on its own."""
        return next((group for group in self.groups if worker in group), (worker,))

    def replaced(self, groups: tuple[tuple[int, ...], ...]) -> Layout:
        """With ``groups`` in place of all groups of the same workers."""
        workers = {worker for group in groups for worker in group}
        return Layout(tuple(sorted([g for g in self.groups if workers.isdisjoint(g)] + list(groups))))

    def __str__(self) -> str:
        """Degrees and how many groups have each: ``TP1 x 2``, ``TP2 + TP1 x 2``."""
        degrees = sorted((len(group) for group in self.groups), reverse=True)
        counts = {degree: degrees.count(degree) for degree in degrees}
        return " + ".join(f"TP{degree}" + (f" x {count}" if count > 1 else "") for degree, count in counts.items())
