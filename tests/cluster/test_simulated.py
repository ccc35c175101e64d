"""Simulated workers follow the rules of real ones, and the real controller runs on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine_models import make_engine, prompt_of, random_model, request
from longtail.cluster.messages import Generate, OpenPipeline, Sampled
from longtail.cluster.simulated import SimulatedCluster
from longtail.core.config import Pipeline
from longtail.core.events import CheckpointSaved, Span, StageEntered, WorkerLost
from longtail.core.types import Request, SubStage
from longtail.costs.decode import DecodeCosts
from longtail.costs.worker import WorkerCosts
from simulated_run import COSTS, pipeline, simulate

MESSAGE_S = 0.002
DECODE = DecodeCosts(base_s=0.01, per_sequence_s=0.003, per_context_token_s=1e-5, per_prompt_token_s=2e-3)
WORKER = WorkerCosts(decode=DECODE, per_train_token_s=1e-3, update_s=0.1, load_s=1.0)


def ends_by_engine(requests: list[Request], config: Pipeline, costs: DecodeCosts) -> dict[tuple[str, int], float]:
    """When each sample ends, by a real engine's quanta at these costs."""
    model = random_model()
    engine = make_engine(
        model, blocks=4000, max_running=config.rollout.max_running, chunk_tokens=config.rollout.chunk_tokens
    )
    for item in requests:
        engine.add(item)
    now, ends, lengths = 0.0, {}, {}
    running: set[tuple[str, int]] = set()
    prompts = {r.request_id: len(r.prompt) for r in requests}
    while engine.has_work:
        result = engine.step()
        keys = [(emitted.request_id, emitted.sample) for emitted in result.emitted]
        if result.substage == SubStage.PREFILL:
            now += result.tokens * costs.per_prompt_token_s
        else:
            now += costs.step_s(len(keys), sum(prompts[key[0]] + lengths[key] for key in keys))
        for key in keys:
            lengths[key] = lengths.get(key, 0) + 1
            running.add(key)
        ends |= {(c.request_id, c.sample): now for c in result.completions}
    return ends


def ends_by_simulation(batches: list[list[Request]], config: Pipeline) -> dict[tuple[str, int], float]:
    """The same on a simulated worker, counted from when the requests arrive."""
    cluster = SimulatedCluster(
        1, costs=lambda worker, name: WORKER, lengths=lambda *_: pytest.fail("lengths are forced"), message_s=MESSAGE_S
    )
    common = {"pipeline": "p", "attempt": 1}
    cluster.send(
        0,
        [OpenPipeline(**common, config=config, weights="", optimizer=None, reference=None, kv_blocks=1)]
        + [Generate(**common, step=0, requests=tuple(batch)) for batch in batches],
    )
    start = MESSAGE_S + WORKER.load_s
    ends: dict[tuple[str, int], float] = {}
    while len(ends) < sum(r.samples for batch in batches for r in batch):
        for report in cluster.poll(1000.0):
            if isinstance(report, Sampled):
                ends |= {(c.request_id, c.sample): report.ended - start for c in report.completions}
                assert cluster.clock.now == pytest.approx(report.ended + MESSAGE_S)
    return ends


@settings(max_examples=12, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=4)), min_size=1, max_size=6
    ),
    max_running=st.integers(1, 6),
    chunk_tokens=st.integers(16, 40),
)
def test_every_sample_ends_when_a_real_engine_with_these_step_costs_ends_it(groups, max_running, chunk_tokens):
    config = Pipeline.model_validate(
        {"model": "m", "task": "t", "rollout": {"max_running": max_running, "chunk_tokens": chunk_tokens}}
    )
    requests = [
        request(str(i), prompt_of(prompt, seed=i), samples=len(lengths), forced=tuple(lengths), max_tokens=32)
        for i, (prompt, lengths) in enumerate(groups)
    ]
    by_engine, simulated = ends_by_engine(requests, config, DECODE), ends_by_simulation([requests], config)
    assert simulated == pytest.approx(by_engine, rel=1e-9)
    assert ends_by_simulation([[r] for r in requests], config) == pytest.approx(by_engine, rel=1e-9)


