"""Where a sequence ends by its text: stop strings across token borders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MARGIN = 8


def stop_position(tokens: Sequence[int], detokenize: Callable[[list[int]], str], stops: Sequence[str]) -> int | None:
    """Characters of the generated text before the first stop string, or None if none is complete.

    To be called after every token: a match is then completed by the last one. The check decodes only a tail of the
    tokens, long enough for the longest stop string; on a hit the whole text decides.
    """
    longest = max(len(stop) for stop in stops)
    # The match may end at the start of the last token, and tokens may have no text at all.
    wanted = longest + _MARGIN + len(detokenize(list(tokens[-1:])))
    count = longest + _MARGIN
    tail = detokenize(list(tokens[-count:]))
    while len(tail) < wanted and count < len(tokens):
        count *= 2
        tail = detokenize(list(tokens[-count:]))
    if not any(stop in tail for stop in stops):
        return None
    text = detokenize(list(tokens))
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return min(found) if found else None
