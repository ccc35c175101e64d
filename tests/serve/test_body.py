"""Bodies are read whole and changed in one field only."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.serve.body import given_priority, parse, prompts_of, samples_of, token_limit_of, with_priority
from longtail.serve.calls import CHAT, COMPLETIONS
from longtail.serve.errors import ApiError

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text() | st.just("priority"), values, max_size=6)
layouts = st.sampled_from([{}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}])


@given(objects, st.integers(-(2**63), 2**63 - 1), layouts)
def test_only_the_priority_of_a_body_is_changed(fields, priority, layout):
    body = json.dumps(fields, **layout).encode(errors="surrogatepass").decode(errors="replace").encode()
    before = parse(body)
    assert parse(with_priority(body, priority)) == {**before, "priority": priority}
    assert parse(with_priority(body, None)) == {k: v for k, v in before.items() if k != "priority"}


def test_numbers_keep_their_digits_and_text_its_bytes():
    body = b'{ "seed": 12345678901234567, "t":1.0, "e": 1e-7 ,"x_team": "\xc3\xa4\\u00e4", "top_k":-1 }'
    assert with_priority(body, 7) == body[:-1] + b', "priority": 7}'


@pytest.mark.parametrize(
    "body",
    [
        b'{"priority": 1, "a": {"priority": 2}}',
        b'{"a": {"priority": 2}, "priority": 1, "priority": 3}',
        b'{"\\u0070riority": 1, "a": {"priority": 2}}',
        b' {\n"a" : {"priority": 2} ,\r\n\t"priority" :\n [1, {"x": "}"}] } \n',
    ],
)
def test_a_clients_own_priority_is_taken_out_wherever_it_stands(body):
    assert parse(with_priority(body, 9)) == {"a": {"priority": 2}, "priority": 9}
    assert parse(with_priority(body, None)) == {"a": {"priority": 2}}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"a"', "must be a JSON object"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": 1} {}', "not valid JSON"),
    ],
)
def test_what_is_no_json_object_is_refused_with_a_sentence(body, says):
    with pytest.raises(ApiError, match=says) as caught:
        parse(body)
    assert caught.value.status == 400


def test_the_last_user_message_ranks_a_chat_and_every_text_a_completion():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert prompts_of(CHAT, {"messages": messages}) == ("hi",)
    assert prompts_of(COMPLETIONS, {"prompt": "a"}) == ("a",)
    assert prompts_of(COMPLETIONS, {"prompt": ["a", "b"]}) == ("a", "b")
    for nothing in ({}, {"prompt": [1, 2]}, {"prompt": None}, {"prompt": ["a", 1]}, {"prompt": 3}):
        assert prompts_of(COMPLETIONS, nothing) == ()
    assert prompts_of("/v1/responses", {"input": "a"}) == ("a",)
    assert prompts_of("/v1/responses", {"input": [{"role": "user", "content": "b"}]}) == ("b",)
    assert prompts_of("/v1/messages", {"messages": messages}) == ("hi",)
    for nothing in ({"messages": 3}, {"messages": [{"role": "user", "content": 3}]}):
        assert prompts_of(CHAT, nothing) == ()


@given(path=st.sampled_from([CHAT, COMPLETIONS]), fields=objects, n=values, prompt=values, messages=values)
def test_nothing_that_a_client_sends_breaks_reading_it(path, fields, n, prompt, messages):
    fields = {**fields, "n": n, "prompt": prompt, "messages": messages, "max_tokens": n}
    assert all(isinstance(text, str) and text.encode() is not None for text in prompts_of(path, fields))
    assert 1 <= samples_of(path, fields) <= 1024
    assert token_limit_of(fields) is None or token_limit_of(fields) > 0
    given_priority(fields, None)


def test_samples_are_counted_over_prompts():
    assert samples_of(COMPLETIONS, {"prompt": ["a", "b"], "n": 3}) == 6
    assert samples_of(COMPLETIONS, {"prompt": [1, 2, 3], "n": 2}) == 2
    assert samples_of(COMPLETIONS, {"prompt": [[1], [2]]}) == 2
    assert samples_of(CHAT, {"messages": [], "n": True}) == 1
    assert samples_of(CHAT, {"n": 10**9}) == 1024


def test_a_priority_is_an_int64_from_header_or_body():
    assert given_priority({"priority": 5}, None) == 5
    assert given_priority({"priority": 5}, b"-7") == -7
    for wrong in (True, "5", 1.0, 2**63, None):
        assert given_priority({"priority": wrong}, None) is None
    assert given_priority({}, b"x") is None
