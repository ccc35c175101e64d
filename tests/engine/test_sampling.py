from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longtail.engine.sampling import BLOCK, NOT_FINITE, Draws, Sampler, uniform

MASK = 2**64 - 1


def draw(logits, *, n=1, seed=0, position=0, temperature=1.0, top_k=0, top_p=1.0) -> Draws:
    """``n`` draws of seeds ``seed, seed + 1 ...`` from one row; every parameter may be an array."""
    logits = torch.as_tensor(np.atleast_2d(logits))
    rows = np.zeros(n, np.int64) if len(logits) == 1 else np.arange(len(logits))
    n = len(rows)

    def spread(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), n).copy()

    return Sampler(logits.shape[1])(
        logits,
        rows,
        seeds=spread(seed, np.uint64) + np.arange(n, dtype=np.uint64),
        positions=spread(position, np.int64),
        temperature=spread(temperature, np.float64),
        top_k=spread(top_k, np.int64),
        top_p=spread(top_p, np.float64),
    )


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def by_definition(logits, seed, position, temperature, top_k, top_p) -> int:
    """The module's definition in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return order[0]
    weights = [math.exp((x - logits[order[0]]) / temperature) for x in logits]
    kept = order[: top_k or None]
    if top_p < 1:
        goal, running, shortest = top_p * math.fsum(weights[i] for i in kept), 0.0, []
        for i in kept:
            shortest.append(i)
            running += weights[i]
            if running >= goal:
                break
        kept = shortest
    golden = 0x9E3779B97F4A7C15
    bits = mix((mix((seed + golden) & MASK) + golden * (position + 1)) & MASK)
    target = (bits >> 11) * 2.0**-53 * math.fsum(weights[i] for i in kept)
    running = 0.0
    for i in sorted(kept):
        running += weights[i]
        if running > target:
            return i
    return max(i for i in kept if weights[i] > 0)


@settings(max_examples=400, deadline=None)
@example(logits=[0.0, 0.0, 0.0, -math.inf], seed=0, position=0, temperature=0.3, top_k=0, top_p=0.5)
@example(logits=[0.0, 1e-307], seed=0, position=0, temperature=1.0, top_k=1, top_p=1.0)
@example(logits=[0.0, 1e306, -1e306], seed=0, position=0, temperature=0.3, top_k=2, top_p=0.9)
@given(
    logits=st.lists(
        st.one_of(st.floats(-20, 20), st.sampled_from([0.0, 1.0, -math.inf])), min_size=1, max_size=600
    ).filter(lambda x: max(x) > -math.inf),
    seed=st.integers(0, MASK),
    position=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 10**6]),
    top_p=st.sampled_from([1e-9, 0.5, 0.9, 1.0]),
)
def test_draws_follow_the_definition(logits, seed, position, temperature, top_k, top_p):
    got = draw(np.array(logits), seed=seed, position=position, temperature=temperature, top_k=top_k, top_p=top_p)
    token = by_definition(logits, seed, position, temperature, min(top_k, len(logits)), top_p)
    assert got.tokens[0] == token
    full = torch.log_softmax(torch.tensor(logits, dtype=torch.float64) / (temperature or 1.0), -1)
    assert got.logprobs[0] == pytest.approx(full[token].item(), abs=1e-9)


def test_a_large_vocabulary_follows_the_definition_in_float32():
    logits = torch.randn(49_152, generator=torch.Generator().manual_seed(0)).numpy() * 2
    got = draw(logits, n=64, temperature=0.8)
    full = torch.log_softmax(torch.from_numpy(logits).double() / 0.8, -1)
    expected = [by_definition(logits.astype(np.float64).tolist(), seed, 0, 0.8, 0, 1.0) for seed in range(3)]
    assert got.tokens[:3].tolist() == expected
    assert np.allclose(got.logprobs, full[torch.from_numpy(got.tokens)].numpy(), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 12, "top_p": 0.6}]
)
def test_frequencies_are_the_probabilities(options):
    """Chi-square at the 1e-6 level; the draws are fixed, so this either always passes or never does."""
    rng = np.random.default_rng(0)
    logits, n = rng.normal(size=40), 40_000
    weights = np.exp(logits / options.get("temperature", 1.0))
    order = np.argsort(-logits, kind="stable")
    kept = order[: options.get("top_k", 40)]
    cumulative = np.cumsum(weights[kept]) / weights[kept].sum()
    kept = kept[: int(np.searchsorted(cumulative, options.get("top_p", 1.0))) + 1]
    expected = np.zeros(40)
    expected[kept] = weights[kept] / weights[kept].sum() * n
    counts = np.bincount(draw(logits, n=n, position=3, **options).tokens, minlength=40)
    assert (counts[expected == 0] == 0).all()
    if len(kept) > 1:
        degrees = len(kept) - 1
        chi2 = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
        assert chi2 < degrees + 4.8 * math.sqrt(2 * degrees) + 15


def test_noise_differs_by_seed_and_by_position_and_fills_the_unit_interval():
    values = np.array([[uniform(np.uint64(s), p) for p in range(200)] for s in range(200)])
    assert values.min() >= 0
    assert values.max() < 1
    assert len(np.unique(values)) == values.size
    assert abs(values.mean() - 0.5) < 0.005
    for shifted in (values[1:] - values[:-1], values[:, 1:] - values[:, :-1]):
        assert abs(shifted.mean()) < 0.01
        assert abs(shifted.var() - 1 / 6) < 0.005


def test_greedy_takes_the_lowest_id_on_ties():
    logits = np.zeros(1000)
    logits[[700, 301, 999]] = 5.0
    assert draw(logits, temperature=0).tokens.tolist() == [301]
    assert draw(np.zeros(1000), temperature=0).tokens.tolist() == [0]
    assert draw(np.zeros(1000), temperature=0).logprobs[0] == pytest.approx(-math.log(1000))


def test_edge_parameters_in_one_batch_leave_every_row_valid():
    """Temperatures 0, tiny and huge; filters that would keep nothing; banned tokens; all beside each other."""
    V = 300
    banned = np.full(V, -np.inf)
    banned[123] = -7.0
    rows = [np.zeros(V), np.linspace(-3, 3, V), banned, np.linspace(-1e6, 1e6, V)]
    cases = [
        (row, T, k, p)
        for row in rows
        for T in (0, 5e-324, 1e-300, 1e-6, 1, 5)
        for k in (0, 1, V, V + 1)
        for p in (1e-9, 0.5, 1.0)
    ]
    logits = np.stack([c[0] for c in cases])
    for dtype in (np.float64, np.float32):
        batch = draw(
            logits.astype(dtype),
            temperature=[c[1] for c in cases],
            top_k=[c[2] for c in cases],
            top_p=[c[3] for c in cases],
        )
        assert ((batch.tokens >= 0) & (batch.tokens < V)).all()
        assert np.isfinite(batch.logprobs).all()
        for i, (row, T, k, p) in enumerate(cases):
            alone = draw(row.astype(dtype), seed=i, temperature=T, top_k=k, top_p=p)
            assert (alone.tokens[0], alone.logprobs[0]) == (batch.tokens[i], batch.logprobs[i])
            if row is banned:
                assert batch.tokens[i] == 123
            if T <= 1e-6 and row is rows[1]:
                assert batch.tokens[i] == V - 1
            if k == 1 or p == 1e-9:
                assert batch.tokens[i] == int(np.argmax(row.astype(dtype)))


def test_logits_that_are_not_finite_are_reported_for_their_row_only():
    logits = np.zeros((5, 50))
    logits[0, 7] = np.nan
    logits[1, 7] = np.inf
    logits[2] = -np.inf
    logits[3, :49] = -np.inf
    draws = draw(logits)
    assert draws.tokens[:4].tolist() == [NOT_FINITE, NOT_FINITE, NOT_FINITE, 49]
    assert draws.tokens[4] >= 0


def test_rows_and_threads_do_not_influence_each_other():
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(0))
    arrays = {
        "seeds": np.arange(40, dtype=np.uint64),
        "positions": np.arange(40) * 3,
        "temperature": np.tile([0.0, 0.7, 1.0, 1.3], 10),
        "top_k": np.tile([0, 0, 20, 0, 7], 8),
        "top_p": np.tile([1.0, 0.9], 20),
    }
    sampler, before = Sampler(5000), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = sampler(logits, np.arange(40), **arrays)
        torch.set_num_threads(2)
        two = sampler(logits, np.arange(40), **arrays)
    finally:
        torch.set_num_threads(before)
    shuffled = np.random.default_rng(0).permutation(40)
    three = sampler(logits, shuffled, **{name: values[shuffled] for name, values in arrays.items()})
    assert one.tokens.tolist() == two.tokens.tolist()
    assert one.logprobs.tolist() == two.logprobs.tolist()
    assert one.tokens[shuffled].tolist() == three.tokens.tolist()


def test_ranks_with_parts_of_the_vocabulary_can_combine_to_the_same_token():
    """Shards of whole blocks exchange their maximum and block sums only, and then one of them finds the token."""
    V = 4 * BLOCK + 37
    logits = torch.randn(V, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    shards = [logits[: 2 * BLOCK], logits[2 * BLOCK :]]
    top = max(shard.max() for shard in shards)
    sums = [np.add.reduceat(np.exp(shard - top), range(0, len(shard), BLOCK)) for shard in shards]
    masses = np.concatenate(sums)
    for seed in range(50):
        target = uniform(np.uint64(seed), 0) * masses.sum()
        block = int(np.searchsorted(np.cumsum(masses), target, side="right"))
        within = np.cumsum(np.exp(logits[block * BLOCK : (block + 1) * BLOCK] - top)) + masses[:block].sum()
        token = block * BLOCK + int(np.searchsorted(within, target, side="right"))
        assert draw(logits, seed=seed).tokens[0] == token


def test_bfloat16_logits_are_taken_as_float32():
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert draw(logits.float().numpy(), n=20).tokens.tolist() == draw_bf16(logits, 20)


def draw_bf16(logits: torch.Tensor, n: int) -> list[int]:
    draws = Sampler(logits.shape[1])(
        logits,
        np.zeros(n, np.int64),
        seeds=np.arange(n, dtype=np.uint64),
        positions=np.zeros(n, np.int64),
        temperature=np.ones(n),
        top_k=np.zeros(n, np.int64),
        top_p=np.ones(n),
    )
    return draws.tokens.tolist()
