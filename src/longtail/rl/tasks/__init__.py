"""Tasks: where prompts come from, in which order, and how their answers are judged.

Nothing here imports torch, ray or transformers: the processes that run rewards load it and must start fast.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from longtail.core.errors import ConfigError
from longtail.core.seeds import derive_seed
from longtail.rl.tasks.arguments import build, nearest
from longtail.rl.tasks.base import Example, Messages, Task
from longtail.rl.tasks.collatz import Collatz
from longtail.rl.tasks.reverse_text import ReverseText
from longtail.rl.tasks.scratchpad import Scratchpad

__all__ = ["BUILT_IN", "Example", "Messages", "Task", "load_task", "prompt_indices"]

BUILT_IN: dict[str, Callable[..., Task]] = {kind.name: kind for kind in (Collatz, Scratchpad, ReverseText)}


def load_task(spec: str, args: dict[str, Any], *, seed: int, base: Path) -> Task:
    """The task that ``spec`` names: a built-in one, ``reasoning_gym/NAME``, or a ``.jsonl`` file relative to ``base``.

    Raises :class:`ConfigError` for names, arguments and files that cannot work, :class:`DataError` for bad rows.
    """
    if spec in BUILT_IN:
        return build(BUILT_IN[spec], spec, args, seed)
    if spec.startswith("reasoning_gym/"):
        from longtail.rl.tasks.gym import load_gym

        return load_gym(spec, args, seed)
    if spec.endswith(".jsonl"):
        from longtail.rl.tasks.jsonl import load_jsonl

        return load_jsonl(spec, args, base)
    if "/" in spec or "." in spec:
        raise ConfigError(
            f"unknown task {spec!r}: a data file must be JSON lines and end in .jsonl, and a generator of the "
            "reasoning-gym package is written reasoning_gym/NAME"
        )
    raise ConfigError(f"unknown task {spec!r}{nearest(spec, [*BUILT_IN, 'reasoning_gym/NAME', 'FILE.jsonl'])}")


def prompt_indices(task: Task, *, step: int, prompts: int, seed: int) -> list[int]:
    """Indices of the examples of ``step`` (from 0), a pure function of its arguments; always ``prompts`` many.

    Endless tasks count up. Tasks of a given size are read epoch after epoch, each in its own order drawn from
    ``seed``; a step that begins in one epoch ends in the next, so none is short and no example is skipped. A step
    repeats an example only where it crosses an epoch, or asks for more prompts than there are.
    """
    positions = range(step * prompts, (step + 1) * prompts)
    size = task.size
    if size is None:
        return list(positions)
    return [_epoch_order(seed, position // size, size)[position % size] for position in positions]


@lru_cache(maxsize=8)
def _epoch_order(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return tuple(order)
