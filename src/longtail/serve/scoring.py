"""Scores requests in micro-batches on a thread of its own, within a deadline; whatever goes wrong, the request goes on.

Invariants:

* No call waits longer than ``deadline_s`` (plus what the event loop lags); while the ranker hangs, none waits at all.
* A call that could not be scored gets None, and ``failed`` is told why, once.
* A bad prompt spoils no other call: if a batch fails, its calls are scored one by one.

The built-in kind of ranker (light) is called on the event loop: a prompt takes it 30 to 80 microseconds whatever its
length, a thread adds up to milliseconds when the loop is busy, and would protect from nothing, because compiled code
that hangs keeps the interpreter lock.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Literal, Protocol

import numpy as np

from longtail.lengths.ranker import Ranker

Reason = Literal["deadline", "error", "busy", "no_text"]
WARM_UP = "Why is the sky blue?"
CLOSE_WITHIN_S = 1.0
INLINE_PROMPTS = 8
"""Calls with more prompts always go to the thread."""
_BATCHES = 8
"""So many batches should fit into a deadline, so that a slow one makes few calls late."""
_NEWEST = 0.2
"""Weight of the last batch in the running mean of the time that a prompt takes."""


class Quantiles(Protocol):
    """What is needed of a ``Ranker``."""

    def quantile(self, prompts: Sequence[str]) -> np.ndarray:
        """float [n], in [0, 1]."""
        ...


@dataclass(eq=False, slots=True)
class _Ask:
    prompts: list[str]
    answer: asyncio.Future[float | Reason]
    until_s: float
    """Nobody waits for the answer any more after this (``time.monotonic``)."""


class Scorer:
    """Between :meth:`start` and :meth:`close` it scores; outside of them every call is ``busy``.

    ``deadline_s``: the most that scoring may delay a call. ``max_batch``: the most prompts that are scored at once; of
    a call with more, the first so many. Batches are smaller where the ranker is so slow that they would come too late.
    ``failed(reason)`` is called on the event loop: ``deadline``, ``error`` (it raised, or gave no number from 0 to 1),
    ``busy`` (the ranker has been at one batch for longer than the deadline), ``no_text``.
    """

    def __init__(
        self,
        ranker: Quantiles,
        *,
        deadline_s: float = 0.02,
        max_batch: int = 256,
        failed: Callable[[Reason], None],
    ) -> None:
        self.deadline_s, self.max_batch = deadline_s, max_batch
        self._ranker, self._failed = ranker, failed
        self._inline = type(ranker) is Ranker and ranker.backend.name == "light"
        self._warm = threading.Event()
        self._asks: SimpleQueue[_Ask | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._since_s: float | None = None  # since when the ranker has been at work on its batch
        self._prompt_s = 0.0  # running mean of the time that a prompt takes

    def start(self, *, wait_s: float = 10.0) -> None:
        """Start the thread, and wait until it has scored a first prompt (compilation, lazy loading), or so long."""
        self._thread = threading.Thread(target=self._run, name="scorer", daemon=True)
        self._thread.start()
        self._warm.wait(wait_s)

    def close(self) -> None:
        """End the thread; one that hangs is left to itself after a second."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._asks.put(None)
            thread.join(CLOSE_WITHIN_S)

    async def quantile(self, prompts: Sequence[str]) -> float | None:
        """The largest quantile of the prompts, or None if it is not known in time."""
        found = await self._score(prompts)
        if isinstance(found, str):
            self._failed(found)
            return None
        return found

    async def _score(self, prompts: Sequence[str]) -> float | Reason:
        if not prompts:
            return "no_text"
        if self._thread is None:
            return "busy"
        if self._inline and len(prompts) <= INLINE_PROMPTS and self._warm.is_set():
            try:
                return _largest(self._ask_ranker(list(prompts)))
            except Exception:
                return "error"
        now_s = time.monotonic()
        if self._hangs(now_s):
            return "busy"
        loop = asyncio.get_running_loop()
        ask = _Ask(list(prompts[: self.max_batch]), loop.create_future(), now_s + self.deadline_s)
        self._asks.put(ask)
        alarm = loop.call_later(self.deadline_s, _answer, ask, "deadline")
        try:
            return await ask.answer
        finally:
            alarm.cancel()

    def _hangs(self, now_s: float) -> bool:
        since_s = self._since_s
        return since_s is not None and now_s - since_s > self.deadline_s

    # What follows runs on the thread.

    def _run(self) -> None:
        self._quantiles([WARM_UP])
        self._prompt_s = 0.0  # the first time may have compiled something
        self._quantiles([WARM_UP])
        self._warm.set()
        kept: _Ask | None = None
        while True:
            ask = kept or self._asks.get()
            kept = None
            batch: list[_Ask] = []
            room = self._room()
            while ask is not None:
                if self._is_in_time(ask):
                    if batch and len(ask.prompts) > room:
                        kept = ask
                        break
                    batch.append(ask)
                    room -= len(ask.prompts)
                try:
                    ask = self._asks.get_nowait()
                except Empty:
                    break
            self._score_batch(batch)
            if ask is None:
                return

    def _room(self) -> int:
        """How many prompts a batch may have."""
        fit = self.deadline_s / _BATCHES / self._prompt_s if self._prompt_s > 0 else self.max_batch
        return max(1, min(self.max_batch, int(fit)))

    def _is_in_time(self, ask: _Ask) -> bool:
        """Whether an answer is likely to come before its call goes on without. A new ask always is, so that a ranker
        that was slow gets another chance."""
        needs_s = min(1.25 * self._prompt_s * len(ask.prompts), 0.75 * self.deadline_s)
        return time.monotonic() + needs_s < ask.until_s

    def _score_batch(self, batch: list[_Ask]) -> None:
        values = self._quantiles([prompt for ask in batch for prompt in ask.prompts]) if batch else None
        if values is not None:
            ends = list(accumulate(len(ask.prompts) for ask in batch))
            self._tell([(a, _largest(values[end - len(a.prompts) : end])) for a, end in zip(batch, ends, strict=True)])
            return
        for ask in batch:
            alone = self._quantiles(ask.prompts) if len(batch) > 1 and self._is_in_time(ask) else None
            self._tell([(ask, "error" if alone is None else _largest(alone))])

    def _quantiles(self, prompts: list[str]) -> np.ndarray | None:
        """float64 [n]; None if the ranker fails, however it does."""
        started_s = self._since_s = time.monotonic()
        try:
            return self._ask_ranker(prompts)
        except BaseException:
            return None
        finally:
            self._since_s = None
            took_s = min((time.monotonic() - started_s) / len(prompts), self.deadline_s)
            self._prompt_s += (took_s - self._prompt_s) * (_NEWEST if self._prompt_s else 1)

    def _ask_ranker(self, prompts: list[str]) -> np.ndarray:
        values = np.asarray(self._ranker.quantile(prompts), np.float64)
        if values.shape != (len(prompts),):
            raise ValueError(f"{len(prompts)} prompts got scores of shape {values.shape}")
        return values

    @staticmethod
    def _tell(answers: list[tuple[_Ask, float | Reason]]) -> None:
        def deliver() -> None:
            for ask, found in answers:
                _answer(ask, found)

        try:
            answers[0][0].answer.get_loop().call_soon_threadsafe(deliver)
        except RuntimeError:
            return  # the loop is closed: nobody waits


def _answer(ask: _Ask, found: float | Reason) -> None:
    if not ask.answer.done():
        ask.answer.set_result(found)


def _largest(values: np.ndarray) -> float | Reason:
    largest = float(values.max())
    return largest if largest <= 1 and values.min() >= 0 else "error"
