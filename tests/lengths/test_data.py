"""Reading prompts and lengths: formats, columns, units, bad rows, and the split by prompt."""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.core.errors import ConfigError, DataError
from longtail.lengths.data import Columns, LengthData, Sample, join, read_lengths, split
from longtail.lengths.data_prompts import read_prompts
from longtail.lengths.messages import first_exchange, prompt_text
from longtail.lengths.units import Unit


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rows_of(data: LengthData) -> dict[str, float]:
    return dict(zip(data.prompts, data.lengths.tolist(), strict=True))


@pytest.fixture
def file(tmp_path):
    return lambda *rows: write(tmp_path / "data.jsonl", *rows)


SYSTEM = {"role": "system", "content": "s"}

# -- JSON lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "length", "unit"),
    [
        ({"prompt": "p", "output_tokens": 7}, 7, "tokens"),
        ({"prompt": "p", "prompt_tokens": 99, "completion_tokens": 7}, 7, "tokens"),
        ({"Question": "p", "Tokens": 7}, 7, "tokens"),
        ({"instruction": "p", "words": 7}, 7, "words"),
        ({"prompt": "p", "chars": 7, "words": 3}, 3, "words"),
        ({"prompt": "p", "length": 7}, 7, "unstated"),
        ({"prompt": "p", "response": "one two  three\n"}, 3, "words"),
        ({"question": "p", "answer": "one two"}, 2, "words"),
        ({"prompt": "p", "completion": [{"role": "assistant", "content": "a b c"}]}, 3, "words"),
        ({"messages": [SYSTEM, {"role": "user", "content": "p"}], "tokens": 7}, 7, "tokens"),
        ({"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a b"}]}, 2, "words"),
        ({"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "a b"}]}, 2, "words"),
    ],
)  # fmt: skip
def test_columns_and_units_are_recognised(file, row, length, unit):
    data = read_lengths(file(row))
    assert rows_of(data) == {"p": length}
    assert data.unit == unit


def test_alpaca_rows_join_instruction_and_input(file):
    rows = [("Sort", "b a", "a b"), ("Hi", "", "x")]
    data = read_lengths(file(*(dict(zip(("instruction", "input", "output"), row, strict=True)) for row in rows)))
    assert rows_of(data) == {"Sort\n\nb a": 2, "Hi": 1}


def test_several_rows_of_a_prompt_are_samples_and_the_label_is_their_median(file):
    samples = [("a", 1), ("b", 5), ("a", 9), ("a", 2), ("b", 6)]
    data = read_lengths(file(*({"prompt": p, "tokens": n} for p, n in samples)))
    assert rows_of(data) == {"a": 2, "b": 5.5}


def test_a_length_for_each_model_is_several_samples_or_the_one_of_a_model(file):
    path = file({"prompt": "a", "tokens": {"x": 1, "y": 2, "z": 9}}, {"prompt": "b", "tokens": {"x": 4, "y": None}})
    assert rows_of(read_lengths(path)) == {"a": 2, "b": 4}
    only_y = read_lengths(path, model="y")
    assert rows_of(only_y) == {"a": 2}
    assert only_y.notes == ("data.jsonl: 1 row of other models left out",)
    with pytest.raises(DataError, match=r"no answers of a model 'xx' \(--model\); did you mean 'x'\?"):
        read_lengths(path, model="xx")


def test_rows_that_name_their_model_can_be_chosen_by_it(file):
    path = file({"prompt": "a", "tokens": 1, "model": "x"}, {"prompt": "a", "tokens": 9, "model": "y"})
    assert rows_of(read_lengths(path)) == {"a": 5}
    assert rows_of(read_lengths(path, model="y")) == {"a": 9}


def test_named_columns_win_over_recognised_ones(file):
    path = file({"prompt": "x", "q": "p", "tokens": 1, "cost_tokens": 8, "response": "a", "text2": "a b c", "cut": 1})
    columns = Columns(prompt="q", length="cost_tokens", censored="cut")
    data = read_lengths(path, columns=columns)
    assert (rows_of(data), data.unit, data.censored.tolist()) == ({"p": 8}, "tokens", [True])
    assert rows_of(read_lengths(path, columns=Columns(response="text2"))) == {"x": 3}
    with pytest.raises(DataError, match=r"data.jsonl:1: there is no column 'tokns' \(--length-column\); did you mean"):
        read_lengths(path, columns=Columns(length="tokns"))


