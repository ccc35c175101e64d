"""From a row with columns to samples: which column is the prompt, which the length or the response, in which unit.

Columns are chosen once for a source, from its first rows, so that a row which lacks one is a bad row and not a guess.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from longtail.core.errors import DataError
from longtail.lengths.data_values import Input
from longtail.lengths.messages import ASSISTANT, first_exchange, prompt_text, turns
from longtail.lengths.units import UNSTATED, Unit

PROMPTS = ("prompt", "question", "instruction", "query", "input", "problem", "user_prompt", "first_turn", "text")
CONVERSATIONS = ("messages", "conversations", "conversation", "chat", "turns")
FEATURES = "features"
"""Where the gateway keeps what it saw of a prompt, instead of the prompt (``feature_rows.py``)."""
RESPONSES = ("response", "answer", "output", "completion", "generation", "generated_text", "model_output", "assistant")
LENGTHS = {
    "tokens": (
        "output_tokens", "completion_tokens", "response_tokens", "answer_tokens", "generated_tokens",
        "num_output_tokens", "output_token_count", "num_tokens", "tokens",
    ),
    "words": ("words", "output_words", "response_words", "num_words", "word_count"),
    "chars": ("chars", "characters", "output_chars", "response_chars", "num_chars"),
    UNSTATED: ("length", "output_length", "response_length", "completion_length", "answer_length", "output_len"),
}  # fmt: skip
CENSORED = ("censored", "truncated", "finish_reason", "stop_reason", "finish")
CUT_OFF = frozenset({"length", "max_tokens", "max_output_tokens", "truncated"})
"""Finish reasons that mean: the response was longer than its limit."""
MOST = 1e8
"""No answer is longer, in any unit: what is above is a time stamp or a mistake."""


@dataclass(frozen=True)
class Columns:
    """Column names that the user gave; None means: recognise it."""

    prompt: str | None = None
    response: str | None = None
    length: str | None = None
    censored: str | None = None


class RawSample(NamedTuple):
    """One response: its length, or its text where that is still to be counted."""

    prompt: Input
    length: float | None
    text: str | None
    censored: bool


@dataclass
class ColumnReader:
    """How the rows of one source become samples. ``unit`` is what its lengths count.

    ``conversation``: prompt and response are the first exchange in the prompt's column. Any row may have features where
    its prompt is missing. ``models`` collects the names of models that were met, so that a wrong ``model`` can be
    answered with the right ones.
    """

    prompt: str
    length: str | None
    response: str | None
    censored: str | None
    unit: Unit
    conversation: bool
    context: str | None
    model: str | None
    models: set[str]

    @classmethod
    def choose(
        cls, where: str, head: Sequence[Mapping[str, Any]], columns: Columns, *, unit: Unit | None, model: str | None
    ) -> ColumnReader:
        """From the first rows of a source. Raises :class:`DataError` if the prompt or the length is missing."""
        names = list(dict.fromkeys(name for row in head for name in row))
        for option, name in vars(columns).items():
            if name is not None and name not in names:
                raise DataError(f"{where}: there is no column {name!r} (--{option}-column){listed(names, name)}")
        prompt = columns.prompt or find_column(names, PROMPTS) or find_column(names, CONVERSATIONS)
        if prompt is None and any(isinstance(row.get(FEATURES), Mapping) for row in head):
            prompt = PROMPTS[0]
        if prompt is None:
            raise DataError(
                f"{where}: no column was recognised as the prompt{listed(names)}; name it with --prompt-column"
            )
        rest = [name for name in names if name != prompt]
        length, response, found = _choose_length(where, rest, columns, unit, _is_conversation(head, prompt))
        context = None
        if columns.prompt is None and _normal(prompt) == "instruction":  # Alpaca's format: instruction + input
            context = next((name for name in rest if _normal(name) == "input" and name not in (response, length)), None)
        return cls(
            prompt=prompt,
            length=length,
            response=response,
            censored=columns.censored or find_column(rest, CENSORED),
            unit=found,
            conversation=length is None and response is None,
            context=context,
            model=model,
            models=set(),
        )

    def read(self, row: Mapping[str, Any]) -> list[RawSample]:
        """The row's samples; none if it is of another model than wanted. Raises ``ValueError`` for a bad row."""
        if isinstance(name := row.get("model"), str):
            self.models.add(name)
            if self.model is not None and name != self.model:
                return []
        if self.conversation:
            exchange = first_exchange(_need(row, self.prompt))
            if exchange is None:
                raise ValueError(f"{self.prompt!r} has no user message with an assistant's answer after it")
            return [RawSample(exchange[0], None, exchange[1], self._cut_off(row, None))]
        prompt = self._prompt(row)
        if self.length is not None:
            self._refuse_other_unit(row, self.length)
            values = self._select(_need(row, self.length), self.length)
            return [RawSample(prompt, check_length(v, self.length), None, self._cut_off(row, key)) for key, v in values]
        assert self.response is not None
        values = self._select(_need(row, self.response), self.response)
        return [RawSample(prompt, None, _response_text(v, self.response), self._cut_off(row, key)) for key, v in values]

    def _prompt(self, row: Mapping[str, Any]) -> Input:
        kept = row.get(FEATURES)
        if row.get(self.prompt) is None and isinstance(kept, Mapping):
            from longtail.lengths.feature_rows import decode  # with Numba, which other rows do not need

            return decode(kept)
        value = _need(row, self.prompt)
        try:
            text = prompt_text(value)
        except ValueError as error:
            raise ValueError(f"{self.prompt!r}: {error}") from None
        context = row.get(self.context) if self.context else None
        return f"{text}\n\n{context}" if isinstance(context, str) and context.strip() else text

    def _select(self, value: Any, column: str) -> list[tuple[Any, Any]]:
        """``(key, value)`` of a cell's samples: one value, a list of them, or one for each model by name."""
        if isinstance(value, Mapping):
            self.models.update(str(key) for key in value)
            given = [(key, v) for key, v in value.items() if v is not None and self.model in (None, key)]
            if not given and self.model is None:
                raise ValueError(f"{column!r} is empty")
            return given
        if isinstance(value, list) and not _is_messages(value):
            if not value:
                raise ValueError(f"{column!r} is empty")
            return list(enumerate(value))
        return [(None, value)]

    def _cut_off(self, row: Mapping[str, Any], key: Any) -> bool:
        value = row.get(self.censored) if self.censored else None
        if isinstance(value, Mapping):
            value = value.get(str(key))
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        if value is None or isinstance(value, bool):
            return bool(value)
        if isinstance(value, str):
            return value.lower() in CUT_OFF
        if value in (0, 1):
            return bool(value)
        raise ValueError(f"{self.censored!r} must be true, false or a finish reason, not {_show(value)}")

    def _refuse_other_unit(self, row: Mapping[str, Any], length: str) -> None:
        if row.get(length) is None:
            for unit, names in LENGTHS.items():
                if unit != self.unit.kind and (other := find_column([n for n in row if row[n] is not None], names)):
                    raise ValueError(
                        f"gives {other!r} where the rows before give {length!r}: a source has one unit (several DATA "
                        "are several sources)"
                    )


