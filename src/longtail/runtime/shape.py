"""What a step of a pipeline is like, by which the planner weighs it against others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from longtail.core.config import Pipeline
from longtail.core.types import Request
from longtail.planner.order import Work
from longtail.planner.state import StepShape
from longtail.runtime.step import StepBatch


def expected_shape(work: Work, config: Pipeline) -> StepShape:
    """Of a step that has not begun: the outcome in the middle, by tokens, of those that are equally likely."""
    totals = work.lengths.sum(axis=1)
    lengths = work.lengths[np.argsort(totals, kind="stable")[len(totals) // 2]]
    return _shape(lengths, np.repeat(work.prompt_tokens, work.samples), int(work.prompt_tokens.sum()), config)


def sampled_shape(batch: StepBatch, requests: Sequence[Request], config: Pipeline) -> StepShape:
    """Of a step whose rollout is over."""
    lengths = np.array([len(c.tokens) for c in batch.completions()], np.int64)
    prompts = np.array([len(group.prompt) for group in batch.groups for _ in group.completions], np.int64)
    return _shape(lengths, prompts, sum(len(r.prompt) for r in requests), config)


def trained_shape(
    shape: StepShape, config: Pipeline, *, train_tokens: int, score_s: float, update_s: float
) -> StepShape:
    """``shape`` with what came after its rollout."""
    reference_tokens = train_tokens if config.algorithm.beta > 0 else 0
    return replace(
        shape, train_tokens=train_tokens, reference_tokens=reference_tokens, score_s=score_s, update_s=update_s
    )


def like(shape: StepShape, typical: StepShape, config: Pipeline) -> StepShape:
    """``shape`` of a step that is not trained yet, with what comes after a rollout as it was in a ``typical`` step."""
    share = typical.train_tokens / max(1, _tokens(typical))
    return trained_shape(
        shape,
        config,
        train_tokens=round(share * _tokens(shape)),
        score_s=typical.score_s,
        update_s=typical.update_s,
    )


def _tokens(shape: StepShape) -> int:
    return shape.prefill_tokens + int(shape.lengths.sum())


def _shape(lengths: np.ndarray, prompts: np.ndarray, prefill_tokens: int, config: Pipeline) -> StepShape:
    """All tokens are trained on: every group has a gradient."""
    shape = StepShape(
        lengths=lengths, prompts=prompts, prefill_tokens=prefill_tokens, train_tokens=0, score_s=0.0, update_s=0.0
    )
    train_tokens = config.algorithm.iterations * _tokens(shape)
    return trained_shape(shape, config, train_tokens=train_tokens, score_s=0.0, update_s=0.0)
