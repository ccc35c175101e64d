"""The middleware in a real vLLM server on CPU. Takes minutes, so it must be asked for:

LONGTAIL_VLLM_PYTHON=/path/to/an/environment/with/vllm/bin/python pytest -m slow tests/serve/test_vllm_real.py
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from longtail import Ranker
from longtail.core.errors import LongtailError
from longtail.engine.models import resolve_model
from longtail.serve.policy import probe

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("LONGTAIL_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="LONGTAIL_VLLM_PYTHON does not name the Python of an environment with vLLM"),
]
SLOTS = 2
UP_WITHIN_S, DONE_WITHIN_S = 400.0, 240.0
LONG = [
    f"Write a long and detailed essay about the history of {topic}, with an introduction, five chapters and a summary."
    for topic in ("Rome", "China", "India", "France", "Egypt", "Japan", "Brazil", "Russia")
]
SHORT = "What is 2 + 2? Answer with one number."


@dataclass
class Server:
    url: str
    process: subprocess.Popen
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def running(tmp_path: Path, *arguments: str, **env: str) -> Iterator[Server]:
    """A vLLM server with the middleware; its process has begun, no more. Ended with all its children."""
    try:
        model = resolve_model("smollm2-135m")
    except LongtailError as error:
        pytest.skip(f"no model: {error}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "1024"),
        *("--enforce-eager", "--max-num-seqs", str(SLOTS), "--middleware", "longtail.serve.vllm.RankMiddleware"),
        *arguments,
    ]
    settings = {
        "PYTHONPATH": str(ROOT / "src"),
        "NUMBA_CACHE_DIR": str(tmp_path / "numba"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        **env,
    }
    log = tmp_path / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what is left of its session
        process.wait(60)


async def until(condition: Callable[[], Awaitable[bool]], what: str, within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.2)


async def up(server: Server, client: httpx.AsyncClient) -> None:
    async def healthy() -> bool:
        assert server.process.poll() is None, server.text[-4000:]
        try:
            return (await client.get(f"{server.url}/health")).status_code == 200
        except httpx.TransportError:
            return False

    await until(healthy, "the server is up", UP_WITHIN_S)


async def metric(server: Server, client: httpx.AsyncClient, name: str) -> float:
    """The sum over the labels that follow ``name``."""
    text = (await client.get(f"{server.url}/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}\S* (\S+)$", text, re.MULTILINE))


async def complete(server: Server, client: httpx.AsyncClient, prompt: str, tokens: int) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "ignore_eos": True}
    reply = await client.post(f"{server.url}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == tokens


async def place_of_a_short_request(server: Server, client: httpx.AsyncClient) -> int:
    """How many of 8 long requests, of which all but two wait, end before a short one that comes after them."""
    ended: list[str] = []

    async def one(name: str, prompt: str, tokens: int) -> None:
        await complete(server, client, prompt, tokens)
        ended.append(name)

    async def full() -> bool:
        at_work = await metric(server, client, "vllm:num_requests_running{")
        waiting = await metric(server, client, "vllm:num_requests_waiting{")
        return at_work == SLOTS and waiting >= len(LONG) - SLOTS - 1

    async with asyncio.TaskGroup() as tasks:
        for i, prompt in enumerate(LONG):
            tasks.create_task(one(f"long-{i}", prompt, 150))
        await until(full, "both slots are taken and the others wait", DONE_WITHIN_S)
        tasks.create_task(one("short", SHORT, 3))
    return ended.index("short")


async def leave_in_the_middle(server: Server, client: httpx.AsyncClient, *, stream: bool) -> None:
    """A client that asks for much and closes its connection: nothing of it is left in the server soon after."""
    body = {"model": "m", "prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": stream}

    async def busy() -> bool:
        return await metric(server, client, "vllm:num_requests_running{") == 1

    async def idle() -> bool:
        return await metric(server, client, "vllm:num_requests_running{") == 0

    async def ask() -> None:
        async with (
            httpx.AsyncClient(timeout=DONE_WITHIN_S) as own,
            own.stream("POST", f"{server.url}/v1/completions", json=body) as reply,
        ):
            async for _ in reply.aiter_bytes():
                pass

    asking = asyncio.create_task(ask())
    await until(busy, "the request is at work", 60)
    generated = await metric(server, client, "vllm:generation_tokens_total{")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(idle, "the request has left the server", 10)
    assert await metric(server, client, "vllm:generation_tokens_total{") < generated + 850


async def found_policy(server: Server, client: httpx.AsyncClient) -> tuple[str, bool | None, str]:
    async def get(path: str) -> tuple[int, bytes]:
        reply = await client.get(server.url + path, timeout=60)
        return reply.status_code, reply.content

    found = await probe(server.url, get)
    return found.server, found.heeds, found.message


def test_the_prompts_of_these_tests_are_ranked_as_meant():
    short, *long = Ranker.load().quantile([SHORT, *LONG])
    assert short + 0.2 < min(long)


def test_with_policy_priority_a_short_request_overtakes_waiting_ones_and_clients_may_leave(tmp_path):
    async def scenario(server: Server) -> None:
        async with httpx.AsyncClient(timeout=DONE_WITHIN_S, limits=httpx.Limits(max_connections=50)) as client:
            await up(server, client)

            async def scores() -> bool:
                await complete(server, client, SHORT, 1)
                return await metric(server, client, 'longtail_plugin_requests_total{scored="yes"}') > 0

            await until(scores, "the ranker is compiled", 120)
            scored = await metric(server, client, 'longtail_plugin_requests_total{scored="yes"}')
            assert await place_of_a_short_request(server, client) <= SLOTS
            assert await metric(server, client, 'longtail_plugin_requests_total{scored="yes"}') >= scored + 7
            assert await metric(server, client, "longtail_policy_ignores_priorities") == 0
            await leave_in_the_middle(server, client, stream=False)
            await leave_in_the_middle(server, client, stream=True)
            assert (await found_policy(server, client))[:2] == ("vllm", True)

    with running(tmp_path, "--scheduling-policy", "priority") as server:
        asyncio.run(scenario(server))
        assert "priorities are ignored" not in server.text
        assert SHORT not in server.text


def test_with_policy_fcfs_it_says_so_at_the_start_and_requests_keep_their_order(tmp_path):
    async def scenario(server: Server) -> None:
        async with httpx.AsyncClient(timeout=DONE_WITHIN_S, limits=httpx.Limits(max_connections=50)) as client:
            await up(server, client)
            assert "longtail: vLLM runs --scheduling-policy fcfs: priorities are ignored" in server.text
            assert await metric(server, client, "longtail_policy_ignores_priorities") == 1
            assert await place_of_a_short_request(server, client) >= len(LONG) - SLOTS
            kind, heeds, message = await found_policy(server, client)
            assert (kind, heeds) == ("vllm", False)
            assert "Restart it with 'priority'" in message

    with running(tmp_path, "--scheduling-policy", "fcfs") as server:
        asyncio.run(scenario(server))


def test_a_setting_that_cannot_be_used_stops_the_server(tmp_path):
    with running(tmp_path, "--scheduling-policy", "priority", LONGTAIL_MAX_HEAD_START="soon") as server:
        assert server.process.wait(UP_WITHIN_S) != 0
        assert "LONGTAIL_MAX_HEAD_START = 'soon': it must be a number of seconds" in server.text
