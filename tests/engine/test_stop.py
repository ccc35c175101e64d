from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine_models import Script, make_engine, request, run_all
from longtail.core.types import FinishReason
from longtail.engine.stop import stop_position

WORDS = ["<s>", "one", " tw", "o", " three", " four five", " six", " \U0001f642"[:1], "\U0001f642", " end", ""]
SAID = "one two three four five six \U0001f642 end"


def detokenize(tokens: list[int]) -> str:
    return "".join(WORDS[t] for t in tokens)


def say(**params):
    """What the model says after <s>: token by token, the words above."""
    engine = make_engine(Script(len(WORDS)), detokenize=detokenize)
    item = request("r", np.array([0], np.int32), **{"max_tokens": 9, "temperature": 0, **params})
    return run_all(engine, [item])[("r", 0)]


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (("e four f",), "one two thre", 5),
        (("three", "three four"), "one two ", 4),
        (("three four", "three"), "one two ", 4),
        (("two three four", "o th"), "one tw", 4),
        (("\U0001f642",), "one two three four five six ", 8),
        (("one",), "", 1),
        (("zzz", "six"), "one two three four five ", 6),
    ],
)
def test_a_stop_string_ends_the_text_before_it_and_keeps_the_token_that_completed_it(stop, text, tokens):
    said = say(stop=stop)
    assert (said.text, len(said.tokens), said.finish) == (text, tokens, FinishReason.STOP)
    assert len(said.logprobs) == tokens


def test_a_stop_string_that_never_completes_leaves_the_text_whole():
    said = say(stop=("six seven", "end."))
    assert (said.text, said.finish) == (SAID, FinishReason.LENGTH)


def test_the_token_limit_inside_a_partial_match_keeps_the_text():
    said = say(stop=("e four five six",), max_tokens=5)
    assert (said.text, said.finish) == ("one two three four five", FinishReason.LENGTH)


def test_a_stop_string_on_the_last_allowed_token_is_a_stop():
    assert say(stop=("five",), max_tokens=5).finish == FinishReason.STOP


@pytest.mark.parametrize("ends", [(5,), (5, 9), (9, 5), (8, 7, 5)])
def test_any_of_several_end_tokens_stops_and_is_kept_once(ends):
    said = say(end_token_ids=ends)
    assert said.tokens.tolist() == [1, 2, 3, 4, 5]
    assert (said.text, said.finish) == ("one two three", FinishReason.STOP)


def test_an_end_token_as_the_first_token_gives_an_empty_text():
    said = say(end_token_ids=(1,))
    assert (said.tokens.tolist(), said.text, said.finish) == ([1], "", FinishReason.STOP)


def test_a_forced_length_ignores_end_tokens_and_stop_strings():
    said = say(end_token_ids=(2,), stop=("two",), forced=(7,))
    assert (len(said.tokens), said.finish) == (7, FinishReason.STOP)
    assert say(forced=(9,), max_tokens=3).tokens.tolist() == list(range(1, 10))


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(
        st.one_of(st.text("ab\n", max_size=3), st.text("c", min_size=30), st.just("")), min_size=1, max_size=40
    ),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_checking_after_each_token_finds_the_first_match_of_the_whole_text(pieces, stops):
    def text_of(tokens):
        return "".join(pieces[t] for t in tokens)

    for count in range(1, len(pieces) + 1):
        text = text_of(range(count))
        found = [text.find(s) for s in stops if s in text]
        assert stop_position(list(range(count)), text_of, stops) == (min(found) if found else None)
        if found:
            return


def test_a_character_of_several_tokens_matches_when_it_is_whole():
    data = "xy\U0001f642z".encode()

    def text_of(tokens):
        return bytes(tokens).decode(errors="replace")

    hits = [n for n in range(1, len(data) + 1) if stop_position(list(data[:n]), text_of, ["\U0001f642"]) is not None]
    assert hits[0] == 6
    assert stop_position(list(data[:6]), text_of, ["\U0001f642"]) == 2


def test_a_match_behind_tokens_without_text_and_ended_by_a_long_token_is_found():
    pieces = ["ST", *[""] * 100, "OP" + "x" * 50]

    def text_of(tokens):
        return "".join(pieces[t] for t in tokens)

    assert stop_position(range(len(pieces) - 1), text_of, ["STOP"]) is None
    assert stop_position(range(len(pieces)), text_of, ["STOP"]) == 0
