"""`longtail doctor` on this machine, and on made-up ones."""

from __future__ import annotations

import importlib.metadata
import io
import json

import pytest
from rich.console import Console

from longtail.runtime.doctor import Finding, diagnose, print_findings, to_json
from longtail.runtime.machine import GIB, Gpu, Machine

ROOMY = Machine(cores=4, memory_bytes=64 * GIB, free_bytes=64 * GIB, shm_bytes=GIB)


def find(findings: list[Finding], name: str) -> Finding:
    return next(f for f in findings if f.name == name)


def test_a_machine_that_runs_these_tests_is_healthy(tmp_path):
    findings = diagnose(runs=tmp_path / "runs")
    assert [f for f in findings if f.status == "missing"] == []
    names = [f.name for f in findings]
    for name in ("python", "packages", "torch", "numba", "ray", "transformers", "cores", "memory", "runs", "cache"):
        assert name in names
    assert find(findings, "model tiny").status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_what_is_short_is_a_warning_with_advice(tmp_path):
    findings = diagnose(machine=Machine(1, GIB, GIB, shm_bytes=1 << 20), runs=tmp_path)
    for name, words in {"memory": "2 GiB", "/dev/shm": "--shm-size"}.items():
        assert find(findings, name).status == "warning"
        assert words in find(findings, name).advice
    assert find(findings, "cores").detail == "1; by default 1 worker"


def test_gpus_are_listed_or_said_to_be_hidden(tmp_path):
    gpu = Gpu(0, "GPU-1", "NVIDIA H100", 80 * GIB, 79 * GIB)
    seen = diagnose(machine=Machine(4, GIB, GIB, gpus=(gpu,)), runs=tmp_path)
    assert find(seen, "gpus").detail == "1: NVIDIA H100 (79 GiB free)"
    hidden = diagnose(machine=Machine(4, GIB, GIB, hidden_gpus="CUDA_VISIBLE_DEVICES=''"), runs=tmp_path)
    assert find(hidden, "gpus").status == "warning"
    assert find(seen, "torch").status == ("ok" if "CUDA" in find(seen, "torch").detail else "warning")


def test_a_folder_that_cannot_be_written_is_missing(tmp_path):
    (tmp_path / "file").write_text("")
    finding = find(diagnose(machine=ROOMY, runs=tmp_path / "file" / "runs"), "runs")
    assert finding.status == "missing"
    assert "runs_dir" in finding.advice


@pytest.mark.parametrize(("installed", "said"), [(None, "not installed"), ("0.1", "0.1 is installed, >=2.9 is needed")])
def test_a_package_that_is_absent_or_too_old_is_missing_with_the_command(monkeypatch, tmp_path, installed, said):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "torch":
            if installed is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = find(diagnose(machine=ROOMY, runs=tmp_path), "torch")
    assert finding == Finding("torch", "missing", said, "pip install 'torch>=2.9'")


def test_findings_print_as_a_table_and_as_json():
    findings = [Finding("a", "ok", "fine"), Finding("b", "missing", "gone", "Bring it back.")]
    out = io.StringIO()
    print_findings(findings, Console(file=out, width=80))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines[:3] == [["ok", "a", "fine"], ["missing", "b", "gone"], ["Bring", "it", "back."]]
    assert "cannot work here yet: b" in out.getvalue()
    assert json.loads(to_json(findings)) == {
        "ok": False,
        "findings": [
            {"name": "a", "status": "ok", "detail": "fine", "advice": ""},
            {"name": "b", "status": "missing", "detail": "gone", "advice": "Bring it back."},
        ],
    }
    assert json.loads(to_json(findings[:1]))["ok"]
