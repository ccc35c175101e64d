"""What a length counts: ``tokens``, ``words``, ``chars``, or ``tokens:MODEL`` (the tokens of a chosen tokenizer)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longtail.core.errors import ConfigError

UNSTATED = "unstated"
"""The unit of lengths whose column does not say what it counts."""

CountTokens = Callable[[Sequence[str]], Sequence[int]]
"""Token counts of texts; made from a model's tokenizer by whoever may import one."""


@dataclass(frozen=True)
class Unit:
    """``kind`` is tokens, words, chars or unstated; ``model`` names the tokenizer of ``tokens:MODEL``."""

    kind: str
    model: str | None = None

    @classmethod
    def parse(cls, text: str) -> Unit:
        """Raises :class:`ConfigError` for what is no unit."""
        kind, colon, model = text.strip().partition(":")
        if kind == "tokens" and (model or not colon):
            return cls("tokens", model or None)
        if kind in ("words", "chars") and not colon:
            return cls(kind)
        raise ConfigError(
            f"unit {text!r} is unknown: use words, chars, tokens (lengths that the data gives), or tokens:MODEL to "
            "count the responses with a model's tokenizer, for example tokens:smollm2-135m"
        )

    def __str__(self) -> str:
        return self.kind if self.model is None else f"{self.kind}:{self.model}"

    @property
    def counts_text(self) -> bool:
        """Whether a response's text is enough to know its length."""
        return self.kind in ("words", "chars") or self.model is not None

    def count(self, texts: Sequence[str], count_tokens: CountTokens | None = None) -> list[int]:
        """Lengths of ``texts``; words are what white space separates, characters are code points.

        ``count_tokens`` is needed for ``tokens:MODEL``. Raises :class:`ConfigError` if the text is not enough.
        """
        if self.kind == "words":
            return [len(text.split()) for text in texts]
        if self.kind == "chars":
            return [len(text) for text in texts]
        if self.model is not None and count_tokens is not None:
            return [int(n) for n in count_tokens(texts)]
        raise ConfigError(
            "tokens cannot be counted without a tokenizer: say which, as in tokens:smollm2-135m, or use words or chars"
        )
