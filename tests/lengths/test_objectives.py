"""Objectives compare only what is known to be comparable, and their losses are what the papers say."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.core.errors import RankerError
from longtail.lengths.objectives import (
    OBJECTIVES,
    Batch,
    Classification,
    ListMLE,
    Margin,
    Pointwise,
    deal,
    expected_class,
    objective,
    sample_pairs,
)


@st.composite
def tables(draw, *, least: int = 1):
    """(lengths, sources, censored) of one data set; few different lengths, so that ties are common."""
    n = draw(st.integers(least, 40))
    lengths = np.array(draw(st.lists(st.integers(0, 12), min_size=n, max_size=n)), dtype=np.float64) * 10
    sources = np.array(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)), dtype=np.int32)
    censored = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    return lengths, sources, censored


def eligible(lengths, sources, censored, delta):
    """All (longer, shorter) pairs by the definition, one by one."""
    return {
        (i, j)
        for i, j in itertools.permutations(range(len(lengths)), 2)
        if sources[i] == sources[j]
        and not censored[j]
        and lengths[j] < lengths[i]
        and lengths[j] <= (1.0 - delta) * lengths[i]
    }


def one_source(lengths, censored=None):
    n = len(lengths)
    return (
        np.array(lengths, dtype=np.float64),
        np.zeros(n, dtype=np.int32),
        np.zeros(n, dtype=bool) if censored is None else np.array(censored),
    )


@given(tables(), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.integers(0, 3))
def test_pairs_are_eligible_and_none_comes_twice(table, delta, seed):
    pairs = sample_pairs(*table, delta=delta, partners=3, rng=np.random.default_rng(seed))
    found = [tuple(pair) for pair in pairs.tolist()]
    assert set(found) <= eligible(*table, delta)
    assert len(set(found)) == len(found)
    assert len(found) <= 3 * len(table[0])


@given(tables(), st.sampled_from([0.0, 0.2, 0.5]))
def test_every_row_with_an_eligible_partner_is_in_a_pair(table, delta):
    pairs = sample_pairs(*table, delta=delta, partners=1, rng=np.random.default_rng(0))
    assert set(pairs.ravel().tolist()) == {row for pair in eligible(*table, delta) for row in pair}


def test_partners_are_drawn_uniformly():
    lengths, sources, censored = one_source([10, 20, 30, 40, 50], [False, False, False, False, True])
    rng = np.random.default_rng(0)
    counts: dict[tuple[int, int], int] = {}
    for _ in range(4000):
        for pair in sample_pairs(lengths, sources, censored, delta=0.3, partners=1, rng=rng).tolist():
            counts[tuple(pair)] = counts.get(tuple(pair), 0) + 1
    assert set(counts) == eligible(lengths, sources, censored, 0.3)
    # Pair (4, 3) is out by delta. Row 0 has four partners and row 4 has three, so pair (4, 0) comes with
    # probability 1 - 3/4 * 2/3 = 1/2.
    assert counts[4, 0] / 4000 == pytest.approx(0.5, abs=0.04)


@given(tables(), st.integers(1, 12), st.integers(0, 3))
def test_dealing_gives_every_row_once_in_batches_of_at_most_the_size(table, size, seed):
    batches = list(deal(table[1], size, np.random.default_rng(seed)))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(table[0])))
    assert max(map(len, batches)) <= size


def test_a_source_that_fits_is_not_cut():
    sources = np.repeat(np.arange(10, dtype=np.int32), 4)
    for batch in deal(sources, 8, np.random.default_rng(1)):
        assert sorted(np.bincount(sources[batch], minlength=10)[sources[batch]].tolist()) == [4] * len(batch)


@pytest.mark.parametrize("pairing", ["in-batch", "paper"])
@given(table=tables())
@settings(max_examples=40)
def test_margin_batches_encode_each_prompt_once_and_pair_only_eligible_ones(pairing, table):
    allowed = eligible(*table, 0.2)
    goal = Margin(delta=0.2, partners=4, batch_size=8, pairing=pairing)
    if not allowed:
        with pytest.raises(RankerError, match="no order to learn"):
            goal.epoch(*table, np.random.default_rng(0))
        return
    for rows, pairs in goal.epoch(*table, np.random.default_rng(0)):
        assert len(set(rows.tolist())) == len(rows)
        assert len(pairs) >= 1
        assert {tuple(pair) for pair in rows[pairs].tolist()} <= allowed
        assert len(rows) <= 8 if pairing == "in-batch" else len(pairs) <= 8


@given(tables())
def test_listmle_compares_only_what_is_known(table):
    lengths, sources, censored = table
    try:
        batches = ListMLE(batch_size=8).epoch(*table, np.random.default_rng(0))
    except RankerError:
        assert not eligible(lengths, sources, censored, 0.0)
        return
    for rows, choices in batches:
        for (i, row), (j, other) in itertools.product(enumerate(rows), enumerate(rows)):
            if i != j and choices[i, j]:
                assert sources[row] == sources[other]
                assert not censored[other]
                assert lengths[other] <= lengths[row]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_batches_are_a_function_of_the_seed(name):
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 500, 90).astype(np.float64)
    table = lengths, rng.integers(0, 2, 90).astype(np.int32), rng.random(90) < 0.1
    goal = objective(name, batch_size=16)

    def flat(seed):
        return [array.tolist() for batch in goal.epoch(*table, np.random.default_rng(seed)) for array in batch]

    assert flat(1) == flat(1)
    assert flat(1) != flat(2)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    ("lengths", "sources", "censored"),
    [
        ([7, 7, 7], [0, 0, 0], [False] * 3),
        ([7, 9], [0, 1], [False] * 2),
        ([7, 9], [0, 0], [True, True]),
        ([7], [0], [False]),
        ([], [], []),
    ],
    ids=["all equal", "one prompt a source", "all censored", "one prompt", "none"],
)
def test_data_without_an_order_is_an_error(name, lengths, sources, censored):
    table = np.array(lengths, dtype=np.float64), np.array(sources, dtype=np.int32), np.array(censored, dtype=bool)
    with pytest.raises(RankerError, match="no order to learn"):
        objective(name).epoch(*table, np.random.default_rng(0))


def test_an_unknown_objective_is_an_error():
    with pytest.raises(RankerError, match="unknown objective 'pairwise': choose one of margin"):
        objective("pairwise")  # type: ignore[arg-type]


def outputs_of(scores):
    return torch.tensor(scores, dtype=torch.float64)[:, None]


def test_margin_loss_is_the_mean_hinge_of_the_pairs():
    batch = Batch(np.arange(3), np.array([[0, 1], [2, 0]]))
    loss = Margin(margin=1.0).loss(outputs_of([2.0, 1.5, 0.0]), batch)
    assert loss.item() == pytest.approx((0.5 + 3.0) / 2)


def test_listmle_loss_is_the_plackett_luce_likelihood_of_the_sorted_list():
    (batch,) = ListMLE().epoch(*one_source([30, 10, 40, 20]), np.random.default_rng(0))
    scores = np.array([0.3, -1.0, 0.8, 0.1])
    order = [2, 0, 3, 1]
    terms = [math.log(sum(math.exp(scores[j]) for j in order[k:])) - scores[order[k]] for k in range(3)]
    loss = ListMLE().loss(outputs_of(scores[batch.rows]), batch)
    assert loss.item() == pytest.approx(sum(terms) / 3)


def test_pointwise_targets_are_standardised_in_each_source():
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(1, 50, 40), rng.integers(1000, 90000, 60)]).astype(np.float64)
    sources = np.repeat(np.array([0, 1], dtype=np.int32), [40, 60])
    batches = Pointwise(batch_size=16).epoch(lengths, sources, np.zeros(100, dtype=bool), rng)
    rows = np.concatenate([batch.rows for batch in batches])
    value = np.concatenate([batch.target for batch in batches])[:, 0]
    for source in (0, 1):
        of_source = value[sources[rows] == source]
        assert of_source.mean() == pytest.approx(0, abs=1e-5)
        assert of_source.std() == pytest.approx(1, abs=1e-5)


def test_classes_are_equally_frequent_in_each_source():
    lengths, sources = np.arange(1.0, 201.0), np.repeat(np.array([0, 1], dtype=np.int32), 100)
    batches = Classification(classes=10).epoch(lengths, sources, np.zeros(200, dtype=bool), np.random.default_rng(0))
    rows = np.concatenate([batch.rows for batch in batches])
    label = np.concatenate([batch.target for batch in batches])[:, 0]
    for source in (0, 1):
        assert np.bincount(label[sources[rows] == source]).tolist() == [10] * 10


def test_a_regression_never_pulls_a_censored_prompt_down():
    batch = Batch(np.arange(2), np.array([[0.5, 1.0], [0.5, 0.0]], dtype=np.float32))
    above = torch.full((2, 1), 3.0, requires_grad=True)
    Pointwise().loss(above, batch).backward()
    assert above.grad is not None
    assert above.grad[0].item() == 0
    assert above.grad[1].item() > 0


def test_a_censored_class_is_that_class_or_a_higher_one():
    logits = torch.tensor([[0.2, -0.4, 1.0]], dtype=torch.float64)
    probability = logits.softmax(1)[0]
    censored = Classification(classes=3).loss(logits, Batch(np.arange(1), np.array([[1, 1]])))
    known = Classification(classes=3).loss(logits, Batch(np.arange(1), np.array([[1, 0]])))
    assert censored.item() == pytest.approx(-math.log(probability[1] + probability[2]))
    assert known.item() == pytest.approx(-math.log(probability[1]))


def test_the_score_of_classes_is_their_mean():
    logits = torch.log(torch.tensor([[0.5, 0.0, 0.5], [0.1, 0.2, 0.7]], dtype=torch.float64))
    assert expected_class(logits).tolist() == pytest.approx([1.0, 1.6])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_descending_the_loss_sorts_free_scores_by_length(name):
    """The model is one free row of outputs per prompt: the loss alone must bring them into order."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.arange(1.0, 25.0) * 20)
    table = lengths, np.zeros(24, dtype=np.int32), lengths >= 460
    goal = objective(name, batch_size=8, delta=0.0)
    free = torch.zeros((24, goal.outputs), requires_grad=True)
    optimizer = torch.optim.Adam([free], lr=0.1)
    for _ in range(150):
        for batch in goal.epoch(*table, rng):
            optimizer.zero_grad()
            goal.loss(free[torch.from_numpy(batch.rows)], batch).backward()
            optimizer.step()
    score = goal.score(free).detach().numpy()
    known = [(i, j) for i, j in eligible(*table, 0.0)]
    # Classes cannot order prompts of one decile.
    right = np.mean([score[i] > score[j] for i, j in known if lengths[i] - lengths[j] > 60])
    assert right > 0.98
