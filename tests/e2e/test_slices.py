"""A micro-batch that is left after every layer, for whatever else there is to do, is the same micro-batch."""

from __future__ import annotations

import math
import threading

import pytest

from e2e.harness import run_inline, small_pipeline
from e2e.test_invariants import assert_same_training
from longtail.cluster import tenant
from longtail.core.events import Span, StageEntered

A, B = small_pipeline(), small_pipeline(task="collatz", seed=5, rollout__max_tokens=60)


def train_spans(outcome, pipeline):
    return [e for e in outcome.record.events if isinstance(e, Span) and (e.pipeline, e.substage) == (pipeline, "train")]


@pytest.fixture
def every_layer(monkeypatch):
    monkeypatch.setattr(tenant, "SLICE_S", 0.0)


def no_thread_is_left() -> bool:
    return not any(thread.name == "slices" for thread in threading.enumerate())


def test_slices_change_no_bit_of_what_is_learned_beside_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tenant, "SLICE_S", math.inf)
    whole = run_inline({"a": A, "b": B}, tmp_path / "whole", workers=2)
    monkeypatch.setattr(tenant, "SLICE_S", 0.0)
    sliced = run_inline({"a": A, "b": B}, tmp_path / "sliced", workers=2)
    for name in ("a", "b"):
        assert_same_training(whole, sliced, name)
        assert sum(s.tokens for s in train_spans(whole, name)) == sum(s.tokens for s in train_spans(sliced, name))
        assert sum(s.quanta for s in train_spans(sliced, name)) > 3 * sum(s.quanta for s in train_spans(whole, name))
    assert no_thread_is_left()


def test_training_and_sampling_of_one_pipeline_alternate_within_micro_batches(tmp_path, every_layer):
    job = small_pipeline(max_staleness=1, steps=4)
    sliced = run_inline({"a": job}, tmp_path / "sliced", workers=2)
    assert set(sliced.record.steps("a")) == {0, 1, 2, 3}
    assert no_thread_is_left()


def test_a_worker_lost_within_a_micro_batch_changes_nothing(tmp_path, every_layer):
    calm = run_inline({"a": A}, tmp_path / "calm", workers=2)
    killed = []

    def kill(event, cluster, controller):
        if isinstance(event, StageEntered) and event.stage == "train" and event.step == 1 and not killed:
            killed.append(True)
            cluster.kill(1)

    lost = run_inline({"a": A}, tmp_path / "lost", workers=2, on_event=kill)
    assert killed
    assert_same_training(calm, lost, "a")
    assert no_thread_is_left()


def test_a_pipeline_that_is_stopped_within_a_micro_batch_leaves_nothing_behind(tmp_path, every_layer):
    def stop(event, cluster, controller):
        if isinstance(event, StageEntered) and (event.pipeline, event.stage, event.step) == ("a", "train", 1):
            controller.stop("a")

    alone = run_inline({"b": B}, tmp_path / "alone", workers=2)
    outcome = run_inline({"a": A, "b": B}, tmp_path / "both", workers=2, on_event=stop)
    assert outcome.controller.drivers["a"].stage == "interrupted"
    assert_same_training(alone, outcome, "b")
    resumed = run_inline({"a": A}, tmp_path / "both", workers=2)
    whole = run_inline({"a": A}, tmp_path / "a", workers=2)
    for name, tensor in whole.weights("a").items():
        assert tensor.equal(resumed.weights("a")[name])
    assert no_thread_is_left()
