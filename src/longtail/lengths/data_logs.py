"""OpenAI-style request logs: rows with a request, a response, or (the Batch API's two files) one of the two.

The request may be the row itself, or its ``body``, ``request`` or ``request.body``; the response the row itself, or its
``response`` or ``response.body``. Chat completions, completions and responses are understood. Lengths are the tokens
that ``usage`` counts, or counted from the text of the choices.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longtail.lengths.data_columns import CUT_OFF, RawSample, check_length
from longtail.lengths.messages import prompt_text
from longtail.lengths.units import Unit

REQUEST = ("messages", "prompt", "input")
RESPONSE = ("usage", "choices", "output")


@dataclass(frozen=True)
class Answer:
    """A response without its prompt: samples whose ``prompt`` is still empty."""

    where: str
    samples: list[RawSample]


@dataclass
class LogReader:
    """Reads the rows of one source. ``requests`` and ``answers`` hold, by ``custom_id``, what waits for its other half;
    ``served`` are the requests that have found theirs.

    ``failed`` counts requests that the server answered with an error: they have no length and are left out.
    """

    unit: Unit
    model: str | None
    models: set[str] = field(default_factory=set)
    requests: dict[str, str] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    served: set[str] = field(default_factory=set)
    failed: int = 0

    def read(self, where: str, row: Mapping[str, Any]) -> list[RawSample]:
        """The samples of a row that is whole; a half of one is kept. Raises ``ValueError`` for a bad row."""
        request, response = _request(row), _response(row)
        custom_id = row.get("custom_id")
        if _has_failed(row):
            self.failed += 1
            return []
        if request is None and response is None:
            raise ValueError("neither a request (messages, prompt) nor a response (usage, choices)")
        if self._is_other_model(request, response):
            return []
        prompt = None if request is None else _prompt(request)
        samples = [] if response is None else self._samples(response)
        if prompt is not None and samples:
            return [sample._replace(prompt=prompt) for sample in samples]
        if not isinstance(custom_id, str):
            missing = "response with usage or choices" if prompt is not None else "request with messages or prompt"
            raise ValueError(f"no {missing}, and no custom_id to find it by")
        if prompt is not None:
            if self.requests.setdefault(custom_id, prompt) != prompt:
                raise ValueError(f"custom_id {custom_id!r} was used before for another prompt")
        else:
            if custom_id in self.answers:
                raise ValueError(f"custom_id {custom_id!r} has an answer already, at {self.answers[custom_id].where}")
            self.answers[custom_id] = Answer(where, samples)
        return []

    @property
    def unanswered(self) -> int:
        """How many requests no answer has been found for."""
        return len(self.requests) - len(self.served)

    def take(self, custom_ids: Iterable[str], giver: LogReader) -> list[RawSample]:
        """The samples of those of this reader's answers whose requests ``giver`` has; they wait no longer."""
        samples = []
        for custom_id in custom_ids:
            giver.served.add(custom_id)
            samples += [s._replace(prompt=giver.requests[custom_id]) for s in self.answers.pop(custom_id).samples]
        return samples

    def _is_other_model(self, request: Mapping[str, Any] | None, response: Mapping[str, Any] | None) -> bool:
        named = [part["model"] for part in (request, response) if part and isinstance(part.get("model"), str)]
        self.models.update(named)
        return self.model is not None and bool(named) and self.model not in named

    def _samples(self, response: Mapping[str, Any]) -> list[RawSample]:
        choices = [c for c in _as_list(response.get("choices")) if isinstance(c, Mapping)]
        reasons = {str(c.get("finish_reason")).lower() for c in choices} | {str(response.get("stop_reason")).lower()}
        details = response.get("incomplete_details")
        if isinstance(details, Mapping):
            reasons.add(str(details.get("reason")).lower())
        if self.unit.model is None and self.unit.kind == "tokens":
            usage = _object(response.get("usage")) or {}
            name = "completion_tokens" if "completion_tokens" in usage else "output_tokens"
            if name not in usage:
                raise ValueError("the response has no usage.completion_tokens; count its text with --unit words")
            tokens = check_length(usage[name], f"usage.{name}")  # of all choices together
            return [RawSample("", tokens / max(1, len(choices)), None, bool(reasons & CUT_OFF))]
        texts = [(_choice_text(c), str(c.get("finish_reason")).lower() in CUT_OFF) for c in choices]
        if not choices:
            texts = [(_output_text(response.get("output")), bool(reasons & CUT_OFF))]
        return [RawSample("", None, text, cut_off) for text, cut_off in texts]


