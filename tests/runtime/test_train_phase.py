"""Micro-batches are handed out as workers get free: each once, and each counted once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.cluster.messages import Hurry, TrainBatches, Trained, Update, Updated
from longtail.core.config import Pipeline
from longtail.core.errors import TrainingError
from longtail.core.types import TrainGroup, TrainSample
from longtail.rl.trainer import MicroStats, UpdateStats
from longtail.runtime.leases import LeaseBook, Leases
from longtail.runtime.plan import PipelinePlan
from longtail.runtime.train_phase import AHEAD, Deal, TrainPhase
from simulated_run import Letters, Rows


def group(number: int, *lengths: int, advantage: float = 1.0) -> TrainGroup:
    return TrainGroup(
        prompt=np.full(3, number, np.int32),
        samples=tuple(
            TrainSample(
                tokens=np.full(n, i, np.int32),
                logprobs=np.zeros(n, np.float32),
                advantage=advantage * (-1.0) ** i,
            )
            for i, n in enumerate(lengths)
        ),
    )


class Bench:
    """A training without workers: what they were sent and have not reported is in ``waiting``, oldest first."""

    def __init__(self, workers: int = 2, *, groups: list[TrainGroup], grouped=(), **algorithm) -> None:
        config = Pipeline.model_validate(
            {"model": "m", "task": "t", "algorithm": algorithm, "train": {"micro_tokens": 40}}
        )
        plan = PipelinePlan(
            name="a", config=config, model_folder=None, folder=None, kv_blocks=1, task=Rows([]), tokenizer=Letters()
        )  # fmt: skip
        self.workers = workers
        self.waiting: list[list[tuple[int, object]]] = [[] for _ in range(workers)]
        self.handed: list[int] = []
        self.hurried: list[int] = []
        self.updates: list[Update] = []
        self.book = LeaseBook()
        self.form_group(grouped)
        leases = Leases(self.book, "a", contended=lambda: False)
        self.phase = TrainPhase(plan, workers=workers, send=self._send, leases=leases)
        self.phase.begin(7, groups, attempt=3)

    def form_group(self, workers) -> None:
        """Of another pipeline."""
        if workers:
            self.book.ask("other", tuple(workers), "switch")
            self.book.grant()

    def _send(self, worker: int, command) -> None:
        assert (command.pipeline, command.attempt, command.step) == ("a", 3, 7)
        if isinstance(command, TrainBatches):
            self.waiting[worker] += command.batches
            self.more = command.more
            self.handed += [number for number, _ in command.batches]
        elif isinstance(command, Hurry):
            assert self.waiting[worker], "there is nothing to hurry for"
            self.hurried.append(worker)
        else:
            assert isinstance(command, Update)
            self.updates.append(command)

    def report(self, worker: int, *, loss: float = 1.0, shared: bool = False) -> None:
        number, batch = self.waiting[worker].pop(0)
        stats = MicroStats(samples=batch.samples, tokens=batch.completion_tokens, loss=loss)
        done = Trained(worker=worker, pipeline="a", attempt=3, step=7, number=number, stats=stats, shared=shared)
        self.phase.trained(done)

    def run_pass(self, choices) -> None:
        while self.phase.at == "passing":
            busy = [worker for worker in range(self.workers) if self.waiting[worker]]
            assert busy, "nobody has anything left, and the pass is not over"
            self.report(busy[next(choices, 0) % len(busy)])

    def update(self) -> None:
        self.phase.update()
        (lease,) = self.book.grant()
        self.phase.granted(lease)
        assert len(self.updates) == self.workers, "every worker takes part"
        self.updated(lease)

    def updated(self, lease) -> None:
        self.updates.clear()
        for worker in range(self.workers):
            assert self.phase.at == "updating"
            self.phase.updated(
                Updated(
                    worker=worker,
                    pipeline="a",
                    attempt=3,
                    step=7,
                    lease_id=lease.lease_id,
                    stats=UpdateStats(grad_norm=2.0, lr=0.1),
                )
            )
            self.book.member_done("a", worker, lease.lease_id)


GROUPS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=8)


@settings(max_examples=60)
@given(
    lengths=GROUPS, workers=st.integers(1, 5), iterations=st.integers(1, 3),
    choices=st.lists(st.integers(0, 9), max_size=60),
)  # fmt: skip
def test_every_sample_is_trained_once_in_each_pass_in_whatever_order_workers_report(
    lengths, workers, iterations, choices
):
    groups = [group(i, *row) for i, row in enumerate(lengths)]
    bench = Bench(workers, groups=groups, iterations=iterations)
    chosen = iter(choices)
    numbers = None
    for _ in range(iterations):
        bench.run_pass(chosen)
        assert sorted(bench.handed) == list(range(len(bench.handed)))
        assert numbers in (None, len(bench.handed)), "each pass has the same micro-batches"
        numbers = len(bench.handed)
        metrics = bench.phase.metrics()
        assert metrics["loss"] == numbers, "each micro-batch counts once"
        assert bench.phase.at == "passed"
        bench.handed.clear()
        bench.update()
    assert bench.phase.at == "over"
    assert bench.phase.tokens_left == 0
    assert bench.phase.metrics()["grad_norm"] == 2.0


def test_the_order_of_reports_changes_no_bit_of_a_metric():
    groups = [group(i, 5 + i, 20) for i in range(9)]

    def metrics(choices):
        bench = Bench(3, groups=groups)
        while bench.phase.at == "passing":
            busy = [worker for worker in range(3) if bench.waiting[worker]]
            worker = busy[next(choices, 0) % len(busy)]
            bench.report(worker, loss=0.1 * (1 + bench.waiting[worker][0][0]))
        return bench.phase.metrics()

    rng = np.random.default_rng(0)
    assert len({tuple(metrics(iter(rng.integers(0, 9, 50).tolist())).items()) for _ in range(8)}) == 1


def test_a_worker_that_is_fast_computes_more_of_a_step():
    bench = Bench(2, groups=[group(i, 30) for i in range(12)])
    done = 0
    while bench.waiting[0]:
        bench.report(0)
        done += 1
    assert done == 12 - AHEAD, "all but those that the slow one has"
    assert bench.phase.at == "passing"
    assert bench.hurried == [1], "and that one is waited for"


def test_towards_the_end_a_worker_with_other_work_has_one_at_a_time():
    bench = Bench(2, groups=[group(i, 30) for i in range(12)])
    assert [len(waiting) for waiting in bench.waiting] == [AHEAD, AHEAD]
    had = []
    while bench.waiting[0]:
        bench.report(0, shared=True)
        had.append((bench.more, len(bench.waiting[0])))
    assert had[0] == (True, AHEAD), "many are left"
    assert [count for more, count in had if more][-2:] == [1, 1]


def test_in_a_small_step_a_worker_has_the_next_one_in_advance_only_if_it_has_no_other_work():
    for shared, expected in ((True, 1), (False, AHEAD)):
        bench = Bench(2, groups=[group(i, 30) for i in range(5)])
        assert [len(waiting) for waiting in bench.waiting] == [1, 1]
        bench.report(0, shared=shared)
        assert len(bench.waiting[0]) == expected


def test_nobody_is_hurried_while_there_is_something_to_hand_out_or_all_have_something_to_do():
    bench = Bench(2, groups=[group(i, 30) for i in range(3)])
    assert len(bench.handed) == 2
    bench.report(0)
    assert (len(bench.handed), bench.hurried) == (3, [])
    bench.report(1)
    assert bench.hurried == [0]
    bench.report(0)
    assert (bench.phase.at, bench.hurried) == ("passed", [0])


def test_the_last_micro_batches_are_not_kept_by_a_worker_that_is_busy():
    deal = Deal([object()] * 3, 2)
    assert deal.hand_out() == {0: [0], 1: [1]}
    deal.done(1, 1, MicroStats())
    assert deal.hand_out() == {1: [2]}
    deal.done(1, 2, MicroStats())
    assert deal.hand_out() == {}
    assert not deal.over
    deal.done(0, 0, MicroStats())
    assert deal.over


def test_the_only_worker_gets_all_at_once():
    assert Deal([object()] * 9, 1).hand_out() == {0: list(range(9))}


def test_a_micro_batch_that_is_reported_twice_or_by_another_worker_is_an_error():
    deal = Deal([object()] * 8, 2)
    deal.hand_out()
    with pytest.raises(RuntimeError, match="worker 1 reports micro-batch 0"):
        deal.done(1, 0, MicroStats())
    deal.done(0, 0, MicroStats())
    with pytest.raises(RuntimeError, match="has reported"):
        deal.done(0, 0, MicroStats())


def test_workers_in_a_group_of_another_pipeline_get_their_micro_batches_when_it_is_over():
    bench = Bench(3, groups=[group(i, 30) for i in range(12)], grouped=(0, 1))
    assert [len(waiting) for waiting in bench.waiting] == [0, 0, AHEAD]
    bench.report(2)
    assert [len(waiting) for waiting in bench.waiting] == [0, 0, AHEAD]
    bench.book.clear()
    bench.phase.hand_out()
    assert [len(waiting) for waiting in bench.waiting] == [1, 1, AHEAD]


@settings(max_examples=60)
@given(
    lengths=GROUPS, workers=st.integers(1, 5), grouped=st.sets(st.integers(0, 4)),
    events=st.lists(st.integers(0, 9), max_size=60),
)  # fmt: skip
def test_a_training_goes_on_with_the_free_workers_whichever_of_them_form_groups_meanwhile(
    lengths, workers, grouped, events
):
    groups = [group(i, *row) for i, row in enumerate(lengths)]
    bench = Bench(workers, groups=groups, grouped=grouped & set(range(workers)))
    chosen = iter(events)
    while bench.phase.at == "passing":
        away = bench.book.grouped
        before = [len(waiting) for waiting in bench.waiting]
        event = next(chosen, 0)
        able = [worker for worker in range(workers) if bench.waiting[worker] and worker not in away]
        left = bench.phase.tokens_left > sum(batch.tokens for waiting in bench.waiting for _, batch in waiting)
        assert able or not left or not set(range(workers)) - away, "somebody is free, and has nothing of what is left"
        if event == 9 or not able:  # groups come and go
            bench.book.clear()
            if able:
                bench.form_group([next(chosen, 0) % workers])
            bench.phase.hand_out()
        else:
            bench.report(able[event % len(able)])
        for worker in away & bench.book.grouped:
            assert len(bench.waiting[worker]) == before[worker], "it got some although it samples in a group"
    assert sorted(bench.handed) == list(range(len(bench.handed)))
    assert bench.phase.metrics()["loss"] == len(bench.handed)


def test_an_update_that_waits_for_its_lease_can_still_be_dropped():
    bench = Bench(2, groups=[group(i, 30) for i in range(4)], iterations=2)
    between = []
    for _ in range(2):
        bench.run_pass(iter([]))
        bench.phase.update()
        between.append(bench.phase.between_updates)
        (lease,) = bench.book.grant()
        bench.phase.granted(lease)
        between.append(bench.phase.between_updates)
        bench.updated(lease)
    assert between == [False, True, True, True]
    bench.phase.reset()
    assert not bench.phase.between_updates


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_training_with_a_sentence(loss):
    bench = Bench(2, groups=[group(i, 30) for i in range(4)])
    bench.report(0)
    with pytest.raises(TrainingError, match=r"the loss of step 8 is (nan|inf)"):
        bench.report(1, loss=loss)


def test_without_any_gradient_one_group_is_computed_and_the_weights_are_left_alone():
    bench = Bench(2, groups=[group(i, 30, advantage=0.0) for i in range(4)])
    assert bench.handed == [0]
    bench.run_pass(iter([]))
    bench.phase.update()
    assert bench.phase.at == "over"
    assert bench.book.grant() == []
    assert "loss" in bench.phase.metrics()
    assert "grad_norm" not in bench.phase.metrics()


def test_with_nothing_to_train_on_the_pass_is_over_at_once():
    bench = Bench(2, groups=[])
    assert bench.handed == []
    assert bench.phase.at == "passed"
    bench.phase.update()
    assert bench.phase.at == "over"
    assert bench.phase.metrics() == {}
