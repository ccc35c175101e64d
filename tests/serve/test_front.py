"""The front door over a real socket: order, limits, keys, faults, and a graceful end."""

import asyncio
import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from longtail.core.errors import ConfigError
from longtail.planner.deadline import as_priority
from longtail.serve.build import Options, front_door
from longtail.serve.errors import ApiError
from longtail.serve.front import DoorSettings
from longtail.serve.http import Listen
from longtail.serve.keys import entry, new_key
from longtail.serve.scoring import Scorer
from serve.fake_backend import FakeBackend
from serve.running import client, half_request, running, until


class ByNumber:
    """A ranker that believes what the prompt says: 'rank 0.3'."""

    def quantile(self, prompts):
        return np.array([float(p.split()[1]) for p in prompts], np.float32)


def door(backend, *, ranker=None, options=None, **settings):
    """What makes a front door in its loop."""

    def make():
        chosen = options or Options(door=DoorSettings(**settings))
        made = front_door(backend, chosen, title="test")
        if ranker is not None:
            made.scorer = Scorer(ranker, deadline_s=60.0, failed=made.not_scored)
        return made

    return make


def post(url, *, path="/v1/completions", headers=None, **body):
    return client.post(url + path, json={"model": "m", "prompt": "rank 0.5", **body}, headers=headers)


def pile_up(server, backend, bodies, *, headers=None):
    """Answers of ``bodies``, sent one after the other while the backend is held up by a first request."""
    backend.gate = True
    with ThreadPoolExecutor(len(bodies) + 1) as pool:
        first = pool.submit(post, server.url, prompt="rank 0")
        until(lambda: backend.running == 1)
        answers = []
        for number, body in enumerate(bodies, start=1):
            more = headers[number - 1] if headers else None
            answers.append(pool.submit(post, server.url, headers=more, **body))
            until(lambda number=number: len(server.door.hold.queue) == number)
        backend.gate = False
        return [first.result(), *(a.result() for a in answers)]


def served(backend):
    return [call.fields["prompt"] for call in backend.calls]


def test_short_answers_go_first_and_everyone_gets_one():
    backend = FakeBackend()
    with running(door(backend, ranker=ByNumber())) as server:
        answers = pile_up(server, backend, [{"prompt": f"rank {r}"} for r in (0.9, 0.1, 0.5)])
        assert [a.status_code for a in answers] == [200] * 4
        assert served(backend) == ["rank 0", "rank 0.1", "rank 0.5", "rank 0.9"]
        assert backend.most_running == 1
        assert server.metric("longtail_requests_total", status="200", path="/v1/completions") == 4


@pytest.mark.parametrize("settings", [{"head_start_s": 0.0}, {"ranked": False}])
def test_without_a_head_start_or_a_rank_they_go_as_they_came(settings):
    backend = FakeBackend()
    with running(door(backend, ranker=ByNumber(), **settings)) as server:
        pile_up(server, backend, [{"prompt": f"rank {r}"} for r in (0.9, 0.1, 0.5)])
    assert served(backend) == ["rank 0", "rank 0.9", "rank 0.1", "rank 0.5"]


def test_nothing_that_comes_a_head_start_later_overtakes():
    backend = FakeBackend()
    with running(door(backend, ranker=ByNumber(), head_start_s=0.2)) as server:
        backend.gate = True
        with ThreadPoolExecutor(3) as pool:
            pool.submit(post, server.url, prompt="rank 0")
            until(lambda: backend.running == 1)
            pool.submit(post, server.url, prompt="rank 1")
            until(lambda: len(server.door.hold.queue) == 1)
            threading.Event().wait(0.25)
            pool.submit(post, server.url, prompt="rank 0")
            until(lambda: len(server.door.hold.queue) == 2)
            backend.gate = False
    assert served(backend) == ["rank 0", "rank 1", "rank 0"]


def unscored(server, reason):
    return server.metric("longtail_unscored_total", reason=reason)


class Raises:
    def quantile(self, prompts):
        raise RuntimeError("out of order")


