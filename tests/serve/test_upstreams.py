from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme

from longtail.core.errors import ConfigError
from longtail.serve import upstream as upstream_module
from longtail.serve import upstreams as upstreams_module
from longtail.serve.body import with_priority
from longtail.serve.calls import CHAT, COMPLETIONS, Call, Reply
from longtail.serve.errors import ApiError
from longtail.serve.upstream import Timeouts, parse_url
from longtail.serve.upstreams import UNLIMITED, Upstreams
from serve.fake_upstream import FakeUpstream, Plan, Request, event, split, stream_events, whole_answer

QUICK = Timeouts(connect_s=0.5, first_byte_s=5.0, idle_s=5.0)


def call(*, path: str = CHAT, stream: bool = False, n: int = 1, body: bytes | None = None, **more: Any) -> Call:
    fields = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream, "n": n}
    body = json.dumps(fields).encode() if body is None else body
    given = {"request_id": "r-1", "samples": n, "headers": ((b"content-type", b"application/json"),)} | more
    return Call(path=path, body=body, fields=json.loads(body), stream=stream, **given)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams_module, "BACKOFF_S", (0.1, 1.0))
    monkeypatch.setattr(upstream_module, "LOOK_S", 0.3)


class Gateway(Upstreams):
    """Remembers what it reported, and when something changed."""

    def __init__(self, urls: Sequence[str], **options: Any) -> None:
        self.reports: list[tuple[str, str]] = []
        self.turned = asyncio.Event()
        defaults = {"timeouts": QUICK, "window": 4, "key": None, "tag": frozenset(), "ca_file": None}
        super().__init__(urls, reported=lambda url, kind: self.reports.append((url, kind)), **defaults | options)
        self.changed = self.turned.set

    @property
    def kinds(self) -> list[str]:
        return [kind for _, kind in self.reports]

    async def until_up(self, count: int) -> None:
        async with asyncio.timeout(10):
            while sum(u["up"] for u in self.status()["upstreams"]) != count:
                self.turned.clear()
                await self.turned.wait()


@contextlib.asynccontextmanager
async def gateway(*fakes: FakeUpstream | str, **options: Any) -> AsyncIterator[Gateway]:
    """Checks at its end that every place was given back."""
    found = Gateway([fake if isinstance(fake, str) else fake.url for fake in fakes], **options)
    await found.start()
    try:
        yield found
        assert [u["in_flight"] for u in found.status()["upstreams"]] == [0] * len(fakes)
    finally:
        await found.close()


