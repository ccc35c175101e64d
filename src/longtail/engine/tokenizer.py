"""Text to tokens and back, by the tokenizer that stands in a model folder.

End tokens are the *union* of ``eos_token_id`` in ``generation_config.json``, the same key in ``config.json``, and the
tokenizer's own end token: models declare several, and end a chat turn with a secondary one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from longtail.core.errors import DataError, ModelError
from longtail.engine.weightfiles import read_json


class Tokenizer:
    """Wraps transformers' tokenizer of one folder; nothing is downloaded and no code of the folder is run.

    ``vocab_size`` counts all tokens, added ones too (the model's embedding may have more rows). ``end_token_ids`` is
    sorted, and empty if the model declares no end token: then only the token limit and stop strings end a sample.
    """

    def __init__(self, hf: Any, end_token_ids: tuple[int, ...], folder: Path) -> None:
        self.hf = hf
        self.end_token_ids = end_token_ids
        self.folder = folder
        self.vocab_size: int = len(hf)
        self.has_chat_template: bool = bool(hf.chat_template)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Raises :class:`ModelError` if the folder holds no usable tokenizer."""
        from transformers import AutoTokenizer

        try:
            hf = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # every tokenizer class fails in its own way
            raise ModelError(f"{folder}: the tokenizer cannot be loaded: {' '.join(str(error).split())}") from error
        return cls(hf, _end_token_ids(folder, hf), folder)

    def encode_prompt(self, prompt: str | list[dict[str, Any]], *, chat: bool | None = None) -> np.ndarray:
        """int32 tokens of a prompt, up to where the response begins.

        A list holds chat messages and goes through the chat template, whose special tokens are final. A string is
        encoded by the tokenizer's own rule for special tokens, or becomes one user message: with ``chat`` None, if
        there is a template; with True, always; with False, never. Plain text has one BOS where the tokenizer adds
        one, even if it is written out in the text, and never an end token that the tokenizer would append.

        Raises :class:`DataError` for a prompt that gives no tokens or that the template refuses, and
        :class:`ModelError` if a template is wanted and there is none.
        """
        if isinstance(prompt, list) and chat is False:
            raise DataError("chat messages cannot be a plain prompt: use a string, or prompt_format chat or auto")
        if isinstance(prompt, list) or (self.has_chat_template if chat is None else chat):
            messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            tokens = self._encode_chat(messages)
        else:
            tokens = self._encode_plain(prompt)
        if not tokens:
            raise DataError("the prompt has no tokens: it is empty, and the tokenizer adds none at its start")
        return np.array(tokens, dtype=np.int32)

    def decode(self, tokens: np.ndarray | list[int]) -> str:
        """The text of ``tokens``, special tokens left out and spaces as they are."""
        ids = np.asarray(tokens).tolist()
        return self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        if not self.has_chat_template:
            raise ModelError(
                f"{self.folder}: the tokenizer has no chat template: use prompt_format plain and string prompts"
            )
        if not messages:
            raise DataError("the prompt has no messages")
        try:
            return self.hf.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # templates are programs of the model's maker
            raise DataError(f"the chat template refuses the messages: {' '.join(str(error).split())}") from error

    def _encode_plain(self, prompt: str) -> list[int]:
        tokens = self.hf(prompt)["input_ids"]
        bare = self.hf(prompt, add_special_tokens=False)["input_ids"]
        bos, eos = self.hf.bos_token_id, self.hf.eos_token_id
        if bos is not None and tokens[:2] == [bos, bos] and bare[:1] == [bos]:
            tokens = tokens[1:]
        if eos is not None and len(tokens) > len(bare) and tokens[-1] == eos and bare[-1:] != [eos]:
            tokens = tokens[:-1]
        return tokens


def _end_token_ids(folder: Path, hf: Any) -> tuple[int, ...]:
    ids = {hf.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        declared = read_json(path).get("eos_token_id") if path.exists() else None
        values = declared if isinstance(declared, list) else [declared]
        if not all(value is None or (isinstance(value, int) and value >= -1) for value in values):
            raise ModelError(f"{path}: eos_token_id = {declared!r} must be a token id or a list of them")
        ids.update(values)
    return tuple(sorted(i for i in ids if i is not None and i >= 0))
