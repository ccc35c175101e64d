"""Does a server heed priorities: what it says, and what the order of its answers shows (a small simulated server)."""

from __future__ import annotations

import asyncio
import heapq
import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.serve.policy import MIN_PAIRS, OrderWatch, PolicyFound, probe

URL = "http://gpu1:8000"


def ask(pages: dict[str, Any], **settings: Any) -> PolicyFound:
    """Probe a server that has these pages: JSON, bytes as they are, or an exception."""
    asked: list[str] = []

    async def get(path: str) -> tuple[int, bytes]:
        asked.append(path)
        page = pages.get(path)
        if isinstance(page, Exception):
            raise page
        if page is None:
            return 404, b'{"detail": "Not Found"}'
        return 200, page if isinstance(page, bytes) else json.dumps(page).encode()

    found = asyncio.run(probe(URL, get, **settings))
    assert len(asked) <= 3
    assert URL in found.message
    return found


def vllm(policy: Any) -> dict[str, Any]:
    return {"/server_info?config_format=json": {"vllm_config": {"scheduler_config": {"policy": policy}}}}


def models(owner: str) -> dict[str, Any]:
    return {"/v1/models": {"object": "list", "data": [{"id": "m", "owned_by": owner}]}}


def sglang(path: str = "/server_info?config_format=json", **changed: Any) -> dict[str, Any]:
    defaults = {
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": False,
        "abort_on_priority_when_disabled": False,
        "schedule_low_priority_values_first": False,
        "disable_priority_preemption": False,
        "priority_scheduling_preemption_threshold": 10,
        "enable_metrics": False,
    }
    return {path: {**defaults, **changed}}


def test_a_vllm_that_runs_fcfs_is_named_in_the_words_of_the_manual():
    found = ask(vllm("fcfs"))
    assert (found.server, found.heeds, found.warn) == ("vllm", False, True)
    assert found.message == (
        "vLLM at http://gpu1:8000 runs --scheduling-policy fcfs: priorities are ignored there. "
        "Restart it with 'priority', or use --mode hold."
    )


def test_a_vllm_that_runs_priority_heeds_priorities():
    found = ask(vllm("priority"))
    assert (found.server, found.heeds, found.warn) == ("vllm", True, False)


@pytest.mark.parametrize(
    "pages", [models("vllm"), vllm(None), {"/server_info?config_format=json": {"vllm_config": "x"}}]
)
def test_a_vllm_that_does_not_say_is_unknown_and_the_message_says_what_to_check(pages):
    found = ask(pages)
    assert (found.server, found.heeds, found.warn) == ("vllm", None, True)
    assert "--scheduling-policy priority" in found.message


@pytest.mark.parametrize("path", ["/server_info?config_format=json", "/get_server_info"])
def test_an_sglang_without_priority_scheduling_ignores_priorities(path):
    found = ask(sglang(path))
    assert (found.server, found.heeds) == ("sglang", False)
    assert "without --enable-priority-scheduling: priorities are ignored there" in found.message


ON = {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}
CALM = {**ON, "disable_priority_preemption": True}


@pytest.mark.parametrize(
    ("changed", "heeds", "says"),
    [
        ({"abort_on_priority_when_disabled": True}, False, "priorities are refused there"),
        ({"enable_priority_scheduling": True}, False, "--schedule-low-priority-values-first"),
        (ON, True, "preempts running requests if priorities differ by more than 10"),
        ({**CALM, "enable_metrics": True}, True, "its memory grows"),
        ({**ON, "enable_metrics": True}, True, "and it keeps a series of metrics"),
    ],
)
def test_an_sglang_whose_settings_do_harm_is_warned_of(changed, heeds, says):
    found = ask(sglang(**changed))
    assert (found.server, found.heeds, found.warn) == ("sglang", heeds, True)
    assert says in found.message


