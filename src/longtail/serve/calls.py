"""One request on its way through the front door, the answer that comes back, and who gives it.

The front door (``front.py``) authenticates, scores, queues, relays and records; a :class:`Backend` answers: upstream
servers (``upstreams.py``) or the engine in this process (``local.py``). Times ending in ``_s`` are seconds of
``time.monotonic()`` unless they are durations.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that was let in.

    ``body`` is what the client sent, byte for byte, and ``fields`` the same parsed. ``headers`` are the client's, names
    in lower case, without hop-by-hop ones and without credentials that are not meant for the backend. ``prompts`` are
    the texts that rank it (empty for prompts of token ids), ``samples`` the answers wanted (``n`` for each prompt).
    ``quantile`` is None if it could not be scored. ``deadline_s`` orders it among others (``planner/deadline.py``);
    ``priority`` is what the backend is to be told, None for nothing.
    """

    request_id: str
    path: str
    body: bytes
    fields: Mapping[str, Any]
    headers: tuple[tuple[bytes, bytes], ...] = ()
    client: str = "anonymous"
    prompts: tuple[str, ...] = ()
    stream: bool = False
    samples: int = 1
    arrival_s: float = 0.0
    quantile: float | None = None
    deadline_s: float = 0.0
    priority: int | None = None
    checked: Any = None
    """What the backend's ``check`` found, for its ``answer``."""


@dataclass(slots=True)
class Outcome:
    """What became of a call; final once the reply's chunks have ended.

    ``output_tokens`` counts all samples, None if unknown. ``finish`` is the finish reason, ``length`` if any sample was
    cut off. ``failure`` is a short kind (``connect``, ``first_byte``, ``idle``, ``cut``, ``garbage``, ``status``,
    ``engine``), None for a whole answer. ``streamed_tokens`` counts what has been sent so far.
    """

    first_token_s: float | None = None
    output_tokens: int | None = None
    streamed_tokens: int = 0
    finish: str | None = None
    failure: str | None = None
    upstream: str | None = None


class Chunks(Protocol):
    """Bytes as they come. ``aclose`` may be called at any point, and cancels the work behind what was not read."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None: ...


async def once(body: bytes) -> AsyncGenerator[bytes, None]:
    """The chunks of a whole answer."""
    yield body


@dataclass(slots=True)
class Reply:
    """``chunks`` are sent on as they come, and must be closed (``aclose``) if they are not read to their end: that
    cancels the work behind them. They never raise: a failure midway is an error event (or a cut body) and stands in
    ``outcome.failure``."""

    status: int
    headers: Headers
    chunks: Chunks
    outcome: Outcome


class Backend(Protocol):
    """Who answers. All methods belong to one event loop."""

    async def start(self) -> None:
        """Before the first call. Raises ``LongtailError`` if it can never work."""
        ...

    async def close(self) -> None:
        """After the last call; what still runs is cancelled."""
        ...

    async def answer(self, call: Call) -> Reply:
        """Raises :class:`~longtail.serve.errors.ApiError` if there is no answer; cancelling it cancels the work."""
        ...

    async def get(self, path: str, headers: tuple[tuple[bytes, bytes], ...]) -> Reply:
        """``/v1/models`` and below."""
        ...

    def check(self, call: Call) -> Any:
        """Before it queues: raises :class:`~longtail.serve.errors.ApiError` for a call that can never be answered, and
        gives what :meth:`answer` will find as ``call.checked``."""
        ...

    @property
    def window(self) -> int:
        """How many samples it works on at once: what hold mode keeps in flight. 0 while nobody can answer."""
        ...

    def status(self) -> dict[str, Any]:
        """For ``/health``: ``{"ok": bool, ...}``, JSON."""
        ...
