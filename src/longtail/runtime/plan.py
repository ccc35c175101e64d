"""What is known of a pipeline before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from longtail.core.config import Pipeline
from longtail.rl.tasks import Task


class PromptEncoder(Protocol):
    """What the driver needs of a tokenizer (``engine/tokenizer.py``)."""

    end_token_ids: tuple[int, ...]

    def encode_prompt(self, prompt: str | list[dict], *, chat: bool | None = None) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Everything about a pipeline that is known before it starts; ``folder`` is where its checkpoints go."""

    name: str
    config: Pipeline
    model_folder: Path
    folder: Path
    kv_blocks: int
    task: Task
    tokenizer: PromptEncoder
