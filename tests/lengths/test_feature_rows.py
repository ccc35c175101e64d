"""Prompts kept as features: what a row holds, and that rankers learn and judge the same by rows as by prompts."""

from __future__ import annotations

import base64
import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longtail.core.errors import DataError, RankerError
from longtail.lengths import features
from longtail.lengths.data import LengthData, read_lengths, split
from longtail.lengths.data_values import PromptFeatures, digest
from longtail.lengths.feature_rows import decode, encode, score_inputs
from longtail.lengths.light import LightBackend, LightWeights
from longtail.lengths.messages import whole_text
from longtail.lengths.ranker import Ranker
from longtail.lengths.seen import seen_share
from longtail.lengths.train import TrainConfig, train
from longtail.lengths.train_light import Recipe, train_light
from longtail.lengths.words import mean_vector, word_table

from .test_light import FAST, essays

ODD = [
    "", "\0", "a\0b", "\ud800", "\ud83d\ude42", "x " * 500_000, "y" * 1_000_000, "中文写一首诗。" * 300, "naïve café",
    "1 2 3 " * 400, "```\ncode\n```", "poem " * 3000, "\r\n\t",
]  # fmt: skip
RECIPE = replace(FAST, bits=features.BITS)
TEXT = (
    "Write a polite letter to my landlord that explains why the rent should not go up this year. Mention that the "
    "heating was broken in January and February, that the neighbours are loud, and that I have always paid on time. "
    "Keep it under one page, please."
)
OF_A_POEM = {
    "version": 1,
    "digest": "7ecf4503dff36059",
    "ngrams": "kkoCAOitAgC50gIAIfcCAKQlAwAcNQMAbG4DAIDUAwA=",
    "shape": "UeYoQBhysT8AAAAAAAAAAAAAAAAAAAAA2YmdPQAAAAAYcjE/AAAAAFVVVUAAAAAAAAAAAAAAAAAAAAAAAAAAAA==",
    "words": (
        "u5YjPJiV3DzSNAG+kqbSPBIUbL2eQBO+B0csviWUNz6bK5C9UoFBvjMLGbrzWYq9iv2VPau1Br35hlg82KWKvVa78b3yC829"
        "K2yDuyS7+LuEmUg8EDGiva1ghD2gbww82PxbPBEV0r3/WKq9MHcWvh6PJz2fZsu86PAuvbIPD70qjdy9Yce+veO98LuHOBm+"
        "bBrhva/xk70FrD89UbYUvrdQAL6dKLE9sjaevWSlOTxrlUm9uhV4vXhOFj4vCHM9d7sVvevXWr3Mplo9Zffku5nf7DvYe7C8"
        "7r3EPePzZb0bHLY9aUC/PGqCFbztAqG8OeN9PX7ySj3RNDC9hGEkPQ=="
    ),
}
"""The row of ``Write a poem.``, as the first version recorded it."""


def kept(prompt: str) -> PromptFeatures:
    """What is read back of a prompt's row in a file."""
    return decode(json.loads(json.dumps(encode(prompt), allow_nan=False)))


def as_rows(data: LengthData, which=lambda i: True) -> LengthData:
    inputs = [kept(p) if which(i) else p for i, p in enumerate(data.inputs)]
    return replace(data, inputs=inputs)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def served(number: int, *, text: bool) -> dict:
    """A row as the gateway writes it; of 150 different prompts."""
    prompt = f"Explain topic {number % 150} in a few words"
    about = {"prompt": prompt} if text else {"features": encode(prompt)}
    return about | {
        "output_tokens": 10 + number,
        "finish_reason": "length" if number % 9 == 0 else "stop",
        "quantile": 0.4,
    }


# -- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ODD, ids=range(len(ODD)))
def test_odd_prompts_come_back_as_their_features(prompt):
    check_round_trip(prompt)


@settings(deadline=None)
@given(st.text(max_size=400) | st.text(st.characters(), max_size=40).map(lambda text: text * 50))
@example("a a a b")
def test_any_prompt_comes_back_as_its_features(prompt):
    check_round_trip(prompt)


def check_round_trip(prompt: str) -> None:
    found, text = kept(prompt), whole_text(prompt)
    direct = features.features([text], bits=features.BITS)
    np.testing.assert_array_equal(found.buckets, direct.buckets)
    np.testing.assert_array_equal(found.values, direct.values)
    np.testing.assert_array_equal(found.shape, direct.shape[0])
    np.testing.assert_array_equal(found.words, mean_vector(features.as_bytes(text), *word_table()))
    assert found.digest == digest(found) == digest(text)


def test_every_count_has_the_value_that_the_text_gives_it():
    counts = np.arange(1, 2 * features.MAX_WORDS + 4, dtype=np.int32)
    values = features.values_of(counts)
    np.testing.assert_array_equal(np.rint(np.exp(values - 1)), counts)
    for count in (1, 2, 3, 10, 799):
        buckets, direct, _ = features.extract(features.as_bytes("q " * count), 2 * count, features.BITS)
        assert direct[buckets == features.extract(features.as_bytes("q"), 1, features.BITS)[0][0]] == values[count - 1]


