"""Driving a cluster to profile: one pipeline after the other, and a clear error when it does not come to an end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from inline_cluster import InlineCluster
from longtail.cluster.measure_progress import Profiling
from longtail.cluster.messages import (
    ClosePipeline,
    Connect,
    LeaseBroken,
    Lost,
    Opened,
    OpenPipeline,
    PipelineFailed,
    Profile,
    Profiled,
)
from longtail.core.config import Algorithm, Pipeline, Rollout
from longtail.core.errors import LongtailError, PeerLost
from longtail.costs.decode import DecodeCosts
from longtail.costs.interference_file import Half, PairTable
from longtail.costs.interference_file import to_plain as pair_to_plain
from longtail.costs.table import TableKey
from longtail.costs.table_file import to_plain
from longtail.costs.worker import WorkerCosts
from longtail.engine.models import resolve_model
from longtail.runtime.profiler import Profiler, Subject, default_folder, degrees_of

TINY = resolve_model("tiny")
DECODE = DecodeCosts(base_s=0.1, per_sequence_s=0.01, per_context_token_s=1e-5, per_prompt_token_s=0.001)
KEY = TableKey(machine="m", model="tiny", dtype="float32", communicator="shm", threads=1)


def subject(name: str = "rev", folder: Path = TINY, **pipeline) -> Subject:
    config = Pipeline(
        model="tiny",
        task="reverse-text",
        rollout=Rollout(prompts=2, max_tokens=8),
        algorithm=Algorithm(group_size=2),
        **pipeline,
    )
    return Subject(name=name, config=config, model_folder=folder, kv_blocks=4 * 16, kv_heads=4)


class ScriptedCluster:
    """Answers each command with what ``answers`` gives for it and its worker."""

    def __init__(self, answers) -> None:
        self.workers, self.devices, self._answers = 2, ["cpu", "cpu"], answers
        self.sent: list[tuple[int, object]] = []
        self._reports: list = []

    def send(self, worker: int, commands) -> None:
        for command in commands:
            self.sent.append((worker, command))
            self._reports += self._answers(worker, command)

    def poll(self, timeout_s: float) -> list:
        reports, self._reports = self._reports, []
        assert reports, "the profiler waits for something that will not come"
        return reports

    def rendezvous(self, generation: int) -> str:
        return f"meet-{generation}"


def answer(worker: int, command: object) -> list:
    """As workers would that all go well."""
    match command:
        case OpenPipeline():
            return [Opened(worker=worker, pipeline=command.pipeline, attempt=0, parameters=1, duration_s=0.1)]
        case Profile():
            costs = WorkerCosts(decode=DECODE, per_train_token_s=0.1, update_s=0.1)
            table = to_plain(costs.table(KEY, measured="now", degrees=command.degrees, fine=command.fine))
            halfway = Profiling(worker=worker, pipeline=command.pipeline, attempt=0, what="TP 1: prefill", share=0.5)
            done = Profiled(
                worker=worker, pipeline=command.pipeline, attempt=0, lease_id=command.lease.lease_id,
                table=table if worker == 0 else None,
            )  # fmt: skip
            return [halfway, done] if worker == 0 else [done]
    return []


def test_pipelines_are_profiled_one_after_the_other_and_closed():
    cluster = InlineCluster(1)
    profiler = Profiler(cluster)
    try:
        for name, dtype in (("a", "float32"), ("b", "float64")):
            measured = profiler.profile(subject(name, dtype=dtype), fine=False)
            assert measured.table.key.dtype == dtype
            assert measured.notes == {}
        deadline = time.monotonic() + 60
        while cluster._slots[0].tenants:  # about to be closed
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        cluster.close()
    kinds = [type(command) for _, command in cluster.sent]
    assert kinds == [Connect, OpenPipeline, Profile, ClosePipeline, OpenPipeline, Profile, ClosePipeline]


def test_every_worker_gets_the_same_commands_and_a_lease_over_all():
    cluster = ScriptedCluster(answer)
    said = []
    measured = Profiler(cluster).profile(subject(), fine=True, tell=lambda *what: said.append(what))
    assert measured.table.detail == "full"
    commands = [[command for worker, command in cluster.sent if worker == w] for w in (0, 1)]
    assert commands[0] == commands[1]
    (profile,) = [command for command in commands[0] if isinstance(command, Profile)]
    assert profile.lease.workers == (0, 1)
    assert profile.lease.purpose == "profile"
    assert profile.degrees == (1, 2)
    assert said == [("loading the model", 0.0), ("measuring", 0.0), ("TP 1: prefill", 0.5)]


def test_two_models_are_open_together_while_they_are_measured_and_closed_then():
    def answers(worker: int, command: object) -> list:
        if not isinstance(command, Profile):
            return answer(worker, command)
        other = KEY._replace(model="other")
        halves = tuple(Half(key=key, same_worker={}, neighbour_worker={}) for key in (KEY, other))
        plain = pair_to_plain(PairTable(measured="now", halves=halves)) if worker == 0 else None
        lease_id = command.lease.lease_id
        return [Profiled(worker=worker, pipeline=command.pipeline, attempt=0, lease_id=lease_id, table=plain)]

    cluster = ScriptedCluster(answers)
    pair = Profiler(cluster).profile_pair(subject("a"), subject("b"))
    assert [half.key.model for half in pair.halves] == ["tiny", "other"]
    said = [(type(c).__name__, getattr(c, "pipeline", None)) for worker, c in cluster.sent if worker == 1]
    assert said == [
        ("Connect", None),
        ("OpenPipeline", "a"),
        ("OpenPipeline", "b"),
        ("Profile", "a"),
        ("ClosePipeline", "a"),
        ("ClosePipeline", "b"),
    ]
    (profile,) = [c for worker, c in cluster.sent if worker == 1 and isinstance(c, Profile)]
    assert profile.beside == "b"
    assert profile.lease.workers == (0, 1)


@pytest.mark.parametrize(
    ("report", "error", "says"),
    [
        (
            lambda c: Lost(worker=1, reason="it was killed"),
            PeerLost,
            "worker 1 was lost while rev was profiled: it was",
        ),
        (
            lambda c: LeaseBroken(worker=0, pipeline="rev", attempt=0, lease_id=0, error="rank 0 lost a peer"),
            PeerLost,
            "rev could not be profiled: rank 0 lost a peer",
        ),
        (
            lambda c: PipelineFailed(worker=1, pipeline="rev", attempt=0, error="no room", traceback=""),
            LongtailError,
            "rev could not be profiled: no room",
        ),
    ],
)
def test_what_goes_wrong_while_measuring_is_a_clear_error(report, error, says):
    def answers(worker: int, command: object) -> list:
        return [report(command)] if isinstance(command, Profile) and worker == 1 else answer(worker, command)[-1:]

    with pytest.raises(error, match=says):
        Profiler(ScriptedCluster(answers)).profile(subject(), fine=False)


def test_a_model_that_cannot_be_loaded_is_a_clear_error(tmp_path):
    cluster = InlineCluster(1)
    try:
        with pytest.raises(LongtailError, match=r"rev could not be profiled: .*config\.json"):
            Profiler(cluster).profile(subject(folder=tmp_path), fine=False)
    finally:
        cluster.close()


def test_a_worker_that_dies_ends_the_profile():
    cluster = InlineCluster(2)

    def die_while_loading(what: str, share: float) -> None:
        if what == "measuring":
            cluster.kill(1)

    try:
        with pytest.raises(PeerLost):
            Profiler(cluster).profile(subject(), fine=False, tell=die_while_loading)
    finally:
        cluster.close()


def test_degrees_are_those_that_layouts_can_have_and_a_fixed_one():
    def degrees(tp, workers, kv_heads):
        return degrees_of(Pipeline(model="m", task="t", rollout=Rollout(tp=tp)), workers=workers, kv_heads=kv_heads)

    assert degrees("auto", 1, 4) == (1,)
    assert degrees("auto", 4, 4) == (1, 2, 4)
    assert degrees("auto", 4, 3) == (1, 2)
    assert degrees(3, 4, 4) == (1, 2, 3, 4)
    assert degrees(4, 2, 4) == (1, 2)


def test_tables_are_kept_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path))
    assert default_folder() == tmp_path / "costs"
