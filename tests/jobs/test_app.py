"""The HTTP side on a real port: what it answers, and what it keeps out."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import time
from collections.abc import Iterator

import pytest

from jobs.fake_controller import bench, job
from jobs.serving import TOKEN, served
from longtail.core.errors import CapacityError, ConfigError, ServerError
from longtail.jobs import connections
from longtail.jobs.client import Endpoint, JobsClient
from longtail.jobs.connections import BoundedConnection
from longtail.jobs.listen import MOST_AT_ONCE
from longtail.jobs.wire import BODY_LIMIT, Submission


@pytest.fixture
def up(tmp_path):
    with served(bench(tmp_path, allow=("mine",), free_gib=2.0)) as up:
        yield up


def submission(text: str, **more) -> dict:
    return {"text": text, "file": "job.yaml", **more}


def test_submit_list_look_and_stop(up):
    admitted = up.ask("POST", "/v1/jobs", json=submission(job("a"))).json()
    assert [j["name"] for j in admitted["jobs"]] == ["a"]
    up.bench.controller.begin("a")
    up.bench.controller.step("a", 0, reward=float("nan"))
    listed = up.ask("GET", "/v1/jobs")
    body = json.loads(listed.text, parse_constant=lambda word: pytest.fail(word))
    assert {"run": "lab", "workers": 1, "devices": ["cpu x1"]}.items() <= body.items()
    (only,) = body["jobs"]
    assert (only["state"], only["step"], only["reward"]) == ("running", 1, None)
    assert up.ask("GET", "/v1/jobs/a").json() == only
    assert up.ask("POST", "/v1/jobs/a/stop").json()["state"] == "ending"
    assert up.bench.controller.stopped == ["a"]


def test_the_client_raises_what_was_raised_there(up):
    with up.client() as client:
        assert client.list().jobs == []
        with pytest.raises(
            ConfigError, match=r"^job.yaml:8: pipelines.a: unknown key 'stpes'; did you mean 'steps'\?$"
        ):
            client.submit(Submission(text=job("a", "stpes: 3")))
        big = job("a").replace("max_tokens: 8", "max_tokens: 8, kv_gib: 0.7")
        client.submit(Submission(text=big))
        with pytest.raises(ConfigError, match="the name a is in use"):
            client.submit(Submission(text=job("a")))
        with pytest.raises(CapacityError, match=r"^b does not fit"):
            client.submit(Submission(text=big.replace("  a:", "  b:")))
        with pytest.raises(ConfigError, match=r"there is no job 'b/\.\./a'"):
            client.stop("b/../a")
        assert [j.name for j in client.list().jobs] == ["a"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("POST", "/v1/jobs/a/stop"), ("GET", "/")]
)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
        {"authorization": f"Bearer {TOKEN[:-1]}"},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": "Bearer " + "é" * 43},
        {"cookie": f"token={TOKEN}"},
    ],
)
def test_without_the_token_nothing_is_answered_and_nothing_is_done(up, method, path, headers):
    headers = {k: v.encode() for k, v in headers.items()}
    answer = up.ask(method, f"{path}?token={TOKEN}", token=None, headers=headers, json=submission(job("a")))
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert up.bench.controller.plans == []
    assert "job" not in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/jobs/", 404),
        ("GET", "/v1/jobs/..", 404),
        ("GET", "/v1/jobs/%2e%2e%2f%2e%2e%2fetc%2fpasswd", 404),
        ("GET", "/v1/jobs/../../etc/passwd", 404),
        ("POST", "/v1/jobs/..%2f..%2frun/stop", 404),
        ("POST", "/v1/jobs/a%00b/stop", 404),
        ("GET", "/v1/jobs/" + "x" * 5000, 404),
        ("DELETE", "/v1/jobs", 405),
        ("GET", "/v1/jobs/a/stop", 405),
        ("POST", "/v1/jobs/a", 405),
        ("POST", "/v1/jobs/a/start", 405),
    ],
)
def test_paths_that_are_none_lead_nowhere(up, method, path, status):
    answer = up.ask(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert up.bench.controller.stopped == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        job("a").encode(),
        pickle.dumps(submission(job("a"))),
        json.dumps({"text": 3}).encode(),
        json.dumps(submission(job("a"), code="import os")).encode(),
        json.dumps(submission(job("a"), fresh="yes")).encode(),
        json.dumps({**submission(job("a")), "file": "a\nb"}).encode(),
        json.dumps(submission("x" * (1 << 20) + "x")).encode(),
        b'{"text": "\\ud800"}',
        b"\xff\xfe",
    ],
)
def test_a_body_that_is_no_submission_is_a_clear_refusal(up, body):
    answer = up.ask("POST", "/v1/jobs", content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert up.bench.controller.plans == []


def test_nothing_that_is_pickled_is_ever_loaded(up, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "boom"), "w"))

    text = pickle.dumps(Bomb()).decode("latin-1")
    for content in (pickle.dumps(Bomb()), json.dumps(submission(text)).encode()):
        answer = up.ask("POST", "/v1/jobs", content=content, headers={"content-type": "application/octet-stream"})
        assert answer.status_code in (400, 422)
    assert not (tmp_path / "boom").exists()


def test_a_huge_body_is_cut_off(up):
    assert up.ask("POST", "/v1/jobs", content=b"x" * (BODY_LIMIT + 1)).status_code == 413
    pieces = (b"x" * 65536 for _ in range(BODY_LIMIT // 65536 + 2))
    assert up.ask("POST", "/v1/jobs", content=pieces).status_code == 413
    assert up.ask("POST", "/v1/jobs", content=b"x", headers={"content-encoding": "gzip"}).status_code == 415
    assert up.ask("GET", "/v1/jobs").status_code == 200


def test_endless_headers_are_cut_off(up):
    host, _, port = up.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(b"GET /v1/jobs HTTP/1.1\r\nhost: x\r\n")
        try:
            for _ in range(64):
                sock.sendall(b"x: " + b"y" * 65536 + b"\r\n")
            answer = sock.recv(100)
        except OSError:
            answer = b""
    assert answer == b"" or b" 400 " in answer or b" 431 " in answer
    assert up.ask("GET", "/v1/jobs").status_code == 200


@contextlib.contextmanager
def connected(up, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that send ``first`` and then nothing."""
    host, _, port = up.url.removeprefix("http://").partition(":")
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_connection((host, int(port)), timeout=30)) for _ in range(count)]
        for sock in found:
            with contextlib.suppress(OSError):  # cut off already
                sock.sendall(first)
        yield found


