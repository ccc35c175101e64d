import dataclasses
import json
import math
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.core.errors import ConfigError, DataError
from longtail.core.events import EVENTS, Event, Note, Progress, StepEnded, from_record
from longtail.observe.store import EVENTS_FILE, RunStore, encode, read_events, repair
from synthetic_run import two_pipelines

numbers = st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, -math.inf]))
FIELD = {
    str: st.text(st.characters()),
    int: st.integers(-(2**62), 2**62),
    float: numbers,
    bool: st.booleans(),
    list[str]: st.lists(st.text(), max_size=3),
    list[int]: st.lists(st.integers(0, 99), max_size=3),
    dict[str, float]: st.dictionaries(st.text() | st.sampled_from(["a/b", "nonfinite", ""]), numbers, max_size=4),
    str | None: st.none() | st.text(),
    float | None: st.none() | numbers,
}


def any_event(cls: type[Event]) -> st.SearchStrategy[Event]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: FIELD[hints[f.name]] for f in dataclasses.fields(cls)})


def same(a: Event, b: Event) -> bool:
    """Equality in which NaN equals NaN."""
    return type(a) is type(b) and repr(dataclasses.astuple(a)) == repr(dataclasses.astuple(b))


@pytest.mark.parametrize("cls", EVENTS.values(), ids=EVENTS.keys())
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_event_survives_strict_json_also_with_nan_and_infinity(cls, data):
    event = data.draw(any_event(cls))
    line = encode(event)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert same(event, from_record(json.loads(line, parse_constant=refuse)))


def test_numpy_numbers_are_logged_as_plain_ones():
    metrics = {"a": np.float32(0.5), "b": np.float64("nan"), "c": np.int64(3), "d": np.float32("-inf")}
    back = from_record(json.loads(encode(StepEnded(pipeline="p", step=1, metrics=metrics))))
    assert back.metrics["a"] == 0.5
    assert back.metrics["c"] == 3
    assert math.isnan(back.metrics["b"])
    assert back.metrics["d"] == -math.inf


def test_a_run_is_read_back_as_written_without_progress(tmp_path):
    events = list(two_pipelines())
    store = RunStore(tmp_path / "run")
    for event in events:
        store.write(event)
    assert list(read_events(tmp_path / "run")) == [e for e in events if not isinstance(e, Progress)]
    store.close()
    store.close()
    assert list(read_events(tmp_path / "run" / EVENTS_FILE)) == [e for e in events if not isinstance(e, Progress)]


def test_each_event_is_on_disk_before_write_returns(tmp_path):
    store = RunStore(tmp_path)
    for i in range(3):
        store.write(Note(t=i, level="info", message="x"))
        assert len(list(read_events(tmp_path))) == i + 1
    store.close()


def test_a_log_torn_at_any_byte_reads_and_continues(tmp_path):
    events = [
        Note(t=1.0, level="info", message="é {"),
        StepEnded(t=2.0, pipeline="p", step=1, metrics={"loss": math.nan}),
        Note(t=3.0, level="info", message="}\n"),
    ]
    whole = b"".join(map(encode, events))
    ends = [len(b"".join(map(encode, events[: i + 1]))) for i in range(3)]
    more = Note(t=4.0, level="info", message="after")
    for size in range(len(whole) + 1):
        path = tmp_path / EVENTS_FILE
        path.write_bytes(whole[:size])
        kept = events[: sum(end - 1 <= size for end in ends)]  # without its line break a record is whole
        assert list(map(repr, read_events(tmp_path))) == list(map(repr, kept))
        store = RunStore(tmp_path)
        store.write(more)
        store.close()
        assert list(map(repr, read_events(tmp_path))) == list(map(repr, [*kept, more]))


def test_zeros_after_a_power_failure_are_cut_off(tmp_path):
    path = tmp_path / EVENTS_FILE
    line = encode(Note(t=1.0, level="info", message="x"))
    path.write_bytes(line + b"\0" * 200_000)
    assert len(list(read_events(path))) == 1
    assert repair(path) == 200_000
    assert path.read_bytes() == line
    assert repair(path) == 0


@pytest.mark.parametrize(
    "damage",
    [
        b"{",
        b"[1]",
        b"7",
        b'{"kind": 3}',
        b'{"kind": "step", "t": 1}',
        b"\xff\xfe",
        b'{"kind":"note","t":NaN,"level":"info","message":""}',
    ],
)
def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path, damage):
    line = encode(Note(level="info", message="x"))
    (tmp_path / EVENTS_FILE).write_bytes(line + damage + b"\n" + line)
    events = read_events(tmp_path)
    next(events)
    with pytest.raises(DataError, match=r"events\.jsonl:2: this line is not an event"):
        next(events)


def test_kinds_and_fields_of_a_newer_version_are_ignored(tmp_path):
    lines = [b'{"kind":"telepathy","t":1.0}', b'{"kind":"note","t":1.0,"level":"info","message":"x","colour":"red"}']
    (tmp_path / EVENTS_FILE).write_bytes(b"\n".join(lines) + b"\n")
    assert list(read_events(tmp_path)) == [Note(t=1.0, level="info", message="x")]


def test_a_folder_without_a_log_is_an_error_that_says_so(tmp_path):
    with pytest.raises(DataError, match="is this the folder of a run"):
        list(read_events(tmp_path))


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RunStore(tmp_path / "file" / "run")


def test_an_event_that_is_not_plain_data_is_reported_and_the_log_stays_sound(tmp_path):
    warnings = []
    store = RunStore(tmp_path, warn=warnings.append)
    store.write(Note(level="info", message=object()))
    store.write(Note(level="info", message="next"))
    store.close()
    assert [e.message for e in read_events(tmp_path)] == ["next"]
    assert "not plain data" in warnings[0]
    assert "incomplete: 1 events" in warnings[1]
