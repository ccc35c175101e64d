"""The memory ledger."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.core.config import Algorithm, Pipeline, Rollout, Train
from longtail.core.errors import CapacityError
from longtail.core.types import SamplingParams, TrainGroup, TrainSample
from longtail.costs.decode import UNMEASURED
from longtail.engine.config import ModelConfig
from longtail.engine.lanes import LanePool
from longtail.engine.model import DTYPES
from longtail.engine.random import random_model
from longtail.planner.order import Work, fifo, place
from longtail.rl.packing import plan_micro_batches
from longtail.rl.tasks import Example
from longtail.rl.trainer import Trainer
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
    largest_micro_batch,
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
    assert (one.weights, one.gradients, one.optimizer) == (4000, 8000, 8000)
    assert (four.weights, four.gradients, four.optimizer) == (4000, 8000, 2000)


def test_bfloat16_keeps_float32_master_weights():
    f = footprint(CONFIG, 1000, pipeline(dtype="bfloat16"), Shape(10, 1))
    assert (f.weights, f.gradients, f.optimizer) == (2000, 8000, 12000)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_ledger_counts_what_a_trainer_keeps(dtype):
    model = random_model(CONFIG, seed=0, dtype=DTYPES[dtype])
    p = pipeline(dtype=dtype)
    trainer = Trainer(model, algorithm=p.algorithm, train=p.train, temperature=1.0, steps=1, rank=0, world=1)
    state = trainer.optimizer_state()
    f = footprint(CONFIG, trainer.flat.total, p, Shape(10, 1))
    assert f.weights == trainer.flat.weights.nbytes
    assert f.gradients == trainer.flat.grads.nbytes
    assert f.optimizer == sum(t.nbytes for t in state.tensors.values())


def test_a_kl_penalty_keeps_a_second_model():
    assert footprint(CONFIG, 1000, pipeline(beta=0.1), Shape(10, 1)).weights == 8000


def test_a_stale_rollout_keeps_a_copy_of_the_weights():
    assert footprint(CONFIG, 1000, pipeline(max_staleness=2), Shape(10, 1)).weights == 8000
    assert footprint(CONFIG, 1000, pipeline(beta=0.1, max_staleness=1), Shape(10, 1)).weights == 12000


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


@pytest.mark.parametrize("prompts", [1, 2, 7])
@pytest.mark.parametrize("workers", [2, 3])
def test_in_company_a_worker_wants_room_for_the_whole_step(prompts, workers):
    p = pipeline(prompts=prompts)
    alone, company = (footprint(CONFIG, 1000, p, Shape(16, workers, company=c)) for c in (False, True))
    assert company.kv_wanted == footprint(CONFIG, 1000, p, Shape(16, 1)).kv_wanted > alone.kv_wanted
    assert company.kv_least == alone.kv_least


def test_in_company_no_wish_gets_smaller():
    config = replace(CONFIG, kv_heads=3, heads=6)
    p = pipeline(prompts=16, max_running=8)  # so few that a group of two workers holds more than one worker alone
    alone, company = (blocks_wanted(config, p, Shape(16, 2, company=c)) for c in (False, True))
    assert alone <= company


@settings(deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=8), min_size=1, max_size=6),
    prompt=st.integers(1, 300),
    workers=st.integers(1, 4),
    micro_tokens=st.integers(1, 3000),
)
def test_no_micro_batch_is_larger_than_the_ledger_counts_with(lengths, prompt, workers, micro_tokens):
    def sample(n: int) -> TrainSample:
        return TrainSample(tokens=np.zeros(n, np.int32), logprobs=np.zeros(n, np.float32), advantage=1.0)

    groups = [
        TrainGroup(prompt=np.zeros(prompt, np.int32), samples=tuple(sample(n) for n in group)) for group in lengths
    ]
    plan = plan_micro_batches(groups, workers=workers, micro_tokens=micro_tokens)
    p = pipeline(
        prompts=len(groups),
        group=max(2, *map(len, lengths)),
        max_tokens=max(map(max, lengths)),
        train=Train(micro_tokens=micro_tokens),
    )
    assert max(b.tokens for b in plan) <= largest_micro_batch(p, Shape(prompt, workers))


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


def test_micro_batches_that_are_left_before_their_end_count_all_together():
    (whole, sliced) = (footprint(CONFIG, 1000, pipeline(), Shape(10, 1, slices=slices)) for slices in (False, True))
    assert (whole.training, sliced.most_training >= whole.peak > sliced.peak) == (0, True)
    assert sliced.training > 0
    assert sliced.resident == whole.resident + sliced.training
    free = int(100 / USABLE) + 1
    a, b = (replace(part(10, peak=peak), training=30) for peak in (10, 20))
    assert admit({"a": a, "b": b}, free, 1).keys() == {"a", "b"}
    with pytest.raises(CapacityError, match="b does not fit"):
        admit({"a": a, "b": replace(b, peak=21)}, free, 1)


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
