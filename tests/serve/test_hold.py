"""Holding back: the window is kept, everybody gets a turn once, and cancelling at any moment loses nothing."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.serve.hold import Draining, Hold
from longtail.serve.queue import FairQueue, QueueFull

WITHIN_S = 30.0


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Room:
    """A hold with a window that can be set, and what has happened in it."""

    window: float = 1
    max_wait_s: float | None = None
    limit: int = 1000
    clock: Clock = field(default_factory=Clock)
    started: list[str] = field(default_factory=list)
    ends: dict[str, asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hold = Hold(FairQueue(limit=self.limit, max_wait_s=self.max_wait_s), lambda: self.window, self.clock)

    def request(
        self, name: str, *, client="a", weight=1.0, deadline_s=0.0, cost=1.0, places=1, cap=None, tokens=None
    ) -> asyncio.Task[float]:
        """One that runs until :meth:`end`; its result is how long it waited."""
        self.ends[name] = asyncio.Event()

        async def run() -> float:
            async with self.hold.turn(client, weight, deadline_s, cost, places, cap) as turn:
                self.started.append(name)
                await self.ends[name].wait()
                if tokens is not None:
                    turn.settle(tokens)
                return turn.waited_s

        return asyncio.create_task(run(), name=name)

    def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()


async def still() -> None:
    """Let everything happen that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def play(scene, **room):
    async def main():
        there = Room(**room)
        await asyncio.wait_for(scene(there), WITHIN_S)
        assert there.hold.in_flight == 0
        assert len(there.hold.queue) == 0
        assert not there.hold._waiters
        assert not there.hold._caps

    asyncio.run(main())


def test_requests_go_by_deadline_as_places_become_free():
    async def scene(room: Room) -> None:
        tasks = [room.request(n, deadline_s=d) for n, d in (("first", 9.0), ("late", 5.0), ("soon", 1.0))]
        await still()
        assert room.started == ["first"]
        assert room.hold.in_flight == 1
        room.end("first")
        await still()
        assert room.started == ["first", "soon"]
        room.end("soon", "late")
        await asyncio.gather(*tasks)
        assert room.started == ["first", "soon", "late"]

    play(scene)


def test_the_time_that_was_waited_is_known():
    async def scene(room: Room) -> None:
        one, two = room.request("one"), room.request("two")
        await still()
        room.clock.now_s = 2.5
        assert room.hold.oldest_s() == 2.5
        room.end("one", "two")
        assert await one == 0.0
        assert await two == 2.5
        assert room.hold.oldest_s() is None

    play(scene)


def test_the_window_counts_samples():
    async def scene(room: Room) -> None:
        tasks = [room.request(n, places=p) for n, p in (("a", 3), ("b", 2), ("c", 1))]
        await still()
        assert room.started == ["a"]  # b does not fit, and c must not starve it
        assert room.hold.in_flight == 3
        room.end("a")
        await still()
        assert room.started == ["a", "b", "c"]
        assert room.hold.in_flight == 3
        room.end("b", "c")
        await asyncio.gather(*tasks)

    play(scene, window=4)


def test_a_request_that_is_larger_than_the_window_runs_alone():
    async def scene(room: Room) -> None:
        tasks = [room.request(n, places=p) for n, p in (("small", 1), ("huge", 50), ("next", 1))]
        await still()
        assert room.started == ["small"]
        room.end("small")
        await still()
        assert room.started == ["small", "huge"]
        room.end("huge")
        await still()
        assert room.started == ["small", "huge", "next"]
        room.end("next")
        await asyncio.gather(*tasks)

    play(scene, window=4)


def test_nobody_goes_while_nobody_can_answer_and_release_ends_that():
    async def scene(room: Room) -> None:
        tasks = [room.request("a"), room.request("b", places=9)]
        await still()
        assert room.started == []
        room.window = 2
        room.hold.release()
        await still()
        assert room.started == ["a"]
        room.end("a", "b")
        await asyncio.gather(*tasks)

    play(scene, window=0)


def test_an_infinite_window_holds_nobody_back():
    async def scene(room: Room) -> None:
        tasks = [room.request(str(i), places=100) for i in range(50)]
        await still()
        assert len(room.started) == 50
        room.end(*room.started)
        await asyncio.gather(*tasks)

    play(scene, window=float("inf"))


