"""What upstreams are sent, and what of their answers comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from longtail.serve import upstream as upstream_module
from longtail.serve.body import with_priority
from longtail.serve.calls import CHAT, COMPLETIONS
from serve.fake_upstream import FakeUpstream, Plan, event, whole_answer
from serve.upstream_tools import BUSY, call, content, error_code, gateway, made, refused, run


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


@pytest.mark.parametrize(
    "plan",
    [
        Plan(body=b"<html>hello</html>", content_type="text/html"),
        Plan(body=b"[1, 2]"),
        Plan(body=b""),
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
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        async with FakeUpstream() as fake, gateway(fake) as gate:
            gate.upstreams[0].name = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            assert (await refused(gate.answer(call()))).code == "upstream_garbage"
        server.close()

    run(body())


def test_an_answer_that_is_too_large_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "LARGEST_ANSWER_BYTES", 1 << 20)

    async def body() -> None:
        async with FakeUpstream(Plan(body=b" " * (3 << 20))) as fake, gateway(fake) as gate:
            assert (await refused(gate.answer(call()))).code == "upstream_garbage"

    run(body())
