"""The vLLM middleware before a stand-in for vLLM's application. `test_vllm_real.py` has the real server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longtail.planner.deadline import HEAD_START_S, UNKNOWN_QUANTILE, as_priority
from longtail.serve import plugin, vllm
from longtail.serve.vllm import RankMiddleware, scheduling_policy

SRC = Path(__file__).parents[2] / "src"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHORT, LONG = "hi", "x" * 90


class ByLength:
    """A prompt of n characters is at quantile n / 100."""

    def quantile(self, prompts: list[str]) -> np.ndarray:
        return np.array([min(1.0, len(prompt) / 100) for prompt in prompts])


class FakeVllm:
    """An ASGI application with vLLM's state; keeps what reaches it. ``until_gone``: works until the client has left."""

    def __init__(self, policy: str | None = "priority", *, until_gone: bool = False) -> None:
        config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
        self.state = SimpleNamespace(vllm_config=config) if policy is not None else SimpleNamespace()
        self.until_gone = until_gone
        self.scopes: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.receives: list[Any] = []
        self.gone = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.scopes.append(scope)
        self.receives.append(receive)
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        if self.until_gone:
            assert (await receive())["type"] == "http.disconnect"
            self.gone += 1
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    @property
    def priorities(self) -> list[int | None]:
        found = []
        for scope in self.scopes:
            values = [value for name, value in scope["headers"] if name.lower() == b"x-vllm-priority"]
            assert len(values) <= 1
            found.append(int(values[0]) if values else None)
        return found


@pytest.fixture(autouse=True)
def fast_ranker(monkeypatch):
    for name in [name for name in os.environ if name.startswith("LONGTAIL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(plugin.Ranker, "load", lambda path=None: ByLength())
    monkeypatch.setattr(plugin, "SCORE_WITHIN_S", 20.0)


@asynccontextmanager
async def started(middleware: RankMiddleware, app: FakeVllm) -> AsyncIterator[list[dict]]:
    """The lifespan of a server around the block; yields what it was told."""
    inbox: asyncio.Queue = asyncio.Queue()
    told: list[dict] = []
    up = asyncio.Event()

    async def send(message):
        told.append(message)
        up.set()

    await inbox.put({"type": "lifespan.startup"})
    life = asyncio.create_task(middleware({"type": "lifespan", "app": app}, inbox.get, send))
    await asyncio.wait_for(up.wait(), 30)
    try:
        yield told
    finally:
        await inbox.put({"type": "lifespan.shutdown"})
        await asyncio.wait_for(life, 30)


async def post(
    middleware: RankMiddleware,
    app: FakeVllm,
    body: bytes | list[bytes],
    path: str = CHAT,
    *,
    headers: list[tuple[bytes, bytes]] | None = None,
    root_path: str = "",
    then: str = "http.disconnect",
) -> list[dict]:
    """One request; its body in the given parts. Afterwards ``receive`` says ``then``."""
    parts = [body] if isinstance(body, bytes) else body
    messages = [{"type": "http.request", "body": part, "more_body": i + 1 < len(parts)} for i, part in enumerate(parts)]
    messages.append({"type": then})
    sent: list[dict] = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "root_path": root_path,
        "headers": [(b"content-type", b"application/json"), *(headers or [])],
        "app": app,
    }
    await asyncio.wait_for(middleware(scope, receive, send), 30)
    return sent


def chat(prompt: str, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}], **fields}).encode()


def completion(prompt: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, **fields}).encode()


def serve(app: FakeVllm, *calls: dict[str, Any]) -> tuple[RankMiddleware, float, float]:
    """A server's life with these requests one after the other; the middleware, and when they began and ended."""
    middleware = RankMiddleware(app)

    async def life() -> tuple[float, float]:
        async with started(middleware, app):
            begun_s = time.time()
            for call in calls:
                await post(middleware, app, **call)
            return begun_s, time.time()

    return middleware, *asyncio.run(life())