def test_a_client_with_too_many_in_flight_waits_and_stops_nobody():
    async def scene(room: Room) -> None:
        tasks = [room.request(f"a{i}", client="a", cap=2, places=2) for i in range(4)]
        tasks.append(room.request("b0", client="b", deadline_s=100.0))
        await still()
        assert room.started == ["a0", "a1", "b0"]
        assert room.hold.in_flight_of("a") == 2
        room.end("a1")
        await still()
        assert room.started == ["a0", "a1", "b0", "a2"]
        room.end("a0", "a2", "a3", "b0")
        await asyncio.gather(*tasks)
        assert room.hold.in_flight_of("a") == 0

    play(scene, window=100)


def test_who_waited_too_long_is_let_go_first_and_says_so():
    async def scene(room: Room) -> None:
        overdue = {}

        async def one(name: str, deadline_s: float) -> None:
            async with room.hold.turn("a", 1.0, deadline_s, 1.0, 1, None) as turn:
                room.started.append(name)
                overdue[name] = turn.overdue

        runs = room.request("runs")
        await still()
        tasks = [asyncio.create_task(one("long", 1000.0))]
        await still()
        room.clock.now_s = 11.0
        tasks.append(asyncio.create_task(one("short", 0.0)))
        await still()
        room.end("runs")
        await asyncio.gather(runs, *tasks)
        assert room.started == ["runs", "long", "short"]
        assert overdue == {"long": True, "short": False}

    play(scene, max_wait_s=10.0)


def test_tokens_that_a_request_took_count_for_its_client():
    async def scene(room: Room) -> None:
        tasks = [room.request(f"a{i}", client="a", tokens=30) for i in range(3)]
        tasks += [room.request(f"b{i}", client="b", cost=10) for i in range(4)]
        await still()
        room.end(*room.ends)
        await asyncio.gather(*tasks)
        assert room.started == ["a0", "b0", "b1", "b2", "a1", "b3", "a2"]

    play(scene)


def test_impossible_tokens_are_refused_and_the_places_come_back():
    async def scene(room: Room) -> None:
        task = room.request("a", tokens=-1)
        room.end("a")
        with pytest.raises(ValueError, match="impossible number of tokens"):
            await task

    play(scene)


def test_a_block_that_fails_gives_its_places_back():
    async def scene(room: Room) -> None:
        async def fails() -> None:
            async with room.hold.turn("a", 1.0, 0.0, 1.0, 1, None):
                raise RuntimeError("no answer")

        failing = asyncio.create_task(fails())
        task = room.request("next")
        room.end("next")
        with pytest.raises(RuntimeError, match="no answer"):
            await failing
        await task

    play(scene)


def test_a_waiter_that_is_cancelled_never_runs_and_frees_nothing_that_it_did_not_have():
    async def scene(room: Room) -> None:
        runs, gone, stays = room.request("runs"), room.request("gone"), room.request("stays")
        await still()
        gone.cancel()
        await still()
        assert gone.cancelled()
        assert room.started == ["runs"]
        assert room.hold.in_flight == 1
        assert len(room.hold.queue) == 1
        room.end("runs", "stays")
        await asyncio.gather(runs, stays)
        assert room.started == ["runs", "stays"]

    play(scene)


@pytest.mark.parametrize("release_first", [True, False])
def test_a_release_and_a_cancellation_in_the_same_moment_lose_no_place(release_first):
    async def scene(room: Room) -> None:
        runs, torn, stays = room.request("runs", client="x"), room.request("torn", deadline_s=1), room.request("stays")
        await still()
        stays.cancel()
        await still()
        last = room.request("last", deadline_s=2)
        await still()
        if not release_first:
            torn.cancel()
        room.window = 2
        room.hold.release()  # now `torn` is released, and has not been told yet
        assert room.hold.in_flight == 2
        if release_first:
            torn.cancel()
        await still()
        assert torn.cancelled()
        assert room.started == ["runs", "last"]
        assert room.hold.in_flight == 2
        room.end("runs", "last")
        await asyncio.gather(runs, last)

    play(scene)


