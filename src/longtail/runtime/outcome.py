"""What is kept of a pipeline that is over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longtail.runtime.pipeline import PipelineDriver


@dataclass(frozen=True)
class Outcome:
    """``stage`` is ``finished``, ``failed`` or ``interrupted``; ``step`` steps are done; ``checkpoint`` is the newest
    one. Reports of ``attempt`` and earlier ones may still be on their way."""

    name: str
    stage: str
    step: int
    attempt: int
    error: str | None
    checkpoint: Path | None

    @classmethod
    def of(cls, driver: PipelineDriver) -> Outcome:
        """Where a pipeline stands, which may not be over."""
        return cls(driver.name, driver.stage, driver.step, driver.attempt, driver.error, driver.saver.last_path)
