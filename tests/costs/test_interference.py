"""Interference: what is known is found, what is learnt from spans is right, and undisturbed work teaches none of it."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.core.errors import ConfigError
from longtail.core.events import Span
from longtail.core.types import SubStage
from longtail.costs.company import ALONE, Company, WorkerSpans
from longtail.costs.corrections import Corrections
from longtail.costs.interference import (
    CLASSES,
    SHARES,
    UNKNOWN,
    Interference,
    Work,
    model_of,
    within_models,
    work_class,
)
from longtail.costs.interference_file import Half, PairTable, file_name, find, from_plain, load, save, to_plain
from longtail.costs.interference_log import InterferenceLog
from longtail.costs.table import CostTable, DecodeGrid, PrefillCosts, SwitchCosts, TableKey

KEY = TableKey(machine="a box, 2 workers", model="llama 1.8M ab", dtype="float32", communicator="shm", threads=1)
OTHER = KEY._replace(model="qwen 2.0M cd")
A, B = model_of(KEY), model_of(OTHER)


def table(key: TableKey = KEY, **changes) -> CostTable:
    batches, contexts = (1, 4, 16), (16, 1024)
    grid = DecodeGrid(
        batches=batches,
        contexts=contexts,
        seconds=tuple(tuple(0.01 + 0.001 * n + 1e-6 * n * c for c in contexts) for n in batches),
    )
    costs = CostTable(
        key=key,
        measured="2026-01-01T00:00:00+00:00",
        detail="full",
        kv_heads=2,
        kv_bytes=64,
        decode={1: grid},
        prefill={1: PrefillCosts(chunk_tokens=(16, 64), seconds_per_token=(0.002, 0.001))},
        switch=SwitchCosts(handshake_s=0.001, move_s=0.0, move_byte_s=1e-9),
        train_token_s=0.004,
    )
    return replace(costs, **changes)


# -- what is known


def test_what_nobody_measured_is_one():
    for on in ("same", "neighbour"):
        assert UNKNOWN.factor((A, "train"), (B, "prefill"), on=on) == 1.0
    assert UNKNOWN.among((A, "train"), {(B, "prefill"): 1.0}, share=0.5) == 1.0
    assert UNKNOWN.among((A, "train"), {}, share=0.5) == 1.0


@settings(max_examples=50, deadline=None)
@given(factors=st.tuples(*[st.floats(1.0, 3.0)] * 3), shares=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6))
def test_a_factor_goes_through_what_was_measured_to_one_for_who_is_alone(factors, shares):
    pair = (A, "train"), (B, "prefill")
    known = Interference(same={pair: factors})
    for share, factor in zip(SHARES, factors, strict=True):
        assert known.factor(*pair, on="same", share=share) == pytest.approx(factor)
    assert known.factor(*pair, on="same", share=1.0) == 1.0
    assert known.factor(*pair, on="same", share=0.0) == factors[0]
    for low, high in pairwise(sorted(shares)):
        between = [known.factor(*pair, on="same", share=low + (high - low) * i / 50) for i in range(51)]
        assert max(abs(b - a) for a, b in pairwise(between)) <= (high - low) / 50 * 12.1 + 1e-9  # it never jumps
        assert min(1.0, *factors) - 1e-9 <= min(between) <= max(between) <= max(factors) + 1e-9


def test_pairs_that_are_not_known_are_taken_to_be_like_the_model_itself():
    known = Interference(
        same={((A, "train"), (A, "prefill")): (1.3, 1.2, 1.1)}, neighbour={((A, "train"), (A, "prefill")): 1.4}
    )
    assert known.factor((A, "train"), (B, "prefill"), on="same") == pytest.approx(1.2)
    assert known.factor((A, "train"), (B, "prefill"), on="neighbour") == 1.4
    assert known.factor((B, "train"), (A, "prefill"), on="same") == 1.0
    better = known.joined(Interference(same={((A, "train"), (B, "prefill")): (1.0, 1.0, 1.0)}))
    assert better.factor((A, "train"), (B, "prefill"), on="same") == 1.0
    assert better.factor((A, "train"), (A, "prefill"), on="same") == pytest.approx(1.2)


def test_a_share_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"in \[0, 1\], not 1\.5"):
        UNKNOWN.factor((A, "train"), (B, "train"), on="same", share=1.5)


def test_among_several_the_one_with_most_of_the_rest_counts_most():
    known = Interference(
        same={((A, "train"), (B, "train")): (2.0, 2.0, 2.0), ((A, "train"), (B, "prefill")): (1.0, 1.0, 1.0)}
    )

    def among(train: float, prefill: float) -> float:
        return known.among((A, "train"), {(B, "train"): train, (B, "prefill"): prefill}, share=0.5)

    assert among(1.0, 0.0) == pytest.approx(2.0)
    assert among(1.0, 1.0) == pytest.approx(math.sqrt(2.0))
    assert among(3.0, 1.0) == pytest.approx(2.0**0.75)


def test_a_cost_table_knows_of_its_own_model():
    slow = table(
        same_worker={"decode_small": {"train": 1.8}, "train": {"decode_small": 1.2}},
        neighbour_worker={"prefill": {"prefill": 1.25, "train": 1.5}, "train": {"prefill": 1.1}},
    )
    known = within_models([slow])
    # About 14 decode steps for one micro-batch of the same time: one of them finds cold caches.
    at_half = known.factor((A, "decode_small"), (A, "train"), on="same", share=0.5)
    assert 1.0 < at_half < 1.12
    # And each micro-batch follows a decode step.
    assert known.factor((A, "train"), (A, "decode_small"), on="same", share=0.5) == pytest.approx(1.2)
    assert known.factor((A, "train"), (A, "decode_small"), on="same", share=1.0) == 1.0
    # Tables are measured with the same work on all workers.
    assert known.factor((A, "prefill"), (A, "train"), on="neighbour") == pytest.approx(1.5 / 1.25)
    assert known.factor((A, "train"), (A, "prefill"), on="neighbour") == 1.0


def test_classes_are_of_work_whose_interference_is_measured():
    assert {work_class(SubStage.DECODE, 4), work_class(SubStage.DECODE, 5)} == {"decode_small", "decode_large"}
    assert work_class("prefill", 1) == "prefill"
    assert work_class(SubStage.TRAIN, 8) == "train"
    assert work_class(SubStage.REDUCE, 0) is None


# -- files

factor = st.floats(0.5, 5.0)
shared = st.tuples(factor, factor, factor)
work = st.sampled_from(CLASSES)


@st.composite
def halves(draw, key: TableKey) -> Half:
    return Half(
        key=key,
        same_worker=draw(st.dictionaries(work, st.dictionaries(work, shared, max_size=2), max_size=3)),
        neighbour_worker=draw(st.dictionaries(work, st.dictionaries(work, factor, max_size=2), max_size=3)),
    )


PAIR = PairTable(
    measured="2026-01-01T00:00:00+00:00",
    halves=(
        Half(key=KEY, same_worker={"train": {"prefill": (1.3, 1.2, 1.1)}}, neighbour_worker={"train": {"train": 1.5}}),
        Half(key=OTHER, same_worker={"prefill": {"train": (1.6, 1.5, 1.4)}}, neighbour_worker={}),
    ),
)


@given(one=halves(KEY), two=halves(OTHER))
@settings(max_examples=30, deadline=None)
def test_a_pair_survives_its_file_and_is_found_from_either_side(tmp_path_factory, one, two):
    folder = tmp_path_factory.mktemp("costs")
    pair = PairTable(measured="2026-01-01T00:00:00+00:00", halves=(one, two))
    path = save(folder, pair)
    assert load(path) == pair
    assert [p.name for p in folder.iterdir()] == [path.name]
    for keys in ((KEY, OTHER), (OTHER, KEY, KEY)):
        assert find(folder, keys) == (pair.interference, ())


def test_each_half_is_of_its_model_beside_the_other():
    known = PAIR.interference
    assert known.factor((A, "train"), (B, "prefill"), on="same", share=1 / 3) == 1.3
    assert known.factor((B, "prefill"), (A, "train"), on="same", share=1 / 3) == 1.6
    assert known.factor((A, "train"), (B, "train"), on="neighbour") == 1.5
    assert known.factor((A, "train"), (A, "prefill"), on="same") == 1.0


def test_pairs_of_other_machines_or_models_are_not_found(tmp_path):
    save(tmp_path, PAIR)
    for changes in ({"machine": "b"}, {"threads": 2}, {"communicator": "gloo"}, {"dtype": "float64"}):
        assert find(tmp_path, [KEY._replace(**changes), OTHER._replace(**changes)]) == (UNKNOWN, ())
    assert find(tmp_path, [KEY, OTHER._replace(model="third")]) == (UNKNOWN, ())
    assert find(tmp_path / "nowhere", [KEY, OTHER]) == (UNKNOWN, ())
    assert find(tmp_path, [KEY]) == (UNKNOWN, ())


def changed(*path: str, to: object) -> dict:
    plain = json.loads(json.dumps(to_plain(PAIR)))
    node = plain
    for key in path[:-1]:
        node = node[key]
    if to is None:
        del node[path[-1]]
    else:
        node[path[-1]] = to
    return plain


@pytest.mark.parametrize(
    ("path", "to", "says"),
    [
        (["interference"], 2, "the interference table is of version 2"),
        (["machine"], None, "machine is missing"),
        (["surprise"], 1, "surprise is unknown"),
        (["shares"], [0.1, 0.5, 0.9], "shares must be 0.333, 0.500, 0.667"),
        (["first", "model"], "", "first.model must be text"),
        (["second", "model"], KEY.model, "second must be another model than first"),
        (
            ["first", "same_worker", "train", "prefill"],
            [1.0, 1.0],
            "same_worker.train.prefill must have 3 numbers",
        ),
        (
            ["first", "same_worker", "train", "prefill"],
            [1, -1, 1],
            "same_worker.train.prefill.1 must be a number",
        ),
        (["first", "same_worker", "dancing"], {}, "first.same_worker.dancing is no kind of work"),
        (["first", "same_worker", "train", "dancing"], [1, 1, 1], "first.same_worker.train.dancing is no kind of work"),
        (["first", "neighbour_worker", "train", "train"], 0.0, "neighbour_worker.train.train must be a number above 0"),
        (["second", "more"], 1, "second.more is unknown"),
    ],
)
def test_what_cannot_be_a_pair_is_refused_by_file_and_key(path, to, says):
    with pytest.raises(ConfigError, match=r"^some\.json: ") as error:
        from_plain(changed(*path, to=to), source="some.json")
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"interference": 7}'])
def test_a_broken_file_is_a_warning_and_nothing_is_known(tmp_path, text):
    (tmp_path / file_name(KEY, OTHER)).write_text(text)
    known = find(tmp_path, [KEY, OTHER])
    assert known.interference == UNKNOWN
    (warning,) = known.warnings
    assert file_name(KEY, OTHER) in warning


def test_a_file_that_was_renamed_is_a_warning(tmp_path):
    third = OTHER._replace(model="third")
    save(tmp_path, PAIR).rename(tmp_path / file_name(KEY, third))
    known = find(tmp_path, [KEY, third])
    assert known.interference == UNKNOWN
    assert OTHER.model in known.warnings[0]


def test_a_pair_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the interference table cannot be written"):
        save(tmp_path / "file", PAIR)


# -- spans, and what can be told from them


def span(pipeline: str, start: float, end: float, busy_s: float, **changes) -> Span:
    made = Span(
        worker=0, pipeline=pipeline, substage=SubStage.DECODE, step=0, start=start, end=end, busy_s=busy_s,
        quanta=100, tokens=200, batch=2.0, context=100.0,
    )  # fmt: skip
    return replace(made, **changes)


def test_a_span_without_gaps_had_the_worker_to_itself():
    spans = WorkerSpans()
    spans.add(span("b", 0.0, 0.5, 0.25))
    alone = span("a", 1.0, 1.5, 0.499)
    assert spans.add(alone) == [(alone, ALONE)]


def test_without_other_pipelines_gaps_are_nobodys():
    spans = WorkerSpans()
    idle = [span("a", i, i + 0.5, 0.1) for i in range(20)]
    judged = [judged for one in idle for judged in spans.add(one)]
    assert judged == [(one, ALONE) for one in idle[:10]]  # the rest may still turn out to have been shared
    fast = span("a", 20.0, 20.5, 0.45)
    assert spans.add(fast)[0] == (fast, ALONE)


def test_a_span_is_judged_when_others_have_told_of_its_time():
    spans = WorkerSpans()
    spans.add(span("b", 0.0, 0.4, 0.2))
    first = span("a", 0.0, 0.5, 0.25)
    assert [one.pipeline for one, _ in spans.add(first)] == ["b"]
    later = span("b", 0.4, 0.9, 0.25)
    ((found, company),) = spans.add(later)
    assert found is first
    assert company.share == pytest.approx(0.5)
    assert company.others == pytest.approx({("b", "decode_small"): 0.25})


def test_who_has_long_quanta_is_seen_to_take_turns():
    """Each span is one quantum, and no two overlap."""
    spans, judged = WorkerSpans(), []
    for i in range(20):
        name = "ab"[i % 2]
        long_s = {"a": 1.0, "b": 2.0}[name]
        start = (i // 2) * 3.0 + (1.0 if name == "b" else 0.0)
        judged += spans.add(span(name, start, start + long_s, long_s, quanta=1, substage=SubStage.TRAIN))
    shares = {name: {round(c.share, 2) for s, c in judged[4:] if s.pipeline == name} for name in "ab"}
    assert shares == {"a": {0.33}, "b": {0.67}}


def test_gaps_that_nobody_explains_say_nothing():
    spans = WorkerSpans()
    spans.add(span("b", 0.0, 0.5, 0.25))
    assert spans.add(span("a", 1.0, 2.0, 0.4)) == []
    later = span("b", 30.0, 30.5, 0.5)
    assert spans.add(later) == [(later, ALONE)]  # and nothing of the one that waited
    assert not spans._held


def test_own_work_of_another_kind_is_no_company():
    spans = WorkerSpans()
    spans.add(span("b", 0.0, 0.4, 0.4))
    spans.add(span("a", 1.0, 1.5, 0.25, substage=SubStage.PREFILL))
    spans.add(span("a", 1.0, 1.5, 0.25))
    judged = spans.add(span("b", 2.0, 2.5, 0.5))
    assert [company for one, company in judged if one.pipeline == "a"] == [ALONE, ALONE]


def test_after_the_last_other_is_over_gaps_are_nobodys_again_and_what_was_unclear_is_left_out():
    spans = WorkerSpans()
    spans.add(span("b", 0.0, 0.4, 0.2))
    spans.add(span("a", 0.5, 1.0, 0.1))
    spans.keep({"a", "b"})
    assert spans._held
    spans.keep({"a"})
    assert not spans._held
    assert spans.add(span("a", 0.9, 1.4, 0.4)) == []  # began when the other may still have had work
    lone = span("a", 2.0, 2.5, 0.4)
    assert (lone, ALONE) in spans.add(lone)
    slow = [span("a", 3.0 + i, 3.5 + i, 0.1) for i in range(20)]
    judged = [judged for one in slow for judged in spans.add(one)]
    assert (slow[0], ALONE) in judged


@given(seed=st.integers(0, 10**6), names=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_each_span_is_judged_at_most_once_and_little_is_kept(seed, names):
    rng, spans = random.Random(seed), WorkerSpans()
    seen, start = list[int](), 0.0
    for i in range(300):
        start += rng.random()
        long_s = rng.choice([0.0, 0.1, 0.5, 5.0])
        one = span(rng.choice("abcd"[:names]), start, start + long_s, long_s * rng.random(), quanta=rng.choice([1, 50]))
        one = replace(one, step=i)
        for judged, company in spans.add(one):
            seen.append(judged.step)
            assert isinstance(company, Company)
            assert 0.0 < company.share <= 1.0 or not judged.busy_s
    assert len(seen) == len(set(seen))
    assert len(spans._held) <= 65


# -- what a run learns


class Own:
    """As ``runtime/known_costs.py`` has it."""

    def __init__(self, known: CostTable, measured: Interference) -> None:
        self.table = known
        self.corrections = Corrections()
        self._measured = measured

    def observe(self, one: Span) -> None:
        self.corrections.observe(one, self.table)

    def predicted_s(self, one: Span) -> float | None:
        return self.corrections.predicted_s(one, self.table)

    def pairs(self, keys: Iterable[TableKey]) -> Interference:
        return self._measured if {KEY, OTHER} <= set(keys) else UNKNOWN

    def factor(self, substage: str = SubStage.DECODE) -> float:
        return self.corrections.factor(1, substage)


PIPELINES = {"a": KEY, "b": OTHER, "c": OTHER}
SMALL: dict[str, Work] = {name: (model_of(key), "decode_small") for name, key in PIPELINES.items()}


class Learning:
    """Two or more pipelines on one worker: windows of half a second, in which each has its share."""

    def __init__(self, measured: Interference = UNKNOWN, *, noise: float = 0.05) -> None:
        self.own = {name: Own(table(key), measured) for name, key in PIPELINES.items()}
        self.log = InterferenceLog(self.own.get)
        self._rng, self._noise, self._now = random.Random(0), noise, 0.0

    def run(
        self,
        windows: int,
        shares: dict[str, float],
        slower: dict[str, float],
        *,
        kinds: dict[str, SubStage] | None = None,
    ) -> Learning:
        """Busy time is ``slower`` times what the table says."""
        for _ in range(windows):
            for name in shares:
                kind = (kinds or {}).get(name, SubStage.DECODE)
                self.log.observe(self._span(name, kind, 0.5 * shares[name], slower.get(name, 1.0)))
            self._now += 0.5
        return self

    def _span(self, name: str, kind: SubStage, busy_s: float, slower: float) -> Span:
        factor = slower * math.exp(self._rng.gauss(0.0, self._noise))
        known = self.own[name].table
        one = span(name, self._now, self._now + 0.5, busy_s, substage=kind)
        if kind == SubStage.TRAIN:
            return replace(one, tokens=busy_s / (factor * known.train_token_s), quanta=4)
        return replace(one, quanta=busy_s / (factor * known.decode_s(1, one.batch, one.context)))

    def factor(self, work: str, beside: str, share: float = 0.5) -> float:
        return self.log.current().factor(SMALL[work], SMALL[beside], on="same", share=share)


EVEN = {"a": 0.5, "b": 0.5}


@given(a=st.floats(1.0, 1.9), b=st.floats(1.0, 1.9))
@settings(max_examples=15, deadline=None)
def test_how_much_two_slow_each_other_down_is_learnt(a, b):
    seen = Learning().run(150, EVEN, {"a": a, "b": b})
    assert seen.factor("a", "b") == pytest.approx(a, rel=0.03)
    assert seen.factor("b", "a") == pytest.approx(b, rel=0.03)
    assert seen.own["a"].factor() == seen.own["b"].factor() == 1.0  # they were never alone


@pytest.mark.parametrize("share", SHARES)
def test_each_share_of_the_time_is_learnt_and_the_others_lean_on_it(share):
    seen = Learning().run(150, {"a": share, "b": 1.0 - share}, {"a": 1.4, "b": 1.2})
    assert seen.factor("a", "b", share) == pytest.approx(1.4, rel=0.03)
    for other in SHARES:
        assert 1.2 < seen.factor("a", "b", other) < 1.45
    assert seen.factor("a", "b", 1.0) == 1.0
    if share != 0.5:
        seen.run(150, {"a": 1.0 - share, "b": share}, {"a": 1.1, "b": 1.1})
        assert seen.factor("a", "b", share) == pytest.approx(1.4, rel=0.03)
        assert seen.factor("a", "b", 1.0 - share) == pytest.approx(1.1, rel=0.05)


def test_undisturbed_spans_change_no_factor_and_disturbed_ones_no_correction():
    seen = Learning().run(100, EVEN, {"a": 1.5, "b": 1.5})
    before = seen.log.current()
    seen.run(100, {"a": 1.0}, {"a": 1.25})
    assert seen.log.current() == before
    assert seen.own["a"].factor() == pytest.approx(1.25, rel=0.03)
    assert seen.own["b"].factor() == 1.0
    known = seen.own["a"].corrections.state_dict()
    seen.run(100, EVEN, {"a": 1.25 * 1.5, "b": 1.5})
    assert seen.own["a"].corrections.state_dict() == known
    assert seen.factor("a", "b") == pytest.approx(1.5, rel=0.05)


def test_a_pipeline_that_is_slow_by_itself_is_not_the_others_fault():
    seen = Learning().run(50, {"a": 1.0}, {"a": 2.0}).run(150, EVEN, {"a": 2.0, "b": 1.0})
    assert seen.factor("a", "b") == pytest.approx(1.0, abs=0.05)


def test_training_beside_decoding_is_learnt_too():
    kinds = {"a": SubStage.TRAIN}
    seen = Learning().run(60, {"a": 1.0}, {"a": 3.0}, kinds=kinds)
    assert seen.own["a"].factor(SubStage.TRAIN) == pytest.approx(3.0, rel=0.05)
    seen.run(150, EVEN, {"a": 3.0 * 1.3, "b": 1.1}, kinds=kinds)
    known = seen.log.current()
    assert known.factor((A, "train"), SMALL["b"], on="same") == pytest.approx(1.3, rel=0.05)
    assert known.factor(SMALL["b"], (A, "train"), on="same") == pytest.approx(1.1, rel=0.03)


def test_what_was_measured_is_believed_until_spans_say_otherwise():
    pair = SMALL["a"], SMALL["b"]
    measured = Interference(same={pair: (1.6, 1.5, 1.4)}, neighbour={pair: 1.2})
    assert 1.45 < Learning(measured).run(2, EVEN, {"a": 1.5}).factor("a", "b") < 1.55
    assert Learning(measured).run(2, EVEN, {"a": 1.0}).factor("a", "b") > 1.3
    seen = Learning(measured).run(150, EVEN, {"a": 1.1})
    assert seen.factor("a", "b") == pytest.approx(1.1, rel=0.03)
    assert seen.log.current().factor(*pair, on="neighbour") == 1.2


def test_tables_of_one_model_are_believed_as_soon_as_they_are_there():
    seen = Learning()
    seen.own["b"].table = table(OTHER, same_worker={"decode_small": {"train": 1.8}, "train": {"decode_small": 1.3}})
    seen.run(4, EVEN, {}, kinds={"a": SubStage.TRAIN})
    assert seen.log.current().factor((B, "train"), (B, "decode_small"), on="same") == pytest.approx(1.3)


def test_three_on_a_worker_are_told_apart_when_they_also_meet_in_pairs():
    seen = Learning()
    seen.own["c"].table = table(OTHER._replace(model="third"))
    third: Work = (model_of(seen.own["c"].table.key), "decode_small")
    for _ in range(40):
        seen.run(5, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, {"a": math.sqrt(1.2 * 1.8)})
        seen.run(5, {"a": 1 / 3, "b": 2 / 3}, {"a": 1.2})
    known = seen.log.current()
    assert known.factor(SMALL["a"], SMALL["b"], on="same", share=1 / 3) == pytest.approx(1.2, rel=0.05)
    assert known.factor(SMALL["a"], third, on="same", share=1 / 3) == pytest.approx(1.8, rel=0.08)


def test_two_pipelines_of_one_model_are_company_all_the_same():
    seen = Learning().run(150, {"b": 0.5, "c": 0.5}, {"b": 1.3, "c": 1.3})
    assert seen.factor("b", "c") == pytest.approx(1.3, rel=0.03)


def test_one_long_pause_changes_little():
    seen = Learning().run(100, EVEN, {"a": 1.2}).run(1, EVEN, {"a": 50.0}).run(2, EVEN, {"a": 1.2})
    assert seen.factor("a", "b") == pytest.approx(1.2, rel=0.05)


def test_nothing_becomes_faster_by_company():
    assert Learning().run(100, EVEN, {"a": 0.7}).factor("a", "b") == 1.0


def test_pipelines_without_a_table_teach_nothing():
    log = InterferenceLog(lambda name: None)
    for i in range(20):
        log.observe(span("a", i, i + 1, 0.5))
        log.observe(span("b", i, i + 1, 0.5))
    assert log.current() == UNKNOWN


def spans_of(seen: Learning) -> Iterator[Span]:
    for i in range(400):
        yield seen._span("ab"[i % 2], SubStage.DECODE, 0.25, 1.2)
        seen._now += 0.25 * (i % 2)


def test_what_is_kept_does_not_grow():
    seen = Learning()
    for one in spans_of(seen):
        seen.log.observe(one)
    lane = seen.log._workers[0]
    assert len(lane._held) < 10
    assert len(lane._recent) == lane._recent.maxlen


def test_interference_imports_neither_torch_nor_ray():
    code = (
        "import sys, longtail.costs.interference_log, longtail.costs.interference_file;"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