def check_length(value: Any, name: str) -> float:
    """The length as a number. Raises ``ValueError`` saying what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name!r} must be a number, not {_show(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name!r} is {value}, which is no length")
    if value < 0:
        raise ValueError(f"{name!r} is {value}: a length cannot be negative")
    if value > MOST:
        raise ValueError(f"{name!r} is {value}, which is more than any answer has ({MOST:,.0f})")
    return float(value)


def _choose_length(
    where: str, names: list[str], columns: Columns, unit: Unit | None, conversation: bool
) -> tuple[str | None, str | None, Unit]:
    """The length's column, or else the response's, and the unit; neither where a conversation holds the response."""
    if columns.length is not None:
        stated = _unit_of(columns.length)
        if unit is not None and unit.model is not None:
            raise DataError(f"--unit {unit} counts responses, so it cannot go with --length-column")
        if unit is not None and stated not in (unit.kind, UNSTATED):
            raise DataError(f"{where}: the column {columns.length!r} counts {stated}, not {unit} (--unit)")
        return columns.length, None, unit or Unit(stated)
    response = columns.response or find_column(names, RESPONSES)
    has_text = response is not None or conversation
    given = {kind: name for kind, known in LENGTHS.items() if (name := find_column(names, known))}
    if columns.response is not None:
        given = {}
    if unit is None:
        if given:
            kind, name = next(iter(given.items()))
            return name, None, Unit(kind)
        if has_text:
            return None, response, Unit("words")
    else:
        if unit.model is None and unit.kind in given:
            return given[unit.kind], None, unit
        if has_text and unit.counts_text:
            return None, response, unit
        if unit.model is None and UNSTATED in given:
            return given[UNSTATED], None, unit
        if has_text:
            raise DataError(
                f"{where}: the rows give no number of tokens; say which tokenizer counts them, as in "
                "--unit tokens:smollm2-135m, or use --unit words or chars"
            )
        if given:
            raise DataError(
                f"{where}: the rows give lengths in {', '.join(given)} and no response to count in {unit} (--unit)"
            )
    raise DataError(
        f"{where}: no column was recognised as the response or its length; besides the prompt the rows have "
        f"{', '.join(names[:12]) or 'none'}; name it with --response-column or --length-column"
    )


def _unit_of(name: str) -> str:
    normal = _normal(name)
    for kind, known in LENGTHS.items():
        if normal in known:
            return kind
    hits = [kind for kind, word in (("tokens", "token"), ("words", "word"), ("chars", "char")) if word in normal]
    return hits[0] if len(hits) == 1 else UNSTATED


def _is_conversation(head: Sequence[Mapping[str, Any]], prompt: str) -> bool:
    return any(not isinstance(row.get(prompt), str) and row.get(prompt) is not None for row in head)


def _is_messages(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(v, Mapping) and ("role" in v or "from" in v) for v in value)


def _response_text(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and _is_messages(value):
        answers = [turn.text for turn in turns(value) if turn.role in ASSISTANT]
        if answers:
            return answers[-1]
    raise ValueError(f"{column!r} must be a text, not {_show(value)}")


def _need(row: Mapping[str, Any], name: str) -> Any:
    if row.get(name) is None:
        state = "is null" if name in row else "is missing"
        raise ValueError(f"column {name!r} {state}")
    return row[name]


def find_column(names: Iterable[str], wanted: Iterable[str]) -> str | None:
    """The first of ``wanted`` that is there, whatever its case and dashes."""
    there = {_normal(name): name for name in reversed(list(names))}
    return next((there[name] for name in wanted if name in there), None)


def _normal(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def listed(names: Sequence[str], near: str | None = None) -> str:
    close = difflib.get_close_matches(near, names, n=1) if near else []
    if close:
        return f"; did you mean {close[0]!r}?"
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"; the rows have {listed}" if names else "; the rows are empty"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
