"""Does a server heed the priorities that it is sent? Asked of the server (:func:`probe`), and seen from the order in
which it serves (:class:`OrderWatch`)."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from longtail.planner.deadline import HEAD_START_S

Get = Callable[[str], Awaitable[tuple[int, bytes]]]
ServerKind = Literal["vllm", "sglang", "unknown"]

MIN_PAIRS = 30
IGNORED_BELOW = 0.2
"""A server that heeds priorities lets nearly all overtake; one that does not, none but by chance."""


@dataclass(frozen=True, kw_only=True)
class PolicyFound:
    """``heeds`` None: it does not say. ``message`` is for the operator, and a warning if ``warn``."""

    server: ServerKind
    heeds: bool | None
    message: str
    warn: bool


async def probe(url: str, get: Get, *, head_start_s: float = HEAD_START_S) -> PolicyFound:
    """Ask the server at ``url``; ``get(path)`` gives status and body of a GET there, and may raise. Priorities of calls
    that wait together differ by up to ``head_start_s`` seconds.

    vLLM publishes its policy with VLLM_SERVER_DEV_MODE=1 only, SGLang always.
    """
    for path in ("/server_info?config_format=json", "/get_server_info"):
        info = await _object(get, path)
        if "vllm_config" in info:
            return _vllm(url, info["vllm_config"])
        if "schedule_policy" in info:
            return _sglang(url, info, head_start_s)
    return _by_name(url, await _object(get, "/v1/models"))


def _vllm(url: str, config: Any) -> PolicyFound:
    scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
    policy = scheduler.get("policy") if isinstance(scheduler, dict) else None
    if not isinstance(policy, str):
        return _silent_vllm(url)
    if policy == "priority":
        message = f"vLLM at {url} runs --scheduling-policy priority: it heeds priorities."
        return PolicyFound(server="vllm", heeds=True, message=message, warn=False)
    message = (
        f"vLLM at {url} runs --scheduling-policy {policy}: priorities are ignored there. Restart it with 'priority', "
        "or use --mode hold."
    )
    return PolicyFound(server="vllm", heeds=False, message=message, warn=True)


def _silent_vllm(url: str) -> PolicyFound:
    message = (
        f"vLLM at {url} does not say how it schedules (it does with VLLM_SERVER_DEV_MODE=1): priorities are ignored "
        "there unless it runs --scheduling-policy priority. If it does not, use --mode hold."
    )
    return PolicyFound(server="vllm", heeds=None, message=message, warn=True)


def _sglang(url: str, args: Mapping[str, Any], head_start_s: float) -> PolicyFound:
    def found(heeds: bool, text: str, *, warn: bool = True) -> PolicyFound:
        return PolicyFound(server="sglang", heeds=heeds, message=f"SGLang at {url} {text}", warn=warn)

    if not args.get("enable_priority_scheduling"):
        does = "refused" if args.get("abort_on_priority_when_disabled") else "ignored"
        return found(
            False,
            f"runs without --enable-priority-scheduling: priorities are {does} there. Use --mode hold, or Longtail's "
            "plug-in in SGLang.",
        )
    if not args.get("schedule_low_priority_values_first"):
        return found(
            False,
            "serves high priorities first, the reverse of what is sent. Restart it with "
            "--schedule-low-priority-values-first, or use --mode hold.",
        )
    threshold = args.get("priority_scheduling_preemption_threshold")
    cautions = []
    if not args.get("disable_priority_preemption") and not _reaches(threshold, 1000 * head_start_s):
        cautions.append(
            f"preempts running requests if priorities differ by more than {threshold}, and these are milliseconds "
            "(restart it with --disable-priority-preemption)"
        )
    if args.get("enable_metrics"):
        cautions.append(
            "keeps a series of metrics for every priority, so that its memory grows (drop --enable-metrics)"
        )
    if cautions:
        text = (
            f"heeds priorities, but it {', and it '.join(cautions)}. Or use --mode hold, or Longtail's plug-in there."
        )
        return found(True, text)
    return found(True, "runs --enable-priority-scheduling: it heeds priorities.", warn=False)


def _reaches(value: Any, bound: float) -> bool:
    return isinstance(value, int) and value >= bound


def _by_name(url: str, models: Mapping[str, Any]) -> PolicyFound:
    entries = models.get("data")
    first = entries[0] if isinstance(entries, list) and entries else None
    owner = first.get("owned_by") if isinstance(first, dict) else None
    if owner == "vllm":
        return _silent_vllm(url)
    server: ServerKind = "sglang" if owner == "sglang" else "unknown"
    message = (
        f"The server at {url} does not say whether it heeds priorities. If its order does not change, use --mode hold, "
        "which works with any server."
    )
    return PolicyFound(server=server, heeds=None, message=message, warn=True)


async def _object(get: Get, path: str) -> dict[str, Any]:
    """The JSON object at ``path``; empty if there is none, whatever the reason."""
    try:
        status, body = await get(path)
        value = json.loads(body) if status == 200 else None
    except Exception:
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(slots=True)
class _Waiting:
    arrival_s: float
    deadline_s: float
    running: int
    """How many had their first token and had not ended when this one was sent."""


@dataclass(frozen=True, slots=True)
class _Begun:
    arrival_s: float
    deadline_s: float
    begun_s: float
    queued: bool


class OrderWatch:
    """Learns from the order of first tokens whether one server serves by deadline.

    Told of streamed calls alone, in the order in which things happen: :meth:`sent`, :meth:`first_token`, and
    :meth:`gone` once it has ended, however it did. Times are seconds of one clock, which the deadlines are on too.

    A pair of calls is informative if the later arrival had the earlier deadline by more than ``margin_s``, and both
    were seen to queue: after the later one came, the first of them to begin still waited ``noticeable_s`` or five times
    as long as the fastest call ever did, whichever is longer, and each was sent while about as many calls were running
    as the server has lately run at most. First tokens within ``same_step_s`` have no order. Each first token counts for
    at most one pair that kept its order of arrival and one that did not, so that one odd moment is not thirty.

    O(``most``) per event; knows the last ``most`` calls that have begun, and the last ``16 * most`` that wait.
    """

    def __init__(
        self, *, margin_s: float = 0.1, noticeable_s: float = 0.5, same_step_s: float = 0.05, most: int = 128
    ) -> None:
        self.pairs = 0
        self.overtakes = 0
        self._margin_s, self._noticeable_s, self._same_step_s, self._most = margin_s, noticeable_s, same_step_s, most
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._running: set[str] = set()
        self._begun: deque[_Begun] = deque(maxlen=most)
        self._fastest_s = float("inf")
        self._levels: deque[int] = deque(maxlen=most)
        """How many were running after each of the last first tokens."""

    @property
    def ignored(self) -> bool | None:
        """True if the server takes no notice of priorities, None while that cannot be told."""
        if self.pairs < MIN_PAIRS:
            return None
        return self.overtakes < IGNORED_BELOW * self.pairs

    def sent(self, call_id: str, arrival_s: float, deadline_s: float) -> None:
        self._waiting[call_id] = _Waiting(arrival_s, deadline_s, len(self._running))
        if len(self._waiting) > 16 * self._most:
            self._waiting.popitem(last=False)

    def first_token(self, call_id: str, now_s: float) -> None:
        call = self._waiting.pop(call_id, None)
        if call is None:
            return
        self._running.add(call_id)
        most, now = max(self._levels, default=0), len(self._running)
        # A new most means that there was room, so nothing can have been queueing for a place.
        queued = now <= most and call.running >= 0.9 * most - 1
        self._levels.append(now)
        self._fastest_s = min(self._fastest_s, now_s - call.arrival_s)
        begun = _Begun(call.arrival_s, call.deadline_s, now_s, queued)
        if queued:
            self._compare(begun)
        self._begun.append(begun)

    def gone(self, call_id: str) -> None:
        self._waiting.pop(call_id, None)
        self._running.discard(call_id)

    def _compare(self, last: _Begun) -> None:
        """``last`` has begun just now, with those that began before while it waited."""
        overtaken = kept = False
        waited_s = max(self._noticeable_s, 5 * self._fastest_s)
        for first in self._begun:
            together_s = first.begun_s - max(first.arrival_s, last.arrival_s)
            if not first.queued or together_s < waited_s or last.begun_s - first.begun_s < self._same_step_s:
                continue
            if first.arrival_s > last.arrival_s and first.deadline_s < last.deadline_s - self._margin_s:
                overtaken = True
            elif first.arrival_s < last.arrival_s and last.deadline_s < first.deadline_s - self._margin_s:
                kept = True
        self.pairs += overtaken + kept
        self.overtakes += overtaken
