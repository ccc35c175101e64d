"""Our engine behind OpenAI's API: the same answers streamed and whole, and nothing left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from longtail.core.types import Request, SamplingParams
from longtail.engine.checkpoint import load_model
from longtail.engine.engine import Engine
from longtail.engine.lanes import LanePool
from longtail.engine.models import resolve_model
from longtail.engine.tokenizer import Tokenizer
from longtail.serve.calls import CHAT
from serve.local_calls import ask, call, chat, finishes, joined, listen, say, scored, serving
from serve.text_models import END, SAID, SMILE, save_chatty, save_speaker

TINY = resolve_model("tiny")


@pytest.fixture(scope="module")
def speaker(tmp_path_factory) -> Path:
    return save_speaker(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory) -> Path:
    return save_chatty(tmp_path_factory.mktemp("chatty"))


# -- whole answers ----------------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_engine_says(chatty):
    tokenizer = Tokenizer.load(TINY)
    model = load_model(TINY, dtype=torch.float32)
    engine = Engine(model, LanePool(model.config, blocks=400), detokenize=tokenizer.decode)
    prompt = tokenizer.encode_prompt("Reverse: abc", chat=False)
    params = SamplingParams(max_tokens=30, temperature=0, end_token_ids=tokenizer.end_token_ids)
    engine.add(Request(request_id="r", prompt=prompt, seeds=(0,), params=params))
    completions = []
    while engine.has_work:
        completions += engine.step().completions

    async def use(backend):
        body = await ask(backend, call(prompt="Reverse: abc", temperature=0, max_tokens=30))
        expected = completions[0]
        assert body["choices"] == [
            {"index": 0, "text": expected.text, "logprobs": None, "finish_reason": expected.finish.value}
        ]
        generated = len(expected.tokens)
        assert body["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": generated,
            "total_tokens": len(prompt) + generated,
        }
        assert body["object"] == "text_completion"
        assert body["id"].startswith("cmpl-")
        assert body["model"] == "m"
        assert (await ask(backend, call(prompt=prompt.tolist(), temperature=0, max_tokens=30)))["choices"] == body[
            "choices"
        ]

    serving(TINY, use)


def test_a_chat_answer_has_openais_shape(speaker):
    async def use(backend):
        body = await ask(backend, chat("one tw"))
        assert set(body) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
        assert body["object"] == "chat.completion"
        assert body["id"].startswith("chatcmpl-")
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": SAID, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert body["usage"]["completion_tokens"] == END  # nine words and the end token

    serving(speaker, use)


def test_an_echo_stands_before_each_choice():
    async def use(backend):
        asked = {"prompt": ["ab", "xyz"], "n": 2, "echo": True, "max_tokens": 3, "seed": 1}
        plain = await ask(backend, call(**{**asked, "echo": False}))
        echoed = await ask(backend, call(**asked))
        expected = [p + c["text"] for p, c in zip(["ab", "ab", "xyz", "xyz"], plain["choices"], strict=True)]
        assert [c["text"] for c in echoed["choices"]] == expected
        events, _ = await listen(backend, call(**asked, stream=True))
        assert joined(events) == dict(enumerate(expected))

    serving(TINY, use)


def test_a_sample_ends_at_its_end_token_unless_that_is_to_be_ignored(speaker):
    async def use(backend):
        body = await ask(backend, say(max_tokens=15))
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (SAID, "stop")
        assert body["usage"]["completion_tokens"] == END
        body = await ask(backend, say(max_tokens=15, ignore_eos=True))
        assert body["choices"][0]["text"].startswith(SAID + "one")
        assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 15)

    serving(speaker, use)


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"temperature": 0}, {"seed": 5}, {"seed": 5, "top_p": 0.8, "top_k": 20}])
def test_a_stream_says_what_the_whole_answer_says(chatty, asked):
    async def use(backend):
        for make in (
            lambda **more: call(prompt=["Reverse: abc", "12 + 30"], n=3, max_tokens=25, **asked, **more),
            lambda **more: chat("Collatz 7", n=3, max_tokens=25, **asked, **more),
        ):
            whole = await ask(backend, make())
            events, reply = await listen(backend, make(stream=True, stream_options={"include_usage": True}))
            texts = [c["text"] if "text" in c else c["message"]["content"] for c in whole["choices"]]
            assert joined(events) == dict(enumerate(texts))
            assert finishes(events) == {c["index"]: c["finish_reason"] for c in whole["choices"]}
            assert events[-1]["usage"] == whole["usage"]
            assert reply.outcome.output_tokens == whole["usage"]["completion_tokens"]

    serving(chatty, use)


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason(speaker):
    async def use(backend):
        events, _ = await listen(backend, chat(n=2, stream=True))
        assert {e["id"] for e in events} == {events[0]["id"]}
        assert {e["object"] for e in events} == {"chat.completion.chunk"}
        assert "usage" not in events[0]
        for index in range(2):
            own = [c for e in events for c in e["choices"] if c["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert own[-1] == {"index": index, "delta": {}, "logprobs": None, "finish_reason": "stop"}
            assert all(set(c["delta"]) == {"content"} for c in own[1:-1])

    serving(speaker, use)


def test_usage_comes_last_without_choices_and_is_null_before(speaker):
    async def use(backend):
        events, _ = await listen(backend, say(stream=True, stream_options={"include_usage": True}))
        assert all(event["usage"] is None for event in events[:-1])
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == {"prompt_tokens": 1, "completion_tokens": END, "total_tokens": END + 1}

    serving(speaker, use)


STOPS = [
    ("e four f", "one two thre", "stop", 5),
    (["six seven"], SAID, "stop", END),
    (["three", "three four"], "one two ", "stop", 4),
    ([SMILE], "one two three four five six ", "stop", 8),
    (["one"], "", "stop", 1),
    (["e four five six seven"], SAID, "stop", END),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "text", "finish", "tokens"), STOPS)
def test_no_character_of_a_stop_string_comes_out(speaker, stop, text, finish, tokens, stream):
    async def use(backend):
        for make in (say, chat):
            asked = make(stop=stop, temperature=0, stream=stream, **_usage(stream))
            if stream:
                events, _ = await listen(backend, asked)
                found = (joined(events)[0], finishes(events)[0], events[-1]["usage"]["completion_tokens"])
            else:
                body = await ask(backend, asked)
                choice = body["choices"][0]
                found = (
                    choice["text"] if "text" in choice else choice["message"]["content"],
                    choice["finish_reason"],
                    body["usage"]["completion_tokens"],
                )
            assert found == (text, finish, tokens)

    serving(speaker, use)


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_inside_a_partial_match_gives_the_text_that_was_held_back(speaker, stream):
    async def use(backend):
        asked = say(stop=["e four five six seven"], max_tokens=5, stream=stream)
        if stream:
            events, _ = await listen(backend, asked)
            assert (joined(events), finishes(events)) == ({0: "one two three four five"}, {0: "length"})
        else:
            choice = (await ask(backend, asked))["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("one two three four five", "length")

    serving(speaker, use)


def _usage(stream: bool) -> dict:
    return {"stream_options": {"include_usage": True}} if stream else {}


# -- log-probabilities ------------------------------------------------------------------------------------------------


def test_log_probabilities_of_a_completion_name_the_tokens_of_its_text(speaker):
    async def use(backend):
        asked = {"logprobs": 2, "temperature": 0}
        whole = (await ask(backend, say(**asked)))["choices"][0]["logprobs"]
        assert whole["tokens"] == [
            "one", " tw", "o", " three", " four five", " six ", r"bytes:\xf0\x9f", r"bytes:\x99\x82", " end",
        ]  # fmt: skip
        assert whole["text_offset"] == [0, 3, 6, 7, 13, 23, 28, 28, 29]
        assert [SAID[at] for at in whole["text_offset"]] == ["o", " ", "o", " ", " ", " ", SMILE, SMILE, " "]
        for token, logprob, top in zip(whole["tokens"], whole["token_logprobs"], whole["top_logprobs"], strict=True):
            assert top[token] == logprob == max(top.values())
            assert len(top) == 2
        events, _ = await listen(backend, say(**asked, stream=True))
        assert {key: scored(events, key) for key in whole} == whole

    serving(speaker, use)


def test_log_probabilities_of_a_chat_have_bytes_and_the_most_likely_tokens(chatty):
    async def use(backend):
        asked = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12, "seed": 3}
        choice = (await ask(backend, chat("abc", **asked)))["choices"][0]
        content = choice["logprobs"]["content"]
        assert (
            bytes(byte for entry in content for byte in entry["bytes"] or ()).decode() == choice["message"]["content"]
        )
        for entry in content:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
            assert len(values) == 3
            assert entry["logprob"] <= values[0] <= 0
            assert entry["logprob"] in values or entry["logprob"] < values[-1]
        events, _ = await listen(backend, chat("abc", **asked, stream=True))
        assert scored(events, "content") == content

    serving(chatty, use)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_end_with_the_text_and_do_not_name_what_a_stop_string_cut_off(speaker, stream):
    async def use(backend):
        asked = say(logprobs=0, stop=["ee four five six"], temperature=0, stream=stream)
        if stream:
            events, _ = await listen(backend, asked)
            tokens = scored(events, "tokens")
            sent = "".join(c["text"] for e in events for c in e["choices"])
        else:
            choice = (await ask(backend, asked))["choices"][0]
            tokens, sent = choice["logprobs"]["tokens"], choice["text"]
            assert choice["logprobs"]["top_logprobs"] == [
                {t: p} for t, p in zip(tokens, choice["logprobs"]["token_logprobs"], strict=True)
            ]
        assert sent == "one two thr"
        assert tokens == ["one", " tw", "o", " three"]

    serving(speaker, use)


def test_log_probabilities_are_numbers_even_where_a_token_is_impossible(speaker):
    async def use(backend):
        body = await ask(backend, say(logprobs=20, temperature=1e-300))
        for top in body["choices"][0]["logprobs"]["top_logprobs"]:
            assert min(top.values()) == -9999.0

    serving(speaker, use)


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_answer_whatever_else_runs_and_no_seed_another():
    async def use(backend):
        async def texts(**fields):
            body = await ask(backend, call(prompt="abc", max_tokens=24, n=4, **fields))
            return [choice["text"] for choice in body["choices"]]

        alone = await texts(seed=11)
        others = [texts(seed=i) for i in range(6)]
        crowded, *rest = await asyncio.gather(texts(seed=11), *others)
        assert crowded == alone
        assert len(set(alone)) == 4
        assert alone not in rest
        assert len({tuple(await texts()) for _ in range(5)}) > 1
        assert await texts(seed=-(2**63)) == await texts(seed=-(2**63))
        assert len(set(await texts(top_p=0))) == 1

    serving(TINY, use, slots=4)


def test_choices_are_numbered_by_prompt_then_sample():
    async def use(backend):
        both = await ask(backend, call(prompt=["ab", "12 + 3"], n=2, seed=4, max_tokens=8))
        apart = [await ask(backend, call(prompt=p, n=2, seed=4, max_tokens=8)) for p in ("ab", "12 + 3")]
        assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
        assert [c["text"] for c in both["choices"]] == [c["text"] for body in apart for c in body["choices"]]
        assert both["usage"]["prompt_tokens"] == sum(body["usage"]["prompt_tokens"] for body in apart)

    serving(TINY, use)


@pytest.mark.slow
def test_a_real_model_answers_a_chat_alike_streamed_and_whole():
    async def use(backend):
        asked = {"messages": [{"role": "user", "content": "Name three colours, with an emoji each."}]}
        asked |= {"model": "m", "max_tokens": 40, "seed": 2, "stop": ["3."], "logprobs": True, "top_logprobs": 2}
        whole = await ask(backend, call(CHAT, **asked))
        events, _ = await listen(backend, call(CHAT, **asked, stream=True))
        choice = whole["choices"][0]
        text = choice["message"]["content"]
        assert len(text) > 10
        assert joined(events) == {0: text}
        assert scored(events, "content") == choice["logprobs"]["content"]
        named = b"".join(bytes(entry["bytes"] or ()) for entry in choice["logprobs"]["content"])
        assert named.decode(errors="replace").startswith(text)

    serving(resolve_model("smollm2-135m"), use, max_context=512, kv_bytes=128 << 20)
