"""Workers as Ray actors, on this machine or on a Ray cluster.

Each actor runs :class:`~longtail.cluster.worker.Worker` in a thread of its own; its methods only move commands in
and reports out. One thread of the controller's process long-polls all actors, so that ``poll`` waits in one place.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from longtail.cluster.connections import Connections
from longtail.cluster.guard import Guard
from longtail.cluster.messages import Command, Connect, Lost, Report
from longtail.cluster.worker import Worker
from longtail.core.errors import CapacityError, PeerLost

POLL_S = 0.25
START_TIMEOUT_S = 300.0
WAIT_NOTE_S = 15.0
ANSWER_S = 10.0


@ray.remote(concurrency_groups={"control": 1, "drain": 1}, max_restarts=0)
class RayWorker:
    """The process of one worker slot."""

    def __init__(self, worker: int, world: int, threads: int, cores: tuple[int, ...], communicator: str) -> None:
        if cores:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cores)
        self._threads, self._failure, self._communicator = threads, "", communicator
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self._worker = Worker(worker, world, device=device, connect=self._connect)
        self._loop = threading.Thread(target=self._run, name="quanta", daemon=True)
        self._loop.start()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a per-thread setting
        gc.freeze()  # what has been imported stays: a look for cycles in it would take 0.1 s
        try:
            self._worker.run()
        except BaseException as error:
            self._failure = f"its loop ended with {type(error).__name__}: {error}"
            raise

    def _connect(self, command: Connect) -> Connections:
        world, rank = self._worker.world, self._worker.worker
        host, _, port = command.store.rpartition(":")
        store: torch.distributed.Store | None = None
        try:
            if world > 1 and not host:
                store = torch.distributed.FileStore(command.store, world)
            elif world > 1:
                store = torch.distributed.TCPStore(host, int(port), world, is_master=rank == 0, wait_for_workers=False)
        except (RuntimeError, torch.distributed.DistError, OSError) as error:
            raise PeerLost(f"worker {rank} cannot reach the meeting point {command.store}: {error}") from error
        return Connections(
            store,
            worker=rank,
            world=world,
            device=self._worker.device,
            kind=self._communicator,
            host=ray.get_runtime_context().get_node_id(),
            interface_address=ray.util.get_node_ip_address() if host else "127.0.0.1",
        )

    @ray.method(concurrency_group="control")
    def describe(self) -> tuple[str, str]:
        """(device, address of this node)."""
        device = self._worker.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{self._threads}"
        return name, ray.util.get_node_ip_address()

    @ray.method(concurrency_group="control")
    def free_port(self) -> int:
        """A port that is free on this worker's node."""
        with socket.socket() as s:
            s.bind(("", 0))
            return s.getsockname()[1]

    @ray.method(concurrency_group="control")
    def send(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._worker.give(command)

    @ray.method(concurrency_group="drain")
    def drain(self, timeout_s: float) -> list[Report]:
        if not self._loop.is_alive() and self._failure:
            raise RuntimeError(self._failure)
        return self._worker.outbox.take(timeout_s)


class RayCluster:
    """See :class:`longtail.cluster.protocol.Cluster`. ``address`` is ``local``, ``auto`` or a Ray address.

    ``tell`` gets a sentence now and then while workers are awaited; ``communicator`` is as in a job file. Raises
    ``CapacityError`` when they cannot be had.
    """

    def __init__(
        self, *, workers: int, threads: int, address: str, tell: Callable[[str], None], communicator: str = "auto"
    ) -> None:
        self._tell, self._communicator = tell, communicator
        self.workers, self._threads = workers, threads
        self._local = address == "local"
        environment = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        # Processes of a local Ray inherit this environment; a runtime_env would cost seconds at every start.
        self._runtime_env = {} if self._local else {"env_vars": environment}
        with _environment(environment if self._local else {}):
            _start_ray(address, cpus=workers * threads)
        self._guard = Guard()
        self._guard.watch()
        self._gpus = 1 if ray.cluster_resources().get("GPU", 0) > 0 else 0
        self._inbox: queue.SimpleQueue[list[Report]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._meeting = tempfile.TemporaryDirectory(prefix="longtail-") if self._local else None
        self._actors = {worker: self._spawn(worker) for worker in range(workers)}
        self.devices = [""] * workers
        self._addresses = [""] * workers
        self._await(self._actors)
        self._poller = threading.Thread(target=self._poll_actors, name="reports", daemon=True)
        self._poller.start()

    def _spawn(self, worker: int) -> Any:
        cores = sorted(os.sched_getaffinity(0))
        # Only a run that takes every core may say who sits where: another one might be on the same machine.
        pinned = self._local and not self._gpus and self.workers * self._threads == len(cores)
        mine = tuple(cores[worker * self._threads : (worker + 1) * self._threads]) if pinned else ()
        actor: Any = RayWorker
        return actor.options(
            num_cpus=self._threads,
            num_gpus=self._gpus,
            runtime_env=self._runtime_env,
        ).remote(worker, self.workers, self._threads, mine, self._communicator)

    def _await(self, actors: dict[int, Any]) -> None:
        """Wait until the actors answer. Raises ``CapacityError`` when the cluster cannot place them."""
        waiting = [a.describe.remote() for a in actors.values()]
        deadline = time.monotonic() + START_TIMEOUT_S
        needs = f"each needs {self._threads} CPU" + f" and {self._gpus} GPU" * (self._gpus > 0)
        try:
            while ray.wait(waiting, num_returns=len(waiting), timeout=WAIT_NOTE_S)[1]:
                free = ray.available_resources()
                has = f"{free.get('CPU', 0):.0f} CPU and {free.get('GPU', 0):.0f} GPU are free"
                if time.monotonic() > deadline:
                    raise CapacityError(
                        f"Ray did not start {len(actors)} workers in {START_TIMEOUT_S:.0f} s: {needs}, and {has}."
                        " Lower workers, or wait for other jobs to end."
                    )
                self._tell(f"waiting for {len(actors)} workers: {needs}, and {has}.")
            answers = ray.get(waiting)
        except RayError as error:
            raise CapacityError(f"a worker could not start: {error}") from error
        for worker, (device, address) in zip(actors, answers, strict=True):
            self.devices[worker], self._addresses[worker] = device, address
        self._guard.watch()

    def _poll_actors(self) -> None:
        waiting: dict[Any, tuple[int, Any]] = {}
        polled: dict[int, Any] = {}
        while not self._closed.is_set():
            for worker, actor in list(self._actors.items()):
                if polled.get(worker) is not actor:
                    polled[worker] = actor
                    waiting[actor.drain.remote(POLL_S)] = (worker, actor)
            if not waiting:
                self._closed.wait(POLL_S)
                continue
            try:
                ready, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL_S)
            except RayError as error:  # Ray itself is gone, and all workers with it
                for worker, actor in waiting.values():
                    self._lose(worker, actor, error)
                return
            for reference in ready:
                worker, actor = waiting.pop(reference)
                try:
                    reports = ray.get(reference)
                except Exception as error:
                    self._lose(worker, actor, error)
                    continue
                waiting[actor.drain.remote(POLL_S)] = (worker, actor)
                if reports:
                    self._inbox.put(reports)

    def _lose(self, worker: int, actor: Any, error: Exception) -> None:
        """Take a worker out, its process too if only its loop has ended, and report it once."""
        if self._actors.get(worker) is actor and not self._closed.is_set():
            del self._actors[worker]
            with contextlib.suppress(RayError):
                ray.kill(actor)
            self._inbox.put([Lost(worker=worker, reason=_reason(error))])

    def send(self, worker: int, commands: Sequence[Command]) -> None:
        actor = self._actors.get(worker)
        if actor is not None:
            actor.send.remote(list(commands))

    def poll(self, timeout_s: float) -> list[Report]:
        reports: list[Report] = []
        try:
            reports += self._inbox.get(timeout=timeout_s)
            while True:
                reports += self._inbox.get_nowait()
        except queue.Empty:
            return reports

    def wake(self) -> None:
        self._inbox.put([])

    def restart(self, worker: int) -> None:
        actor = self._spawn(worker)
        self._await({worker: actor})
        self._actors[worker] = actor

    def rendezvous(self, generation: int) -> str:
        if self._meeting is not None:
            return str(Path(self._meeting.name) / f"generation-{generation}")
        try:
            return f"{self._addresses[0]}:{ray.get(self._actors[0].free_port.remote())}"
        except (KeyError, RayError) as error:
            raise PeerLost("worker 0 is gone") from error

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._poller.join(timeout=2.0)
        for actor in self._actors.values():
            with contextlib.suppress(RayError):
                ray.kill(actor)
        ray.shutdown()
        self._guard.close()
        if self._meeting is not None:
            self._meeting.cleanup()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _start_ray(address: str, *, cpus: int) -> None:
    """Join or start Ray under a namespace that no other run shares. Raises ``CapacityError`` when it cannot."""
    _require_answer(address)
    namespace = f"longtail-{uuid.uuid4().hex[:12]}"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    common = {"namespace": namespace, "log_to_driver": False, "configure_logging": True, "logging_level": logging.ERROR}
    try:
        if address == "local":
            ray.init(
                address="local",
                num_cpus=max(cpus, 1),
                include_dashboard=False,
                object_store_memory=_object_store_bytes(),
                **common,
            )
        else:
            ray.init(address=address, **common)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise CapacityError(f"Ray at {address!r} cannot be used: {error}") from error


def _require_answer(address: str) -> None:
    """Ray itself would try for minutes. Raises ``CapacityError`` if ``address`` is host:port and nothing is there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise CapacityError(
            f"ray = {address!r}: nothing answers there ({error});"
            " start Ray there with `ray start --head`, or correct the address."
        ) from error


def _object_store_bytes() -> int:
    """Commands and reports are small; keep Ray from reserving a third of the memory (or a tiny /dev/shm)."""
    with contextlib.suppress(OSError):
        free = os.statvfs("/dev/shm")
        return max(80 << 20, min(256 << 20, free.f_bavail * free.f_frsize // 2))
    return 128 << 20


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