def at_quantile(
    priority: int | None, quantile: float, begun_s: float, ended_s: float, head_start_s: float = HEAD_START_S
) -> bool:
    ahead_s = head_start_s * quantile
    return priority is not None and as_priority(begun_s + ahead_s) - 1 <= priority <= as_priority(ended_s + ahead_s) + 1


def test_requests_get_their_virtual_deadline_as_priority_and_their_body_unchanged():
    app = FakeVllm()
    bodies = [chat(LONG), chat(SHORT), completion(LONG), completion([SHORT, LONG])]
    paths = [CHAT, CHAT, COMPLETIONS, COMPLETIONS]
    middleware, begun_s, ended_s = serve(
        app, *({"body": body, "path": path} for body, path in zip(bodies, paths, strict=True))
    )
    assert app.bodies == bodies
    for priority, quantile in zip(app.priorities, [0.9, 0.02, 0.9, 0.9], strict=True):
        assert at_quantile(priority, quantile, begun_s, ended_s)
    assert app.priorities[1] < app.priorities[0]
    assert middleware._ranking.scored == 4


def test_the_head_start_can_be_set(monkeypatch):
    monkeypatch.setenv("LONGTAIL_MAX_HEAD_START", "1000")
    app = FakeVllm()
    _, begun_s, ended_s = serve(app, {"body": chat(LONG)})
    assert at_quantile(app.priorities[0], 0.9, begun_s, ended_s, head_start_s=1000)


def test_order_fcfs_loads_no_ranker_and_gives_everybody_the_time_of_arrival(monkeypatch):
    def never(path=None):
        raise AssertionError("a ranker is loaded")

    monkeypatch.setattr(plugin.Ranker, "load", never)
    monkeypatch.setenv("LONGTAIL_ORDER", "fcfs")
    app = FakeVllm()
    serve(app, {"body": chat(LONG)}, {"body": chat(SHORT)})
    first, second = app.priorities
    assert 0 <= second - first < 30_000


def test_a_body_that_comes_in_pieces_goes_on_in_the_same_pieces():
    app = FakeVllm()
    body = chat("ü" * 40, x_team="a", seed=12345678901234567, temperature=1.0)
    parts = [body[i : i + 7] for i in range(0, len(body), 7)]
    _, begun_s, ended_s = serve(app, {"body": parts})
    assert app.bodies == [body]
    assert at_quantile(app.priorities[0], 0.4, begun_s, ended_s)


def test_the_priority_of_a_client_is_replaced_unless_clients_are_trusted():
    app = FakeVllm()
    headers = [(b"X-Vllm-Priority", b"-5"), (b"x-vllm-priority", b"-6")]
    _, begun_s, ended_s = serve(app, {"body": chat(SHORT, priority=-7), "headers": headers})
    assert at_quantile(app.priorities[0], 0.02, begun_s, ended_s)  # the header wins over the body in vLLM
    assert json.loads(app.bodies[0])["priority"] == -7


def test_the_priority_of_a_trusted_client_is_kept(monkeypatch):
    monkeypatch.setenv("LONGTAIL_TRUST_PRIORITY", "1")
    app = FakeVllm()
    _, begun_s, ended_s = serve(
        app,
        {"body": chat(SHORT), "headers": [(b"x-vllm-priority", b"-5")]},
        {"body": chat(SHORT, priority=7)},
        {"body": chat(SHORT, priority=7), "headers": [(b"x-vllm-priority", b"soon")]},
        {"body": chat(SHORT)},
    )
    assert app.priorities[:3] == [-5, None, None]
    assert at_quantile(app.priorities[3], 0.02, begun_s, ended_s)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/llm/v1/chat/completions"])
def test_a_root_path_is_no_obstacle(path):
    app = FakeVllm()
    _, begun_s, ended_s = serve(app, {"body": chat(LONG), "path": path, "root_path": "/llm"})
    assert at_quantile(app.priorities[0], 0.9, begun_s, ended_s)


