"""Ranks requests inside vLLM: one flag, no proxy, no patch.

    vllm serve MODEL --scheduling-policy priority --middleware longtail.serve.vllm.RankMiddleware

vLLM takes a request's priority from the header ``X-Vllm-Priority``, before the one in the body, and serves the lowest
first among those that wait; what runs already is never held up by it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from longtail.core.errors import ConfigError, LongtailError
from longtail.serve.asgi import Message, Receive, Scope, Send, header
from longtail.serve.body import given_priority, parse, prompts_of
from longtail.serve.calls import CHAT, COMPLETIONS
from longtail.serve.errors import ApiError
from longtail.serve.plugin import PluginSettings, Ranking, exported, say

log = logging.getLogger("longtail.serve.vllm")

App = Callable[[Scope, Receive, Send], Awaitable[None]]
PRIORITY_HEADER = b"x-vllm-priority"
BODY_LIMIT = 32 * 2**20
IGNORED = (
    "vLLM runs --scheduling-policy {policy}: priorities are ignored here, so requests stay in order of arrival. "
    "Restart it with 'priority', or put 'longtail gateway --mode hold' before it."
)

TOO_OLD = (
    "this vLLM does not read X-Vllm-Priority (it came in August 2026), so requests stay in order of arrival. "
    "Put 'longtail gateway' before it."
)


class RankMiddleware:
    """Sets the priority of each request that generates. Plain ASGI: the server still sees its clients leave.

    Settings are environment variables of the server:

    * ``LONGTAIL_MAX_HEAD_START``: seconds by which a short request may overtake a long one; 20 if unset.
    * ``LONGTAIL_RANKER``: folder of a ranker that ``longtail rank train`` made; the package's if unset.
    * ``LONGTAIL_TRUST_PRIORITY``: 1 keeps a priority that the client asks for, in the header or the body (the scale is
      milliseconds since 2020; small numbers go before everything). 0 (default) overrides it.
    * ``LONGTAIL_ORDER``: ``ranked`` (default) or ``fcfs``, which gives everybody the time of arrival.

    A value that cannot be used stops the server at start. Requests of other paths, of token ids, or that could not be
    scored in time get the priority of an average length; none is delayed by more than the scorer's deadline or refused.
    Only bodies of the two completion paths are read, up to 32 MB, and they go on as they came. ``/metrics`` has
    ``longtail_plugin_requests_total``, ``longtail_unscored_total`` and ``longtail_policy_ignores_priorities``.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._policy: str | None = None
        self._checked = False
        self._ranking: Ranking | None = None
        self._refusal = ""
        try:
            self._ranking = Ranking.load(PluginSettings.read(os.environ))
        except LongtailError as error:
            # An exception from here would not stop the server: uvicorn takes it for an application without lifespan.
            self._refusal = f"RankMiddleware: {error}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "POST":
            await self._request(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._ranking is None:
            await receive()
            say(log, self._refusal)
            await send({"type": "lifespan.startup.failed", "message": self._refusal})
            return
        self._check_policy(scope)
        try:
            await asyncio.to_thread(self._ranking.start)
            await self._app(scope, receive, send)
        finally:
            self._ranking.close()

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        ranking = self._ranking
        if ranking is None:
            raise ConfigError(self._refusal)
        ranking.start(wait_s=0)  # for servers without lifespan
        self._check_policy(scope)
        arrival_s = time.time()
        if self._ignores_priorities:
            ranking.skip("policy")  # and no priority is set: some versions refuse it
        elif ranking.settings.trust_priority and given_priority({}, header(scope, PRIORITY_HEADER) or b"") is not None:
            exported().requests("given")
        elif _path(scope) not in (COMPLETIONS, CHAT):
            scope = _with_priority(scope, ranking.unknown("path", arrival_s=arrival_s))
        elif _declared_length(scope) > BODY_LIMIT:
            scope = _with_priority(scope, ranking.unknown("too_large", arrival_s=arrival_s))
        else:
            messages = await _read_ahead(receive)
            scope = _with_priority(scope, await self._priority(ranking, _path(scope), messages, arrival_s))
            receive = _replayed(messages, receive)
        await self._app(scope, receive, send)

    async def _priority(self, ranking: Ranking, path: str, messages: deque[Message], arrival_s: float) -> int | None:
        """None for a priority of the client's that counts."""
        if messages[-1]["type"] != "http.request":
            return ranking.unknown("gone", arrival_s=arrival_s)
        if messages[-1].get("more_body"):
            return ranking.unknown("too_large", arrival_s=arrival_s)
        try:
            fields = parse(b"".join(message.get("body", b"") for message in messages))
            if ranking.settings.trust_priority and given_priority(fields, None) is not None:
                exported().requests("given")
                return None
            prompts = prompts_of(path, fields)
        except ApiError:
            return ranking.unknown("bad_json", arrival_s=arrival_s)
        except Exception as error:
            log.warning("a request could not be read for ranking: %s", type(error).__name__)
            return ranking.unknown("error", arrival_s=arrival_s)
        return await ranking.priority(prompts, arrival_s=arrival_s)

    @property
    def _ignores_priorities(self) -> bool:
        return self._policy is not None and self._policy != "priority"

    def _check_policy(self, scope: Scope) -> None:
        """Once, as soon as the application is known: at the start, where there is a lifespan."""
        if self._checked or "app" not in scope:
            return
        self._checked = True
        self._policy = scheduling_policy(scope["app"])
        exported().ignored(self._ignores_priorities)
        if reads_header() is False:
            say(log, TOO_OLD)
        if self._ignores_priorities:
            say(log, IGNORED.format(policy=self._policy))
        elif self._policy is None:
            say(log, "cannot tell whether this server runs --scheduling-policy priority; without it, nothing changes.")


def scheduling_policy(app: Any) -> str | None:
    """What ``--scheduling-policy`` a vLLM application runs with; None if it does not say."""
    state = getattr(app, "state", None)
    config = getattr(getattr(state, "vllm_config", None), "scheduler_config", None)
    policy = getattr(config, "policy", None) or getattr(getattr(state, "args", None), "scheduling_policy", None)
    return None if policy is None else str(getattr(policy, "value", policy))


def reads_header() -> bool | None:
    """Whether the vLLM of this process takes priorities from the header; None outside of vLLM."""
    if "vllm" not in sys.modules:
        return None
    try:
        serving = importlib.import_module("vllm.entrypoints.generate.base.serving")
    except ImportError:
        return False
    return str(getattr(serving, "PRIORITY_HEADER", "")).lower().encode() == PRIORITY_HEADER


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


def _declared_length(scope: Scope) -> int:
    text = header(scope, b"content-length") or b""
    return int(text) if text.isdigit() else 0


def _with_priority(scope: Scope, priority: int | None) -> Scope:
    """A copy with this header and no other of its name; with none for None."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != PRIORITY_HEADER]
    if priority is not None:
        headers.append((PRIORITY_HEADER, str(priority).encode()))
    return {**scope, "headers": headers}


async def _read_ahead(receive: Receive) -> deque[Message]:
    """The messages of a body, to its end, to the client's leaving, or to the first that exceeds ``BODY_LIMIT``."""
    messages: deque[Message] = deque()
    size = 0
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body"):
            return messages
        size += len(message.get("body", b""))
        if size > BODY_LIMIT:
            return messages


def _replayed(messages: deque[Message], receive: Receive) -> Receive:
    """Takes the messages out as it hands them on: a large body is not kept while its answer is generated."""

    async def replay() -> Message:
        return messages.popleft() if messages else await receive()

    return replay
