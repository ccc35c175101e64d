"""What this machine gives us: cores, memory, GPUs and shared memory, as limited by affinity, cgroups and environment.

Reading is separate from parsing, so that tests can bring their own ``/proc`` and ``/sys/fs/cgroup``.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """A visible GPU. ``index`` and ``uuid`` are the driver's."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """``cores``, ``memory_bytes`` and ``free_bytes`` are what this process may use, not what is built in.

    ``shm_bytes`` is the free part of ``/dev/shm``, None where there is none. ``hidden_gpus`` is the setting
    that hides all GPUs of a machine that has some, or is empty.
    """

    cores: int
    memory_bytes: int
    free_bytes: int
    gpus: tuple[Gpu, ...] = ()
    shm_bytes: int | None = None
    hidden_gpus: str = ""

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def default_workers(self) -> int:
        """One per GPU, or one per two cores (two on a machine with two cores)."""
        return len(self.gpus) or max(self.cores // 2, min(2, self.cores))

    def free_bytes_per_worker(self, workers: int) -> int:
        """Memory for one of ``workers``: of the smallest visible GPU, or its share of main memory."""
        return min(gpu.free_bytes for gpu in self.gpus) if self.gpus else self.free_bytes // workers


def inspect_machine() -> Machine:
    """Look at this machine, now. Imports no torch and creates no CUDA context."""
    total, free = memory()
    everything = parse_gpus(_nvidia_smi())
    gpus = visible_gpus(everything, os.environ)
    hidden = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}" if everything and not gpus else ""
    shm = Path("/dev/shm")
    return Machine(cores(), total, free, gpus, shutil.disk_usage(shm).free if shm.is_dir() else None, hidden)


def cores(proc: Path = Path("/proc/self"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, capped by the cgroup's CPU quota; at least 1."""
    count: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups(proc, cgroup, "cpu"):
        quota, period = _cpu_quota(folder)
        if quota > 0 and period > 0:
            count = min(count, quota / period)
    return max(1, math.floor(count))


def memory(proc: Path = Path("/proc/self"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """(total, free) bytes that this process may use: the machine's, capped by every enclosing cgroup.

    What a cgroup holds as inactive file cache counts as free, as the kernel drops it first.
    """
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for folder in _cgroups(proc, cgroup, "memory"):
        v2 = (folder / "memory.max").exists()
        limit = _number(folder / ("memory.max" if v2 else "memory.limit_in_bytes"))
        if limit is None or limit >= machine.total:
            continue
        used = _number(folder / ("memory.current" if v2 else "memory.usage_in_bytes")) or 0
        cache = _statistic(folder / "memory.stat", "inactive_file" if v2 else "total_inactive_file")
        total, free = min(total, limit), min(free, limit - used + cache)
    return total, max(0, free)


def parse_gpus(csv: str) -> tuple[Gpu, ...]:
    """GPUs from the output of ``nvidia-smi --query-gpu=index,uuid,name,memory.total,memory.free`` (CSV, MiB)."""
    gpus = []
    for line in csv.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5 and all(fields[i].isdigit() for i in (0, 3, 4)):
            gpus.append(Gpu(int(fields[0]), fields[1], fields[2], int(fields[3]) << 20, int(fields[4]) << 20))
    return tuple(gpus)


def visible_gpus(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` shows, in its order.

    CUDA's rules: entries are indices or beginnings of UUIDs; the list ends at the first entry that names no GPU.
    """
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return gpus
    shown: list[Gpu] = []
    for entry in (e.strip() for e in setting.split(",")):
        if entry.isdigit():
            found = [g for g in gpus if g.index == int(entry)]
        else:
            found = [g for g in gpus if len(entry) > 4 and g.uuid.startswith(entry)]
        if len(found) != 1 or found[0] in shown:
            break
        shown.append(found[0])
    return tuple(shown)


def _nvidia_smi() -> str:
    command = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _cgroups(proc: Path, root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of all that enclose it, for version 2 and version 1."""
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        folder = base / path.lstrip("/")
        for candidate in [folder, *folder.parents]:
            if candidate.is_dir():
                yield candidate
            if candidate == base:
                break


def _cpu_quota(folder: Path) -> tuple[float, float]:
    """(quota, period) in microseconds; (0, 0) without a limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return (float(quota), float(period)) if quota != "max" else (0.0, 0.0)
    except (OSError, ValueError):
        return float(_number(folder / "cpu.cfs_quota_us") or 0), float(_number(folder / "cpu.cfs_period_us") or 0)


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None if it says ``max`` or cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        return int(fields.get(name, 0))
    except (OSError, ValueError):
        return 0
