"""What the plug-ins for vLLM and SGLang share: settings from the environment, and the way from prompts to a priority.

Servers import this in an environment of their own: nothing here needs more than NumPy, Numba and safetensors, and
``prometheus_client`` is used if the server has it.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from longtail.core.errors import ConfigError
from longtail.lengths.ranker import Ranker
from longtail.planner.deadline import HEAD_START_S, MOST_HEAD_START_S, as_priority, virtual_deadline
from longtail.serve.scoring import Quantiles, Scorer

ORDER, RANKED, FCFS = "LONGTAIL_ORDER", "ranked", "fcfs"
SCORE_WITHIN_S = 0.05


@dataclass(frozen=True, kw_only=True)
class PluginSettings:
    """``ranked``: by predicted length, else in order of arrival. ``head_start_s``: H of ``planner/deadline.py``.
    ``ranker``: a saved one, None for the package's. ``trust_priority``: a priority that the client asks for counts."""

    ranked: bool = True
    head_start_s: float = HEAD_START_S
    ranker: Path | None = None
    trust_priority: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> PluginSettings:
        """From LONGTAIL_ORDER (``ranked``, ``fcfs``), LONGTAIL_MAX_HEAD_START (seconds), LONGTAIL_RANKER (a folder) and
        LONGTAIL_TRUST_PRIORITY (``0``, ``1``); empty is as good as unset. Raises :class:`ConfigError`."""
        folder = environ.get("LONGTAIL_RANKER")
        return cls(
            ranked=_choice(environ, ORDER, {RANKED: True, FCFS: False}, cls.ranked),
            head_start_s=_seconds(environ, "LONGTAIL_MAX_HEAD_START", cls.head_start_s),
            ranker=Path(folder) if folder else None,
            trust_priority=_choice(environ, "LONGTAIL_TRUST_PRIORITY", {"0": False, "1": True}, cls.trust_priority),
        )


class Ranking:
    """Gives requests their priorities (lower goes first), whatever becomes of the ranker. Counts what it does:
    ``scored`` and, by reason, ``unscored`` requests.

    ``ranker`` None: all are as good as unscored, so they go in order of arrival.
    """

    def __init__(self, settings: PluginSettings, ranker: Quantiles | None) -> None:
        self.settings = settings
        self.scored = 0
        self.unscored: Counter[str] = Counter()
        self._scorer = None if ranker is None else Scorer(ranker, deadline_s=SCORE_WITHIN_S, failed=self.skip)
        self._started = False

    @classmethod
    def load(cls, settings: PluginSettings) -> Ranking:
        """Raises ``RankerError``."""
        return cls(settings, Ranker.load(settings.ranker) if settings.ranked else None)

    def start(self, *, wait_s: float = 10.0) -> None:
        """Once; may compile for some seconds, of which ``wait_s`` are waited for. Before, nothing is scored."""
        if not self._started:
            self._started = True
            if self._scorer is not None:
                self._scorer.start(wait_s=wait_s)

    def close(self) -> None:
        if self._scorer is not None and self._started:
            self._scorer.close()

    async def priority(self, prompts: Sequence[str], *, arrival_s: float) -> int:
        """Of a request with these prompts that came at ``arrival_s`` (seconds since 1970)."""
        if self._scorer is None:
            return self.unknown("order", arrival_s=arrival_s)
        quantile = await self._scorer.quantile(prompts)
        if quantile is not None:
            self.scored += 1
            exported().requests("yes")
        return self._priority(quantile, arrival_s)

    def unknown(self, reason: str, *, arrival_s: float) -> int:
        """The priority of a request that could not be scored, which is counted."""
        self.skip(reason)
        return self._priority(None, arrival_s)

    def skip(self, reason: str) -> None:
        """Count a request that is not scored."""
        self.unscored[reason] += 1
        exported().requests("no")
        exported().unscored(reason)

    def _priority(self, quantile: float | None, arrival_s: float) -> int:
        return as_priority(virtual_deadline(arrival_s, quantile, head_start_s=self.settings.head_start_s))


class Exported:
    """The server's own ``/metrics``, where there is one; a metric that cannot be written never fails a request."""

    def __init__(self) -> None:
        self._requests: Any = None
        self._unscored: Any = None
        self._ignored: Any = None
        try:
            from prometheus_client import Counter as Total
            from prometheus_client import Gauge

            self._requests = Total("longtail_plugin_requests", "Requests by whether they were scored", ["scored"])
            self._unscored = Total("longtail_unscored", "Requests that keep their order of arrival", ["reason"])
            self._ignored = Gauge(
                "longtail_policy_ignores_priorities",
                "1 if the server's scheduling policy takes no notice of priorities",
                multiprocess_mode="max",
            )
        except (ImportError, ValueError, OSError):  # not there, names taken, or no folder for several processes
            return

    def requests(self, scored: str) -> None:
        _add(self._requests, scored)

    def unscored(self, reason: str) -> None:
        _add(self._unscored, reason)

    def ignored(self, ignored: bool) -> None:
        if self._ignored is not None:
            try:
                self._ignored.set(float(ignored))
            except Exception:
                self._ignored = None


@cache
def exported() -> Exported:
    """Made when first used: ``prometheus_client`` must not be imported before the server has set it up."""
    return Exported()


def say(log: logging.Logger, message: str) -> None:
    """A warning that is seen: on stderr, whatever the server has made of logging, and in the log if there is one."""
    print(f"longtail: {message}", file=sys.stderr, flush=True)
    if log.hasHandlers():
        log.warning("%s", message)


def _add(counter: Any, label: str) -> None:
    if counter is not None:
        try:
            counter.labels(label).inc()
        except Exception:  # in several processes a counter is a file, and its folder may be gone
            return


def _choice(environ: Mapping[str, str], name: str, choices: Mapping[str, bool], default: bool) -> bool:
    text = environ.get(name)
    if not text:
        return default
    if text not in choices:
        raise ConfigError(f"{name} = {text!r}: it must be {' or '.join(choices)}.")
    return choices[text]


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MOST_HEAD_START_S:
        raise ConfigError(f"{name} = {text!r}: it must be a number of seconds from 0 to {MOST_HEAD_START_S:,.0f}.")
    return seconds
