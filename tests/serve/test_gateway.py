"""The gateway as a whole: clients before it, servers behind it, faults on both sides."""

import asyncio
import contextlib
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import aiohttp
import httpx
import numpy as np
import openai
import pytest
import yaml

from longtail.lengths.data import read_lengths
from longtail.serve import gateway as gateway_module
from longtail.serve import record as record_module
from longtail.serve import upstreams as upstreams_module
from longtail.serve.build import Options
from longtail.serve.front import DoorSettings
from longtail.serve.gateway import gateway_door
from longtail.serve.keys import entry, new_key
from longtail.serve.scoring import Scorer
from longtail.serve.upstream import Timeouts
from serve.fake_upstream import FakeUpstream, Plan
from serve.running import client, half_request, running, until

PATIENT = Timeouts(connect_s=60, first_byte_s=60, idle_s=60)


class ByNumber:
    def quantile(self, prompts):
        return np.array([float(p.split()[1]) for p in prompts], np.float32)


@contextlib.contextmanager
def gate(*urls, options=None, window=1, timeouts=PATIENT, key=None, ranker=None, **settings):
    def make():
        chosen = options or Options(door=DoorSettings(**settings))
        door = gateway_door(list(urls), chosen, window=window, timeouts=timeouts, key=key)
        if ranker is not None:
            door.scorer = Scorer(ranker, deadline_s=60.0, failed=door.not_scored)
        return door

    with (
        patch.object(upstreams_module, "PROBE_S", 60.0),
        patch.object(record_module, "CLOSE_WITHIN_S", 120.0),
        running(make) as server,
    ):
        yield server


def ask(server, prompt="rank 0.5", *, headers=None, path="/v1/completions", **body):
    return client.post(server.url + path, json={"model": "m", "prompt": prompt, **body}, headers=headers)


def prompts(fake):
    return [request.json()["prompt"] for request in fake.requests]


def test_a_server_that_knows_no_order_serves_short_answers_first():
    let = threading.Event()
    with FakeUpstream(plan=Plan(hold=let)) as fake, gate(fake.url, ranker=ByNumber()) as server:
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, server, "rank 0")]
            fake.wait(lambda: len(fake.requests) == 1)
            for number, rank in enumerate((0.9, 0.2, 0.6), start=1):
                answers.append(pool.submit(ask, server, f"rank {rank}", stream=rank == 0.2))
                until(lambda number=number: len(server.door.hold.queue) == number)
            let.set()
            assert [a.result().status_code for a in answers] == [200] * 4
        assert prompts(fake) == ["rank 0", "rank 0.2", "rank 0.6", "rank 0.9"]
        assert fake.most_open == 1


def test_two_servers_share_the_work_and_each_request_is_answered_once():
    with FakeUpstream(plan=Plan(wait_s=0.01)) as a, FakeUpstream(plan=Plan(wait_s=0.01)) as b:
        with gate(a.url, b.url, window=4) as server, ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(lambda i: ask(server, f"rank 0.{i}", stream=i % 2 == 0), range(120)))
        assert {answer.status_code for answer in answers} == {200}
        assert sorted(prompts(a) + prompts(b)) == sorted(f"rank 0.{i}" for i in range(120))
        assert min(len(a.requests), len(b.requests)) >= 4
        assert max(a.most_open, b.most_open) <= 4


def test_an_upstream_that_is_killed_loses_nobody():
    """Every request ends: by an answer, by an error event in its stream, or by an error status."""
    let = threading.Event()
    with FakeUpstream(plan=Plan(ending="hang", after=3)) as a, FakeUpstream(plan=Plan(tokens=3, hold=let)) as b:
        with gate(a.url, b.url, window=8) as server, ThreadPoolExecutor(16) as pool:
            answers = [pool.submit(ask, server, stream=True) for _ in range(60)]
            a.wait(lambda: a.count("open") == 8)
            a.down()
            let.set()
            ends = [answer.result() for answer in answers]
        for end in ends:
            if end.status_code == 200:
                assert end.text.endswith("data: [DONE]\n\n") != ('"error"' in end.text)
            else:
                assert end.status_code in (502, 503)
                assert end.json()["error"]["code"].startswith(("upstream", "no_upstream"))
        assert sum(end.text.endswith("data: [DONE]\n\n") for end in ends) >= 52


