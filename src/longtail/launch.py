"""`longtail run`: from checked jobs to a finished run folder; and what it shares with `longtail up` (``up.py``)."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from longtail.cluster.protocol import Cluster
from longtail.core.comm import CPU_COMMUNICATOR
from longtail.core.config import Jobs
from longtail.core.errors import ConfigError
from longtail.core.events import Event, Note, RunEnded, RunStarted, Sink
from longtail.core.types import trains_in_slices
from longtail.costs import interference_file, store
from longtail.costs.interference import Interference
from longtail.costs.table import CostTable, TableKey
from longtail.engine.engine import compile_kernels, kernels_are_compiled
from longtail.engine.model import DTYPES
from longtail.observe.fanout import FanOut
from longtail.observe.live import RunView
from longtail.observe.lock import lock_run
from longtail.observe.store import EVENTS_FILE, RunStore, read_events
from longtail.observe.summary import RunSummary, summarise
from longtail.observe.tensorboard import TensorBoardSink
from longtail.observe.terminal import console_sink
from longtail.rl.checkpoint import latest
from longtail.rl.reward_pool import RewardPool, RewardSpec
from longtail.runtime.check import CheckedJobs
from longtail.runtime.controller import Controller
from longtail.runtime.jobfile import JobFile, dump_resolved, load_resolved
from longtail.runtime.memory import BLOCK_TOKENS
from longtail.runtime.plan import PipelinePlan
from longtail.runtime.resume import compare_for_resume

CONFIG_FILE = "config.yaml"
SAME_SIGNAL_S = 1.0


@dataclass(frozen=True)
class RunResult:
    """What a run came to. ``reason`` is ``finished``, ``failed`` (some pipeline failed) or ``interrupted``."""

    folder: Path
    reason: str
    checkpoints: dict[str, Path | None]
    errors: dict[str, str]

    def summary(self) -> RunSummary:
        """The figures of the whole run, over all its starts, from the event log."""
        return summarise(read_events(self.folder))

    def checkpoint(self, pipeline: str) -> Path:
        """The newest checkpoint folder of a pipeline. Raises ``KeyError`` if there is none."""
        path = self.checkpoints[pipeline]
        if path is None:
            raise KeyError(f"{pipeline} has no checkpoint")
        return path


def run_jobs(checked: CheckedJobs, job_file: JobFile, *, fresh: bool = False, quiet: bool = False) -> RunResult:
    """Train all pipelines of a job file, resuming what the run folder holds.

    Raises ``ConfigError`` when the folder belongs to a live run or to different jobs, ``CapacityError`` when the
    workers cannot be had.
    """
    folder = run_folder(job_file)
    if fresh:
        _set_aside(folder)
    with lock_run(folder), contextlib.ExitStack() as stack:
        notes, resumed = _compare_with_earlier(folder, job_file)
        dump_resolved(job_file.jobs, folder / CONFIG_FILE)
        run = Run(folder, job_file, stack, shared=len(checked.pipelines) > 1, quiet=quiet)
        if done := _finished_before(checked, job_file, folder):
            run.tell("every pipeline has finished already; nothing to do.")
            return RunResult(folder=folder, reason="finished", checkpoints=done, errors={})
        plans = [run.plan(checked, job_file, name) for name in checked.pipelines]
        run.compile_for(checked, job_file)
        cluster = run.start(checked, resumed=resumed)
        for message in [*notes, *checked.warnings]:
            run.warn(message)
        controller = Controller(cluster, plans, rewards=run.rewards, sink=run.sink, policy=run.jobs.policy)
        with interruptible(controller.interrupt):
            controller.run()
        return run.end(controller)


class Run:
    """One start of a run, in a folder that this process has locked: where its events go, the processes for rewards,
    its workers, and what its pipelines share. All of it ends with ``stack``.

    ``jobs`` says how the workers are; pipelines come one at a time (:meth:`plan`). :meth:`plan` and :meth:`tell` may be
    called from any thread. ``shared``: pipelines may have company on the workers. ``watchers`` get all events too.
    """

    def __init__(
        self,
        folder: Path,
        job_file: JobFile,
        stack: contextlib.ExitStack,
        *,
        shared: bool,
        quiet: bool,
        watchers: Sequence[Sink] = (),
    ) -> None:
        self.folder, self.name, self.jobs = folder, job_file.run_name, job_file.jobs
        self._stack, self._shared = stack, shared
        so_far = RunView.of(read_events(folder) if (folder / EVENTS_FILE).exists() else ())
        sinks: list[Sink] = [*watchers, RunStore(folder), TensorBoardSink(folder / "tensorboard")]
        if not quiet:
            sinks.append(console_sink(view=so_far))
        self.sink = OneAtATime(FanOut(sinks))
        stack.callback(self.sink.close)
        self._tables: dict[TableKey, CostTable] = {}
        self._warm = False

    @functools.cached_property
    def rewards(self) -> RewardPool:
        pool = RewardPool(processes=self.jobs.reward_processes, log_path=self.folder / "rewards.log")
        self._stack.callback(pool.close)
        return pool

    def tell(self, text: str) -> None:
        self.sink.write(Note(level="info", message=text))

    def warn(self, text: str) -> None:
        self.sink.write(Note(level="warning", message=text))

    def plan(self, checked: CheckedJobs, job_file: JobFile, name: str) -> PipelinePlan:
        """All about one checked pipeline; its rewards are loaded. Raises ``ConfigError`` if they cannot be."""
        config, found = job_file.jobs.pipelines[name], checked.pipelines[name]
        policy = self.jobs.policy
        company = self._shared and checked.workers > 1 and policy.corun in ("auto", "greedy")
        self.rewards.open(name, RewardSpec.of(config, base=job_file.base))
        return PipelinePlan(
            name=name,
            config=config,
            model_folder=found.model_folder,
            folder=self.folder / name,
            kv_blocks=found.kv_blocks,
            task=found.task,
            tokenizer=found.tokenizer,
            kv_tokens=found.kv_blocks // found.model.kv_heads * BLOCK_TOKENS,
            ranker=found.ranker,
            kv_heads=found.model.kv_heads,
            tables=_tables(checked, job_file, name, self._tables, company=company, tell=self.tell),
            company=company,
            slices=trains_in_slices(checked.device),
            max_merges=policy.max_merges if policy.merge == "auto" else 0,
            may_widen=policy.widen == "auto",
        )

    def compile_for(self, checked: CheckedJobs, job_file: JobFile) -> None:
        """What is compiled on first use, before it is needed: kernels now, the planner meanwhile."""
        compile_for(checked, job_file, tell=self.tell)
        if not self._warm and checked.workers > 1 and (self._shared or _plans_layouts(job_file)):
            self._warm = True
            threading.Thread(target=_warm_up_planner, name="warm up", daemon=True).start()

    def start(self, checked: CheckedJobs, *, resumed: bool) -> Cluster:
        """Start the workers. Raises ``CapacityError`` when they cannot be had."""
        from longtail import __version__

        cluster = start_cluster(checked, self.jobs, tell=self.tell)
        self._stack.callback(cluster.close)
        # A look for cycles in all that has been imported takes 0.1 s and more, in which nobody is told what to do.
        gc.freeze()
        self._stack.callback(gc.unfreeze)
        self.sink.write(
            RunStarted(
                run=self.name,
                version=__version__,
                workers=cluster.workers,
                devices=list(cluster.devices),
                pipelines=list(checked.pipelines),
                resumed=resumed,
            )
        )
        return cluster

    def end(self, controller: Controller) -> RunResult:
        """What the run came to, told as its last event."""
        outcomes = controller.outcomes()
        stages = {outcome.stage for outcome in outcomes.values()}
        reason = "failed" if "failed" in stages else "interrupted" if "interrupted" in stages else "finished"
        result = RunResult(
            folder=self.folder,
            reason=reason,
            checkpoints={name: outcome.checkpoint for name, outcome in outcomes.items()},
            errors={name: outcome.error for name, outcome in outcomes.items() if outcome.error},
        )
        self.sink.write(RunEnded(reason=reason))
        return result


class OneAtATime:
    """A sink for several threads: events come to ``sink`` one at a time."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._lock = sink, threading.Lock()

    def write(self, event: Event) -> None:
        with self._lock:
            self._sink.write(event)

    def close(self) -> None:
        with self._lock:
            self._sink.close()