class Hangs:
    def __init__(self):
        self.go_on = threading.Event()
        self.go_on.set()

    def quantile(self, prompts):
        self.go_on.wait(120)
        return np.zeros(len(prompts), np.float32)


def test_a_ranker_that_raises_costs_the_order_only():
    backend = FakeBackend()
    with running(door(backend, ranker=Raises())) as server:
        answers = pile_up(server, backend, [{"prompt": str(i)} for i in range(3)])
        assert [a.status_code for a in answers] == [200] * 4
        assert served(backend) == ["rank 0", "0", "1", "2"]
        assert unscored(server, "error") == 4


def test_a_ranker_that_hangs_costs_the_order_only():
    backend, ranker = FakeBackend(), Hangs()

    def make():
        made = front_door(backend, Options(), title="test")
        made.scorer = Scorer(ranker, deadline_s=0.1, failed=made.not_scored)
        return made

    with running(make) as server:
        ranker.go_on.clear()
        try:
            while not unscored(server, "busy"):
                assert post(server.url).status_code == 200
            busy = unscored(server, "busy")
            assert [post(server.url, prompt=str(i)).status_code for i in range(3)] == [200] * 3
            assert unscored(server, "busy") == busy + 3
            assert unscored(server, "deadline") >= 1
        finally:
            ranker.go_on.set()


def test_token_ids_have_no_rank_and_go_through():
    backend = FakeBackend()
    with running(door(backend)) as server:
        assert post(server.url, prompt=[1, 2, 3]).status_code == 200
        assert unscored(server, "no_text") == 1


# -- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_when_the_client_leaves_its_request_is_cancelled(stream):
    backend = FakeBackend(pieces=100_000, pause_s=0.01)
    with running(door(backend)) as server:
        sock = half_request(server.url, stream=stream)
        until(lambda: backend.running == 1)
        sock.close()
        until(lambda: server.metric("longtail_clients_gone_total") == 1)
        assert (backend.cancelled, backend.running, server.door.hold.in_flight) == (1, 0, 0)


def test_when_a_waiting_client_leaves_its_request_never_runs():
    backend = FakeBackend()
    backend.gate = True
    with running(door(backend)) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, server.url)
        until(lambda: backend.running == 1)
        sock = half_request(server.url, prompt="gone")
        until(lambda: len(server.door.hold.queue) == 1)
        sock.close()
        until(lambda: len(server.door.hold.queue) == 0)
        backend.gate = False
        assert first.result().status_code == 200
        assert len(backend.calls) == 1


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_429_with_a_time_to_come_back():
    backend = FakeBackend()
    backend.gate = True
    with running(door(backend, options=Options(max_queue=2))) as server, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(post, server.url) for _ in range(3)]
        until(lambda: len(server.door.hold.queue) == 2)
        refused = post(server.url)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 1000
        backend.gate = False
        assert [w.result().status_code for w in waiting] == [200] * 3