def test_a_row_is_small_and_holds_no_text():
    row = json.dumps(encode(TEXT))
    assert 45 <= len(TEXT.split()) <= 55
    assert len(row) < 1300
    assert not any(word in row for word in ("landlord", "January", "heating"))
    assert max(len(json.dumps(encode(prompt))) for prompt in ODD) < 10_000


def test_the_order_of_the_words_is_not_the_order_in_the_row():
    assert (np.diff(kept(TEXT).buckets) > 0).all()


def test_rows_of_the_first_version_keep_their_meaning():
    """If this fails, buckets, shape or word table have changed: rows that were recorded need another version."""
    row = encode("Write a poem.")
    assert row.keys() == OF_A_POEM.keys()
    for key in ("version", "digest", "ngrams"):
        assert row[key] == OF_A_POEM[key]
    recorded, now = decode(OF_A_POEM), decode(row)
    np.testing.assert_allclose(recorded.shape, now.shape, rtol=1e-6)
    np.testing.assert_allclose(recorded.words, now.words, rtol=1e-4, atol=1e-6)  # sums are as each machine adds


def b64(values, dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


DAMAGES = {
    "no version": ({"version": None}, "the features have no known version: they must stand as longtail recorded them"),
    "old": ({"version": 0}, "the features have no known version"),
    "newer": ({"version": 2}, "the features are of version 2, newer than this longtail knows: upgrade it"),
    "digest": ({"digest": "xyz"}, "'digest' of the features must be 16 hexadecimal digits"),
    "number": ({"digest": 12}, "'digest' of the features must be 16 hexadecimal digits"),
    "gone": ({"ngrams": ...}, "'ngrams' of the features is missing"),
    "null": ({"ngrams": None}, "'ngrams' of the features is damaged"),
    "list": ({"ngrams": [1, 2]}, "'ngrams' of the features is damaged"),
    "no base64": ({"ngrams": "%%%%"}, "'ngrams' of the features is damaged"),
    "cut": ({"ngrams": base64.b64encode(b"12345").decode()}, "'ngrams' of the features is damaged"),
    "twice": ({"ngrams": b64([1 << 17 | 5, 1 << 17 | 5], "<u4")}, "'ngrams' of the features is damaged"),
    "count 0": ({"ngrams": b64([5], "<u4")}, "'ngrams' of the features is damaged"),
    "short": ({"shape": b64([0.0] * 3, "<f4")}, f"'shape' of the features must be {features.SHAPE} finite numbers"),
    "nan": ({"words": b64([float("nan")] * 64, "<f4")}, "'words' of the features must be 64 finite numbers"),
    "huge": ({"words": b64([1e30] * 64, "<f4")}, "'words' of the features must be 64 finite numbers"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_row_is_named_in_one_sentence_or_left_out(tmp_path, name):
    change, says = DAMAGES[name]
    row = served(1, text=False)
    row["features"] = {k: v for k, v in (row["features"] | change).items() if v is not ...}
    path = write(tmp_path / "served.jsonl", [served(0, text=False), row, served(2, text=False)])
    with pytest.raises(DataError) as error:
        read_lengths(path)
    assert str(error.value).startswith(f"{path}:2: {says}")
    assert "--skip-bad" in str(error.value)
    data = read_lengths(path, skip_bad=True)
    assert len(data) == 2
    assert "1 of 3 rows left out as bad" in data.notes[0]


@given(st.dictionaries(st.sampled_from(["version", "digest", "ngrams", "shape", "words"]), st.integers() | st.text()))
def test_whatever_else_is_there_is_refused_as_a_bad_row(change):
    row = encode("a prompt") | change
    try:
        found = decode(row)
    except ValueError:
        return
    assert ((found.buckets >= 0) & (found.buckets < 1 << features.BITS)).all()
    assert np.isfinite(found.values).all()


# -- files ----------------------------------------------------------------------------------------------------------


def test_files_of_prompts_and_of_features_give_the_same_data(tmp_path):
    texts = read_lengths(write(tmp_path / "a.jsonl", [served(i, text=True) for i in range(200)]))
    rows = read_lengths(write(tmp_path / "b.jsonl", [served(i, text=False) for i in range(200)]))
    check_same(texts, rows)
    assert len(rows) == 150  # 50 prompts came twice
    assert rows.unit == "tokens"
    assert rows.censored.any()


@pytest.mark.parametrize("text_first", [True, False])
@pytest.mark.parametrize("switch", [1, 120])
def test_a_file_may_change_from_prompts_to_features_midway(tmp_path, text_first, switch):
    rows = [served(i, text=(i < switch) == text_first) for i in range(200)]
    texts = read_lengths(write(tmp_path / "a.jsonl", [served(i, text=True) for i in range(200)]))
    check_same(texts, read_lengths(write(tmp_path / "b.jsonl", rows)))


def test_a_row_with_both_is_read_as_its_prompt(tmp_path):
    row = served(1, text=True) | {"features": encode("another prompt")}
    assert read_lengths(write(tmp_path / "a.jsonl", [row])).prompts == [row["prompt"]]


def test_a_row_with_neither_is_a_bad_row(tmp_path):
    path = write(tmp_path / "a.jsonl", [served(1, text=False), {"output_tokens": 3}])
    with pytest.raises(DataError, match=r"a\.jsonl:2: column 'prompt' is missing"):
        read_lengths(path)


def check_same(texts: LengthData, rows: LengthData) -> None:
    assert [digest(p) for p in texts.inputs] == [digest(p) for p in rows.inputs]
    np.testing.assert_array_equal(texts.lengths, rows.lengths)
    np.testing.assert_array_equal(texts.censored, rows.censored)
    for part, same in zip(split(texts, test=0.2, seed=3), split(rows, test=0.2, seed=3), strict=True):
        assert [digest(p) for p in part.inputs] == [digest(p) for p in same.inputs]


# -- training and judging -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def from_texts() -> LightBackend:
    return train_light(essays(), TrainConfig(), recipe=RECIPE)


@pytest.mark.parametrize("which", [lambda i: True, lambda i: i % 3 == 0], ids=["features", "mixed"])
def test_rows_teach_exactly_the_weights_that_their_prompts_teach(from_texts, which):
    backend = train_light(as_rows(essays(), which), TrainConfig(), recipe=RECIPE)
    for field in fields(LightWeights):
        np.testing.assert_array_equal(getattr(backend.weights, field.name), getattr(from_texts.weights, field.name))


def test_rows_score_as_their_prompts_do_but_for_rounding(from_texts):
    prompts = [*essays().prompts, *map(whole_text, ODD)]
    rows = [kept(p) for p in prompts]
    scores = from_texts.score(prompts)
    np.testing.assert_allclose(from_texts.score_features(rows), scores, rtol=1e-5, atol=1e-5)
    mixed = [row if i % 2 else prompt for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))]
    np.testing.assert_allclose(score_inputs(from_texts, mixed), scores, rtol=1e-5, atol=1e-5)
    assert score_inputs(from_texts, []).shape == from_texts.score_features([]).shape == (0,)


def test_a_ranker_from_rows_has_the_calibration_figures_and_fingerprint_of_one_from_prompts():
    config = TrainConfig(epochs=30, valid=0.25)
    texts, rows = train(essays(), config), train(as_rows(essays()), config)
    np.testing.assert_allclose(rows.knots, texts.knots, rtol=1e-5, atol=1e-5)
    assert rows.card["seen"] == texts.card["seen"]
    assert rows.card["training"] == texts.card["training"]
    figures = [ranker.card["validation"]["source 0"] for ranker in (texts, rows)]
    assert figures[0]["prompts"] == figures[1]["prompts"]
    assert figures[0]["tau"] == pytest.approx(figures[1]["tau"])
    assert seen_share(texts.card["seen"], as_rows(essays()).inputs) == seen_share(rows.card["seen"], essays().inputs)


@pytest.mark.parametrize(
    "config",
    [TrainConfig(backend="encoder", encoder="/nowhere"), TrainConfig(teacher="/nowhere")],
    ids=["itself", "teacher"],
)
def test_an_encoder_refuses_features_before_it_is_read(config):
    with pytest.raises(
        DataError, match=r"^these rows hold features, not prompts; only the light backend can read them"
    ):
        train(as_rows(essays()), config)
    with pytest.raises(DataError, match=r"^1 of 72 rows hold features"):
        train(as_rows(essays(), lambda i: i == 5), config)


def test_what_reads_texts_only_refuses_features():
    class OfTexts:
        name = "encoder"

        def score(self, prompts):
            return np.array([len(p) for p in prompts], np.float32)

    assert score_inputs(OfTexts(), ["a", "bb"]).tolist() == [1, 2]
    with pytest.raises(DataError, match="only the light backend"):
        score_inputs(OfTexts(), ["a", kept("bb")])
    with pytest.raises(DataError, match="only the light backend"):
        _ = as_rows(essays()).prompts


def test_rankers_with_other_buckets_refuse_features():
    other = train_light(essays(), TrainConfig(), recipe=FAST)
    with pytest.raises(RankerError, match="16,384 buckets"):
        other.score_features([kept("a")])
    with pytest.raises(ValueError, match="17 bits"):
        train_light(as_rows(essays()), TrainConfig(), recipe=FAST)


def test_the_shipped_ranker_reads_what_the_gateway_keeps():
    ranker = Ranker.load()
    low, high = score_inputs(ranker.backend, [kept("hi"), kept("Write a detailed essay on the French revolution.")])
    assert low < high
    assert Recipe().bits == features.BITS
