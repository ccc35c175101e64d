"""Finding a run that is up: the token, the small file, the address."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trustme

from jobs.fake_controller import bench
from jobs.serving import TOKEN
from longtail.core.errors import ConfigError, ServerError
from longtail.jobs.app import JobsApp
from longtail.jobs.client import Endpoint, JobsClient, find
from longtail.jobs.listen import MOST_AT_ONCE, Bind, listening
from longtail.jobs.presence import Presence, announced, default_token_file, others, read_token, state_folder, token_of


@pytest.fixture(autouse=True)
def _a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def presence(run: str = "lab", port: int = 8790, token_file: Path | str = "token", **more) -> Presence:
    url = f"http://127.0.0.1:{port}"
    return Presence(run=run, folder="/runs/lab", url=url, pid=os.getpid(), token_file=str(token_file), **more)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_files() -> list[str]:
    """Those in the state folder that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was that of the listing, or another thread's
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(str(state_folder().resolve()))]


# -- the token


def test_a_token_is_made_once_for_this_user_only():
    path = default_token_file()
    token = token_of(path)
    assert len(token) >= 43
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700
    assert token_of(path) == read_token(path) == token
    assert [p.name for p in path.parent.iterdir()] == ["token"]


def test_two_runs_that_start_at_once_have_the_same_token(tmp_path):
    start, found = threading.Barrier(8), []

    def make():
        start.wait()
        found.append(token_of(tmp_path / "new" / "token"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize("permissions", [0o644, 0o640, 0o604, 0o666])
def test_a_token_that_others_could_read_is_refused(tmp_path, permissions):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(permissions)
    with pytest.raises(ConfigError, match=r"others could read this token.*chmod 600"):
        token_of(path)


@pytest.mark.parametrize("text", ["", "short", "a b" * 20, "é" * 40, "x" * 20 + "\n" + "y" * 20])
def test_what_is_no_token_is_refused(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="token"):
        token_of(path)


def test_a_token_that_cannot_be_written_or_read_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the token cannot be written"):
        token_of(tmp_path / "file" / "token")
    with pytest.raises(ConfigError, match="the token cannot be read: No such file"):
        read_token(tmp_path / "nowhere")


# -- the small file


def test_a_run_is_found_while_it_is_up_and_only_then():
    assert others() == []
    with announced(presence()):
        (path,) = (state_folder() / "up").rglob("*.json")
        assert mode(path) == 0o600
        assert mode(path.parent) == 0o700
        assert TOKEN not in path.read_text()
        assert others() == [presence()]
    assert others() == []
    assert not path.exists()


def test_a_run_that_cannot_be_announced_leaves_nothing(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with announced(presence()):
        assert len(open_files()) == 1
    for call in ("replace", "fdopen"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(ConfigError, match="cannot be used: No space left on device"), announced(presence()):
                pass
    assert [p for p in (state_folder() / "up").rglob("*") if p.is_file()] == []
    assert open_files() == []


def test_what_a_killed_run_left_is_recognised_and_removed(tmp_path):
    code = (
        "import sys, time\nfrom longtail.jobs.presence import *\n"
        "with announced(Presence('lab', '/x', 'http://127.0.0.1:8790', 1, 'token')):\n"
        "    print('up', flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert [o.run for o in others()] == ["lab"]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert others() == []
    assert list((state_folder() / "up").rglob("*.json")) == []


def test_a_damaged_file_hinders_nobody():
    with announced(presence(port=1)):
        (path,) = (state_folder() / "up").rglob("*.json")
        (path.parent / "2.json").write_text("{")
        (path.parent / "3.json").mkdir()
        assert [o.port for o in others()] == [1]


def test_a_home_that_cannot_be_written_has_a_stand_in(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    folder = state_folder()
    assert folder.is_dir()
    assert folder.stat().st_uid == os.getuid()


# -- which one is meant


def test_the_only_run_is_meant_where_none_is_named():
    path = default_token_file()
    token = token_of(path)
    with pytest.raises(ConfigError, match="no `longtail up` of yours runs on this machine"):
        find(None)
    with announced(presence(token_file=path)):
        assert find(None) == find("lab") == find("127.0.0.1:8790") == Endpoint("http://127.0.0.1:8790", token)
        with pytest.raises(ConfigError, match="no run of yours on this machine has this name; there is lab at"):
            find("lib")
        with announced(presence("lib", 8791, path)):
            with pytest.raises(
                ConfigError, match=r"several runs are up: .*lab at 127.0.0.1:8790 or lib at 127.0.0.1:8791"
            ):
                find(None)
            assert find("lib").url == "http://127.0.0.1:8791"
        with announced(presence("lab", 8791, path)), pytest.raises(ConfigError, match="several runs are called lab"):
            find("lab")


def test_an_address_elsewhere_is_only_reached_by_tls(tmp_path):
    token_of(default_token_file())
    assert find("gpu1:8790").url == "https://gpu1:8790"
    assert find("127.0.0.1:9").url == "http://127.0.0.1:9"
    assert find("https://[fd00::1]:8790").url == "https://[fd00::1]:8790"
    with pytest.raises(ConfigError, match="the token would cross the network in the clear"):
        find("http://gpu1:8790")
    for wrong in ("gpu1:", "gpu1:x", "ftp://gpu1:1", "http://a:b@127.0.0.1:1", "http://127.0.0.1:1/path"):
        with pytest.raises(ConfigError, match="--to"):
            find(wrong)


# -- where it listens


@pytest.mark.parametrize("text", ["", "8790", ":8790", "host", "host:", "host:x", "127.0.0.1:70000", "127.0.0.1:-1"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match=r"must be HOST:PORT, such as 127\.0\.0\.1:8790"):
        Bind.parse(text)


@pytest.mark.parametrize("text", ["0.0.0.0:8790", "[::]:8790", "10.0.0.1:8790", "gpu1:8790", "127.0.0.1.evil.org:8790"])
def test_others_can_only_be_let_in_by_tls(text):
    with pytest.raises(ConfigError, match="can be reached from other machines, and without TLS"):
        Bind.parse(text)


@pytest.mark.parametrize("text", ["127.0.0.1:8790", "localhost:8790", "[::1]:8790", "127.3.4.5:8790"])
def test_loopback_needs_no_tls(text):
    assert Bind.parse(text).is_loopback


def test_half_a_certificate_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--tls-cert and --tls-key"):
        Bind.parse("0.0.0.0:8790", certificate=tmp_path / "cert.pem")
    with pytest.raises(ConfigError, match="no usable certificate"):
        Bind.parse("0.0.0.0:8790", certificate=tmp_path / "cert.pem", private_key=tmp_path / "key.pem")


def test_an_address_that_is_taken_names_the_run_that_has_it():
    sock, bind = Bind.parse("127.0.0.1:0").open()
    with sock:
        with pytest.raises(ConfigError, match="in use, by another program: choose another port"):
            bind.open()
        with announced(presence(port=bind.port)), pytest.raises(ConfigError, match=r"by the run lab \(process \d+\)"):
            bind.open()


@pytest.fixture
def patient(monkeypatch):
    """Connecting by TLS takes the server's time too."""
    monkeypatch.setattr("longtail.jobs.client.CONNECT_S", 60.0)


@pytest.mark.parametrize("host", ["localhost", "gpu1.example.org"])
def test_by_tls_the_certificate_is_checked(tmp_path, patient, host):
    authority = trustme.CA()
    issued = authority.issue_cert(host)
    certificate, key, ca_file = (tmp_path / n for n in ("cert.pem", "key.pem", "ca.pem"))
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca_file)
    stranger = tmp_path / "stranger.pem"
    trustme.CA().cert_pem.write_to_path(stranger)
    sock, bind = Bind.parse("127.0.0.1:0", certificate=certificate, private_key=key).open()
    with listening(JobsApp(bench(tmp_path).service, token=TOKEN, run="lab", devices=[]), sock, bind):
        url = f"https://localhost:{bind.port}"
        for trusted in (stranger, None):
            with JobsClient(Endpoint(url, TOKEN, trusted)) as client, pytest.raises(ServerError, match="certificate"):
                client.list()
        with JobsClient(Endpoint(url, TOKEN, ca_file)) as client:
            if host == "localhost":
                assert client.list().run == "lab"
            else:
                with pytest.raises(ServerError, match=r"(?i)hostname"):
                    client.list()
        # Commands of the same user know the very certificate, whatever name it has.
        with JobsClient(Endpoint(bind.url, TOKEN, certificate, pinned=True)) as client:
            assert client.list().run == "lab"
        with JobsClient(Endpoint(f"http://127.0.0.1:{bind.port}", TOKEN)) as client, pytest.raises(ServerError):
            client.list()


def test_by_tls_whoever_does_not_close_keeps_nobody_out(tmp_path, patient):
    """The other end may take its time for the last words of TLS."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    certificate, key, ca_file = (tmp_path / n for n in ("cert.pem", "key.pem", "ca.pem"))
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca_file)
    context = ssl.create_default_context(cafile=ca_file)
    sock, bind = Bind.parse("127.0.0.1:0", certificate=certificate, private_key=key).open()
    app = JobsApp(bench(tmp_path).service, token=TOKEN, run="lab", devices=[])
    with contextlib.ExitStack() as stack:
        stack.enter_context(listening(app, sock, bind))
        for _ in range(2 * MOST_AT_ONCE):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", bind.port), timeout=30))
            secure = stack.enter_context(context.wrap_socket(plain, server_hostname="localhost"))
            secure.sendall(b"GET /v1/jobs HTTP/1.1\r\nhost: x\r\n\r\n")
        with JobsClient(Endpoint(f"https://localhost:{bind.port}", TOKEN, ca_file)) as client:
            assert client.list().run == "lab"
