"""`longtail serve` as its users see it: OpenAI's own client, real weights, real sockets."""

import json
import threading

import httpx
import openai
import pytest

from longtail.engine.models import resolve_model
from longtail.serve.build import Options, front_door
from longtail.serve.local import LocalBackend
from serve.running import client as http
from serve.running import running, until


@pytest.fixture(scope="module")
def smollm2():
    def make():
        backend = LocalBackend(resolve_model("smollm2-135m"), name="smollm2-135m", slots=4, kv_bytes=1 << 28)
        return front_door(backend, Options(), title="test")

    with running(make) as server:
        yield server


@pytest.fixture
def client(smollm2):
    return openai.OpenAI(base_url=smollm2.url + "/v1", api_key="none", max_retries=0)


CHAT = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Name three colours."}]}


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["smollm2-135m"]
    assert client.models.retrieve("smollm2-135m").owned_by == "longtail"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_chat_streamed_is_the_chat_at_once(client):
    whole = client.chat.completions.create(**CHAT, max_tokens=24, seed=3)
    stream = client.chat.completions.create(
        **CHAT, max_tokens=24, seed=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text.strip()
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_several_samples_differ_and_the_same_seed_repeats_them(client):
    answers = [client.chat.completions.create(**CHAT, max_tokens=16, n=3, seed=5) for _ in range(2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    assert [choice.index for choice in answers[0].choices] == [0, 1, 2]
    chunks = client.chat.completions.create(**CHAT, max_tokens=16, n=3, seed=5, stream=True)
    streamed = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts[0]


def test_log_probabilities_come_in_both_shapes(client):
    chat = client.chat.completions.create(**CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3)
    content = chat.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-4)
        assert entry.logprob <= 0
    text = client.completions.create(model="smollm2-135m", prompt="The sea is", max_tokens=4, temperature=0, logprobs=2)
    found = text.choices[0].logprobs
    assert "".join(found.tokens) == text.choices[0].text
    assert len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 4


def test_a_stop_string_never_reaches_the_client(client):
    plain = client.completions.create(model="smollm2-135m", prompt="One two three", max_tokens=32, temperature=0)
    text = plain.choices[0].text
    stop = text[8:14]
    at = text.index(stop)
    for stream in (False, True):
        answer = client.completions.create(
            model="smollm2-135m", prompt="One two three", max_tokens=32, temperature=0, stop=[stop], stream=stream
        )
        chunks = list(answer) if stream else [answer]
        assert "".join(c.choices[0].text for c in chunks) == text[:at]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_several_prompts_are_answered_in_their_order(client):
    one = client.completions.create(model="smollm2-135m", prompt=["The sky", "A cat"], max_tokens=6, temperature=0)
    alone = [
        client.completions.create(model="smollm2-135m", prompt=p, max_tokens=6, temperature=0).choices[0].text
        for p in ("The sky", "A cat")
    ]
    assert [choice.text for choice in one.choices] == alone
    assert one.usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 10**9, "messages": [{"role": "user", "content": "a " * 20_000}]}, None),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name_while_others_go_on(smollm2, client, change, param):
    running_call = threading.Thread(target=lambda: client.chat.completions.create(**CHAT, max_tokens=8))
    running_call.start()
    answer = http.post(smollm2.url + "/v1/chat/completions", json={**CHAT, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param is None or error["param"].startswith(param)
    assert error["message"].endswith((".", ")", "'")) or error["message"]
    running_call.join(120)
    assert not running_call.is_alive()


@pytest.mark.parametrize("prompt", ["", [], [[]], [-1], [10**9], [True], [1.5], None, [[1], "a"], [""]])
def test_impossible_prompts_are_400(smollm2, prompt):
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 2}
    answer = http.post(smollm2.url + "/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("prompt")


def test_an_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="x")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(smollm2, stream):
    def load():
        return http.get(smollm2.url + "/health").json()["backend"]

    body = {**CHAT, "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    url = smollm2.url + "/v1/chat/completions"
    if stream:
        with http.stream("POST", url, json=body) as answer:
            next(answer.iter_bytes())
    else:
        with pytest.raises(httpx.ReadTimeout):
            http.post(url, json=body, timeout=httpx.Timeout(120, read=1.0))
    until(lambda: load()["running"] == load()["waiting"] == load()["blocks_used"] == 0)


def test_figures_tell_what_was_served(smollm2, client):
    before = smollm2.metric("longtail_output_tokens_total")
    client.completions.create(model="smollm2-135m", prompt="Hello", max_tokens=5, extra_body={"ignore_eos": True})
    assert smollm2.metric("longtail_output_tokens_total") == before + 5
    assert smollm2.metric("longtail_ttft_seconds_count") > 0
    document = http.get(smollm2.url + "/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    json.dumps(document, allow_nan=False)
