"""Which weights a step is sampled with depends on the step alone, whatever takes how long."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.runtime.own_turns import OwnTurns
from longtail.runtime.schedule import Schedule
from longtail.runtime.turns import By, Turns


class Walk:
    """A pipeline by its schedule, with copies of weights as workers have them; what happens next is chosen outside."""

    def __init__(self, first: int, steps: int, staleness: int) -> None:
        self.schedule = Schedule(first=first, steps=steps, staleness=staleness)
        self.copy = first
        self.settled = False
        self.training = False
        self.sampled_with: list[int] = []
        self.ahead: list[int] = []

    def settle(self) -> None:
        if self.schedule.settle():
            self.copy = self.schedule.trained
        self.settled = True

    def begin(self) -> None:
        self.settled = False
        self.schedule.begin()
        synchronous = self.schedule.staleness == 0
        self.sampled_with.append(self.schedule.trained if synchronous else self.copy)

    def end(self) -> None:
        self.schedule.sampled()

    def train(self) -> None:
        self.training = True

    def update(self) -> None:
        self.training = False
        self.ahead.append(self.schedule.begun - self.schedule.trained - 1)
        self.schedule.updated()

    @property
    def possible(self) -> list[str]:
        s, first = self.schedule, self.schedule.first
        scored = s.begun - s.sampling > s.trained
        found = {
            "settle": s.may_settle,
            "begin": self.settled,
            "end": s.sampling,
            "train": scored and not self.training and s.may_train,
            "update": self.training and s.may_update,
        }
        assert first <= s.trained <= s.begun <= s.steps
        return [name for name, can in found.items() if can]


@settings(max_examples=200)
@given(
    first=st.integers(0, 5), more=st.integers(1, 9), staleness=st.integers(0, 4),
    choices=st.lists(st.integers(0, 4), max_size=80),
)  # fmt: skip
def test_a_step_is_sampled_with_the_weights_of_so_many_steps_ago_in_every_order_of_events(
    first, more, staleness, choices
):
    walk = Walk(first, first + more, staleness)
    chosen = iter(choices)
    while walk.schedule.trained < first + more:
        possible = walk.possible
        assert possible, "the pipeline is stuck"
        getattr(walk, possible[next(chosen, 0) % len(possible)])()
    assert walk.sampled_with == [max(first, step - staleness) for step in range(first, first + more)]
    assert max(walk.ahead) <= staleness


def test_with_staleness_a_rollout_runs_beside_the_training_of_the_step_before():
    walk = Walk(0, 3, 1)
    for action in ("settle", "begin", "end", "settle", "begin", "train"):
        assert action in walk.possible
        getattr(walk, action)()
    assert walk.schedule.sampling
    assert "update" in walk.possible


def test_without_staleness_nothing_overlaps():
    walk = Walk(0, 3, 0)
    for action in ("settle", "begin", "end", "train", "update") * 3:
        assert walk.possible == [action]
        getattr(walk, action)()


class Turn:
    """A pipeline that asks for turns."""

    def __init__(self, turns: Turns, name: str) -> None:
        self.woken = 0
        self.own = OwnTurns(turns, name, wake=self._wake)

    def _wake(self) -> None:
        self.woken += 1


def test_without_turns_everybody_begins_at_once():
    turns = Turns()
    a, b = Turn(turns, "a"), Turn(turns, "b")
    for pipeline in (a, b):
        pipeline.own.ask("rollout")
        assert pipeline.own.grants("rollout")
        assert not pipeline.own.grants("rollout"), "it was asked for once"
        assert pipeline.woken == 0


def test_whoever_waits_for_its_turn_is_woken_when_it_comes():
    turns = Turns(By.STAGE)
    a, b = Turn(turns, "a"), Turn(turns, "b")
    a.own.ask("rollout")
    b.own.ask("rollout")
    assert a.own.grants("rollout")
    assert not b.own.grants("rollout")
    a.own.done("rollout")
    assert b.woken == 1
    assert b.own.grants("rollout")


def test_a_turn_by_step_lasts_through_scoring_until_the_step_is_over():
    turns = Turns(By.STEP)
    a, b = Turn(turns, "a"), Turn(turns, "b")
    a.own.ask("rollout")
    assert a.own.grants("rollout")
    b.own.ask("rollout")
    a.own.done("rollout")
    assert not b.own.grants("rollout")
    a.own.ask("train")
    assert a.own.grants("train")
    a.own.done("train", step_over=True)
    assert b.own.grants("rollout")


def test_an_asynchronous_pipeline_lets_go_when_both_its_stages_have_ended_and_begins_none_before():
    turns = Turns(By.STAGE)
    a, b = Turn(turns, "a"), Turn(turns, "b")
    for stage in ("rollout", "train"):
        a.own.ask(stage)
        assert a.own.grants(stage)
    b.own.ask("rollout")
    a.own.done("train", step_over=True)
    a.own.ask("train")
    assert not a.own.grants("train")
    assert not b.own.grants("rollout")
    a.own.done("rollout")
    assert b.own.grants("rollout")
    b.own.done("rollout")
    assert a.woken == 1
    assert a.own.grants("train")


def test_what_waits_for_the_next_turn_begins_when_there_are_no_turns_any_more():
    turns = Turns(By.STAGE)
    a = Turn(turns, "a")
    for stage in ("rollout", "train"):
        a.own.ask(stage)
        assert a.own.grants(stage)
    a.own.done("rollout")
    a.own.ask("rollout")
    assert not a.own.grants("rollout"), "it is to let go first, when its training has ended"
    turns.change(By.NOTHING)
    assert a.own.grants("rollout")


def test_what_was_asked_for_and_dropped_is_not_granted_and_gives_the_turn_to_others():
    turns = Turns(By.STEP)
    a, b = Turn(turns, "a"), Turn(turns, "b")
    a.own.ask("rollout")
    assert a.own.grants("rollout")
    b.own.ask("rollout")
    a.own.ask("train")
    a.own.forget()
    assert not a.own.grants("train")
    assert b.own.grants("rollout")
