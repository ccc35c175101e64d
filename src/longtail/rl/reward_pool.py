"""User code runs here: a pool of processes that call reward functions, beside the controller.

What always holds: every submitted call ends in rewards or in one :class:`RewardError`, whatever the function does
(raise, hang, leave the process, print without end); a process that died or ran out of time is replaced while the
calls of other pipelines go on; and after :meth:`RewardPool.close` no process is left, also none that user code started.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pebble import ProcessExpired, ProcessPool

from longtail.core.errors import ConfigError, DataError, LongtailError, RewardError
from longtail.rl.rewards import Reward, call_rewards, check_columns, load_reward
from longtail.rl.tasks import load_task

if TYPE_CHECKING:
    from longtail.core.config import Pipeline

LOAD_TIMEOUT_S = 300.0
"""Seconds that importing the reward functions of a pipeline may take."""
PROMPTS_TIMEOUT_S = 60.0
"""Seconds that a submitted task may take for the prompts that are looked at before it starts."""


@dataclass(frozen=True)
class RewardSpec:
    """Where the rewards of a pipeline come from; ``rewards`` empty means the task's own.

    ``base`` is the folder of the job file. ``timeout_s`` limits one call, all functions of the pipeline together.
    """

    task: str
    task_args: dict[str, Any]
    seed: int
    rewards: tuple[str, ...]
    base: Path
    timeout_s: float

    @classmethod
    def of(cls, config: Pipeline, *, base: Path) -> RewardSpec:
        return cls(
            task=config.task,
            task_args=config.task_args,
            seed=config.seed,
            rewards=tuple(config.rewards),
            base=base,
            timeout_s=config.reward_timeout_s,
        )


@dataclass(frozen=True)
class _Opened:
    spec: RewardSpec
    load_s: float

    @property
    def limit_s(self) -> float:
        """A process that is new, or has replaced one, loads the functions in its first call."""
        return self.spec.timeout_s + 2 * self.load_s


class RewardPool:
    """``processes`` processes, shared by all pipelines. What user code prints goes to ``log_path``, never elsewhere.

    Each process leads a session of its own, so Ctrl-C in the terminal does not reach it, and everything that user
    code starts can be found and ended. Use as a context manager, or call :meth:`close`.
    """

    def __init__(self, *, processes: int, log_path: Path) -> None:
        self._count, self._log_path = processes, log_path.absolute()
        self._pipelines: dict[str, _Opened] = {}
        self._calls: set[Future[list[float | None]]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._processes = _Processes(self._count, self._log_path)
        self._ending: list[threading.Thread] = []

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, pipeline: str, spec: RewardSpec) -> None:
        """Load the functions of ``pipeline`` in a process of the pool, to find their faults before anything starts.

        Raises :class:`ConfigError` or :class:`DataError`.
        """
        spec = replace(spec, base=spec.base.absolute())
        what = f"the reward {' + '.join(spec.rewards) or spec.task}"
        try:
            load_s = self._schedule(_open, (pipeline, spec), LOAD_TIMEOUT_S).result()
        except TimeoutError as error:
            raise ConfigError(f"{what} is not loaded after {LOAD_TIMEOUT_S:.0f} s; see {self._log_path}") from error
        except (ProcessExpired, BrokenProcessPool) as error:
            raise ConfigError(f"{what} ended its process while it was loaded; see {self._log_path}") from error
        self._pipelines[pipeline] = _Opened(spec, load_s)

    def forget(self, pipeline: str) -> None:
        """No more calls will come for it: processes let go of its functions at their next call. (Python keeps the
        modules.) Safe to call twice."""
        self._pipelines.pop(pipeline, None)

    def rehearse(self, spec: RewardSpec, *, examples: int) -> None:
        """Make the examples of a task (all of a given size, else the first ``examples``) in a process of the pool.

        Raises :class:`ConfigError` if they are not there in :data:`PROMPTS_TIMEOUT_S`, or cost the process its life.
        What the task itself refuses is for whoever makes them next to tell.
        """
        what = f"task {spec.task}"
        try:
            self._schedule(_rehearse, (spec, examples), PROMPTS_TIMEOUT_S).result()
        except TimeoutError as error:
            raise ConfigError(f"{what}: its prompts are not made after {PROMPTS_TIMEOUT_S:g} s") from error
        except (ProcessExpired, BrokenProcessPool) as error:
            raise ConfigError(f"{what} ended the process in which its prompts were made") from error
        except (ConfigError, DataError):
            pass
        except Exception as error:
            raise ConfigError(f"{what}: its prompts cannot be made: {type(error).__name__}: {error}") from error

    def submit(
        self,
        pipeline: str,
        *,
        step: int,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: dict[str, list[Any]],
    ) -> Future[list[float | None]]:
        """Rewards of the samples, later; the future's only exception is a :class:`RewardError` of one sentence.

        ``completions`` are texts, also for chat prompts. Cancelling the future ends the call.
        """
        opened = self._pipelines[pipeline]
        names = frozenset(self._pipelines.copy())
        arguments = (pipeline, names, opened.spec, step, list(prompts), list(completions), columns)
        outer: Future[list[float | None]] = Future()
        self._calls.add(outer)
        outer.add_done_callback(self._calls.discard)

        def start(attempt: int) -> None:
            inner = self._schedule(_call, arguments, opened.limit_s)
            outer.add_done_callback(lambda _: inner.cancel())
            inner.add_done_callback(lambda _: finish(inner, attempt))

        def finish(inner: Future[list[float | None]], attempt: int) -> None:
            try:
                _settle(outer, inner.result())
            except BrokenProcessPool as error:
                if attempt == 1:  # an idle process died, perhaps of another pipeline's doing
                    start(attempt=2)
                else:
                    _settle(outer, self._error(pipeline, opened.spec, step, error))
            except Exception as error:
                self._processes.end_strays()
                _settle(outer, self._error(pipeline, opened.spec, step, error))

        start(attempt=1)
        return outer

    def close(self) -> None:
        """End all processes, and what they started, within seconds; calls under way fail. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for call in self._calls.copy():
            _settle(call, RewardError("the reward processes have been stopped"))
        self._processes.end()
        for thread in self._ending:
            thread.join()

    def _schedule(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float) -> Future[Any]:
        with self._lock:
            if self._closed:
                stopped: Future[Any] = Future()
                stopped.set_exception(RewardError("the reward processes have been stopped"))
                return stopped
            try:
                return self._processes.pool.schedule(function, args=arguments, timeout=timeout_s)
            except RuntimeError:  # pebble gives up when an idle process dies, and here may be on a thread of its pool
                broken, self._processes = self._processes, _Processes(self._count, self._log_path)
                self._ending.append(threading.Thread(target=broken.end))
                self._ending[-1].start()
                return self._processes.pool.schedule(function, args=arguments, timeout=timeout_s)

    def _error(self, pipeline: str, spec: RewardSpec, step: int, error: BaseException) -> RewardError:
        return RewardError(self._sentence(pipeline, spec, step, error))

    def _sentence(self, pipeline: str, spec: RewardSpec, step: int, error: BaseException) -> str:
        what = f"{pipeline}: reward {' + '.join(spec.rewards) or spec.task}"
        match error:
            case RewardError():
                return str(error)
            case LongtailError():
                return f"{what} could not be loaded again (step {step}): {error}"
            case TimeoutError():
                return f"{what} did not return within {spec.timeout_s:g} s (step {step}); see reward_timeout_s"
            case ProcessExpired():
                return f"{what} ended its process, {_exit(error.exitcode)} (step {step}); see {self._log_path}"
            case BrokenProcessPool():
                return f"{what} ended its process (step {step}); see {self._log_path}"
            case CancelledError():
                return f"{what} was stopped (step {step})"
            case _:
                return f"{what} failed with {type(error).__name__}: {error} (step {step})"


