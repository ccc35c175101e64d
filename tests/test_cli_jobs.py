"""`longtail up`, `submit`, `jobs` and `stop` on the command line; the slow ones with real workers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from jobs.fake_controller import bench, job
from jobs.serving import TOKEN, served
from longtail.cli import app
from longtail.core.events import RunEnded, StepEnded
from longtail.jobs.client import JobsClient, find
from longtail.jobs.presence import Presence, announced, others
from longtail.jobs.wire import JobStatus
from longtail.observe.store import read_events


@pytest.fixture(autouse=True)
def _a_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("LONGTAIL_DEBUG", raising=False)


def invoke(*words: str):
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def up(tmp_path):
    """A run that is up, on a fake controller, and that commands find by themselves."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with served(bench(tmp_path)) as up:
        here = Presence(run="lab", folder=str(tmp_path), url=up.url, pid=os.getpid(), token_file=str(token))
        with announced(here):
            yield up


def test_help_teaches_by_example():
    for command, words in (
        ("up", ("longtail up --workers 2 --allow my_rewards", "longtail stop sums", "docs/jobs.md")),
        ("submit", ("longtail submit job.yaml --wait --to lab", "2 refused")),
        ("jobs", ("longtail jobs --json",)),
        ("stop", ("Waits until it is over",)),
    ):
        text = invoke(command, "--help").output
        assert all(word in text for word in words), text


def test_submit_look_and_stop(up, tmp_path):
    Path("job.yaml").write_text(job("sums"))
    result = invoke("submit", "job.yaml")
    assert result.exit_code == 0, result.output
    assert result.stdout == "sums: admitted, 3 steps\nwatch with `longtail jobs`, end with `longtail stop sums`\n"
    up.bench.controller.begin("sums")
    up.bench.controller.step("sums", 0, reward=0.25)
    table = invoke("jobs").stdout.splitlines()
    assert table[0] == f"lab: 1 worker (cpu x1), {tmp_path / 'run'}"
    assert table[1].split() == ["job", "state", "step", "reward", "since", "error"]
    assert table[2].split()[:5] == ["sums", "running", "(rollout)", "1/3", "0.25"]
    (listed,) = json.loads(invoke("jobs", "--json").stdout)["jobs"]
    assert (listed["name"], listed["state"], listed["step"]) == ("sums", "running", 1)

    def stop(name: str) -> None:
        up.bench.controller.end(name, "interrupted", step=1)

    up.bench.controller.stop = stop
    stopped = invoke("stop", "sums")
    assert stopped.exit_code == 0, stopped.output
    assert stopped.stdout == "sums: stopped at step 1 of 3\n"


def test_what_is_refused_is_told_line_by_line_with_exit_code_2(up):
    text = job("sums", "stpes: 3\nseed: x").replace("model: tiny", "model: true")
    Path("job.yaml").write_text("\ufeff" + text.replace("\n", "\r\n"), "utf-8")
    result = invoke("submit", "job.yaml")
    assert result.exit_code == 2
    assert [line.partition(" ")[0] for line in result.stderr.splitlines()] == [f"job.yaml:{n}:" for n in (3, 8, 9)]
    assert result.stdout == ""
    assert invoke("stop", "sums").exit_code == 2
    assert invoke("submit", "nowhere.yaml").exit_code == 2
    assert up.bench.controller.plans == []


def test_wait_gives_the_exit_code_of_the_job(up):
    Path("job.yaml").write_text(job("sums"))

    def submit(ends: str, error: str | None):
        def at_once(plan) -> None:
            up.bench.controller.begin(plan.name)
            up.bench.controller.end(plan.name, ends, error=error)

        up.bench.controller.submit = at_once
        return invoke("submit", "job.yaml", "--wait")

    finished = submit("finished", None)
    assert (finished.exit_code, finished.stdout.splitlines()[-1]) == (0, "sums: finished at step 3 of 3")
    failed = submit("failed", "sums: the reward is wrong.")
    assert (failed.exit_code, failed.stdout.splitlines()[-1]) == (
        1,
        "sums: failed at step 3 of 3: the reward is wrong.",
    )


def test_without_a_run_commands_say_what_to_do():
    Path("job.yaml").write_text(job("sums"))
    for words in (("submit", "job.yaml"), ("jobs",), ("stop", "sums")):
        result = invoke(*words)
        assert result.exit_code == 2
        assert "no `longtail up` of yours runs on this machine: start one" in result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--bind", "0.0.0.0:8790"], "without TLS"),
        (["--bind", "0.0.0.0:8790", "--tls-cert", "cert.pem"], "--tls-key"),
        (["--bind", "nowhere"], "must be HOST:PORT"),
        (["--allow", "my rewards"], "--allow 'my rewards'"),
        (["--allow", "my_rewards.py:f"], "--allow 'my_rewards.py:f'"),
        (["--jobs-dir", "nowhere"], "--jobs-dir nowhere: there is no such folder"),
        (["--workers", "100000"], "workers = 100000: this machine has"),
        (["--name", "a/b"], "cannot be a folder name"),
        (["--token-file", "loose"], "others could read this token"),
        (["nowhere.yaml"], "there is no such file"),
        (["jobs.yaml"], "jobs.yaml:1: pipelines: `longtail up` starts workers only"),
        (["misspelt.yaml"], "misspelt.yaml:1: unknown key 'wokers'; did you mean 'workers'?"),
    ],
)
def test_what_cannot_start_is_refused_in_a_sentence_before_anything_starts(words, says):
    Path("jobs.yaml").write_text(job("a"))
    Path("misspelt.yaml").write_text("wokers: 2\n")
    Path("loose").write_text(TOKEN)
    Path("loose").chmod(0o644)
    result = invoke("up", *words)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.split())