@pytest.mark.parametrize("changed", [CALM, {**ON, "priority_scheduling_preemption_threshold": 60_000}])
def test_an_sglang_that_orders_by_priority_and_preempts_nobody_is_fine(changed):
    found = ask(sglang(**changed))
    assert (found.heeds, found.warn) == (True, False)


def test_what_counts_as_preempting_depends_on_the_head_start():
    changed = {**ON, "priority_scheduling_preemption_threshold": 60_000}
    assert ask(sglang(**changed), head_start_s=100.0).warn


@pytest.mark.parametrize(
    "pages",
    [
        {},
        models("me"),
        {"/server_info?config_format=json": b"<html>", "/v1/models": b"\xff"},
        {"/server_info?config_format=json": [1], "/v1/models": {"data": [3]}},
        {"/v1/models": {"data": {}}},
        {
            "/server_info?config_format=json": ConnectionError(),
            "/get_server_info": TimeoutError(),
            "/v1/models": OSError(),
        },
    ],
)
def test_any_other_server_is_unknown(pages):
    found = ask(pages)
    assert (found.server, found.heeds, found.warn) == ("unknown", None, True)
    assert "--mode hold" in found.message


# A simulated server: `slots` requests at once; the others wait, in order of arrival or of deadline.


@dataclass(order=True)
class Event:
    at_s: float
    number: int
    kind: str = field(compare=False)
    call: int = field(compare=False)


def simulate(
    watch: OrderWatch,
    *,
    by_deadline: bool,
    slots: int,
    rate: float,
    calls: int = 400,
    head_start_s: float = 60.0,
    seed: int = 0,
    prefill_s: tuple[float, float] = (0.05, 0.15),
) -> OrderWatch:
    """Poisson arrivals; a call takes its prefill until its first token, and then 0.5 to 8 s."""
    rng = random.Random(seed)
    arrival_s, deadline_s, now_s = [], [], 0.0
    for _ in range(calls):
        now_s += rng.expovariate(rate)
        arrival_s.append(now_s)
        deadline_s.append(now_s + head_start_s * rng.random())
    events = [Event(at_s, i, "arrive", i) for i, at_s in enumerate(arrival_s)]
    heapq.heapify(events)
    waiting: list[int] = []
    free, number = slots, calls
    while events:
        event = heapq.heappop(events)
        call = event.call
        if event.kind == "arrive":
            watch.sent(str(call), arrival_s[call], deadline_s[call])
            waiting.append(call)
        elif event.kind == "first":
            watch.first_token(str(call), event.at_s)
            number += 1
            heapq.heappush(events, Event(event.at_s + rng.uniform(0.5, 8), number, "end", call))
        else:
            watch.gone(str(call))
            free += 1
        waiting.sort(key=lambda i: deadline_s[i] if by_deadline else arrival_s[i])
        while free and waiting:
            free -= 1
            number += 1
            heapq.heappush(events, Event(event.at_s + rng.uniform(*prefill_s), number, "first", waiting.pop(0)))
    return watch


@pytest.mark.parametrize("slots", [2, 8, 32])
@pytest.mark.parametrize("seed", range(3))
def test_a_full_server_that_serves_in_order_of_arrival_is_found_out(slots, seed):
    watch = simulate(OrderWatch(), by_deadline=False, slots=slots, rate=1.3 * slots / 4.3, seed=seed)
    assert watch.pairs >= MIN_PAIRS
    assert watch.ignored is True


@pytest.mark.parametrize("slots", [2, 8, 32])
@pytest.mark.parametrize("seed", range(3))
def test_a_full_server_that_serves_by_deadline_is_not_accused(slots, seed):
    watch = simulate(OrderWatch(), by_deadline=True, slots=slots, rate=1.3 * slots / 4.3, seed=seed)
    assert watch.pairs >= MIN_PAIRS
    assert watch.ignored is False
    assert watch.overtakes > 0.8 * watch.pairs


