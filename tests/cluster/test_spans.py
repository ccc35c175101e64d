"""Spans add up to the quanta that were recorded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.cluster.spans import SpanRecorder
from longtail.core.types import SubStage

quanta = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from([SubStage.DECODE, SubStage.TRAIN]),
        st.floats(0.001, 0.4),
        st.integers(1, 64),
    ),
    max_size=80,
)


@given(quanta)
def test_spans_hold_exactly_the_busy_time_and_tokens_of_their_quanta(quanta):
    recorder, now, spans = SpanRecorder(worker=0), 100.0, []
    for pipeline, substage, duration, tokens in quanta:
        recorder.add(pipeline, substage, 1, start=now, end=now + duration, tokens=tokens, batch=tokens)
        now += duration
        spans += recorder.take(now)
    spans += recorder.take(now, everything=True)
    assert sum(s.busy_s for s in spans) == pytest.approx(sum(q[2] for q in quanta))
    assert sum(s.tokens for s in spans) == sum(q[3] for q in quanta)
    assert sum(s.quanta for s in spans) == len(quanta)
    assert all(s.busy_s <= s.end - s.start + 1e-9 for s in spans)


def test_consecutive_quanta_of_one_kind_become_one_span():
    recorder = SpanRecorder(worker=3, window_s=1.0)
    for i in range(10):
        recorder.add("a", SubStage.DECODE, 2, start=i * 0.01, end=i * 0.01 + 0.01, tokens=8, batch=8)
    (span,) = recorder.take(0.1, everything=True)
    assert (span.worker, span.pipeline, span.substage, span.quanta, span.tokens) == (3, "a", "decode", 10, 80)
    assert span.batch == 8
