"""Upstreams that break off or fall silent, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from longtail.serve.calls import CHAT
from longtail.serve.errors import ApiError
from longtail.serve.upstream import Timeouts
from serve.fake_upstream import FakeUpstream, Plan, Request, event, split, whole_answer
from serve.upstream_tools import BUSY, PATIENT, call, content, error_code, gateway, made, refused, run, settled


@pytest.mark.parametrize("ending", ["reset", "cut", "bad_chunk"])
@pytest.mark.parametrize("half", [False, True])
def test_a_stream_that_breaks_ends_with_an_error_event_and_is_not_repeated(ending: Any, half: bool) -> None:
    async def body() -> None:
        plan = Plan(ending=ending, after=3, half=half, gap_s=0.02)
        async with FakeUpstream(plan) as a, FakeUpstream() as b, gateway(a, b) as gate:
            asked = call(stream=True)
            reply = await gate.answer(asked)
            got = await content(reply)
            whole = b"".join(made(plan, asked)[:3])
            assert got.startswith(whole)
            assert error_code(got.removeprefix(whole)) == "upstream_cut"
            assert b"[DONE]" not in got
            assert (reply.outcome.failure, reply.outcome.streamed_tokens) == ("cut", 3)
            assert reply.outcome.output_tokens is None
            assert gate.reports == [(a.url, "cut")]
            assert b.requests == []
            a.plan = Plan()
            for _ in range(4):
                await content(await gate.answer(asked))
            await settled(a, b)
            assert a.count("answered") + b.count("answered") == 4
            assert a.requests[0].connection not in {r.connection for r in a.requests[1:]}

    run(body())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ending", ["reset", "cut"])
def test_a_connection_that_breaks_before_any_byte_moves_the_call(stream: bool, ending: Any) -> None:
    async def body() -> None:
        async with FakeUpstream(Plan(ending=ending)) as a, FakeUpstream() as b, gateway(a, b) as gate:
            a.health = 503
            asked = call(stream=stream)
            reply = await gate.answer(asked)
            expected = whole_answer(CHAT, asked.fields, Plan())
            assert await content(reply) == (b"".join(made(Plan(), asked)) if stream else expected)
            assert reply.outcome.upstream == b.url
            assert gate.reports == [(a.url, "cut")]
            assert [u["up"] for u in gate.status()["upstreams"]] == [False, True]
            assert (len(a.requests), len(b.requests)) == (1, 1)

    run(body())


def test_a_stream_that_breaks_after_its_headers_only_moves_too() -> None:
    async def body() -> None:
        for ending in ("reset", "cut", "stop"):
            plan = Plan(ending=ending, after=0, pause_s=0.05)
            async with FakeUpstream(plan) as a, FakeUpstream() as b, gateway(a, b) as gate:
                asked = call(stream=True)
                assert await content(await gate.answer(asked)) == b"".join(made(Plan(), asked))
                assert (len(a.requests), len(b.requests)) == (1, 1)

    run(body())


@pytest.mark.parametrize("ending", ["reset", "cut"])
def test_half_of_a_whole_answer_reaches_nobody(ending: Any) -> None:
    async def body() -> None:
        async with FakeUpstream(Plan(ending=ending, after=40)) as a, FakeUpstream() as b:
            async with gateway(a, b) as gate:
                reply = await gate.answer(call())
                assert await content(reply) == whole_answer(CHAT, call().fields, Plan())
                assert reply.outcome.upstream == b.url
            async with gateway(a) as gate:
                error = await refused(gate.answer(call()))
                assert (error.status, error.code) == (502, "upstream_cut")
                assert gate.kinds == ["cut"]

    run(body())


def test_a_body_that_ends_with_the_connection_is_whole_or_cut() -> None:
    async def body() -> None:
        async with FakeUpstream() as fake, gateway(fake) as gate:
            fake.script(Plan(measured=False), Plan(measured=False, ending="cut", after=40))
            assert json.loads(await content(await gate.answer(call())))
            assert (await refused(gate.answer(call()))).code == "upstream_cut"
            fake.script(Plan(measured=False), Plan(measured=False, ending="cut", after=2))
            asked = call(stream=True)
            assert await content(await gate.answer(asked)) == b"".join(made(Plan(), asked))
            assert b"upstream_cut" in await content(await gate.answer(asked))

    run(body())


def test_an_error_event_passes_through_and_is_told_as_a_failure() -> None:
    async def body() -> None:
        events = [event({"choices": [{"index": 0, "delta": {"content": "a"}}]}), event({"error": {"message": "oom"}})]
        for ending in ("stop", "cut"):
            plan = Plan(events=events, ending=ending, after=2)
            async with FakeUpstream(plan) as a, FakeUpstream() as b, gateway(a, b) as gate:
                reply = await gate.answer(call(stream=True))
                assert await content(reply) == b"".join(events)
                assert reply.outcome.failure == "engine"
                assert gate.kinds == ["engine"]
                assert b.requests == []

    run(body())


def test_a_stream_may_end_without_done_or_break_after_it_but_not_end_without_a_finish_reason() -> None:
    async def body() -> None:
        async with FakeUpstream() as fake, gateway(fake) as gate:
            asked = call(stream=True)
            events = made(Plan(), asked)
            fake.script(
                Plan(ending="stop", after=6), Plan(ending="cut", after=len(events)), Plan(ending="stop", after=5)
            )
            reply = await gate.answer(asked)
            assert (await content(reply), reply.outcome.finish) == (b"".join(events[:6]), "stop")
            reply = await gate.answer(asked)
            assert (await content(reply), reply.outcome.failure) == (b"".join(events), None)
            reply = await gate.answer(asked)
            got = await content(reply)
            assert got.startswith(b"".join(events[:5]))
            assert error_code(got.removeprefix(b"".join(events[:5]))) == "upstream_cut"
            assert reply.outcome.failure == "cut"

    run(body())


def test_a_kept_connection_that_the_server_has_given_up_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtail.serve.upstream.STALE_S", 600)
    monkeypatch.setattr("longtail.serve.upstreams.KEEP_ALIVE_S", 600)

    async def body() -> None:
        async with FakeUpstream() as fake, gateway(fake) as gate:
            fake.script(Plan(), Plan(ending="cut"), Plan())
            for _ in range(2):
                assert (await gate.answer(call())).status == 200
            await settled(fake)
            assert [r.state for r in fake.requests] == ["answered", "broken", "answered"]
            assert [r.connection for r in fake.requests][0:2] == [fake.requests[0].connection] * 2
            assert gate.reports == []

    run(body())


def test_the_beginning_of_an_event_that_grows_out_of_bounds_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtail.serve.relay.LONGEST_EVENT_BYTES", 1000)
    long = event({"choices": [{"index": 0, "delta": {"content": "x" * 50_000}}]})
    pieces = split(long, random.Random(1))

    async def body() -> None:
        async with FakeUpstream() as fake, gateway(fake) as gate:
            asked = call(stream=True)
            tail = made(Plan(), asked)
            fake.script(
                Plan(events=[*pieces, *tail], gap_s=0.002), Plan(events=pieces, gap_s=0.002, ending="cut", after=30)
            )
            assert await content(await gate.answer(asked)) == long + b"".join(tail)
            got = await content(await gate.answer(asked))
            begun, _, last = got.rpartition(b"\n\ndata: ")
            assert len(begun) > 1000
            assert long.startswith(begun)
            assert error_code(b"data: " + last) == "upstream_cut"

    run(body())


def test_a_long_silence_before_the_first_byte_and_pauses_are_no_failure() -> None:
    at_once = [b"".join(made(Plan(), call(stream=True)))]
    plans = [Plan(wait_s=0.7, events=at_once), Plan(pause_s=0.7, events=at_once)]

    async def silences() -> None:
        fake = FakeUpstream(lambda request: plans[int(request.header("x-request-id") or 0)])
        async with fake, gateway(fake, timeouts=replace(PATIENT, idle_s=0.6)) as gate:

            async def one(i: int, stream: bool) -> None:
                asked = call(stream=stream, request_id=str(i))
                got = await content(await gate.answer(asked))
                assert got == (at_once[0] if stream else whole_answer(CHAT, asked.fields, plans[i]))

            await asyncio.gather(*(one(i, stream) for i in range(2) for stream in (False, True)))

    async def pauses() -> None:
        plan = Plan(gap_s=0.8, tokens=4)  # together longer than one may be
        async with FakeUpstream(plan) as fake, gateway(fake, timeouts=replace(PATIENT, idle_s=4)) as gate:
            asked = call(stream=True)
            assert await content(await gate.answer(asked)) == b"".join(made(plan, asked))

    async def body() -> None:
        await silences()
        await pauses()

    run(body())


def test_the_defaults_let_a_server_think_for_minutes() -> None:
    assert Timeouts().first_byte_s >= 300
    assert Timeouts().idle_s >= 60
    assert Timeouts().connect_s <= 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [None, 0])
def test_no_first_byte_in_time_is_a_504_and_is_not_repeated(stream: bool, after: int | None) -> None:
    async def body() -> None:
        async with FakeUpstream() as a, FakeUpstream() as b, gateway(a, b) as gate:
            for _ in range(2):
                await content(await gate.answer(call()))  # so that kept connections are used
            gate._timeouts = replace(PATIENT, first_byte_s=1.0)
            a.plan = Plan(ending="hang", after=after)
            error = await refused(gate.answer(call(stream=stream)))
            assert (error.status, error.code) == (504, "upstream_timeout")
            assert gate.reports == [(a.url, "first_byte")]
            expected = {"url": a.url, "up": True, "in_flight": 0, "last_failure": "first_byte", "window": 4}
            assert gate.status()["upstreams"][0] == expected
            await a.until(lambda: a.count("gone") == len(a.requests) - 1)  # if it is late, it never sees it
            assert len(b.requests) == 1

    run(body())


@pytest.mark.parametrize("ending", ["whole", "hang"])
def test_what_came_while_this_process_stood_still_is_no_silence(ending: Any) -> None:
    async def body() -> None:
        asked, rest = call(stream=True), threading.Event()
        events = made(Plan(), asked)
        plan = Plan(ending=ending, after=len(events) if ending == "hang" else None, rest=rest)
        async with FakeUpstream(plan) as fake, gateway(fake, timeouts=replace(PATIENT, idle_s=0.4)) as gate:
            reply = await gate.answer(asked)
            got = [await anext(reply.chunks)]
            reading = asyncio.create_task(anext(reply.chunks))
            await asyncio.sleep(0)
            rest.set()
            while fake.requests[0].sent < len(events):
                time.sleep(0.01)
            time.sleep(0.6)  # as on a machine that is overloaded, or was suspended
            got.append(await reading)
            assert reply.outcome.failure is None
            if ending == "whole":
                got += [chunk async for chunk in reply.chunks]
                assert reply.outcome.failure is None
            assert b"".join(got) == b"".join(events)
            await reply.chunks.aclose()

    run(body())


def test_silence_in_the_middle_ends_the_answer() -> None:
    async def body() -> None:
        brief = replace(PATIENT, idle_s=0.3)
        plan = Plan(ending="hang", after=4)
        async with FakeUpstream(plan) as fake, gateway(fake) as gate:
            asked = call(stream=True)
            reply = await gate.answer(asked)
            got, whole = b"", b"".join(made(plan, asked)[:4])
            while len(got) < len(whole):
                got += await anext(reply.chunks)
            assert got == whole
            reply.chunks._exchange._timeouts = gate._timeouts = brief
            assert error_code(await content(reply)) == "upstream_timeout"
            assert reply.outcome.failure == "idle"
            error = await refused(gate.answer(call()))
            assert (error.status, error.code) == (504, "upstream_timeout")
            assert gate.kinds == ["idle", "idle"]
            await fake.until(lambda: fake.count("gone") == 2)

    run(body())


def test_an_upstream_that_does_not_listen_fails_at_once_and_is_tried_elsewhere() -> None:
    async def body() -> None:
        async with FakeUpstream() as a, FakeUpstream() as b:
            async with gateway(a) as gate:
                await asyncio.to_thread(a.down)
                error = await refused(gate.answer(call()))
                assert (error.status, error.code) == (502, "upstream_connect")
                assert gate.kinds == ["connect"]
                await asyncio.to_thread(a.up)
            async with gateway(a, b) as gate:
                await asyncio.to_thread(a.down)
                reply = await gate.answer(call())
                assert (reply.status, reply.outcome.upstream) == (200, b.url)

    run(body())


def test_a_connection_that_never_stands_is_given_up_after_its_own_limit() -> None:
    async def body() -> None:
        async with FakeUpstream() as fake, contextlib.AsyncExitStack() as stack:
            gate = await stack.enter_async_context(gateway(fake, timeouts=Timeouts(connect_s=0.3)))
            await gate.until_up(1)
            clogged = stack.enter_context(socket.socket())
            clogged.bind(("127.0.0.1", 0))
            clogged.listen(0)
            for _ in range(4):  # the queue of connections that nobody accepts is full
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(clogged.getsockname())
            gate.upstreams[0].name = f"http://127.0.0.1:{clogged.getsockname()[1]}"
            assert (await refused(gate.answer(call()))).code == "upstream_connect"

    run(body())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [None, 0, 3])
def test_cancelling_closes_the_upstreams_connection(stream: bool, after: int | None) -> None:
    async def body() -> None:
        async with FakeUpstream(Plan(ending="hang", after=after)) as fake, gateway(fake) as gate:

            async def client() -> None:
                await content(await gate.answer(call(stream=stream, n=3)))

            task = asyncio.create_task(client())
            await fake.until(lambda: len(fake.requests) == 1)
            assert gate.status()["upstreams"][0]["in_flight"] == 3
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await fake.until(lambda: fake.count("gone") == 1)
            assert gate.reports == []

    run(body())


def test_chunks_can_be_closed_at_any_point_and_more_than_once() -> None:
    async def body() -> None:
        async with FakeUpstream(Plan(ending="hang", after=2)) as fake, gateway(fake) as gate:
            for point in ("unread", "after one", "while reading"):
                reply = await gate.answer(call(stream=True))
                reading = None
                if point != "unread":
                    await anext(reply.chunks)
                if point == "while reading":
                    reading = asyncio.create_task(content(reply))
                    await asyncio.sleep(0)
                await reply.chunks.aclose()
                await reply.chunks.aclose()
                if reading is not None:
                    assert b"error" not in await reading
                assert [chunk async for chunk in reply.chunks] == []
            await fake.until(lambda: fake.count("gone") == 3)
            assert gate.reports == []
        async with FakeUpstream() as fake, gateway(fake) as gate:
            for stream in (False, True):
                reply = await gate.answer(call(stream=stream))
                await content(reply)
                await reply.chunks.aclose()
                reply = await gate.answer(call(stream=stream))
                await reply.chunks.aclose()

    run(body())


def test_closing_the_backend_ends_what_still_runs() -> None:
    async def body() -> None:
        async with FakeUpstream(Plan(ending="hang", after=2)) as fake, gateway(fake) as gate:
            reply = await gate.answer(call(stream=True))
            await anext(reply.chunks)
            reading = asyncio.create_task(content(reply))
            await asyncio.sleep(0)
            await gate.close()
            assert b"[DONE]" not in await reading
            await fake.until(lambda: fake.count("gone") == 1)

    run(body())


def test_whatever_breaks_each_call_is_answered_once_or_gets_one_clear_error() -> None:
    rng = random.Random(3)
    breaks = [
        Plan(),
        Plan(gap_s=0.003),
        Plan(ending="reset"),
        Plan(ending="cut"),
        Plan(ending="cut", after=2, half=True),
        Plan(ending="reset", after=3, gap_s=0.003),
        Plan(ending="stop", after=2),
        BUSY,
        Plan(status=500, body=b"no"),
        Plan(body=b"garbage"),
    ]

    def any_plan(request: Request) -> Plan:
        return rng.choice(breaks)

    async def body() -> None:
        async with FakeUpstream(any_plan) as a, FakeUpstream(any_plan) as b, gateway(a, b, retries=1) as gate:

            async def one(i: int) -> None:
                asked = call(stream=i % 2 == 0, request_id=f"r-{i}")
                try:
                    reply = await gate.answer(asked)
                except ApiError as error:
                    outcomes[f"r-{i}"] = error.code
                    return
                got = await content(reply)
                whole = b"".join(made(Plan(), asked)) if asked.stream else whole_answer(CHAT, asked.fields, Plan())
                if reply.outcome.failure is None:
                    assert got == whole
                    outcomes[f"r-{i}"] = "whole"
                elif reply.status == 200 and reply.outcome.failure == "cut":
                    text, _, last = got.rpartition(b"data: ")
                    assert whole.startswith(text)
                    assert error_code(b"data: " + last) == "upstream_cut"
                    outcomes[f"r-{i}"] = "cut"
                else:
                    outcomes[f"r-{i}"] = "refused"

            outcomes: dict[str, str] = {}
            for start in range(0, 120, 12):
                await asyncio.gather(*(one(i) for i in range(start, start + 12)))
                await gate.until_up(2)
            assert len(outcomes) == 120
            clear = {"upstream_connect", "upstream_cut", "upstream_garbage", "no_upstream"}
            assert {"whole", "cut", "refused"} < set(outcomes.values()) <= {"whole", "cut", "refused"} | clear
            await settled(a, b)
            for name, outcome in outcomes.items():
                records = [r for r in a.requests + b.requests if r.header("x-request-id") == name]
                assert sum(r.state == "answered" for r in records) <= 2  # a 429, and then an answer
                if outcome in ("whole", "cut"):
                    assert records

    run(body())


def test_neither_keys_nor_prompts_nor_answers_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "longtail")

    async def body() -> None:
        async with FakeUpstream() as fake, gateway(fake, key="sk-secret") as gate:
            asked = json.dumps({"messages": [{"role": "user", "content": "my-secret"}], "stream": True}).encode()
            for plan in (
                Plan(ending="reset", after=1, events=[event("their-secret")], gap_s=0.02),
                Plan(body=b"their-secret", content_type="text/secret"),
                Plan(status=500, body=b"their-secret"),
                Plan(ending="reset", after=0, pause_s=0.02),
            ):
                fake.script(plan)
                with contextlib.suppress(ApiError):
                    await content(await gate.answer(call(body=asked, stream=True, request_id="r-77")))
            assert len(gate.reports) == 4

    run(body())
    assert "r-77" in caplog.text
    assert "secret" not in caplog.text