# -- with real workers ------------------------------------------------------------------------------------------------

WORDS = """\
pipelines:
  words: {model: tiny, task: reverse-text, steps: 4, seed: 3,
          algorithm: {group_size: 4}, rollout: {prompts: 6, max_tokens: 48}, train: {lr: 1e-3}, checkpoint: {every: 2}}
"""
CHAINS = """\
pipelines:
  chains: {model: tiny, task: collatz, steps: 100000, reward: mine:score,
           algorithm: {group_size: 4}, rollout: {prompts: 4, max_tokens: 96}, train: {lr: 1e-3}}
"""
REWARD = "def score(prompts, completions, **columns):\n    return [float(len(set(c))) for c in completions]\n"
CLUSTER = "workers: 2\ncosts: costs\n"
WITHIN_S = 400.0


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "longtail", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=WITHIN_S,
    )


class Up:
    """A `longtail up` process in the working directory."""

    def __init__(self) -> None:
        self._log = Path("up.log").open("a+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "longtail",
                "up",
                "cluster.yaml",
                "--name",
                "up",
                "--bind",
                "127.0.0.1:0",
                "--allow",
                "mine",
            ],
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.until(lambda: bool(others()))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert self.process.poll() is None, Path("up.log").read_text()
            assert time.monotonic() < deadline, Path("up.log").read_text()
            time.sleep(0.2)

    def job(self, name: str) -> JobStatus:
        with JobsClient(find(None)) as client:
            return client.job(name)

    def end(self, number: int) -> int:
        """Signal it; everything that it started must be gone."""
        started = [self.process, *psutil.Process(self.process.pid).children(recursive=True)]
        self.process.send_signal(number)
        code = self.process.wait(WITHIN_S)
        _, alive = psutil.wait_procs(started[1:], timeout=60)
        assert not alive, [" ".join(p.cmdline()) for p in alive if p.is_running()]
        return code


def weights(run: str, name: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(Path("runs") / run / name / f"step-{step:06d}" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_jobs_come_and_go_and_each_learns_the_same_bits_as_alone():
    files = {"words.yaml": WORDS, "chains.yaml": CHAINS, "mine.py": REWARD}
    files |= {"cluster.yaml": CLUSTER, "alone.yaml": CLUSTER + WORDS}
    for name, text in files.items():
        Path(name).write_text(text)
    alone = command("run", "alone.yaml")
    assert alone.returncode == 0, alone.stdout + alone.stderr

    up = Up()
    assert invoke("submit", "chains.yaml").exit_code == 0
    up.until(lambda: up.job("chains").step >= 1)
    finished = invoke("submit", "words.yaml", "--wait")
    assert finished.exit_code == 0, finished.output
    refused = invoke("submit", "chains.yaml")
    assert (refused.exit_code, "the name chains is in use" in refused.stderr) == (2, True)
    stopped = invoke("stop", "chains")
    assert stopped.exit_code == 0, stopped.output
    step = up.job("chains").step
    assert (up.job("chains").state, weights("up", "chains", step) != {}) == ("stopped", True)
    for name, tensor in weights("alone", "words", 4).items():
        assert torch.equal(tensor, weights("up", "words", 4)[name]), name

    # The name of a job that was stopped goes on from its checkpoint, and after kill -9 at the next start.
    assert f"step {step} of" in invoke("submit", "chains.yaml").stdout
    up.until(lambda: up.job("chains").step > step)
    children = psutil.Process(up.process.pid).children(recursive=True)
    up.process.kill()
    up.process.wait()
    psutil.wait_procs(children, timeout=60)
    assert invoke("jobs").exit_code == 2
    again = Up()
    again.until(lambda: again.job("chains").state == "running")
    assert again.job("words").state == "finished"
    assert again.end(signal.SIGINT) == 0, Path("up.log").read_text()
    assert "Traceback" not in Path("up.log").read_text()
    assert others() == []
    events = list(read_events("runs/up"))
    assert isinstance(events[-1], RunEnded)
    assert [e.step for e in events if isinstance(e, StepEnded) and e.pipeline == "words"] == [0, 1, 2, 3]
    assert re.search(r"words\s+4 ", Path("up.log").read_text())