def _settle(future: Future[Any], outcome: list[float | None] | RewardError) -> None:
    with suppress(InvalidStateError):  # cancelled, or failed by close()
        if isinstance(outcome, RewardError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _exit(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"with exit code {code % EXIT_ZERO}"


# In the controller: how processes start ------------------------------------------------------------------------------


EXIT_ZERO = 256
"""Stands for exit code 0; no process can have it."""


class _Process(SpawnProcess):
    """A spawned process that does not run the main script of its parent again: scripts need no ``__main__`` guard.

    Ending with exit code 0 is as unexpected as any other end, but pebble looks for codes that are not 0.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        with _hidden_main():
            return SpawnProcess._Popen(process_obj)

    @property
    def exitcode(self) -> int | None:
        code = super().exitcode
        return EXIT_ZERO if code == 0 else code


class _Context(SpawnContext):
    Process = _Process


class _Processes:
    """One pebble pool, and the ids of all processes that it ever had: each leaves a file named by its id."""

    def __init__(self, count: int, log_path: Path) -> None:
        self._pids = Path(tempfile.mkdtemp(prefix="longtail-rewards-"))
        self.pool = ProcessPool(
            max_workers=count,
            initializer=_enter_process,
            initargs=(str(log_path), str(self._pids), os.getpid()),
            context=_Context(),
        )
        _read_before_looking(self.pool)

    def end(self) -> None:
        """Kill all processes and what they started."""
        self.pool.stop()
        end_sessions(self._leaders())
        self.pool.join()
        end_sessions(self._leaders())
        shutil.rmtree(self._pids, ignore_errors=True)

    def end_strays(self) -> None:
        """Kill what processes that are no more have left behind."""
        gone = {pid for pid in self._leaders() if not _alive(pid)}
        end_sessions(gone)
        for pid in gone:
            (self._pids / str(pid)).unlink(missing_ok=True)

    def _leaders(self) -> set[int]:
        return {int(path.name) for path in self._pids.iterdir()} if self._pids.is_dir() else set()


def _read_before_looking(pool: ProcessPool) -> None:
    """Have ``pool`` read what processes have said before it looks into who has died.

    One thread of pebble's reads, another looks. Where the first is late, a process that has said which call it took and
    died in it seems to have died idle: that call is then given up without a reason, or waits for its time-out, and
    calls of other processes fail with it.
    """
    manager, lock = pool._pool_manager, threading.RLock()
    workers, read = manager.worker_manager, manager.process_next_message

    def process_next_message(timeout: float) -> None:
        with suppress(OSError):
            workers.pool_channel.poll(timeout)
        with lock:
            read(0)

    def update_workers() -> None:
        with lock:
            dead = workers.inspect_workers()
            while dead and workers.pool_channel.poll(0):
                read(0)
        for expiration in dead:
            manager.handle_worker_expiration(expiration)
        workers.create_workers()

    manager.process_next_message, manager.update_workers = process_next_message, update_workers


def end_sessions(leaders: set[int], *, spare: int | None = None) -> None:
    """Kill every process in the sessions that ``leaders`` lead, and every one that carries their mark; leaders last,
    because one of them may be the caller."""
    marks = set(map(str, leaders))
    found = []
    for process in psutil.process_iter() if leaders else ():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) in leaders or process.environ().get(MARK) in marks:
                found.append(process)
    for process in sorted(found, key=lambda p: p.pid in leaders):
        if process.pid != spare:
            with suppress(psutil.Error):
                process.kill()


def _alive(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


_main_lock = threading.Lock()


@contextmanager
def _hidden_main() -> Iterator[None]:
    main = vars(sys.modules["__main__"])
    with _main_lock:
        kept: dict[str, Any] = {key: main.pop(key) for key in ("__file__", "__spec__") if key in main}
        main["__spec__"] = None
        try:
            yield
        finally:
            main.update(kept)


# In the processes of the pool ----------------------------------------------------------------------------------------

MARK = "LONGTAIL_REWARD_PROCESS"
"""Environment variable that names the process of the pool; what user code starts inherits it."""

_loaded: dict[str, tuple[RewardSpec, list[Reward]]] = {}


def _enter_process(log_path: str, pids: str, controller: int) -> None:
    os.setsid()
    os.environ[MARK] = str(os.getpid())
    Path(pids, str(os.getpid())).touch()
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    Finalize(None, end_sessions, args=({os.getpid()},), kwargs={"spare": os.getpid()}, exitpriority=0)
    threading.Thread(target=_end_with, args=(controller,), daemon=True).start()


def _end_with(controller: int) -> None:
    """End this process and its children soon after the controller is gone."""
    while os.getppid() == controller:
        time.sleep(1)
    end_sessions({os.getpid()})


def _open(pipeline: str, spec: RewardSpec) -> float:
    """Seconds that loading took; checks that the functions can be called with the task's columns."""
    load_s = _load(pipeline, spec)
    if spec.rewards:
        columns = load_task(spec.task, spec.task_args, seed=spec.seed, base=spec.base).example(0).columns
        for reward in _loaded[pipeline][1]:
            check_columns(reward, list(columns))
    return load_s


def _load(pipeline: str, spec: RewardSpec) -> float:
    """Seconds that loading the functions of ``pipeline`` took, 0 if they were loaded before."""
    began = time.monotonic()
    if pipeline in _loaded and _loaded[pipeline][0] == spec:
        return 0.0
    if spec.rewards:
        functions = [load_reward(name, base=spec.base) for name in spec.rewards]
    else:
        task = load_task(spec.task, spec.task_args, seed=spec.seed, base=spec.base)
        if task.score is None:
            raise ConfigError(
                f"task {spec.task} has no reward of its own: set reward to a function, such as "
                "longtail.rl.rewards:final_number"
            )
        functions = [Reward(spec.task, task.score)]
    _loaded[pipeline] = (spec, functions)
    return time.monotonic() - began


def _rehearse(spec: RewardSpec, examples: int) -> None:
    task = load_task(spec.task, spec.task_args, seed=spec.seed, base=spec.base)
    for index in range(examples if task.size is None else task.size):
        task.example(index)


def _call(
    pipeline: str,
    pipelines: frozenset[str],
    spec: RewardSpec,
    step: int,
    prompts: list[Any],
    completions: list[str],
    columns: dict[str, Any],
) -> list[float | None]:
    """``pipelines`` are all that there are by now."""
    for gone in _loaded.keys() - pipelines:
        del _loaded[gone]
    _load(pipeline, spec)
    return call_rewards(
        _loaded[pipeline][1], prompts=prompts, completions=completions, columns=columns, where=pipeline, step=step
    )
