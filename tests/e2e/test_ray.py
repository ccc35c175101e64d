"""`longtail run` as a user runs it: real processes, Ray, signals and kill -9."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from longtail.core.events import Event, Rollback, RunEnded, Span, StageEntered, StepEnded, WorkerLost
from longtail.observe.store import read_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

JOBS = """\
workers: 2
pipelines:
  words: {model: tiny, task: reverse-text, steps: 6, seed: 3, reward: gate:score, reward_timeout_s: 600,
          algorithm: {group_size: 4}, rollout: {prompts: 6, max_tokens: 48}, train: {lr: 1e-3}, checkpoint: {every: 2}}
  chains: {model: tiny, task: collatz, steps: 3,
           algorithm: {group_size: 4}, rollout: {prompts: 4, max_tokens: 96}, train: {lr: 1e-3}, checkpoint: {every: 1}}
"""
REWARD = """\
import time
from pathlib import Path

HERE = Path(__file__).parent

def score(completions, **columns):
    with (HERE / "calls").open("ab") as calls:
        calls.write(b".")
    while (HERE / "hold").exists() and (HERE / "calls").stat().st_size > 18:
        time.sleep(0.02)
    return [float(len(set(c))) for c in completions]
"""
"""Called once for each prompt: where there is a file `hold`, step 3 of `words`, counted from 0, does not end."""
WITHIN_S = 400.0


class Run:
    """A `longtail run` process in a folder of its own, with access to its log and its children.

    With ``held``, `words` waits in step 3 until :meth:`let_go`.
    """

    def __init__(self, folder: Path, jobs: str = JOBS, *, held: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "jobs.yaml").write_text(jobs)
        (folder / "gate.py").write_text(REWARD)
        self._hold = folder / "hold"
        if held:
            self._hold.touch()
        self.folder = folder / "runs" / "jobs"
        self.listening: set[str] = set()
        self._seen = sum(1 for _ in self.events())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "longtail", "run", "jobs.yaml"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def events(self) -> Iterator[Event]:
        return read_events(self.folder) if (self.folder / "events.jsonl").exists() else iter(())

    def wait_for(self, wanted: Callable[[Event], bool], timeout_s: float = WITHIN_S) -> None:
        """Until this start of the run has logged such an event."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if any(wanted(e) for e in list(self.events())[self._seen :]):
                return
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.02)
        raise AssertionError("the event never came")

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def workers(self) -> list[psutil.Process]:
        return [p for p in self.descendants() if "ray::RayWorker" in command_line(p)]

    def let_go(self) -> None:
        self._hold.unlink()

    def end(self, timeout_s: float = WITHIN_S) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output


def command_line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):  # it has ended
        return " ".join(process.cmdline())
    return ""


