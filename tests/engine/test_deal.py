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
