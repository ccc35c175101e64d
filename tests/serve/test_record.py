"""Recorded lengths: `rank train` reads them, nothing private is in them unless asked for, and disks may fail."""

import json
import stat
import sys
import threading
from pathlib import Path

import pytest

from longtail.core.errors import DataError
from longtail.lengths.data import read_lengths
from longtail.lengths.feature_rows import encode
from longtail.serve import record
from longtail.serve.calls import CHAT, Call, Outcome
from longtail.serve.record import Recorder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="file modes and /dev/full")


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(record, "CLOSE_WITHIN_S", 120.0)


def call(*prompts: str, samples: int = 1, quantile: float | None = 0.25, model: object = "m") -> Call:
    fields = {"model": model, "messages": [{"role": "user", "content": p} for p in prompts]}
    return Call(request_id="r", path=CHAT, body=b"", fields=fields, prompts=prompts, samples=samples, quantile=quantile)


def answer(tokens: int | None, finish: str | None = "stop", failure: str | None = None) -> Outcome:
    return Outcome(output_tokens=tokens, finish=finish, failure=failure)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().decode("ascii").splitlines()]


def test_the_lengths_that_are_recorded_are_those_that_a_ranker_is_trained_on(tmp_path):
    path = tmp_path / "lengths.jsonl"
    recorder = Recorder(path, keep_prompts=True)
    recorder.write(call("What is 7 x 8?"), answer(12))
    recorder.write(call("Write\na novel \ud83d\ude00 ü"), answer(4096, "length"))
    recorder.write(call("\ud800 half", quantile=None, model=None), answer(3, None))
    recorder.close()
    assert recorder.written == 3
    assert recorder.failed == 0
    data = read_lengths(path)
    assert data.unit == "tokens"
    assert data.prompts[0] == "What is 7 x 8?"
    assert data.lengths.tolist() == [12, 4096, 3]
    assert data.censored.tolist() == [False, True, False]
    assert data.notes == () or all("surrogate" in note for note in data.notes)
    first = rows(path)[0]
    assert list(first) == ["prompt", "output_tokens", "finish_reason", "model", "quantile", "time"]
    assert (first["model"], first["quantile"]) == ("m", 0.25)
    assert first["time"] > 1.6e9


def test_only_the_answers_of_a_wanted_model_are_read(tmp_path):
    path = tmp_path / "lengths.jsonl"
    recorder = Recorder(path, keep_prompts=True)
    for model in ("big", "small"):
        recorder.write(call("hi", model=model), answer(len(model)))
    recorder.close()
    assert read_lengths(path, model="small").lengths.tolist() == [5]


def test_without_leave_no_prompt_is_written_but_what_a_ranker_sees_of_it(tmp_path):
    path = tmp_path / "lengths.jsonl"
    prompt = "My password is hunter2, is that safe?"
    recorder = Recorder(path, keep_prompts=False)
    recorder.write(call(prompt), answer(80))
    recorder.write(call(prompt), answer(20))
    recorder.write(call("other"), answer(7, "length"))
    recorder.close()
    text = path.read_text()
    assert "hunter2" not in text
    assert "prompt" not in text
    first = rows(path)[0]
    assert first["features"] == json.loads(json.dumps(encode(prompt)))
    assert list(first) == ["features", "output_tokens", "finish_reason", "model", "quantile", "time"]
    data = read_lengths(path)
    assert data.lengths.tolist() == [50, 7]
    assert data.censored.tolist() == [False, True]


def test_prompts_need_the_leave_of_the_recorder_and_of_the_caller(tmp_path):
    path = tmp_path / "lengths.jsonl"
    recorder = Recorder(path, keep_prompts=True)
    recorder.write(call("private"), answer(10), prompt_allowed=False)
    recorder.write(call("public"), answer(20), prompt_allowed=True)
    recorder.close()
    assert ["features" in row for row in rows(path)] == [True, False]
    assert "private" not in path.read_text()
    assert read_lengths(path).lengths.tolist() == [10, 20]
    recorder = Recorder(path, keep_prompts=False)
    recorder.write(call("again"), answer(30), prompt_allowed=True)
    recorder.close()
    assert "again" not in path.read_text()


def test_several_samples_give_their_mean_length(tmp_path):
    path = tmp_path / "lengths.jsonl"
    recorder = Recorder(path, keep_prompts=True)
    recorder.write(call("hi", samples=3), answer(100))
    recorder.close()
    assert [row["output_tokens"] for row in rows(path)] == [33]


