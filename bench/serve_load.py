"""Load on an OpenAI-compatible server, and the server process under it: who arrives when, and what each request met.

A request is a chat completion, streamed unless said otherwise, whose length is forced (`max_tokens`, `ignore_eos`).
TTFT is the time to the first event with text (or, for an answer without any, with a finish reason), latency the time to
the last byte, and normalized latency is latency over output tokens. The client measures, from the moment of sending.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from longtail.planner.deadline import as_priority, virtual_deadline

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}
FIGURES = ("ttft_s", "latency_s", "normalized_s")
PATIENCE_S = 240
"""So long a server may take to come up."""


@dataclass(frozen=True)
class Ask:
    """A request to send. With a ``quantile``, its virtual deadline goes along as the priority; None leaves the order to
    the server. ``head_start_s`` 0 is first come first served."""

    prompt: str
    tokens: int
    quantile: float | None = None
    head_start_s: float = 0.0

    def headers(self) -> dict[str, str]:
        if self.quantile is None:
            return {}
        deadline_s = virtual_deadline(time.time(), self.quantile, head_start_s=self.head_start_s)
        return {"X-Vllm-Priority": str(as_priority(deadline_s))}

    def body(self, model: str, *, stream: bool = True) -> dict[str, Any]:
        streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return {
            "model": model, "messages": [{"role": "user", "content": self.prompt}], "temperature": 0,
            "max_tokens": self.tokens, "ignore_eos": True, **streamed,
        }  # fmt: skip


class Answer(NamedTuple):
    """What a request met. ``asked_s`` counts from the start of the run; ``error`` None is a whole answer."""

    asked_s: float
    ttft_s: float
    latency_s: float
    tokens: int
    error: str | None


# -- one request -----------------------------------------------------------------------------------------------------


async def send(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str], began: float
) -> Answer:
    """Raises nothing that a server can cause; such things stand in ``error``."""
    asked, first, tokens, error = time.perf_counter(), None, 0, None
    tail: list[bytes] = []
    try:
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
            if reply.status != 200:
                error = f"{reply.status}: {(await reply.text())[:200]}"
            elif body.get("stream"):
                async for line in reply.content:
                    if not line.startswith(b"data:"):
                        continue
                    if first is None and says_something(line[5:]):
                        first = time.perf_counter()
                    tail = [*tail[-1:], line[5:].strip()]
                if tail[-1:] != [b"[DONE]"]:
                    error = f"the stream ended with {tail[-1:]!r:.200}"
                else:
                    tokens = json.loads(tail[0])["usage"]["completion_tokens"]
            else:
                tokens = json.loads(await reply.read())["usage"]["completion_tokens"]
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    if error is None and tokens != body["max_tokens"]:
        error = f"{tokens} tokens instead of {body['max_tokens']}"
    ended = time.perf_counter()
    return Answer(asked - began, (first or ended) - asked, ended - asked, tokens, error)


def says_something(event: bytes) -> bool:
    if event.strip() == b"[DONE]":
        return False
    choices = json.loads(event).get("choices")
    return bool(choices) and bool(choices[0].get("delta", {}).get("content") or choices[0].get("finish_reason"))


def session() -> aiohttp.ClientSession:
    """Without a bound on connections or on time: an overloaded server is what is measured."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)
    )


# -- many ------------------------------------------------------------------------------------------------------------


async def run_open(
    url: str, model: str, asks: Sequence[Ask], times_s: Sequence[float], *, stream: bool = True
) -> list[Answer]:
    """The i-th is sent at ``times_s[i]`` (ascending), whatever has become of the others."""
    async with session() as http:
        began, tasks = time.perf_counter(), []
        for ask, at_s in zip(asks, times_s, strict=True):
            await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
            request = send(http, url, ask.body(model, stream=stream), ask.headers(), began)
            tasks.append(asyncio.create_task(request))
        return await asyncio.gather(*tasks)


