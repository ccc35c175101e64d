"""The samples of one training step: which are wanted, which have ended, what they were worth.

Which prompts a step has, and which lengths in fixed-length mode, depends on the seed and the step alone.

Invariant (exactly once): each (prompt, sample) of the step ends exactly once; a second end is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from longtail.core.config import Pipeline
from longtail.core.seeds import derive_seed
from longtail.core.types import Completion, Request, SamplingParams, StepTotals, TrainGroup, TrainSample
from longtail.rl.advantages import group_advantages
from longtail.rl.tasks import Example, prompt_indices
from longtail.runtime.plan import PipelinePlan


@dataclass
class Group:
    """One prompt of the step and its samples so far; ``rewards`` is None until scored.

    ``forced_lengths`` has the length of every sample in fixed-length mode.
    """

    example: Example
    prompt: np.ndarray
    completions: list[Completion | None]
    forced_lengths: tuple[int, ...] | None = None
    rewards: list[float | None] | None = None

    @property
    def ended(self) -> bool:
        return all(c is not None for c in self.completions)

    @property
    def texts(self) -> list[str]:
        return [c.text for c in self.completions if c is not None]


@dataclass
class StepBatch:
    """All groups of one step; ``step`` is the number of steps done before it."""

    step: int
    groups: list[Group]
    _parts: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        step: int,
        examples: Sequence[Example],
        prompts: Sequence[np.ndarray],
        group_size: int,
        forced_lengths: Sequence[tuple[int, ...] | None] | None = None,
    ) -> StepBatch:
        """Groups of ``group_size`` samples each that have not begun."""
        forced = forced_lengths or [None] * len(examples)
        groups = [Group(e, p, [None] * group_size, f) for e, p, f in zip(examples, prompts, forced, strict=True)]
        return cls(step, groups)

    def requests(self, config: Pipeline, params: SamplingParams, workers: int) -> list[Request]:
        """The step's requests, prompt by prompt: whole groups, split only when there are fewer prompts than workers.

        Every sample's seed depends on (pipeline seed, step, prompt, sample) alone.
        """
        size = config.algorithm.group_size
        parts = min(size, max(1, -(-workers // len(self.groups))))
        bounds = [(size * i // parts, size * (i + 1) // parts) for i in range(parts)]
        requests = []
        for j, group in enumerate(self.groups):
            for first, last in bounds:
                request = Request(
                    request_id=f"{self.step}/{j}/{first}",
                    prompt=group.prompt,
                    seeds=tuple(derive_seed(config.seed, "sample", self.step, j, s) for s in range(first, last)),
                    params=params,
                    forced_lengths=group.forced_lengths and group.forced_lengths[first:last],
                )
                self._parts[request.request_id] = (j, first)
                requests.append(request)
        return requests

    def place(self, request_id: str) -> tuple[int, int]:
        """(prompt, sample) of a request's first sample."""
        return self._parts[request_id]

    def end(self, completion: Completion) -> tuple[int, int]:
        """Record a finished sample; returns its (prompt, sample). Raises ``RuntimeError`` on a second end."""
        j, first = self._parts[completion.request_id]
        sample = first + completion.sample
        if self.groups[j].completions[sample] is not None:
            raise RuntimeError(f"sample {sample} of prompt {j} of step {self.step} ended twice")
        self.groups[j].completions[sample] = completion
        return j, sample

    @property
    def ended(self) -> bool:
        return all(g.ended for g in self.groups)

    @property
    def scored(self) -> bool:
        return all(g.rewards is not None for g in self.groups)

    def completions(self) -> Iterator[Completion]:
        for group in self.groups:
            yield from (c for c in group.completions if c is not None)

    def train_groups(self, scale: Literal["group", "none"]) -> list[TrainGroup]:
        """What the trainer learns from: samples whose reward is None are left out."""
        groups = []
        for group in self.groups:
            assert group.rewards is not None
            advantages = group_advantages(group.rewards, scale=scale)
            samples = tuple(
                TrainSample(tokens=c.tokens, logprobs=c.logprobs, advantage=float(advantage))
                for c, reward, advantage in zip(group.completions, group.rewards, advantages, strict=True)
                if c is not None and reward is not None
            )
            if samples:
                groups.append(TrainGroup(prompt=group.prompt, samples=samples))
        return groups

    def metrics(self) -> dict[str, float]:
        """Rewards and lengths of the step (see docs/metrics)."""
        lengths = np.array([len(c.tokens) for c in self.completions()])
        rewards = [[r for r in g.rewards or () if r is not None] for g in self.groups]
        flat = np.array([r for group in rewards for r in group])
        truncated = np.mean([c.finish == "length" for c in self.completions()])
        return {
            "reward_mean": float(flat.mean()) if len(flat) else float("nan"),
            "reward_std": float(flat.std()) if len(flat) else float("nan"),
            "flat_group_fraction": self._flat_fraction(),
            "sequences": float(len(lengths)),
            "tokens": float(lengths.sum()),
            "length_mean": float(lengths.mean()),
            "length_max": float(lengths.max()),
            "truncated_fraction": float(truncated),
            "preemptions": float(sum(c.preemptions for c in self.completions())),
        }

    def _flat_fraction(self) -> float:
        """The share of groups, among those with any reward, that have no gradient because all advantages are 0."""
        advantages = [group_advantages(g.rewards or (), scale="none") for g in self.groups]
        scored = [a[~np.isnan(a)] for a in advantages if not np.isnan(a).all()]
        return float(np.mean([not a.any() for a in scored])) if scored else float("nan")


