"""`longtail run`: from checked jobs to a finished run folder."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from longtail.cluster.protocol import Cluster
from longtail.core.comm import CPU_COMMUNICATOR
from longtail.core.config import Jobs
from longtail.core.errors import ConfigError
from longtail.core.events import Note, RunEnded, RunStarted, Sink
from longtail.costs import store
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
from longtail.runtime.jobfile import JobFile, dump_resolved, load_jobs
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
    jobs = job_file.jobs
    folder = (Path(jobs.runs_dir) / job_file.run_name).absolute()
    if fresh:
        _set_aside(folder)
    with lock_run(folder), contextlib.ExitStack() as stack:
        notes, resumed = _compare_with_earlier(folder, job_file)
        dump_resolved(jobs, folder / CONFIG_FILE)
        so_far = RunView()
        for event in read_events(folder) if (folder / EVENTS_FILE).exists() else ():
            so_far.apply(event)
        sinks: list[Sink] = [RunStore(folder), TensorBoardSink(folder / "tensorboard")]
        if not quiet:
            sinks.append(console_sink(view=so_far))
        sink = FanOut(sinks)
        stack.callback(sink.close)
        if done := _finished_before(checked, job_file, folder):
            sink.write(Note(level="info", message="every pipeline has finished already; nothing to do."))
            return RunResult(folder=folder, reason="finished", checkpoints=done, errors={})
        rewards = RewardPool(processes=jobs.reward_processes, log_path=folder / "rewards.log")
        stack.callback(rewards.close)

        def tell(text: str) -> None:
            sink.write(Note(level="info", message=text))

        plans = _plans(checked, job_file, folder, rewards, tell=tell)
        compile_for(checked, job_file, tell=tell)
        _warm_up_planner(checked, job_file)
        cluster = start_cluster(checked, jobs, tell=tell)
        stack.callback(cluster.close)
        sink.write(_run_started(checked, job_file, cluster, resumed))
        for message in [*notes, *checked.warnings]:
            sink.write(Note(level="warning", message=message))
        controller = Controller(cluster, plans, rewards=rewards, sink=sink)
        with _interruptible(controller):
            controller.run()
        result = _result(folder, controller)
        sink.write(RunEnded(reason=result.reason))
    return result


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


def _warm_up_planner(checked: CheckedJobs, job_file: JobFile) -> None:
    """Compile what decides on layouts while the workers start: its first decision is made in a rollout's tail."""
    if checked.workers > 1 and any(isinstance(p.rollout.tp, str) for p in job_file.jobs.pipelines.values()):
        from longtail.planner.rollout_time import warm_up

        threading.Thread(target=warm_up, name="warm up", daemon=True).start()


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


def _run_started(checked: CheckedJobs, job_file: JobFile, cluster: Cluster, resumed: bool) -> RunStarted:
    from longtail import __version__

    return RunStarted(
        run=job_file.run_name,
        version=__version__,
        workers=cluster.workers,
        devices=list(cluster.devices),
        pipelines=list(checked.pipelines),
        resumed=resumed,
    )


def _plans(
    checked: CheckedJobs, job_file: JobFile, folder: Path, rewards: RewardPool, *, tell: Callable[[str], None]
) -> list[PipelinePlan]:
    base = job_file.base
    shared: dict[TableKey, CostTable] = {}
    plans = []
    for name, found in checked.pipelines.items():
        config = job_file.jobs.pipelines[name]
        spec = RewardSpec(
            task=config.task,
            task_args=config.task_args,
            seed=config.seed,
            rewards=tuple(config.rewards),
            base=base,
            timeout_s=config.reward_timeout_s,
        )
        rewards.open(name, spec)
        plans.append(
            PipelinePlan(
                name=name,
                config=config,
                model_folder=found.model_folder,
                folder=folder / name,
                kv_blocks=found.kv_blocks,
                task=found.task,
                tokenizer=found.tokenizer,
                kv_tokens=found.kv_blocks // found.model.kv_heads * BLOCK_TOKENS,
                ranker=found.ranker,
                kv_heads=found.model.kv_heads,
                tables=_tables(checked, job_file, name, shared, tell),
            )
        )
    return plans


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


def _tables(
    checked: CheckedJobs, job_file: JobFile, name: str, shared: dict[TableKey, CostTable], tell: Callable[[str], None]
) -> KeptTables | None:
    """What the work of a pipeline costs here; None where it does not matter, or the machines are not known."""
    from longtail.cluster.measure_key import cpu_name, table_key

    jobs, found = job_file.jobs, checked.pipelines[name]
    if jobs.ray != "local" or checked.device != "cpu" or isinstance(jobs.pipelines[name].rollout.tp, int):
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
    changes = compare_for_resume(load_jobs(config).jobs, job_file.jobs)
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


def _result(folder: Path, controller: Controller) -> RunResult:
    drivers = controller.drivers
    stages = {d.stage for d in drivers.values()}
    reason = "failed" if "failed" in stages else "interrupted" if "interrupted" in stages else "finished"
    return RunResult(
        folder=folder,
        reason=reason,
        checkpoints={name: d.saver.last_path for name, d in drivers.items()},
        errors={name: d.error for name, d in drivers.items() if d.error},
    )


@contextlib.contextmanager
def _interruptible(controller: Controller) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM, SIGHUP) lets pipelines save and end; a later one ends the process at once.

    Wrappers such as ``timeout`` signal the process and then its whole group: what comes within a second is one signal.
    """
    first: float | None = None

    def on_signal(number: int, frame: object) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            controller.interrupt()
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