@pytest.mark.parametrize(
    ("row", "censored"),
    [
        ({"censored": True}, True),
        ({"finish_reason": "length"}, True),
        ({"finish_reason": "stop"}, False),
        ({"stop_reason": "max_tokens"}, True),
        ({"truncated": 0}, False),
        ({"censored": None}, False),
        ({}, False),
    ],
)
def test_cut_off_answers_are_marked(file, row, censored):
    assert read_lengths(file({"prompt": "p", "tokens": 7} | row)).censored.tolist() == [censored]


def test_a_median_is_censored_if_a_middle_sample_is(file):
    def of(*samples):
        return read_lengths(file(*({"prompt": "p", "tokens": n, "censored": c} for n, c in samples))).censored.tolist()

    assert of((5, False), (6, False), (9, True)) == [False]
    assert of((5, False), (9, True), (9, True)) == [True]
    assert of((5, False), (9, True)) == [True]


def test_gzip_byte_order_mark_crlf_and_blank_lines_change_nothing(tmp_path):
    text = '{"prompt": "a", "tokens": 1}\r\n\r\n{"prompt": "b", "tokens": 2}\r\n'
    plain, marked, zipped = tmp_path / "plain", tmp_path / "marked", tmp_path / "no-suffix"
    plain.write_bytes(text.encode())
    marked.write_bytes(b"\xef\xbb\xbf" + text.encode())
    zipped.write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))
    for path in (plain, marked, zipped):
        assert rows_of(read_lengths(path)) == {"a": 1, "b": 2}


def test_a_pipe_can_be_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=write, args=(pipe, {"prompt": "a", "tokens": 1}))
    writer.start()
    assert rows_of(read_lengths(pipe)) == {"a": 1}
    writer.join()


# -- units ----------------------------------------------------------------------------------------------------------


def test_the_unit_decides_what_is_counted(file):
    path = file({"prompt": "p", "response": "one two", "tokens": 5})
    counted = read_lengths(path, unit="tokens:mine", count_tokens=lambda texts: [10 * len(t) for t in texts])
    assert (rows_of(counted), counted.unit) == ({"p": 70}, "tokens:mine")
    assert rows_of(read_lengths(path, unit="tokens")) == {"p": 5}
    assert rows_of(read_lengths(path, unit="words")) == {"p": 2}
    assert rows_of(read_lengths(path, unit="chars")) == {"p": 7}


@pytest.mark.parametrize(
    ("row", "unit", "problem"),
    [
        ({"prompt": "p", "response": "a"}, "tokens", "say which tokenizer counts them, as in --unit tokens:smollm2"),
        ({"prompt": "p", "tokens": 3}, "words", r"lengths in tokens and no response to count in words \(--unit\)"),
        ({"prompt": "p", "tokens": 3}, "tokens:m", "no response to count in tokens:m"),
        (
            {"prompt": "p"},
            None,
            "no column was recognised as the response or its length; besides the prompt the rows have none",
        ),
        ({"x": 1, "y": 2}, None, "no column was recognised as the prompt; the rows have x, y; name it with --prompt-c"),
    ],
)
def test_a_unit_that_the_data_cannot_give_is_refused(file, row, unit, problem):
    with pytest.raises(DataError, match=f"data.jsonl:1: .*{problem}"):
        read_lengths(file(row), unit=unit, count_tokens=lambda texts: [0] * len(texts))


def test_unknown_units_are_refused_with_the_known_ones():
    for text in ("toknes", "tokens:", "words:x", ""):
        with pytest.raises(ConfigError, match="use words, chars, tokens"):
            Unit.parse(text)


def test_mixed_units_inside_a_source_are_an_error(file):
    with pytest.raises(DataError, match=r"data.jsonl:2: gives 'words' where the rows before give 'tokens'"):
        read_lengths(file({"prompt": "a", "tokens": 1}, {"prompt": "b", "words": 2}))


