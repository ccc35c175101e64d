"""Jobs come and go: what is submitted is checked, given its memory and handed to the controller; what ends gives back.

Submissions are taken one after another. Each is admitted as a whole or refused as a whole, with every problem that
`longtail run --check` would find, and nothing is left behind of a refused one. A name is in use from its admission
to the end of the job; after that it may be used again.
"""

from __future__ import annotations

import contextlib
import difflib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from longtail.core.errors import CapacityError, ConfigError, LongtailError
from longtail.jobs.board import Board
from longtail.jobs.halves import on, submitted
from longtail.jobs.ledger import Ledger
from longtail.jobs.record import CONFIG_FILE, Record
from longtail.jobs.rules import AllowList, check_rules
from longtail.jobs.wire import Admitted, JobStatus, Submission
from longtail.rl.checkpoint import latest
from longtail.runtime.check import CheckedJobs, check_jobs
from longtail.runtime.jobfile import JobFile
from longtail.runtime.machine import Machine
from longtail.runtime.memory import block_bytes
from longtail.runtime.plan import PipelinePlan
from longtail.runtime.resume import compare_for_resume


class NoSuchJob(LongtailError):
    """No job has, or had, this name."""


class NotNow(LongtailError):
    """A name is in use, or the run is ending."""


class Pipelines(Protocol):
    """What the service needs of the controller; all of it may be called from any thread and returns at once."""

    def submit(self, *plans: PipelinePlan) -> None:
        """Begin all of them, or none and raise ``ValueError``."""

    def stop(self, name: str) -> None:
        """Let it save and end."""


