"""`longtail serve`, `gateway` and `keys` on the command line: one clear sentence for what cannot work, and a graceful
end."""

import json
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from longtail.cli import app
from openai_server import Server, by_length

UPSTREAM = ["gateway", "--upstream", "http://127.0.0.1:1", "--port", "0"]


def refused(*words, env=None):
    """The exit code and what was said."""
    result = CliRunner().invoke(app, list(words), env=env)
    return result.exit_code, " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gateway"], "--upstream"),
        (["gateway", "--upstream", "gpu1:8000"], "gpu1:8000"),
        (["gateway", "--upstream", "ftp://gpu1"], "ftp://gpu1"),
        (["gateway", "--upstream", "http://user:pw@gpu1"], "user name or password"),
        (["gateway", "--upstream", "http://a:1", "--upstream", "http://a:1/"], "given twice"),
        ([*UPSTREAM, "--window", "many"], "--window many"),
        ([*UPSTREAM, "--window", "0"], "--window 0"),
        ([*UPSTREAM, "--mode", "push"], "push"),
        ([*UPSTREAM, "--max-head-start", "-1"], "--max-head-start"),
        ([*UPSTREAM, "--max-head-start", "nan"], "--max-head-start"),
        ([*UPSTREAM, "--keys", "nowhere.yaml", "--trust-priority"], "--trust-priority"),
        ([*UPSTREAM, "--ranker", "nowhere"], "nowhere"),
        ([*UPSTREAM, "--keys", "nowhere.yaml"], "nowhere.yaml: the keys file cannot be read"),
        ([*UPSTREAM, "--host", "0.0.0.0"], "open to the network"),
        ([*UPSTREAM, "--tls-cert", "cert.pem"], "--tls-key"),
        ([*UPSTREAM, "--record", "no/such/folder/file.jsonl"], "file.jsonl"),
        ([*UPSTREAM, "--record-prompts"], "--record-prompts needs --record"),
        ([*UPSTREAM, "--upstream-key-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        ([*UPSTREAM, "--upstream-ca", "nowhere.pem"], "nowhere.pem"),
        ([*UPSTREAM, "--idle-within", "0"], "--idle-within"),
        (["serve", "no-such-model-at-all"], "no-such-model-at-all"),
        (["serve", "tiny", "--kv-memory", "0"], "--kv-memory"),
        (["serve", "tiny", "--max-context", "1"], "--max-context"),
        (["serve", "tiny", "--slots", "0"], "--slots"),
        (["serve", "tiny", "--tls-key", "key.pem"], "--tls-cert"),
        (["keys", "new", "two words"], "key name"),
        (["keys", "new", "a", "--weight", "0"], "--weight"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence_before_anything_starts(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, output = refused(*words)
    assert code == 2, output
    assert says in output
    assert "Traceback" not in output


def test_a_new_key_goes_into_the_file_as_it_is_printed(tmp_path):
    result = CliRunner().invoke(app, ["keys", "new", "team-a", "--weight", "3"])
    assert result.exit_code == 0
    (found,) = yaml.safe_load("keys:\n" + result.stdout)["keys"]
    assert (found["name"], found["weight"]) == ("team-a", 3)
    key = re.search(r"lt-\S+", result.stderr).group()
    assert key not in result.stdout


class Command:
    """A server command as a process; ``url`` is what it says."""

    def __init__(self, *words):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "longtail", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            found = re.search(r"http://[\d.]+:\d+", line)
            if " at http" in line and found:
                self.url = found.group()
                return
        raise AssertionError(self.said)

    def end(self, sig=signal.SIGTERM):
        self.process.send_signal(sig)
        rest, _ = self.process.communicate(timeout=120)
        self.said += rest
        return self.process.returncode


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_gateway_serves_until_it_is_told_to_stop_and_loses_no_record(sig, tmp_path):
    record = tmp_path / "served.jsonl"
    with Server(by_length) as upstream:
        words = ["--window", "4", "--record", str(record), "--record-prompts"]
        gateway = Command("gateway", "--upstream", upstream.url, "--port", "0", *words)
        try:
            body = {"model": "m", "prompt": "twelve chars"}
            answer = httpx.post(gateway.url + "/v1/completions", json=body, timeout=120)
            assert answer.json()["usage"]["completion_tokens"] == 12
            assert httpx.get(gateway.url + "/health", timeout=120).json()["ok"] is True
        finally:
            code = gateway.end(sig)
        assert code == 0, gateway.said
        assert "Traceback" not in gateway.said
        assert json.loads(record.read_text())["output_tokens"] == 12


@pytest.mark.slow
def test_our_server_comes_up_from_the_command_line():
    server = Command("serve", "tiny", "--port", "0", "--kv-memory", "0.05")
    try:
        answer = httpx.post(
            server.url + "/v1/completions", json={"model": "tiny", "prompt": "abc", "max_tokens": 3}, timeout=120
        )
        assert answer.status_code == 200, answer.text
    finally:
        code = server.end()
    assert code == 0, server.said
    assert "Traceback" not in server.said