def run(work: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(limited())


async def content(reply: Reply) -> bytes:
    return b"".join([chunk async for chunk in reply.chunks])


async def refused(work: Awaitable[Reply]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await work
    return caught.value


def made(fake_plan: Plan, asked: Call) -> list[bytes]:
    return stream_events(asked.path, json.loads(asked.body), fake_plan)


def error_code(last_event: bytes) -> str:
    """The code in the one error event that these bytes are."""
    assert last_event.startswith(b"data: ")
    assert last_event.endswith(b"\n\n")
    assert last_event.count(b"\n\n") == 1
    return json.loads(last_event[6:])["error"]["code"]


# What is sent and what comes back


def test_a_whole_answer_comes_back_as_it_is_with_its_tokens_and_finish_reason() -> None:
    async def body() -> None:
        async with FakeUpstream(Plan(tokens=7, headers=[("openai-processing-ms", "5")])) as fake, gateway(fake) as gate:
            asked = call(n=2)
            reply = await gate.answer(asked)
            assert await content(reply) == whole_answer(CHAT, asked.fields, Plan(tokens=7))
            assert reply.status == 200
            assert (b"openai-processing-ms", b"5") in reply.headers
            assert (reply.outcome.output_tokens, reply.outcome.finish, reply.outcome.failure) == (14, "stop", None)
            assert reply.outcome.upstream == fake.url
            assert gate.reports == []

    run(body())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_comes_back_byte_for_byte(path: str) -> None:
    async def body() -> None:
        plan = Plan(tokens=6)
        async with FakeUpstream(plan) as fake, gateway(fake) as gate:
            asked = call(path=path, stream=True, n=2)
            reply = await gate.answer(asked)
            assert (b"content-type", b"text/event-stream; charset=utf-8") in reply.headers
            assert await content(reply) == b"".join(made(plan, asked))
            outcome = reply.outcome
            assert (outcome.output_tokens, outcome.streamed_tokens, outcome.finish) == (12, 12, "stop")
            assert outcome.first_token_s is not None
            assert outcome.failure is None

    run(body())


def test_choices_logprobs_and_tool_calls_split_anywhere_keep_every_byte() -> None:
    def chunk(index: int, **delta: Any) -> dict[str, Any]:
        logprobs = {"content": [{"token": "é", "logprob": -0.25, "bytes": [195, 169], "top_logprobs": []}]}
        return {"choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}]}

    def tool(arguments: str) -> dict[str, Any]:
        return chunk(1, tool_calls=[{"index": 0, "function": {"arguments": arguments}}])

    events = [
        event(chunk(0, content="é")),
        event(tool('{"a"'), b"\r\n"),
        b": keep-alive\n\n",
        event(chunk(0, content="x" * 200_000)),
        event(tool(": 1}"), b"\r\n"),
        event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}),
        event("[DONE]", b"\r\n"),
    ]

    async def body() -> None:
        async with FakeUpstream() as fake, gateway(fake) as gate:
            for seed in range(10):
                fake.script(Plan(events=events, split=seed))
                reply = await gate.answer(call(stream=True, n=2))
                assert await content(reply) == b"".join(events)
                assert reply.outcome.streamed_tokens == 4
                assert reply.outcome.output_tokens is None
                assert reply.outcome.finish == "length"

    run(body())


def test_an_event_is_passed_on_before_the_next_one_exists() -> None:
    async def body() -> None:
        plan = Plan(ending="hang", after=1)
        async with FakeUpstream(plan) as fake, gateway(fake) as gate:
            asked = call(stream=True)
            reply = await gate.answer(asked)
            assert await anext(reply.chunks) == made(plan, asked)[0]
            assert reply.outcome.streamed_tokens == 1
            await reply.chunks.aclose()

    run(body())


ODD_BODY = (
    '{"model": "m", "messages": [{"role": "assistant", "content": "ü \\u00e9 東京", "reasoning_content": "r"}],'
    ' "chat_template_kwargs": {"enable_thinking": false},"top_k":  20, "min_p": 1.0, "seed": 12345678901234567,'
    ' "max_completion_tokens": 5, "tool_choice": "auto", "x_team": "a", "stream" : false}'
).encode()


def test_the_body_is_sent_byte_for_byte_without_a_tag() -> None:
    async def body() -> None:
        async with FakeUpstream() as fake, gateway(fake) as gate:
            await content(await gate.answer(call(body=ODD_BODY, priority=5)))
            assert fake.requests[0].body == ODD_BODY
            assert fake.requests[0].header("x-vllm-priority") is None

    run(body())


@pytest.mark.parametrize("tag", [{"body"}, {"header"}, {"body", "header"}])
def test_a_priority_goes_where_it_is_wanted_and_nothing_else_changes(tag: set[str]) -> None:
    async def body() -> None:
        async with FakeUpstream() as fake, gateway(fake, tag=frozenset(tag)) as gate:
            headers = ((b"x-vllm-priority", b"-99"), (b"x-team", b"a"))
            await content(await gate.answer(call(body=ODD_BODY, priority=1234567890123, headers=headers)))
            await content(await gate.answer(call(body=ODD_BODY)))
            tagged, plain = fake.requests
            assert tagged.body == (with_priority(ODD_BODY, 1234567890123) if "body" in tag else ODD_BODY)
            assert tagged.header("x-vllm-priority") == ("1234567890123" if "header" in tag else "-99")
            assert tagged.header("x-team") == "a"
            assert plain.body == ODD_BODY
            assert plain.header("x-vllm-priority") is None

    run(body())


def test_headers_pass_in_both_directions_except_those_of_the_hop() -> None:
    sent = (
        (b"user-agent", b"client/1"),
        (b"x-team", "größe".encode()),
        (b"content-type", b"application/json; charset=utf-8"),
        (b"connection", b"keep-alive, x-hop"),
        (b"x-hop", b"1"),
        (b"te", b"trailers"),
        (b"transfer-encoding", b"chunked"),
        (b"host", b"evil.example"),
        (b"content-length", b"3"),
        (b"accept-encoding", b"gzip, br"),
        (b"expect", b"100-continue"),
        (b"x-request-id", b"theirs"),
    )

    async def body() -> None:
        back = [("X-Request-Id", "up-7"), ("Keep-Alive", "timeout=5"), ("Connection", "x-own"), ("X-Own", "1")]
        async with FakeUpstream(Plan(headers=back)) as fake, gateway(fake) as gate:
            reply = await gate.answer(call(headers=sent, request_id="ours"))
            answer = await content(reply)
            got = fake.requests[0]
            assert got.header("user-agent") == "client/1"
            assert got.header("x-team") == "größe"
            assert got.header("content-type") == "application/json; charset=utf-8"
            assert got.header("host") == fake.url.removeprefix("http://")
            assert got.header("content-length") == str(len(got.body))
            assert got.header("accept-encoding") == "identity"
            assert got.header("x-request-id") == "ours"
            for name in ("x-hop", "te", "transfer-encoding", "expect", "cookie", "accept"):
                assert got.header(name) is None
            names = [name for name, _ in reply.headers]
            assert sorted(names) == [b"content-length", b"content-type", b"x-request-id"]
            assert (b"x-request-id", b"up-7") in reply.headers
            assert (b"content-length", str(len(answer)).encode()) in reply.headers

    run(body())


def test_the_upstream_gets_our_key_or_else_the_clients() -> None:
    async def body() -> None:
        headers = ((b"authorization", b"Bearer theirs"),)
        async with FakeUpstream() as fake:
            for key, seen in (("ours", "Bearer ours"), (None, "Bearer theirs")):
                async with gateway(fake, key=key) as gate:
                    await content(await gate.answer(call(headers=headers)))
                    assert fake.requests[-1].header("authorization") == seen

    run(body())


def test_redirects_are_not_followed_and_cookies_not_kept() -> None:
    async def body() -> None:
        async with FakeUpstream() as fake, FakeUpstream() as elsewhere, gateway(fake) as gate:
            to = [("Location", f"{elsewhere.url}/v1/chat/completions"), ("Set-Cookie", "a=b")]
            fake.script(Plan(status=307, headers=to, body=b""))
            assert (await gate.answer(call())).status == 307
            await content(await gate.answer(call()))
            assert fake.requests[1].header("cookie") is None
            assert elsewhere.requests == []

    run(body())


def test_other_paths_pass_through_whatever_their_content() -> None:
    async def body() -> None:
        async with FakeUpstream() as fake, gateway(fake) as gate:
            fake.script(Plan(body=b"RIFF\x00\xff", content_type="audio/wav"))
            asked = call(path="/v1/audio/speech", body=b"{}")
            assert await content(await gate.answer(asked)) == b"RIFF\x00\xff"
            events = (b"event: response.created\ndata: {}\n\n", b"event: response.completed\ndata: {}\n\n")
            asked = call(path="/v1/responses", body=b'{"stream": true}')
            fake.script(Plan(events=events), Plan(events=events, ending="cut", after=1))
            assert await content(await gate.answer(asked)) == b"".join(events)
            broken = await content(await gate.answer(asked))
            assert broken.startswith(events[0])
            assert error_code(broken.removeprefix(events[0])) == "upstream_cut"

    run(body())


# Refusals and errors that the upstream answers with

BUSY = Plan(status=429, headers=[("Retry-After", "7")], body=b'{"error": {"message": "slow down", "code": "busy"}}')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("plan", [BUSY, Plan(status=500, body=b"<html>no", content_type="text/html")])
def test_a_refusal_passes_through_with_status_body_and_headers(stream: bool, plan: Plan) -> None:
    async def body() -> None:
        async with FakeUpstream(plan) as fake, gateway(fake) as gate:
            reply = await gate.answer(call(stream=stream))
            assert (reply.status, await content(reply)) == (plan.status, plan.body)
            assert [value for name, value in reply.headers if name == b"retry-after"] == [b"7"] * (plan is BUSY)
            assert reply.outcome.failure == "status"
            assert gate.kinds == ["status"]
            assert gate.status()["upstreams"][0]["up"]

    run(body())


def test_an_overloaded_upstreams_call_moves_to_another_one_once() -> None:
    async def body() -> None:
        async with FakeUpstream(BUSY) as a, FakeUpstream() as b, gateway(a, b) as gate:
            for _ in range(2):
                reply = await gate.answer(call())
                assert (reply.status, reply.outcome.upstream) == (200, b.url)
                await content(reply)
        async with FakeUpstream(BUSY) as a, FakeUpstream(BUSY) as b, FakeUpstream(BUSY) as c, gateway(a, b, c) as gate:
            assert (await gate.answer(call())).status == 429
            assert sum(len(fake.requests) for fake in (a, b, c)) == 2
        async with FakeUpstream(BUSY) as a, FakeUpstream() as b, gateway(a, b, retries=0) as gate:
            assert (await gate.answer(call())).status == 429

    run(body())


def test_a_refusal_stands_if_the_other_upstream_is_dead() -> None:
    async def body() -> None:
        async with FakeUpstream(BUSY) as a, FakeUpstream() as b, gateway(a, b) as gate:
            await asyncio.to_thread(b.down)
            reply = await gate.answer(call())
            assert (reply.status, await content(reply)) == (429, BUSY.body)

    run(body())


def test_an_error_is_not_tried_elsewhere() -> None:
    async def body() -> None:
        for status in (400, 404, 500, 502, 504):
            plan = Plan(status=status, body=b"why")
            async with FakeUpstream(plan) as a, FakeUpstream() as b, gateway(a, b) as gate:
                reply = await gate.answer(call())
                assert (reply.status, await content(reply)) == (status, b"why")
                assert b.requests == []

    run(body())


def test_a_503_passes_through_and_then_nobody_is_there() -> None:
    async def body() -> None:
        async with FakeUpstream(Plan(status=503, body=b"loading")) as fake, gateway(fake, window=3) as gate:
            fake.health = 503
            reply = await gate.answer(call())
            assert (reply.status, await content(reply)) == (503, b"loading")
            assert gate.window == 0
            assert gate.status()["ok"] is False
            error = await refused(gate.answer(call()))
            assert (error.status, error.code) == (503, "no_upstream")
            assert error.retry_after_s is not None
            assert error.retry_after_s >= 1
            assert len(fake.requests) == 1

    run(body())


# Broken connections


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
            assert [r.state for r in a.requests + b.requests].count("answered") == 4
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


def test_a_kept_connection_that_the_server_has_given_up_costs_nothing() -> None:
    async def body() -> None:
        async with FakeUpstream() as fake, gateway(fake) as gate:
            fake.script(Plan(), Plan(ending="cut"), Plan())
            for _ in range(2):
                assert (await gate.answer(call())).status == 200
            assert [r.state for r in fake.requests] == ["answered", "broken", "answered"]
            assert [r.connection for r in fake.requests][0:2] == [fake.requests[0].connection] * 2
            assert gate.reports == []

    run(body())


# Garbage


@pytest.mark.parametrize(
    "plan",
    [
        Plan(body=b"<html>hello</html>", content_type="text/html"),
        Plan(body=b"[1, 2]"),
        Plan(body=b""),
        Plan(body=b"data: {}\n\n", content_type="text/event-stream"),
        Plan(body=b"\x1f\x8b\x08", headers=[("Content-Encoding", "gzip")]),
    ],
)
def test_a_good_status_over_garbage_becomes_a_clear_error(plan: Plan) -> None:
    async def body() -> None:
        async with FakeUpstream(plan) as a, FakeUpstream() as b, gateway(a, b) as gate:
            error = await refused(gate.answer(call()))
            assert (error.status, error.code) == (502, "upstream_garbage")
            assert gate.reports == [(a.url, "garbage")]
            assert b.requests == []

    run(body())


def test_a_server_that_does_not_speak_http_is_a_clear_error() -> None:
    async def body() -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"220 mail.example ESMTP\r\n\r\n")

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        async with FakeUpstream() as fake:
            gate = Gateway([fake.url])
            await gate.start()
            gate.upstreams[0].name = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            assert (await refused(gate.answer(call()))).code == "upstream_garbage"
            await gate.close()
        server.close()

    run(body())


