"""Simulated pipelines that share a worker slow each other down as their costs say, and a run learns by how much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longtail.cluster.messages import Happened, Shares
from longtail.core.events import Span
from longtail.core.types import SubStage
from longtail.costs.corrections import Corrections
from longtail.costs.interference import UNKNOWN, model_of
from longtail.costs.interference_log import InterferenceLog
from longtail.costs.table import TableKey
from simulated_driven import COSTS, Driven, config, some_requests

PAIR = {"a": config(), "b": config()}
FACTORS = {"a": 1.5, "b": 1.2}


def costs(worker: int, pipeline: str):
    return replace(COSTS, slowed=lambda substage, other, its: FACTORS[pipeline] if other != pipeline else 99.0)


def driven(costs_of, *, a: int, b: int, weights: tuple[tuple[str, float], ...] = ()) -> Driven:
    """One worker, on which each pipeline has a sample of so many tokens."""
    run = Driven(1, pipelines=PAIR, costs=costs_of)
    if weights:
        run.send([0], Shares(weights=weights))
    for name, length in (("a", a), ("b", b)):
        if length:
            run.generate(0, *some_requests((length,), first=ord(name)), name=name)
    run.run()
    run.stop()
    return run


def test_alone_nobody_is_slowed_down():
    plain, slowed = (driven(c, a=300, b=0) for c in (lambda *_: COSTS, costs))
    assert plain.ends() == slowed.ends()
    spans = [span.busy_s for run in (plain, slowed) for span in run.spans(0, SubStage.DECODE, "a")]
    assert spans[: len(spans) // 2] == spans[len(spans) // 2 :]


def test_together_each_takes_as_much_longer_as_its_costs_say():
    alone_s = sum(span.busy_s for span in driven(costs, a=300, b=0).spans(0, SubStage.DECODE, "a"))
    run = driven(costs, a=300, b=300)
    busy_s = {name: sum(span.busy_s for span in run.spans(0, SubStage.DECODE, name)) for name in PAIR}
    assert busy_s["b"] == pytest.approx(1.2 * alone_s, rel=0.02)  # it is never alone
    # When b is done, a has done 1.2 / 1.5 of its own.
    assert busy_s["a"] == pytest.approx((1.2 + 0.2) * alone_s, rel=0.02)
    assert max(run.ends().values()) - min(s.start for s in run.spans(0, SubStage.PREFILL, "a")) == pytest.approx(
        sum(busy_s.values()), rel=0.05
    )


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0])
def test_what_they_do_to_each_other_is_learnt_from_their_spans(weight):
    keys = {name: TableKey(machine="m", model=name, dtype="float32", communicator="shm", threads=1) for name in PAIR}

    class Own:
        def __init__(self, key: TableKey) -> None:
            self.table = COSTS.table(key, measured="now", degrees=(1,), fine=True)
            self.corrections = Corrections()

        def observe(self, span: Span) -> None:
            self.corrections.observe(span, self.table)

        def predicted_s(self, span: Span) -> float | None:
            return self.corrections.predicted_s(span, self.table)

        def pairs(self, keys):
            return UNKNOWN

    own = {name: Own(key) for name, key in keys.items()}
    log = InterferenceLog(own.get)
    run = Driven(1, pipelines=PAIR, costs=costs)
    run.send([0], Shares(weights=(("a", weight),)))
    for name in PAIR:
        run.generate(0, *some_requests(*((20 + 37 * i % 600,) for i in range(100)), first=ord(name) * 1000), name=name)
    run.run()
    run.stop()
    for report in run.all(Happened):
        for event in report.events:
            log.observe(event)
    share = weight / (1.0 + weight)
    a, b = ((model_of(keys[name]), "decode_large") for name in PAIR)
    assert log.current().factor(a, b, on="same", share=share) == pytest.approx(1.5, rel=0.05)
    assert log.current().factor(b, a, on="same", share=1.0 - share) == pytest.approx(1.2, rel=0.05)
    assert all(abs(one.corrections.factor(1, SubStage.DECODE) - 1.0) < 0.02 for one in own.values())