async def run_closed(url: str, model: str, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
    """``concurrency`` requests are under way as long as there are any."""
    waiting, answers = list(reversed(asks)), []

    async def keep_asking(http: aiohttp.ClientSession, began: float) -> None:
        while waiting:
            ask = waiting.pop()
            answers.append(await send(http, url, ask.body(model), ask.headers(), began))

    async with session() as http:
        began = time.perf_counter()
        await asyncio.gather(*(keep_asking(http, began) for _ in range(concurrency)))
    return answers


def capacity_per_s(answers: Sequence[Answer]) -> float:
    """Requests a second of a closed run, until its last request was sent: from then on the batch runs empty. What was
    under way at that moment counts by the share of its time that had passed."""
    until_s = max(a.asked_s for a in answers)
    done = sum(min(1.0, (until_s - a.asked_s) / a.latency_s) for a in answers)
    return done / until_s


# -- who arrives when ------------------------------------------------------------------------------------------------


def arrival_times(process: str, count: int, *, rate: float, seed: int, cv: float = 3.0) -> list[float]:
    """Seconds, ascending, the first at 0. ``poisson`` has exponential gaps; ``bursty`` Gamma ones with the coefficient
    of variation ``cv``. Gaps are scaled so that the realised rate is ``rate``: the load is what it says."""
    if process == "burst":
        return [0.0] * count
    shape = {"poisson": 1.0, "bursty": 1 / cv**2}[process]
    gaps = np.random.default_rng(seed).gamma(shape, size=count)
    times = np.cumsum(gaps) - gaps[0]
    return (times * count / rate / gaps.sum()).tolist()


def end_to_end(runs: Sequence[Sequence[Answer]]) -> list[Answer]:
    """Several runs as one, each beginning when the last answer of the one before has come."""
    joined, shift_s = [], 0.0
    for run in runs:
        joined += [a._replace(asked_s=a.asked_s + shift_s) for a in run]
        shift_s = max(a.asked_s + a.latency_s for a in joined)
    return joined


# -- a summary -------------------------------------------------------------------------------------------------------


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Mean and percentiles of each figure over whole answers; and the p99 latency of those with the most tokens, which
    are a tenth, or all at the cap if those are more."""
    good = [a for a in answers if a.error is None]
    found: dict[str, Any] = {"requests": len(answers), "errors": len(answers) - len(good)}
    if not good:
        return found
    latency_s = np.array([a.latency_s for a in good])
    tokens = np.array([a.tokens for a in good])
    columns = {"ttft_s": np.array([a.ttft_s for a in good]), "latency_s": latency_s, "normalized_s": latency_s / tokens}
    for name, values in columns.items():
        found[name] = {"mean": float(values.mean())}
        found[name] |= {label: float(np.percentile(values, p)) for label, p in PERCENTILES.items()}
    span_s = max(a.asked_s + a.latency_s for a in good)
    found["longest_decile_p99_latency_s"] = float(np.percentile(latency_s[tokens >= np.percentile(tokens, 90)], 99))
    found["span_s"] = float(span_s)
    found["tokens_per_s"] = float(tokens.sum() / span_s)
    return found


# -- the server under it ---------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A server process, from its start until it answers ``/health``, to its end with the context. ``PORT`` in the
    command becomes a free port. What it prints goes to a file, whose end is shown if the process dies. ``cores`` are
    those that it may use."""

    def __init__(
        self, name: str, command: Sequence[str], env: dict[str, str] | None = None, *, cores: set[int] | None = None
    ) -> None:
        self.name, self.port = name, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(tempfile.gettempdir()) / f"longtail-bench-{name}-{self.port}.log"
        self._command = [str(self.port) if part == "PORT" else part for part in command]
        self._env, self._cores = {**os.environ, **(env or {})}, cores

    def __enter__(self) -> Server:
        began, cores = time.perf_counter(), self._cores
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, env=self._env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
            )  # fmt: skip
        try:
            while not self._healthy():
                if self.process.poll() is not None or time.perf_counter() - began > PATIENCE_S:
                    raise RuntimeError(f"{self.name} does not come up; the end of {self.log}:\n{self._last_words()}")
                time.sleep(0.25)
            self.model = str(json.loads(self._get("/v1/models"))["data"][0]["id"])
        except BaseException:
            self.__exit__()
            raise
        self.start_s = time.perf_counter() - began
        print(f"{self.name} is up after {self.start_s:.0f} s", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.terminate()
            self.process.wait(20)
        with suppress(ProcessLookupError):  # what is left of it, and of the processes that it started
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def counter(self, name: str) -> float:
        """What ``/metrics`` says, over all labels; 0 if it knows no such thing."""
        samples = [line.split() for line in self._get("/metrics").decode().splitlines() if line.startswith(name)]
        return sum(float(value) for label, value, *_ in samples if label.split("{")[0] == name)

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            return reply.read()

    def _healthy(self) -> bool:
        try:
            self._get("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def _last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
