from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from longtail.core.errors import DataError, ModelError
from longtail.engine.tokenizer import Tokenizer

SPECIALS = ["<pad>", "<bos>", "<unused>", "<|im_start|>", "<|im_end|>", "<eos>"]
BOS, IM_END, EOS = 1, 4, 5

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the first role must be user') }}{% endif %}" + CHATML
)
HELLO = [{"role": "user", "content": "Hello  you"}]


def save_tokenizer(folder: Path, *, bos: bool = False, eos: bool = False, template: str | None = None) -> Path:
    """A byte-level tokenizer without merges; ``bos`` and ``eos`` say what its post-processor adds."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({token: i for i, token in enumerate(SPECIALS + letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    single = ["<bos>"] * bos + ["$A"] + ["<eos>"] * eos
    raw.post_processor = processors.TemplateProcessing(
        single=" ".join(single), special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<bos>" if bos else None,
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=template,
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def llama3_style(tmp_path) -> Tokenizer:
    """The template prints BOS, and the post-processor adds it."""
    return Tokenizer.load(save_tokenizer(tmp_path, bos=True, template="{{ bos_token }}" + CHATML))


@pytest.fixture
def qwen_style(tmp_path) -> Tokenizer:
    """No BOS anywhere."""
    return Tokenizer.load(save_tokenizer(tmp_path, template=CHATML))


class TestChatPrompts:
    @pytest.mark.parametrize("style", ["llama3_style", "qwen_style"])
    def test_tokens_are_those_of_apply_chat_template(self, style, request):
        tokenizer = request.getfixturevalue(style)
        hf = AutoTokenizer.from_pretrained(tokenizer.folder)
        expected = hf.apply_chat_template(HELLO, tokenize=True, add_generation_prompt=True, return_dict=False)
        for prompt, chat in ((HELLO, None), (HELLO, True), (HELLO[0]["content"], None), (HELLO[0]["content"], True)):
            tokens = tokenizer.encode_prompt(prompt, chat=chat)
            assert tokens.dtype == np.int32
            assert tokens.tolist() == expected
        assert expected.count(BOS) == (style == "llama3_style")

    def test_a_template_that_refuses_the_messages_is_a_data_error_with_its_words(self, tmp_path):
        tokenizer = Tokenizer.load(save_tokenizer(tmp_path, template=STRICT))
        with pytest.raises(DataError, match="refuses the messages: the first role must be user"):
            tokenizer.encode_prompt([{"role": "system", "content": "x"}])
        with pytest.raises(DataError, match="no messages"):
            tokenizer.encode_prompt([])

    def test_messages_need_a_template(self, tmp_path, qwen_style):
        with pytest.raises(DataError, match="cannot be a plain prompt"):
            qwen_style.encode_prompt(HELLO, chat=False)
        plain = Tokenizer.load(save_tokenizer(tmp_path / "plain"))
        assert not plain.has_chat_template
        for prompt, chat in ((HELLO, None), ("Hello", True)):
            with pytest.raises(ModelError, match="no chat template"):
                plain.encode_prompt(prompt, chat=chat)


class TestPlainPrompts:
    def test_one_bos_where_the_tokenizer_adds_one(self, llama3_style):
        tokens = llama3_style.encode_prompt("ab", chat=False)
        assert tokens[0] == BOS
        assert len(tokens) == 3

    def test_one_bos_even_if_the_text_begins_with_it(self, llama3_style):
        tokens = llama3_style.encode_prompt("<bos>ab", chat=False)
        assert tokens.tolist() == llama3_style.encode_prompt("ab", chat=False).tolist()

    def test_no_bos_where_the_tokenizer_adds_none(self, qwen_style):
        assert len(qwen_style.encode_prompt("ab", chat=False)) == 2

    def test_no_template_means_plain(self, tmp_path):
        tokenizer = Tokenizer.load(save_tokenizer(tmp_path, bos=True))
        assert tokenizer.encode_prompt("ab").tolist() == tokenizer.encode_prompt("ab", chat=False).tolist()

    def test_an_end_token_that_the_tokenizer_appends_is_left_out_and_one_in_the_text_stays(self, tmp_path):
        tokenizer = Tokenizer.load(save_tokenizer(tmp_path, bos=True, eos=True))
        assert tokenizer.encode_prompt("ab").tolist()[-1] != EOS
        assert tokenizer.encode_prompt("ab<eos>").tolist()[-1] == EOS

    def test_an_empty_prompt_is_bos_alone_or_an_error(self, llama3_style, tmp_path):
        assert llama3_style.encode_prompt("", chat=False).tolist() == [BOS]
        no_bos = Tokenizer.load(save_tokenizer(tmp_path / "no_bos"))
        with pytest.raises(DataError, match="the prompt has no tokens"):
            no_bos.encode_prompt("")


class TestText:
    @pytest.mark.parametrize("text", ["a b", " two  spaces .", "it 's , so !", "é 東京 🙂\n\n"])
    def test_decoding_gives_back_the_text_with_its_spaces(self, text, llama3_style):
        tokens = llama3_style.encode_prompt(text, chat=False)
        assert llama3_style.decode(tokens) == text

    def test_special_tokens_leave_no_text(self, qwen_style):
        tokens = qwen_style.encode_prompt("a<|im_end|>b", chat=False)
        assert IM_END in tokens
        assert qwen_style.decode(tokens) == "ab"
        assert qwen_style.decode([]) == ""

    def test_sizes(self, qwen_style):
        assert qwen_style.vocab_size == 256 + len(SPECIALS)


def write(folder: Path, name: str, **values) -> None:
    (folder / name).write_text(json.dumps(values))


class TestEndTokens:
    """The union of generation_config.json, config.json and the tokenizer's own."""

    @pytest.mark.parametrize(
        ("generation", "config", "expected"),
        [
            ({"eos_token_id": [5, 9]}, {"eos_token_id": 5}, (5, 9)),
            ({"eos_token_id": 9}, {"eos_token_id": 4}, (4, 5, 9)),
            (None, {"eos_token_id": [4, 9]}, (4, 5, 9)),
            ({"eos_token_id": None}, {"eos_token_id": None}, (5,)),
            ({}, {}, (5,)),
            (None, {"eos_token_id": -1}, (5,)),
        ],
    )
    def test_every_declared_id_counts_once(self, generation, config, expected, tmp_path):
        save_tokenizer(tmp_path)
        write(tmp_path, "config.json", model_type="llama", **config)
        if generation is not None:
            write(tmp_path, "generation_config.json", **generation)
        assert Tokenizer.load(tmp_path).end_token_ids == expected

    def test_none_at_all_is_an_empty_tuple(self, tmp_path):
        save_tokenizer(tmp_path)
        path = tmp_path / "tokenizer_config.json"
        config = json.loads(path.read_text())
        del config["eos_token"]
        path.write_text(json.dumps(config))
        assert Tokenizer.load(tmp_path).end_token_ids == ()

    def test_a_value_that_is_no_id_is_an_error_that_names_the_file(self, tmp_path):
        save_tokenizer(tmp_path)
        write(tmp_path, "generation_config.json", eos_token_id="</s>")
        with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id = '</s>'"):
            Tokenizer.load(tmp_path)


def test_a_folder_without_a_tokenizer_is_a_model_error_that_names_it(tmp_path):
    write(tmp_path, "config.json", model_type="llama")
    with pytest.raises(ModelError, match=f"{tmp_path.name}: the tokenizer cannot be loaded"):
        Tokenizer.load(tmp_path)
