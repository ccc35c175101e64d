"""Tensor-parallel groups for tests: ranks as threads of this process, or as processes."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from longtail.core.types import Request
from longtail.engine.comm import ProcessGroupCommunicator
from longtail.engine.engine import Engine, StepResult
from longtail.engine.lanes import LanePool
from longtail.engine.model import Decoder
from longtail.engine.shard import shard_of
from longtail.engine.shm import ShmCommunicator

TIMEOUT = timedelta(seconds=120)
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "longtail.engine.engine"])
_names = itertools.count()


def communicator(kind: str, path: Path, *, rank: int, size: int):
    if kind == "shm":
        return ShmCommunicator(path, rank=rank, size=size, timeout=TIMEOUT)
    return ProcessGroupCommunicator(FileStore(str(path), size), rank=rank, size=size, timeout=TIMEOUT)


def in_group(target: Callable[..., Any], size: int, folder: Path, *, kind: str = "shm") -> list:
    """``target(comm)`` in ``size`` threads; what each returned. Raises what the first of them raised."""
    path, results, errors = folder / f"group{next(_names)}", [None] * size, [None] * size

    def work(rank: int) -> None:
        try:
            comm = communicator(kind, path, rank=rank, size=size)
            try:
                results[rank] = target(comm)
            finally:
                comm.close()
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results


def engine_of(model: Decoder, comm, *, columns: int = 1000, block_tokens: int = 16, **options) -> Engine:
    """A rank's engine with ``columns`` KV blocks for each of its heads; without ``comm``, all of the model."""
    first, last = (0, model.config.kv_heads) if comm is None else shard_of(model.config, comm.rank, comm.size).heads
    pool = LanePool(
        model.config,
        blocks=columns * (last - first),
        block_tokens=block_tokens,
        kv_heads=range(first, last),
        dtype=model.dtype,
        device=model.device,
    )
    return Engine(model, pool, comm=comm, **options)


def trace(engine: Engine, requests: list[Request]) -> list[tuple]:
    """Add all and step until idle: what each step returned, as comparable values; lanes are checked after each."""
    for item in requests:
        engine.add(item)
    steps = []
    while engine.has_work:
        expected = engine.next_substage()
        result = engine.step()
        assert result.substage == expected
        engine.lanes.check()
        steps.append(plain(result))
    assert engine.lanes.used == 0
    return steps


def plain(result: StepResult) -> tuple:
    completions = [
        (c.request_id, c.sample, c.tokens.tolist(), c.logprobs.tolist(), c.text, c.finish, c.preemptions)
        for c in result.completions
    ]
    return result.substage, result.tokens, result.batch, result.context, list(result.emitted), completions


def run_group(model: Decoder, size: int, requests: list[Request], folder: Path, *, kind: str = "shm", **options):
    """The steps of a group of ``size`` threads, which all ranks agree on."""
    torch.set_num_threads(1)
    ranks = in_group(lambda comm: trace(engine_of(model, comm, **options), requests), size, folder, kind=kind)
    for steps in ranks[1:]:
        assert len(steps) == len(ranks[0])
        for ours, theirs in zip(steps, ranks[0], strict=True):
            assert ours == theirs
    return ranks[0]
