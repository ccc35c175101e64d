from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.serve import sse
from longtail.serve.sse import StreamWatch

NOTES = ("content_events", "completion_tokens", "finish", "errors", "done", "tokens", "finish_reason", "complete")


def watched(*chunks: bytes) -> StreamWatch:
    watch = StreamWatch()
    for chunk in chunks:
        watch.feed(chunk)
    watch.end()
    return watch


def notes(watch: StreamWatch) -> dict[str, Any]:
    return {name: getattr(watch, name) for name in NOTES}


def chunk(*, index: Any = 0, finish: str | None = None, usage: Any = None, **delta: Any) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], "usage": usage}).encode() + b"\n\n"


def test_it_counts_content_per_choice_and_leaves_out_events_without_any() -> None:
    watch = watched(
        chunk(role="assistant", content=""),
        chunk(content="a"),
        chunk(index=1, content="b"),
        chunk(index=1, reasoning_content="thinking"),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        chunk(finish="tool_calls"),
        chunk(index=1, finish="length"),
        b"data: [DONE]\n\n",
    )
    assert watch.content_events == {0: 2, 1: 2}
    assert watch.finish == {0: "tool_calls", 1: "length"}
    assert (watch.tokens, watch.finish_reason, watch.done, watch.complete) == (4, "length", True, True)


def test_text_of_the_older_endpoint_is_content_too() -> None:
    watch = watched(
        b'data: {"choices": [{"index": 0, "text": "a"}]}\n\ndata: {"choices": [{"index": 0, "text": ""}]}\n\n'
    )
    assert watch.content_events == {0: 1}


def test_the_servers_own_count_wins_and_the_last_one_holds() -> None:
    watch = watched(
        chunk(content="a", usage={"completion_tokens": 1}),
        chunk(content="b", usage={"completion_tokens": 5}),
        chunk(content="c", usage=None),
        chunk(content="d", usage={"completion_tokens": True}),
    )
    assert watch.completion_tokens == watch.tokens == 5


@pytest.mark.parametrize(
    "event", [b'data: {"error": {"message": "out of memory"}}\n\n', b'event: error\ndata: {"object": "error"}\n\n']
)
def test_an_error_event_is_noted_and_ends_a_stream(event: bytes) -> None:
    watch = watched(chunk(content="a"), event)
    assert (watch.errors, watch.done, watch.complete) == (1, False, True)


@pytest.mark.parametrize("newline", [b"\n", b"\r", b"\r\n"])
def test_all_line_ends_comments_and_several_data_lines_are_understood(newline: bytes) -> None:
    lines = [
        b": a comment",
        b"event: message",
        b'data: {"choices": [{"index": 0,',
        b": another",
        b'data:"delta": {"content": "a"}}]}',
        b"id: 7",
        b"",
        b": alone",
        b"",
        b"data:[DONE]",
        b"",
        b"",
    ]
    watch = watched(newline.join(lines))
    assert (watch.content_events, watch.done, watch.errors) == ({0: 1}, True, 0)


def test_what_is_no_json_or_of_another_shape_passes_without_a_note() -> None:
    odd = [b"{", b"[]", b"3", b'{"choices": {}}', b'{"choices": [1, {"delta": 2, "finish_reason": 3}]}']
    odd += [b'{"usage": []}', b"\xff\xfe", b"[" * 100_000]
    watch = watched(*(b"data: " + text + b"\n\n" for text in odd))
    assert notes(watch) == notes(watched())


def test_a_last_event_without_a_blank_line_counts() -> None:
    assert watched(b"data: [DONE]").done
    assert watched(b"data: [DONE]\n").done
    assert watched(chunk(content="a")[:-1]).content_events == {0: 1}


def test_a_place_between_events_is_told_to_the_byte() -> None:
    watch = StreamWatch()
    assert watch.feed(b"data: 1\n\ndata: 2") == 9
    assert watch.mid_event
    assert watch.feed(b"\n") == 0
    assert watch.mid_event
    assert watch.feed(b"\ndata: 3\n\n") == 10
    assert not watch.mid_event
    assert watch.feed(b": ping\n") == 7
    assert watch.feed(b"") == 0
    assert watch.feed(b"data: 4\r\n\r") == 10
    assert watch.feed(b"\n") == 1
    assert not watch.mid_event


def test_a_line_of_200_kb_and_one_byte_at_a_time_cost_no_more_than_their_length() -> None:
    long = chunk(content="x" * 200_000)
    began = time.process_time()
    watch = watched(*(long[i : i + 1] for i in range(len(long))))
    assert watch.content_events == {0: 1}
    assert time.process_time() - began < 10.0  # quadratic copying would take minutes


def test_an_event_beyond_the_limit_is_let_pass_and_the_next_one_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "LONGEST_EVENT_BYTES", 1000)
    long = chunk(content="x" * 3000)
    many = b"data: 1\n" * 500 + b"\n"
    comment = b":" + b"y" * 3000 + b"\n"
    for size in (1, 7, 500, 10_000):
        stream = long + many + comment + chunk(content="a")
        watch = StreamWatch()
        held = 0
        for at in range(0, len(stream), size):
            watch.feed(stream[at : at + size])
            held = max(held, len(watch._line) + sum(map(len, watch._data)))
        assert watch.content_events == {0: 1}
        assert held <= 1000 + size


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
usages = st.none() | st.builds(lambda n: {"completion_tokens": n}, st.integers(0, 9))
completions = st.builds(
    lambda index, text, finish, usage: json.dumps(
        {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}], "usage": usage},
        ensure_ascii=False,
    ),
    st.integers(0, 2),
    texts,
    st.sampled_from([None, None, "stop", "length"]),
    usages,
)
payloads = completions | st.sampled_from(["[DONE]", "", "{", '{"error": {"message": "no"}}', "x" * 70])
newlines = st.sampled_from(["\n", "\r", "\r\n"])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    parts: list[str] = []
    for payload in draw(st.lists(payloads, max_size=6)):
        newline = draw(newlines)
        if draw(st.booleans()):
            parts += [": comment", newline]
        if draw(st.booleans()):
            parts += ["event: x", newline]
        parts += ["data:" if draw(st.booleans()) else "data: ", payload, newline]
        if draw(st.booleans()):
            parts += ["data: more", draw(newlines)]
        parts += [newline] * draw(st.integers(0, 2))
    return "".join(parts).encode()


@st.composite
def split_streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    stream = draw(streams())
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    return stream, [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


@given(split_streams())
def test_however_a_stream_is_split_the_notes_are_the_same(case: tuple[bytes, list[bytes]]) -> None:
    stream, chunks = case
    assert notes(watched(*chunks)) == notes(watched(stream))


@given(split_streams())
def test_what_it_says_to_be_whole_events_ends_none_in_the_middle(case: tuple[bytes, list[bytes]]) -> None:
    _, chunks = case
    watch, so_far, sent = StreamWatch(), b"", 0
    for piece in chunks:
        whole = watch.feed(piece)
        assert 0 <= whole <= len(piece)
        if whole:
            sent = len(so_far) + whole
        so_far += piece
        # A blank line after what was let go starts no event and ends none, so it changes nothing.
        assert notes(watched(so_far[:sent], b"\n\n", so_far[sent:])) == notes(watched(so_far))
