"""The least time in which the steps of several pipelines can be done, by the measured cost tables.

All samples of a step decode together at whatever tensor-parallel degree and batch takes fewest worker-seconds, and no
worker ever waits (``planner/alone.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from longtail.costs import table_file
from longtail.costs.table import CostTable
from longtail.engine.checkpoint import check_model
from longtail.engine.models import resolve_model
from longtail.engine.tokenizer import Tokenizer
from longtail.planner.alone import bound_s
from longtail.planner.state import StepShape
from multiplex_runs import GROUP, Job

MAX_RUNNING = 256


def least_s(jobs: Sequence[Job], costs: Path, update_s: Mapping[str, float], workers: int) -> float:
    """Of all steps; ``update_s``: seconds of an update of each job."""
    return bound_s(
        [
            (shape(job, step, update_s[job.name]), table_of(job.model, costs), MAX_RUNNING)
            for job in jobs
            for step in range(job.steps)
        ],
        workers,
    )


def shape(job: Job, step: int, update_s: float) -> StepShape:
    rows = job.rows[step * job.prompts : (step + 1) * job.prompts]
    encode = tokenizer(job.model).encode_prompt
    prompts = [len(encode(row["prompt"], chat=False)) for row in rows]
    lengths = np.array([n for row in rows for n in row["lengths"][:GROUP]], np.int64)
    return StepShape(
        lengths=lengths,
        prompts=np.repeat(np.array(prompts, np.int64), GROUP),
        prefill_tokens=sum(prompts),
        train_tokens=sum(prompts) + int(lengths.sum()),
        score_s=0.0,
        update_s=update_s,
    )


@cache
def tokenizer(model: str) -> Tokenizer:
    return Tokenizer.load(resolve_model(model))


@cache
def table_of(model: str, costs: Path) -> CostTable:
    """The table of ``model`` in the folder, the full one if there is one."""
    from longtail.cluster.measure_key import model_name

    name = model_name(check_model(resolve_model(model)))
    tables = [t for t in map(table_file.load, costs.glob("*-t1-*.json")) if t.key.model == name]
    return min(tables, key=lambda table: table.detail != "full")
