"""A backend under a test's thumb: it answers when told, and counts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from longtail.serve.calls import Call, Outcome, Reply
from longtail.serve.errors import ApiError


class FakeBackend:
    """``answers`` as many calls at once as ``window`` says; each takes ``pieces`` chunks of ``pause_s``. ``broken``,
    if given, is raised. ``gate``, a threading- or asyncio-free switch, holds answers back while it is True."""

    def __init__(
        self,
        *,
        window: int = 1,
        pieces: int = 2,
        pause_s: float = 0.0,
        broken: Callable[[Call], Exception | None] | None = None,
    ) -> None:
        self.window, self.pieces, self.pause_s = window, pieces, pause_s
        self.broken = broken or (lambda call: None)
        self.gate = False
        self.calls: list[Call] = []
        self.running = self.most_running = self.cancelled = self.finished = 0
        self.up = True

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def check(self, call: Call) -> None:
        if call.fields.get("model") == "none":
            raise ApiError(404, "There is no model 'none'.", code="model_not_found", param="model")

    def status(self) -> dict[str, Any]:
        return {"ok": self.up}

    async def get(self, path: str, headers: Any) -> Reply:
        return self._whole({"object": "list", "data": [{"id": "m", "object": "model"}]}, Outcome())

    async def answer(self, call: Call) -> Reply:
        self.calls.append(call)
        error = self.broken(call)
        if error is not None:
            raise error
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        outcome = Outcome(upstream="fake")
        if call.stream:
            headers = [(b"content-type", b"text/event-stream")]
            return Reply(200, headers, self._stream(outcome), outcome)
        try:
            await self._work(self.pieces)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        self.finished += 1
        outcome.output_tokens, outcome.finish = self.pieces, "stop"
        return self._whole(
            {"choices": [{"text": "x" * self.pieces}], "usage": {"completion_tokens": self.pieces}}, outcome
        )

    async def _work(self, pieces: int) -> None:
        while self.gate:
            await asyncio.sleep(0.002)
        await asyncio.sleep(self.pause_s * pieces)

    async def _stream(self, outcome: Outcome) -> AsyncIterator[bytes]:
        whole = False
        try:
            for i in range(self.pieces):
                await self._work(1)
                outcome.first_token_s = outcome.first_token_s or time.monotonic()
                outcome.streamed_tokens = i + 1
                yield b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n'
            outcome.output_tokens, outcome.finish, whole = self.pieces, "stop", True
            yield b"data: [DONE]\n\n"
        finally:
            self.running -= 1
            self.finished += whole
            self.cancelled += not whole

    def _whole(self, body: dict[str, Any], outcome: Outcome) -> Reply:
        text = json.dumps(body).encode()

        async def chunks() -> AsyncIterator[bytes]:
            yield text

        length = (b"content-length", str(len(text)).encode())
        return Reply(200, [(b"content-type", b"application/json"), length], chunks(), outcome)
