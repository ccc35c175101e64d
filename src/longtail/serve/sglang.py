"""Ranks requests inside SGLang, as a plug-in of its entry point ``sglang.srt.plugins``.

    LONGTAIL_ORDER=ranked python -m sglang.launch_server --model-path MODEL

SGLang loads installed plug-ins by itself, so this one does nothing until ``LONGTAIL_ORDER`` asks for it; the other
settings are those of ``vllm.py``. It hooks two methods, in two processes:

* ``TokenizerManager.generate_request``, which every request of the HTTP server and of ``sglang.Engine`` goes through
  once, while the prompt is still text: the request's ``priority`` becomes its virtual deadline.
* ``SchedulePolicy.calc_priority``, which orders the waiting queue before each batch: it is sorted by that deadline.

The deadline is set before a request is broadcast because the schedulers of a tensor-parallel group must all sort alike,
and their clocks differ. SGLang's own ``--enable-priority-scheduling`` stays off: it would preempt running requests
whenever priorities differ by more than a threshold (10 by default, and ours are milliseconds), serve requests without
one last, and keep a series of metrics for each value that it ever saw. So nothing that runs is ever preempted for a
rank, and requests that did not come through the first hook (other front ends) keep their order, before the ranked ones.

It orders ``--schedule-policy fcfs``, SGLang's default; cache-aware policies are left alone, and so is the decode side
of disaggregated serving. Written against SGLang's sources of 2026 (0.5), tested against a stand-in of their interface:
SGLang itself needs a GPU.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from longtail.core.errors import LongtailError
from longtail.serve.body import prompts_of
from longtail.serve.calls import CHAT, COMPLETIONS
from longtail.serve.plugin import ORDER, PluginSettings, Ranking, exported, say

log = logging.getLogger("longtail.serve.sglang")

MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
STARTED, GENERATE = f"{MANAGER}.__init__", f"{MANAGER}.generate_request"
SORT = "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority"
UNRANKED_BEFORE_SAYING = 100
"""Queues without a single rank after which the scheduler says that the ranks do not reach it."""


def register() -> None:
    """The entry point; SGLang calls it in each of its processes. Ends the process with one sentence if a setting cannot
    be used (SGLang would go on without the plug-in)."""
    if not os.environ.get(ORDER):
        return
    try:
        settings = PluginSettings.read(os.environ)
    except LongtailError as error:
        raise SystemExit(f"longtail: {error}") from None
    if not settings.ranked:
        return
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    tokenizer, scheduler = TokenizerHooks(settings), SchedulerHook()
    hooks.HookRegistry.register(STARTED, tokenizer.started, hooks.HookType.AFTER)
    hooks.HookRegistry.register(GENERATE, tokenizer.generate, hooks.HookType.AROUND)
    hooks.HookRegistry.register(SORT, scheduler.sort, hooks.HookType.AFTER)


def obstacle(server_args: Any) -> str | None:
    """Why requests cannot be ranked under these arguments of the server; None if they can."""
    if getattr(server_args, "enable_priority_scheduling", False):
        return (
            "SGLang runs with --enable-priority-scheduling, under which ranks would preempt running requests: they are "
            "not set, and requests stay in SGLang's order. Restart it without."
        )
    if getattr(server_args, "abort_on_priority_when_disabled", False):
        return (
            "SGLang runs with --abort-on-priority-when-disabled, which would refuse ranked requests: they stay in "
            "order of arrival. Restart it without."
        )
    policy = getattr(server_args, "schedule_policy", "fcfs")
    if policy != "fcfs":
        return (
            f"SGLang runs --schedule-policy {policy}, which has an order of its own: ranks are ignored here. Restart "
            "it with 'fcfs', or put 'longtail gateway --mode hold' before it."
        )
    return None


class TokenizerHooks:
    """What happens where requests come in. ``load(settings)`` makes the ranking."""

    def __init__(self, settings: PluginSettings, load: Callable[[PluginSettings], Ranking] = Ranking.load) -> None:
        self._settings, self._load = settings, load
        self._ready = False
        self.ranking: Ranking | None = None

    def started(self, result: Any, manager: Any, server_args: Any = None, *args: Any, **kwargs: Any) -> None:
        """After ``TokenizerManager.__init__``. Raises ``RankerError``, which stops the server."""
        self._prepare(manager)

    async def generate(
        self, original: Callable[..., Any], manager: Any, obj: Any, request: Any = None, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Around ``TokenizerManager.generate_request``."""
        self._prepare(manager)
        if self.ranking is not None:
            await self._rank(self.ranking, obj, request)
        async with aclosing(original(manager, obj, request, *args, **kwargs)) as answers:
            async for answer in answers:
                yield answer

    def _prepare(self, manager: Any) -> None:
        if self._ready:
            return
        self._ready = True
        problem = obstacle(getattr(manager, "server_args", None))
        exported().ignored(problem is not None)
        if problem is not None:
            say(log, problem)
            return
        self.ranking = self._load(self._settings)
        self.ranking.start()
        log.info("requests are ranked, with a head start of up to %g s", self._settings.head_start_s)

    async def _rank(self, ranking: Ranking, obj: Any, request: Any) -> None:
        arrival_s = time.time()
        if self._settings.trust_priority and isinstance(getattr(obj, "priority", None), int):
            exported().requests("given")
            return
        priority = await ranking.priority(await _prompts(obj, request), arrival_s=arrival_s)
        try:
            obj.priority = priority
        except (AttributeError, TypeError):  # a kind of request that has none
            ranking.skip("error")


async def _prompts(obj: Any, request: Any) -> tuple[str, ...]:
    """The texts of a request: of the HTTP body if it has messages (before the chat template), else of SGLang's own
    object; none if neither can be read."""
    try:
        fields = await request.json() if request is not None else None  # FastAPI has read it before, and kept it
        if isinstance(fields, dict):
            found = prompts_of(CHAT if isinstance(fields.get("messages"), list) else COMPLETIONS, fields)
            if found:
                return found
    except Exception as error:
        log.warning("the body of a request could not be read for ranking: %s", type(error).__name__)
    text = getattr(obj, "text", None)
    texts = [text] if isinstance(text, str) else text if isinstance(text, list) else []
    return tuple(texts) if all(isinstance(each, str) for each in texts) else ()


class SchedulerHook:
    """What happens in each scheduler. Reads nothing but the requests, so that all ranks of a group sort alike."""

    def __init__(self) -> None:
        self._broken = False
        self._unranked = 0

    def sort(self, result: Any, policy: Any, waiting_queue: list[Any], *args: Any, **kwargs: Any) -> None:
        """After ``SchedulePolicy.calc_priority``; stable, in place."""
        if self._broken or len(waiting_queue) < 2:
            return
        try:
            in_arrival_order = getattr(policy.policy, "value", policy.policy) == "fcfs"
            if not in_arrival_order or policy.enable_priority_scheduling:
                return
            self._look(waiting_queue)
            waiting_queue.sort(key=_deadline)
        except Exception as error:
            self._broken = True
            say(log, f"the waiting queue cannot be ordered ({type(error).__name__}): it stays in order of arrival.")

    def _look(self, waiting_queue: list[Any]) -> None:
        if self._unranked < 0:
            return
        if any(request.priority is not None for request in waiting_queue):
            self._unranked = -1
            return
        self._unranked += 1
        if self._unranked == UNRANKED_BEFORE_SAYING:
            self._unranked = -1
            say(log, "no waiting request has a rank: they come in by a way that the plug-in does not see.")


def _deadline(request: Any) -> float:
    return float("-inf") if request.priority is None else request.priority
