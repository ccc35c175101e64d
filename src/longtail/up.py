"""`longtail up`: workers that stay, for jobs that come and go; the controller's loop with the service beside it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from longtail.core.errors import CapacityError, ConfigError
from longtail.jobs.app import JobsApp
from longtail.jobs.board import Board
from longtail.jobs.ledger import Ledger
from longtail.jobs.listen import Bind, listening
from longtail.jobs.presence import Presence, announced, token_of
from longtail.jobs.record import Record
from longtail.jobs.rules import AllowList
from longtail.jobs.service import JobService
from longtail.launch import Run, RunResult, interruptible, run_folder
from longtail.observe.lock import lock_run
from longtail.observe.store import EVENTS_FILE, read_events
from longtail.rl.reward_pool import RewardSpec
from longtail.runtime.check import check_jobs
from longtail.runtime.controller import Controller
from longtail.runtime.jobfile import JobFile
from longtail.runtime.machine import Machine, inspect_machine, memory
from longtail.runtime.memory import PROCESS_BYTES
from longtail.runtime.prompts import SAMPLE

SLACK_BYTES = 256 << 20
"""What this process itself comes to take beyond its start, and what comes and goes everywhere."""


@dataclass(frozen=True)
class UpOptions:
    """``allow``: whose functions jobs may name; ``jobs_dir``: where their relative paths count from."""

    bind: Bind
    allow: AllowList
    jobs_dir: Path
    token_file: Path
    quiet: bool = False


def run_up(cluster: JobFile, options: UpOptions) -> RunResult:
    """Take in jobs until interrupted.

    Raises ``ConfigError`` when the folder, the address or the token cannot be used, ``CapacityError`` when the workers
    cannot be had.
    """
    machine = inspect_machine()
    checked = check_jobs(cluster, machine=machine)
    # The number of workers is settled now, whatever a later look at the machine would say.
    cluster = replace(cluster, jobs=cluster.jobs.model_copy(update={"workers": checked.workers}))
    jobs_dir = options.jobs_dir.absolute()
    if not jobs_dir.is_dir():
        raise ConfigError(f"--jobs-dir {options.jobs_dir}: there is no such folder.")
    folder = run_folder(cluster)
    with lock_run(folder), contextlib.ExitStack() as stack:
        record = Record(folder)
        token = token_of(options.token_file)
        sock, bind = options.bind.open()
        stack.callback(sock.close)
        log = folder / EVENTS_FILE
        board = Board(read_events(log) if log.exists() else ())
        run = Run(folder, cluster, stack, shared=True, quiet=options.quiet, watchers=[board])
        rewards = run.rewards
        workers = run.start(checked, resumed=record.earlier is not None)
        for message in checked.warnings:
            run.warn(message)
        controller = Controller(
            workers, [], rewards=rewards, sink=run.sink, policy=cluster.jobs.policy, keep_running=True
        )
        service = JobService(
            cluster=cluster,
            machine=machine,
            jobs_dir=jobs_dir,
            folder=folder,
            allow=options.allow,
            ledger=_ledger(cluster, machine, checked.workers),
            board=board,
            record=record,
            controller=controller,
            rehearse=lambda job_file, name: run.rewards.rehearse(
                RewardSpec.of(job_file.jobs.pipelines[name], base=job_file.base), examples=SAMPLE
            ),
            plan=run.plan,
            compile_for=run.compile_for,
            forget=run.rewards.forget,
        )
        app = JobsApp(service, token=token, run=cluster.run_name, devices=list(workers.devices))
        presence = Presence(
            run=cluster.run_name,
            folder=str(folder),
            url=bind.url,
            pid=os.getpid(),
            token_file=str(options.token_file.absolute()),
            certificate=str(bind.certificate.absolute()) if bind.certificate else None,
        )

        def interrupt() -> None:
            service.refuse()
            controller.interrupt()

        with interruptible(interrupt), listening(app, sock, bind), announced(presence):
            for problem in service.resume():
                run.warn(problem)
            run.tell(f"jobs are taken at {bind.url}: longtail submit JOB.YAML, longtail jobs; Ctrl-C saves and ends")
            lost: dict[str, str] = {}
            try:
                controller.run()
            except CapacityError as error:  # workers cannot be replaced
                lost["workers"] = str(error)
        result = run.end(controller)
        return replace(result, errors={**result.errors, **lost})


def _ledger(cluster: JobFile, machine: Machine, workers: int) -> Ledger:
    """Of what each worker had before any of them took something; nothing is known of a cluster's machines."""
    if cluster.jobs.ray != "local":
        return Ledger(None, workers=workers)
    if machine.gpus:
        return Ledger(machine.free_bytes_per_worker(workers), workers=workers)
    free = max(0, machine.free_bytes // workers - PROCESS_BYTES)
    return Ledger(free, workers=workers, foreign=lambda: foreign_bytes(machine) // workers)


def foreign_bytes(machine: Machine) -> int:
    """Main memory that programs other than this one and its children have taken since ``machine`` was looked at.

    Never too much: pages that our processes share count for each of them.
    """
    return max(0, machine.free_bytes - memory()[1] - _ours() - SLACK_BYTES)


def _ours() -> int:
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total