def test_a_large_body_is_413_whether_or_not_it_says_so():
    with running(door(FakeBackend(), body_limit=1000)) as server:
        assert post(server.url, prompt="x" * 2000).status_code == 413

        def parts():
            for _ in range(200):
                yield b" " * 100

        answer = client.post(server.url + "/v1/completions", content=parts())
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_a_body_that_never_comes_is_408():
    with running(door(FakeBackend(), body_within_s=0.2)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
            sock.settimeout(60)
            assert b" 408 " in sock.recv(1000).splitlines()[0]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", "/v1/completions", b"{", 400, "bad_json"),
        ("POST", "/v1/completions", b"", 400, "bad_json"),
        ("POST", "/v1/chat/completions", b"[]", 400, "bad_json"),
        ("POST", "/v1/completions", b'{"model": "none"}', 404, "model_not_found"),
        ("GET", "/v1/completions", b"", 405, "method_not_allowed"),
        ("POST", "/health", b"", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", b"{}", 404, "not_found"),
        ("GET", "/nothing", b"", 404, "not_found"),
        ("POST", "/v1/../admin", b"{}", 404, "not_found"),
    ],
)
def test_wrong_requests_are_errors_of_openais_shape(method, path, content, status, code):
    with running(door(FakeBackend())) as server:
        answer = client.request(method, server.url + path, content=content)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error["code"] == code
        assert set(error) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("req-")


def test_a_compressed_body_is_415():
    with running(door(FakeBackend())) as server:
        answer = client.post(server.url + "/v1/completions", content=b"{}", headers={"content-encoding": "gzip"})
        assert answer.status_code == 415


def test_a_failure_inside_is_a_500_without_its_text():
    backend = FakeBackend(broken=lambda call: ZeroDivisionError("secret prompt"))
    with running(door(backend)) as server:
        answer = post(server.url)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        backend.broken = lambda call: None
        assert post(server.url).status_code == 200


def stream_that_waited(server, backend):
    """The text of a stream; the backend is held up until its first comment has come."""
    body = {"model": "m", "prompt": "rank 0.5", "stream": True}
    with client.stream("POST", server.url + "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        pieces = answer.iter_text()
        text = next(pieces)
        backend.gate = False
        return text + "".join(pieces)


def test_waiting_streams_get_comments_and_errors_as_events():
    backend = FakeBackend(pieces=1)
    backend.gate = True
    with running(door(backend, comment_s=0.05)) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, server.url)
        until(lambda: backend.running == 1)
        text = stream_that_waited(server, backend)
        assert first.result().status_code == 200
        assert text.startswith(": waiting\n\n")
        assert text.endswith('data: {"choices": [{"index": 0, "text": "x"}]}\n\ndata: [DONE]\n\n')
        until(lambda: server.door.hold.in_flight == 0)
        backend.gate = True
        first = pool.submit(post, server.url)
        until(lambda: backend.running == 1)
        backend.broken = lambda call: ApiError(502, "gone", code="upstream_cut")
        text = stream_that_waited(server, backend)
        last = text.strip().splitlines()[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "upstream_cut"
        assert "[DONE]" not in text


# -- keys and priorities ----------------------------------------------------------------------------------------------


@pytest.fixture
def keyring(tmp_path):
    """(options with a keys file, {name: headers})."""
    made = {name: new_key() for name in ("alice", "bob", "boss")}
    text = "keys:\n" + "".join(entry(name, digest) for name, (_, digest) in made.items())
    path = tmp_path / "keys.yaml"
    path.write_text(
        text.replace('name: "alice"', 'name: "alice"\n    max_concurrent: 1\n    max_waiting: 2').replace(
            'name: "boss"', 'name: "boss"\n    allow_priority: true'
        )
    )
    return path, {name: {"authorization": f"Bearer {key}"} for name, (key, _) in made.items()}


def test_one_of_several_keys_cannot_fill_the_queue(keyring):
    path, headers = keyring
    backend = FakeBackend()
    backend.gate = True
    with running(door(backend, options=Options(keys=path, max_queue=4))) as server, ThreadPoolExecutor(4) as pool:
        work = [pool.submit(post, server.url, headers=headers["bob"]) for _ in range(3)]
        until(lambda: len(server.door.hold.queue) == 2)
        assert post(server.url, headers=headers["bob"]).status_code == 429
        work.append(pool.submit(post, server.url, headers=headers["boss"]))
        until(lambda: len(server.door.hold.queue) == 3)
        backend.gate = False
        assert {w.result().status_code for w in work} == {200}


def test_anthropics_header_is_a_key_too_and_stays_here(keyring):
    path, headers = keyring
    backend = FakeBackend()
    own = {"x-api-key": headers["bob"]["authorization"].removeprefix("Bearer ")}
    with running(door(backend, options=Options(keys=path))) as server:
        assert post(server.url, headers=own).status_code == 200
        assert b"x-api-key" not in dict(backend.calls[0].headers)
        assert client.get(server.url + "/health", headers=own).json()["order"] == "ranked"
        assert client.get(server.url + "/health").json() == {"ok": True}


def test_a_client_that_takes_nothing_gives_its_place_back(monkeypatch):
    monkeypatch.setattr("longtail.serve.responder.TAKEN_WITHIN_S", 0.3)
    backend = FakeBackend(pieces=200_000)
    with running(door(backend)) as server, half_request(server.url, stream=True):
        until(lambda: backend.cancelled == 1 and server.door.hold.in_flight == 0)


def test_with_keys_only_health_is_open(keyring):
    path, headers = keyring
    with running(door(FakeBackend(), options=Options(keys=path))) as server:
        for url in ("/v1/models", "/metrics", "/openapi.json"):
            assert client.get(server.url + url).status_code == 401
            assert client.get(server.url + url, headers=headers["bob"]).status_code == 200
        assert client.get(server.url + "/health").status_code == 200
        assert post(server.url).status_code == 401
        assert post(server.url, headers=headers["bob"]).status_code == 200


def test_open_metrics_need_no_key(keyring):
    options = Options(keys=keyring[0], door=DoorSettings(open_metrics=True))
    with running(door(FakeBackend(), options=options)) as server:
        assert client.get(server.url + "/metrics").status_code == 200


def test_a_key_has_so_many_at_once_so_many_waiting_and_no_more(keyring):
    path, headers = keyring
    backend = FakeBackend(window=10)
    backend.gate = True
    with running(door(backend, options=Options(keys=path))) as server, ThreadPoolExecutor(4) as pool:
        alice = [pool.submit(post, server.url, headers=headers["alice"]) for _ in range(3)]
        until(lambda: len(server.door.hold.queue) == 2)
        until(lambda: backend.running == 1)
        assert backend.most_running == 1
        assert post(server.url, headers=headers["alice"]).status_code == 429
        bob = pool.submit(post, server.url, headers=headers["bob"])
        until(lambda: backend.running == 2)
        backend.gate = False
        assert {a.result().status_code for a in [*alice, bob]} == {200}
        assert [call.client for call in backend.calls].count("alice") == 3


def test_credentials_and_priorities_of_clients_stay_here(keyring):
    path, headers = keyring
    backend = FakeBackend()
    with running(door(backend, options=Options(keys=path, door=DoorSettings(tag=True)))) as server:
        post(server.url, headers={**headers["bob"], "X-Vllm-Priority": "-5", "Cookie": "a=b"}, priority=-7)
        post(server.url, headers={**headers["boss"], "X-Vllm-Priority": "-5"}, priority=-7)
    bob, boss = backend.calls
    assert {b"authorization", b"cookie", b"x-vllm-priority"}.isdisjoint(dict(bob.headers))
    assert "priority" not in json.loads(bob.body)
    assert bob.priority > 10**11
    assert b"authorization" not in dict(boss.headers)
    assert boss.priority == -5


def test_a_trusted_priority_orders_and_an_untrusted_one_does_not():
    for trusted, order in ((True, ["b", "a"]), (False, ["a", "b"])):
        backend = FakeBackend()
        with running(door(backend, ranker=Raises(), trust_priority=trusted)) as server:
            now = time.time()
            first, second = (
                {"X-Vllm-Priority": str(as_priority(now + 100))},
                {"X-Vllm-Priority": str(as_priority(now - 100))},
            )
            pile_up(server, backend, [{"prompt": "a"}, {"prompt": "b"}], headers=[first, second])
        assert served(backend)[1:] == order


def test_in_tag_mode_nothing_is_held_back_and_a_priority_is_given():
    backend = FakeBackend()
    backend.gate = True
    with (
        running(door(backend, ranker=ByNumber(), tag=True, head_start_s=1000)) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        both = [pool.submit(post, server.url, prompt=f"rank {r}") for r in (1.0, 0.0)]
        until(lambda: backend.running == 2)
        backend.gate = False
        assert [b.result().status_code for b in both] == [200, 200]
    by_prompt = {call.fields["prompt"]: call.priority - 1000 * call.arrival_s for call in backend.calls}
    assert 990_000 < by_prompt["rank 1.0"] - by_prompt["rank 0.0"] < 1_010_000


def test_neither_prompts_nor_keys_are_logged(keyring, caplog, monkeypatch):
    path, headers = keyring
    monkeypatch.setattr(logging.getLogger("longtail"), "propagate", True)  # a command may have set its own handler
    caplog.set_level(logging.DEBUG)
    for name in ("longtail", "longtail.serve"):
        caplog.set_level(logging.DEBUG, logger=name)
    backend = FakeBackend(broken=lambda call: ValueError("x") if "fail" in call.fields["prompt"] else None)
    with running(door(backend, options=Options(keys=path))) as server:
        post(server.url, prompt="a whispered word", headers=headers["bob"])
        post(server.url, prompt="a whispered word, fail", headers=headers["bob"])
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("longtail")]
    assert any('"prompt_chars": 16' in line for line in ours)
    assert "whispered" not in caplog.text
    assert headers["bob"]["authorization"].split()[1] not in caplog.text


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_graceful_end_answers_all_that_was_let_in():
    backend = FakeBackend()
    backend.gate = True
    with running(door(backend)) as server, ThreadPoolExecutor(4) as pool:
        under_way = [pool.submit(post, server.url, stream=i % 2 == 0) for i in range(4)]
        until(lambda: len(server.door.hold.queue) == 3)
        server.stop()
        until(lambda: server.door.draining)
        backend.gate = False
        assert [w.result().status_code for w in under_way] == [200] * 4
        assert server.ended.wait(60)
    assert backend.finished == 4


def test_what_is_not_done_in_time_ends_with_a_clear_error():
    backend = FakeBackend()
    backend.gate = True
    with running(door(backend, drain_s=0.2)) as server, ThreadPoolExecutor(2) as pool:
        plain = pool.submit(post, server.url)
        until(lambda: backend.running == 1)
        waiting = pool.submit(post, server.url, stream=True)
        until(lambda: len(server.door.hold.queue) == 1)
        server.stop()
        for answer in (plain.result(), waiting.result()):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert server.ended.wait(60)


def test_a_server_lives_while_nobody_behind_it_answers():
    backend = FakeBackend()
    with running(door(backend)) as server:
        backend.up = False
        assert client.get(server.url + "/health").status_code == 503
        assert client.head(server.url + "/health").status_code == 503
        assert client.get(server.url + "/live").status_code == 200


def test_health_says_when_it_drains():
    made = door(FakeBackend())

    async def ask():
        found = made()
        found.draining = True
        return found._health()

    status, found = asyncio.run(ask())
    assert (status, found["ok"], found["draining"]) == (503, False, True)


# -- listening --------------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_one_sentence():
    with running(door(FakeBackend())) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with (
            pytest.raises(ConfigError, match="choose another --port"),
            running(door(FakeBackend()), listen=Listen(port=port)),
        ):
            pass


def test_nobody_listens_to_the_network_without_keys_by_accident():
    Listen(host="127.0.0.1").check(keys=False, open_to_all=False)
    Listen(host="0.0.0.0").check(keys=True, open_to_all=False)
    Listen(host="0.0.0.0").check(keys=False, open_to_all=True)
    with pytest.raises(ConfigError, match="--keys"):
        Listen(host="0.0.0.0").check(keys=False, open_to_all=False)


def test_tls_serves_and_half_of_it_is_refused(tmp_path):
    import ssl

    import trustme

    authority = trustme.CA()
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(key)
    certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    listen = Listen(port=0, certificate=certificate, private_key=key)
    listen.check(keys=False, open_to_all=False)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with running(door(FakeBackend()), listen=listen) as server:
        assert server.url.startswith("https://")
        assert httpx.get(server.url + "/health", verify=context, timeout=120).status_code == 200
    with pytest.raises(ConfigError, match="needs both"):
        Listen(certificate=certificate).check(keys=False, open_to_all=False)
    key.write_text("x")
    with pytest.raises(ConfigError, match="no usable certificate"):
        listen.check(keys=False, open_to_all=False)