def test_when_all_servers_are_down_requests_fail_clearly_and_work_again_later(monkeypatch):
    monkeypatch.setattr("longtail.serve.build.DOWN_GRACE_S", 0.2)
    with FakeUpstream() as fake, gate(fake.url) as server:
        assert ask(server).status_code == 200
        fake.down()
        failed = [ask(server) for _ in range(3)]
        assert {f.status_code for f in failed} <= {502, 503}
        assert failed[-1].json()["error"]["code"] == "no_upstream"
        assert int(failed[-1].headers["retry-after"]) >= 1
        assert client.get(server.url + "/health").status_code == 503
        assert server.metric("longtail_upstream_up") == 0
        fake.up()
        until(lambda: server.metric("longtail_upstream_up") == 1)
        assert ask(server).status_code == 200


def test_an_upstream_that_is_briefly_away_costs_those_who_wait_nothing(monkeypatch):
    monkeypatch.setattr("longtail.serve.build.DOWN_GRACE_S", 120)
    with FakeUpstream() as fake, gate(fake.url) as server, ThreadPoolExecutor(6) as pool:
        fake.script(Plan(hold=threading.Event()))
        first = pool.submit(ask, server)
        fake.wait(lambda: fake.count("open") == 1)
        waiting = [pool.submit(ask, server) for _ in range(5)]
        until(lambda: len(server.door.hold.queue) == 5)
        fake.down()
        assert first.result().status_code == 502
        fake.up()
        assert [w.result().status_code for w in waiting] == [200] * 5


def test_overload_passes_through_with_the_time_to_come_back():
    body = b'{"error": {"message": "busy", "type": "x", "param": null, "code": 7}}'
    plan = Plan(status=429, body=body, headers=[("Retry-After", "7")])
    with FakeUpstream(plan=plan) as fake, gate(fake.url) as server:
        for stream in (False, True):
            answer = ask(server, stream=stream)
            assert (answer.status_code, answer.headers["retry-after"], answer.content) == (429, "7", body)


def test_fields_that_are_unknown_here_reach_the_server_as_they_were_written():
    body = (
        b'{"model":"m","messages":[{"role":"assistant","content":null,"reasoning_content":"h\xc3\xbc"},'
        b'{"role":"user","content":"\\u00fc"}], "chat_template_kwargs":{"enable_thinking":false}, "top_k":20,'
        b'"min_p":0.05,"max_completion_tokens":5,"tool_choice":"auto","x_team":"a","seed":12345678901234567,"t":1.0}'
    )
    with FakeUpstream() as fake, gate(fake.url, tag=True) as server:
        client.post(server.url + "/v1/chat/completions", content=body)
        sent = fake.requests[0]
        assert sent.body.startswith(body[:-1])
        added = json.loads(b"{" + sent.body[len(body) :])
        assert set(added) == {"priority"}
        assert sent.header("x-vllm-priority") == str(added["priority"])
    with FakeUpstream() as fake, gate(fake.url) as server:
        client.post(server.url + "/v1/chat/completions", content=body)
        assert fake.requests[0].body == body
        assert fake.requests[0].header("x-vllm-priority") is None


