"""Narrowing deals sequences out evenly, and keeps those of one prompt together where that costs no balance."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine_models import prompt_of, request
from longtail.engine.cargo import CargoGroup, CargoSample
from longtail.engine.deal import SPREAD, deal, load

WIDE, NARROW = [(0, 1)], [(0,), (1,)]


def group(name: str, prompt: int, *generated: int) -> CargoGroup:
    """A request with samples that have so many tokens; without any its prompt is not prefilled, and it wants three."""
    samples = tuple(
        CargoSample(sample=i, tokens=np.zeros(n, np.int32), logprobs=np.zeros(n), preemptions=0, lanes=None)
        for i, n in enumerate(generated)
    )
    item = request(name, prompt_of(prompt), samples=len(generated) or 3, max_tokens=1000)
    return CargoGroup(request=item, limits=(1000,) * item.samples, samples=samples, prompt=None)


def parts(dealt) -> list[dict[str, list[int]]]:
    return [
        {s.group.request.request_id: [sample.sample for sample in s.group.samples] for s in shares} for shares in dealt
    ]


def test_a_team_within_another_goes_there_whole():
    groups = [[group("a", 9, 5)], [group("b", 9, 5, 7)], [], [group("c", 3)]]
    dealt = deal(groups, [(0,), (1,), (2,), (3,)], [(0, 1), (2, 3)])
    assert parts(dealt) == [{"a": [0], "b": [0, 1]}, {"c": []}]


def test_whole_requests_are_dealt_out_where_that_is_even():
    groups = [[group("a", 10, 90, 90), group("b", 10, 100, 95), group("c", 10, 50), group("d", 10, 52)]]
    assert parts(deal(groups, WIDE, NARROW)) == [{"b": [0, 1], "c": [0]}, {"a": [0, 1], "d": [0]}]


def test_the_samples_of_one_large_request_are_dealt_out_singly():
    dealt = deal([[group("a", 10, *[40] * 8)]], WIDE, NARROW)
    assert sorted(len(shares[0].group.samples) for shares in dealt) == [4, 4]


def test_a_request_that_has_not_begun_stays_one():
    dealt = deal([[group("a", 500)]], WIDE, NARROW)
    assert parts(dealt) == [{"a": []}, {}]


def test_a_worker_that_is_left_out_gives_to_those_that_stay():
    groups = [[group("a", 10, 50)], [group("b", 10, 40)], [group("c", 10, 30)]]
    assert parts(deal(groups, [(0,), (1,), (2,)], NARROW)) == [{"a": [0]}, {"b": [0], "c": [0]}]


@settings(max_examples=200, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 200), max_size=6)), max_size=8),
    targets=st.sampled_from([[(0,), (1,)], [(0,), (1, 2)], [(0,), (1,), (2,)], [(1,), (3,)]]),
)
def test_everything_goes_somewhere_once_and_loads_are_even(shapes, targets):
    groups = [group(f"r{i}", prompt, *generated) for i, (prompt, generated) in enumerate(shapes)]
    dealt = deal([groups], [tuple(range(4))], targets)
    found = [(s.position, sample.sample) for shares in dealt for s in shares for sample in s.group.samples]
    wanted = [(p, sample.sample) for p, g in enumerate(groups) for sample in g.samples]
    assert sorted(found) == wanted
    assert sorted(s.position for shares in dealt for s in shares if s.group.fresh) == [
        p for p, g in enumerate(groups) if g.fresh
    ]
    loads = [sum(load(share.group) for share in shares) for shares in dealt]
    largest = max(
        [g.prompt_len + n for g, (_, generated) in zip(groups, shapes, strict=True) for n in generated], default=0
    )
    if not any(g.fresh for g in groups):
        assert max(loads) - min(loads) <= max(SPREAD * sum(loads) / len(loads), largest)


# Evening out what could have stayed


def of_one(groups, targets=NARROW, **options):
    """What becomes of the sequences of rank 0; the others have none."""
    return parts(deal([groups, []], [(0,), (1,)], targets, rebalance=True, **options))


def test_without_a_wish_for_balance_a_team_that_stays_keeps_everything():
    groups = [group("a", 10, 90), group("b", 10, 90)]
    assert parts(deal([groups, []], NARROW, NARROW)) == [{"a": [0], "b": [0]}, {}]


def test_spreading_moves_whole_requests_where_that_is_even():
    groups = [group("a", 10, 90, 80), group("b", 10, 95, 85), group("c", 10, 40)]
    assert of_one(groups) == [{"a": [0, 1], "c": [0]}, {"b": [0, 1]}]


def test_spreading_one_large_request_takes_it_apart():
    here, there = of_one([group("a", 10, *[40] * 8)])
    assert (len(here["a"]), len(there["a"])) == (4, 4)


def test_spreading_moves_a_request_that_has_not_begun_as_one():
    assert of_one([group("a", 10, 60), group("b", 20)]) == [{"a": [0]}, {"b": []}]


def test_a_single_sample_stays_where_it_is():
    assert of_one([group("a", 10, 500)]) == [{"a": [0]}, {}]


def test_loads_that_are_even_enough_stay_as_they_are():
    groups = [[group("a", 10, 90), group("b", 10, 40)], [group("c", 10, 95), group("d", 10, 38)]]
    assert parts(deal(groups, NARROW, NARROW, rebalance=True)) == parts(deal(groups, NARROW, NARROW))


def test_no_more_is_moved_than_evens_out():
    groups = [[group(f"a{i}", 1, 9) for i in range(10)], [group(f"b{i}", 1, 9) for i in range(6)]]
    here, there = parts(deal(groups, NARROW, NARROW, rebalance=True))
    assert (len(here), len(there)) == (8, 8)
    assert all(name in there for name in ("b0", "b1", "b2", "b3", "b4", "b5"))


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(
        st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 200), max_size=6)), max_size=5),
        min_size=4,
        max_size=4,
    ),
    source=st.sampled_from([[(0,), (1,), (2,), (3,)], [(0, 1), (2,), (3,)], [(0, 1), (2, 3)]]),
    target=st.sampled_from([[(0,)], [(0,), (1,)], [(0, 1), (2,)], [(1,), (3,)], [(0,), (1,), (2,), (3,)], [(2, 3)]]),
)
def test_any_balanced_deal_has_everything_once_and_even_loads(shapes, source, target):
    """Also from workers that are in no target team, and to ones that had nothing."""
    groups = [
        [group(f"r{s}-{i}", prompt, *generated) for i, (prompt, generated) in enumerate(row)]
        for s, row in enumerate(shapes[: len(source)])
    ]
    dealt = deal(groups, source, target, rebalance=True)
    assert len(dealt) == len(target)
    found = [(s.source, s.position, sample.sample) for shares in dealt for s in shares for sample in s.group.samples]
    assert sorted(found) == [
        (n, p, sample.sample) for n, row in enumerate(groups) for p, g in enumerate(row) for sample in g.samples
    ]
    fresh = [(s.source, s.position) for shares in dealt for s in shares if s.group.fresh]
    assert sorted(fresh) == [(n, p) for n, row in enumerate(groups) for p, g in enumerate(row) if g.fresh]
    loads = [sum(load(share.group) for share in shares) for shares in dealt]
    everything = [g for row in groups for g in row]
    largest = max(
        (load(g) if g.fresh else max(g.prompt_len + len(s.tokens) for s in g.samples) for g in everything), default=0
    )
    assert max(loads) - min(loads) <= max(SPREAD * sum(loads) / len(loads), largest)
