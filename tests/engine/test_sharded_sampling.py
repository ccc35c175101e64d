"""Ranks with parts of the vocabulary draw what one with all of it draws, to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.engine_models import tiny_config
from engine.groups import in_group
from longtail.engine.sampling import BLOCK, NOT_FINITE, Draws, Sampler
from longtail.engine.shard import shards_of
from longtail.engine.sharded_sampling import ShardedSampler

MASK = 2**64 - 1


def both(logits, size, folder, *, index, temperature, kind="shm", seed=0, threads=1) -> tuple[Draws, list[Draws]]:
    """The draws of one sampler, and those of each rank; logits are ``[U, V]``, the other arrays per draw."""
    logits, n = torch.as_tensor(logits), len(index)
    vocab = [s.vocab for s in shards_of(tiny_config(vocab_size=logits.shape[1], kv_heads=size, heads=size), size)]
    noise = {
        "seeds": (np.arange(n, dtype=np.uint64) + np.uint64(seed)),
        "positions": np.arange(n),
        "temperature": np.asarray(temperature, np.float64),
    }
    whole = Sampler(logits.shape[1])(logits, index, **noise, top_k=np.zeros(n, np.int64), top_p=np.ones(n))

    def work(comm):
        torch.set_num_threads(threads)
        return ShardedSampler(comm, vocab)(logits[:, slice(*vocab[comm.rank])], index, **noise)

    return whole, in_group(work, size, folder, kind=kind)


def assert_equal(whole: Draws, ranks: list[Draws]) -> None:
    for draws in ranks:
        assert draws.tokens.tolist() == whole.tokens.tolist()
        assert np.array_equal(draws.logprobs, whole.logprobs, equal_nan=True)


values = st.one_of(st.floats(-20, 20), st.sampled_from([0.0, 1.0, -math.inf, -math.inf]))
rows = st.one_of(
    st.lists(values, min_size=1, max_size=40),
    st.builds(
        lambda seed, size, scale, ties: (np.random.default_rng(seed).normal(size=size).round(ties) * scale).tolist(),
        st.integers(0, 1000),
        st.integers(1, 6 * BLOCK),
        st.sampled_from([0.1, 1.0, 30.0]),
        st.sampled_from([0, 9]),
    ),
)


@pytest.fixture(autouse=True)
def _same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("groups")


@settings(max_examples=60, deadline=None)
@example(row=[-math.inf] * 600, holes={}, temperature=1.0, size=3, seed=0, double=True)
@example(row=[0.0] * 600, holes={599: math.nan}, temperature=1.0, size=2, seed=0, double=False)
@example(row=[-math.inf] * 600, holes={0: math.nan, 300: 2.0}, temperature=0.5, size=2, seed=0, double=True)
@example(row=[0.0] * 600, holes={3: math.inf}, temperature=0.0, size=2, seed=0, double=True)
@example(row=[0.0] * 2000, holes={}, temperature=0.0, size=4, seed=0, double=True)
@given(
    row=rows,
    holes=st.dictionaries(st.integers(0, 9999), st.sampled_from([math.nan, math.inf, -math.inf, 50.0]), max_size=3),
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 5.0, 1e30]),
    size=st.integers(1, 4),
    seed=st.integers(0, MASK - 100),
    double=st.booleans(),
)
def test_any_logits_give_the_same_draws(folder, row, holes, temperature, size, seed, double):
    logits = np.array([row, row[::-1]], np.float64 if double else np.float32)
    for token, value in holes.items():
        logits[0, token % logits.shape[1]] = value
    index = np.array([0, 1, 0, 0, 1])
    mixed = [temperature, temperature, 0.0, 1.0, 0.0]
    assert_equal(*both(logits, size, folder, index=index, temperature=mixed, seed=seed))


@pytest.mark.parametrize(("kind", "threads"), [("shm", 1), ("shm", 2), ("gloo", 1)])
def test_a_large_vocabulary_and_many_draws(kind, threads, folder):
    logits = torch.randn(24, 12_345, generator=torch.Generator().manual_seed(0)) * 2
    index = np.random.default_rng(0).integers(0, 24, 60)
    temperature = np.tile([0.0, 0.7, 1.0, 1.3], 15)
    whole, ranks = both(logits, 3, folder, index=index, temperature=temperature, kind=kind, threads=threads)
    assert len(set(whole.tokens.tolist())) > 20
    assert_equal(whole, ranks)


def test_greedy_ties_over_ranks_take_the_lowest_id(folder):
    logits = np.zeros((1, 4 * BLOCK))
    logits[0, [700, 301, 999]] = 5.0
    whole, ranks = both(logits, 4, folder, index=np.zeros(1, np.int64), temperature=[0.0])
    assert whole.tokens.tolist() == [301]
    assert_equal(whole, ranks)


def test_logits_that_are_not_finite_are_reported_on_every_rank_for_their_row_only(folder):
    logits = np.zeros((5, 3 * BLOCK))
    logits[0, 7] = np.nan
    logits[1, 700] = np.inf
    logits[2] = -np.inf
    logits[3, : 3 * BLOCK - 1] = -np.inf
    whole, ranks = both(logits, 3, folder, index=np.arange(5), temperature=np.ones(5))
    assert whole.tokens[:4].tolist() == [NOT_FINITE, NOT_FINITE, NOT_FINITE, 3 * BLOCK - 1]
    assert_equal(whole, ranks)


def test_bfloat16_logits_are_taken_as_float32(folder):
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert_equal(*both(logits, 2, folder, index=np.arange(3), temperature=np.ones(3)))
