"""What the planner decides about sharing is carried out, and nothing is decided where there is nothing to share."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from longtail.cluster.messages import Shares
from longtail.core.config import SharingPolicy
from longtail.core.events import Planned, StepEnded
from longtail.planner.state import Mode, Relocation, Sharing, Stage
from longtail.runtime import conductor
from longtail.runtime.conductor import Conductor
from longtail.runtime.turns import By, Turns


@dataclass
class Clock:
    now: float = 100.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@dataclass
class Driver:
    """As much of a pipeline's driver as the conductor sees."""

    name: str
    stage: str = "rollout"
    step: int = 3
    over: bool = False
    known: bool = True
    begin_on: tuple[int, ...] | None = None
    plan: Any = field(default_factory=lambda: SimpleNamespace(config=SimpleNamespace(priority=1.0)))
    at: SimpleNamespace | None = None
    relocations: list[Relocation] = field(default_factory=list)

    def state(self, now: float) -> Any:
        at = self.at or SimpleNamespace(stage=Stage.TRAIN, workers=(0, 1), degree=1)
        return SimpleNamespace(name=self.name, steps_left=99 - self.step, **vars(at)) if self.known else None

    def relocate(self, relocation: Relocation) -> None:
        self.relocations.append(relocation)


@dataclass
class Planner:
    """Answers with what it was given, and remembers what it was asked."""

    answer: Sharing = field(default_factory=lambda: sharing())
    asked: list[dict[str, Any]] = field(default_factory=list)

    def share(self, state: Any, **how: Any) -> Sharing:
        self.asked.append({"state": state, **how})
        return self.answer