def test_sources_keep_their_own_units_and_are_numbered(tmp_path):
    a = write(tmp_path / "a" / "x.jsonl", {"prompt": "p", "tokens": 1}, {"prompt": "q", "tokens": 3})
    b = write(tmp_path / "b" / "x.jsonl", {"prompt": "p", "words": 2})
    data = read_lengths([a, b])
    assert data.source_names == ["x.jsonl (1)", "x.jsonl (2)"]
    assert data.sources.tolist() == [0, 0, 1]
    assert data.sources.dtype == np.int32
    assert (data.units, data.unit) == (("tokens", "words"), "tokens, words")
    assert data.prompts == ["p", "q", "p"]


def test_words_without_spaces_are_remarked_on(file):
    data = read_lengths(file({"prompt": "p", "response": "これは長い返事ですがどこにも空白がありません"}))
    assert "--unit chars" in data.notes[0]
    assert not read_lengths(file({"prompt": "p", "response": "an answer in words"})).notes


# -- bad rows -------------------------------------------------------------------------------------------------------

GOOD = {"prompt": "good", "tokens": 5}
BAD = [
    ('{"prompt": "a", "tokens": ', "not JSON"),
    ('["a", 1]', "must be a JSON object with columns, not a list"),
    ("17", "must be a JSON object with columns, not a number"),
    ("\0\0\0\0", "not JSON"),
    ("[" * 100_000, "nested too deeply"),
    ({"prompt": "a"}, "column 'tokens' is missing"),
    ({"tokens": 1}, "column 'prompt' is missing"),
    ({"prompt": None, "tokens": 1}, "column 'prompt' is null"),
    ({"prompt": 3, "tokens": 1}, "'prompt': messages must be a list, not int"),
    ({"prompt": [{"content": "x"}], "tokens": 1}, "'prompt': message 1 has no role"),
    ({"prompt": "a", "tokens": -1}, "'tokens' is -1: a length cannot be negative"),
    ({"prompt": "a", "tokens": "352"}, "'tokens' must be a number, not '352'"),
    ({"prompt": "a", "tokens": True}, "'tokens' must be a number, not True"),
    ('{"prompt": "a", "tokens": NaN}', "'tokens' is nan, which is no length"),
    ('{"prompt": "a", "tokens": 1e999}', "'tokens' is inf, which is no length"),
    ({"prompt": "a", "tokens": 10**9}, "'tokens' is 1000000000, which is more than any answer has"),
    ('{"prompt": "a", "tokens": ' + "9" * 5000 + "}", "not JSON"),
    ({"prompt": "a", "tokens": {}}, "'tokens' is empty"),
    ({"prompt": "a", "tokens": [1, "x"]}, "'tokens' must be a number, not 'x'"),
    ({"prompt": "a", "tokens": 1, "censored": "x y"}, None),
    ({"prompt": "a", "tokens": 1, "censored": 7}, "'censored' must be true, false or a finish reason, not 7"),
]


