"""What a switch costs: sequences of SmolLM2 in mid-generation go from two workers to one group of both, and back.

Two processes, each pinned to a core, hold half of the sequences each. A switch is all that a worker does in one:
export, exchange of what is in flight, plan, moving lanes (or computing them again), and the new engine.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

NARROW, WIDE = ((0,), (1,)), ((0, 1),)
DECODE_STEPS = 5
"""After every widening, to know what a step takes."""


def measure_switch(*, kind: str, sequences: int, tokens: int, moves: int, recomputes: int) -> dict[str, Any]:
    """Medians over ``moves`` widenings by moving lanes and ``recomputes`` by computing them again, in seconds, of
    ``sequences`` that have about ``tokens`` tokens each; ``kind`` of communicator: shm or gloo."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        rounds = ["recompute"] * recomputes + ["move"] * moves
        arguments = [(rank, kind, folder, sequences, tokens, rounds, results) for rank in range(2)]
        processes = [context.Process(target=be_worker, args=a) for a in arguments]
        for process in processes:
            process.start()
        found = [results.get() for _ in processes]
        for process in processes:
            process.join(30)
    errors = [f["error"] for f in found if "error" in f]
    if errors:
        raise RuntimeError(f"switches over {kind}: {errors[0]}")
    return summary(max(found, key=lambda f: sum(s["seconds"] for s in f["switches"])))


def summary(worker: dict[str, Any]) -> dict[str, Any]:
    def median_of(key: str, how: str, to: str) -> float | None:
        values = [s[key] for s in worker["switches"] if s["how"] == how and s["to"] == to]
        return round(statistics.median(values), 5) if values else None

    step_s = statistics.median(worker["decode_s"])
    found: dict[str, Any] = {
        "decode_step_s": round(step_s, 5),
        "widen_by_moving_s": median_of("seconds", "move", "wide"),
        "widen_by_recomputing_s": median_of("seconds", "recompute", "wide"),
        "narrow_by_moving_s": median_of("seconds", "move", "narrow"),
        "moved_bytes": int(median_of("bytes", "move", "wide") or 0),
        "first_step_after_moving_s": median_of("first_step_s", "move", "wide"),
    }
    return found


def be_worker(rank: int, kind: str, folder: str, sequences: int, tokens: int, rounds: list[str], results: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import torch

    torch.set_num_threads(1)
    try:
        results.put(switches(rank, kind, Path(folder), sequences, tokens, rounds))
    except BaseException as error:
        results.put({"error": f"worker {rank}: {type(error).__name__}: {error}"})
        raise


def switches(rank: int, kind: str, folder: Path, sequences: int, tokens: int, rounds: list[str]) -> dict[str, Any]:
    """Go wide and back for each of ``rounds``; what each switch took, and each decode step of the group."""
    import numpy as np
    import torch

    from longtail.core.types import Request, SamplingParams, SubStage
    from longtail.engine.blocks import BlockStore
    from longtail.engine.checkpoint import load_model
    from longtail.engine.engine import Engine
    from longtail.engine.handoff import carry_out
    from longtail.engine.lanes import LanePool
    from longtail.engine.models import resolve_model
    from longtail.engine.switch_plan import How, SwitchCosts, SwitchPlan, plan_switch

    model = load_model(resolve_model("smollm2-135m"), dtype=torch.float32)
    heads = model.config.kv_heads
    blocks = 2 * sequences * heads * (tokens // 16 + 8)
    store = BlockStore(model.config, blocks=blocks, dtype=torch.float32)
    engine = Engine(model, LanePool.over(store, range(heads)))
    # About ``tokens`` in the middle of the rounds.
    prompt_tokens = tokens - len(rounds) * (DECODE_STEPS + 2) // 2
    rng = np.random.default_rng(rank)
    for i in range(sequences // 2):
        prompt = rng.integers(100, model.config.vocab_size, prompt_tokens).astype(np.int32)
        params = SamplingParams(max_tokens=2 * tokens)
        engine.add(
            Request(request_id=f"{rank}-{i}", prompt=prompt, seeds=(i,), params=params, forced_lengths=(2 * tokens,))
        )
    while engine.next_substage() == SubStage.PREFILL:
        engine.step()
    comm = communicator(kind, folder, rank)
    costs = SwitchCosts(per_byte_s=1e-9, per_token_s=1e-3)

    def switch(engine: Engine, source, target, how: str) -> tuple[Engine, dict[str, Any]]:
        comm.barrier()
        start = time.perf_counter()
        cargo = engine.export()
        cargos = [pickle.loads(data) for data in comm.all_gather_bytes(pickle.dumps(cargo))]
        plan = plan_switch(cargos, source, target, costs=costs, how=How(how))
        assert isinstance(plan, SwitchPlan), plan
        inside = comm if target == WIDE else None
        following = carry_out(plan, comm, engine, cargo, lambda lanes: Engine(model, lanes, comm=inside))
        assert following is not None
        while following.next_substage() == SubStage.PREFILL:
            following.step()
        comm.barrier()
        seconds = time.perf_counter() - start
        to = "wide" if target == WIDE else "narrow"
        return following, {"to": to, "how": how, "seconds": seconds, "bytes": plan.moved_bytes}

    done, decode_s = [], []
    for how in rounds:
        engine, found = switch(engine, NARROW, WIDE, how)
        taken = []
        for _ in range(1 + DECODE_STEPS):
            start = time.perf_counter()
            engine.step()
            taken.append(time.perf_counter() - start)
        decode_s += taken[1:]
        done.append({**found, "first_step_s": taken[0]})
        engine, found = switch(engine, WIDE, NARROW, "move")
        engine.step()
        done.append(found)
    comm.close()
    return {"switches": done, "decode_s": decode_s}


def communicator(kind: str, folder: Path, rank: int):
    from torch.distributed import FileStore

    from longtail.engine.comm import ProcessGroupCommunicator
    from longtail.engine.shm import ShmCommunicator

    timeout = timedelta(seconds=120)
    if kind == "shm":
        return ShmCommunicator(folder / "group", rank=rank, size=2, timeout=timeout)
    store = FileStore(str(folder / "store"), 2)
    return ProcessGroupCommunicator(store, rank=rank, size=2, timeout=timeout, interface_address="127.0.0.1")
