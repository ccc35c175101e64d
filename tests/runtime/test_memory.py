"""The memory ledger."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.core.config import Algorithm, Pipeline, Rollout
from longtail.core.errors import CapacityError
from longtail.core.types import SamplingParams
from longtail.costs.decode import UNMEASURED
from longtail.engine.config import ModelConfig
from longtail.engine.lanes import LanePool
from longtail.planner.order import Work, fifo, place
from longtail.rl.tasks import Example
from longtail.runtime.memory import (
    BLOCK_TOKENS,
    USABLE,
    Footprint,
    Shape,
    admit,
    block_bytes,
    blocks_least,
    blocks_wanted,
    footprint,
)  # fmt: skip
from longtail.runtime.step import StepBatch

CONFIG = ModelConfig(
    family="llama", vocab_size=50, hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate_size=128,
    rms_eps=1e-5, max_context=512, tied=True, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)  # fmt: skip


def pipeline(*, prompts: int = 4, group: int = 8, max_tokens: int = 32, **options) -> Pipeline:
    rollout = {k: options.pop(k) for k in ("max_running", "kv_gib") if k in options}
    return Pipeline(
        model="m",
        task="t",
        algorithm=Algorithm(group_size=group, beta=options.pop("beta", 0.0)),
        rollout=Rollout(prompts=prompts, max_tokens=max_tokens, **rollout),
        **options,
    )


def part(size: int, *, peak: int = 0, wanted: int = 0, least: int = 0, kv: int = 0) -> Footprint:
    return Footprint(weights=size, gradients=0, optimizer=0, peak=peak, kv_wanted=wanted, kv_least=least, kv=kv)


def test_optimizer_state_is_shared_out_and_weights_and_gradients_are_not():
    one, four = (footprint(CONFIG, 1000, pipeline(), Shape(10, workers)) for workers in (1, 4))
    assert (one.weights, one.gradients, one.optimizer) == (4000, 4000, 8000)
    assert (four.weights, four.gradients, four.optimizer) == (4000, 4000, 2000)


def test_bfloat16_keeps_float32_gradients_and_master_weights():
    f = footprint(CONFIG, 1000, pipeline(dtype="bfloat16"), Shape(10, 1))
    assert (f.weights, f.gradients, f.optimizer) == (2000, 4000, 12000)


def test_a_kl_penalty_keeps_a_second_model():
    assert footprint(CONFIG, 1000, pipeline(beta=0.1), Shape(10, 1)).weights == 8000


@settings(deadline=None)
@given(
    prompts=st.integers(1, 9),
    group=st.integers(2, 9),
    workers=st.integers(1, 5),
    prompt=st.integers(1, 70),
    answer=st.integers(1, 40),
)
def test_with_the_blocks_wanted_no_worker_ever_runs_out(prompts, group, workers, prompt, answer):
    """Fill real lane tables as a step does at its fullest: every sample of every request at its last position."""
    p = pipeline(prompts=prompts, group=group, max_tokens=answer)
    batch = StepBatch.of(0, [Example("x")] * prompts, [np.zeros(prompt, np.int32)] * prompts, group)
    wanted = blocks_wanted(CONFIG, p, Shape(prompt, workers))
    requests = batch.requests(p, SamplingParams(max_tokens=answer), workers)
    samples = np.array([r.samples for r in requests])
    lengths = np.random.default_rng(0).integers(1, answer + 1, samples.sum())
    work = Work.known(samples, np.full(len(requests), prompt), lengths)
    balanced = place(work, costs=[UNMEASURED] * workers, slots=p.rollout.max_running)
    for queue in (*fifo(len(requests), workers).queues, *balanced.queues):
        pool = LanePool(CONFIG, blocks=wanted, block_tokens=BLOCK_TOKENS)
        for request in [requests[r] for r in queue]:
            source = pool.open()
            pool.grow(source, prompt)
            rows = [pool.fork(source, prompt) for _ in range(request.samples - 1)] + [source]
            for position in range(prompt, prompt + answer - 1):
                pool.claim(np.array(rows), np.full(len(rows), position))
        pool.check()
    assert blocks_least(CONFIG, p, Shape(prompt, workers)) <= wanted


def test_max_running_bounds_the_wanted_cache():
    wide, narrow = pipeline(prompts=16), pipeline(prompts=16, max_running=8)
    shape = Shape(16, 1)
    assert blocks_wanted(CONFIG, wide, shape) == 2 * 16 * (2 + 8 * 2)
    assert blocks_wanted(CONFIG, narrow, shape) == 2 * (2 + 8 * 2)


def test_block_bytes_are_those_of_the_lane_pool():
    assert block_bytes(CONFIG, pipeline()) == LanePool.block_bytes(CONFIG, BLOCK_TOKENS, torch.float32)
    assert block_bytes(CONFIG, pipeline(dtype="bfloat16")) == LanePool.block_bytes(CONFIG, BLOCK_TOKENS, torch.bfloat16)


def test_two_that_fit_get_the_cache_that_each_would_get_alone():
    half = part(30, wanted=10, least=2)
    free = int(100 / USABLE) + 1
    assert admit({"a": half, "b": half}, free, 1)["b"].kv == admit({"b": half}, free, 1)["b"].kv == 10


def test_the_one_that_does_not_fit_beside_those_before_it_is_named():
    big = part(60 << 20, least=1 << 20)
    with pytest.raises(CapacityError) as caught:
        admit({"a": big, "b": big}, 100 << 20, 2)
    assert str(caught.value) == (
        "b does not fit: weights 60 MiB + gradients 1 MiB + optimizer 1 MiB + KV 1 MiB + training 1 MiB on each of 2 "
        "workers, 92 MiB free, 61 MiB taken by the pipelines before it. Lower rollout.max_tokens or "
        "train.micro_tokens, "
        "use bfloat16, or run fewer pipelines together."
    )


def test_only_the_largest_peak_counts():
    free = int(60 / USABLE) + 1
    assert admit({"a": part(10, peak=30), "b": part(10, peak=40)}, free, 1).keys() == {"a", "b"}
    with pytest.raises(CapacityError):
        admit({"a": part(10, peak=30), "b": part(10, peak=41)}, free, 1)


def test_a_cache_that_the_job_file_sets_is_given_whole_or_refused():
    free = int(100 / USABLE) + 1
    granted = admit({"a": part(10, wanted=500, least=1, kv=50), "b": part(10, wanted=500, least=1)}, free, 1)
    assert granted["a"].kv == 50
    assert granted["b"].kv == 30
    with pytest.raises(CapacityError, match=r"Lower rollout\.kv_gib"):
        admit({"a": part(10, least=1, kv=95)}, free, 1)


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(*[st.integers(0, 50)] * 4), min_size=1, max_size=5),
    free=st.integers(0, 400),
)
def test_what_is_granted_never_exceeds_what_there_is(sizes, free):
    parts = {
        str(i): part(size, peak=peak, wanted=max(wanted, least), least=least)
        for i, (size, peak, wanted, least) in enumerate(sizes)
    }
    try:
        granted = admit(parts, free, 1)
    except CapacityError:
        return
    assert sum(f.resident + f.kv for f in granted.values()) + max(f.peak for f in granted.values()) <= free
    assert all(f.kv_least <= f.kv <= f.kv_wanted for f in granted.values())


def test_on_a_cluster_everything_is_granted():
    assert admit({"a": part(1 << 60, wanted=7)}, None, 1)["a"].kv == 7
