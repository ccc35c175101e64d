"""The samples of a rollout, numbered prompt by prompt: what is known of each, and how the planner sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from longtail.cluster.messages import Alive
from longtail.core.types import Layout, Request
from longtail.planner.rollout import Rollout
from longtail.planner.state import NOBODY, Live
from longtail.planner.tree import Group
from longtail.runtime.step import StepBatch


class _Heard(NamedTuple):
    """What the leaders have said of live samples, int64 [n] each; ``of`` is the number of the group that has each."""

    of: np.ndarray
    numbers: np.ndarray
    generated: np.ndarray
    lanes: np.ndarray
    compute: np.ndarray


class StepSamples:
    """Those of one step. Until the step is over every sample is live or has ended."""

    def __init__(self, batch: StepBatch, requests: Sequence[Request], group_size: int) -> None:
        self.group_size = group_size
        count = len(batch.groups) * group_size
        self.prompt_tokens = np.repeat([len(group.prompt) for group in batch.groups], group_size)
        self.tokens = np.full(count, -1, np.int64)
        """Of those that have ended."""
        self.ended = np.zeros(count)
        """When they did."""
        firsts = [self.number(*batch.place(r.request_id)) for r in requests]
        self._of = {r.request_id: range(n, n + r.samples) for n, r in zip(firsts, requests, strict=True)}
        self.in_order = np.concatenate([np.array(numbers) for numbers in self._of.values()])
        """Numbers in the order of the requests."""

    def number(self, prompt: int, sample: int) -> int:
        return prompt * self.group_size + sample

    def of(self, request_id: str) -> range:
        """The numbers of a request's samples; none if the step has no such request."""
        return self._of.get(request_id, range(0))

    @property
    def live(self) -> int:
        return int((self.tokens < 0).sum())

    def in_flight(
        self,
        layout: Layout,
        alive: Mapping[int, Alive],
        remaining: Callable[[np.ndarray, np.ndarray], np.ndarray],
        slots: Mapping[int, int],
    ) -> tuple[Rollout, np.ndarray] | None:
        """The rollout by what the leaders of ``layout`` have said last, and the numbers [n] of the samples in it; None
        if some live ones have not been heard of. ``remaining`` (numbers, tokens so far) gives outcomes int64 [K, n]."""
        heard = self._heard(layout, alive)
        if not len(heard.numbers) or len(heard.numbers) != self.live:
            return None
        rollout = Rollout(
            groups=layout.groups,
            of=heard.of,
            context=self.prompt_tokens[heard.numbers] + heard.generated,
            lanes=heard.lanes,
            compute=heard.compute,
            remaining=remaining(heard.numbers, heard.generated),
            slots=slots,
        )
        return rollout, heard.numbers

    def holders(self, layout: Layout, alive: Mapping[int, Alive]) -> Group | None:
        """The workers of the groups that have live samples, ascending; None if some have not been heard of."""
        heard = self._heard(layout, alive)
        if len(heard.numbers) != self.live:
            return None
        return tuple(sorted(worker for g in np.unique(heard.of) for worker in layout.groups[g]))

    def expected(
        self,
        layout: Layout,
        alive: Mapping[int, Alive],
        expected: Callable[[np.ndarray, np.ndarray], np.ndarray],
        *,
        dispatched: bool,
    ) -> Live | None:
        """All that have not ended, as :meth:`in_flight` has them; ``expected`` (numbers, tokens so far) gives the
        tokens to come of each. Those of requests that are with no worker yet come last; None if it is not known which
        these are."""
        heard = self._heard(layout, alive)
        quiet = np.setdiff1d(np.flatnonzero(self.tokens < 0), heard.numbers)
        if len(quiet) and (dispatched or any(group[0] not in alive for group in layout.groups)):
            return None
        nothing = np.zeros(len(quiet), np.int64)
        numbers, generated = np.concatenate([heard.numbers, quiet]), np.concatenate([heard.generated, nothing])
        leaders = np.array([group[0] for group in layout.groups])
        if not len(numbers):
            return NOBODY
        return Live(
            worker=np.concatenate([leaders[heard.of], nothing - 1]),
            context=self.prompt_tokens[numbers] + generated,
            lanes=np.concatenate([heard.lanes, nothing]),
            remaining=np.maximum(np.rint(expected(numbers, generated)), 1).astype(np.int64),
        )

    def _heard(self, layout: Layout, alive: Mapping[int, Alive]) -> _Heard:
        rows: list[tuple[int, int, int, int, int]] = []
        for g, group in enumerate(layout.groups):
            report = alive.get(group[0])
            if report is None:
                continue
            for request_id, tokens in zip(report.request_ids, report.generated, strict=True):
                first = True
                for at, number in enumerate(self.of(request_id)):
                    own = int(tokens[at]) if len(tokens) else 0
                    if own < 0 or self.tokens[number] >= 0:
                        continue
                    prompt = int(self.prompt_tokens[number])
                    lanes = 0 if own == 0 else max(1, own - 1 + prompt * first)
                    rows.append((g, number, own, lanes, prompt if own == 0 and first else 0))
                    first = False
        return _Heard(*np.array(rows, np.int64).reshape(-1, 5).T)

    def as_it_came(self, rollout: Rollout, numbers: np.ndarray, groups: tuple[Group, ...]) -> Rollout:
        """Of ``rollout``, whose sequences have these ``numbers``, the ``groups``, with the lengths that came out."""
        own = inside(rollout, groups)
        generated = rollout.context - self.prompt_tokens[numbers]
        remaining = np.maximum(self.tokens[numbers] - generated, 1)[None, :]
        return replace(
            rollout,
            of=rollout.of[own],
            context=rollout.context[own],
            lanes=rollout.lanes[own],
            compute=rollout.compute[own],
            remaining=remaining[:, own],
        )


def inside(rollout: Rollout, groups: tuple[Group, ...]) -> np.ndarray:
    """Which sequences of ``rollout`` are in ``groups``, bool [n]."""
    return np.isin(rollout.of, [rollout.groups.index(group) for group in groups])
