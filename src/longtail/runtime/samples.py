"""The samples of a rollout, numbered prompt by prompt: what is known of each, and how the planner sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from longtail.cluster.messages import Alive
from longtail.core.types import Layout, Request
from longtail.planner.rollout import Rollout
from longtail.planner.tree import Group
from longtail.runtime.step import StepBatch


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
        of, numbers, context, lanes, compute, generated = ([] for _ in range(6))
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
                    of.append(g)
                    numbers.append(number)
                    generated.append(own)
                    context.append(prompt + own)
                    lanes.append(0 if own == 0 else max(1, own - 1 + prompt * first))
                    compute.append(prompt if own == 0 and first else 0)
                    first = False
        if not numbers or len(numbers) != self.live:
            return None
        who, so_far = np.array(numbers), np.array(generated)
        rollout = Rollout(
            groups=layout.groups,
            of=np.array(of),
            context=np.array(context),
            lanes=np.array(lanes),
            compute=np.array(compute),
            remaining=remaining(who, so_far),
            slots=slots,
        )
        return rollout, who

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