class JobService:
    """``cluster`` is what `longtail up` was started with, ``machine`` what there was before its workers took anything.

    ``rehearse`` makes the prompts of a pipeline that :func:`check_jobs` will look at, elsewhere and within bounds.
    ``plan`` makes a checked pipeline's plan and loads its rewards, ``compile_for`` compiles what it will need, and
    ``forget`` lets go of what ``plan`` has loaded under a name. Relative paths and reward modules of jobs are looked up
    in ``jobs_dir``.
    """

    def __init__(
        self,
        *,
        cluster: JobFile,
        machine: Machine,
        jobs_dir: Path,
        folder: Path,
        allow: AllowList,
        ledger: Ledger,
        board: Board,
        record: Record,
        controller: Pipelines,
        rehearse: Callable[[JobFile, str], None],
        plan: Callable[[CheckedJobs, JobFile, str], PipelinePlan],
        compile_for: Callable[[CheckedJobs, JobFile], None],
        forget: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self._cluster, self._machine, self._jobs_dir, self._allow = cluster, machine, jobs_dir, allow
        self._ledger, self._board, self._record, self._controller = ledger, board, record, controller
        self._rehearse, self._plan, self._compile_for, self._forget = rehearse, plan, compile_for, forget
        self._one_after_another = threading.Lock()
        self._handing_over = threading.Lock()
        """Between the controller and the board: a job is known to both or to neither. The controller's thread, which
        tells of ends, must not wait for it."""
        self._lock = threading.Lock()
        self._in_use: set[str] = set()
        self._stopped: set[str] = set()
        self._ending = False
        board.on_ended = self._ended

    # -- what clients ask -------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> Admitted:
        """Check, admit and start; takes as long as the checks take.

        Raises :class:`ConfigError` for what cannot work, :class:`CapacityError` for what does not fit, :class:`NotNow`.
        """
        with self._one_after_another:
            job_file = submitted(submission.text, submission.file, cluster=self._cluster, base=self._jobs_dir)
            return self._admit(job_file, fresh=submission.fresh)

    def resume(self) -> list[str]:
        """Let the jobs go on that were not over when the run folder was last in use; returns what is wrong with those
        that cannot, which are tried again at the next start."""
        problems = []
        earlier = self._record.earlier
        for name, kv in self._record.unfinished.items():
            assert earlier is not None
            one = earlier.model_copy(update={"pipelines": {name: earlier.pipelines[name]}})
            job_file = on(self._cluster, one, self.folder / CONFIG_FILE, lines={}, base=self._jobs_dir)
            try:
                with self._one_after_another:
                    self._admit(job_file, fresh=False, kv_bytes={name: kv})
            except LongtailError as error:
                problems.append(f"{name} does not go on: {error}")
        return problems

    def jobs(self) -> list[JobStatus]:
        return self._board.jobs()

    def job(self, name: str) -> JobStatus:
        """Raises :class:`NoSuchJob` with the nearest name."""
        try:
            return self._board.job(name)
        except KeyError:
            names = self._board.names()
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            known = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}." if names else "."
            raise NoSuchJob(f"there is no job {name!r}{known}") from None

    def stop(self, name: str) -> JobStatus:
        """Let a job save and end; it takes a while. Nothing happens to one that is over. Raises :class:`NoSuchJob`."""
        with self._handing_over:
            found = self.job(name)
            with self._lock:
                if found.over or name not in self._in_use:
                    return found
                self._stopped.add(name)
            self._board.ending(name)
            self._controller.stop(name)
        return self.job(name)

    def refuse(self) -> None:
        """From now on nothing is admitted; what ends now goes on at the next start. Callable from a signal handler."""
        self._ending = True

    # -- what the controller tells ----------------------------------------------------------------------------

    def _gone(self, name: str) -> None:
        """What it had may be given to others: workers take commands in order, so they let go of it before they open
        whatever is admitted from now on."""
        self._forget(name)
        self._ledger.release(name)
        with self._lock:
            self._in_use.discard(name)
            self._stopped.discard(name)

    def _ended(self, name: str, reason: str) -> None:
        with self._lock:
            goes_on = reason == "interrupted" and name not in self._stopped
        if not goes_on:
            with contextlib.suppress(OSError):  # it would go on at the next start, which says that it is over
                self._record.over(name)
        self._gone(name)

    # -- admission --------------------------------------------------------------------------------------------

    def _admit(self, job_file: JobFile, *, fresh: bool, kv_bytes: Mapping[str, int] | None = None) -> Admitted:
        names = list(job_file.jobs.pipelines)
        check_rules(job_file, self._allow)
        self._require_free(names)
        for name in names:
            with _told_at(job_file, name, "task"):
                self._rehearse(job_file, name)
        checked = check_jobs(job_file, machine=self._machine, submitted=True)
        if kv_bytes is not None:
            checked = _with_kv(checked, job_file, kv_bytes)
        notes = [] if fresh else self._compare_with_earlier(job_file)
        with self._lock:
            self._in_use.update(names)
        try:
            self._ledger.grant({name: p.memory for name, p in checked.pipelines.items()})
            plans = []
            for name, config in job_file.jobs.pipelines.items():
                with _told_at(job_file, name, "reward" if config.reward else "task"):
                    plans.append(self._plan(checked, job_file, name))
            self._compile_for(checked, job_file)
            self._start(plans, checked, job_file, fresh=fresh)
        except BaseException:
            for name in names:
                self._gone(name)
            raise
        return Admitted(jobs=[self._board.job(name) for name in names], warnings=[*checked.warnings, *notes])

    def _start(self, plans: list[PipelinePlan], checked: CheckedJobs, job_file: JobFile, *, fresh: bool) -> None:
        """All of them, or nothing has happened. Raises :class:`CapacityError` if the folder cannot be written."""
        if self._ending:
            raise NotNow("this run is ending: submit to the next one.")
        kv_bytes = {name: p.memory.kv for name, p in checked.pipelines.items()}
        with contextlib.ExitStack() as undone_on_errors:
            try:
                for plan in plans if fresh else ():
                    undone_on_errors.enter_context(_set_aside(self.folder / plan.name))
                undone_on_errors.enter_context(self._record.beginning(job_file.jobs, kv_bytes))
            except OSError as error:
                raise CapacityError(f"{self.folder} cannot be written: {error.strerror or error}.") from error
            self._hand_over(plans, fresh=fresh)

    def _hand_over(self, plans: list[PipelinePlan], *, fresh: bool) -> None:
        steps = {plan.name: plan.config.steps for plan in plans}
        with self._handing_over, self._board.expecting(steps, fresh=fresh):
            try:
                self._controller.submit(*plans)
            except ValueError as error:  # the run has begun to end since this was looked at
                raise NotNow(f"{error}.") from error

    def _require_free(self, names: list[str]) -> None:
        if self._ending:
            raise NotNow("this run is ending: submit to the next one.")
        with self._lock:
            taken = [name for name in names if name in self._in_use]
        if taken:
            job = self._board.job(taken[0])
            at = f"{job.stage or job.state}, step {job.step} of {job.steps} done"
            raise NotNow(
                f"the name {job.name} is in use ({at}): choose another one, or end that job with"
                f" `longtail stop {job.name}`."
            )

    def _compare_with_earlier(self, job_file: JobFile) -> list[str]:
        """Notes on what differs from the last time that names were used. Raises :class:`ConfigError` if it is too much
        to resume."""
        earlier = self._record.earlier
        before = {
            n: p
            for n, p in (earlier.pipelines if earlier else {}).items()
            if n in job_file.jobs.pipelines and latest(self.folder / n).path
        }
        if not before:
            return []
        old = job_file.jobs.model_copy(update={"pipelines": before})
        now = job_file.jobs.model_copy(update={"pipelines": {n: job_file.jobs.pipelines[n] for n in before}})
        changes = compare_for_resume(old, now)
        if changes.problems:
            raise ConfigError("\n".join(f"{job_file.path}: {problem}" for problem in changes.problems))
        return list(changes.notes)


def _with_kv(checked: CheckedJobs, job_file: JobFile, kv_bytes: Mapping[str, int]) -> CheckedJobs:
    """With the KV memory that each had before, where it still makes sense."""
    found = {}
    for name, p in checked.pipelines.items():
        kv = max(p.memory.kv_least, min(p.memory.kv, kv_bytes[name]))
        blocks = kv // block_bytes(p.model, job_file.jobs.pipelines[name])
        found[name] = replace(p, memory=replace(p.memory, kv=kv), kv_blocks=blocks)
    return replace(checked, pipelines=found)


@contextlib.contextmanager
def _set_aside(folder: Path) -> Iterator[None]:
    """Move what an ended job left to the first free ``NAME~1``, ``NAME~2``, ...: names that no job can have; and back
    if the ``with`` raises."""
    if not folder.exists():
        yield
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}~{number}")).exists():
        number += 1
    folder.rename(aside)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            aside.rename(folder)
        raise


@contextlib.contextmanager
def _told_at(job_file: JobFile, name: str, key: str) -> Iterator[None]:
    """What is wrong is told with file, line and key."""
    try:
        yield
    except LongtailError as error:
        sentence = str(error)
        where = job_file.where("pipelines", name, key)
        raise ConfigError(f"{where}: {sentence}{'' if sentence[-1:] in '.?!' else '.'}") from error