def test_openais_client_sees_no_gateway():
    with FakeUpstream() as fake, gate(fake.url) as server:
        official = openai.OpenAI(base_url=server.url + "/v1", api_key="sk-of-the-client", max_retries=0)
        assert [m.id for m in official.models.list()] == ["m"]
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2}
        whole = official.chat.completions.create(**chat)
        streamed = ["", ""]
        for chunk in official.chat.completions.create(**chat, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == [choice.message.content for choice in whole.choices]
        assert fake.requests[0].header("authorization") == "Bearer sk-of-the-client"


def test_with_keys_the_server_gets_the_gateways_key(tmp_path):
    key, digest = new_key()
    (tmp_path / "keys.yaml").write_text("keys:\n" + entry("a", digest))
    options = Options(keys=tmp_path / "keys.yaml")
    with FakeUpstream() as fake, gate(fake.url, options=options, key="sk-upstream") as server:
        assert ask(server).status_code == 401
        assert ask(server, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert [request.header("authorization") for request in fake.requests] == ["Bearer sk-upstream"]


def test_weights_share_the_server_between_keys(tmp_path):
    made = {name: new_key() for name in ("heavy", "light")}
    text = "keys:\n" + entry("heavy", made["heavy"][1], 3) + entry("light", made["light"][1], 1)
    (tmp_path / "keys.yaml").write_text(text)
    let = threading.Event()
    options = Options(keys=tmp_path / "keys.yaml")
    with FakeUpstream(plan=Plan(hold=let, tokens=4)) as fake, gate(fake.url, options=options) as server:
        with ThreadPoolExecutor(50) as pool:
            work = [
                pool.submit(ask, server, name, headers={"Authorization": f"Bearer {made[name][0]}"}, max_tokens=4)
                for name in ["light"] * 24 + ["heavy"] * 24
            ]
            until(lambda: len(server.door.hold.queue) == 47)
            let.set()
            assert {w.result().status_code for w in work} == {200}
        early = prompts(fake)[1:25]
        assert 16 <= early.count("heavy") <= 20


def test_other_calls_of_the_api_pass_through_and_nothing_else_does():
    with FakeUpstream(plan=Plan(body=b'{"data": [1]}')) as fake, gate(fake.url) as server:
        sent = {"input": "x", "priority": -5}
        assert client.post(server.url + "/v1/embeddings", json=sent).json() == {"data": [1]}
        assert client.post(server.url + "/v1/audio/transcriptions", files={"file": b"abc"}).json() == {"data": [1]}
        for path in (
            "/sleep",
            "/v1/../sleep",
            "/v1//sleep",
            "/collective_rpc",
            "/v1/%2e%2e/x",
            "/v1/load_lora_adapter",
        ):
            assert client.post(server.url + path, json={}).status_code == 404
        assert client.get(server.url + "/v1/embeddings").status_code == 405
        assert [request.path for request in fake.requests] == ["/v1/embeddings", "/v1/audio/transcriptions"]
        assert fake.requests[0].json() == {"input": "x"}
        assert b"abc" in fake.requests[1].body


def test_responses_and_messages_are_ordered_like_the_rest():
    let = threading.Event()
    plan = Plan(hold=let, body=b'{"ok": true}')
    with FakeUpstream(plan=plan) as fake, gate(fake.url, ranker=ByNumber()) as server, ThreadPoolExecutor(3) as pool:
        work = [pool.submit(ask, server, "rank 0")]
        fake.wait(lambda: len(fake.requests) == 1)
        bodies = [
            ("/v1/responses", {"input": "rank 0.9"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "rank 0.1"}]}),
        ]
        for number, (path, body) in enumerate(bodies, start=1):
            work.append(pool.submit(client.post, server.url + path, json=body))
            until(lambda number=number: len(server.door.hold.queue) == number)
        let.set()
        assert {w.result().status_code for w in work} == {200}
        assert [request.path for request in fake.requests[1:]] == ["/v1/messages", "/v1/responses"]