def test_other_paths_that_generate_get_the_priority_of_an_average_length_without_being_read():
    app = FakeVllm()
    middleware, begun_s, ended_s = serve(app, {"body": b"not json", "path": "/v1/responses"})
    assert at_quantile(app.priorities[0], UNKNOWN_QUANTILE, begun_s, ended_s)
    assert app.receives[0].__qualname__.startswith("post.")
    assert middleware._ranking.unscored == {"path": 1}


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "http", "method": "GET", "path": "/metrics", "headers": [(b"x-vllm-priority", b"1")]},
        {"type": "http", "method": "OPTIONS", "path": CHAT, "headers": []},
        {"type": "websocket", "path": "/v1/realtime", "headers": []},
    ],
)
def test_what_does_not_generate_passes_untouched(scope):
    app = FakeVllm()
    middleware = RankMiddleware(app)

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        raise AssertionError(message)

    asyncio.run(middleware(scope, receive, send))
    assert app.scopes[0] is scope
    assert app.receives[0] is receive


@pytest.mark.parametrize("declared", [False, True])
def test_a_body_above_the_limit_passes_unscored_and_whole(monkeypatch, declared):
    monkeypatch.setattr(vllm, "BODY_LIMIT", 1000)
    app = FakeVllm()
    body = chat("x" * 5000)
    parts = [body[i : i + 100] for i in range(0, len(body), 100)]
    headers = [(b"content-length", str(len(body)).encode())] if declared else []
    middleware, begun_s, ended_s = serve(app, {"body": parts, "headers": headers})
    assert app.bodies == [body]
    assert at_quantile(app.priorities[0], UNKNOWN_QUANTILE, begun_s, ended_s)
    assert middleware._ranking.unscored == {"too_large": 1}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "bad_json"),
        (b"{", "bad_json"),
        (b"[1]", "bad_json"),
        (b'{"messages": \xff}', "bad_json"),
        (b'{"temperature": NaN}', "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (completion([1, 2, 3]), "no_text"),
        (completion([[1], [2]]), "no_text"),
        (completion(None), "no_text"),
        (b'{"model": "m"}', "no_text"),
    ],
)
def test_what_cannot_be_scored_passes_with_the_priority_of_an_average_length(body, reason):
    app = FakeVllm()
    middleware, begun_s, ended_s = serve(app, {"body": body, "path": COMPLETIONS})
    assert app.bodies == [body]
    assert at_quantile(app.priorities[0], UNKNOWN_QUANTILE, begun_s, ended_s)
    assert middleware._ranking.unscored == {reason: 1}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "text"]), JSON | st.sampled_from(["user"]), max_size=3)
FIELDS = st.fixed_dictionaries(
    {}, optional={"messages": st.lists(MESSAGE, max_size=3) | JSON, "prompt": JSON, "priority": JSON}
)


@given(FIELDS, st.sampled_from([CHAT, COMPLETIONS]), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_request_goes_through_with_its_bytes(fields, path, trusted):
    app = FakeVllm()
    body = json.dumps(fields).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGTAIL_TRUST_PRIORITY", str(int(trusted)))
        serve(app, {"body": [body[:3], body[3:]], "path": path})
    assert app.bodies == [body]


def test_a_ranker_that_raises_costs_the_order_only(monkeypatch):
    class Raises:
        def quantile(self, prompts):
            raise RuntimeError("no")

    monkeypatch.setattr(plugin.Ranker, "load", lambda path=None: Raises())
    app = FakeVllm()
    middleware, begun_s, ended_s = serve(app, {"body": chat(LONG)})
    assert at_quantile(app.priorities[0], UNKNOWN_QUANTILE, begun_s, ended_s)
    assert middleware._ranking.unscored == {"error": 1}


def test_a_ranker_that_hangs_costs_the_order_only(monkeypatch):
    release = threading.Event()

    class Hangs:
        def quantile(self, prompts):
            if prompts != [plugin_warm_up()]:
                release.wait(30)
            return np.full(len(prompts), 0.1)

    monkeypatch.setattr(plugin.Ranker, "load", lambda path=None: Hangs())
    monkeypatch.setattr(plugin, "SCORE_WITHIN_S", 0.05)
    app = FakeVllm()
    middleware = RankMiddleware(app)

    async def life():
        async with started(middleware, app):
            for _ in range(3):
                await post(middleware, app, chat(LONG))
            release.set()

    asyncio.run(life())
    assert len(app.bodies) == 3
    assert sum(middleware._ranking.unscored.values()) == 3


def plugin_warm_up() -> str:
    from longtail.serve.scoring import WARM_UP

    return WARM_UP


def test_the_server_sees_its_client_leave():
    app = FakeVllm(until_gone=True)
    serve(app, {"body": chat(LONG)})
    assert app.gone == 1
    assert app.bodies == [chat(LONG)]


def test_a_client_that_leaves_in_the_middle_of_its_body_is_seen_to_leave():
    app = FakeVllm()
    middleware = RankMiddleware(app)
    messages = [{"type": "http.request", "body": b'{"mess', "more_body": True}, {"type": "http.disconnect"}]

    async def life():
        async def receive():
            return messages.pop(0)

        async def send(message):
            raise AssertionError(message)

        async with started(middleware, app):
            scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "app": app}
            await asyncio.wait_for(middleware(scope, receive, send), 30)

    asyncio.run(life())
    assert app.gone == 1


