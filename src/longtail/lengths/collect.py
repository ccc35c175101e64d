"""(prompt, length) pairs from any OpenAI-compatible server, appended to a file as they come in.

Invariants: a line of the file is a whole record; a (prompt, sample) that the file holds is not asked for again, so the
same command goes on where an earlier one was stopped.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from longtail.core.errors import LongtailError, ServerError
from longtail.lengths.collect_client import Client, Refused, Retry
from longtail.lengths.collect_file import Appender, read_done, record_key
from longtail.lengths.data_prompts import Prompt
from longtail.lengths.messages import prompt_text

GIVE_UP_AFTER = 20
"""If so many prompts have failed and none was answered, the rest will hardly do better."""
LONGEST_BACKOFF_S = 60.0
LONGEST_WAIT_S = 900.0
"""A server that asks for a longer pause is taken for closed."""


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """What to ask. ``model`` None: the only one that the server has. ``max_tokens`` and ``temperature`` None: the
    server's own. ``samples`` answers for each prompt. ``backoff_s`` is the first pause before a request is repeated;
    it doubles each time."""

    url: str
    out: Path
    model: str | None = None
    samples: int = 1
    concurrency: int = 8
    max_tokens: int | None = None
    temperature: float | None = None
    chat: bool = True
    keep_text: bool = False
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    retries: int = 5
    backoff_s: float = 1.0


@dataclass
class Collected:
    """Where a collection stands: answers ``done`` of ``wanted`` now, ``skipped`` ones that the file held before.

    ``cut_off`` answers hit the token limit; ``tokens`` are of all answers; ``errors`` counts failures by what they
    were; ``waiting`` says why requests pause.
    """

    model: str
    wanted: int = 0
    skipped: int = 0
    done: int = 0
    failed: int = 0
    cut_off: int = 0
    tokens: int = 0
    retried: int = 0
    repeated_prompts: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    waiting: str | None = None


class _Job(NamedTuple):
    key: str
    sample: int
    prompt: Prompt


async def collect(
    prompts: Sequence[Prompt], config: CollectConfig, *, progress: Callable[[Collected], None] | None = None
) -> Collected:
    """Ask for every prompt that the file lacks; returns when all are answered or have failed for good.

    May be cancelled: what was answered is in the file. Raises :class:`ServerError` if the server cannot be used at
    all, :class:`DataError` if the file cannot, :class:`ConfigError` for a URL or a key that cannot be.
    """
    have = read_done(config.out)
    client = Client(config.url, api_key=config.api_key, timeout_s=config.timeout_s, connections=config.concurrency)
    async with client:
        state = Collected(model=config.model or await client.only_model())
        jobs = list(_jobs(prompts, config, have, state))
        state.wanted = len(jobs)
        if jobs:
            with Appender(config.out) as file:
                await _Collection(client, file, config, state, progress or (lambda _: None)).run(jobs)
    return state


def _jobs(
    prompts: Sequence[Prompt], config: CollectConfig, have: set[tuple[str, int]], state: Collected
) -> Iterator[_Job]:
    seen = set()
    for prompt in prompts:
        key = record_key(
            prompt,
            model=state.model,
            chat=config.chat,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
        )
        if key in seen:
            state.repeated_prompts += 1
            continue
        seen.add(key)
        for sample in range(config.samples):
            if (key, sample) in have:
                state.skipped += 1
            else:
                yield _Job(key, sample, prompt)


class _Collection:
    def __init__(
        self,
        client: Client,
        file: Appender,
        config: CollectConfig,
        state: Collected,
        progress: Callable[[Collected], None],
    ) -> None:
        self.client, self.file, self.config, self.state, self.progress = client, file, config, state, progress
        self._not_before = 0.0
        self._jitter = random.Random()

    async def run(self, jobs: Sequence[_Job]) -> None:
        self.progress(self.state)
        queue = iter(jobs)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.config.concurrency, len(jobs))):
                    group.create_task(self._work(queue))
        except ExceptionGroup as errors:
            for error in errors.exceptions:
                if isinstance(error, LongtailError):
                    raise error from None
            raise

    async def _work(self, queue: Iterator[_Job]) -> None:
        state = self.state
        for job in queue:
            try:
                record = await self._answer(job)
            except Refused as error:
                state.failed += 1
                state.errors[str(error)] += 1
                if state.done == 0 and state.failed >= min(GIVE_UP_AFTER, state.wanted):
                    count = "the only request" if state.failed == 1 else f"all of the first {state.failed} requests"
                    raise ServerError(f"{self.client.shown_url}: {count} failed: {error}") from None
            else:
                self.file.append(record)
                state.done += 1
                state.tokens += record["output_tokens"]
                state.cut_off += record["censored"]
            self.progress(state)

    async def _answer(self, job: _Job) -> dict[str, Any]:
        """The record of one answer, asked for again where that may help."""
        config, problem = self.config, ""
        own_pause = 0.0
        for attempt in range(config.retries + 1):
            await self._wait(own_pause)
            try:
                answer = await self.client.ask(
                    job.prompt,
                    model=self.state.model,
                    chat=config.chat,
                    max_tokens=config.max_tokens,
                    temperature=config.temperature,
                )
                return self._record(job, answer)
            except Retry as error:
                problem = str(error)
                if attempt < config.retries:
                    self.state.retried += 1
                    own_pause = self._schedule(error, attempt)
        raise Refused(f"{problem} (tried {config.retries + 1} times)")

    def _record(self, job: _Job, answer: dict[str, Any]) -> dict[str, Any]:
        choice = answer["choices"][0]
        usage = answer.get("usage")
        if not isinstance(choice, dict):
            raise Refused("an answer whose choice is no object")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise Refused("an answer without usage.completion_tokens: the server does not say how many tokens it has")
        finish = choice.get("finish_reason")
        record: dict[str, Any] = {"prompt": prompt_text(job.prompt)}
        if not isinstance(job.prompt, str):
            record["messages"] = job.prompt
        record |= {"output_tokens": tokens, "prompt_tokens": usage.get("prompt_tokens") if usage else None}
        record |= {"finish_reason": finish, "censored": finish == "length"}
        record |= {"model": self.state.model, "sample": job.sample, "key": job.key}
        if self.config.keep_text:
            message = choice.get("message")
            record["response"] = message.get("content") if isinstance(message, dict) else choice.get("text")
        return record

    async def _wait(self, seconds: float) -> None:
        """Sleep, and then for as long as the server wants to be left alone."""
        await asyncio.sleep(seconds)
        loop = asyncio.get_running_loop()
        while (wait := self._not_before - loop.time()) > 0:
            await asyncio.sleep(wait)
        if self.state.waiting:
            self.state.waiting = None
            self.progress(self.state)

    def _schedule(self, error: Retry, attempt: int) -> float:
        """Seconds until the request may be repeated; a busy server gets a pause from all of them."""
        pause = min(LONGEST_BACKOFF_S, self.config.backoff_s * 2.0**attempt) * self._jitter.uniform(0.75, 1.25)
        if error.after_s is not None:
            pause = error.after_s
        if pause > LONGEST_WAIT_S:
            raise ServerError(
                f"{self.client.shown_url}: it asks for a pause of {pause / 60:,.0f} minutes ({error}); what it has "
                "answered so far is kept: run the same command again later"
            )
        if error.busy:
            self._not_before = max(self._not_before, asyncio.get_running_loop().time() + pause)
            self.state.waiting = f"{error}: pausing {pause:.0f} s"
            self.progress(self.state)
        return pause