def test_calls_that_teach_nothing_are_left_out(tmp_path):
    path = tmp_path / "lengths.jsonl"
    recorder = Recorder(path, keep_prompts=True)
    recorder.write(call("unknown"), answer(None))
    recorder.write(call("cut"), answer(10, failure="cut"))
    recorder.write(call(), answer(10))
    recorder.write(call("which of", "the two?", samples=2), answer(10))
    recorder.close()
    assert path.read_bytes() == b""
    assert (recorder.written, recorder.failed) == (0, 0)


def test_only_the_owner_may_read_a_new_file(tmp_path):
    path = tmp_path / "lengths.jsonl"
    Recorder(path, keep_prompts=True).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("where", ["missing/lengths.jsonl", ""])
def test_a_file_that_cannot_be_opened_is_refused_at_the_start(tmp_path, where):
    with pytest.raises(DataError, match="lengths cannot be recorded there"):
        Recorder(tmp_path / where, keep_prompts=True)


@pytest.mark.parametrize("text", ["dear diary\n", '{"some": "json"}\n', '{"some": "json"}', "[1, 2]\n", "no line end"])
def test_a_file_of_something_else_is_refused_and_unharmed(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(DataError, match="choose another file"):
        Recorder(path, keep_prompts=True)
    assert path.read_text() == text


ROW = b'{"prompt": "a", "output_tokens": 1}'


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (b"", 0),
        (ROW + b"\n", 1),
        (ROW, 1),
        (ROW + b"\n" + ROW, 2),
        (ROW + b"\n" + ROW[:9], 1),
        (ROW[:9], 0),
        (ROW + b"\n" + b'{"prompt": "' + b"x" * 200_000, 1),
        (ROW + b"\n" + bytes(4096), 1),
    ],
)
def test_a_file_that_is_there_is_gone_on_with_and_its_torn_end_is_mended(tmp_path, before, kept):
    path = tmp_path / "lengths.jsonl"
    path.write_bytes(before)
    recorder = Recorder(path, keep_prompts=True)
    recorder.write(call("b"), answer(2))
    recorder.close()
    assert [row["prompt"] for row in rows(path)] == ["a"] * kept + ["b"]


def test_a_full_disk_is_counted_and_disturbs_nothing():
    recorder = Recorder("/dev/full", keep_prompts=True)
    for _ in range(3):
        recorder.write(call("hi"), answer(1))
    recorder.close()
    assert (recorder.written, recorder.failed) == (0, 3)


def test_a_prompt_that_cannot_be_encoded_costs_its_own_row_only(tmp_path, monkeypatch):
    def fails(prompt):
        if prompt == "bad":
            raise ValueError
        return {"version": 1}

    monkeypatch.setattr("longtail.lengths.feature_rows.encode", fails)
    path = tmp_path / "lengths.jsonl"
    recorder = Recorder(path, keep_prompts=False)
    for prompt in ("a", "bad", "b"):
        recorder.write(call(prompt), answer(1))
    recorder.close()
    assert len(rows(path)) == 2
    assert (recorder.written, recorder.failed) == (2, 1)


def test_rows_reach_the_disk_while_serving_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "EVERY_S", 0.01)
    path = tmp_path / "lengths.jsonl"
    recorder = Recorder(path, keep_prompts=True)
    recorder.write(call("hi"), answer(1))
    pause = threading.Event()
    for _ in range(3000):
        if recorder.written:
            break
        pause.wait(0.01)
    assert len(rows(path)) == 1
    recorder.close()


def test_a_disk_that_hangs_makes_rows_fail_not_memory_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "MOST_ROWS", 2)
    monkeypatch.setattr(record, "EVERY_S", 3600.0)
    path = tmp_path / "lengths.jsonl"
    recorder = Recorder(path, keep_prompts=True)
    for _ in range(5):
        recorder.write(call("hi"), answer(1))
    assert recorder.failed == 3
    recorder.close()
    assert len(rows(path)) == 2


def test_after_the_end_nothing_is_written(tmp_path):
    path = tmp_path / "lengths.jsonl"
    recorder = Recorder(path, keep_prompts=True)
    recorder.close()
    recorder.close()
    recorder.write(call("hi"), answer(1))
    assert path.read_bytes() == b""
    assert recorder.failed == 1
