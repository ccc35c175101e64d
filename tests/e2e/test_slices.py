"""A micro-batch that is left after every layer, for whatever else there is to do, is the same micro-batch."""

from __future__ import annotations

import gc
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from e2e.harness import run_inline, small_pipeline
from e2e.test_invariants import assert_same_training
from longtail.cluster import training
from longtail.cluster.fair import FairShare
from longtail.cluster.messages import DropWork
from longtail.cluster.tenant import Quantum, Tenant
from longtail.core.events import Span
from longtail.core.types import SubStage
from longtail.rl.trainer import Trainer

A, B = small_pipeline(), small_pipeline(task="collatz", seed=5, rollout__max_tokens=60)


class Watch:
    """Every layer ends a slice. ``when_paused`` is called once, in a worker's thread and with that worker, when a
    micro-batch of step 1 of pipeline ``a`` has been left there; ``cancelled`` are the pipelines of which one was given
    up half-way; ``log`` has (worker, number, whether it ended) of each slice, and (worker, None, True) of each quantum
    of sampling."""

    def __init__(self, monkeypatch) -> None:
        self.when_paused: Callable[[int], None] = lambda worker: None
        self.fired = False
        self.cancelled: list[str] = []
        self.log: list[tuple[int, int | None, bool]] = []
        self.held: list[weakref.ref] = []
        train, sample, close = Tenant._train, Tenant._sample, Tenant.close

        def trained(this):
            step, number, *_ = this._training._waiting[0]
            if this.name == "a" and not self.held:
                self.held = [weakref.ref(thing) for thing in (this, this.model, this.trainer.flat.grads)]
            quantum = train(this)
            self.log.append((this.worker, number, this._training._slices is None))
            if this._training._slices is not None and (this.name, step) == ("a", 1) and not self.fired:
                self.fired = True
                self.when_paused(this.worker)
            return quantum

        def sampled(this, *args):
            self.log.append((this.worker, None, True))
            return sample(this, *args)

        def closed(this):
            slices = this._training._slices
            if slices is not None and 0 < slices.share < 1:
                self.cancelled.append(this.name)
            close(this)

        monkeypatch.setattr(training, "SLICE_S", 0.0)
        for name, changed in (("_train", trained), ("_sample", sampled), ("close", closed)):
            monkeypatch.setattr(Tenant, name, changed)


@pytest.fixture
def watch(monkeypatch) -> Watch:
    return Watch(monkeypatch)


def no_thread_is_left() -> bool:
    return not any(thread.name == "slices" for thread in threading.enumerate())


def nothing_is_held(watch: Watch) -> bool:
    gc.collect()
    return [ref() for ref in watch.held] == [None, None, None]


def test_slices_change_no_bit_of_what_is_learned_beside_others(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SLICE_S", math.inf)
    whole = run_inline({"a": A, "b": B}, tmp_path / "whole", workers=2)
    monkeypatch.setattr(training, "SLICE_S", 0.0)
    sliced = run_inline({"a": A, "b": B}, tmp_path / "sliced", workers=2)
    for name in ("a", "b"):
        assert_same_training(whole, sliced, name)
        before, after = (
            [
                event
                for event in outcome.record.events
                if isinstance(event, Span) and (event.pipeline, event.substage) == (name, "train")
            ]
            for outcome in (whole, sliced)
        )
        assert sum(s.tokens for s in before) == sum(s.tokens for s in after)
        assert sum(s.quanta for s in after) > 3 * sum(s.quanta for s in before)
    assert no_thread_is_left()


def test_sampling_of_the_same_pipeline_has_its_turn_within_micro_batches(tmp_path, watch, monkeypatch):
    """However late rewards come: no sample of the second step is drawn before the first slice of the first one."""
    train, sample = Tenant._train, Tenant._sample

    def sampled(this, *args):
        if this.step == 1 and all(number is None for _, number, _ in watch.log):
            time.sleep(0.001)
            return Quantum(SubStage.DECODE, this.step, 0, 0, [])
        return sample(this, *args)

    def trained(this):
        quantum = train(this)
        this._shares = FairShare()  # as if sampling had not had the time in which it was held up
        return quantum

    monkeypatch.setattr(Tenant, "_sample", sampled)
    monkeypatch.setattr(Tenant, "_train", trained)
    run_inline({"a": small_pipeline(max_staleness=1, steps=4)}, tmp_path, workers=2)
    between = 0
    for worker in (0, 1):
        mine = [(number, ended) for where, number, ended in watch.log if where == worker]
        between += sum(
            left[0] is not None and not left[1] and then[0] is None for left, then in itertools.pairwise(mine)
        )
    assert between > 0
    assert no_thread_is_left()


def test_a_worker_lost_within_a_micro_batch_changes_nothing(tmp_path, watch):
    calm = run_inline({"a": A}, tmp_path / "calm", workers=2)
    watch.fired = False

    def remember(event, cluster, controller):
        watch.when_paused = cluster.kill

    lost = run_inline({"a": A}, tmp_path / "lost", workers=2, on_event=remember)
    assert watch.cancelled
    assert_same_training(calm, lost, "a")
    assert no_thread_is_left()


def test_a_pipeline_that_is_stopped_within_a_micro_batch_leaves_nothing_behind(tmp_path, watch):
    def remember(event, cluster, controller):
        def stop(worker):
            controller.stop("a")
            until = time.monotonic() + 60
            while time.monotonic() < until and not any(
                to == worker and isinstance(c, DropWork) and c.pipeline == "a" for to, c in cluster.sent
            ):
                time.sleep(0.001)

        watch.when_paused = stop

    alone = run_inline({"b": B}, tmp_path / "alone", workers=2)
    outcome = run_inline({"a": A, "b": B}, tmp_path / "both", workers=2, on_event=remember)
    assert outcome.controller.drivers["a"].stage == "interrupted"
    assert "a" in watch.cancelled
    assert_same_training(alone, outcome, "b")
    assert no_thread_is_left()
    assert nothing_is_held(watch)
    resumed = run_inline({"a": A}, tmp_path / "both", workers=2)
    whole = run_inline({"a": A}, tmp_path / "a", workers=2)
    for name, tensor in whole.weights("a").items():
        assert tensor.equal(resumed.weights("a")[name])


def test_an_error_within_a_backward_pass_ends_its_pipeline_and_gives_its_memory_back(tmp_path, watch, monkeypatch):
    micro_batch = Trainer.micro_batch

    def breaks(this, batch, totals, *, pause):
        def broken(share):
            pause(share)
            if this.steps == 2 and share > 0.8:
                raise RuntimeError("no more")

        return micro_batch(this, batch, totals, pause=broken)

    monkeypatch.setattr(Trainer, "micro_batch", breaks)
    outcome = run_inline({"a": small_pipeline(steps=2), "b": B}, tmp_path, workers=2)
    assert "RuntimeError: no more" in outcome.controller.drivers["a"].error
    assert outcome.controller.drivers["b"].stage == "finished"
    assert no_thread_is_left()
    assert nothing_is_held(watch)
