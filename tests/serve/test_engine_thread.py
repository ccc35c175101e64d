"""The thread that owns the engine: one bad request, one bad step, and the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from engine.engine_models import Script, make_engine, request
from longtail.core.types import Request
from longtail.engine.engine import Engine
from longtail.serve.engine_thread import EngineThread, Run
from longtail.serve.errors import ApiError


class Moody(Script):
    """Says t + 1 after t. Fails in the next ``failures`` steps that compute a token of ``poison``; with the ``gate``
    closed, steps after the first ``free_steps`` do not end."""

    poison = 13

    def __init__(self) -> None:
        super().__init__(50)
        self.failures = 0
        self.gate = threading.Event()
        self.gate.set()
        self.steps = self.free_steps = 0

    async def held(self) -> None:
        """Until a step waits for the gate."""
        while self.steps <= self.free_steps:
            await asyncio.sleep(0.001)

    def forward(self, tokens_T, attend):
        self.steps += 1
        if self.steps > self.free_steps:
            assert self.gate.wait(120)
        if self.failures and (tokens_T == self.poison).any():
            self.failures -= 1
            raise ValueError("boom")
        return super().forward(tokens_T, attend)


def with_thread(use: Callable[[EngineThread, Moody], Awaitable[None]], **options) -> None:
    model = Moody()
    engines: list[Engine] = []

    def make() -> Engine:
        engines.append(make_engine(model, **options))
        return engines[-1]

    async def main() -> None:
        thread = EngineThread(make)
        await thread.start()
        try:
            async with asyncio.timeout(200):
                await use(thread, model)
        finally:
            model.gate.set()
            await thread.close()

    asyncio.run(main())
    assert engines[-1].lanes.used == 0 or engines[-1].has_work  # nothing but what a shutdown cut off


def counting(name: str, start: int, **params) -> Request:
    return request(name, np.array([start], np.int32), **{"temperature": 0, "max_tokens": 5, **params})


async def tokens(run: Run) -> dict[tuple[int, int], list[int]]:
    """Of each sample, until all have ended; their completions must say the same."""
    found: dict[tuple[int, int], list[int]] = {}
    while run.open:
        news = await run.news()
        for position, emitted in news.emitted:
            found.setdefault((position, emitted.sample), []).append(emitted.token)
        for position, completion in news.completions:
            assert found[position, completion.sample] == completion.tokens.tolist()
    return found


def test_runs_get_their_own_tokens_in_order():
    async def use(thread, model):
        runs = [thread.submit([counting(f"{i}.{j}", 10 * i + j, samples=2) for j in range(2)]) for i in range(4)]
        for i, found in enumerate(await asyncio.gather(*map(tokens, runs))):
            assert found == {(j, s): list(range(10 * i + j + 1, 10 * i + j + 6)) for j in range(2) for s in range(2)}

    with_thread(use, max_running=3)


def test_a_request_that_the_engine_refuses_fails_alone():
    async def use(thread, model):
        good = thread.submit([counting("good", 1)])
        bad = thread.submit([counting("fine", 2), counting("bad", 99)])
        with pytest.raises(ApiError, match=r"^token id 99 is outside the vocabulary \(0 to 49\)") as caught:
            await tokens(bad)
        assert caught.value.status == 400
        assert await tokens(good) == {(0, 0): [2, 3, 4, 5, 6]}

    with_thread(use)


def test_a_failed_step_fails_what_was_running_and_the_engine_goes_on():
    async def use(thread, model):
        model.failures = 1
        model.gate.clear()
        running = [thread.submit([counting("poisoned", 12)]), thread.submit([counting("beside it", 30, max_tokens=40)])]
        await model.held()
        model.gate.set()
        for run in running:
            with pytest.raises(ApiError) as caught:
                await tokens(run)
            assert (caught.value.status, caught.value.code) == (500, "engine_failure")
        assert await tokens(thread.submit([counting("after", 12)])) == {(0, 0): [13, 14, 15, 16, 17]}
        assert thread.healthy

    with_thread(use)


def test_three_failures_without_a_token_between_them_are_unhealthy_until_there_is_a_token():
    async def use(thread, model):
        async def fail():
            model.failures = 1
            with pytest.raises(ApiError):
                await tokens(thread.submit([counting("bad", model.poison)]))

        for i in range(2):
            await fail()
            assert thread.healthy, i
        await tokens(thread.submit([counting("good", 1)]))
        for _ in range(2):
            await fail()
        assert thread.healthy
        await fail()
        assert not thread.healthy
        assert thread.alive
        await tokens(thread.submit([counting("good", 1)]))
        assert thread.healthy

    with_thread(use)


def test_a_cancelled_run_has_no_lanes_in_the_next_step():
    async def use(thread, model):
        model.free_steps = 1
        model.gate.clear()
        gone = thread.submit([counting("gone", 1, max_tokens=400, samples=3)])
        await gone.news()
        await model.held()
        gone.cancel()
        after = thread.submit([counting("after", 20, max_tokens=3)])
        model.gate.set()
        assert await tokens(after) == {(0, 0): [21, 22, 23]}
        while thread.load.running:
            await asyncio.sleep(0.001)
        assert thread.load.blocks_used == 0
        gone.cancel()

    with_thread(use)


def test_a_run_that_is_cancelled_before_the_engine_has_seen_it_never_starts():
    async def use(thread, model):
        model.gate.clear()
        first = thread.submit([counting("first", 1)])
        await model.held()
        never = thread.submit([counting("never", model.poison)])
        never.cancel()
        model.failures = 1
        model.gate.set()
        assert await tokens(first) == {(0, 0): [2, 3, 4, 5, 6]}
        assert model.failures == 1

    with_thread(use)


def test_closing_ends_what_runs_with_an_error():
    async def use(thread, model):
        model.free_steps = 1
        model.gate.clear()
        run = thread.submit([counting("long", 1, max_tokens=400)])
        await run.news()
        await model.held()
        closing = asyncio.create_task(thread.close())
        await asyncio.sleep(0)
        model.gate.set()
        await closing
        with pytest.raises(ApiError) as caught:
            await tokens(run)
        assert (caught.value.status, caught.value.code) == (503, "shutting_down")
        assert not thread.healthy
        with pytest.raises(ApiError) as caught:
            thread.submit([counting("late", 1)])
        assert caught.value.status == 503

    with_thread(use)


def test_an_engine_that_cannot_be_made_says_so_at_the_start_or_ends_everything_later():
    made: list[Engine] = []
    model = Moody()

    def make() -> Engine:
        if made:
            raise MemoryError("no room")
        made.append(make_engine(model))
        return made[0]

    async def main() -> None:
        thread = EngineThread(make)
        await thread.start()
        model.failures = 1
        async with asyncio.timeout(200):
            for _ in range(2):
                with pytest.raises(ApiError):
                    await tokens(thread.submit([counting("bad", model.poison)]))
            while thread.alive:
                await asyncio.sleep(0.001)
        assert not thread.healthy
        await thread.close()
        with pytest.raises(MemoryError, match="no room"):
            await EngineThread(make).start()

    asyncio.run(main())
