"""Hashed n-grams and the shape of prompts."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longtail.lengths import features
from longtail.lengths.features import SHAPE, SHAPE_NAMES, as_bytes, ngrams

ODD = [
    "",
    " ",
    "\0",
    "\0\0a\0",
    "\ud800",
    "a" * 1_000_000,
    "中文写一首诗",
    "naïve café",
    "👍🏽👍🏽",
    "\r\n\r\n",
    "```\ncode\n```",
    "１２３",
]


def named(prompt: str, name: str) -> float:
    return float(features.features([prompt], bits=17).shape[0, SHAPE_NAMES.index(name)])


def simple_words(text: str) -> list[str]:
    """Of ASCII text: runs of letters, and the marks that count as words, up to three at once."""
    marks = set('\n?!:`#*{|="<')
    words, i = [], 0
    while i < len(text):
        c = text[i]
        if c.isascii() and (c.isalnum() or c == "_"):
            j = i
            while j < len(text) and (text[j].isalnum() or text[j] == "_"):
                j += 1
            words.append(text[i:j].lower())
        else:
            j = i + 1
            while j < len(text) and text[j] == c and j - i < 3:
                j += 1
            if c in marks:
                words.append(f"{c}{j - i}" if c in "\n`" else c)
        i = j
    return words


@settings(deadline=None)
@given(st.text(st.characters(max_codepoint=127, exclude_characters="\0"), max_size=200))
@example("Write a poem.\n\nWrite a poem?")
def test_n_grams_of_ascii_text_are_its_words_pairs_and_opening(text):
    words = simple_words(text)
    grams = {(w,) for w in words} | set(itertools.pairwise(words))
    grams |= {("^", *words[: i + 1]) for i in range(min(3, len(words)))}
    found = features.features([text], bits=24)
    assert len(found.buckets) == len(np.unique(found.buckets))
    assert len(grams) - 2 <= len(found.buckets) <= len(grams)  # two may collide


@settings(deadline=None)
@given(st.lists(st.text(max_size=300), max_size=4), st.integers(8, 24))
@example(ODD, 17)
def test_features_of_any_text_are_finite_and_inside_the_table(prompts, bits):
    found = features.features(prompts, bits=bits)
    assert found.shape.shape == (len(prompts), SHAPE)
    assert np.isfinite(found.shape).all()
    assert ((found.buckets >= 0) & (found.buckets < 1 << bits)).all()
    assert (found.values >= 1).all()
    assert found.start[-1] == len(found.buckets) == len(found.values)
    for i, prompt in enumerate(prompts):
        alone = features.features([prompt], bits=bits)
        np.testing.assert_array_equal(alone.buckets, found.buckets[found.start[i] : found.start[i + 1]])
        assert set(ngrams(prompt, bits=bits)) == set(alone.buckets.tolist())


def test_case_does_not_matter_but_order_does():
    lower, upper, turned = (set(ngrams(p, bits=24)) for p in ("write a poem", "WRITE A Poem", "poem a write"))
    assert lower == upper
    assert lower != turned


def test_repeated_words_count_less_each_time():
    once, thrice = (features.features([p], bits=17) for p in ("poem", "poem poem poem"))
    word = next(bucket for bucket, name in ngrams("poem", bits=17).items() if name == "poem")
    assert once.values[list(once.buckets).index(word)] == 1
    assert thrice.values[list(thrice.buckets).index(word)] == pytest.approx(1 + np.log(3))


def test_the_shape_sees_questions_code_lists_and_the_whole_length():
    assert named("What is it?", "ends with a question") == 1
    assert named("Is it? Say so.", "ends with a question") == 0
    assert named("```\nx = 1\n```", "code fences") == pytest.approx(np.log1p(2))
    assert named("1. a\n2. b\n- c", "list items") == pytest.approx(np.log1p(3))
    assert named("x" * 1_000_000, "characters") == pytest.approx(np.log1p(1e6), rel=1e-5)
    assert named("中文", "words") == pytest.approx(np.log1p(2))


def test_of_a_long_prompt_head_and_tail_are_read():
    long = "first " + "x" * 2_000_000 + " last"
    assert len(as_bytes(long)) < 5000
    names = " ".join(ngrams(long, bits=24).values())
    assert "first" in names
    assert "last" in names


@pytest.mark.parametrize("wrong", [None, 3, b"bytes", ["a"]])
def test_what_is_not_a_string_is_refused(wrong):
    with pytest.raises(TypeError, match="must be a string"):
        features.features([wrong], bits=17)
