"""The sub-stage graph: of what kinds of work a pipeline's steps are made, how much of each, and what waits for what.

Work of a step, in the words of the cost table (``longtail profile`` measures how these get on beside each other):

* ``prefill``: prompts, on each worker before what it decodes;
* ``decode_large``: decode steps of more than :data:`~longtail.planner.solo.FEW` sequences, bound by arithmetic;
* ``decode_small``: those of fewer, the tail, bound by reading weights;
* ``wait``: scores and tools, from the last sample to the last reward; needs no worker;
* ``logprob``: of the reference model, where the algorithm has one; ``train``: forward and backward. Both are
  micro-batches that every worker takes when it has time for one, so they are one node with worker-seconds, and no
  worker of their own;
* ``update``: gradient reduction and optimizer, all workers together.

A rollout may have two parts: on all its workers until so much of it is left, then on few of them (``merge.py``). The
first begins when the update before it is done (a pipeline that may be ``stale`` by k steps: that of k steps earlier).
The simulation (``fluid.py``) runs this graph; :meth:`Graph.describe` shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from longtail.costs.table import CostTable
from longtail.planner.solo import Solo
from longtail.planner.state import StepShape

BACKWARD = 3.0
"""Training on a token takes so many times what computing it for a prompt does, where it has not been measured."""


class Kind(StrEnum):
    PREFILL = "prefill"
    DECODE_LARGE = "decode_large"
    DECODE_SMALL = "decode_small"
    WAIT = "wait"
    LOGPROB = "logprob"
    TRAIN = "train"
    UPDATE = "update"


CLASSES = (Kind.DECODE_SMALL, Kind.DECODE_LARGE, Kind.TRAIN)
"""The kinds that the simulation tells apart when it looks up how much longer they take beside each other."""
SMALL, LARGE, TRAIN = range(len(CLASSES))


class Part(NamedTuple):
    """A part of a rollout on k cells [k]: solo seconds of a worker of each, of which ``small_s`` are decode steps of
    few sequences and ``prefill_s`` prompts; ``busy``: the share of the cell's workers that take part in it."""

    solo_s: np.ndarray
    busy: np.ndarray
    small_s: np.ndarray
    prefill_s: np.ndarray

    @classmethod
    def of(cls, solo: Solo) -> Part:
        return cls(solo.seconds, np.ones(len(solo.seconds)), solo.small_s, solo.prefill_s)

    @property
    def critical_s(self) -> float:
        return float(self.solo_s.max(initial=0.0))

    def work_s(self, sizes: np.ndarray) -> float:
        """Worker-seconds on cells of so many workers [k]."""
        return float((self.solo_s * self.busy * sizes).sum())


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """A step: the ``parts`` of its rollout on cells from ``first`` on, ``logprob_s`` and ``train_s`` in worker-seconds,
    the others in seconds."""

    parts: tuple[Part, ...]
    first: int
    score_s: float
    logprob_s: float
    train_s: float
    update_s: float


def train_work_s(tokens: float, table: CostTable) -> float:
    """Worker-seconds of training on so many tokens."""
    token_s = table.train_token_s
    return tokens * (BACKWARD * table.prefill[1].token_s if token_s is None else token_s)


def step_work(shape: StepShape, table: CostTable, parts: tuple[Part, ...], first: int = 0) -> StepWork:
    """A step of ``shape`` whose rollout has these parts."""
    return StepWork(
        parts=parts,
        first=first,
        score_s=shape.score_s,
        logprob_s=shape.reference_tokens * table.prefill[1].token_s,
        train_s=train_work_s(shape.train_tokens, table),
        update_s=shape.update_s,
    )


@dataclass(frozen=True)
class Node:
    """Work that begins when all nodes ``after`` (their indices) are done.

    ``cell``: on which cell, or None: ``update`` on all of them at once, ``wait`` on none, ``logprob`` and ``train`` on
    whichever have time. ``seconds``: of one worker of the cell; worker-seconds of ``logprob`` and ``train``.
    """

    step: int
    kind: Kind
    cell: int | None
    seconds: float
    after: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """The next steps of one pipeline, present first; a node comes after all that it waits for. ``sizes`` [C]: workers
    of each cell."""

    pipeline: str
    nodes: tuple[Node, ...]
    sizes: np.ndarray

    @property
    def critical_s(self) -> float:
        """The longest path, seconds: no sharing and no layout of single workers is faster."""
        ends: list[float] = []
        for node in self.nodes:
            begin = max((ends[i] for i in node.after), default=0.0)
            spread = node.kind in (Kind.LOGPROB, Kind.TRAIN)
            ends.append(begin + node.seconds / (self.sizes.sum() if spread else 1.0))
        return max(ends, default=0.0)

    def describe(self) -> list[str]:
        """A line for each cell and step, and one for what follows its rollout."""
        lines = []
        for step in sorted({node.step for node in self.nodes}):
            inside = [node for node in self.nodes if node.step == step]
            for cell in sorted({node.cell for node in inside if node.cell is not None}):
                work = ", ".join(f"{n.kind} {n.seconds:.2f} s" for n in inside if n.cell == cell)
                lines.append(f"{self.pipeline} step +{step}, {self._name(cell)}: {work}")
            rest = ", ".join(f"{n.kind} {n.seconds:.2f} {_unit(n.kind)}" for n in inside if n.cell is None)
            lines.append(f"{self.pipeline} step +{step}, then: {rest}")
        return lines

    def _name(self, cell: int) -> str:
        bounds = np.append(0, np.cumsum(self.sizes)).astype(int)
        first, last = bounds[cell], bounds[cell + 1] - 1
        return f"worker {first}" if first == last else f"workers {first} to {last}"


def _unit(kind: Kind) -> str:
    return "worker-s" if kind in (Kind.LOGPROB, Kind.TRAIN) else "s"


def graph(pipeline: str, steps: Sequence[StepWork], sizes: np.ndarray, *, stale: int = 0) -> Graph:
    """Of these steps; ``stale`` as in the module's words."""
    nodes: list[Node] = []
    updates: list[int] = []
    sampled: tuple[int, ...] = ()

    def add(step: int, kind: Kind, cell: int | None, seconds: float, after: tuple[int, ...]) -> int:
        nodes.append(Node(step, kind, cell, seconds, after))
        return len(nodes) - 1

    for step, work in enumerate(steps):
        barrier = sampled if step <= stale else tuple(sorted({*sampled, updates[step - 1 - stale]}))
        for part in work.parts:
            ends: list[int] = []
            for i in np.flatnonzero(part.solo_s).tolist():
                large_s = part.solo_s[i] - part.small_s[i] - part.prefill_s[i]
                chain = (
                    (Kind.PREFILL, part.prefill_s[i]),
                    (Kind.DECODE_LARGE, large_s),
                    (Kind.DECODE_SMALL, part.small_s[i]),
                )
                before: tuple[int, ...] = barrier
                for kind, seconds in chain:
                    if seconds > 1e-12:
                        before = (add(step, kind, work.first + i, float(seconds), before),)
                ends += before
            barrier = tuple(sorted(set(ends))) or barrier
        sampled = barrier
        scored: tuple[int, ...] = (add(step, Kind.WAIT, None, work.score_s, sampled),)
        if updates:
            scored = (updates[-1], *scored)
        if work.logprob_s:
            scored = (add(step, Kind.LOGPROB, None, work.logprob_s, scored),)
        trained = add(step, Kind.TRAIN, None, work.train_s, scored)
        updates.append(add(step, Kind.UPDATE, None, work.update_s, (trained,)))
    return Graph(pipeline, tuple(nodes), sizes)
