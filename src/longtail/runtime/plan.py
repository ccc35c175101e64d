"""What is known of a pipeline before it starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from longtail.core.config import Pipeline
from longtail.costs.interference import Interference
from longtail.costs.table import CostTable, TableKey
from longtail.rl.tasks import Task


class PromptEncoder(Protocol):
    """What the driver needs of a tokenizer (``engine/tokenizer.py``)."""

    end_token_ids: tuple[int, ...]

    def encode_prompt(self, prompt: str | list[dict], *, chat: bool | None = None) -> np.ndarray: ...


class Ranks(Protocol):
    """What the driver needs of a ranker (``lengths/ranker.py``)."""

    def quantile(self, prompts: Sequence[str]) -> np.ndarray:
        """Where each prompt's length lies among those of other prompts: float [n] in [0, 1]."""
        ...


class Rewards(Protocol):
    """What the driver needs of the reward pool (``rl/reward_pool.py``)."""

    def submit(
        self,
        pipeline: str,
        *,
        step: int,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: dict[str, list[Any]],
    ) -> Future[list[float | None]]: ...


class Tables(Protocol):
    """What the driver needs of the cost tables that are kept (``launch.py``)."""

    def find(self) -> CostTable | None:
        """The one for this pipeline, if there is one by now."""
        ...

    def keep(self, table: CostTable) -> None:
        """One that was just measured for it."""

    def pairs(self, keys: Iterable[TableKey]) -> Interference:
        """What was measured of pairs of the models of ``keys``."""
        ...


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Everything about a pipeline that is known before it starts; ``folder`` is where its checkpoints go.

    ``kv_tokens`` is what the KV memory of one worker holds (None: more than enough); ``ranker`` predicts lengths.
    ``kv_heads`` of the model bound the degree of tensor parallelism. ``tables`` know what its work costs here, if that
    has been measured.

    ``company``: several pipelines share several workers, and it is weighed who runs where. Each of its rollouts may
    then be moved to fewer workers up to ``max_merges`` times. ``slices``: its micro-batches are left before their
    end for the work of others. ``may_widen``: whether tensor-parallel groups may form where ``rollout.tp`` is no
    number.
    """

    name: str
    config: Pipeline
    model_folder: Path
    folder: Path
    kv_blocks: int
    task: Task
    tokenizer: PromptEncoder
    kv_tokens: int | None = None
    ranker: Ranks | None = None
    kv_heads: int = 1
    tables: Tables | None = None
    company: bool = False
    slices: bool = True
    max_merges: int = 2
    may_widen: bool = True
