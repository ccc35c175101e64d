"""What tests of whole runs have in common."""

from __future__ import annotations

import pytest

from inline_cluster import InlineCluster


@pytest.fixture
def in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers sample a token at a time, tell after each how far they are, and do not go on before the controller has
    decided what follows from it: the tiny model would have ended its tail before the next report."""
    monkeypatch.setattr(InlineCluster, "in_step", True)
    monkeypatch.setattr("longtail.cluster.tenant.BURST_S", 0.0)
    monkeypatch.setattr("longtail.cluster.worker.ALIVE_EVERY_S", 0.0)
    monkeypatch.setattr("longtail.cluster.worker.PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr("longtail.runtime.widen.THINKING_SHARE", 0.0)