@pytest.mark.parametrize(("row", "problem"), BAD, ids=range(len(BAD)))
def test_a_bad_row_is_named_by_line_or_left_out_and_counted(file, row, problem):
    path = file(GOOD, row, {"prompt": "also good", "tokens": 6, "censored": False})
    if problem is None:
        assert len(read_lengths(path)) == 3
        return
    with pytest.raises(DataError) as error:
        read_lengths(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert problem in str(error.value)
    assert "--skip-bad" in str(error.value)
    assert len(str(error.value)) < 400
    data = read_lengths(path, skip_bad=True)
    assert rows_of(data) == {"good": 5, "also good": 6}
    assert data.notes[0].startswith(f"data.jsonl: 1 of 3 rows left out as bad, the first is {path}:2: ")


def test_a_file_of_bad_rows_only_is_an_error_even_if_they_are_skipped(file):
    with pytest.raises(DataError, match=r"not one of 2 rows can be used; the first: .*data.jsonl:1: not JSON"):
        read_lengths(file("x y", "{"), skip_bad=True)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf\n", gzip.compress(b"")])
def test_an_empty_file_has_no_rows(tmp_path, content):
    (tmp_path / "empty.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"empty\.jsonl has no rows"):
        read_lengths(tmp_path / "empty.jsonl")


def test_one_row_two_rows_and_equal_lengths_are_data(file):
    assert len(read_lengths(file(GOOD))) == 1
    assert len(read_lengths(file(GOOD, {"prompt": "b", "tokens": 5}))) == 2


def test_odd_texts_are_kept_and_broken_ones_mended(tmp_path):
    megabyte = "long " * 200_000
    path = tmp_path / "odd.jsonl"
    odd = ["", "nul \0 here", "日本語 עברית 🙂", megabyte]
    lines = [json.dumps({"prompt": p, "tokens": i}).encode() for i, p in enumerate(odd)]
    lines += [b'{"prompt": "caf\xe9", "tokens": 7}', b'{"prompt": "half \\ud83d pair", "tokens": 8}']
    lines += [b'{"prompt": "raw \t tab", "tokens": 9}']
    path.write_bytes(b"\n".join(lines))
    data = read_lengths(path)
    assert data.prompts == [*odd, "caf\ufffd", "half \ufffd pair", "raw \t tab"]
    for prompt in data.prompts:
        prompt.encode()
    assert data.notes == (
        "odd.jsonl: 1 row had bytes that are not UTF-8; U+FFFD stands for them",
        "odd.jsonl: 1 row had halves of surrogate pairs; U+FFFD stands for them",
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"prompt,length\nhi,3\n", "looks like CSV"),
        (b"\x28\xb5\x2f\xfd123", "zstd"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16"),
        (b"PK\x03\x04xxx", "zip archive"),
        (gzip.compress(b'{"prompt": "p", "tokens": 1}\n' * 5000)[:60], "gzip data is damaged or cut off"),
        (b"\x1f\x8bnot really", "gzip data is damaged"),
        (b"PAR1 nonsense", "parquet file is damaged"),
    ],
)
def test_other_kinds_of_files_are_named(tmp_path, content, problem):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=problem):
        read_lengths(tmp_path / "file")


def test_a_missing_file_is_answered_with_the_nearest(file, tmp_path):
    file(GOOD)
    with pytest.raises(DataError, match=r"datta.jsonl: there is no such file or folder; did you mean .*data.jsonl\?"):
        read_lengths(tmp_path / "datta.jsonl")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_any_bytes_are_read_or_refused_by_name(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("any") / "any.jsonl"
    path.write_bytes(b"\n".join([json.dumps(GOOD).encode(), *lines]))
    try:
        data = read_lengths(path)
    except DataError as error:
        complaint = str(error)
    else:
        assert np.isfinite(data.lengths).all()
        return
    assert complaint.startswith(f"{path}:")


# -- JSON arrays, folders, datasets ---------------------------------------------------------------------------------


def test_a_json_array_is_read_item_by_item_up_to_where_it_is_cut(tmp_path):
    whole = json.dumps(
        [{"prompt": "a", "tokens": 1}, {"prompt": "b", "tokens": 2}, {"prompt": "c", "tokens": 3}], indent=1
    )
    path = tmp_path / "sharegpt.json"
    path.write_text(whole)
    assert rows_of(read_lengths(path)) == {"a": 1, "b": 2, "c": 3}
    path.write_text(whole[: whole.index('"c"')])
    with pytest.raises(DataError, match=r"sharegpt.json:10: the JSON array is damaged or cut off from this item on"):
        read_lengths(path)
    assert rows_of(read_lengths(path, skip_bad=True)) == {"a": 1, "b": 2}


def test_a_folder_of_files_is_one_source(tmp_path):
    folder = tmp_path / "set"
    write(folder / "b.jsonl", {"prompt": "b", "tokens": 2})
    write(folder / "a.jsonl", {"prompt": "a", "tokens": 1})
    write(folder / "test" / "c.jsonl", {"prompt": "c", "tokens": 3})
    write(folder / ".hidden.jsonl", "not data")
    write(folder / "README.md", "not data")
    data = read_lengths(folder)
    assert (data.prompts, data.source_names) == (["a", "b", "c"], ["set"])
    assert read_lengths(folder, split="test").prompts == ["c"]
    with pytest.raises(ConfigError, match="no file whose name begins with 'valid'"):
        read_lengths(folder, split="valid")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no data: a folder must hold"):
        read_lengths(tmp_path / "empty")


@pytest.fixture
def hf():
    return pytest.importorskip("datasets")


def test_datasets_folders_and_parquet_are_read(hf, tmp_path):
    rows = {"prompt": ["a", "b"], "output_tokens": [1, 2], "finish_reason": ["stop", "length"]}
    hf.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "one"))
    first = {name: values[:1] for name, values in rows.items()}
    both = hf.DatasetDict(train=hf.Dataset.from_dict(rows), test=hf.Dataset.from_dict(first))
    both.save_to_disk(str(tmp_path / "two"))
    hf.Dataset.from_dict(rows).to_parquet(str(tmp_path / "three" / "train-0.parquet"))
    for path, chosen in (("one", None), ("two", "train"), ("three", "train"), ("three/train-0.parquet", None)):
        data = read_lengths(tmp_path / path, split=chosen)
        assert rows_of(data) == {"a": 1, "b": 2}
        assert data.censored.tolist() == [False, True]
    assert len(read_lengths(tmp_path / "two", split="test")) == 1
    with pytest.raises(ConfigError, match="has several splits; choose one with --split: train, test"):
        read_lengths(tmp_path / "two")
    with pytest.raises(ConfigError, match="has no split 'valid'; it has train, test"):
        read_lengths(tmp_path / "two", split="valid")


