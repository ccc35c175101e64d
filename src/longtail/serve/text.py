"""The text of one sample while it is generated: what can be sent now, and never has to be taken back.

Invariants, whatever the borders of tokens: the pieces of a sample join to the text of its :class:`Completion`, which is
the decoded tokens cut at the first stop string; no piece ends within a character, and none holds a character that may
turn out to belong to a stop string. Text is held back for these two reasons only.

Decoding is linear in the number of tokens: only a *window* of the last tokens is decoded anew, and its older half is
forgotten at a token border at which the text can be cut. The tokens before a new one must be decoded with it, since
characters consist of several tokens, and some decoders drop a space at the start of whatever they are given.

Byte-fallback decoders show a run of adjacent such characters as broken while its last one is incomplete. That is why
what follows the last whole character is never trusted, and what was whole is not looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "�"
"""What decoders put where bytes are no character, or not yet."""
WINDOW = 16
"""Tokens of a window at which its older half is forgotten; twice as many if its text ends broken, which then is broken
for good: a character may be incomplete for three tokens only."""
_MOST_BYTES = 4
"""Of one character in UTF-8; a token has at least one."""


class TextStream:
    """Text of tokens that come one by one. ``decode`` is the tokenizer's, ``stop`` the strings that end the sample.

    ``position`` counts the characters of the tokens so far, without an incomplete last one: where the next token's text
    begins. ``sent`` counts those that were handed out. Once ``stopped``, a stop string is complete, and nothing more
    comes out. End tokens are not to be pushed.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._window: list[int] = []
        self._text = ""
        self._settled = 0
        self._trim_at = WINDOW
        self._held = ""
        self.position = 0
        self.sent = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that can be sent because of ``token``, often none."""
        if self.stopped:
            return ""
        text = self._decode([*self._window, token])
        whole = len(text.rstrip(BROKEN))
        if text and text == self._text and whole == len(text):
            return ""  # a token without text, such as a special one, needs no place in the window
        self._window.append(token)
        self._text = text
        fresh = text[self._settled : whole]
        self._settled = max(self._settled, whole)
        if len(self._window) >= (self._trim_at if whole == len(text) else 2 * self._trim_at):
            fresh += self._trim()
        self.position += len(fresh)
        return self._release(fresh)

    def finish(self) -> str:
        """What was held back, when the sample ends for another reason than a stop string."""
        if self.stopped:
            return ""
        rest = self._held + self._text[self._settled :]
        self._held, self._window, self._text, self._settled = "", [], "", 0
        self.sent += len(rest)
        self.position = self.sent
        return rest

    def _trim(self) -> str:
        """Forget the window's older half; text of it that only now is known to stay as it is, broken bytes."""
        window, text = self._window, self._text
        if not text and not self._decode([*window, *window]):  # twice: a single space may be dropped
            window.clear()
        middle = len(window) // 2
        for cut in range(middle, min(middle + _MOST_BYTES, len(window))):
            before, after = self._decode(window[:cut]), self._decode(window[cut:])
            gap = text[len(before) : len(text) - len(after)]
            if after and before + gap + after == text and gap in ("", " "):
                start = len(text) - len(after)
                fresh = text[self._settled : start]
                self._window, self._text, self._trim_at = window[cut:], after, WINDOW
                self._settled = max(self._settled - start, 0)
                return fresh
        self._trim_at = max(WINDOW, 2 * len(window))
        return ""

    def _release(self, fresh: str) -> str:
        """Of the held text and ``fresh``, what can be no part of a stop string."""
        piece = self._held + fresh
        if self._stop:
            visible = piece + self._text[self._settled :]
            found = [at for at in (visible.find(stop) for stop in self._stop) if at >= 0]
            if found:
                self.stopped, self._held = True, ""
                piece = visible[: min(found)]
            else:
                kept = len(piece) - max(_overlap(piece, stop) for stop in self._stop)
                piece, self._held = piece[:kept], piece[kept:]
        self.sent += len(piece)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins, short of all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