def test_a_policy_that_ignores_priorities_is_said_once_at_the_start_and_none_is_sent(capfd):
    app = FakeVllm("fcfs")
    middleware = RankMiddleware(app)

    async def life():
        async with started(middleware, app):
            assert "vLLM runs --scheduling-policy fcfs: priorities are ignored" in capfd.readouterr().err
            await post(middleware, app, chat(LONG), headers=[(b"x-vllm-priority", b"3")])
            await post(middleware, app, chat(SHORT))

    asyncio.run(life())
    assert app.priorities == [3, None]
    assert middleware._ranking.unscored == {"policy": 2}
    assert "priorities are ignored" not in capfd.readouterr().err
    assert sample("longtail_policy_ignores_priorities") == 1


def test_the_policy_is_checked_at_the_first_request_of_a_server_without_lifespan(capfd):
    app = FakeVllm("fcfs")
    middleware = RankMiddleware(app)
    asyncio.run(post(middleware, app, chat(LONG)))
    asyncio.run(post(middleware, app, chat(LONG)))
    assert capfd.readouterr().err.count("priorities are ignored") == 1
    middleware._ranking.close()


def test_nothing_is_said_where_priorities_count(capfd):
    app = FakeVllm("priority")
    serve(app, {"body": chat(LONG)})
    assert capfd.readouterr().err == ""
    assert sample("longtail_policy_ignores_priorities") == 0


def test_a_server_that_does_not_say_its_policy_gets_priorities_and_a_warning(capfd):
    app = FakeVllm(None)
    _, begun_s, ended_s = serve(app, {"body": chat(LONG)})
    assert at_quantile(app.priorities[0], 0.9, begun_s, ended_s)
    assert "cannot tell whether" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("state", "policy"),
    [
        ({"vllm_config": SimpleNamespace(scheduler_config=SimpleNamespace(policy="fcfs"))}, "fcfs"),
        ({"args": SimpleNamespace(scheduling_policy="priority")}, "priority"),
        ({"vllm_config": None, "args": SimpleNamespace(scheduling_policy="priority")}, "priority"),
        ({}, None),
    ],
)
def test_the_policy_is_read_from_the_configuration_or_the_arguments(state, policy):
    assert scheduling_policy(SimpleNamespace(state=SimpleNamespace(**state))) == policy


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("LONGTAIL_MAX_HEAD_START", "-1", "LONGTAIL_MAX_HEAD_START = '-1': it must be a number of seconds from 0"),
        ("LONGTAIL_MAX_HEAD_START", "nan", "it must be a number of seconds"),
        ("LONGTAIL_MAX_HEAD_START", "1e300", "it must be a number of seconds"),
        ("LONGTAIL_MAX_HEAD_START", "a minute", "it must be a number of seconds"),
        ("LONGTAIL_TRUST_PRIORITY", "yes", "LONGTAIL_TRUST_PRIORITY = 'yes': it must be 0 or 1."),
        ("LONGTAIL_ORDER", "shortest", "LONGTAIL_ORDER = 'shortest': it must be ranked or fcfs."),
    ],
)
def test_a_setting_that_cannot_be_used_stops_the_server_at_its_start(monkeypatch, capfd, name, value, says):
    monkeypatch.setenv(name, value)
    app = FakeVllm()

    async def life():
        async with started(RankMiddleware(app), app) as told:
            return told

    (message,) = asyncio.run(life())
    assert message["type"] == "lifespan.startup.failed"
    assert says in message["message"]
    assert says in capfd.readouterr().err


