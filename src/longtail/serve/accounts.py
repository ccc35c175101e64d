"""What is known of every request: while it is served for the backlog, and at its end for metrics, log and learning."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from longtail.serve.body import token_limit_of
from longtail.serve.calls import Call, Outcome
from longtail.serve.learned import Served
from longtail.serve.metrics import GaugeValue, Metrics
from longtail.serve.record import Recorder

log = logging.getLogger("longtail.serve")


@dataclass(slots=True)
class Active:
    """A request that was let in. ``expected``: predicted tokens of all its samples; ``waited_s``: for its turn, None
    before it; ``status``: of its answer, None if there was none; ``refusal``: why, in a word; ``keep_prompt``: its
    client allows to record it."""

    call: Call
    expected: float
    keep_prompt: bool
    outcome: Outcome | None = None
    waited_s: float | None = None
    status: int | None = None
    refusal: str | None = None


class Accounts:
    """``in_flight()``: samples at the backend now."""

    def __init__(self, metrics: Metrics, recorder: Recorder | None, *, in_flight: Callable[[], int]) -> None:
        self.active: dict[str, Active] = {}
        self.served = Served()
        self._metrics, self._recorder, self._in_flight = metrics, recorder, in_flight
        self._sent_tokens = 0
        self._salt = secrets.token_bytes(16)

    @contextlib.contextmanager
    def open(self, call: Call, *, keep_prompt: bool) -> Iterator[Active]:
        """The account of one request, closed at the end of the block however it ends."""
        expected = call.samples * self.served.expected_tokens(call.quantile, token_limit_of(call.fields))
        active = self.active[call.request_id] = Active(call, expected, keep_prompt)
        try:
            yield active
        finally:
            del self.active[call.request_id]
            self._close(active)

    def tick(self) -> None:
        """Take note of the speed."""
        streaming = sum(a.outcome.streamed_tokens for a in self.active.values() if a.outcome is not None)
        self.served.tick(time.monotonic(), self._sent_tokens + streaming, self._in_flight())

    def backlog_tokens(self) -> float:
        """Tokens that are predicted to be generated still for all that wait or are in flight."""
        left = 0.0
        for active in self.active.values():
            sent = active.outcome.streamed_tokens if active.outcome is not None else 0
            left += max(active.expected - sent, 1.0)
        return left

    def seconds_for(self, tokens: float) -> float | None:
        """How long so many tokens take at the speed of late; None while none is known, if there are any."""
        speed = self.served.tokens_per_s
        return tokens / speed if speed else None if tokens else 0.0

    def gauges(self) -> Iterable[GaugeValue]:
        backlog = self.backlog_tokens()
        yield "longtail_backlog_tokens", "Predicted tokens still to generate", {}, backlog
        yield "longtail_backlog_seconds", "The same in seconds at the speed of late", {}, self.seconds_for(backlog)
        yield "longtail_tokens_per_second", "Speed of late while busy", {}, self.served.tokens_per_s
        text = "Share of the latest answers that hit their token limit"
        yield "longtail_cut_share", text, {}, self.served.cut_share()
        yield "longtail_ranker_tau", "Kendall tau of rank and true length, last 500", {}, self.served.tau()

    def _close(self, active: Active) -> None:
        outcome, m = active.outcome, self._metrics
        now_s = time.monotonic()
        if active.waited_s is not None:
            m.wait.observe(active.waited_s)
        if outcome is not None:
            if outcome.failure is not None and outcome.upstream is None:  # upstreams report their own
                m.failures.labels("", outcome.failure).inc()
            if outcome.output_tokens is None and outcome.failure is None:
                # Streams tell their tokens only if the client asked for it; most servers send an event for each.
                outcome.output_tokens = outcome.streamed_tokens or None
            self._sent_tokens += outcome.output_tokens or outcome.streamed_tokens
            if outcome.failure is None and active.status == 200 and outcome.output_tokens:
                self._learn(active, outcome, outcome.output_tokens, now_s)
        self.tick()
        self._log(active, now_s)

    def _learn(self, active: Active, outcome: Outcome, tokens: int, now_s: float) -> None:
        call, m = active.call, self._metrics
        m.tokens.labels(call.client).inc(tokens)
        m.latency.observe(now_s - call.arrival_s)
        m.normalized.observe((now_s - call.arrival_s) / tokens)
        if outcome.first_token_s is not None:
            m.ttft.observe(outcome.first_token_s - call.arrival_s)
        self.served.observe(call.quantile, tokens / call.samples, cut=outcome.finish == "length")
        if self._recorder is not None:
            self._recorder.write(call, outcome, prompt_allowed=active.keep_prompt)
            m.recording_failed.set(self._recorder.failed)

    def _log(self, active: Active, now_s: float) -> None:
        call, outcome = active.call, active.outcome
        failure = active.refusal if outcome is None else outcome.failure
        failed = failure is not None and active.status != 429
        level = logging.WARNING if failed else logging.INFO
        if not log.isEnabledFor(level):
            return
        text = "\n".join(call.prompts)
        line = {
            "request": call.request_id,
            "client": call.client,
            "path": call.path,
            "status": active.status,
            "failure": failure,
            "upstream": outcome.upstream if outcome is not None else None,
            "prompt_chars": len(text),
            "prompt_hash": hashlib.blake2b(text.encode(), key=self._salt, digest_size=6).hexdigest(),
            "quantile": None if call.quantile is None else round(call.quantile, 3),
            "waited_ms": None if active.waited_s is None else round(1000 * active.waited_s),
            "took_ms": round(1000 * (now_s - call.arrival_s)),
            "tokens": outcome.output_tokens if outcome is not None else None,
        }
        log.log(level, json.dumps(line))
