"""What a machine has, read from made-up /proc and /sys/fs/cgroup trees and nvidia-smi outputs."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from longtail.runtime.machine import Machine, cores, inspect_machine, memory, parse_gpus, visible_gpus

MIB = 1 << 20
SMI = """\
0, GPU-aaaa1111-0000, NVIDIA H100 80GB HBM3, 81559, 80000
1, GPU-bbbb2222-0000, NVIDIA H100 80GB HBM3, 81559, 70000
2, GPU-bbbb3333-0000, NVIDIA H100 80GB HBM3, 81559, 81000
"""


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def trees(tmp_path) -> tuple[Path, Path]:
    """(/proc/self, /sys/fs/cgroup)."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    return proc, cgroup


def test_without_cgroups_the_whole_machine_counts(trees):
    assert memory(*trees)[0] == psutil.virtual_memory().total
    assert cores(*trees) == len(os.sched_getaffinity(0))


def test_the_smallest_limit_of_all_enclosing_cgroups_counts(trees):
    proc, cgroup = trees
    write(proc, cgroup="0::/pod/container")
    write(
        cgroup / "pod" / "container", memory__max=str(900 * MIB), memory__current=str(300 * MIB), cpu__max="max 100000"
    )
    write(cgroup / "pod", memory__max=str(800 * MIB), memory__current=str(700 * MIB), cpu__max="150000 100000")
    (cgroup / "pod" / "memory.stat").write_text(f"anon 1\ninactive_file {50 * MIB}\n")
    assert memory(proc, cgroup) == (800 * MIB, 150 * MIB)
    assert cores(proc, cgroup) == 1


def test_version_1_cgroups_count_too(trees):
    proc, cgroup = trees
    write(proc, cgroup="4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/")
    write(cgroup / "memory" / "job", memory__limit_in_bytes=str(500 * MIB), memory__usage_in_bytes=str(600 * MIB))
    write(cgroup / "memory", memory__limit_in_bytes="9223372036854771712")
    write(cgroup / "cpu,cpuacct" / "job", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert memory(proc, cgroup) == (500 * MIB, 0)
    assert cores(proc, cgroup) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("0", [0]),
        ("1,0", [1, 0]),
        (" 2 , 1 ", [2, 1]),
        ("GPU-aaaa", [0]),
        ("GPU-bbbb", []),
        ("GPU-bbbb2,0", [1, 0]),
        ("0,7,1", [0]),
        ("0,0", [0]),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_visible_gpus_follow_the_rules_of_cuda(setting, indices):
    environment = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    assert [g.index for g in visible_gpus(parse_gpus(SMI), environment)] == indices


def test_lines_that_are_no_gpus_are_passed_over():
    assert parse_gpus("No devices were found\n\n[N/A], x, y, z, w\n") == ()
    assert [(g.memory_bytes, g.free_bytes) for g in parse_gpus(SMI)][1] == (81559 * MIB, 70000 * MIB)


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (2, 2), (3, 2), (4, 2), (8, 4)])
def test_by_default_there_is_a_worker_for_two_cores_or_for_each_gpu(count, workers):
    assert Machine(count, 0, 0).default_workers == workers
    assert Machine(count, 0, 0, parse_gpus(SMI)).default_workers == 3


def test_a_worker_gets_its_share_of_memory_or_the_smallest_gpu():
    assert Machine(2, 0, 600).free_bytes_per_worker(3) == 200
    assert Machine(2, 0, 600, parse_gpus(SMI)).free_bytes_per_worker(3) == 70000 * MIB


def test_this_machine_can_be_looked_at():
    machine = inspect_machine()
    assert machine.cores >= 1
    assert 0 <= machine.free_bytes <= machine.memory_bytes
