"""Collecting lengths from a server: resuming, retries, fatal answers, and the key that must not leak."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from longtail.core.errors import ConfigError, DataError, ServerError
from longtail.lengths.collect import CollectConfig, Collected, collect
from longtail.lengths.collect_client import base_url
from longtail.lengths.data import read_lengths
from openai_server import Reply, Server, answer, by_length, prompt_of, silent_port

PROMPTS = ["a", "bb", "ccc", "dddd"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


def ask(server: Server | str, out, prompts=PROMPTS, **options) -> Collected:
    url = server if isinstance(server, str) else server.url
    config = CollectConfig(url=url, out=out, **{"backoff_s": 0.001, "concurrency": 2} | options)
    return asyncio.run(collect(prompts, config))


def records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_become_rows_that_train_can_read(out):
    with Server() as server:
        state = ask(server, out)
    assert (state.done, state.failed, state.tokens, state.model) == (4, 0, 10, "m")
    data = read_lengths(out)
    assert dict(zip(data.prompts, data.lengths, strict=True)) == {"a": 1, "bb": 2, "ccc": 3, "dddd": 4}
    assert data.unit == "tokens"
    assert "response" not in records(out)[0]


def test_samples_cut_off_answers_text_and_limits(out):
    with Server(lambda request: answer(request["max_tokens"], text="x y z", finish="length")) as server:
        state = ask(server, out, ["p"], samples=3, max_tokens=7, temperature=0.5, keep_text=True)
    assert sorted(r["sample"] for r in records(out)) == [0, 1, 2]
    assert {(r["output_tokens"], r["censored"], r["response"]) for r in records(out)} == {(7, True, "x y z")}
    assert state.cut_off == 3
    assert {r["temperature"] for r in server.requests} == {0.5}
    assert read_lengths(out).censored.tolist() == [True]
    assert read_lengths(out, unit="words").lengths.tolist() == [3]


def test_chat_sends_messages_whole_and_completions_send_the_text(out):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
    with Server() as server:
        ask(server, out, ["q", chat], concurrency=1)
        ask(server, out, ["q", chat], concurrency=1, chat=False, max_tokens=5)
    first, second, third, fourth = server.requests
    assert first["messages"] == [{"role": "user", "content": "q"}]
    assert second["messages"] == chat
    assert (third["prompt"], fourth["prompt"]) == ("q", "p")
    assert [r["path"] for r in server.requests] == ["/v1/chat/completions"] * 2 + ["/v1/completions"] * 2
    assert "max_tokens" not in first
    assert read_lengths(out).prompts == ["q", "p"]


def test_requests_overlap_up_to_the_given_number(out):
    barrier = threading.Barrier(3)

    def together(request):
        barrier.wait(timeout=120)
        return by_length(request)

    with Server(together) as server:
        ask(server, out, [str(i) for i in range(6)], concurrency=3)
    assert server.most_running == 3


# -- going on -------------------------------------------------------------------------------------------------------


def test_what_the_file_holds_is_not_asked_for_again(out):
    with Server() as server:
        ask(server, out, PROMPTS[:2])
        state = ask(server, out, [*PROMPTS, "a"])
        assert (state.skipped, state.done, state.repeated_prompts) == (2, 2, 1)
        assert len(server.requests) == 4
        more = ask(server, out, samples=2)
        assert (more.skipped, more.done) == (4, 4)
        assert ask(server, out, samples=2).wanted == 0
        assert len(records(out)) == 8
        other = ask(server, out, temperature=0.3)
        assert other.done == 4


def test_a_torn_last_line_is_cut_off_and_asked_for_again(out):
    with Server() as server:
        ask(server, out, ["a", "bb"], concurrency=1)
        whole = out.read_bytes()
        out.write_bytes(whole[:-20])
        state = ask(server, out, ["a", "bb"])
        assert (state.skipped, state.done) == (1, 1)
        assert out.read_bytes() == whole
        out.write_bytes(whole[:-1])
        assert ask(server, out, ["a", "bb", "ccc"]).done == 1
        assert len(records(out)) == 3


def test_a_file_of_something_else_is_not_appended_to(out):
    out.write_text('{"prompt": "my prompts"}\n')
    with (
        Server() as server,
        pytest.raises(DataError, match=r"out.jsonl:1: .*not written by from-server: choose another"),
    ):
        ask(server, out)
    assert out.read_text() == '{"prompt": "my prompts"}\n'


def test_cancelling_keeps_what_was_answered(out):
    gate = threading.Event()

    def slow(request):
        if prompt_of(request) != "a":
            gate.wait()
        return by_length(request)

    async def cancel_after_the_first():
        first = asyncio.Event()
        config = CollectConfig(url=server.url, out=out, concurrency=1)
        task = asyncio.create_task(collect(PROMPTS, config, progress=lambda s: first.set() if s.done else None))
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Server(slow) as server:
        try:
            asyncio.run(cancel_after_the_first())
        finally:
            gate.set()
        assert [r["prompt"] for r in records(out)] == ["a"]
        assert ask(server, out).done == 3


def test_a_disk_that_is_full_is_told_and_leaves_whole_lines(out, monkeypatch):
    real = os.write

    def full(fd, data):
        if len(data) > 100 and out.exists() and out.stat().st_size > 300:
            real(fd, bytes(data[:10]))
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    with Server() as server, pytest.raises(DataError, match=r"out.jsonl cannot be written \(No space left on device\)"):
        ask(server, out, concurrency=1)
    assert len(records(out)) >= 1


# -- trying again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [
        Reply({"error": {"message": "overloaded"}}, 500),
        Reply({"error": "slow down"}, 429, {"Retry-After": "0"}),
        Reply(b"<html>Bad gateway</html>", 502),
        Reply(b'{"choices": [{"mess'),
        Reply(b"\xff\xfe not json"),
        Reply([1, 2]),
        Reply({"object": "error", "message": "busy"}),
        Reply(None),
    ],
    ids=["500", "429", "502", "cut", "bytes", "list", "no choices", "dropped"],
)
def test_passing_trouble_is_tried_again(out, trouble):
    with Server(script=[trouble, trouble]) as server:
        state = ask(server, out)
    assert (state.done, state.failed, state.retried) == (4, 0, 2)
    assert len(records(out)) == 4


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured_by_all_requests(out, form):
    began = time.monotonic()
    when = "1" if form == "seconds" else format_datetime(datetime.now(UTC) + timedelta(seconds=2.5), usegmt=True)
    waits = []
    with Server(script=[Reply({"error": "later"}, 429, {"Retry-After": when})]) as server:
        config = CollectConfig(url=server.url, out=out, concurrency=1)
        asyncio.run(collect(PROMPTS, config, progress=lambda s: waits.append(s.waiting)))
    assert time.monotonic() - began >= 0.9
    assert any(w and "HTTP 429: later: pausing" in w for w in waits)
    assert waits[-1] is None
    assert len(records(out)) == 4


def test_an_endless_pause_is_not_waited_for(out):
    problem = r"asks for a pause of 120 minutes .*run the same command again later"
    busy = Reply({}, 429, {"Retry-After": "7200"})
    with Server(script=[busy]) as server, pytest.raises(ServerError, match=problem):
        ask(server, out)


def test_a_prompt_that_is_refused_is_counted_and_the_others_go_on(out):
    def picky(request):
        return Reply({"error": {"message": "too long"}}, 400) if prompt_of(request) == "bb" else by_length(request)

    with Server(picky) as server:
        state = ask(server, out)
    assert (state.done, state.failed, dict(state.errors)) == (3, 1, {"HTTP 400: too long": 1})


def test_trouble_that_stays_is_counted_after_the_last_try(out):
    def broken(request):
        return Reply({"detail": "x"}, 500) if prompt_of(request) == "bb" else by_length(request)

    with Server(broken) as server:
        state = ask(server, out, retries=2)
    assert (state.done, state.retried, dict(state.errors)) == (3, 2, {"HTTP 500: x (tried 3 times)": 1})


def test_a_server_that_refuses_everything_is_not_asked_a_thousand_times(out):
    with Server(lambda request: Reply({"error": {"message": "no chat template"}}, 400)) as server:
        with pytest.raises(ServerError, match="all of the first 20 requests failed: HTTP 400: no chat template"):
            ask(server, out, [str(i) for i in range(1000)])
        assert len(server.requests) <= 22
        with pytest.raises(ServerError, match="the only request failed"):
            ask(server, out, ["p"])


def test_answers_without_a_token_count_say_so(out):
    reply = answer(3)
    del reply.body["usage"]
    with Server(lambda request: reply) as server, pytest.raises(ServerError, match=r"without usage.completion_tokens"):
        ask(server, out, ["p"])


def test_a_server_that_wants_the_newer_name_of_the_limit_gets_it(out):
    def new(request):
        if "max_tokens" in request:
            return Reply({"error": {"message": "Unsupported: use 'max_completion_tokens' instead."}}, 400)
        return answer(request["max_completion_tokens"])

    with Server(new) as server:
        assert ask(server, out, max_tokens=9).tokens == 36


# -- what cannot work -----------------------------------------------------------------------------------------------


def test_a_refused_connection_is_one_sentence_at_once(out):
    with silent_port() as port:
        with pytest.raises(ServerError, match=r"http://127.0.0.1:\d+/v1: no server answers there .*: is it running"):
            ask(f"http://127.0.0.1:{port}", out)
        with pytest.raises(ServerError, match="no server answers there"):
            ask(f"http://127.0.0.1:{port}", out, model="m")
    assert not out.exists() or not out.read_bytes()


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (
            Reply({"error": {"message": "missing key"}}, 401),
            r"it wants an API key: .*--api-key-env \(HTTP 401: missing",
        ),
        (Reply({"error": {"message": "The model `x` does not exist."}}, 404), r"there is no model 'x'.*does not exist"),
        (Reply(b"", 301, {"Location": "https://elsewhere/v1"}), "redirects to https://elsewhere/v1; give that URL"),
        (Reply(b"<h1>nginx</h1>", 405), "no OpenAI-compatible API"),
    ],
    ids=["401", "404", "301", "405"],
)
def test_what_would_fail_for_every_prompt_stops_at_once(out, reply, problem):
    with Server(lambda request: reply) as server, pytest.raises(ServerError, match=problem):
        ask(server, out, [str(i) for i in range(50)], model="x")
    assert len(server.requests) <= 2


def test_the_only_model_is_found_and_of_several_one_must_be_chosen(out):
    with Server() as server:
        assert ask(server, out).model == "m"
    with Server(models=["m1", "m2"]) as server, pytest.raises(ServerError, match="choose one with --model: m1, m2"):
        ask(server, out)
    with Server(models=[]) as server, pytest.raises(ServerError, match="lists no model"):
        ask(server, out)
    with Server() as server, pytest.raises(ServerError, match=r"nowhere/models: this is no OpenAI-compatible API"):
        ask(server.url + "/nowhere", out)


def test_urls_are_mended_where_the_meaning_is_clear():
    assert base_url("http://h:8000") == "http://h:8000/v1"
    assert base_url("http://h:8000/v1/") == "http://h:8000/v1"
    assert base_url("https://h/api/v1/chat/completions") == "https://h/api/v1"
    for bad in ("localhost:8000", "ftp://h", "http://", "http://h:port", "http://[::1"):
        with pytest.raises(ConfigError):
            base_url(bad)


# -- the key --------------------------------------------------------------------------------------------------------

KEY = "sk-very-secret-0123456789"


def test_the_key_is_sent_and_shown_nowhere(out):
    echo = {"error": {"message": f"Incorrect API key provided: {KEY}."}}
    with Server(lambda request: Reply(echo, 401)) as server, pytest.raises(ServerError) as error:
        ask(server, out, model="m", api_key=KEY)
    assert server.requests[0]["authorization"] == f"Bearer {KEY}"
    assert "it refuses the API key (HTTP 401: Incorrect API key provided: [the API key].)" in str(error.value)
    config = CollectConfig(url="http://h", out=out, api_key=KEY)
    assert KEY not in repr(config)
    with Server(lambda request: Reply(f"no json {KEY}".encode())) as server, pytest.raises(ServerError) as error:
        ask(server, out, ["p"], model="m", api_key=KEY, retries=0)
    assert KEY not in str(error.value)
    with Server() as server:
        ask(server, out, api_key=KEY)
    assert KEY not in out.read_text()


def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(out):
    for key in ("schlüssel", "two\nlines"):
        with Server() as server, pytest.raises((ConfigError, ServerError)) as error:
            ask(server, out, model="m", api_key=key)
        assert key not in str(error.value)


def test_a_password_in_the_url_is_not_shown(out):
    with silent_port() as port, pytest.raises(ServerError) as error:
        ask(f"http://user:hidden@127.0.0.1:{port}", out)
    assert "hidden" not in str(error.value)
