"""What all benches share: arms as child processes, the machine, the result line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def parser(description: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="a smaller run, under 3 minutes; writes no result file")
    return p


def machine() -> dict[str, Any]:
    """The machine in words that matter to a figure."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def commit() -> str:
    out = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return out.stdout.strip() or "unknown"


class Arm:
    """A child process that answers one JSON line for each JSON line; its weights stay loaded between questions.

    The child runs ``script --arm NAME`` and must print ``{"ready": ...}`` first. Lines that are not JSON objects
    are its chatter and go to stderr.
    """

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        self.name = name
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
        )
        self.about = self._read()

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith('{"'):
                return json.loads(line)
            print(f"[{self.name}] {line.rstrip()}", file=sys.stderr)
        raise RuntimeError(f"arm {self.name} ended with exit code {self._child.wait()}")

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._child.kill()


def answer_questions(ready: dict[str, Any], answer) -> None:
    """The child's side of :class:`Arm`: ``answer(**question) -> dict`` for each line of stdin."""
    print(json.dumps({"ready": True, **ready}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


def target(name: str, value: float | None, goal: str, met: bool | None) -> dict[str, Any]:
    return {"name": name, "value": None if value is None else round(value, 4), "target": goal, "met": met}


def finish(bench: str, *, quick: bool, seeds: Sequence[int], arms: dict, targets: list[dict], **more: Any) -> None:
    """Print the result as the last line, and keep it as the committed one when it was a full run."""
    result = {
        "bench": bench,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "quick": quick,
        "seeds": list(seeds),
        "arms": arms,
        "targets": targets,
        **more,
    }
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{bench}.json").write_text(json.dumps(result, indent=1) + "\n")
    for t in targets:
        mark = {True: "met", False: "MISSED", None: "not measured"}[t["met"]]
        print(f"target {t['name']}: {t['value']} ({t['target']}) {mark}", flush=True)
    print(json.dumps(result), flush=True)