def test_a_request_that_arrives_during_a_decode_step_joins_after_it():
    """By hand: 10 + 3 ms a step alone (and 10 us for each token of context); a second sequence comes within step 3."""
    config = Pipeline.model_validate({"model": "m", "task": "t"})
    costs = WorkerCosts(
        decode=DecodeCosts(base_s=0.010, per_sequence_s=0.003, per_prompt_token_s=0.001),
        per_train_token_s=1e-3, update_s=0.1, load_s=0.0,
    )  # fmt: skip
    cluster = SimulatedCluster(1, costs=lambda worker, name: costs, lengths=lambda *_: [], message_s=0.0)
    common = {"pipeline": "p", "attempt": 1}
    one, two = (request(str(i), prompt_of(5), forced=(n,), max_tokens=99) for i, n in ((1, 11), (2, 5)))
    cluster.send(0, [OpenPipeline(**common, config=config, weights="", optimizer=None, reference=None, kv_blocks=1)])
    cluster.send(0, [Generate(**common, step=0, requests=(one,))])
    cluster.poll(0.0)
    cluster.poll(0.005 + 0.013 * 2 + 0.001)  # prefill of 5 tokens, two steps, a part of the third
    cluster.send(0, [Generate(**common, step=0, requests=(two,))])
    reports = [r for _ in range(9) for r in cluster.poll(0.1) if isinstance(r, Sampled)]
    # After three steps the second prompt is prefilled, then both decode: two ends after 4 steps, one after 3 more.
    second = 0.005 + 3 * 0.013 + 0.005 + 4 * 0.016
    assert [(r.completions[0].request_id, r.ended) for r in reports] == [
        ("2", pytest.approx(second)), ("1", pytest.approx(second + 3 * 0.013)),
    ]  # fmt: skip


def test_samples_at_the_cap_are_truncated_and_forced_ones_are_not(tmp_path):
    job = {"a": pipeline(steps=1, rollout__forced_lengths=None, rollout__max_tokens=50)}
    run = simulate(job, [[1]] * 8, tmp_path, natural=lambda *_: [30, 49, 50, 99])
    assert sorted({(s.tokens, s.finish) for s in run.record.sequences("a")}) == [
        (30, "stop"), (49, "stop"), (50, "length"),
    ]  # fmt: skip
    forced = simulate({"a": pipeline(steps=1, rollout__max_tokens=50)}, [[50]] * 8, tmp_path / "forced")
    assert {(s.tokens, s.finish) for s in forced.record.sequences("a")} == {(50, "stop")}


def test_the_controller_finishes_its_pipelines_with_every_sample_exactly_once(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 200, (20, 4)).tolist()
    jobs = {"a": pipeline(), "b": pipeline(seed=1, steps=2)}
    run = simulate(jobs, lengths, tmp_path, workers=3)
    for name, job in jobs.items():
        assert run.controller.drivers[name].stage == "finished"
        keys = [(s.step, s.prompt, s.sample) for s in run.record.sequences(name)]
        assert sorted(keys) == [(step, p, s) for step in range(job.steps) for p in range(8) for s in range(4)]
        assert run.record.steps(name)[0]["rollout_s"] > 0
    saved = [(e.pipeline, e.step) for e in run.record.events if isinstance(e, CheckpointSaved)]
    assert sorted(saved) == [("a", 2), ("a", 3), ("b", 2)]


def test_all_times_of_a_run_are_virtual(tmp_path):
    run = simulate({"a": pipeline()}, [[50] * 4] * 8, tmp_path)
    assert max(e.t for e in run.record.events) <= run.cluster.clock.now < 1000


def test_the_time_of_a_step_is_the_sum_of_its_work(tmp_path):
    """One worker, one prompt at a time: prefill, decode steps, two micro-batches, update; messages on the way."""
    job = {"a": pipeline(steps=1, rollout__prompts=1, train__micro_tokens=1)}
    run = simulate(job, [[21] * 4], tmp_path, workers=1)
    metrics = run.record.steps("a")[0]
    tokens = len("prompt 0")
    assert metrics["rollout_s"] == pytest.approx(tokens * 1e-4 + 20 * (0.01 + 4 * 0.001) + 2 * MESSAGE_S)
    # No group fits a micro-batch of one token, so each sample is trained alone, with the prompt.
    assert metrics["train_s"] == pytest.approx(4 * (tokens + 21) * 1e-4 + 2 * MESSAGE_S)
    assert metrics["update_s"] == pytest.approx(0.5 + 2 * MESSAGE_S)