class StepSource:
    """Makes the batches of a pipeline's steps."""

    def __init__(self, plan: PipelinePlan) -> None:
        self._plan = plan
        self._next: tuple[int, list[Example]] = (-1, [])
        rollout = plan.config.rollout
        self.params = SamplingParams(
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            end_token_ids=plan.tokenizer.end_token_ids,
            stop=tuple(rollout.stop),
        )

    def batch(self, step: int) -> StepBatch:
        """The prompts of ``step``, encoded. Raises ``DataError`` for one that cannot be made."""
        config = self._plan.config
        ahead, examples = self._next
        if ahead != step:
            examples = self._examples(step)
        prompts = [self._plan.tokenizer.encode_prompt(e.prompt, chat=config.rollout.chat) for e in examples]
        forced = [self._forced_lengths(example, step, place) for place, example in enumerate(examples)]
        return StepBatch.of(step, examples, prompts, config.algorithm.group_size, forced)

    def upcoming(self, step: int) -> list[Example]:
        """The examples of a later step; none where they cannot be made, which is told when that step begins."""
        with contextlib.suppress(Exception):
            self._next = step, self._examples(step)
            return self._next[1]
        return []

    def _examples(self, step: int) -> list[Example]:
        task, config = self._plan.task, self._plan.config
        indices = prompt_indices(task, step=step, prompts=config.rollout.prompts, seed=config.seed)
        return [task.example(index) for index in indices]

    def _forced_lengths(self, example: Example, step: int, place: int) -> tuple[int, ...] | None:
        """In the e-th epoch (from 0) sample s takes the length number e x group_size + s, starting over at the end."""
        config = self._plan.config
        if config.rollout.forced_lengths is None:
            return None
        lengths = example.columns[config.rollout.forced_lengths]
        epoch = (step * config.rollout.prompts + place) // self._plan.task.size if self._plan.task.size else 0
        size = config.algorithm.group_size
        return tuple(lengths[(epoch * size + s) % len(lengths)] for s in range(size))


def totals(groups: Sequence[TrainGroup], max_tokens: int) -> StepTotals:
    """Counts over the global batch by which losses are normalised."""
    samples = [s for g in groups for s in g.samples]
    return StepTotals(samples=len(samples), tokens=sum(len(s.tokens) for s in samples), max_tokens=max_tokens)