@pytest.mark.parametrize("by_deadline", [False, True])
def test_a_queue_that_is_hundreds_deep_hides_nothing(by_deadline):
    watch = simulate(OrderWatch(), by_deadline=by_deadline, slots=64, rate=3 * 64 / 4.3, calls=1200)
    assert watch.ignored is (not by_deadline)


@pytest.mark.parametrize("by_deadline", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_without_a_queue_nothing_can_be_told(by_deadline, seed):
    watch = simulate(OrderWatch(), by_deadline=by_deadline, slots=1000, rate=8, seed=seed)
    assert watch.ignored is None


@pytest.mark.parametrize("seed", range(3))
def test_slow_prefills_on_a_server_with_room_are_not_taken_for_a_queue(seed):
    watch = simulate(OrderWatch(), by_deadline=False, slots=1000, rate=4, seed=seed, prefill_s=(0.1, 3.0))
    assert watch.ignored is not True


def test_without_a_head_start_there_is_nothing_to_tell():
    watch = simulate(OrderWatch(), by_deadline=False, slots=2, rate=1, head_start_s=0.0)
    assert (watch.pairs, watch.ignored) == (0, None)


def full_server() -> OrderWatch:
    """It has run two calls at once, the first of which has ended."""
    watch = OrderWatch()
    for warm in ("a", "b"):
        watch.sent(warm, 0.0, 0.0)
        watch.first_token(warm, 0.1)
    watch.gone("a")
    return watch


def test_one_first_token_is_at_most_one_pair_of_each_kind():
    watch = full_server()
    for i in range(50):
        watch.sent(str(i), 1.0 + i / 100, 100.0 - i)
    for i in range(3):
        watch.first_token(str(i), 10.0 + i)
        watch.gone(str(i))
    assert (watch.pairs, watch.overtakes) == (2, 0)


def test_calls_that_begin_while_the_server_runs_ever_more_at_once_were_not_queueing():
    watch = OrderWatch()
    for i in range(100):
        watch.sent(str(i), i / 100, 200.0 - i)
    for i in range(100):
        watch.first_token(str(i), 2.0 + i)
    assert watch.pairs == 0


@pytest.mark.parametrize(("apart_s", "pairs"), [(0.01, 0), (0.2, 1)])
def test_first_tokens_of_the_same_step_have_no_order(apart_s, pairs):
    watch = full_server()
    watch.sent("early", 1.0, 50.0)
    watch.sent("late", 1.1, 40.0)
    watch.first_token("late", 9.0)
    watch.gone("b")
    watch.first_token("early", 9.0 + apart_s)
    assert (watch.pairs, watch.overtakes) == (pairs, pairs)


def test_calls_that_are_gone_before_their_first_token_count_for_nothing():
    watch = simulate(OrderWatch(), by_deadline=False, slots=2, rate=0.3, calls=20)
    pairs = watch.pairs
    for i in range(200):
        watch.sent(f"left-{i}", 1000.0 + i, 1000.0)
        watch.gone(f"left-{i}")
        watch.first_token(f"left-{i}", 2000.0)
    assert watch.pairs == pairs


EVENTS = st.lists(
    st.tuples(st.sampled_from(["sent", "first", "gone"]), st.integers(0, 30), st.floats(0, 50), st.floats(0, 100)),
    max_size=200,
)


@given(EVENTS)
@settings(deadline=None)
def test_any_order_of_events_is_taken_with_bounded_memory(events):
    watch = OrderWatch(most=1)
    now_s = 0.0
    for kind, call, step_s, head_start_s in events:
        now_s += step_s
        if kind == "sent":
            watch.sent(str(call), now_s, now_s + head_start_s)
        elif kind == "first":
            watch.first_token(str(call), now_s)
        else:
            watch.gone(str(call))
        assert 0 <= watch.overtakes <= watch.pairs
        assert len(watch._waiting) <= 16
        assert len(watch._begun) <= 1
    for call in range(31):
        watch.gone(str(call))
    assert not watch._waiting
    assert not watch._running
