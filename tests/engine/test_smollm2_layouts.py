"""SmolLM2 in float32: no layout, and no change of it at any step, changes a bit of what is drawn."""

from __future__ import annotations

import functools

import pytest
import torch

from engine.engine_models import assert_same, make_engine, prompt_of, request, run_all
from engine.thread_ranks import Switch, rollout
from longtail.core.errors import LongtailError
from longtail.core.types import Request
from longtail.engine.checkpoint import load_model
from longtail.engine.model import Decoder
from longtail.engine.models import resolve_model
from longtail.engine.switch_plan import How

pytestmark = pytest.mark.slow

WIDE, NARROW = ((0, 1),), ((0,), (1,))
STEPS = range(7)
"""Engines decode for at most 6 steps after one prefill."""


@functools.cache
def smollm2() -> Decoder:
    try:
        model = load_model(resolve_model("smollm2-135m"), dtype=torch.float32)
    except LongtailError as error:
        pytest.skip(str(error))
    model.rope.upto(model.config.max_context)  # one table for all threads
    return model


def batch(prefix: str, seed: int) -> list[Request]:
    """Two samples of one prompt that ends within a block, which end at different steps."""
    return [request(prefix, prompt_of(11 + seed, seed=seed), samples=2, seed=seed, forced=(3 + seed, 6))]


@functools.cache
def alone(ranks: int):
    loads = [item for rank in range(ranks) for item in batch("abc"[rank], rank)]
    return run_all(make_engine(smollm2()), loads)


def changes_nothing(ranks: int, *switches: Switch) -> None:
    outcome = rollout(smollm2(), [batch("abc"[rank], rank) for rank in range(ranks)], list(switches))
    assert_same(alone(ranks), outcome.done, 0)


@pytest.mark.parametrize("how", [How.MOVE, How.RECOMPUTE])
@pytest.mark.parametrize("step", STEPS)
def test_widening_at_every_step_changes_no_bit(step, how):
    changes_nothing(2, Switch(step, WIDE, how))


@pytest.mark.parametrize("step", [0, 3, 5])
def test_narrowing_and_merging_change_no_bit(step):
    changes_nothing(2, Switch(1, WIDE), Switch(step, NARROW), Switch(1, ((1,),)))


@pytest.mark.parametrize("groups", [((0, 1, 2),), ((0, 1), (2,)), ((1, 2),)])
def test_three_heads_on_any_ranks_change_no_bit(groups):
    changes_nothing(3, Switch(1, groups), Switch(2, ((0,), (1,), (2,))))
