"""`longtail profile`: what it prints and writes, and what it says when it cannot."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inline_cluster import InlineCluster
from longtail.cli import app
from longtail.cluster.measure_key import model_name
from longtail.costs import interference_file, table_file
from longtail.costs.interference import UNKNOWN
from longtail.costs.interference_file import Half, PairTable
from longtail.costs.table import TableKey
from longtail.engine.checkpoint import check_model
from longtail.engine.models import resolve_model

SMALL = """\
workers: 1
pipelines:
  rev:
    model: tiny
    task: reverse-text
    rollout: {prompts: 2, max_tokens: 8}
    algorithm: {group_size: 2}
    steps: 1
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("LONGTAIL_DEBUG", raising=False)


@pytest.fixture
def clusters(monkeypatch) -> list[InlineCluster]:
    """Workers are threads of this process; lists those that were started."""
    import longtail.launch

    started: list[InlineCluster] = []

    def start(checked, jobs, *, tell):
        started.append(InlineCluster(checked.workers, communicator=jobs.communicator))
        return started[-1]

    monkeypatch.setattr(longtail.launch, "start_cluster", start)
    return started


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["profile", *arguments])


def write(text: str = SMALL, path: str = "jobs.yaml") -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return path


def test_a_coarse_profile_is_printed_saved_and_drawn(clusters):
    result = invoke(write(), "--coarse", "--out", "costs", "--plot", "plots/steps.png")
    assert result.exit_code == 0, result.output
    (path,) = Path("costs").iterdir()
    table = table_file.load(path)
    assert table.detail == "coarse"
    assert table.key.model == model_name(check_model(resolve_model("tiny")))
    assert path.name.endswith(".coarse.json")
    assert f"{path}: saved" in result.stderr
    for words in (table.key.model, "batch", "TP 1", "tokens/s", "training"):
        assert words in result.stdout
    assert Path("plots/steps.png").read_bytes().startswith(b"\x89PNG")
    assert not clusters[0]._slots[0].tenants


def test_a_model_that_pipelines_share_is_measured_once_for_the_one_with_most_samples(clusters):
    more = SMALL + SMALL.split("pipelines:\n")[1].replace("rev:", "big:").replace("prompts: 2", "prompts: 3")
    other = SMALL.split("pipelines:\n")[1].replace("rev:", "wide:") + "    dtype: float64\n"
    result = invoke(write(more + other), "--coarse", "--out", "costs")
    assert result.exit_code == 0, result.output
    tables = [table_file.load(path) for path in Path("costs").iterdir()]
    assert sorted(table.key.dtype for table in tables) == ["float32", "float64"]
    opened = [command.pipeline for _, command in clusters[0].sent if type(command).__name__ == "OpenPipeline"]
    assert opened == ["big", "wide"]


@pytest.mark.parametrize("coarse", [True, False])
def test_each_pair_of_models_is_measured_unless_it_is_to_be_quick(clusters, monkeypatch, coarse):
    from longtail.cluster import measure
    from longtail.runtime.profiler import Profiler

    monkeypatch.setattr(measure, "FINE", measure.COARSE)
    keys = [
        TableKey(machine="m", model="tiny", dtype=dtype, communicator="local", threads=1)
        for dtype in ("float32", "float64")
    ]
    rows = [{"train": {"prefill": (1.3, 1.25, 1.1)}}, {}]
    halves = tuple(Half(key=key, same_worker=row, neighbour_worker={}) for key, row in zip(keys, rows, strict=True))
    asked = []

    def profile_pair(self, first, second, *, tell):
        asked.append((first.name, second.name))
        return PairTable(measured="now", halves=halves)

    monkeypatch.setattr(Profiler, "profile_pair", profile_pair)
    other = SMALL.split("pipelines:\n")[1].replace("rev:", "wide:") + "    dtype: float64\n"
    same = SMALL.split("pipelines:\n")[1].replace("rev:", "again:")
    result = invoke(write(SMALL + same + other), "--out", "costs", *["--coarse"] * coarse)
    assert result.exit_code == 0, result.output
    found = interference_file.find(Path("costs"), keys)
    if coarse:
        assert asked == []
        assert "beside" not in result.stdout
        assert found.interference == UNKNOWN
        return
    assert asked == [("rev", "wide")]
    assert "tiny, float32 beside tiny, float64" in result.stdout
    assert "1.25 x" in result.stdout
    assert f"costs/{interference_file.file_name(*keys)}: saved" in result.stderr
    assert found.interference == PairTable(measured="now", halves=halves).interference


def test_the_job_file_says_where_tables_are_kept(clusters):
    result = invoke(write(SMALL + "costs: here\n", "sub/jobs.yaml"), "--coarse")
    assert result.exit_code == 0, result.output
    assert len(list(Path("sub/here").iterdir())) == 1


def test_by_default_they_are_kept_in_the_cache(clusters, monkeypatch, tmp_path):
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    assert invoke(write(), "--coarse").exit_code == 0
    (path,) = (tmp_path / "cache" / "costs").iterdir()
    assert json.loads(path.read_text())["detail"] == "coarse"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "nowhere.yaml: there is no such file"),
        (SMALL + "    stpes: 3\n", "jobs.yaml:9: pipelines.rev: unknown key 'stpes'; did you mean 'steps'?"),
        (SMALL.replace("tiny", "tinny"), "there is no model 'tinny'; did you mean 'tiny'?"),
    ],
)
def test_bad_jobs_are_exit_code_2_and_nothing_is_started(clusters, text, says):
    result = invoke("nowhere.yaml" if text is None else write(text), "--out", "costs")
    assert result.exit_code == 2
    assert says in result.stderr
    assert not clusters
    assert not Path("costs").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--out", "file/costs"], "--out file/costs: cannot be written"),
        (["--plot", "file/steps.png"], "--plot file: cannot be written"),
        (["--plot", "."], "this is a folder; give a file"),
    ],
)
def test_what_cannot_be_written_is_told_before_anything_is_measured(clusters, arguments, says):
    Path("file").touch()
    result = invoke(write(), *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert not clusters


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_told_before_anything_is_measured(clusters):
    Path("closed").mkdir(mode=0o500)
    result = invoke(write(), "--out", "closed/costs")
    assert result.exit_code == 2
    assert "Permission denied" in result.stderr
    assert not clusters


def test_what_fails_while_measuring_is_exit_code_1_and_the_cluster_is_closed(clusters, monkeypatch):
    from longtail.cluster import measure
    from longtail.core.errors import CapacityError

    def fail(*arguments, **options):
        raise CapacityError("there is too little of everything")

    monkeypatch.setattr(measure, "measure", fail)
    result = invoke(write(), "--coarse", "--out", "costs")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "rev could not be profiled: there is too little of everything"
    assert not any(thread.is_alive() for thread in clusters[0]._threads)


@pytest.mark.parametrize("load", [0.0, 99.0])
def test_a_busy_machine_is_worth_a_warning(clusters, monkeypatch, load):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    result = invoke(write(), "--coarse", "--out", "costs")
    assert result.exit_code == 0, result.output
    assert ("this machine is busy (load 99.0" in result.stderr) == (load > 0)


def test_help_teaches_by_example():
    out = invoke("--help").output
    assert "longtail profile jobs.yaml --plot steps.png" in out
    assert "measuring failed" in out