def test_an_answer_that_is_too_large_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "LARGEST_ANSWER_BYTES", 1 << 20)

    async def body() -> None:
        async with FakeUpstream(Plan(body=b" " * (3 << 20))) as fake, gateway(fake) as gate:
            assert (await refused(gate.answer(call()))).code == "upstream_garbage"

    run(body())


# Time-outs


def test_a_long_silence_before_the_first_byte_and_pauses_are_no_failure() -> None:
    plans = [Plan(wait_s=0.7), Plan(pause_s=0.7), Plan(gap_s=0.15, tokens=4)]

    async def body() -> None:
        times = Timeouts(connect_s=0.5, first_byte_s=2.0, idle_s=0.6)
        fake = FakeUpstream(lambda request: plans[int(request.header("x-request-id") or 0)])
        async with fake, gateway(fake, timeouts=times) as gate:

            async def one(i: int, stream: bool) -> None:
                asked = call(stream=stream, request_id=str(i))
                got = await content(await gate.answer(asked))
                assert got == (
                    b"".join(made(plans[i], asked)) if stream else whole_answer(CHAT, asked.fields, plans[i])
                )

            await asyncio.gather(*(one(i, stream) for i in range(3) for stream in (False, True)))

    run(body())


def test_the_defaults_let_a_server_think_for_minutes() -> None:
    assert Timeouts().first_byte_s >= 300
    assert Timeouts().idle_s >= 60
    assert Timeouts().connect_s <= 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [None, 0])