def test_a_released_request_that_is_cancelled_before_it_starts_costs_its_client_nothing():
    async def scene(room: Room) -> None:
        runs = room.request("runs", client="x")
        tasks = [room.request("a0", client="a", cost=1000)]
        tasks += [room.request(f"{c}{i}", client=c, cost=10) for c in "ab" for i in (1, 2)]
        await still()
        room.window = 2
        room.hold.release()
        tasks[0].cancel()
        room.end(*room.ends)
        await asyncio.gather(runs, *tasks[1:])
        assert sorted(room.started[1:3]) == ["a1", "b1"]

    play(scene)


def test_draining_refuses_who_is_new_and_serves_who_waits():
    async def scene(room: Room) -> None:
        tasks = [room.request("runs"), room.request("waits")]
        await still()
        room.hold.drain()
        with pytest.raises(Draining):
            await room.request("new")
        room.end("runs", "waits")
        await asyncio.gather(*tasks)
        assert room.started == ["runs", "waits"]

    play(scene)


def test_a_full_queue_refuses_and_running_requests_do_not_fill_it():
    async def scene(room: Room) -> None:
        tasks = [room.request(str(i)) for i in range(4)]
        await still()
        assert room.started == ["0", "1"]
        with pytest.raises(QueueFull):
            await room.request("4")
        room.end(*"0123")
        await asyncio.gather(*tasks)

    play(scene, window=2, limit=2)


@dataclass(frozen=True)
class Plan:
    """A request of the random test; ``cancel_at`` counts steps of the event loop from its start."""

    begin_at: int
    client: str
    deadline_s: float
    places: int
    steps: int
    cancel_at: int | None
    fails: bool


plans = st.builds(
    Plan,
    begin_at=st.integers(0, 12),
    client=st.sampled_from("abc"),
    deadline_s=st.floats(0, 5),
    places=st.integers(1, 6),
    steps=st.integers(0, 5),
    cancel_at=st.one_of(st.none(), st.integers(0, 12)),
    fails=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(plans, min_size=1, max_size=25),
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.sampled_from([None, 0.0, 3.0]),
)
def test_whatever_is_cancelled_or_fails_everybody_else_runs_once_within_the_window(given_, windows, max_wait_s):
    runs: Counter[int] = Counter()
    caps = {"a": 1, "b": 3, "c": None}

    async def main() -> None:
        room = Room(window=windows[0], max_wait_s=max_wait_s)
        at_work: dict[int, int] = {}
        largest_window = max(*windows, 5)

        async def one(i: int, plan: Plan) -> None:
            for _ in range(plan.begin_at):
                await asyncio.sleep(0)
            turn = room.hold.turn(plan.client, 1.0, plan.deadline_s, 1.0, plan.places, caps[plan.client])
            async with turn:
                runs[i] += 1
                at_work[i] = plan.places
                try:
                    total = sum(at_work.values())
                    assert total <= room.hold.in_flight
                    assert total <= largest_window or len(at_work) == 1
                    cap = caps[plan.client]
                    assert cap is None or sum(given_[j].client == plan.client for j in at_work) <= cap
                    for _ in range(plan.steps):
                        await asyncio.sleep(0)
                    if plan.fails:
                        raise RuntimeError
                finally:
                    del at_work[i]

        async def cancel(task: asyncio.Task[None], after: int) -> None:
            for _ in range(after):
                await asyncio.sleep(0)
            task.cancel()

        tasks = [asyncio.create_task(one(i, plan)) for i, plan in enumerate(given_)]
        cancels = [
            asyncio.create_task(cancel(task, plan.cancel_at))
            for task, plan in zip(tasks, given_, strict=True)
            if plan.cancel_at is not None
        ]
        for window in [*windows, 5]:
            grows = window > room.window
            room.window = window
            room.clock.now_s += 1.0
            if grows:
                room.hold.release()
            for _ in range(3):
                await asyncio.sleep(0)
        results = await asyncio.wait_for(asyncio.gather(*tasks, *cancels, return_exceptions=True), WITHIN_S)
        for i, plan in enumerate(given_):
            assert runs[i] <= 1
            if isinstance(results[i], asyncio.CancelledError):
                assert plan.cancel_at is not None
            else:
                assert runs[i] == 1
                assert isinstance(results[i], RuntimeError) if plan.fails else results[i] is None
        assert room.hold.in_flight == 0
        assert all(room.hold.in_flight_of(client) == 0 for client in caps)
        assert len(room.hold.queue) == 0
        assert not room.hold._waiters

    asyncio.run(main())
