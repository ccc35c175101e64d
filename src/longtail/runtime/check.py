"""What can be known before a run starts: models, tasks, rewards, prompt lengths, workers, memory.

Every problem of every pipeline is found in one go and told with file, line and key. What is only unwise is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from longtail.core.comm import CPU_COMMUNICATOR
from longtail.core.errors import CapacityError, ConfigError
from longtail.runtime.check_pipeline import CheckedPipeline, Findings, check_pipeline
from longtail.runtime.jobfile import JobFile
from longtail.runtime.machine import Machine, inspect_machine
from longtail.runtime.memory import PROCESS_BYTES, admit, block_bytes, gib

WORKERS_PER_CORE = 4
"""More workers than cores are slow but useful for trying things out; more than this many cannot be meant."""


@dataclass(frozen=True)
class CheckedJobs:
    """Jobs that can start. ``device`` is what workers run on, ``cpu`` or ``cuda``."""

    workers: int
    threads_per_worker: int
    device: str
    pipelines: dict[str, CheckedPipeline]
    warnings: tuple[str, ...]

    def describe(self) -> Iterator[str]:
        """One line for each pipeline: model, prompts, memory."""
        workers = f"{self.workers} {self.device} worker{'s' * (self.workers > 1)}"
        for name, p in self.pipelines.items():
            m, size = p.memory, "endlessly many" if p.task.size is None else f"{p.task.size:,}"
            yield (
                f"{name}: {p.model.family}, {p.parameters / 1e6:.1f} M parameters; "
                f"{size} prompts of up to {p.longest_prompt:,} tokens; on each of {workers} "
                f"{gib(m.resident - m.training + m.kv)}, of which KV {gib(m.kv)}, "
                f"and up to {gib(m.most_training)} more while training"
            )


def check_jobs(job_file: JobFile, *, machine: Machine | None = None, submitted: bool = False) -> CheckedJobs:
    """Check everything that can be known before a run starts; may download or convert models, starts no process.

    With ``submitted`` other jobs may come to the same workers, and no code of the user's runs in this process:
    :meth:`RewardPool.open` finds the faults of rewards.
    Raises :class:`ConfigError` with all problems, one per line in the order of the file.
    """
    machine = machine or inspect_machine()
    findings = Findings(job_file)
    workers = _check_workers(findings, machine)
    checked = {
        name: check_pipeline(findings, name, workers, device=machine.device, submitted=submitted)
        for name in job_file.jobs.pipelines
    }
    pipelines = {name: p for name, p in checked.items() if p is not None}
    if len(pipelines) == len(checked):
        pipelines = _admit(findings, pipelines, workers, machine)
    if findings.problems:
        raise ConfigError("\n".join(text for _, text in sorted(findings.problems, key=lambda problem: problem[0])))
    return CheckedJobs(workers, job_file.jobs.threads_per_worker, machine.device, pipelines, tuple(findings.warnings))


def _check_workers(findings: Findings, machine: Machine) -> int:
    """The number of workers, against what this machine has (a cluster is asked when the run starts)."""
    jobs = findings.job_file.jobs
    workers = jobs.workers or machine.default_workers
    if jobs.ray != "local":
        if jobs.workers is None:
            findings.problem(
                "say how many workers of the cluster to use, with the key 'workers'", "ray", value=jobs.ray
            )
    elif machine.gpus:
        if workers > len(machine.gpus):
            has = f"{len(machine.gpus)} visible GPU{'s' * (len(machine.gpus) > 1)}"
            findings.problem(f"this machine has {has}, and each worker needs one", "workers", value=workers)
    else:
        _check_cores(findings, machine, workers, jobs.threads_per_worker)
    _check_communicator(findings, machine)
    return workers


def _check_communicator(findings: Findings, machine: Machine) -> None:
    """What carries activations between workers, against what they run on."""
    kind = findings.job_file.jobs.communicator
    if machine.gpus and kind in ("shm", "gloo"):
        findings.problem("workers run on GPUs here, which need nccl (or auto)", "communicator", value=kind)
    if kind == "shm" and CPU_COMMUNICATOR != "shm":
        findings.problem("shared memory between workers is for Linux: use gloo (or auto)", "communicator", value=kind)
    if not machine.gpus and kind == "nccl":
        findings.problem("workers run on the CPU here, which needs shm or gloo (or auto)", "communicator", value=kind)


def _check_cores(findings: Findings, machine: Machine, workers: int, threads: int) -> None:
    cores = f"{machine.cores} CPU core{'s' * (machine.cores > 1)}"
    most = machine.cores * WORKERS_PER_CORE
    if workers > most:
        text = f"this machine has {cores}, so at most {most} workers make sense; use fewer, or join a cluster with ray"
        findings.problem(text, "workers", value=workers)
    elif workers * threads > machine.cores:
        wanted = f"{workers} workers x {threads} thread{'s' * (threads > 1)}"
        findings.warn(f"{wanted} share {cores}, so they slow each other down", "workers")
    if machine.hidden_gpus:
        findings.warn(f"{machine.hidden_gpus} hides this machine's GPUs, so workers run on the CPU", "workers")


def _admit(
    findings: Findings, pipelines: dict[str, CheckedPipeline], workers: int, machine: Machine
) -> dict[str, CheckedPipeline]:
    """The pipelines with the memory and the KV blocks that they get."""
    jobs = findings.job_file.jobs
    free: int | None = machine.free_bytes_per_worker(workers)
    if jobs.ray != "local":
        free = None
        findings.warn("the memory of the cluster's machines is not checked", "ray", value=jobs.ray)
    elif not machine.gpus:
        free = max(0, machine.free_bytes // workers - PROCESS_BYTES)
    try:
        granted = admit({name: p.memory for name, p in pipelines.items()}, free, workers)
    except CapacityError as error:
        name, _, reason = str(error).partition(" ")
        findings.problem(reason, "pipelines", name)
        return {}
    for name, memory in granted.items():
        if memory.kv < memory.kv_wanted and jobs.pipelines[name].rollout.kv_gib is None:
            text = f"the KV cache gets {gib(memory.kv)} of the {gib(memory.kv_wanted)} that a whole step could use"
            findings.warn(f"{text}; sequences may be preempted and recomputed: slower, same tokens", "pipelines", name)
    return {
        name: replace(p, memory=granted[name], kv_blocks=granted[name].kv // block_bytes(p.model, jobs.pipelines[name]))
        for name, p in pipelines.items()
    }