def test_conversations_in_a_datasets_folder_and_bad_rows_by_number(hf, tmp_path):
    chat = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a b"}]
    hf.Dataset.from_list([{"messages": chat}, {"messages": chat[:1]}]).save_to_disk(str(tmp_path / "chat"))
    with pytest.raises(DataError, match="chat:row 2: 'messages' has no user message with an assistant's answer"):
        read_lengths(tmp_path / "chat")
    assert rows_of(read_lengths(tmp_path / "chat", skip_bad=True)) == {"p": 2}


def test_without_the_datasets_package_the_way_to_get_it_is_told(hf, tmp_path, monkeypatch):
    hf.Dataset.from_dict({"prompt": ["a"], "tokens": [1]}).save_to_disk(str(tmp_path / "one"))
    hf.Dataset.from_dict({"prompt": ["a"], "tokens": [1]}).to_parquet(str(tmp_path / "x.parquet"))
    for name in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for path in ("one", "x.parquet"):
        with pytest.raises(DataError, match=r"pip install 'longtail\[datasets\]'"):
            read_lengths(tmp_path / path)


def test_a_damaged_datasets_folder_is_named(hf, tmp_path):
    hf.Dataset.from_dict({"prompt": ["a"], "tokens": [1]}).save_to_disk(str(tmp_path / "one"))
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"garbage")
    with pytest.raises(DataError, match="one: the `datasets` folder is damaged"):
        read_lengths(tmp_path / "one")


# -- request logs ---------------------------------------------------------------------------------------------------

REQUEST = {"model": "m", "messages": [SYSTEM, {"role": "user", "content": "p"}]}
CHOICE = {"message": {"role": "assistant", "content": "a b c"}, "finish_reason": "length"}
ANSWER = {"model": "m", "choices": [CHOICE], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}
OUTPUT = [{"type": "message", "content": [{"type": "output_text", "text": "a b c"}]}]
CUT = {"incomplete_details": {"reason": "max_output_tokens"}}
LOGS = [
    {"body": REQUEST, "response": {"status_code": 200, "body": ANSWER}},
    {"request": {"body": REQUEST}, "response": {"body": ANSWER}},
    {"request": REQUEST, "response": ANSWER},
    {"request": json.dumps(REQUEST), "response": json.dumps(ANSWER)},
    {**REQUEST, **ANSWER},
    {**REQUEST, "response": ANSWER},
    {"prompt": "p", "choices": [{"text": "a b c", "finish_reason": "length"}], "usage": {"completion_tokens": 9}},
    {"request": {"input": "p"}, "response": {"usage": {"output_tokens": 9}, "output": OUTPUT, **CUT}},
]


@pytest.mark.parametrize("row", LOGS, ids=range(len(LOGS)))
def test_request_logs_are_recognised_and_can_be_counted(file, row):
    data = read_lengths(file(row))
    assert (rows_of(data), data.unit, data.censored.tolist()) == ({"p": 9}, "tokens", [True])
    assert rows_of(read_lengths(file(row), unit="words")) == {"p": 3}


