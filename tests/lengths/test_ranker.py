"""The ranker that users load: the shipped one, saved ones, and what can be wrong with a folder."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import longtail
from longtail.core.errors import RankerError
from longtail.lengths.ranker import RANKER_FILE, Ranker, calibration, quantiles
from longtail.lengths.train import Progress, TrainConfig, train

from .test_light import essays

ODD = ["", "\0", "\ud83d", "x" * 1_000_000, "שלום עולם", "नमस्ते", "ok\r\n", "<|im_end|>"]


@pytest.fixture(scope="module")
def shipped() -> Ranker:
    return Ranker.load()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranker")
    train(essays(), TrainConfig(epochs=60)).save(folder)
    return folder


def test_the_shipped_ranker_knows_an_essay_from_a_greeting(shipped):
    low, high = shipped.quantile(["hi", "Write a detailed essay on the causes of the French revolution."])
    assert low < high
    assert longtail.Ranker is Ranker


def test_the_shipped_ranker_names_its_data_and_its_figures(shipped):
    assert shipped.card["data"]
    assert all(source["licence"] for source in shipped.card["data"])
    assert shipped.card["validation"]


def test_scoring_imports_neither_torch_nor_ray():
    code = (
        "import sys; from longtail import Ranker; Ranker.load().quantile(['hi']); "
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_odd_prompts_have_scores_and_quantiles(shipped):
    scores, ranks = shipped.score(ODD), shipped.quantile(ODD)
    assert scores.dtype == ranks.dtype == np.float32
    assert np.isfinite(scores).all()
    assert ((ranks >= 0) & (ranks <= 1)).all()


def test_no_prompts_give_empty_arrays(shipped):
    assert shipped.score([]).shape == shipped.quantile([]).shape == (0,)


def test_one_string_is_not_a_list_of_prompts(shipped):
    with pytest.raises(TypeError, match="list of strings"):
        shipped.score("hi")


def test_threads_score_alike(shipped):
    prompts = essays().prompts
    alone = shipped.score(prompts)
    with ThreadPoolExecutor(4) as threads:
        for scores in threads.map(lambda _: shipped.score(prompts), range(8)):
            np.testing.assert_array_equal(scores, alone)


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=60),
    st.lists(st.floats(-2e3, 2e3, width=32), max_size=20),
)
def test_quantiles_rise_with_scores_and_stay_in_bounds(known, scores):
    knots = calibration(np.array(known))
    ranks = quantiles(np.sort(np.array(scores, np.float64)), knots)
    assert ((ranks >= 0) & (ranks <= 1)).all()
    assert (np.diff(ranks) >= -1e-6).all()


def test_quantiles_are_uniform_over_the_prompts_of_the_calibration():
    scores = np.random.default_rng(0).normal(size=5000)
    ranks = quantiles(scores, calibration(scores))
    np.testing.assert_allclose(np.quantile(ranks, [0.1, 0.5, 0.9]), [0.1, 0.5, 0.9], atol=0.01)


def test_equal_scores_stand_in_the_middle():
    assert quantiles(np.array([2.0]), calibration(np.full(10, 2.0)))[0] == pytest.approx(0.5)


def test_a_saved_ranker_scores_the_same(saved):
    first, second = Ranker.load(saved), Ranker.load(str(saved))
    np.testing.assert_array_equal(first.score(ODD), second.score(ODD))
    assert first.card["training"]["objective"] == "margin"
    assert first.card["validation"]["source 0"]["prompts"] == 7


def test_saving_again_replaces_the_ranker_and_keeps_reports(saved, tmp_path):
    (tmp_path / "report.json").write_text("{}")
    ranker = Ranker.load(saved)
    ranker.save(tmp_path)
    ranker.save(tmp_path)
    about = json.loads((tmp_path / RANKER_FILE).read_text())
    assert list(about["files"]) == ["weights.safetensors"]
    (tmp_path / "report.json").write_text("{} ")
    Ranker.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: (f / "weights.safetensors").unlink(), "missing"),
        (lambda f: (f / "weights.safetensors").write_bytes(b"x"), "corrupt"),
        (lambda f: (f / RANKER_FILE).unlink(), "not a saved ranker"),
        (lambda f: (f / RANKER_FILE).write_text("{"), "cannot be read"),
        (lambda f: (f / RANKER_FILE).write_text("[]"), "not the description"),
        (lambda f: edit(f, format=99), "newer"),
        (lambda f: edit(f, backend="oracle"), "unknown"),
        (lambda f: edit(f, knots=[1.0, 0.0]), "ascending"),
        (lambda f: edit(f, knots=["a"]), "numbers"),
        (lambda f: edit(f, files={"../x": "0"}), "outside"),
        (lambda f: edit(f, card=None), "'card'"),
    ],
)
def test_a_damaged_folder_is_named_with_what_is_wrong(saved, tmp_path, change, says):
    Ranker.load(saved).save(tmp_path)
    change(tmp_path)
    with pytest.raises(RankerError, match=says) as error:
        Ranker.load(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RankerError, match="no such folder"):
        Ranker.load(tmp_path / "nothing")


def test_a_folder_that_cannot_be_written_is_named(saved, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RankerError, match="cannot be written"):
        Ranker.load(saved).save(tmp_path / "file" / "ranker")


def test_training_tells_how_far_it_is():
    seen: list[Progress] = []
    train(essays(), TrainConfig(epochs=5), progress=seen.append)
    assert [p.done for p in seen] == [1, 2, 3, 4, 5]
    assert {(p.phase, p.total) for p in seen} == {("training", 5)}


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_prompts_are_refused(rows):
    with pytest.raises(RankerError, match="too few"):
        train(essays().take(np.arange(rows)), TrainConfig())


def test_two_prompts_make_a_ranker():
    ranker = train(essays().take(np.array([0, 3])), TrainConfig(epochs=20))
    assert ranker.card["validation"] is None
    assert np.isfinite(ranker.quantile(ODD)).all()


def edit(folder: Path, **values) -> None:
    about = json.loads((folder / RANKER_FILE).read_text())
    (folder / RANKER_FILE).write_text(json.dumps(about | values))