def test_no_first_byte_in_time_is_a_504_and_is_not_repeated(stream: bool, after: int | None) -> None:
    async def body() -> None:
        times = Timeouts(connect_s=0.5, first_byte_s=0.3, idle_s=5)
        plan = Plan(ending="hang", after=after)
        async with FakeUpstream() as a, FakeUpstream() as b, gateway(a, b, timeouts=times) as gate:
            for _ in range(2):
                await content(await gate.answer(call()))  # so that kept connections are used
            a.plan = plan
            error = await refused(gate.answer(call(stream=stream)))
            assert (error.status, error.code) == (504, "upstream_timeout")
            assert gate.reports == [(a.url, "first_byte")]
            expected = {"url": a.url, "up": True, "in_flight": 0, "last_failure": "first_byte", "window": 4}
            assert gate.status()["upstreams"][0] == expected
            await a.until(lambda: a.count("gone") == 1)
            assert (len(a.requests), len(b.requests)) == (2, 1)

    run(body())


@pytest.mark.parametrize("ending", ["whole", "hang"])
def test_what_came_while_this_process_stood_still_is_no_silence(ending: Any) -> None:
    async def body() -> None:
        times = Timeouts(idle_s=0.4)
        plan = Plan(ending=ending, after=9 if ending == "hang" else None, pause_s=0.1, gap_s=0.02)
        async with FakeUpstream(plan) as fake, gateway(fake, timeouts=times) as gate:
            asked = call(stream=True)
            reply = await gate.answer(asked)
            got = [await anext(reply.chunks)]
            reading = asyncio.create_task(anext(reply.chunks))
            await asyncio.sleep(0)
            time.sleep(0.6)  # as on a machine that is overloaded, or was suspended
            got.append(await reading)
            assert reply.outcome.failure is None
            if ending == "whole":
                got += [chunk async for chunk in reply.chunks]
                assert reply.outcome.failure is None
            assert b"".join(got) == b"".join(made(Plan(), asked))
            await reply.chunks.aclose()

    run(body())


