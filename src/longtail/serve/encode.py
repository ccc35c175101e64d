"""From the prompts of a request to token ids that the engine takes."""

from __future__ import annotations

import inspect

import numpy as np

from longtail.core.errors import DataError
from longtail.engine.tokenizer import Tokenizer
from longtail.lengths.messages import whole_text
from longtail.serve.errors import ApiError
from longtail.serve.openai_schema import ChatBody, CompletionBody

_SHRINK = 4
"""Normalisers may make a text shorter, at most by this factor, before it is cut into tokens."""

_EACH = 100
"""Characters that take as long to encode as a prompt without any."""


class PromptEncoder:
    """``vocab_size`` is the model's, ``max_context`` counts prompt and answer. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size, self._max_context = vocab_size, max_context
        self._longest = max(map(len, tokenizer.hf.get_vocab()), default=1)
        # A client's template would be a program of the client's, and the others change what comes back.
        self._taken = frozenset(inspect.signature(tokenizer.hf.apply_chat_template).parameters) | {"messages"}
        tokenizer.hf("warm")  # the first use may change the tokenizer's settings, which no other thread must see

    def __call__(self, body: CompletionBody | ChatBody) -> list[np.ndarray]:
        """int32 ids of each prompt. Raises :class:`ApiError` (400) for one that is empty, too long, or refused by the
        chat template."""
        if isinstance(body, ChatBody):
            return [self._chat(body)]
        alone = len(body.prompts) == 1
        return [self._plain(p, "prompt" if alone else f"prompt.{i}") for i, p in enumerate(body.prompts)]

    def work(self, body: CompletionBody | ChatBody) -> int:
        """How much it is to encode the prompts, in characters; a prompt or message by itself is worth some."""
        if isinstance(body, ChatBody):
            return len(body.messages) * _EACH + _characters(body)
        return sum(_EACH + len(prompt) for prompt in body.prompts)

    def _plain(self, prompt: str | list[int], param: str) -> np.ndarray:
        if isinstance(prompt, str):
            self._refuse_endless(len(prompt), param)
            try:
                tokens = self._tokenizer.encode_prompt(prompt, chat=False)
            except DataError:
                raise ApiError(
                    400,
                    f"{param}: the prompt is empty, and this model has no token to begin a text with.",
                    code="invalid_value",
                    param=param,
                ) from None
        else:
            self._refuse_long(len(prompt), param)
            if max(prompt) >= self._vocab_size:
                raise ApiError(
                    400,
                    f"{param}: token id {max(prompt)} is outside the vocabulary (0 to {self._vocab_size - 1}).",
                    code="invalid_value",
                    param=param,
                )
            tokens = np.array(prompt, dtype=np.int32)
        self._refuse_long(len(tokens), param)
        return tokens

    def _chat(self, body: ChatBody) -> np.ndarray:
        if not self._tokenizer.has_chat_template:
            raise ApiError(
                400,
                "This model has no chat template: use /v1/completions.",
                code="no_chat_template",
                param="messages",
            )
        self._refuse_endless(_characters(body), "messages")
        variables = body.chat_template_kwargs or {}
        taken = sorted(self._taken & set(variables))
        if taken:
            param = f"chat_template_kwargs.{taken[0]}"
            raise ApiError(400, f"{param}: a client may not set this.", code="invalid_value", param=param)
        messages = [message.for_template() for message in body.messages]
        try:
            ids = self._tokenizer.hf.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False, **variables
            )
        except Exception as error:  # templates are programs of the model's maker
            reason = whole_text(" ".join(str(error).split())[:200])
            raise ApiError(
                400, f"messages: the chat template refuses them: {reason}.", code="invalid_value", param="messages"
            ) from None
        self._refuse_long(len(ids), "messages")
        if not ids:
            raise ApiError(
                400, "messages: the chat template makes nothing of them.", code="invalid_value", param="messages"
            )
        return np.array(ids, dtype=np.int32)

    def _refuse_endless(self, characters: int, param: str) -> None:
        """A text that cannot fit is not encoded at all, which could take seconds."""
        at_least = characters // (_SHRINK * self._longest)
        if at_least >= self._max_context:
            raise self._too_long(f"more than {at_least}", param)

    def _refuse_long(self, tokens: int, param: str) -> None:
        if tokens >= self._max_context:
            raise self._too_long(str(tokens), param)

    def _too_long(self, tokens: str, param: str) -> ApiError:
        return ApiError(
            400,
            f"{param}: the prompt has {tokens} tokens, but the context of {self._max_context} tokens must hold it and "
            "at least one token of the answer.",
            code="context_length_exceeded",
            param=param,
        )


def _characters(body: ChatBody) -> int:
    return sum(len(message.for_template()["content"]) for message in body.messages)