def test_several_choices_share_the_tokens_that_usage_counts(file):
    row = {"prompt": "p", "choices": [{"text": "a", "finish_reason": "stop"}] * 3, "usage": {"completion_tokens": 9}}
    assert rows_of(read_lengths(file(row))) == {"p": 3}


def test_data_that_only_looks_like_a_log_is_not_taken_for_one(file):
    assert rows_of(read_lengths(file({"prompt": "p", "choices": ["A", "B"], "answer": "x y"}))) == {"p": 2}
    assert rows_of(read_lengths(file({"question": "p", "response": '{"output":3}'}))) == {"p": 1}


def test_failed_requests_are_left_out_and_counted(file):
    failed = {"body": REQUEST, "response": {"status_code": 500, "body": {"error": {"message": "x"}}}}
    data = read_lengths(file(LOGS[0], failed, {"body": REQUEST, "response": None, "error": {"code": "expired"}}))
    assert rows_of(data) == {"p": 9}
    assert data.notes == ("data.jsonl: 2 failed requests left out: they have no answer",)


def batch(path: Path, texts: dict[str, str]) -> Path:
    def body(text):
        return {"messages": [{"role": "user", "content": text}]}

    return write(path, *({"custom_id": k, "method": "POST", "body": body(p)} for k, p in texts.items()))


def results(path: Path, tokens: dict[str, int]) -> Path:
    def response(count):
        return {"status_code": 200, "body": {**ANSWER, "usage": {"completion_tokens": count}}}

    return write(path, *({"custom_id": k, "response": response(n), "error": None} for k, n in tokens.items()))


def test_the_two_files_of_a_batch_are_joined_in_any_order(tmp_path):
    asked = batch(tmp_path / "in.jsonl", {"1": "p", "2": "q", "3": "never answered"})
    answered = results(tmp_path / "out.jsonl", {"2": 20, "1": 10})
    for paths in ([asked, answered], [answered, asked]):
        data = read_lengths(paths)
        assert rows_of(data) == {"q": 20, "p": 10}
        assert data.source_names == ["out.jsonl"]
    assert rows_of(read_lengths(tmp_path)) == {"q": 20, "p": 10}
    with pytest.raises(DataError, match=r"in.jsonl: these are requests without answers: give the Batch API's output"):
        read_lengths(asked)
    with pytest.raises(
        DataError, match=r"out.jsonl:1: no request, .*custom_id '2' .*: give the Batch API's input file"
    ):
        read_lengths(answered)


def test_batches_that_number_their_requests_alike_are_joined_in_order(tmp_path):
    files = [batch(tmp_path / "a.in", {"1": "p"}), batch(tmp_path / "b.in", {"1": "q"})]
    files += [results(tmp_path / "a.out", {"1": 10}), results(tmp_path / "b.out", {"1": 20})]
    assert rows_of(read_lengths(files)) == {"p": 10, "q": 20}
    with pytest.raises(DataError, match=r"a.out:1: no request, or several different ones, have the custom_id '1'"):
        read_lengths(files[:3])


def test_a_forced_format_is_kept_to(file, tmp_path):
    both = file({"prompt": "p", "tokens": 4, "usage": {"completion_tokens": 9}})
    assert rows_of(read_lengths(both, format="jsonl")) == {"p": 4}
    with pytest.raises(DataError, match="no response with usage"):
        read_lengths(file({"prompt": "p", "tokens": 4}), format="openai")
    with pytest.raises(DataError, match="is no folder that save_to_disk"):
        read_lengths(tmp_path, format="datasets")


# -- run folders ----------------------------------------------------------------------------------------------------


def test_each_pipeline_of_a_run_is_a_source(tmp_path):
    (tmp_path / "events.jsonl").touch()
    samples = {"r:a": [Sample("p", 3, False), Sample("p", 5, True)], "r:b": [Sample("q", 9, True)]}
    data = read_lengths(tmp_path, read_run=lambda folder: samples)
    assert (data.source_names, data.unit) == (["r:a", "r:b"], "tokens")
    assert rows_of(data) == {"p": 4, "q": 9}
    assert data.censored.tolist() == [True, True]
    with pytest.raises(ConfigError, match="--unit must be tokens"):
        read_lengths(tmp_path, unit="words", read_run=lambda folder: samples)