def test_a_client_that_leaves_ends_the_work_upstream():
    with FakeUpstream(plan=Plan(ending="hang", after=1)) as fake, gate(fake.url) as server:
        with client.stream("POST", server.url + "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            next(answer.iter_bytes())
        fake.wait(lambda: fake.count("gone") == 1)
        fake.script(Plan(ending="hang"))
        with half_request(server.url):
            fake.wait(lambda: len(fake.requests) == 2)
        fake.wait(lambda: fake.count("gone") == 2)
        until(lambda: server.door.hold.in_flight == 0)


def test_load_while_it_drains_ends_in_answers_or_503():
    let = threading.Event()
    with FakeUpstream(plan=Plan(tokens=3, hold=let)) as fake, gate(fake.url, window=4) as server:
        with ThreadPoolExecutor(32) as pool:
            answers = [pool.submit(ask, server, stream=i % 2 == 0) for i in range(24)]
            until(lambda: len(server.door.hold.queue) == 20)
            server.stop()
            until(lambda: server.door.draining)
            answers += [pool.submit(ask, server, stream=i % 2 == 0) for i in range(8)]
            let.set()
            ends = []
            for answer in answers:
                # Who came when nobody listened any more is refused; who was not yet accepted then is reset.
                with contextlib.suppress(httpx.TransportError):
                    ends.append(answer.result().status_code)
        fake.wait(lambda: fake.count("open") == 0)
        assert set(ends) <= {200, 503}
        assert ends.count(200) == fake.count("answered") == len(fake.requests) == 24  # whoever was let in was answered


def test_a_window_is_found_from_the_servers_own_figures(monkeypatch):
    """Eight at once is what this server can do; it says how many run and wait."""
    monkeypatch.setattr(gateway_module, "LOOK_EVERY_S", 0.02)
    let = threading.Event()
    with FakeUpstream(plan=Plan(hold=let)) as fake:

        async def figures(self, upstream, path):
            open_ = upstream.samples
            text = f"vllm:num_requests_running {min(8, open_)}\nvllm:num_requests_waiting {max(0, open_ - 8)}\n"
            return (200, text.encode()) if path == "/metrics" else (200, b"")

        monkeypatch.setattr(gateway_module.Gateway, "fetch", figures)
        with gate(fake.url, window=None) as server, ThreadPoolExecutor(40) as pool:
            work = [pool.submit(ask, server) for _ in range(40)]
            until(lambda: server.metric("longtail_window") == 9)
            until(lambda: len(server.door.hold.queue) >= 10)
            let.set()
            assert {w.result().status_code for w in work} == {200}


def test_nothing_is_claimed_of_a_server_that_ignores_priorities(monkeypatch, caplog):
    info = json.dumps({"vllm_config": {"scheduler_config": {"policy": "fcfs"}}}).encode()

    async def ask_server(self, upstream, path):
        return (200, info) if path.startswith("/server_info") else (200, b"{}")

    monkeypatch.setattr(gateway_module.Gateway, "fetch", ask_server)
    with FakeUpstream() as fake, gate(fake.url, tag=True) as server:
        health = client.get(server.url + "/health").json()
        assert health["order"] == f"fcfs: priorities are ignored by {fake.url}"
        assert server.metric("longtail_priorities_ignored", upstream=fake.url) == 1
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("priorities are ignored there" in line and "--mode hold" in line for line in said)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_far_too_many_requests_are_answered_or_told_to_come_back():
    """5,000 at once on two slow servers and a queue of 500: all get an answer or a 429 with a time."""

    async def ask_all(url):
        connector, never = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=never) as session:

            async def one(i):
                body = {"model": "m", "prompt": f"rank 0.{i}", "max_tokens": 4}
                async with session.post(url + "/v1/completions", json=body) as answer:
                    await answer.read()
                    return answer.status, answer.headers.get("retry-after-ms")

            return await asyncio.gather(*map(one, range(5000)))

    plan = Plan(wait_s=0.02, tokens=4)
    with FakeUpstream(plan=plan) as a, FakeUpstream(plan=plan) as b:
        with gate(a.url, b.url, window=8, options=Options(max_queue=500)) as server:
            answers = asyncio.run(ask_all(server.url))
        statuses = [status for status, _ in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) == len(a.requests) + len(b.requests) >= 516
        assert all(int(wait) >= 1000 for status, wait in answers if status == 429)
        assert max(a.most_open, b.most_open) <= 8


