"""Which text of a chat stands for its prompt: one rule for training data, run stores and served requests.

The prompt of a request is its last user message. System prompts are left out on purpose: they are the same for all
requests of an application, so they say nothing about which answer is longer, and they would push the user's words out
of a scorer that reads a limited number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

USER = frozenset({"user", "human", "prompter"})
ASSISTANT = frozenset({"assistant", "gpt", "chatgpt", "model", "bot", "bing", "bard"})


class Turn(NamedTuple):
    """One message: its role in lower case, and its text."""

    role: str
    text: str


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """The text that a ranker scores: the string itself, or the last user message of a list of messages.

    Without a user message it is the text of all messages. Raises ``ValueError`` for what is neither.
    """
    if isinstance(prompt, str):
        return prompt
    all_turns = turns(prompt)
    users = [turn.text for turn in all_turns if turn.role in USER]
    return users[-1] if users else "\n".join(turn.text for turn in all_turns)


def whole_text(text: str) -> str:
    """The text with U+FFFD for lone halves of surrogate pairs, which no tokenizer takes; whole pairs are joined."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def first_exchange(conversation: Any) -> tuple[str, str] | None:
    """First user message and the first assistant message after it; None if there is no such pair.

    Raises ``ValueError`` if the value is no conversation.
    """
    prompt: str | None = None
    for role, text in turns(conversation):
        if role in USER and prompt is None:
            prompt = text
        elif role in ASSISTANT and prompt is not None:
            return prompt, text
    return None


def turns(messages: Any) -> list[Turn]:
    """The messages of OpenAI's shape (role, content), of ShareGPT's (from, value), or columns of either.

    Content may be a list of parts; the text parts count. Raises ``ValueError`` naming what is wrong.
    """
    return [_turn(number, message) for number, message in enumerate(_as_rows(messages), start=1)]


def _as_rows(messages: Any) -> Iterator[Any]:
    if isinstance(messages, Mapping):  # a `datasets` Sequence feature: {"role": [...], "content": [...]}
        columns = {name: list(values) for name, values in messages.items() if isinstance(values, Sequence)}
        if not columns or len(columns) < len(messages) or len({len(values) for values in columns.values()}) > 1:
            raise ValueError('messages must be a list such as [{"role": "user", "content": "..."}]')
        return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list, not {type(messages).__name__}")
    return iter(messages)


def _turn(number: int, message: Any) -> Turn:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {number} must be an object with role and content, not {type(message).__name__}")
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str):
        raise ValueError(f"message {number} has no role")
    return Turn(role.lower(), _content_text(number, content))


def _content_text(number: int, content: Any) -> str:
    if content is None:  # an assistant message with nothing but tool calls
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str))
    raise ValueError(f"message {number} has a content that is neither text nor a list of parts")