def run_folder(job_file: JobFile) -> Path:
    return (Path(job_file.jobs.runs_dir) / job_file.run_name).absolute()


def _finished_before(checked: CheckedJobs, job_file: JobFile, folder: Path) -> dict[str, Path | None]:
    """The checkpoints of all pipelines if none has a step left to do, else nothing."""
    found = {name: latest(folder / name) for name in checked.pipelines}
    over = all(f.path and f.step >= job_file.jobs.pipelines[name].steps for name, f in found.items())
    return {name: f.path for name, f in found.items()} if over else {}


def compile_for(checked: CheckedJobs, job_file: JobFile, *, tell: Callable[[str], None]) -> None:
    """Compile CPU kernels before workers start, so that they do not all do it (on a cluster each node does)."""
    if checked.device != "cpu":
        return
    for dtype in sorted({p.dtype for p in job_file.jobs.pipelines.values()}):
        if not kernels_are_compiled(DTYPES[dtype]):
            tell(f"compiling the {dtype} CPU kernels: about 20 s, once on this machine.")
            compile_kernels(DTYPES[dtype])


def _plans_layouts(job_file: JobFile) -> bool:
    return any(isinstance(p.rollout.tp, str) for p in job_file.jobs.pipelines.values())


def start_cluster(checked: CheckedJobs, jobs: Jobs, *, tell: Callable[[str], None]) -> Cluster:
    """The workers that the jobs ask for. Raises ``CapacityError`` when they cannot be had."""
    if jobs.ray == "local":
        # Ray reads this when it is imported: all its servers then listen on loopback only.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from longtail.cluster.ray_cluster import RayCluster  # ray takes a second to import

    return RayCluster(
        workers=checked.workers,
        threads=checked.threads_per_worker,
        address=jobs.ray,
        tell=tell,
        communicator=jobs.communicator,
    )


