"""What is sent of a text while it is generated: never to be taken back, never part of a stop string."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from longtail.engine.models import resolve_model
from longtail.engine.stop import stop_position
from longtail.engine.tokenizer import Tokenizer
from longtail.serve.text import BROKEN, WINDOW, TextStream
from longtail.serve.token_text import TokenTexts
from serve.text_models import SAID, SMILE, WORDS, as_letters, byte_level

TEXT = "one two three four five six. One, two, three! Größe, déjà vu, 你好世界, 🙂🙃 👩‍👩‍👧 four five six seven"
SPECIAL = "<|end|>"
Decode = Callable[[list[int]], str]


def trained() -> RawTokenizer:
    """A byte-level BPE tokenizer, so that characters are whole tokens, parts of tokens, and several tokens."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([TEXT] * 3, trainer)
    return raw


def sentencepiece_like() -> RawTokenizer:
    """Llama 2's kind: a mark for spaces, one dropped at the start, and bytes for what is not in the vocabulary."""
    words = [
        "<unk>",
        "</s>",
        "\N{LOWER ONE EIGHTH BLOCK}",
        "\N{LOWER ONE EIGHTH BLOCK}one",
        "two",
        "h",
        "\N{LOWER ONE EIGHTH BLOCK}" * 3,
    ]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    raw = RawTokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens(["</s>"])
    return raw


BPE = trained()
SIZE = BPE.get_vocab_size()


def decode(tokens: list[int]) -> str:
    return BPE.decode(tokens, skip_special_tokens=True)


def streamed(tokens: list[int], stops: list[str], decode: Decode = decode) -> tuple[list[str], int, bool]:
    """The pieces (the last is what :meth:`TextStream.finish` gives), tokens used, and whether a stop ended it."""
    stream, pieces = TextStream(decode, stops), []
    for used, token in enumerate(tokens, 1):
        pieces.append(stream.push(token))
        if stream.stopped:
            assert stream.push(token) == ""
            return [*pieces, stream.finish()], used, True
    return [*pieces, stream.finish()], len(tokens), False


def expected(tokens: list[int], stops: list[str], decode: Decode = decode) -> tuple[str, int, bool]:
    """By the engine's own rule: the whole decode after each token, cut where a stop string is first complete."""
    for used in range(1, len(tokens) + 1):
        at = stop_position(tokens[:used], decode, stops) if stops else None
        if at is not None:
            return decode(tokens[:used])[:at], used, True
    return decode(tokens), len(tokens), False


some_tokens = st.one_of(
    st.lists(st.integers(0, SIZE - 1), max_size=90),
    st.text(max_size=40).map(lambda text: BPE.encode(text).ids),
    st.text(alphabet="one twhr🙂你é", max_size=60).map(lambda text: BPE.encode(text).ids),
)
some_stops = st.lists(
    st.one_of(st.text("one tw🙂", min_size=1, max_size=5), st.sampled_from(["three", "o th", "🙂", "\ufffd", "\n\n"])),
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(tokens=some_tokens, stops=some_stops)
@example(tokens=BPE.encode("🙂").ids[:-1], stops=["\ufffd"])
def test_the_pieces_join_to_the_text_of_the_completion(tokens, stops):
    pieces, used, stopped = streamed(tokens, stops)
    assert ("".join(pieces), used, stopped) == expected(tokens, stops)


@settings(max_examples=200, deadline=None)
@given(tokens=some_tokens, stops=some_stops)
def test_nothing_is_sent_that_could_belong_to_a_stop_string_and_nothing_else_is_held_back(tokens, stops):
    stream, sent = TextStream(decode, stops), ""
    for used, token in enumerate(tokens, 1):
        sent += stream.push(token)
        if stream.stopped:
            return
        assert stream.sent == len(sent)
        whole = decode(tokens[:used])
        assert whole.startswith(sent)
        certain = whole.rstrip(BROKEN)
        begun = max((n for stop in stops for n in range(len(stop)) if certain.endswith(stop[:n])), default=0)
        if whole == certain:
            assert len(sent) == len(certain) - begun
        else:
            assert len(sent) <= len(whole) - 1


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.one_of(
        st.lists(st.integers(0, 262), max_size=60),
        st.text("h 🙂é你", max_size=30).map(lambda text: [7 + byte for byte in text.encode()]),
        st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=60),
    )
)
def test_decoders_that_drop_a_leading_space_and_fall_back_to_bytes_give_the_same_text(tokens):
    llama = sentencepiece_like()
    whole = llama.decode(tokens, skip_special_tokens=True)
    if BROKEN in whole:  # such a decoder changes its mind about characters before a broken one
        return
    pieces, _, _ = streamed(tokens, [], lambda ids: llama.decode(ids, skip_special_tokens=True))
    assert "".join(pieces) == whole