def test_the_autoscaling_example_uses_figures_that_exist():
    folder = Path(__file__).parent.parent.parent / "examples" / "autoscale"
    texts = [path.read_text() for path in folder.glob("*.yaml")]
    assert len([list(yaml.safe_load_all(text)) for text in texts]) == 4
    wanted = {name for text in texts for name in re.findall(r"longtail_[a-z_]+", text)} - {
        "longtail_backlog_server_seconds"  # what the adapter's rule makes
    }
    with FakeUpstream() as fake, gate(fake.url, ranker=ByNumber()) as server:
        for i in range(60):
            assert ask(server, f"rank 0.{i:02d}", max_tokens=1 + i).status_code == 200
        exported = client.get(server.url + "/metrics").text
    described = set(re.findall(r"^# TYPE (\S+)", exported, re.MULTILINE))
    sometimes = {"longtail_ranker_tau", "longtail_priorities_ignored"}  # once they are known
    assert wanted <= described | sometimes


def test_a_server_that_tells_nothing_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(gateway_module, "LOOK_EVERY_S", 0.02)
    let = threading.Event()

    def said():
        return sum("Say --window N" in record.getMessage() for record in caplog.records)

    with (
        FakeUpstream(plan=Plan(hold=let)) as fake,
        gate(fake.url, window=None) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(ask, server)
        until(lambda: said() == 1)
        looks = len(fake.probes)
        fake.wait(lambda: len(fake.probes) > looks + 1)
        let.set()
        assert answer.result().status_code == 200
    assert said() == 1


def test_what_is_served_is_recorded_and_can_be_trained_on(tmp_path):
    path = tmp_path / "served.jsonl"
    with FakeUpstream() as fake, gate(fake.url, options=Options(record=path, record_prompts=True)) as server:
        for i in range(3):
            assert ask(server, f"prompt {i}", n=2).status_code == 200
    data = read_lengths(path)
    assert data.prompts == [f"prompt {i}" for i in range(3)]
    assert data.unit == "tokens"
    assert (data.lengths == 5).all()


def test_a_server_may_stream_though_the_gateway_did_not_see_that_it_was_asked_to():
    """`"stream": 1` is true for some servers."""
    plan = Plan(
        body=b'data: {"choices": [{"index": 0, "finish_reason": "stop"}]}\n\n', content_type="text/event-stream"
    )
    with FakeUpstream(plan=plan) as fake, gate(fake.url) as server:
        answer = ask(server, stream=1)
        assert (answer.status_code, answer.text) == (200, plan.body.decode())


def test_a_servers_refusal_of_our_key_is_no_401_of_the_clients():
    with FakeUpstream(plan=Plan(status=401, body=b"{}")) as fake, gate(fake.url, key="sk-old") as server:
        answer = ask(server)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_key")
        assert server.door.backend.window > 0


def test_streams_without_usage_are_counted_by_their_events(tmp_path):
    path = tmp_path / "served.jsonl"
    options = Options(record=path, record_prompts=True)
    with FakeUpstream(plan=Plan(tokens=7, usage=False)) as fake, gate(fake.url, options=options) as server:
        answer = ask(server, "streamed", stream=True)
        assert [name for name in answer.headers if answer.headers.get_list(name)[1:]] == []
    assert read_lengths(path).lengths.tolist() == [7]


def test_features_are_recorded_where_prompts_may_not_be(tmp_path):
    path = tmp_path / "served.jsonl"
    with FakeUpstream() as fake, gate(fake.url, options=Options(record=path)) as server:
        for i in range(3):
            assert ask(server, f"unspoken {i}").status_code == 200
    assert "unspoken" not in path.read_text()
    assert len(read_lengths(path).inputs) == 3


def test_the_backlog_counts_what_waits_and_what_runs():
    let = threading.Event()
    with FakeUpstream(plan=Plan(hold=let)) as fake, gate(fake.url) as server, ThreadPoolExecutor(4) as pool:
        work = [pool.submit(ask, server, max_tokens=100) for _ in range(4)]
        until(lambda: len(server.door.hold.queue) == 3)
        assert server.metric("longtail_backlog_tokens") == 400
        let.set()
        assert {w.result().status_code for w in work} == {200}
        until(lambda: server.metric("longtail_backlog_tokens") == 0)