# -- messages and prompts -------------------------------------------------------------------------------------------


def test_the_prompt_of_a_chat_is_its_last_user_message():
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "first"}]
    parts = [{"type": "text", "text": "last"}, {"type": "image_url"}]
    more = [{"role": "assistant", "content": "a"}, {"role": "user", "content": parts}]
    assert prompt_text(chat + more) == "last"
    assert prompt_text(chat[:1]) == "s"
    assert prompt_text("text") == "text"
    said = [("gpt", "before"), ("human", "p"), ("gpt", "a"), ("human", "q"), ("gpt", "b")]
    assert first_exchange([{"from": who, "value": text} for who, text in said]) == ("p", "a")
    assert first_exchange({"role": ["user", "assistant"], "content": ["p", "a"]}) == ("p", "a")
    assert first_exchange([]) is None


def test_prompts_are_lines_of_text_or_rows(tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_bytes(b"first\r\n\n[ second\nthird \xff\n")
    assert list(read_prompts(text)) == ["first", "[ second", "third \ufffd"]
    chat = [{"role": "user", "content": "b"}]
    share = [{"from": "human", "value": "c"}, {"from": "gpt", "value": "x"}]
    rows = write(tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": chat}, {"prompt": share})
    assert list(read_prompts(rows)) == ["a", chat, "c"]
    zipped = tmp_path / "rows.gz"
    zipped.write_bytes(gzip.compress(rows.read_bytes()))
    assert list(read_prompts(zipped)) == ["a", chat, "c"]
    write(tmp_path / "array.json", '[{"q": "a"}, {"q": "b"}]')
    assert list(read_prompts(tmp_path / "array.json", column="q")) == ["a", "b"]
    write(tmp_path / "bad.jsonl", {"prompt": "a"}, "plain text")
    with pytest.raises(DataError, match=r"bad.jsonl:2: not JSON"):
        list(read_prompts(tmp_path / "bad.jsonl"))
    write(tmp_path / "none.jsonl", {"x": "a"})
    with pytest.raises(DataError, match=r"none.jsonl:1: no column was recognised as the prompt; the rows have x"):
        list(read_prompts(tmp_path / "none.jsonl"))


# -- split ----------------------------------------------------------------------------------------------------------


def made(prompts: list[str], sources: list[int] | None = None) -> LengthData:
    n = len(prompts)
    numbers = np.array(sources or [0] * n, dtype=np.int32)
    names = [f"s{i}" for i in range(numbers.max(initial=0) + 1)]
    return LengthData(prompts, np.arange(n, dtype=float), numbers, names, "words", np.zeros(n, bool))


@given(st.lists(st.text(max_size=3), max_size=40), st.floats(0.01, 0.99), st.integers(0, 5))
def test_split_puts_equal_prompts_on_one_side_and_every_row_on_exactly_one(prompts, share, seed):
    data = made(prompts)
    train, test = split(data, test=share, seed=seed)
    assert sorted([*train.lengths, *test.lengths]) == data.lengths.tolist()
    assert not set(train.prompts) & set(test.prompts)
    distinct = len(set(prompts))
    if distinct > 1:
        assert len(set(test.prompts)) == min(distinct - 1, max(1, round(share * distinct)))
    again = split(data, test=share, seed=seed)
    assert (again[0].prompts, again[1].prompts) == (train.prompts, test.prompts)


def test_split_depends_on_the_seed_and_not_on_the_order_of_rows():
    data = made([f"prompt {i}" for i in range(200)])
    _, test = split(data, test=0.2, seed=0)
    _, other = split(data, test=0.2, seed=1)
    _, backwards = split(data.take(np.arange(200)[::-1]), test=0.2, seed=0)
    assert set(test.prompts) == set(backwards.prompts) != set(other.prompts)
    with pytest.raises(ConfigError):
        split(data, test=1.0, seed=0)


def test_join_keeps_sources_apart():
    both = join([made(["a", "b"], [0, 1]), made(["a"])])
    assert both.sources.tolist() == [0, 1, 2]
    assert both.source_names == ["s0 (1)", "s1", "s0 (2)"]
    assert both.units == ("words",) * 3
    assert both.unit == "words"