def listens_at(process: psutil.Process) -> set[str]:
    with contextlib.suppress(psutil.Error):
        return {c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    return set()


def in_rollout(step: int) -> Callable[[Event], bool]:
    return lambda e: isinstance(e, StageEntered) and (e.pipeline, e.step, e.stage) == ("words", step, "rollout")


def assert_all_gone(processes: list[psutil.Process], timeout_s: float = 60) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert not alive, [command_line(p) for p in alive if p.is_running()]


def losses(run: Run, pipeline: str) -> dict[int, float]:
    return {e.step: e.metrics["loss"] for e in run.events() if isinstance(e, StepEnded) and e.pipeline == pipeline}


def assert_same_result(run: Run, undisturbed: Run) -> None:
    for pipeline, last in (("words", "step-000006"), ("chains", "step-000003")):
        assert losses(run, pipeline) == losses(undisturbed, pipeline)
        mine, theirs = (load_file(r.folder / pipeline / last / "model.safetensors") for r in (run, undisturbed))
        for name, tensor in theirs.items():
            assert torch.equal(mine[name], tensor), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    run = Run(tmp_path_factory.mktemp("undisturbed"), held=True)
    run.wait_for(in_rollout(0))
    processes = run.descendants()
    run.listening = set().union(*map(listens_at, processes))
    run.let_go()
    code, output = run.end()
    assert code == 0, output
    assert "words" in output
    assert "reward" in output
    assert_all_gone(processes)
    return run


def test_a_run_leaves_config_log_metrics_and_checkpoints(undisturbed):
    names = {p.name for p in undisturbed.folder.iterdir()}
    assert {"config.yaml", "events.jsonl", "tensorboard", "words", "chains"} <= names
    assert [p.name for p in sorted((undisturbed.folder / "words").iterdir())] == ["step-000004", "step-000006"]
    assert isinstance(list(undisturbed.events())[-1], RunEnded)


def test_nothing_of_a_local_run_listens_beyond_this_machine(undisturbed):
    assert undisturbed.listening
    assert undisturbed.listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_running_a_finished_job_again_does_nothing_and_shows_its_result(undisturbed):
    again = Run(undisturbed.folder.parent.parent)
    code, output = again.end()
    assert code == 0
    assert "nothing to do" in output
    assert "step-000006" in output.replace("\n", "").replace(" ", "")
    assert "\x1b" not in output


def test_checkpoints_load_in_transformers_and_give_the_same_logits(undisturbed):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from engine.reference import reference_logits
    from longtail.engine.checkpoint import load_model

    folder = undisturbed.folder / "words" / "step-000006"
    tokens = AutoTokenizer.from_pretrained(folder)("reverse abc:", return_tensors="pt")["input_ids"]
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits[0]
    ours = reference_logits(load_model(folder, dtype=torch.float32), tokens[0])
    torch.testing.assert_close(ours, hf, rtol=0, atol=1e-4)


def test_a_driver_killed_during_a_step_resumes_to_the_same_losses_and_weights(undisturbed, tmp_path):
    first = Run(tmp_path / "run", held=True)
    first.wait_for(in_rollout(3))
    processes = first.descendants()
    first.process.kill()
    first.end()
    first.let_go()
    assert_all_gone(processes)
    second = Run(tmp_path / "run")
    code, output = second.end()
    assert code == 0, output
    assert any(isinstance(e, Rollback) for e in second.events())
    assert_same_result(second, undisturbed)


def test_a_worker_killed_during_a_tensor_parallel_step_is_replaced_and_changes_nothing(undisturbed, tmp_path):
    """The undisturbed run samples narrow, since its two pipelines always have work for both workers."""
    run = Run(tmp_path / "run", JOBS.replace("max_tokens: 48", "max_tokens: 48, tp: 2"), held=True)
    run.wait_for(in_rollout(3))
    run.workers()[0].kill()
    run.let_go()
    code, output = run.end()
    assert code == 0, output
    assert any(isinstance(e, WorkerLost) for e in run.events())
    assert any(isinstance(e, Span) and e.tp == 2 for e in run.events())
    assert_same_result(run, undisturbed)


def test_a_signal_saves_and_ends_and_meanwhile_a_second_start_is_refused(tmp_path):
    endless = JOBS.replace("steps: 6", "steps: 100000").replace("steps: 3", "steps: 100000")
    first = Run(tmp_path / "run", endless)
    first.wait_for(in_rollout(3))
    second = Run(tmp_path / "run", endless)
    code, output = second.end()
    assert code == 2, output
    assert str(first.process.pid) in output
    processes = first.descendants()
    first.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, first.process.pid, os.WSTOPPED)
    first.process.send_signal(signal.SIGTERM)
    first.process.send_signal(signal.SIGINT)  # as `timeout` and some schedulers do: the same wish, said twice
    first.process.send_signal(signal.SIGCONT)
    code, output = first.end()
    assert code == 130, output
    assert_all_gone(processes)
    assert max(p.name for p in (first.folder / "words").iterdir()) >= "step-000003"
