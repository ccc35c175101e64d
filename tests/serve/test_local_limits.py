"""Our engine behind OpenAI's API: what it refuses, its limits, and how things end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longtail.core.errors import CapacityError, ModelError
from longtail.engine.checkpoint import load_model
from longtail.engine.lanes import LanePool
from longtail.engine.models import resolve_model
from longtail.serve.calls import CHAT
from longtail.serve.errors import ApiError
from longtail.serve.local import QUICK_CHARACTERS, LocalBackend
from serve.local_calls import ask, call, chat, events_of, idle, say, serving
from serve.text_models import END, save_chatty, save_speaker

TINY = resolve_model("tiny")
CONTEXT = 1024


@pytest.fixture(scope="module")
def speaker(tmp_path_factory) -> Path:
    return save_speaker(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory) -> Path:
    return save_chatty(tmp_path_factory.mktemp("chatty"))


# -- what is refused --------------------------------------------------------------------------------------------------

WEIRD = [
    (call(prompt=[]), "prompt"),
    (call(prompt=[[]]), "prompt.0"),
    (call(prompt=["a", [1]]), "prompt.1"),
    (call(CHAT, messages=[]), "messages"),
    (call(prompt="a", max_tokens=0), "max_tokens"),
    (call(prompt=[3, -1]), "prompt.1"),
    (call(prompt=[3, 99]), "prompt"),
    (call(prompt=[[3], [99]]), "prompt.1"),
    (call(prompt=[3, 10**40]), "prompt"),
    (call(prompt="a", n=0), "n"),
    (call(prompt="a", n=10**9), "n"),
    (call(prompt="a", temperature=float("nan")), "temperature"),
    (call(prompt="a", temperature=1e308), "temperature"),
    (call(prompt="a", top_k=True), "top_k"),
    (call(prompt="a", stop=""), "stop"),
    (chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}), "chat_template_kwargs.chat_template"),
    (chat(chat_template_kwargs={"tokenize": False}), "chat_template_kwargs.tokenize"),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages"),
]


def test_weird_requests_are_refused_by_name_while_others_go_on(chatty):
    async def use(backend):
        def asked(i):
            return call(prompt="abc", seed=i, max_tokens=60, ignore_eos=True)

        alone = [(await ask(backend, asked(i)))["choices"] for i in range(4)]
        running = [asyncio.create_task(ask(backend, asked(i))) for i in range(4)]
        await asyncio.sleep(0)
        for weird, param in WEIRD:
            for refuse in (backend.check, None):
                with pytest.raises(ApiError) as caught:
                    refuse(weird) if refuse else await backend.answer(weird)
                assert (caught.value.status, caught.value.param) == (400, param)
        assert [body["choices"] for body in await asyncio.gather(*running)] == alone

    serving(chatty, use)


def test_requests_that_look_weird_but_are_defined_are_answered(chatty):
    async def use(backend):
        for fine in (
            call(prompt="", max_tokens=2),  # this model begins a text with a token of its own
            chat("", max_tokens=2),
            call(prompt="a", max_tokens=10**40, temperature=0, stop="\n"),
            call(prompt="a", max_tokens=2, top_k=10**40, top_p=0),
            call(prompt="a", max_tokens=2, temperature=100),
            call(prompt="a", max_tokens=2, temperature=5e-324),
            call(prompt="\U0001f600\0\x7f\n", max_tokens=2),
            call(prompt="a", max_tokens=2, n=128),
        ):
            body = await ask(backend, fine)
            assert body["choices"][-1]["finish_reason"] in ("stop", "length")

    serving(chatty, use)


def test_an_empty_prompt_is_refused_where_no_token_begins_a_text(speaker):
    async def use(backend):
        for prompt, param in (("", "prompt"), (["<s>", ""], "prompt.1")):
            with pytest.raises(ApiError, match="prompt is empty, and this model has no token to begin") as caught:
                backend.check(call(prompt=prompt))
            assert (caught.value.status, caught.value.param) == (400, param)

    serving(speaker, use)


def test_a_model_without_a_template_and_a_template_that_refuses_are_400(tmp_path):
    folder = save_chatty(tmp_path, "{{ raise_exception('roles must alternate') }}")

    async def refused(backend, code, text):
        with pytest.raises(ApiError, match=text) as caught:
            backend.check(chat())
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, "messages")

    serving(TINY, lambda backend: refused(backend, "no_chat_template", "no chat template: use /v1/completions"))
    serving(folder, lambda backend: refused(backend, "invalid_value", "template refuses them: roles must alternate"))


def test_template_variables_reach_the_template(tmp_path):
    folder = save_chatty(tmp_path, "{{ messages[0].content }}{% if think %}hm{% endif %}")

    async def use(backend):
        plain = await ask(backend, chat("ab", max_tokens=1))
        more = await ask(backend, chat("ab", max_tokens=1, chat_template_kwargs={"think": True}))
        assert more["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 2

    serving(folder, use)


def test_only_the_served_model_is_found_under_its_name_and_its_folders(chatty):
    async def use(backend):
        for name in ("m", "chatty"):
            await ask(backend, call(prompt="a", max_tokens=1, model=name))
        with pytest.raises(ApiError, match="There is no model 'gpt-4' here, only 'm'") as caught:
            backend.check(call(prompt="a", model="gpt-4"))
        assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")

    serving(chatty, use)


def test_the_models_are_listed():
    async def use(backend):
        async def get(path):
            reply = await backend.get(path, ())
            return json.loads(b"".join([chunk async for chunk in reply.chunks]))

        listed = await get("/v1/models")
        assert (listed["object"], [m["id"] for m in listed["data"]]) == ("list", ["org/m"])
        assert await get("/v1/models/org/m") == await get("/v1/models/org%2Fm") == listed["data"][0]
        assert listed["data"][0]["max_model_len"] == CONTEXT
        with pytest.raises(ApiError) as caught:
            await get("/v1/models/other")
        assert caught.value.status == 404

    serving(TINY, use, name="org/m")


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 20_000])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(length):
    async def use(backend):
        for prompt in ([5] * length, "a" * (length - 1)):  # the tokenizer adds one
            with pytest.raises(ApiError, match=f"has {length} tokens, but the context of {CONTEXT} ") as caught:
                await ask(backend, call(prompt=prompt))
            assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")

    serving(TINY, use)


def test_a_text_of_millions_of_characters_is_refused_without_being_encoded():
    async def use(backend):
        with pytest.raises(ApiError, match=r"the prompt has more than \d+ tokens, but the context of 1024") as caught:
            await ask(backend, call(prompt="a" * 8_000_000))
        assert caught.value.code == "context_length_exceeded"

    serving(TINY, use)


def test_prompt_and_answer_may_fill_the_context_exactly(chatty):
    async def use(backend):
        for length, room in ((CONTEXT - 1, 1), (CONTEXT - 3, 3)):
            body = await ask(backend, call(prompt=[5] * length, max_tokens=100, ignore_eos=True))
            assert body["usage"]["completion_tokens"] == room
            assert body["choices"][0]["finish_reason"] == "length"

    async def use_short(backend):
        body = await ask(backend, chat("ab", ignore_eos=True))
        assert body["usage"]["total_tokens"] == 80

    serving(chatty, use)
    serving(chatty, use_short, max_context=80)


def test_a_small_kv_cache_lowers_the_context_or_is_refused_if_that_was_asked_for():
    small = 4 * 4 * LanePool.block_bytes(load_model(TINY, dtype=torch.float32).config, 16, torch.float32)
    with pytest.raises(CapacityError, match="holds 65 tokens, which is less than one sample of 512: raise --kv-memory"):
        LocalBackend(TINY, name="m", kv_bytes=small, max_context=512)
    with pytest.raises(CapacityError, match="holds 1 tokens"):
        LocalBackend(TINY, name="m", kv_bytes=1)

    async def use(backend):
        assert backend.max_context == 65
        bodies = [ask(backend, call(prompt=[5] * 30, max_tokens=99, ignore_eos=True)) for _ in range(5)]
        for body in await asyncio.gather(*bodies):
            assert body["usage"]["total_tokens"] == 65

    serving(TINY, use, kv_bytes=small)


def test_a_model_is_found_by_its_name():
    assert LocalBackend.load("tiny").name == "tiny"
    assert LocalBackend.load("tiny", name="other", slots=3).window == 0
    with pytest.raises(ModelError, match="did you mean 'tiny'"):
        LocalBackend.load("tinny")


# -- many, and the end ------------------------------------------------------------------------------------------------


def test_forty_requests_on_four_slots_get_what_they_get_alone():
    async def use(backend):
        def asked(i):
            return call(prompt=f"{i} + {i * 7}", seed=i, max_tokens=4 + i, n=1 + i % 3)

        alone = [(await ask(backend, asked(i)))["choices"] for i in range(40)]
        together = await asyncio.gather(*(ask(backend, asked(i)) for i in range(40)))
        assert [body["choices"] for body in together] == alone
        assert backend.window == 4

    serving(TINY, use, slots=4)


def test_outcomes_tell_what_became_of_a_call(speaker):
    async def use(backend):
        loop = asyncio.get_running_loop()
        before = loop.time()
        with held(backend) as gate:
            gate.set()
            reply = await backend.answer(say(stream=True, n=2, max_tokens=5))
            outcome = reply.outcome
            assert before <= outcome.first_token_s <= loop.time()
            assert outcome.output_tokens is None
        await events_of(reply)
        assert (outcome.output_tokens, outcome.streamed_tokens) == (10, 10)
        assert (outcome.finish, outcome.failure) == ("length", None)
        whole = await backend.answer(say())
        assert (whole.outcome.output_tokens, whole.outcome.streamed_tokens, whole.outcome.finish) == (END, END, "stop")

    serving(speaker, use)


def long_call(**fields):
    return call(prompt="abc", max_tokens=900, ignore_eos=True, n=3, **fields)


@contextlib.contextmanager
def held(backend: LocalBackend) -> Iterator[threading.Event]:
    """Steps of the engine do not end meanwhile; setting what this gives lets them, until one brings tokens."""
    engine, gate = backend._thread._engine, threading.Event()
    step = engine.step

    def waiting():
        assert gate.wait(120)
        result = step()
        if result.emitted:
            gate.clear()
        return result

    engine.step = waiting
    try:
        yield gate
    finally:
        engine.step = step
        gate.set()


async def stepwise(gate: threading.Event, work: Awaitable[Any]) -> Any:
    """What ``work`` gives, after hardly more steps than it needs: a token may be only a part of a character."""
    task = asyncio.ensure_future(work)
    while not task.done():
        gate.set()
        await asyncio.sleep(0.001)
    return await task


def test_a_client_that_goes_away_frees_its_lanes():
    async def use(backend):
        with held(backend):
            answers = [asyncio.create_task(backend.answer(long_call(stream=stream))) for stream in (False, True)]
            while not backend._thread._entries:
                await asyncio.sleep(0)
            for task in answers:
                task.cancel()
            kinds = [type(answer) for answer in await asyncio.gather(*answers, return_exceptions=True)]
        assert kinds == [asyncio.CancelledError] * 2
        await idle(backend)

        with held(backend) as gate:
            whole = asyncio.create_task(backend.answer(long_call()))
            while not backend.status()["running"]:
                gate.set()
                await asyncio.sleep(0.001)
            whole.cancel()
            await asyncio.gather(whole, return_exceptions=True)
        await idle(backend)

        with held(backend) as gate:
            unread = await stepwise(gate, backend.answer(long_call(stream=True)))
            await unread.chunks.aclose()
        await idle(backend)

        with held(backend) as gate:
            reading = await stepwise(gate, backend.answer(long_call(stream=True)))
            for _ in range(3):
                await stepwise(gate, anext(reading.chunks))
            await reading.chunks.aclose()
        await idle(backend)
        with pytest.raises(StopAsyncIteration):
            await anext(reading.chunks)

        with held(backend) as gate:
            stuck = await stepwise(gate, backend.answer(long_call(stream=True)))
            await anext(stuck.chunks)

            async def read_on():
                async for _ in stuck.chunks:
                    pass

            task = asyncio.create_task(read_on())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await idle(backend)

    serving(TINY, use)


def broken(backend: LocalBackend, *, after: threading.Event | None = None) -> None:
    """The engine fails once: in its next step, or once ``after`` is set, which it is slow to outrun."""
    engine = backend._thread._engine
    step = engine.step

    def failing():
        if after is None or after.wait(0.05):
            raise ValueError("boom")
        return step()

    engine.step = failing


def test_a_failing_engine_is_an_error_before_the_first_token_and_an_event_after_it():
    async def use(backend):
        broken(backend)
        with pytest.raises(ApiError) as caught:
            await backend.answer(long_call(stream=True))
        assert (caught.value.status, caught.value.code) == (500, "engine_failure")

        read = threading.Event()
        broken(backend, after=read)
        reply = await backend.answer(long_call(stream=True))
        read.set()
        events = await events_of(reply)
        assert json.loads(events[-1])["error"]["code"] == "engine_failure"
        assert (reply.outcome.failure, reply.outcome.output_tokens) == ("engine", None)

        read.clear()
        broken(backend, after=read)
        asyncio.get_running_loop().call_later(0.5, read.set)
        with pytest.raises(ApiError) as caught:
            await backend.answer(long_call())
        assert caught.value.status == 500
        assert (await ask(backend, call(prompt="a", max_tokens=2)))["usage"]["completion_tokens"] > 0
        assert backend.status()["ok"]

    serving(TINY, use)


def test_closing_ends_streams_with_an_error_event():
    async def use(backend):
        with held(backend) as gate:
            reply = await stepwise(gate, backend.answer(long_call(stream=True)))
            closing = asyncio.create_task(backend.close())
            await asyncio.sleep(0)
        await closing
        events = await events_of(reply)
        assert json.loads(events[-1])["error"]["code"] == "shutting_down"
        assert (backend.window, backend.status()["ok"]) == (0, False)

    async def main():
        backend = LocalBackend(TINY, name="m", kv_bytes=64 << 20)
        await backend.start()
        async with asyncio.timeout(200):
            await use(backend)

    asyncio.run(main())


def test_a_long_prompt_is_checked_when_it_is_answered_and_a_changed_call_is_read_again():
    async def use(backend):
        long = call(prompt="x" * (QUICK_CHARACTERS + 1))
        backend.check(long)
        with pytest.raises(ApiError) as caught:
            await backend.answer(long)
        assert caught.value.code == "context_length_exceeded"
        first = call(prompt="a", max_tokens=1)
        backend.check(first)
        other = call(prompt="a", max_tokens=2, ignore_eos=True)
        object.__setattr__(other, "request_id", first.request_id)
        reply = await backend.answer(other)
        assert reply.outcome.output_tokens == 2
        with pytest.raises(ApiError) as caught:
            backend.check(call("/v1/embeddings", input="a"))
        assert caught.value.status == 404

    serving(TINY, use)
