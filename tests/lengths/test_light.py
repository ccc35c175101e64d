"""The light backend: its formula, its file, its training."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from longtail.core.errors import RankerError
from longtail.lengths import features
from longtail.lengths.data import LengthData
from longtail.lengths.light import LightBackend, standard_shape
from longtail.lengths.objectives import OBJECTIVES
from longtail.lengths.train import TrainConfig
from longtail.lengths.train_light import Recipe, Teacher, train_light
from longtail.lengths.words import mean_vector, word_table

LONG = ["Write a detailed essay about {}", "Explain step by step how {} works", "Give me a full history of {}"]
SHORT = ["What is the capital of {}?", "In one word: {}", "Is {} blue?"]
THINGS = ["France", "rivers", "iron", "music", "the moon", "chess", "bread", "light", "Rome", "whales", "ice", "gold"]
FAST = Recipe(bits=14, landmarks=24, steps=60)


def data(prompts, lengths, *, sources=None, censored=None) -> LengthData:
    n = len(prompts)
    sources = np.zeros(n, np.int32) if sources is None else np.asarray(sources, np.int32)
    names = [f"source {i}" for i in range(int(sources.max()) + 1)]
    cut = np.zeros(n, bool) if censored is None else np.asarray(censored)
    return LengthData(list(prompts), np.asarray(lengths, float), sources, names, "tokens", cut)


def essays(seed: int = 0) -> LengthData:
    rng = np.random.default_rng(seed)
    prompts = [t.format(x) for x in THINGS for t in LONG + SHORT]
    lengths = [
        rng.integers(200, 400) if p.startswith(("Write", "Explain", "Give")) else rng.integers(1, 40) for p in prompts
    ]
    return data(prompts, lengths)


@pytest.fixture(scope="module")
def trained() -> LightBackend:
    return train_light(essays(), TrainConfig(), recipe=FAST)


def test_scores_are_the_formula_of_the_module(trained):
    w, table = trained.weights, word_table()
    prompts = ["Write a poem about ice", "Is it?", "", "中文 \0 x" * 40]
    found = features.features(prompts, bits=w.bits)
    standard = standard_shape(found.shape, w.shape_mean, w.shape_std)
    for i, prompt in enumerate(prompts):
        part = slice(found.start[i], found.start[i + 1])
        bucket, value = found.buckets[part], found.values[part].astype(np.float64)
        norm = np.sqrt(((value * w.rarity[bucket]) ** 2).sum())
        score = (value @ w.ngrams[bucket, 0].astype(float)) / norm if norm else 0.0
        u = np.concatenate(
            [
                (mean_vector(features.as_bytes(prompt), *table) - w.word_mean) / w.word_std,
                standard[i] * w.shape_share,
            ]
        )
        score += standard[i] @ w.shape[:, 0]
        score += np.exp(-0.5 * ((u - w.landmarks) ** 2).sum(1)) @ w.amounts[:, 0] + w.bias[0]
        assert trained.score([prompt])[0] == pytest.approx(score, abs=1e-3)


def test_a_score_does_not_depend_on_the_other_prompts(trained):
    prompts = [*essays().prompts[:10], "", "x" * 5000]
    np.testing.assert_array_equal(trained.score(prompts)[::-1], trained.score(prompts[::-1]))
    assert trained.score([]).shape == (0,)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=100), max_size=5))
def test_any_text_has_a_finite_score(trained, prompts):
    assert np.isfinite(trained.score(prompts)).all()


def test_saved_weights_give_the_same_scores(trained, tmp_path):
    trained.save(tmp_path)
    np.testing.assert_array_equal(LightBackend.load(tmp_path).score(THINGS), trained.score(THINGS))


def test_explanations_add_up_to_the_score(trained):
    for prompt in ("Write a detailed essay about gold and iron", "Is it?", ""):
        parts = trained.explain(prompt)
        assert sum(value for _, value in parts) == pytest.approx(trained.score([prompt])[0], abs=1e-3)
    names = [name for name, _ in trained.explain("Write a poem")]
    assert "write a" in names
    assert "[characters]" in names


@pytest.mark.parametrize("damage", ["cut", "text", "gone", "nan", "shape"])
def test_damaged_weights_are_named(trained, tmp_path, damage):
    trained.save(tmp_path)
    path = tmp_path / "weights.safetensors"
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:1000])
        case "text":
            path.write_text("not weights")
        case "gone":
            path.unlink()
        case "nan":
            broken = LightBackend.load(tmp_path)
            broken.weights = replace(broken.weights, bias=np.array([np.nan], np.float32))
            broken.save(tmp_path)
        case "shape":
            broken = LightBackend.load(tmp_path)
            broken.weights = replace(broken.weights, rarity=broken.weights.rarity[:10])
            broken.save(tmp_path)
    with pytest.raises(RankerError, match=r"weights\.safetensors"):
        LightBackend.load(tmp_path)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_learns_which_words_mean_long_answers(objective):
    backend = train_light(essays(), TrainConfig(objective=objective), recipe=FAST)
    unseen = [t.format("winter") for t in LONG + SHORT]
    scores = backend.score(unseen)
    assert scores[:3].min() > scores[3:].max()
    assert (backend.explain(unseen[0]) == []) == (objective == "classification")


def test_training_is_deterministic_for_a_seed():
    first, second = (train_light(essays(), TrainConfig(seed=3), recipe=FAST).score(THINGS) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert (train_light(essays(), TrainConfig(seed=4), recipe=FAST).score(THINGS) != first).any()


def test_lengths_of_different_sources_are_never_compared():
    one = essays()
    shifted = data(
        [*one.prompts, *(p + " now" for p in one.prompts)],
        np.concatenate([one.lengths, one.lengths + 1e6]),
        sources=[0] * len(one) + [1] * len(one),
    )
    backend = train_light(shifted, TrainConfig(), recipe=FAST)
    assert kendalltau(backend.score(one.prompts), one.lengths)[0] > 0.4
    assert backend.score(["Is ice blue? now"])[0] < backend.score(["Write a detailed essay about ice"])[0]


def test_a_teacher_is_learnt_from_where_there_are_no_labels():
    labelled = essays()
    taught = ["Translate this: {}", "Compose a symphony for {}"]
    extra = [t.format(x) for x in THINGS for t in taught]
    teacher = Teacher(np.zeros(len(labelled)), extra, np.array([-1.0, 2.0] * len(THINGS)))
    backend = train_light(labelled, TrainConfig(), recipe=FAST, teacher=teacher)
    low, high = backend.score(["Translate this: winter", "Compose a symphony for winter"])
    assert low < high


def test_equal_lengths_hold_no_order():
    with pytest.raises(RankerError, match="no order to learn"):
        train_light(data(THINGS, [512] * len(THINGS)), TrainConfig(), recipe=FAST)


def test_two_prompts_are_enough():
    backend = train_light(data(["essay please", "yes or no"], [400, 2]), TrainConfig(), recipe=FAST)
    assert np.diff(backend.score(["yes or no", "essay please"]))[0] > 0


def test_a_censored_prompt_counts_as_long_only():
    prompts = ["cut", "short", "longer"]
    backend = train_light(data(prompts, [100, 10, 500], censored=[True, False, False]), TrainConfig(), recipe=FAST)
    cut, short, _ = backend.score(prompts)
    assert cut > short
