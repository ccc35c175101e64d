"""Every body is a request that can be served or a 400 that names the field."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.serve.calls import CHAT, COMPLETIONS
from longtail.serve.errors import ApiError
from longtail.serve.openai_schema import ChatBody, CompletionBody, parse_body

TEXT = {"model": "m", "prompt": "hello"}
TALK = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
NAN = float("nan")
DEEP = json.loads("[" * 200 + "]" * 200)


def refused(path: str, **fields) -> ApiError:
    base = TEXT if path == COMPLETIONS else TALK
    with pytest.raises(ApiError) as caught:
        parse_body(path, {**base, **fields})
    error = caught.value
    assert error.status == 400
    assert error.message.endswith(".")
    assert "\n" not in error.message
    assert error.param is not None
    assert error.param.split(".")[0] in error.message
    return error


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("model", None, "model"),
        ("model", 7, "model"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("max_tokens", "16", "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("temperature", -0.1, "temperature"),
        ("temperature", NAN, "temperature"),
        ("temperature", float("inf"), "temperature"),
        ("temperature", "hot", "temperature"),
        ("temperature", True, "temperature"),
        ("top_p", 1.01, "top_p"),
        ("top_p", -0.1, "top_p"),
        ("top_p", NAN, "top_p"),
        ("top_k", -2, "top_k"),
        ("top_k", 1.0, "top_k"),
        ("n", 0, "n"),
        ("n", 129, "n"),
        ("n", 10**30, "n"),
        ("n", True, "n"),
        ("n", DEEP, "n"),
        ("stream", 1, "stream"),
        ("stream", "true", "stream"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("stop", "", "stop"),
        ("stop", ["a", ""], "stop.1"),
        ("stop", ["a"] * 17, "stop"),
        ("stop", [1], "stop.0"),
        ("stop", 7, "stop"),
        ("stop", {"a": 1}, "stop"),
        ("stop", "x" * 1025, "stop"),
        ("stop", "\udfff", "stop"),
        ("model", "\ud8ff", "model"),
        ("seed", 1.5, "seed"),
        ("seed", 2**63, "seed"),
        ("seed", "7", "seed"),
        ("best_of", 2, "best_of"),
        ("ignore_eos", "yes", "ignore_eos"),
        ("presence_penalty", 0.5, "presence_penalty"),
        ("frequency_penalty", -1, "frequency_penalty"),
        ("logit_bias", {"50256": -100}, "logit_bias"),
        ("min_p", 0.1, "min_p"),
        ("structured_outputs", {"json": {}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_value_that_cannot_be_served_is_refused_by_the_name_of_its_field(path, field, value, param):
    assert refused(path, **{field: value}).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [[1], []]}, "prompt.1"),
        ({"prompt": [1, -1]}, "prompt.1"),
        ({"prompt": [1, True]}, "prompt.1"),
        ({"prompt": [1, 2.0]}, "prompt.1"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"prompt": [[1], "a"]}, "prompt.1"),
        ({"prompt": [None]}, "prompt.0"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": DEEP}, "prompt.0.0"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": ["a", "b\udc00"]}, "prompt.1"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 128}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"echo": 1}, "echo"),
        ({"suffix": "end"}, "suffix"),
    ],
)
def test_a_completion_that_cannot_be_served_is_refused_by_the_name_of_its_field(fields, param):
    assert refused(COMPLETIONS, **fields).param == param


def message(**fields) -> dict:
    return {"messages": [{"role": "user", "content": "hello", **fields}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages.0"),
        ({"messages": [{}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": DEEP}, "messages.0"),
        (message(role="robot"), "messages.0.role"),
        (message(content=None), "messages.0.content"),
        (message(content=7), "messages.0.content"),
        (message(content=[]), "messages.0.content"),
        (message(content="\ud800"), "messages.0.content"),
        (message(content=["hello"]), "messages.0.content.0"),
        (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages.0.content.0.type"),
        (message(content=[{"type": "text"}]), "messages.0.content.0.text"),
        (message(content=[{"type": "text", "text": "a"}, {"type": "text", "text": None}]), "messages.0.content.1.text"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_a_chat_that_cannot_be_served_is_refused_by_the_name_of_its_field(fields, param):
    assert refused(CHAT, **fields).param == param


def test_what_is_not_supported_says_what_would_be():
    error = refused(CHAT, response_format={"type": "json_object"})
    assert error.message == (
        'response_format is not supported by this server: leave it out or set it to {"type": "text"}.'
    )
    assert error.code == "unsupported_parameter"
    assert refused(CHAT, temperature=-1).code == "invalid_value"


def test_a_missing_field_is_named():
    for path, fields in ((COMPLETIONS, {"model": "m"}), (CHAT, {"model": "m"}), (CHAT, {"messages": TALK["messages"]})):
        with pytest.raises(ApiError, match=r"^(prompt|messages|model): field required\.$"):
            parse_body(path, fields)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_neutral_values_null_and_unknown_fields_are_accepted(path):
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "modalities": ["text"],
        "best_of": 1,
        "suffix": "",
        "min_p": 0.0,
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "priority": -5,
        "x_team": DEEP,
        "logprobs": None,
        "parallel_tool_calls": True,
    }
    base = TEXT if path == COMPLETIONS else TALK
    plain = parse_body(path, base)
    nulls = dict.fromkeys(name for name in type(plain).model_fields if name not in base)
    for fields in (neutral, nulls):
        # The neutral best_of says what n is already.
        assert {**parse_body(path, {**base, **fields}).model_dump(), "best_of": None} == plain.model_dump()


def test_the_forms_of_a_prompt():
    def prompts(prompt):
        body = parse_body(COMPLETIONS, {"model": "m", "prompt": prompt})
        assert isinstance(body, CompletionBody)
        return body.prompts

    assert prompts("a") == ["a"]
    assert prompts("") == [""]
    assert prompts(["a", ""]) == ["a", ""]
    assert prompts([1, 2]) == [[1, 2]]
    assert prompts([[1], [2, 3]]) == [[1], [2, 3]]


def test_limits_stops_and_log_probabilities_mean_what_they_mean_at_openai():
    def text(**fields):
        return parse_body(COMPLETIONS, {**TEXT, **fields})

    def talk(**fields):
        return parse_body(CHAT, {**TALK, **fields})

    assert (text().limit, text(max_tokens=3).limit) == (16, 3)
    assert (talk().limit, talk(max_tokens=3).limit, talk(max_tokens=3, max_completion_tokens=4).limit) == (None, 3, 4)
    assert (text().top, text(logprobs=0).top, text(logprobs=20).top) == (None, 0, 20)
    assert (talk().top, talk(logprobs=True).top, talk(logprobs=True, top_logprobs=20).top) == (None, 0, 20)
    assert (talk(stop=[]).stops, talk(stop="a").stops, talk(stop=["a", "b"]).stops) == ((), ("a",), ("a", "b"))
    assert talk(seed=-(2**63)).seed == -(2**63)
    assert talk(n=2, best_of=2).samples == 2
    assert talk(stream=True, stream_options={"include_usage": True}).include_usage
    assert not talk(stream=True, stream_options={}).include_usage


def test_messages_reach_the_template_with_one_text_the_older_role_and_all_they_came_with():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
    ]
    body = parse_body(CHAT, {"model": "m", "messages": messages})
    assert isinstance(body, ChatBody)
    assert [message.for_template() for message in body.messages] == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
    ]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "tools", "audio", "logit_bias"}))


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from([COMPLETIONS, CHAT]), fields=st.dictionaries(names, json_values, max_size=4))
def test_any_json_is_a_request_or_a_400(path, fields):
    base = TEXT if path == COMPLETIONS else TALK
    error = None
    try:
        parse_body(path, {**base, **fields})
    except ApiError as raised:
        error = raised
    if error is not None:
        assert (error.status, bool(error.param)) == (400, True)
        json.loads(error.body())


def test_the_schemas_describe_every_field_that_is_read():
    for body in (CompletionBody, ChatBody):
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        assert set(schema["properties"]) == set(body.model_fields)
        assert "model" in schema["required"]
        json.dumps(schema, allow_nan=False)