def speaker(tokens: list[int]) -> str:
    return b"".join(WORDS[token] for token in tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["e four f"], "one two thre"),
        (["six seven"], SAID),
        (["three", "three four"], "one two "),
        (["three four", "three"], "one two "),
        ([SMILE], "one two three four five six "),
        (["one"], ""),
        (["end"], SAID[:-3]),
        (["end."], SAID),
    ],
)
def test_stop_strings_across_token_borders(stops, text):
    pieces, _, stopped = streamed(list(range(len(WORDS))), stops, speaker)
    assert ("".join(pieces), stopped) == (text, text != SAID)


def test_text_before_a_partial_match_goes_out_at_once_and_the_match_when_it_fails():
    stream = TextStream(speaker, ["three four five six!"])
    assert [stream.push(token) for token in range(6)] == ["one", " tw", "o", " ", "", "three four five six "]


def test_a_character_comes_out_with_its_last_token():
    stream = TextStream(speaker)
    assert [stream.push(token) for token in (0, 6, 7, 8)] == ["one", "", SMILE, " end"]


def test_what_is_held_back_comes_out_when_the_sample_ends():
    stream = TextStream(speaker, ["three four five six!"])
    assert [stream.push(token) for token in (3, 4)] == [" ", ""]
    assert (stream.finish(), stream.finish(), stream.sent) == ("three four five", "", len(" three four five"))
    broken = TextStream(speaker)
    assert (broken.push(6), broken.finish()) == ("", BROKEN)


def test_positions_are_where_the_text_of_the_next_token_begins():
    stream, positions = TextStream(speaker), []
    for token in (0, 5, 6, 7, 8):
        positions.append(stream.position)
        stream.push(token)
    assert positions == [0, 3, 8, 8, 9]


BAD = BPE.token_to_id(bytes_to_unicode()[0xFF])
LONG = {
    "words": BPE.encode(TEXT * 40).ids,
    "random": random.Random(1).choices(range(SIZE), k=3000),
    "broken for ever": [BAD] * 3000,
    "special tokens only": [BPE.token_to_id(SPECIAL)] * 3000,
    "special tokens behind a word": [*BPE.encode("one").ids, *[BPE.token_to_id(SPECIAL)] * 3000],
}


@pytest.mark.parametrize("tokens", LONG.values(), ids=LONG)
def test_decoding_is_linear_in_the_number_of_tokens(tokens):
    decoded = 0

    def counting(ids):
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    pieces, _, _ = streamed(tokens, [], counting)
    assert "".join(pieces) == decode(tokens)
    assert decoded < 3 * WINDOW * len(tokens)


def test_broken_bytes_are_not_held_back_for_ever():
    pieces, _, _ = streamed([BAD] * 200, [])
    assert len(pieces[-1]) < 3 * WINDOW


def test_a_token_is_named_by_its_text_its_bytes_or_its_special_name():
    vocab = {"<s>": 0, **{as_letters(word): i for i, word in enumerate(WORDS, 1)}}
    names = TokenTexts(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level(vocab, ["<s>"])), (), None))
    assert names(2) == (" tw", b" tw", False)
    assert names(7) == (r"\xf0\x9f", b"\xf0\x9f", True)
    assert names(0) == ("<s>", None, False)
    assert names(99) == ("", None, False)


def test_tokens_of_other_tokenizers_keep_their_spaces_and_bytes():
    names = TokenTexts(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like()), (), None))
    assert names(3) == (" one", b" one", False)
    assert names(7 + 0xF0) == (r"\xf0", b"\xf0", True)
    assert names(7 + ord("h")) == ("h", b"h", False)


def test_the_bytes_of_a_text_are_those_of_its_tokens():
    hf = PreTrainedTokenizerFast(tokenizer_object=BPE)
    names = TokenTexts(Tokenizer(hf, (), None))
    assert b"".join(names(token).data for token in BPE.encode(TEXT).ids) == TEXT.encode()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_same_holds_for_a_real_vocabulary(data):
    tokenizer = Tokenizer.load(resolve_model("smollm2-135m"))
    tokens = data.draw(
        st.one_of(
            st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60),
            st.text(max_size=40).map(lambda text: tokenizer.hf(text)["input_ids"]),
        )
    )
    stops = data.draw(some_stops)
    pieces, used, stopped = streamed(tokens, stops, tokenizer.decode)
    assert ("".join(pieces), used, stopped) == expected(tokens, stops, tokenizer.decode)
