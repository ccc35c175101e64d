"""Tokenizers and model folders of a few words, for tests of served text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from longtail.engine.checkpoint import export_model, read_config
from longtail.engine.model import Decoder
from longtail.engine.models import resolve_model

SMILE = "\U0001f642"
WORDS = [b"one", b" tw", b"o", b" three", b" four five", b" six ", SMILE.encode()[:2], SMILE.encode()[2:], b" end"]
SAID = f"one two three four five six {SMILE} end"
BEGIN, END = 0, len(WORDS) + 1
"""Token i is word i - 1, between these two special tokens."""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def as_letters(data: bytes) -> str:
    """Bytes in the alphabet of byte-level vocabularies."""
    alphabet = bytes_to_unicode()
    return "".join(alphabet[byte] for byte in data)


def byte_level(vocab: dict[str, int], specials: list[str]) -> RawTokenizer:
    """A tokenizer with byte-level entries and these special tokens, which may be part of ``vocab``."""
    raw = RawTokenizer(models.BPE(vocab, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(special, normalized=False) for special in specials])
    return raw


def save_speaker(folder: Path) -> Path:
    """A model that says :data:`SAID` and ends, whatever the prompt, if that ends with token BEGIN (as a chat does)."""
    vocab = {"<s>": BEGIN, **{as_letters(word): i for i, word in enumerate(WORDS, 1)}, "</s>": END}
    raw = byte_level(vocab, ["<s>", "</s>"])
    files = folder / "files"
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}<s>"
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", chat_template=template).save_pretrained(files)
    size = 32
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocab),
        "hidden_size": size,
        "intermediate_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": size,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": END,
    }
    (files / "config.json").write_text(json.dumps(config))
    model = Decoder(read_config(files), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if parameter.ndim == 1 else 0.0)
            if name in ("embed", "head"):
                for token in range(len(vocab)):
                    row = token if name == "embed" else (token + 1) % len(vocab)
                    parameter[row, token] = 1.0 if name == "embed" else 10.0
    export_model(model, folder / "speaker", source=files)
    return folder / "speaker"


def save_chatty(parent: Path, template: str = CHATML) -> Path:
    """The tiny model with a chat template."""
    folder = parent / "chatty"
    shutil.copytree(resolve_model("tiny"), folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder
