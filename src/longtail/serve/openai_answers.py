"""Answers in OpenAI's words: whole bodies, and the events of a stream.

A stream has for each choice an opening (the role, in a chat), pieces of text, and an ending with the finish reason;
then the usage if it is wanted, and ``[DONE]``.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from longtail import __version__
from longtail.serve.token_text import TokenText

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""What OpenAI says for a token that is all but impossible; JSON has no infinity."""


class Scored(NamedTuple):
    """A token of an answer. ``offset``: where it begins, in characters of the choice's text. ``top``: the most likely
    tokens in its place, as many as the request wants."""

    token: TokenText
    logprob: float
    top: Sequence[tuple[TokenText, float]]
    offset: int


class Usage(NamedTuple):
    """In tokens; ``completion`` counts all that were generated: end tokens and those of stop strings too."""

    prompt: int
    completion: int


class Whole(NamedTuple):
    """A choice that has ended. ``scored`` is None where no log-probabilities are wanted."""

    text: str
    scored: list[Scored] | None
    finish: str


@dataclass
class Answer(ABC):
    """One answer of ``model`` (the name that clients know); a stream's ``usage`` is null in all events but one."""

    model: str
    with_usage: bool = False

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    event_object: ClassVar[str]

    def __post_init__(self) -> None:
        self._id = f"{self.prefix}-{secrets.token_hex(16)}"
        self._created = int(time.time())

    def body(self, choices: Sequence[Whole], usage: Usage) -> bytes:
        found = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return _json({**self._head(self.whole_object), "choices": found, "usage": _usage(usage)})

    @abstractmethod
    def opening(self, index: int, text: str = "") -> bytes:
        """The first event of a choice, empty if there is none. ``text``: what an echo repeats."""

    def piece(self, index: int, text: str, scored: list[Scored] | None) -> bytes:
        return self._event([self._part(index, text, scored, None)])

    @abstractmethod
    def ending(self, index: int, finish: str) -> bytes: ...

    def usage(self, usage: Usage) -> bytes:
        return _event({**self._head(self.event_object), "choices": [], "usage": _usage(usage)})

    @abstractmethod
    def _choice(self, index: int, choice: Whole) -> dict[str, Any]: ...

    @abstractmethod
    def _part(self, index: int, text: str, scored: list[Scored] | None, finish: str | None) -> dict[str, Any]: ...

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "system_fingerprint": f"longtail-{__version__}",
        }

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        usage = {"usage": None} if self.with_usage else {}
        return _event({**self._head(self.event_object), "choices": choices, **usage})


class CompletionAnswer(Answer):
    prefix, whole_object, event_object = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int, text: str = "") -> bytes:
        return self.piece(index, text, None) if text else b""

    def ending(self, index: int, finish: str) -> bytes:
        return self._event([self._part(index, "", None, finish)])

    def _choice(self, index: int, choice: Whole) -> dict[str, Any]:
        return self._part(index, choice.text, choice.scored, choice.finish)

    def _part(self, index: int, text: str, scored: list[Scored] | None, finish: str | None) -> dict[str, Any]:
        logprobs = None if scored is None else self._logprobs(scored)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, scored: list[Scored]) -> dict[str, Any]:
        """The chosen token is always among the most likely ones, which may make one more than were asked for."""
        tops = []
        for token, logprob, top, _ in scored:
            named = {self._name(other): _finite(value) for other, value in reversed(top)}
            tops.append(dict(reversed(named.items())) | {self._name(token): _finite(logprob)})
        return {
            "tokens": [self._name(s.token) for s in scored],
            "token_logprobs": [_finite(s.logprob) for s in scored],
            "top_logprobs": tops,
            "text_offset": [s.offset for s in scored],
        }

    def _name(self, token: TokenText) -> str:
        return f"bytes:{token.text}" if token.broken else token.text


class ChatAnswer(Answer):
    prefix, whole_object, event_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int, text: str = "") -> bytes:
        return self._event([self._delta(index, {"role": "assistant", "content": text}, None, None)])

    def ending(self, index: int, finish: str) -> bytes:
        return self._event([self._delta(index, {}, None, finish)])

    def _choice(self, index: int, choice: Whole) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(choice.scored),
            "finish_reason": choice.finish,
        }

    def _part(self, index: int, text: str, scored: list[Scored] | None, finish: str | None) -> dict[str, Any]:
        return self._delta(index, {"content": text}, scored, finish)

    def _delta(
        self, index: int, delta: dict[str, str], scored: list[Scored] | None, finish: str | None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": _chat_logprobs(scored), "finish_reason": finish}


def _chat_logprobs(scored: list[Scored] | None) -> dict[str, Any] | None:
    if scored is None:
        return None
    content = [
        {**_named(s.token, s.logprob), "top_logprobs": [_named(token, logprob) for token, logprob in s.top]}
        for s in scored
    ]
    return {"content": content, "refusal": None}


def _named(token: TokenText, logprob: float) -> dict[str, Any]:
    data = None if token.data is None else list(token.data)
    return {"token": token.text, "logprob": _finite(logprob), "bytes": data}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _usage(usage: Usage) -> dict[str, int]:
    total = usage.prompt + usage.completion
    return {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion, "total_tokens": total}


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _json(value) + b"\n\n"