def test_silence_in_the_middle_ends_the_answer() -> None:
    async def body() -> None:
        times = Timeouts(connect_s=0.5, first_byte_s=5, idle_s=0.3)
        plan = Plan(ending="hang", after=4)
        async with FakeUpstream(plan) as fake, gateway(fake, timeouts=times) as gate:
            asked = call(stream=True)
            reply = await gate.answer(asked)
            got = await content(reply)
            assert error_code(got.removeprefix(b"".join(made(plan, asked)[:4]))) == "upstream_timeout"
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


# Clients that leave


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
            await fake.until(lambda: fake.count("gone") == 1, 2.0)
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
            await fake.until(lambda: fake.count("gone") == 3, 2.0)
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
        async with FakeUpstream(Plan(ending="hang", after=2)) as fake:
            gate = Gateway([fake.url])
            await gate.start()
            reply = await gate.answer(call(stream=True))
            await anext(reply.chunks)
            reading = asyncio.create_task(content(reply))
            await asyncio.sleep(0)
            await gate.close()
            assert b"[DONE]" not in await reading
            await fake.until(lambda: fake.count("gone") == 1, 2.0)

    run(body())


# Choice and health


def test_the_least_loaded_is_chosen_by_samples_then_by_calls_then_by_turns() -> None:
    async def body() -> None:
        hold = threading.Event()
        async with FakeUpstream() as a, FakeUpstream() as b, gateway(a, b) as gate:
            for fake in (a, b, a, b):
                assert (await gate.answer(call())).outcome.upstream == fake.url
            a.plan = b.plan = Plan(hold=hold)
            tasks = []
            for n, (on_a, on_b) in [(3, (3, 0)), (1, (3, 1)), (1, (3, 2)), (1, (3, 3)), (1, (4, 3)), (2, (4, 5))]:
                tasks.append(asyncio.create_task(gate.answer(call(n=n))))
                await asyncio.sleep(0)
                assert [u["in_flight"] for u in gate.status()["upstreams"]] == [on_a, on_b]
            hold.set()
            assert {(await task).status for task in tasks} == {200}

    run(body())


