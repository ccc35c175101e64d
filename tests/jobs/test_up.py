"""What `longtail up` asks of the machine and of its run folder."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from jobs.fake_controller import GIB, job
from longtail import up
from longtail.cli import app
from longtail.core.errors import ConfigError
from longtail.jobs.halves import cluster_file, submitted
from longtail.jobs.rules import BUILT_IN_REWARDS
from longtail.observe.lock import lock_run
from longtail.rl import rewards
from longtail.runtime.check import check_jobs
from longtail.runtime.machine import Machine


def machine(free: int) -> Machine:
    return Machine(cores=2, memory_bytes=free, free_bytes=free)


def test_memory_that_others_took_since_the_start_counts_and_our_own_does_not(monkeypatch):
    monkeypatch.setattr(up, "memory", lambda: (16 * GIB, 5 * GIB))
    monkeypatch.setattr(up, "_ours", lambda: 3 * GIB)
    assert up.foreign_bytes(machine(10 * GIB)) == 2 * GIB - up.SLACK_BYTES
    assert up.foreign_bytes(machine(8 * GIB)) == 0
    assert up.foreign_bytes(machine(4 * GIB)) == 0  # others have given some back


def test_the_memory_of_a_cluster_is_not_known(tmp_path):
    (tmp_path / "c.yaml").write_text("ray: auto\nworkers: 2\n")
    there = cluster_file(tmp_path / "c.yaml")
    assert up._ledger(there, machine(GIB), 2)._free_bytes is None
    here = up._ledger(cluster_file(None), machine(8 * GIB), 2)
    assert here._free_bytes is not None
    assert here._free_bytes < 4 * GIB


def test_a_second_run_of_one_name_is_refused_with_who_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with lock_run(tmp_path / "runs" / "lab"):
        result = CliRunner().invoke(app, ["up", "--name", "lab", "--workers", "1"])
    assert result.exit_code == 2
    assert "runs/lab is in use by process" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workers: two\n", "c.yaml:1: workers = 'two': must be a whole number"),
        ("workers: 2\nworkers: 3\n", "c.yaml:2: the key 'workers' appears twice, first on line 1."),
        ("workers: 0x2\n", "c.yaml:1: workers = '0x2': must be a whole number"),
        ("- workers\n", "c.yaml: the file is not a mapping of keys"),
        ("steps: 3\n", "c.yaml:1: unknown key 'steps'"),
        (job("a"), "c.yaml:1: pipelines: `longtail up` starts workers only"),
    ],
)
def test_what_is_wrong_with_a_cluster_file_is_told_with_its_line(tmp_path, monkeypatch, text, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        cluster_file(tmp_path / "c.yaml")
    assert says in str(refused.value)


def test_a_cluster_file_may_be_empty_or_absent(tmp_path):
    (tmp_path / "lab.yaml").write_text("")
    assert cluster_file(tmp_path / "lab.yaml").run_name == "lab"
    assert cluster_file(None).run_name == "up"
    assert cluster_file(None, name="x", workers=3).jobs.workers == 3
    assert cluster_file(None).jobs.pipelines == {}


def test_a_submitted_job_runs_none_of_its_code_where_it_is_checked_and_expects_company(tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')\n")
    cluster = cluster_file(None, workers=2)
    one = submitted(job("a", "reward: mine:f"), "job.yaml", cluster=cluster, base=tmp_path)
    found = check_jobs(one, machine=machine(16 * GIB), submitted=True)
    with pytest.raises(ConfigError, match="imported"):
        check_jobs(one, machine=machine(16 * GIB))
    plain = submitted(job("a"), "job.yaml", cluster=cluster, base=tmp_path)
    alone = check_jobs(plain, machine=machine(16 * GIB))
    assert found.pipelines["a"].memory.kv_wanted > alone.pipelines["a"].memory.kv_wanted


def test_the_built_in_rewards_are_those_there_are():
    kinds = {
        f"longtail.rl.rewards:{name}"
        for name, value in vars(rewards).items()
        if getattr(value, "__module__", "") == rewards.__name__
        and list(getattr(getattr(value, "__code__", None), "co_varnames", ()))[:2] == ["prompts", "completions"]
        and not name.startswith("_")
    }
    assert kinds - {"longtail.rl.rewards:call_rewards"} == BUILT_IN_REWARDS