def is_cut_off(sock: socket.socket) -> bool:
    """Whether the other end has closed, or will within the time-out of the socket."""
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


HALF = b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\n"
WHOLE = HALF + b"content-length: 1000000\r\n\r\n{"
GET = b"GET /v1/jobs HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("first", [b"", HALF, WHOLE, b"\x16\x03\x01", GET])
def test_connections_that_ask_for_nothing_keep_nobody_out(up, first):
    with connected(up, 3 * MOST_AT_ONCE, first) as found:
        if first in (WHOLE, GET):  # who asks while others are answered may be told to come again
            assert all(map(is_cut_off, found))
        for _ in range(3):
            assert up.ask("GET", "/v1/jobs").status_code == 200


def test_a_connection_that_says_nothing_is_closed_also_when_it_trickles(up, monkeypatch):
    monkeypatch.setattr(connections, "IDLE_S", 0.5)
    with connected(up, 3) as silent, connected(up, 1, HALF) as (trickling,):
        deadline = time.monotonic() + 30
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                trickling.sendall(b"x: y\r\n")
                time.sleep(0.05)
        assert time.monotonic() < deadline
        assert all(map(is_cut_off, silent))


def test_a_request_that_came_while_the_server_was_held_up_is_answered(up, monkeypatch):
    """By what another one has sent, until the time of the first is over."""
    monkeypatch.setattr(connections, "IDLE_S", 600.0)
    received, once = BoundedConnection.data_received, iter([True])

    def held_up(connection, data):
        if next(once, False):
            monkeypatch.setattr(connections, "IDLE_S", 0.05)
            (waiting,) = connection._others.keys() - {connection}
            waiting._busy()
            waiting._look()
            first.sendall(GET)
            time.sleep(0.1)
        received(connection, data)

    monkeypatch.setattr(BoundedConnection, "data_received", held_up)  # uvloop looks it up once, at the start
    with connected(up, 2) as (first, other):
        other.sendall(GET)
        assert first.recv(100).startswith(b"HTTP/1.1 401")


def test_a_connection_is_kept_between_two_requests(up, monkeypatch):
    monkeypatch.setattr(connections, "IDLE_S", 600.0)
    before = up.ask("GET", "/v1/jobs")
    after = up.ask("GET", "/v1/jobs")
    ports = [answer.extensions["network_stream"].get_extra_info("client_addr") for answer in (before, after)]
    assert ports[0] == ports[1]