def test_two_pipelines_share_a_worker_evenly_and_together_take_as_long_as_one_after_the_other(tmp_path):
    job, costs = pipeline(steps=1, rollout__prompts=1), replace(COSTS, load_s=0.0)
    alone, both = (
        simulate(dict.fromkeys(names, job), [[101] * 4], tmp_path / names, workers=1, costs=lambda *_: costs)
        for names in ("a", "ab")
    )
    solo_s = alone.record.steps("a")[0]["rollout_s"]
    for name in "ab":
        assert both.record.steps(name)[0]["rollout_s"] == pytest.approx(2 * solo_s, rel=0.05)
    busy = [
        sum(e.busy_s for e in r.record.events if isinstance(e, Span) and e.substage == "decode") for r in (alone, both)
    ]
    assert busy[1] == pytest.approx(2 * busy[0])


def test_a_slow_worker_is_as_slow_as_its_costs_say(tmp_path):
    slow = WorkerCosts(decode=DecodeCosts(base_s=0.03, per_sequence_s=0.003), per_train_token_s=1e-4, update_s=0.5)
    job = {"a": pipeline(steps=1, rollout__order="fifo", rollout__prompts=2)}
    run = simulate(job, [[101] * 4] * 2, tmp_path, costs=lambda worker, name: slow if worker else COSTS)
    ends = {s.worker: s.end for s in run.record.sequences("a")}
    decode_s = {e.worker: e.busy_s for e in run.record.events if isinstance(e, Span) and e.substage == "decode"}
    assert ends[1] > ends[0]
    assert decode_s.keys() == {0, 1}


@pytest.mark.parametrize("stage", ["load", "rollout", "train", "update", "checkpoint"])
def test_a_worker_that_dies_at_any_stage_is_replaced_and_no_sample_is_lost(tmp_path, stage):
    killed = []

    def kill_once(event, cluster, controller):
        if isinstance(event, StageEntered) and event.stage == stage and event.step >= (stage != "load") and not killed:
            killed.append(event)
            cluster.kill(1, after_s=0.05)

    jobs = {"a": pipeline(steps=4, checkpoint__every=1)}
    lengths = np.random.default_rng(0).integers(1, 100, (20, 4)).tolist()
    run = simulate(jobs, lengths, tmp_path, on_event=kill_once)
    assert any(isinstance(e, WorkerLost) for e in run.record.events)
    assert run.controller.drivers["a"].stage == "finished"
    ends = {(s.step, s.prompt, s.sample): s.tokens for s in run.record.sequences("a")}
    undisturbed = simulate(jobs, lengths, tmp_path / "undisturbed")
    assert ends == {(s.step, s.prompt, s.sample): s.tokens for s in undisturbed.record.sequences("a")}


def test_a_simulated_run_resumes_from_its_checkpoint(tmp_path):
    def interrupt(event, cluster, controller):
        if isinstance(event, StageEntered) and (event.stage, event.step) == ("rollout", 2):
            controller.interrupt()

    lengths = np.random.default_rng(0).integers(1, 100, (20, 4)).tolist()
    first = simulate({"a": pipeline(steps=4)}, lengths, tmp_path, on_event=interrupt)
    assert first.controller.drivers["a"].stage == "interrupted"
    second = simulate({"a": pipeline(steps=4)}, lengths, tmp_path)
    assert second.controller.drivers["a"].stage == "finished"
    assert min(second.record.steps("a")) == 2


def test_equal_arguments_give_equal_runs(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 200, (20, 4)).tolist()
    one, other = (simulate({"a": pipeline()}, lengths, tmp_path / name) for name in ("one", "other"))
    assert [(s.worker, s.start, s.end) for s in one.record.sequences("a")] == [
        (s.worker, s.start, s.end) for s in other.record.sequences("a")
    ]


@pytest.mark.slow
def test_thousands_of_long_sequences_are_simulated_on_64_workers(tmp_path):
    lengths = np.minimum(np.random.default_rng(0).lognormal(7, 1, (1024, 8)).astype(int) + 1, 8192).tolist()
    job = pipeline(
        steps=1, rollout__prompts=1024, rollout__max_tokens=8192, rollout__max_running=32, algorithm__group_size=8,
        train__micro_tokens=65536,
    )  # fmt: skip
    run = simulate({"a": job}, lengths, tmp_path, workers=64, alive_s=10.0)
    assert len(run.record.sequences("a")) == 8192
