"""What a token is called in log-probabilities: its text and its bytes."""

from __future__ import annotations

import re
from typing import NamedTuple

from longtail.engine.tokenizer import Tokenizer
from longtail.serve.text import BROKEN

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_ANCHOR = "a"


class TokenText(NamedTuple):
    """``data`` is the token's bytes, None for a special token. Where they are no whole characters, ``text`` is them
    written out, such as ``\\xf0\\x9f``, and ``broken``."""

    text: str
    data: bytes | None
    broken: bool = False


class TokenTexts:
    """Looks tokens up, and remembers them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoders may drop a space at the start, so a token is decoded behind something.
        self._anchor: list[int] = tokenizer.hf(_ANCHOR, add_special_tokens=False)["input_ids"]
        self._anchor_text = tokenizer.decode(self._anchor)
        self._byte_of = _byte_alphabet()
        self._known: dict[int, TokenText] = {}

    def __call__(self, token: int) -> TokenText:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def _look_up(self, token: int) -> TokenText:
        if token >= self._tokenizer.vocab_size:  # the model's embedding may have rows without a token
            return TokenText("", None)
        text = self._tokenizer.decode([*self._anchor, token])[len(self._anchor_text) :]
        raw: str = self._tokenizer.hf.convert_ids_to_tokens(token) or ""
        if not text:
            return TokenText(raw, None)
        if BROKEN not in text:
            return TokenText(text, text.encode())
        data = self._bytes(raw)
        try:
            return TokenText(data.decode(), data)
        except UnicodeDecodeError:
            return TokenText("".join(f"\\x{byte:02x}" for byte in data), data, broken=True)

    def _bytes(self, raw: str) -> bytes:
        """The bytes that a vocabulary entry stands for, in the two spellings that are in use."""
        byte = _BYTE_TOKEN.fullmatch(raw)
        if byte:
            return bytes.fromhex(byte[1])
        if all(letter in self._byte_of for letter in raw):
            return bytes(self._byte_of[letter] for letter in raw)
        return raw.encode()


def _byte_alphabet() -> dict[str, int]:
    """The letters for bytes in vocabularies of GPT-2's kind: printable ones stand for themselves, the others, in order,
    for the code points from 256."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