def test_a_ranker_that_is_not_there_stops_the_server_at_its_start(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("LONGTAIL_RANKER", str(tmp_path / "nowhere"))
    app = FakeVllm()

    async def life():
        async with started(RankMiddleware(app), app) as told:
            return told

    (message,) = asyncio.run(life())
    assert message["type"] == "lifespan.startup.failed"
    assert "there is no such folder" in message["message"]


def test_it_works_as_a_middleware_of_starlette(capfd):
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route
    from starlette.testclient import TestClient

    async def answer(request):
        return JSONResponse({"priority": request.headers.get("X-Vllm-Priority"), "body": await request.json()})

    app = Starlette(routes=[Route(CHAT, answer, methods=["POST"])])
    app.state.args = SimpleNamespace(scheduling_policy="priority")
    app.add_middleware(RankMiddleware)
    with TestClient(app) as client:
        body = json.loads(chat(LONG))
        begun_s = time.time()
        found = client.post(CHAT, json=body).json()
        assert at_quantile(int(found["priority"]), 0.9, begun_s, time.time())
        assert found["body"] == body
    assert capfd.readouterr().err == ""


def sample(name: str, **labels: str) -> float:
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_the_servers_own_metrics_tell_what_was_scored_and_why_not():
    def values():
        return [
            sample("longtail_plugin_requests_total", scored="yes"),
            sample("longtail_plugin_requests_total", scored="no"),
            sample("longtail_unscored_total", reason="no_text"),
        ]

    before = values()
    serve(FakeVllm(), {"body": chat(LONG)}, {"body": completion([1, 2]), "path": COMPLETIONS})
    assert [after - b for after, b in zip(values(), before, strict=True)] == [1, 1, 1]


def run_python(code: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(code)
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SRC), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_it_imports_and_starts_with_nothing_but_numpy_numba_and_safetensors(tmp_path):
    blocked = (
        "starlette aiohttp prometheus_client pydantic uvicorn fastapi torch transformers scipy typer rich yaml httpx "
        "tokenizers huggingface_hub ray matplotlib reasoning_gym pebble psutil"
    )
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked.split()!r}:
            raise ImportError(name + " is not there")
sys.meta_path.insert(0, Block())
from longtail.serve.vllm import RankMiddleware
middleware = RankMiddleware(None)
assert not middleware._refusal, middleware._refusal
middleware._ranking.skip("test")
print("fine")
"""
    found = run_python(code, tmp_path)
    assert found.stdout == "fine\n", found.stderr


def test_counters_of_several_server_processes_never_fail_a_request(tmp_path):
    code = """
import os, shutil
folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
from longtail.serve.plugin import exported
exported().requests("yes")
exported().ignored(True)
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
text = generate_latest(registry).decode()
assert 'longtail_plugin_requests_total{scored="yes"} 1.0' in text, text
assert "longtail_policy_ignores_priorities 1.0" in text, text
shutil.rmtree(folder)
exported().requests("no")
exported().unscored("error")
print("fine")
"""
    folder = tmp_path / "metrics"
    folder.mkdir()
    found = run_python(code, tmp_path, PROMETHEUS_MULTIPROC_DIR=str(folder))
    assert found.stdout == "fine\n", found.stderr


def test_a_missing_folder_for_the_counters_of_several_processes_is_no_obstacle(tmp_path):
    code = """
from longtail.serve.plugin import exported
exported().requests("yes")
exported().ignored(True)
print("fine")
"""
    found = run_python(code, tmp_path, PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "nowhere"))
    assert found.stdout == "fine\n", found.stderr
