"""Turns: one pipeline at a time, for a stage or a step, first come first served; or everybody at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.runtime.turns import By, Turns


class Begun(list):
    """Who has begun what, in order."""

    def ask(self, turns: Turns, pipeline: str, what: str = "") -> None:
        turns.ask(pipeline, lambda: self.append(pipeline + what))


def test_without_turns_everybody_begins_at_once():
    turns, begun = Turns(), Begun()
    for name in "abc":
        begun.ask(turns, name)
    assert begun == list("abc")
    assert turns.holder is None


def test_a_turn_by_stage_ends_with_the_stage_and_the_first_who_asked_is_next():
    turns, begun = Turns(By.STAGE), Begun()
    for name in "abc":
        begun.ask(turns, name)
    assert begun == ["a"]
    assert (turns.waits("a"), turns.waits("b")) == (False, True)
    turns.stage_done("b")
    assert begun == ["a"], "b has no turn that it could end"
    turns.stage_done("a")
    begun.ask(turns, "a")
    turns.stage_done("b")
    turns.stage_done("c")
    assert begun == list("abca")


def test_a_turn_by_step_lasts_for_all_stages_of_the_step():
    turns, begun = Turns(By.STEP), Begun()
    begun.ask(turns, "a", " rollout")
    begun.ask(turns, "b", " rollout")
    turns.stage_done("a")
    begun.ask(turns, "a", " train")
    turns.stage_done("a")
    assert begun == ["a rollout", "a train"]
    turns.step_done("a")
    assert begun == ["a rollout", "a train", "b rollout"]
    assert turns.holder == "b"


def test_who_has_the_turn_may_begin_another_stage_beside_the_first():
    turns, begun = Turns(By.STAGE), Begun()
    begun.ask(turns, "a", " rollout")
    begun.ask(turns, "b", " rollout")
    begun.ask(turns, "a", " train")
    assert begun == ["a rollout", "a train"]


@pytest.mark.parametrize("by", [By.STAGE, By.STEP])
def test_who_is_forgotten_gives_up_its_turn_and_what_it_asked_for(by):
    turns, begun = Turns(by), Begun()
    begun.ask(turns, "a")
    begun.ask(turns, "b")
    begun.ask(turns, "c")
    turns.forget("b")
    turns.forget("a")
    assert begun == ["a", "c"]
    assert not turns.waits("b")
    turns.forget("nobody")
    assert turns.holder == "c"


def test_when_turns_end_all_who_wait_begin_and_when_they_begin_who_is_at_it_goes_on():
    turns, begun = Turns(By.STEP), Begun()
    for name in "abc":
        begun.ask(turns, name)
    turns.change(By.NOTHING)
    assert begun == list("abc")
    turns.change(By.STAGE)
    assert turns.holder is None
    begun.ask(turns, "b", " again")
    begun.ask(turns, "c", " again")
    assert begun[3:] == ["b again"]
    turns.change(By.STEP)
    turns.stage_done("b")
    assert begun[3:] == ["b again"]
    turns.step_done("b")
    assert begun[3:] == ["b again", "c again"]


def test_what_begins_may_ask_and_end_on_the_spot():
    turns, order = Turns(By.STAGE), []

    def begin(name: str, times: int) -> None:
        order.append(name)
        if times > 1:
            turns.ask(name, lambda: begin(name, times - 1))
        turns.stage_done(name)

    for name in "ab":
        turns.ask(name, lambda name=name: begin(name, 3))
    assert sorted(order) == list("aaabbb")
    assert turns.holder is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["ask", "stage_done", "step_done", "forget"]), st.sampled_from("abcd")),
            st.tuples(st.just("change"), st.sampled_from(list(By))),
        ),
        max_size=60,
    )
)
def test_at_most_one_has_the_turn_and_whoever_asks_gets_it_in_the_end(actions):
    turns, asked, begun, dropped = Turns(), 0, [], 0

    def go(name: str, number: int) -> None:
        assert turns.by is By.NOTHING or turns.holder == name
        begun.append(number)

    for action, value in actions:
        if action == "ask":
            asked += 1
            turns.ask(value, lambda value=value, number=asked: go(value, number))
            continue
        if action == "forget":
            before = len(begun)
            waiting = [entry.pipeline for entry in turns._queue].count(value)
            dropped += waiting
            turns.forget(value)
            assert not turns.waits(value)
            assert turns.by is not By.NOTHING or len(begun) == before
        else:
            getattr(turns, action)(value)
    while turns.holder is not None:
        turns.step_done(turns.holder)
    assert len(set(begun)) == len(begun) == asked - dropped
    assert not any(turns.waits(name) for name in "abcd")