def test_an_upstream_that_died_gets_no_calls_until_it_answers_a_probe() -> None:
    async def body() -> None:
        async with FakeUpstream() as a, FakeUpstream() as b, gateway(a, b, window=3) as gate:
            assert gate.window == 6
            await asyncio.to_thread(a.down)
            assert [(await gate.answer(call())).outcome.upstream for _ in range(3)] == [b.url] * 3
            assert gate.turned.is_set()
            assert gate.window == 3
            assert gate.status() == {
                "ok": True,
                "upstreams": [
                    {"url": a.url, "up": False, "in_flight": 0, "last_failure": "connect", "window": 3},
                    {"url": b.url, "up": True, "in_flight": 0, "last_failure": None, "window": 3},
                ],
            }
            assert gate.kinds == ["connect"]
            await asyncio.to_thread(a.up)
            await gate.until_up(2)
            assert gate.window == 6
            assert {(await gate.answer(call())).outcome.upstream for _ in range(2)} == {a.url, b.url}

    run(body())


@pytest.mark.parametrize("health", [200, 401, 404])
def test_a_probe_asks_for_health_or_else_for_models(health: int) -> None:
    async def body() -> None:
        async with FakeUpstream(health=503) as fake, gateway(fake) as gate:
            assert gate.window == 0
            probes = fake.probes
            await fake.until(lambda: fake.probes > probes)
            assert gate.window == 0
            fake.health = health
            await gate.until_up(1)
            assert (await gate.answer(call())).status == 200

    run(body())


def test_many_calls_that_fail_together_put_an_upstream_down_once() -> None:
    async def body() -> None:
        async with FakeUpstream(Plan(ending="hang")) as a, FakeUpstream() as b, gateway(a, b) as gate:
            tasks = [asyncio.create_task(gate.answer(call())) for _ in range(20)]
            await a.until(lambda: len(a.requests) == 10)
            await asyncio.to_thread(a.down)
            assert {(await task).outcome.upstream for task in tasks} == {b.url}
            assert len(gate._probes) == 1
            assert gate.upstreams[0].strikes <= 1

    run(body())


