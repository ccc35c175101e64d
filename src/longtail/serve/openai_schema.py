"""The bodies of ``/v1/completions`` and ``/v1/chat/completions`` that our own engine answers.

What OpenAI's API has and the engine has not is refused by name unless it has its neutral value, because to leave it out
would be another answer than the one asked for. Fields that nobody knows, and those that change no answer (``user``,
``metadata``, ``store``, ``priority``, which is the front door's), are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from longtail.serve.calls import CHAT, COMPLETIONS
from longtail.serve.errors import ApiError

MOST_SAMPLES = 128
MOST_PROMPTS = 1024
"""Prompts of one request; also the most samples of all its prompts together."""
COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions; a chat may use what is left of the context."""
MOST_STOPS, LONGEST_STOP = 16, 1024

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
}
_NEUTRAL_IN: dict[str, dict[str, tuple[Any, ...]]] = {
    COMPLETIONS: {**_NEUTRAL, "suffix": ("",), "prompt_embeds": ()},
    CHAT: {
        **_NEUTRAL,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
    },
}
"""Values with which a field that is not supported changes nothing; null is always one."""


def _kind(value: Any) -> str | None:
    """Which of the forms of a field that has several; the names are never part of a field's path."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    return "<texts>" if isinstance(first, str) else "<lists>" if isinstance(first, list) else "<items>"


def _whole(text: str) -> str:
    """JSON can spell halves of characters, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("unicode", "Input should be Unicode text without lone surrogates") from None
    return text


WholeText = Annotated[str, AfterValidator(_whole)]
Text = Annotated[WholeText, Tag("<text>")]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
StopText = Annotated[WholeText, Field(min_length=1, max_length=LONGEST_STOP)]


class TextPart(BaseModel):
    """Part of a message; other kinds than text are refused."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: WholeText


class Message(BaseModel):
    """``content`` is left out or null for an assistant only. Other fields reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: (
        Annotated[
            Text | Annotated[list[TextPart], Field(min_length=1), Tag("<items>")],
            Discriminator(
                lambda value: "<items>" if isinstance(value, list) else _kind(value),
                custom_error_type="content",
                custom_error_message="Input should be a string or a list of text parts",
            ),
        ]
        | None
    ) = Field(default=None, validate_default=True)

    @field_validator("content")
    @classmethod
    def _is_there(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("content", "Field required: only an assistant's message may have no content")
        return content

    def for_template(self) -> dict[str, Any]:
        """As chat templates know messages: content is one text, and OpenAI's newer name of a role the older one."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {**(self.model_extra or {}), "role": role, "content": content}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class Body(BaseModel):
    """What both kinds have in common. None means the default everywhere."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: WholeText
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: (
        Annotated[
            Annotated[StopText, Tag("<text>")]
            | Annotated[list[StopText], Field(max_length=MOST_STOPS), Tag("<texts>")],
            Discriminator(
                lambda value: "<texts>" if isinstance(value, list) else _kind(value),
                custom_error_type="stop",
                custom_error_message="Input should be a string or a list of strings",
            ),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool | None = None

    @field_validator("best_of")
    @classmethod
    def _is_n(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        if best_of is not None and "n" in info.data and best_of != (info.data["n"] or 1):
            raise PydanticCustomError("best_of", "Input should be equal to n: choosing among more is not supported")
        return best_of

    @field_validator("stream_options")
    @classmethod
    def _is_for_streams(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "Input is only allowed with stream: true")
        return options

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def limit(self) -> int | None:
        """Most tokens of a sample; None for what is left of the context."""
        raise NotImplementedError

    @property
    def top(self) -> int | None:
        """How many of the most likely tokens to name beside each token; None for no log-probabilities at all."""
        raise NotImplementedError


class CompletionBody(Body):
    prompt: Annotated[
        Text
        | Annotated[list[WholeText], Field(min_length=1, max_length=MOST_PROMPTS), Tag("<texts>")]
        | Annotated[TokenIds, Tag("<items>")]
        | Annotated[list[TokenIds], Field(max_length=MOST_PROMPTS), Tag("<lists>")],
        Discriminator(
            _kind,
            custom_error_type="prompt",
            custom_error_message="Input should be a string, a list of strings, a list of token ids, or a list of those",
        ),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None

    @field_validator("echo")
    @classmethod
    def _has_no_logprobs(cls, echo: bool | None, info: ValidationInfo) -> bool | None:
        if echo and info.data.get("logprobs") is not None:
            raise PydanticCustomError("echo", "Input should be false with logprobs: a prompt's are not computed")
        return echo

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", [self.prompt] if one else self.prompt)

    @property
    def limit(self) -> int | None:
        return self.max_tokens or COMPLETION_TOKENS

    @property
    def top(self) -> int | None:
        return self.logprobs


class ChatBody(Body):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _has_logprobs(cls, top: int | None, info: ValidationInfo) -> int | None:
        if top is not None and not info.data.get("logprobs"):
            raise PydanticCustomError("top_logprobs", "Input is only allowed with logprobs: true")
        return top

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


BODIES: dict[str, type[CompletionBody] | type[ChatBody]] = {COMPLETIONS: CompletionBody, CHAT: ChatBody}


def parse_body(path: str, fields: Mapping[str, Any]) -> CompletionBody | ChatBody:
    """The body of a request to ``path``. Raises :class:`ApiError` (400) naming the first field that is wrong."""
    for name, neutral in _NEUTRAL_IN[path].items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            advice = f" or set it to {json.dumps(neutral[0])}" if neutral else ""
            raise ApiError(
                400,
                f"{name} is not supported by this server: leave it out{advice}.",
                code="unsupported_parameter",
                param=name,
            )
    try:
        body = BODIES[path].model_validate(dict(fields))
    except ValidationError as error:
        raise _as_api_error(error) from None
    if isinstance(body, CompletionBody) and len(body.prompts) * body.samples > MOST_PROMPTS:
        raise ApiError(
            400,
            f"{len(body.prompts)} prompts with n = {body.samples} are more than the {MOST_PROMPTS} choices that one "
            "request may have.",
            code="invalid_value",
            param="n",
        )
    return body


def _as_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"] if not str(part).startswith("<"))
    message = first["msg"]
    return ApiError(400, f"{param}: {message[:1].lower()}{message[1:]}.", code="invalid_value", param=param)