def test_without_the_token_no_second_request_is_heard(up):
    with connected(up, 1, GET * 1000) as (sock,):
        answer = b""
        with contextlib.suppress(OSError):
            while piece := sock.recv(65536):
                answer += piece
    assert answer.count(b"HTTP/1.1 401") == 1


def test_a_large_body_with_a_wrong_token_is_told_so(up):
    with JobsClient(Endpoint(up.url, "x" * 43)) as client, pytest.raises(ServerError, match="The token is wrong"):
        client.submit(Submission(text="#" * (1 << 20)))


def test_an_alias_bomb_is_refused_quickly(up):
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    answer = up.ask("POST", "/v1/jobs", json=submission(bomb))
    assert answer.status_code == 422
    assert "too many values" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "reward",
    [
        "os:system",
        "subprocess:run",
        "builtins:exec",
        "posix:system",
        "mine_too:f",
        "minefield:f",
        "mine._hidden:f",
        "mine:_private",
        "mine:__import__",
        "longtail.rl.rewards:load_reward",
        "longtail.rl.rewards:copy",
        "longtail.rl.reward_pool:_call",
    ],
)
def test_code_outside_the_allow_list_is_refused_before_anything_is_imported(up, reward):
    answer = up.ask("POST", "/v1/jobs", json=submission(job("a", f"reward: ['{reward}']")))
    assert answer.status_code == 422
    message = answer.json()["error"]["message"]
    assert message.startswith(
        f"job.yaml:8: pipelines.a.reward[0] = {reward!r}: this code is not allowed here (mine is)"
    )
    assert up.bench.loaded == []


@pytest.mark.parametrize(
    "reward",
    [
        "mine",
        "mine:",
        ":f",
        "mine:f.g",
        "mine:f()",
        "mine f",
        ".mine:f",
        "mine..x:f",
        "mine/../os:system",
        "mine.\u200bx:f",
    ],
)
def test_what_names_no_function_is_refused(up, reward):
    answer = up.ask("POST", "/v1/jobs", json=submission(job("a", f"reward: ['{reward}']")))
    assert answer.status_code == 422
    assert "a reward has the form module:function" in answer.json()["error"]["message"]


@pytest.mark.parametrize("reward", ["mine:f", "mine.inner:f", "longtail.rl.rewards:final_number"])
def test_code_on_the_allow_list_is_taken(up, reward):
    answer = up.ask("POST", "/v1/jobs", json=submission(job("a", f"reward: {reward}")))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("task: reverse-text", "task: ../secret.jsonl", "task"),
        ("task: reverse-text", "task: data/../../secret.jsonl", "task"),
        ("model: tiny", "model: ../model", "model"),
        ("max_tokens: 8", "max_tokens: 8, ranker: ../ranker", "rollout.ranker"),
    ],
)
def test_a_relative_path_cannot_leave_the_jobs_folder(up, tmp_path, old, new, key):
    (tmp_path / "secret.jsonl").write_text('{"prompt": "x"}\n')
    answer = up.ask("POST", "/v1/jobs", json=submission(job("a").replace(old, new)))
    assert answer.status_code == 422
    assert f"pipelines.a.{key} = " in answer.json()["error"]["message"]
    assert "a relative path must stay in the jobs folder" in answer.json()["error"]["message"]


def test_data_in_the_jobs_folder_and_by_an_absolute_path_is_found(up, tmp_path):
    for folder in ("jobs", "elsewhere"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "rows.jsonl").write_text('{"prompt": "x", "answer": "y"}\n' * 4)
    for name, path in (("a", "rows.jsonl"), ("b", str(tmp_path / "elsewhere" / "rows.jsonl"))):
        text = job(name, "reward: longtail.rl.rewards:exact_answer").replace("reverse-text", path)
        answer = up.ask("POST", "/v1/jobs", json=submission(text))
        assert answer.status_code == 200, answer.text


def test_an_error_of_our_own_is_told_without_its_insides(up, monkeypatch, capfd):
    monkeypatch.setattr(up.bench.service, "jobs", lambda: 1 / 0)
    monkeypatch.setattr(up.bench.service, "submit", lambda _: 1 / 0)
    answer = up.ask("POST", "/v1/jobs", json=submission(job("a")))
    assert answer.status_code == 500
    assert "ZeroDivisionError" not in answer.text
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_client_says_what_answers_when_it_is_something_else(up):
    with JobsClient(Endpoint(up.url, "x" * 43)) as client, pytest.raises(ServerError, match="The token is wrong"):
        client.list()
    with (
        JobsClient(Endpoint("http://127.0.0.1:1", TOKEN)) as client,
        pytest.raises(ServerError, match="does not answer"),
    ):
        client.list()