def test_it_starts_without_any_upstream_and_serves_once_there_is_one() -> None:
    async def body() -> None:
        async with FakeUpstream() as fake:
            await asyncio.to_thread(fake.down)
            async with gateway(fake, window=0) as gate:
                assert (gate.status()["ok"], gate.window) == (False, 0)
                assert (await refused(gate.answer(call()))).code == "no_upstream"
                assert (await refused(gate.get("/v1/models", ()))).code == "no_upstream"
                await asyncio.to_thread(fake.up)
                await gate.until_up(1)
                assert (gate.status()["ok"], gate.window) == (True, UNLIMITED)
                assert (await gate.answer(call())).status == 200

    run(body())


def test_models_come_from_the_first_upstream_that_is_up() -> None:
    async def body() -> None:
        async with FakeUpstream(models=["x"]) as a, FakeUpstream(models=["y"]) as b, gateway(a, b, key="k") as gate:
            assert b'"x"' in await content(await gate.get("/v1/models", ((b"accept", b"*/*"),)))
            reply = await gate.get("/v1/models/nothing", ())
            assert (reply.status, await content(reply)) == (404, b'{"detail": "Not Found"}')
            await asyncio.to_thread(a.down)
            assert b'"y"' in await content(await gate.get("/v1/models", ()))
            assert [u["up"] for u in gate.status()["upstreams"]] == [False, True]

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
            clear = {"upstream_cut", "upstream_garbage", "no_upstream"}
            assert {"whole", "cut", "refused"} < set(outcomes.values()) <= {"whole", "cut", "refused"} | clear
            for name, outcome in outcomes.items():
                records = [r for r in a.requests + b.requests if r.header("x-request-id") == name]
                assert sum(r.state == "answered" for r in records) <= 2  # a 429, and then an answer
                if outcome in ("whole", "cut"):
                    assert records
            assert a.count("open") == b.count("open") == 0

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


# Configuration


def test_two_spellings_of_one_server_are_one() -> None:
    for url in ("http://GPU1:80/", "http://gpu1", "http://gpu1/v1", "http://gpu1/v1/"):
        assert parse_url(url) == "http://gpu1"
    assert parse_url("https://h:443/a/b/v1") == "https://h/a/b"
    assert parse_url("http://[::1]:8000") == "http://[::1]:8000"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("gpu1:8000", "is not the URL of one server"),
        ("ftp://gpu1", "is not the URL of one server"),
        ("http://", "is not the URL of one server"),
        ("http://gpu1,gpu2:8000", "is not the URL of one server"),
        ("http://gpu 1:8000", "is not the URL of one server"),
        ("http://gpu1:99999", "is not a URL"),
        ("http://gpu1?x=1", "leave out"),
        ("http://gpu1/#a", "leave out"),
        ("http://gpu1/a b", "its path may hold"),
        ("http://gpu1/../x", "its path may hold"),
        ("http://user:hunter2@gpu1", "user name or password"),
    ],
)
def test_a_url_that_cannot_work_is_refused_with_the_reason(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_url(url)
    assert "hunter2" not in str(caught.value)


def test_no_upstream_two_of_one_and_odd_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    for urls, options, problem in (
        ([], {}, "No upstream"),
        (["http://a", "http://A:80/v1"], {}, "given twice"),
        (["http://a"], {"tag": frozenset({"foot"})}, "foot"),
        (["https://a"], {"ca_file": tmp_path / "none.pem"}, "none.pem"),
        (["https://a"], {"ca_file": tmp_path / "empty.pem"}, "empty.pem"),
    ):
        with pytest.raises(ConfigError, match=problem):
            Gateway(urls, **options)
    with pytest.raises(ConfigError, match="idle_s = 0"):
        Timeouts(idle_s=0)


def test_a_prefix_and_tls_with_an_authority_of_ones_own_work(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")

    async def body() -> None:
        async with FakeUpstream(tls=context) as fake:
            async with gateway(f"{fake.url}/llm/v1", ca_file=tmp_path / "ca.pem") as gate:
                asked = call(stream=True)
                assert await content(await gate.answer(asked)) == b"".join(made(Plan(), asked))
                assert fake.requests[0].path == "/llm/v1/chat/completions"
            async with gateway(fake) as gate:
                assert gate.status()["ok"] is False

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