@dataclass
class Scene:
    drivers: dict[str, Driver]
    planner: Planner = field(default_factory=Planner)
    turns: Turns = field(default_factory=Turns)
    clock: Clock = field(default_factory=Clock)
    sent: list[tuple[int, Any]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conductor = Conductor(
            drivers=self.drivers,  # type: ignore[arg-type]
            workers=2,
            policy=SharingPolicy(),
            turns=self.turns,
            send=lambda worker, command: self.sent.append((worker, command)),
            emit=self.events.append,
            clock=self.clock,
        )

    def decide(self, sharing: Sharing) -> None:
        """The planner answers so, and something has changed."""
        self.planner.answer = sharing
        next(iter(self.drivers.values())).step += 1
        self.conductor.turn()

    def step(self, name: str, *, slowdown: float, time_s: float = 1.0) -> None:
        """A second later a step ends that took ``time_s``."""
        self.clock.now += 1.0
        metrics = {"slowdown": slowdown, "time_s": time_s}
        self.conductor.observe(StepEnded(pipeline=name, step=1, metrics=metrics))


@pytest.fixture
def scene(monkeypatch):
    made = Scene({name: Driver(name) for name in ("a", "b")})
    monkeypatch.setattr(conductor, "share", made.planner.share)
    monkeypatch.setattr(conductor, "in_general", lambda state: state)
    monkeypatch.setattr(conductor, "ClusterState", lambda **values: values)
    return made


def sharing(mode: Mode = Mode.SHARE, **values: Any) -> Sharing:
    return Sharing(mode=mode, reason="a test says so", **values)


def test_a_pipeline_alone_is_left_alone(scene):
    del scene.drivers["b"]
    scene.conductor.turn()
    assert scene.planner.asked == []
    assert scene.sent == []
    assert not scene.conductor.contended("a")


def test_a_decision_is_carried_out(scene):
    move = Relocation(pipeline="a", kind="merge", to=(1,), reason="", gain_s=2.0, cost_s=0.1, rest_s=3.0)
    scene.decide(sharing(begin={"a": (0,), "b": (0, 1)}, weights={"a": 2.0, "b": 1.0}, relocations=(move,)))
    assert (scene.drivers["a"].begin_on, scene.drivers["b"].begin_on) == ((0,), (0, 1))
    assert scene.drivers["a"].relocations == [move]
    assert [(w, dict(c.weights)) for w, c in scene.sent if isinstance(c, Shares)] == [(0, {"a": 2.0}), (1, {"a": 2.0})]
    assert [e.mode for e in scene.events if isinstance(e, Planned)] == ["share"]


def test_weights_are_told_only_when_they_change(scene):
    scene.decide(sharing(weights={"a": 2.0, "b": 1.0}))
    scene.decide(sharing(weights={"a": 2.01, "b": 1.0}))
    assert len(scene.sent) == 2
    scene.decide(sharing(weights={"a": 1.0, "b": 1.0}))
    assert len(scene.sent) == 4


def test_to_hold_is_to_take_turns_by_stage_and_to_share_ends_it(scene):
    scene.decide(sharing(Mode.HOLD))
    assert scene.turns.by is By.STAGE
    scene.decide(sharing())
    assert scene.turns.by is By.NOTHING


def test_who_has_the_turn_has_the_workers_to_itself(scene):
    scene.decide(sharing(Mode.HOLD))
    scene.turns.ask("a", lambda: None)
    scene.turns.ask("b", lambda: None)
    assert not scene.conductor.contended("a")
    assert scene.conductor.contended("b")


def test_beside_a_pipeline_that_only_waits_for_scores_groups_form_if_the_planner_says_so(scene):
    scene.drivers["b"].stage = "score"
    scene.decide(sharing())
    assert scene.conductor.contended("a")
    scene.decide(sharing(widens=frozenset("a")))
    assert not scene.conductor.contended("a")


def test_beside_a_pipeline_of_which_nothing_is_known_nothing_is_foretold(scene):
    scene.drivers["b"].known = False
    scene.decide(sharing())
    assert scene.planner.asked[-1]["corun"] == "greedy"
    assert [p.name for p in scene.planner.asked[-1]["state"]["pipelines"]] == ["a"]


def test_predictions_that_keep_being_wrong_are_not_relied_on(scene):
    scene.decide(sharing(rates={"a": 0.5, "b": 0.5}))
    assert scene.planner.asked[-1]["trust"]
    for _ in range(8):
        for name in "ab":
            scene.step(name, slowdown=4.0)
    scene.decide(sharing(rates={"a": 0.5, "b": 0.5}))
    assert not scene.planner.asked[-1]["trust"]
    for _ in range(8):
        for name in "ab":
            scene.step(name, slowdown=2.0)
    scene.decide(sharing(rates={"a": 0.5, "b": 0.5}))
    assert scene.planner.asked[-1]["trust"]


def test_predictions_are_tried_again_after_some_steps_without_any(scene):
    scene.decide(sharing(rates={"a": 0.5, "b": 0.5}))
    for name in "ab":
        scene.step(name, slowdown=8.0)
    scene.decide(sharing())  # as greedy answers: without a prediction
    assert not scene.planner.asked[-1]["trust"]
    for _ in range(8):
        for name in "ab":
            scene.step(name, slowdown=8.0)
    scene.decide(sharing())
    assert scene.planner.asked[-1]["trust"]


def test_in_turns_and_on_the_way_there_and_back_no_prediction_counts_as_wrong(scene):
    """Steps are long or short there as they happen to fall."""
    rates = {"a": 0.5, "b": 0.5}
    scene.decide(sharing(Mode.HOLD, rates=rates))
    for name in "ab":
        scene.step(name, slowdown=20.0)
    scene.decide(sharing(rates=rates))
    assert scene.planner.asked[-1]["trust"]
    for name in "ab":
        scene.step(name, slowdown=20.0, time_s=5.0)  # they had begun in turns
    scene.decide(sharing(rates=rates))
    assert scene.planner.asked[-1]["trust"]
    for _ in range(4):
        for name in "ab":
            scene.step(name, slowdown=20.0)
    scene.decide(sharing(rates=rates))
    assert not scene.planner.asked[-1]["trust"]


def test_a_new_pipeline_does_not_inherit_from_one_of_its_name(scene):
    scene.decide(sharing(rates={"a": 0.5}, weights={"a": 4.0}))
    scene.step("a", slowdown=40.0)
    gone = scene.drivers.pop("a")
    scene.drivers["c"] = Driver("c")
    scene.decide(sharing(weights={"b": 1.0, "c": 1.0}))
    scene.drivers["a"] = Driver(gone.name)
    scene.sent.clear()
    scene.decide(sharing(weights={"a": 4.0, "b": 1.0, "c": 1.0}))
    assert scene.planner.asked[-1]["trust"]
    assert [dict(c.weights) for _, c in scene.sent] == [{"a": 4.0}] * 2


def test_whether_to_hold_is_asked_when_a_step_has_ended_and_not_in_between(scene):
    scene.decide(sharing())
    scene.clock.now += 60.0
    scene.planner.asked.clear()
    scene.conductor.turn()
    assert [asked.get("may_hold", True) for asked in scene.planner.asked] == [False]
    scene.decide(sharing())
    assert [asked.get("may_hold", True) for asked in scene.planner.asked] == [False, True, False]


def test_while_nothing_changes_the_planner_is_asked_now_and_then(scene):
    scene.decide(sharing())
    asked = len(scene.planner.asked)
    scene.conductor.turn()
    assert len(scene.planner.asked) == asked
    scene.clock.now += 60.0
    scene.conductor.turn()
    assert len(scene.planner.asked) == asked + 1


def test_the_last_one_left_gets_everything_back(scene):
    scene.decide(sharing(Mode.HOLD, begin={"a": (0,), "b": (1,)}))
    scene.drivers["b"].over = True
    scene.drivers["a"].at = SimpleNamespace(stage=Stage.TRAIN, workers=(0,), degree=1)
    scene.decide(sharing(begin={"a": (0, 1)}))
    assert scene.drivers["a"].begin_on is None
    assert scene.turns.by is By.NOTHING
    assert not scene.conductor.contended("a")
    asked = len(scene.planner.asked)
    scene.drivers["a"].step += 1
    scene.conductor.turn()
    assert len(scene.planner.asked) == asked, "there is nothing more to decide"


def test_a_rollout_of_the_last_one_left_spreads_over_the_workers_that_got_free(scene):
    scene.decide(sharing(begin={"a": (0,), "b": (1,)}))
    scene.drivers["b"].over = True
    scene.drivers["a"].at = SimpleNamespace(stage=Stage.ROLLOUT, workers=(0,), degree=1)
    move = Relocation(pipeline="a", kind="spread", to=(0, 1), reason="", gain_s=2.0, cost_s=0.1, rest_s=3.0)
    scene.decide(sharing(relocations=(move,)))
    assert scene.drivers["a"].relocations == [move]
    scene.drivers["a"].at = SimpleNamespace(stage=Stage.ROLLOUT, workers=(0, 1), degree=1)
    scene.decide(sharing())
    assert scene.drivers["a"].begin_on is None
