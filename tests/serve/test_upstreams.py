"""Which upstream gets a call, their health, and their addresses."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import trustme

from longtail.core.errors import ConfigError
from longtail.serve import upstreams as upstreams_module
from longtail.serve.upstream import Timeouts, parse_url
from longtail.serve.upstreams import UNLIMITED
from serve.fake_upstream import FakeUpstream, Plan
from serve.upstream_tools import Gateway, call, content, gateway, made, refused, run


def test_the_least_loaded_is_chosen_by_samples_then_by_calls_then_by_turns() -> None:
    async def body() -> None:
        hold = threading.Event()
        async with FakeUpstream() as a, FakeUpstream() as b, gateway(a, b) as gate:
            for fake in (a, b, a, b):
                assert (await gate.answer(call())).outcome.upstream == fake.url
            a.plan = b.plan = Plan(hold=hold)
            tasks = []
            for n, (on_a, on_b) in [(3, (3, 0)), (1, (3, 1)), (1, (3, 2)), (1, (3, 3)), (1, (4, 3)), (2, (4, 5))]:
                tasks.append(asyncio.create_task(gate.answer(call(n=n))))
                await asyncio.sleep(0)
                assert [u["in_flight"] for u in gate.status()["upstreams"]] == [on_a, on_b]
            hold.set()
            assert {(await task).status for task in tasks} == {200}

    run(body())


def test_a_larger_window_takes_a_larger_share() -> None:
    async def body() -> None:
        hold = threading.Event()
        plan = Plan(hold=hold)
        async with FakeUpstream(plan) as a, FakeUpstream(plan) as b, gateway(a, b, window=2) as gate:
            gate.upstreams[1].window = 6
            assert gate.window == 8
            tasks = [asyncio.create_task(gate.answer(call())) for _ in range(8)]
            await a.until(lambda: len(a.requests) == 2)
            await b.until(lambda: len(b.requests) == 6)
            hold.set()
            assert {(await task).status for task in tasks} == {200}

    run(body())


def test_an_upstream_that_died_gets_no_calls_until_it_answers_a_probe() -> None:
    async def body() -> None:
        async with FakeUpstream() as a, FakeUpstream() as b, gateway(a, b, window=3) as gate:
            assert gate.window == 6
            await asyncio.to_thread(a.down)
            assert [(await gate.answer(call())).outcome.upstream for _ in range(3)] == [b.url] * 3
            assert gate.turned.is_set()
            assert gate.window == 3
            assert gate.status() == {
                "ok": True,
                "upstreams": [
                    {"url": a.url, "up": False, "in_flight": 0, "last_failure": "connect", "window": 3},
                    {"url": b.url, "up": True, "in_flight": 0, "last_failure": None, "window": 3},
                ],
            }
            assert gate.kinds == ["connect"]
            await asyncio.to_thread(a.up)
            await gate.until_up(2)
            assert gate.window == 6
            assert {(await gate.answer(call())).outcome.upstream for _ in range(2)} == {a.url, b.url}

    run(body())


@pytest.mark.parametrize("health", [200, 401, 404])
def test_a_probe_asks_for_health_or_else_for_models(health: int) -> None:
    async def body() -> None:
        async with FakeUpstream(health=503) as fake, gateway(fake) as gate:
            assert gate.window == 0
            probes = len(fake.probes)
            await fake.until(lambda: len(fake.probes) > probes)
            assert gate.window == 0
            fake.health = health
            await gate.until_up(1)
            assert (await gate.answer(call())).status == 200

    run(body())


def test_many_calls_that_fail_together_put_an_upstream_down_once() -> None:
    async def body() -> None:
        async with FakeUpstream(Plan(ending="hang")) as a, FakeUpstream() as b, gateway(a, b) as gate:
            with patch.object(upstreams_module, "BACKOFF_S", (600.0, 600.0)):
                tasks = [asyncio.create_task(gate.answer(call())) for _ in range(20)]
                await a.until(lambda: len(a.requests) == 10)
                await asyncio.to_thread(a.down)
                assert {(await task).outcome.upstream for task in tasks} == {b.url}
                assert len(gate._probes) == 1
                assert gate.upstreams[0].strikes == 1

    run(body())


def test_it_starts_without_any_upstream_and_serves_once_there_is_one() -> None:
    async def body() -> None:
        async with FakeUpstream() as fake:
            await asyncio.to_thread(fake.down)
            async with gateway(fake, window=0) as gate:
                assert (gate.status()["ok"], gate.window) == (False, 0)
                assert (await refused(gate.answer(call()))).code == "no_upstream"
                assert (await refused(gate.get("/v1/models", ()))).code == "no_upstream"
                await asyncio.to_thread(fake.up)
                await gate.until_up(1)
                assert (gate.status()["ok"], gate.window) == (True, UNLIMITED)
                assert (await gate.answer(call())).status == 200

    run(body())


def test_what_we_ask_for_ourselves_carries_our_key_and_puts_nobody_down() -> None:
    async def body() -> None:
        async with FakeUpstream(models=["x"]) as fake, gateway(fake, key="k") as gate:
            status, found = await gate.fetch(gate.upstreams[0], "/v1/models")
            assert (status, json.loads(found)["data"][0]["id"]) == (200, "x")
            assert (await gate.fetch(gate.upstreams[0], "/metrics?x=1"))[0] == 404
            assert {probe.header("authorization") for probe in fake.probes} == {"Bearer k"}
            assert fake.probes[-1].path == "/metrics?x=1"
            await asyncio.to_thread(fake.down)
            with pytest.raises(OSError, match="Cannot connect"):
                await gate.fetch(gate.upstreams[0], "/metrics")
            assert gate.status()["ok"]

    run(body())


def test_models_come_from_the_first_upstream_that_is_up() -> None:
    async def body() -> None:
        async with FakeUpstream(models=["x"]) as a, FakeUpstream(models=["y"]) as b, gateway(a, b, key="k") as gate:
            assert b'"x"' in await content(await gate.get("/v1/models", ((b"accept", b"*/*"),)))
            reply = await gate.get("/v1/models/nothing", ())
            assert (reply.status, await content(reply)) == (404, b'{"detail": "Not Found"}')
            await asyncio.to_thread(a.down)
            assert b'"y"' in await content(await gate.get("/v1/models", ()))
            assert [u["up"] for u in gate.status()["upstreams"]] == [False, True]

    run(body())


def test_a_prefix_and_tls_with_an_authority_of_ones_own_work(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")

    async def body() -> None:
        async with FakeUpstream(tls=context) as fake:
            async with gateway(f"{fake.url}/llm/v1", ca_file=tmp_path / "ca.pem") as gate:
                asked = call(stream=True)
                assert await content(await gate.answer(asked)) == b"".join(made(Plan(), asked))
                assert fake.requests[0].path == "/llm/v1/chat/completions"
            async with gateway(fake) as gate:
                assert gate.status()["ok"] is False

    run(body())


def test_two_spellings_of_one_server_are_one() -> None:
    for url in ("http://GPU1:80/", "http://gpu1", "http://gpu1/v1", "http://gpu1/v1/"):
        assert parse_url(url) == "http://gpu1"
    assert parse_url("https://h:443/a/b/v1") == "https://h/a/b"
    assert parse_url("http://[::1]:8000") == "http://[::1]:8000"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("gpu1:8000", "is not the URL of one server"),
        ("ftp://gpu1", "is not the URL of one server"),
        ("http://", "is not the URL of one server"),
        ("http://gpu1,gpu2:8000", "is not the URL of one server"),
        ("http://gpu 1:8000", "is not the URL of one server"),
        ("http://gpu1:99999", "is not a URL"),
        ("http://gpu1?x=1", "leave out"),
        ("http://gpu1/#a", "leave out"),
        ("http://gpu1/a b", "its path may hold"),
        ("http://gpu1/../x", "its path may hold"),
        ("http://user:hunter2@gpu1", "user name or password"),
    ],
)
def test_a_url_that_cannot_work_is_refused_with_the_reason(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_url(url)
    assert "hunter2" not in str(caught.value)


def test_no_upstream_two_of_one_and_odd_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    for urls, options, problem in (
        ([], {}, "No upstream"),
        (["http://a", "http://A:80/v1"], {}, "given twice"),
        (["http://a"], {"tag": frozenset({"foot"})}, "foot"),
        (["https://a"], {"ca_file": tmp_path / "none.pem"}, "none.pem"),
        (["https://a"], {"ca_file": tmp_path / "empty.pem"}, "empty.pem"),
    ):
        with pytest.raises(ConfigError, match=problem):
            Gateway(urls, **options)
    with pytest.raises(ConfigError, match="idle_s = 0"):
        Timeouts(idle_s=0)