def join_batches(logs: Sequence[LogReader]) -> list[list[RawSample]]:
    """For each reader, the samples of its answers whose request is found, in its own file or in another one.

    With as many files of requests as of answers the first belongs to the first, because batches number their requests
    alike; otherwise a ``custom_id`` must stand for one prompt in all of them. Answers without a request stay in
    ``answers``.
    """
    found = [log.take([key for key in log.answers if key in log.requests], log) for log in logs]
    givers = [log for log in logs if log.requests]
    takers = [i for i, log in enumerate(logs) if log.answers]
    if len(givers) == len(takers):
        for giver, i in zip(givers, takers, strict=True):
            found[i] += logs[i].take([key for key in logs[i].answers if key in giver.requests], giver)
    for i in takers:
        for key in list(logs[i].answers):
            having = [giver for giver in givers if key in giver.requests]
            if len({giver.requests[key] for giver in having}) == 1:
                found[i] += logs[i].take([key], having[0])
    return found


def is_log(row: Mapping[str, Any]) -> bool:
    """Whether a row has the shape of a request, of a response, or of both."""
    request, response = _request(row), _response(row)
    if response is not None and response is not row:
        return "usage" in response or "choices" in response or "custom_id" in row
    if request is not row:
        return request is not None
    choices = [c for c in _as_list(row.get("choices")) if isinstance(c, Mapping)]
    return isinstance(row.get("usage"), Mapping) or any("message" in c or "finish_reason" in c for c in choices)


def _request(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    outer = _object(row.get("request"))
    for part in (_object(outer.get("body")) if outer else None, outer, _object(row.get("body")), row):
        if part is not None and any(part.get(name) is not None for name in REQUEST):
            return part
    return None


def _response(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    outer = _object(row.get("response"))
    for part in (_object(outer.get("body")) if outer else None, outer, row):
        if part is not None and any(part.get(name) is not None for name in RESPONSE):
            return part
    return None


def _has_failed(row: Mapping[str, Any]) -> bool:
    outer = _object(row.get("response")) or {}
    status = next((s for s in (outer.get("status_code"), row.get("status_code"), row.get("status")) if s), 200)
    body = _object(outer.get("body")) or {}
    return bool(row.get("error") or outer.get("error") or body.get("error")) or (
        isinstance(status, int) and status >= 400
    )


def _prompt(request: Mapping[str, Any]) -> str:
    name = next(name for name in REQUEST if request.get(name) is not None)
    value = request[name]
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, list) and value and not isinstance(value[0], Mapping):
        kind = "several prompts in one request" if isinstance(value[0], str) else "token ids, not text"
        raise ValueError(f"{name!r} holds {kind}")
    try:
        return prompt_text(value)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None


def _choice_text(choice: Mapping[str, Any]) -> str:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, Mapping) else choice.get("text")
    if text is None and isinstance(message, Mapping):  # nothing but tool calls
        return ""
    if not isinstance(text, str):
        raise ValueError("a choice of the response has no text")
    return text


def _output_text(output: Any) -> str:
    """The text of the responses API: a list of items, of which messages have parts with text."""
    if isinstance(output, str):
        return output
    items = [item for item in _as_list(output) if isinstance(item, Mapping)]
    parts = [part for item in items for part in _as_list(item.get("content")) if isinstance(part, Mapping)]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    if not texts:
        raise ValueError("the response has no text")
    return "\n".join(texts)


def _object(value: Any) -> Mapping[str, Any] | None:
    """The value as an object; some logs keep bodies as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, Mapping) else None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