def _warm_up_planner() -> None:
    """Compile what decides, or load it, while the workers start."""
    from longtail.planner import lookahead, rollout_time

    rollout_time.warm_up()
    lookahead.warm_up()


def costs_folder(job_file: JobFile) -> Path:
    """Where cost tables are looked for, and kept."""
    from longtail.runtime.profiler import default_folder

    return job_file.base / job_file.jobs.costs if job_file.jobs.costs else default_folder()


class KeptTables:
    """The cost tables of a folder, as the pipelines of one run share them; one for each key."""

    def __init__(
        self, folder: Path, key: TableKey, shared: dict[TableKey, CostTable], tell: Callable[[str], None]
    ) -> None:
        self._folder, self._key, self._shared, self._tell = folder, key, shared, tell

    def find(self) -> CostTable | None:
        if self._key not in self._shared:
            found = store.find(self._folder, self._key)
            for warning in found.warnings:
                self._tell(warning)
            if found.table is not None:
                self._shared[self._key] = found.table
        return self._shared.get(self._key)

    def keep(self, table: CostTable) -> None:
        self._shared[self._key] = table
        try:
            store.save(self._folder, table)
        except ConfigError as error:  # the run has it all the same
            self._tell(str(error))

    def pairs(self, keys: Iterable[TableKey]) -> Interference:
        found = interference_file.find(self._folder, keys)
        for warning in found.warnings:
            self._tell(warning)
        return found.interference


def _tables(
    checked: CheckedJobs,
    job_file: JobFile,
    name: str,
    shared: dict[TableKey, CostTable],
    *,
    company: bool,
    tell: Callable[[str], None],
) -> KeptTables | None:
    """What the work of a pipeline costs here; None where it does not matter, or the machines are not known."""
    from longtail.cluster.measure_key import cpu_name, table_key

    jobs, found = job_file.jobs, checked.pipelines[name]
    matters = isinstance(jobs.pipelines[name].rollout.tp, str) or company
    if jobs.ray != "local" or checked.device != "cpu" or checked.workers == 1 or not matters:
        return None
    key = table_key(
        found.model,
        dtype=jobs.pipelines[name].dtype,
        processor=cpu_name(),
        workers=checked.workers,
        threads=checked.threads_per_worker,
        communicator=CPU_COMMUNICATOR if jobs.communicator == "auto" else jobs.communicator,
    )
    return KeptTables(costs_folder(job_file), key, shared, tell)


def _compare_with_earlier(folder: Path, job_file: JobFile) -> tuple[list[str], bool]:
    """Notes on keys that changed since the folder's last start, and whether there was one."""
    config = folder / CONFIG_FILE
    if not config.exists():
        return [], False
    changes = compare_for_resume(load_resolved(config), job_file.jobs)
    if changes.problems:
        raise ConfigError("\n".join(f"{job_file.path}: {problem}" for problem in changes.problems))
    return list(changes.notes), True


def _set_aside(folder: Path) -> None:
    """Move an earlier run out of the way, to the first free ``NAME.1``, ``NAME.2``, ..."""
    if not folder.exists():
        return
    with lock_run(folder):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)


@contextlib.contextmanager
def interruptible(interrupt: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM, SIGHUP) calls ``interrupt``, which lets pipelines save and end; a later one ends
    the process at once.

    Wrappers such as ``timeout`` signal the process and then its whole group: what comes within a second is one signal.
    """
    first: float | None = None

    def on_signal(number: int, frame: object) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            interrupt()
        elif time.monotonic() - first > SAME_SIGNAL_S:
            os._exit(130)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        before = {s: signal.signal(s, on_signal) for s in signals}
    except ValueError:  # not the main thread: signals are the caller's business
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
