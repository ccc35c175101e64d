"""The answer to one request, made of what the engine says: a whole body, or a stream of events."""

from __future__ import annotations

import time
from collections.abc import Sequence

from longtail.serve.calls import Outcome
from longtail.serve.choices import Choice
from longtail.serve.engine_thread import News, Run
from longtail.serve.errors import ApiError
from longtail.serve.openai_answers import DONE, Answer, Usage


class Generation:
    """``choices`` by prompt, then sample; ``echoes`` is what stands before the text of each choice.

    :meth:`whole` or, until it gives nothing, :meth:`events`; whoever stops before that calls :meth:`cancel`.
    ``outcome`` is kept up to date.
    """

    def __init__(
        self,
        run: Run,
        answer: Answer,
        choices: Sequence[Sequence[Choice]],
        *,
        prompt_tokens: int,
        echoes: Sequence[str],
    ) -> None:
        self.outcome = Outcome()
        self._run, self._answer, self._choices = run, answer, choices
        self._flat = [choice for of_prompt in choices for choice in of_prompt]
        self._echoes, self._prompt_tokens = echoes, prompt_tokens
        self._ended = False

    def cancel(self) -> None:
        self._run.cancel()

    async def whole(self) -> bytes:
        """The whole body. Raises :class:`ApiError`; when it is cancelled, so is the work."""
        try:
            while self._run.open:
                self._take(await self._run.news())
        finally:
            self.cancel()
        self._settle()
        self.outcome.streamed_tokens = sum(choice.tokens for choice in self._flat)
        wholes = [choice.whole(self._echoes[choice.index]) for choice in self._flat]
        return self._answer.body(wholes, self._usage())

    async def events(self) -> bytes:
        """The next events, at least one; nothing after the last. Raises :class:`ApiError`; when it is cancelled, so is
        the work."""
        while not self._ended:
            try:
                touched = self._take(await self._run.news())
            except BaseException:
                self.cancel()
                raise
            self.outcome.streamed_tokens = sum(choice.tokens for choice in self._flat)
            events = b"".join(self._events(choice) for choice in touched)
            if not self._run.open:
                self._ended = True
                self._settle()
                events += (self._answer.usage(self._usage()) if self._answer.with_usage else b"") + DONE
            if events:
                return events
        return b""

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream which has begun."""
        self._ended = True
        self.outcome.failure = "engine"
        return error.event()

    def _take(self, news: News) -> list[Choice]:
        """The choices that are concerned, in order of their first token."""
        if self.outcome.first_token_s is None and news.emitted:
            self.outcome.first_token_s = time.monotonic()
        touched: dict[int, Choice] = {}
        for position, emitted in news.emitted:
            choice = self._choices[position][emitted.sample]
            choice.take(emitted)
            touched[choice.index] = choice
        for position, completion in news.completions:
            self._choices[position][completion.sample].end(completion)
        return list(touched.values())

    def _events(self, choice: Choice) -> bytes:
        events = b""
        if not choice.opened:
            choice.opened = True
            events = self._answer.opening(choice.index, self._echoes[choice.index])
        text, scored = choice.fresh()
        if text or scored:
            events += self._answer.piece(choice.index, text, scored)
        if choice.finish is not None:
            events += self._answer.ending(choice.index, choice.finish)
        return events

    def _settle(self) -> None:
        self.outcome.output_tokens = sum(choice.tokens for choice in self._flat)
        self.outcome.finish = "length" if any(choice.finish == "length" for choice in self._flat) else "stop"

    def _usage(self) -> Usage:
        return Usage(self._prompt_tokens, sum(choice.tokens for choice in self._flat))


class EventChunks:
    """The rest of a stream whose first events are there already. Closing it before its end cancels the work, whether it
    has been read from or not, which an async generator would not do."""

    def __init__(self, first: bytes, generation: Generation) -> None:
        self._first, self._generation = first, generation
        self._closed = False

    def __aiter__(self) -> EventChunks:
        return self

    async def __anext__(self) -> bytes:
        if self._closed:
            raise StopAsyncIteration
        events, self._first = self._first, b""
        if not events:
            try:
                events = await self._generation.events()
            except ApiError as error:
                events = self._generation.failed(error)
        if not events:
            raise StopAsyncIteration
        return events

    async def aclose(self) -> None:
        self._closed = True
        self._generation.cancel()
