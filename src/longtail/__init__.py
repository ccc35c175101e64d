"""Runs several RL post-training pipelines on the same workers, and keeps them busy through the long tail.

    from longtail import Pipeline, run

    result = run([Pipeline(model="tiny", task="reverse-text", steps=50)], workers=2)
    result.checkpoint("reverse-text")

Names are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longtail.api import run
    from longtail.core.config import Jobs, Pipeline
    from longtail.launch import RunResult
    from longtail.lengths.ranker import Ranker

__version__ = "0.1.0"
__all__ = ["Jobs", "Pipeline", "Ranker", "RunResult", "__version__", "run"]

_HOMES = {
    "Jobs": "longtail.core.config",
    "Pipeline": "longtail.core.config",
    "Ranker": "longtail.lengths.ranker",
    "RunResult": "longtail.launch",
    "run": "longtail.api",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'longtail' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
