"""A simulated change of layout does what a real one does: the same sequences are at the same place at the same time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine_models import make_engine, prompt_of, random_model, request
from longtail.cluster.messages import Sampled, Switch, Switched, TrainBatches, Trained
from longtail.core.config import Pipeline
from longtail.core.types import Request, StepTotals, SubStage, TrainGroup, TrainSample
from longtail.costs.decode import DecodeCosts
from longtail.costs.table import SwitchCosts
from longtail.engine.blocks import MISSING
from longtail.engine.engine import Engine
from longtail.engine.switch_plan import How, SwitchPlan, plan_switch
from longtail.engine.switch_plan import SwitchCosts as Prices
from longtail.rl.packing import MicroBatch
from simulated_driven import COSTS, NARROW, PAIR, SINGLE, TWO, Driven, config, some_requests

UNWEIGHED = replace(COSTS, switch=SwitchCosts(handshake_s=0.004, move_s=0.001, move_byte_s=0.0))
"""What a switch takes does not depend on how much is moved."""


# Real engines


class Engines:
    """Real engines whose quanta take what ``COSTS`` say, changing hands by the real rules (but nothing is moved, since
    a forced length does not depend on the tokens)."""

    def __init__(self, requests: list[list[Request]], options: Pipeline) -> None:
        self._model = random_model(kv_heads=4, heads=4)
        self._options = options.rollout
        self.layout: tuple[tuple[int, ...], ...] = tuple((worker,) for worker in range(len(requests)))
        self._engines = {group: self._engine() for group in self.layout}
        self._clocks = dict.fromkeys(self.layout, 0.0)
        self._context: dict[tuple[str, int], int] = {}
        self._prompts = {r.request_id: len(r.prompt) for row in requests for r in row}
        self.ends: dict[tuple[str, int], float] = {}
        for group, row in zip(self.layout, requests, strict=True):
            for item in row:
                self._engines[group].add(item)

    def _engine(self) -> Engine:
        options = self._options
        return make_engine(self._model, blocks=4000, max_running=options.max_running, chunk_tokens=options.chunk_tokens)

    @property
    def block_bytes(self) -> int:
        return self._engines[self.layout[0]].lanes.store.block_bytes

    def run(self, until: float) -> None:
        """All quanta that begin before then."""
        for group, engine in self._engines.items():
            while engine.has_work and self._clocks[group] < until:
                self._step(group, engine)

    def _step(self, group: tuple[int, ...], engine: Engine) -> None:
        costs = COSTS.sampling(len(group))
        result = engine.step()
        keys = [(emitted.request_id, emitted.sample) for emitted in result.emitted]
        if result.substage == SubStage.PREFILL:
            self._clocks[group] += result.tokens * costs.per_prompt_token_s
        else:
            self._clocks[group] += costs.step_s(len(keys), sum(self._context[key] for key in keys))
        for key in keys:
            self._context[key] = self._context.get(key, self._prompts[key[0]]) + 1
        self.ends |= {(c.request_id, c.sample): self._clocks[group] for c in result.completions}

    def switch(
        self, at: float, groups: tuple[tuple[int, ...], ...], *, how: str, prices: Prices, rebalance: bool
    ) -> SwitchPlan:
        """Who is in none of ``groups`` goes on alone and empty."""
        self.run(at)
        cargos = {}
        for group, engine in self._engines.items():
            cargo = engine.export()
            for heads, worker in zip(np.array_split(np.arange(4), len(group)), group, strict=True):
                cargos[worker] = replace(cargo, heads=tuple(heads.tolist()), columns=cargo.columns[:, heads])
        plan = plan_switch(
            [cargos[worker] for worker in sorted(cargos)],
            sorted(self.layout),
            groups,
            costs=prices,
            how=How(how),
            rebalance=rebalance,
        )
        assert isinstance(plan, SwitchPlan)
        switch = UNWEIGHED.switch
        end = max(max(clock, at) for clock in self._clocks.values()) + switch.handshake_s
        end += switch.move_s if plan.moved_bytes else 0.0
        left = tuple((worker,) for worker in sorted(cargos) if not any(worker in group for group in groups))
        self.layout = (*groups, *left)
        self._engines, self._clocks = {group: self._engine() for group in self.layout}, dict.fromkeys(self.layout, end)
        for group, berth in zip(groups, plan.berths, strict=True):
            self._engines[group].adopt(berth.groups, np.full((len(berth.origin), 4), MISSING, np.int32))
        return plan


WORK = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=4)), min_size=0, max_size=4
)
LAYOUTS = [
    ((0, 1), (2, 3)),
    ((0, 1, 2, 3),),
    ((0, 1), (2,), (3,)),
    ((0,), (1,), (2,), (3,)),
    ((2,),),
    ((0,), (3,)),
    ((2, 3),),
]


@settings(max_examples=15, deadline=None)
@given(
    work=st.tuples(WORK, WORK, WORK, WORK),
    max_running=st.integers(1, 6),
    chunk_tokens=st.integers(16, 40),
    waits=st.tuples(st.integers(0, 80), st.integers(0, 80)),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    how=st.sampled_from(["move", "recompute", "auto"]),
    per_token_s=st.sampled_from([0.0, 1e-3]),
    rebalance=st.booleans(),
)
def test_after_any_switches_every_sample_ends_when_real_engines_with_these_step_costs_end_it(
    work, max_running, chunk_tokens, waits, layouts, how, per_token_s, rebalance
):
    job = config(max_running=max_running, chunk_tokens=chunk_tokens)
    requests = [
        [
            request(f"{worker}-{i}", prompt_of(n, seed=i), samples=len(row), forced=tuple(row), max_tokens=32)
            for i, (n, row) in enumerate(rows)
        ]
        for worker, rows in enumerate(work)
    ]
    real, driven = Engines(requests, job), Driven(4, pipelines={"p": job}, costs=UNWEIGHED)
    for worker, row in enumerate(requests):
        driven.generate(worker, *row)
    at, told = 0.0, {}
    for groups, wait in zip(layouts, waits, strict=True):
        at += wait / 100 + 1.23456789e-5  # not the very moment at which a quantum ends
        driven.until(at)
        before = real.layout
        prices = Prices(per_byte_s=1e-12, per_token_s=per_token_s)
        plan = real.switch(at, groups, how=how, prices=prices, rebalance=rebalance)
        lease = driven.switch(before, groups, how=how, per_byte_s=1e-12, per_token_s=per_token_s, rebalance=rebalance)
        blocks = [count // real.block_bytes for count in plan.received_bytes]
        told |= {(worker, lease.lease_id): (blocks[worker], plan.recomputed_tokens) for worker in range(4)}
    real.run(np.inf)
    driven.run()
    assert driven.ends() == pytest.approx(real.ends, rel=1e-9)
    assert len(real.ends) == sum(r.samples for row in requests for r in row)
    assert {
        (r.worker, r.lease_id): (r.moved_bytes // (16 * COSTS.kv_bytes), r.recomputed_tokens)
        for r in driven.all(Switched)
    } == told


# By hand


def test_a_group_decodes_at_the_costs_of_its_degree_and_each_member_accounts_for_it():
    driven = Driven(2)
    driven.switch(SINGLE, TWO)
    driven.generate(0, *some_requests((31, 31), prompt=16))
    driven.run()
    start, prefill_s = COSTS.switch.handshake_s, 16 * PAIR.per_prompt_token_s
    decode_s = PAIR.steps_s(30, 2, 2 * 17)
    assert list(driven.ends().values()) == [pytest.approx(start + prefill_s + decode_s)] * 2
    driven.stop()
    for worker in driven.everyone:
        (prefill,), (decode,) = driven.spans(worker, SubStage.PREFILL), driven.spans(worker, SubStage.DECODE)
        assert (prefill.tp, prefill.tokens, prefill.context) == (2, 16, 16)
        assert (decode.tp, decode.tokens, decode.quanta, decode.batch) == (2, 60, 30, 2)
        assert decode.context == pytest.approx(2 * (17 + 29 / 2))
        assert decode.busy_s == pytest.approx(decode_s)
        (switch,) = driven.spans(worker, SubStage.SWITCH)
        assert (switch.start, switch.end) == (0.0, pytest.approx(start))


def test_sequences_go_on_from_where_they_were_and_travel_as_whole_blocks():
    """Two workers with 16 + 20 tokens in the lanes each: half of the heads of three blocks each go to the partner."""
    driven = Driven(2)
    driven.generate(0, *some_requests((50,), prompt=16))
    driven.generate(1, *some_requests((50,), prompt=16, first=1))
    at = 16 * NARROW.per_prompt_token_s + NARROW.steps_s(20, 1, 17)
    driven.until(at - 1e-6)
    driven.switch(SINGLE, TWO)
    driven.run()
    block = 16 * COSTS.kv_bytes
    duration_s = COSTS.switch.handshake_s + COSTS.switch.move_s + COSTS.switch.move_byte_s * 3 * 2 * block
    for report in driven.all(Switched):
        assert (report.sequences, report.moved_bytes, report.recomputed_tokens) == (2, 3 * 2 * block, 0)
        assert (report.groups, report.refused) == (TWO, None)
        assert report.duration_s == pytest.approx(duration_s)
    end = at + duration_s + PAIR.steps_s(29, 2, 2 * (16 + 21))
    assert driven.ends() == {("r0", 0): pytest.approx(end), ("r1", 0): pytest.approx(end)}


def test_what_is_recomputed_is_prefilled_by_the_new_group():
    driven = Driven(2)
    driven.generate(0, *some_requests((50,), prompt=16))
    at = 16 * NARROW.per_prompt_token_s + NARROW.steps_s(20, 1, 17)
    driven.until(at - 1e-6)
    driven.switch(SINGLE, TWO, how="recompute")
    driven.run()
    assert {(r.moved_bytes, r.recomputed_tokens) for r in driven.all(Switched)} == {(0, 36)}
    end = at + COSTS.switch.handshake_s + 36 * PAIR.per_prompt_token_s + PAIR.steps_s(29, 1, 16 + 21)
    assert driven.ends() == {("r0", 0): pytest.approx(end)}


def test_after_narrowing_context_is_even_and_workers_are_on_their_own():
    driven = Driven(2)
    driven.switch(SINGLE, TWO)
    driven.generate(0, *some_requests((60,), (60,), (60,), (60,)))
    driven.until(0.3)
    driven.switch(TWO, SINGLE)
    driven.generate(1, *some_requests((5,), first=9))
    driven.run()
    ends = {c.request_id: r.worker for r in driven.all(Sampled) for c in r.completions}
    assert sorted(ends.values()) == [0, 0, 1, 1, 1]
    assert ends["r9"] == 1
    driven.stop()
    assert {s.tp for w in (0, 1) for s in driven.spans(w, SubStage.DECODE) if s.start > 0.3} == {1}


def test_groups_over_slow_and_fast_workers_are_as_slow_as_the_slowest():
    slow = replace(COSTS, decode_by_degree={2: DecodeCosts(base_s=0.05, per_sequence_s=0.01)})
    driven = Driven(2, costs=lambda worker, name: slow if worker else COSTS)
    driven.switch(SINGLE, TWO)
    driven.generate(0, *some_requests((11,), prompt=1))
    driven.run()
    worst = DecodeCosts(base_s=0.05, per_sequence_s=0.01, per_context_token_s=6e-6, per_prompt_token_s=1.1e-3)
    end = COSTS.switch.handshake_s + 1.1e-3 + worst.steps_s(10, 1, 2)
    assert driven.ends() == {("r0", 0): pytest.approx(end)}


@pytest.mark.parametrize(
    ("workers", "groups", "why"),
    [
        (3, ((0, 1, 2),), "the costs of a tensor-parallel degree of 3 are not known"),
        (5, ((0, 1, 2, 3, 4),), "5 ranks cannot share 4 KV heads: each needs one at least"),
    ],
)
def test_a_degree_that_cannot_be_is_refused_and_everything_is_as_before(workers, groups, why):
    driven = Driven(workers)
    driven.generate(0, *some_requests((20,)))
    driven.until(0.1)
    driven.switch([(w,) for w in range(workers)], groups)
    driven.run()
    assert {r.refused for r in driven.all(Switched)} == {why}
    assert {r.groups for r in driven.all(Switched)} == {tuple((w,) for w in range(workers))}
    end = 10 * NARROW.per_prompt_token_s + NARROW.steps_s(19, 1, 11) + COSTS.switch.handshake_s
    assert driven.ends() == {("r0", 0): pytest.approx(end)}


@pytest.mark.parametrize("groups", [((0,), (2,)), ((0,), (0,)), ((0, 1), (1,))])
def test_groups_of_others_or_of_the_same_workers_are_an_error(groups):
    driven = Driven(3)
    lease = driven.lease((0, 1))
    driven.send((0, 1), Switch(**driven.of("p"), step=0, lease=lease, groups=groups))
    with pytest.raises(ValueError, match="not groups of different workers"):
        driven.run()


def test_a_merge_takes_everything_to_one_worker_and_leaves_the_other_empty():
    driven = Driven(2)
    driven.generate(0, *some_requests((50,), prompt=16))
    driven.generate(1, *some_requests((50,), prompt=16, first=1))
    at = 16 * NARROW.per_prompt_token_s + NARROW.steps_s(20, 1, 17)
    driven.until(at - 1e-6)
    driven.switch(SINGLE, ((0,),))
    driven.run()
    block = 16 * COSTS.kv_bytes
    duration_s = COSTS.switch.handshake_s + COSTS.switch.move_s + COSTS.switch.move_byte_s * 3 * 4 * block
    assert {(r.worker, r.groups, r.moved_bytes) for r in driven.all(Switched)} == {
        (0, ((0,),), 3 * 4 * block),
        (1, ((0,),), 0),
    }
    end = at + duration_s + NARROW.steps_s(29, 2, 2 * (16 + 21))
    assert driven.ends() == {("r0", 0): pytest.approx(end), ("r1", 0): pytest.approx(end)}
    assert {report.worker for report in driven.all(Sampled)} == {0}


def test_a_worker_that_is_left_out_of_a_group_works_for_others_at_once():
    driven = Driven(2, pipelines={"p": config(), "q": config()})
    driven.switch(SINGLE, TWO)
    driven.generate(0, *some_requests((200,)))
    driven.until(0.5)
    driven.generate(1, *some_requests((40,), first=1), name="q")
    driven.until(1.0)
    assert driven.ends() == {}
    driven.switch(TWO, ((0,),))
    driven.run()
    ends = driven.ends()
    assert ends["r1", 0] < ends["r0", 0]
    driven.stop()
    assert all(span.end <= ends["r1", 0] + 1e-6 for span in driven.spans(1, SubStage.DECODE, "q"))
    assert max(span.end for span in driven.spans(1, SubStage.DECODE)) < ends["r0", 0], "p has left worker 1"


def test_a_spread_gives_half_of_the_samples_to_a_worker_that_had_none():
    driven = Driven(2)
    driven.generate(0, *some_requests((60, 60), (60, 60)))
    driven.until(0.3)
    driven.switch([(0,)], SINGLE, rebalance=True)
    driven.run()
    by_worker = [(r.worker, c.request_id) for r in driven.all(Sampled) for c in r.completions]
    assert sorted(by_worker) == [(0, "r0"), (0, "r0"), (1, "r1"), (1, "r1")] or sorted(by_worker) == [
        (0, "r1"), (0, "r1"), (1, "r0"), (1, "r0")
    ]  # fmt: skip


def test_other_pipelines_wait_while_a_group_exists_and_go_on_after_it():
    driven = Driven(2, pipelines={"p": config(), "q": config()})
    driven.generate(0, *some_requests((40,)), name="q")
    driven.generate(1, *some_requests((40,), first=1), name="q")
    driven.until(0.2)
    driven.switch(SINGLE, TWO)
    driven.generate(0, *some_requests((100,), first=2))
    driven.until(5.0)
    assert set(driven.ends()) == {("r2", 0)}, "q has waited, also after the group's work was done"
    driven.switch(TWO, SINGLE)
    driven.run()
    assert set(driven.ends()) == {("r0", 0), ("r1", 0), ("r2", 0)}
    driven.stop()
    for worker in driven.everyone:
        spans = driven.spans(worker, SubStage.DECODE, "q")
        assert sum(s.busy_s for s in spans) == pytest.approx(NARROW.steps_s(39, 1, 11))


def test_quanta_of_all_pipelines_end_before_a_switch_begins():
    group = TrainGroup(
        prompt=np.zeros(100, np.int32),
        samples=(TrainSample(tokens=np.zeros(9900, np.int32), logprobs=np.zeros(9900, np.float32), advantage=1.0),),
    )
    driven = Driven(2, pipelines={"p": config(), "q": config()})
    batches = ((0, MicroBatch((group,))), (1, MicroBatch((group,))))
    totals = StepTotals(samples=2, tokens=19800, max_tokens=9900)
    driven.send([0], TrainBatches(**driven.of("q"), step=0, batches=batches, totals=totals))
    driven.until(0.33)
    driven.switch(SINGLE, TWO)
    driven.run(100.0)
    assert driven.all(Trained) == []
    driven.switch(TWO, SINGLE)
    driven.run()
    assert [report.number for report in driven.all(Trained)] == [0, 1]
    driven.stop()
    assert sum(span.tokens for span in driven.spans(0, SubStage.TRAIN, "q")) == 20_000
    assert sum(span.busy_s for span in driven.spans(0, SubStage.TRAIN, "q")) == pytest.approx(2.0)
    (widened, narrowed) = driven.spans(1, SubStage.SWITCH)
    assert widened.end == pytest.approx(0.4 + COSTS.switch.handshake_s), "a micro-batch takes a second, a slice 0.1"
    assert narrowed.start > 100
