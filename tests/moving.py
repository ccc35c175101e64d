"""Rollouts that are placed and moved as a test says, whatever anybody else would decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from longtail.core.types import Layout
from longtail.planner.state import Relocation
from longtail.runtime.widen import StepWiden


class Then(NamedTuple):
    """Once the longest live sample has ``tokens`` tokens, the samples go to the workers ``to``."""

    tokens: int
    to: tuple[int, ...]


def move_about(
    monkeypatch: pytest.MonkeyPatch,
    on: tuple[int, ...] | None,
    moves: Sequence[Then] = (),
    *,
    pipeline: str = "a",
    since: int = 0,
) -> None:
    """From step ``since`` on every rollout of ``pipeline`` begins on the workers ``on`` and makes ``moves`` in turn."""

    class Moving(StepWiden):
        def begin(self, batch, *args, **options) -> bool:
            mine = self._plan.name == pipeline and batch.step >= since
            self.to_make = list(moves) if mine else []
            return super().begin(batch, *args, on=on if mine else None)

        def alive(self, report, *, dispatched: bool) -> None:
            super().alive(report, dispatched=dispatched)
            longest = max((int(row.max()) for row in report.generated if len(row)), default=0)
            if self.to_make and longest >= self.to_make[0].tokens:
                to = self.to_make[0].to
                kind = "spread" if len(to) > len(self.workers) else "merge"
                asked = self.relocate(
                    Relocation(pipeline=pipeline, kind=kind, to=to, reason="a test", gain_s=1.0, cost_s=0.1, rest_s=1.0)
                )
                if asked or self.layout == Layout.singles(to):
                    self.to_make.pop(0)

    monkeypatch.setattr("longtail.runtime.rollout_phase.StepWiden", Moving)
