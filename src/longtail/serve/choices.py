"""One sample on its way to the client: tokens in, text and log-probabilities out.

Log-probabilities name the tokens of the text: an end token has none, nor has a token that lies behind the cut of a stop
string, whose characters must not come out by this way either. Each goes out with the text that it belongs to.
"""

from __future__ import annotations

from longtail.core.types import Completion, Emitted
from longtail.serve.openai_answers import Scored, Whole
from longtail.serve.text import TextStream
from longtail.serve.token_text import TokenTexts


class Choice:
    """``stream`` is None if only the whole text is wanted, ``names`` if no log-probabilities are. ``end_tokens`` are
    those that end this sample."""

    def __init__(
        self, index: int, stream: TextStream | None, names: TokenTexts | None, end_tokens: tuple[int, ...]
    ) -> None:
        self.index = index
        self.tokens = 0
        self.finish: str | None = None
        self.opened = False
        """For the writer of a stream."""
        self._stream, self._names, self._end_tokens = stream, names, end_tokens
        self._text = ""
        self._pieces: list[str] = []
        self._scored: list[Scored] = []

    def take(self, emitted: Emitted) -> None:
        self.tokens += 1
        stream, names = self._stream, self._names
        if stream is None or emitted.token in self._end_tokens:
            return
        offset = stream.position
        self._pieces.append(stream.push(emitted.token))
        if names is not None:
            top = [(names(token), logprob) for token, logprob in emitted.top or ()]
            self._scored.append(Scored(names(emitted.token), emitted.logprob, top, offset))

    def end(self, completion: Completion) -> None:
        self.finish, self._text = completion.finish.value, completion.text
        if self._stream is not None:
            self._pieces.append(self._stream.finish())

    def fresh(self) -> tuple[str, list[Scored] | None]:
        """Text that has become sendable since the last call, and its log-probabilities."""
        stream = self._stream
        assert stream is not None
        text, self._pieces = "".join(self._pieces), []
        if self._names is None:
            return text, None
        whole = self.finish is not None and not stream.stopped
        count = sum(whole or scored.offset < stream.sent for scored in self._scored)
        scored, self._scored = self._scored[:count], self._scored[count:]
        return text, scored

    def whole(self, prefix: str = "") -> Whole:
        """The choice after its end; ``prefix`` is an echo."""
        assert self.finish is not None
        scored = self.fresh()[1] if self._names is not None else None
        return Whole(prefix + self._text, scored, self.finish)
