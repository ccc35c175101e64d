"""The order of a pipeline's steps: what it learns, what it tells, and that it survives restarts and bad rankers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from longtail.core.events import MoveMade, StageEntered, StepEnded
from longtail.costs.decode import DecodeCosts
from longtail.costs.worker import WorkerCosts
from longtail.lengths.beliefs import Beliefs, prompt_keys
from longtail.rl.tasks import prompt_indices
from longtail.runtime.forecast import draw, pack, unpack
from longtail.runtime.order import rank_correlation
from simulated_run import Rows, pipeline, simulate

PROMPTS, GROUP, EPOCHS = 24, 4, 4


def repeating_lengths(seed: int = 0) -> list[list[int]]:
    """Lengths with a long tail that are nearly the same in every epoch: the prompt decides."""
    rng = np.random.default_rng(seed)
    typical = np.exp(rng.normal(3.5, 1.0, PROMPTS))
    return [np.clip(t * rng.normal(1, 0.05, GROUP * EPOCHS), 1, 400).astype(int).tolist() for t in typical]


def job(**changes):
    usual = {
        "steps": EPOCHS,
        "rollout__prompts": PROMPTS,
        "rollout__max_tokens": 400,
        "rollout__max_running": 8,
        "train__micro_tokens": 100_000,
        "checkpoint__every": 100,  # a save takes time from the next rollout
    }
    return pipeline(**{**usual, **changes})


def moves(run) -> list[MoveMade]:
    return [e for e in run.record.events if isinstance(e, MoveMade) and e.move == "order"]


class Ranker:
    """Knows the lengths of prompts; may fail at one call."""

    def __init__(self, lengths: list[list[int]], fails_at: int | None = None) -> None:
        mean = np.array([np.mean(row) for row in lengths])
        self.by_prompt = {f"prompt {i}": (mean < mean[i]).mean() for i in range(len(lengths))}
        self.fails_at, self.calls, self.texts = fails_at, 0, []

    def quantile(self, prompts):
        self.calls += 1
        self.texts += list(prompts)
        if self.calls == self.fails_at:
            raise ValueError("the weights are damaged")
        return np.array([self.by_prompt[p] for p in prompts], np.float32)


def test_from_the_second_epoch_on_history_is_nearly_as_good_as_the_truth(tmp_path):
    lengths = repeating_lengths()
    steps = {
        order: simulate({"a": job(rollout__order=order)}, lengths, tmp_path / order).record.steps("a")
        for order in ("fifo", "ranked", "oracle")
    }
    fifo, ranked, oracle = (sum(steps[order][step]["rollout_s"] for step in range(1, EPOCHS)) for order in steps)
    assert oracle < 0.95 * fifo
    assert fifo - ranked > 0.8 * (fifo - oracle)
    for step in range(1, EPOCHS):
        assert steps["ranked"][step]["length_tau"] > 0.8
        for order, tolerance in (("ranked", 0.25), ("oracle", 0.02)):
            metrics = steps[order][step]
            assert metrics["rollout_predicted_s"] == pytest.approx(metrics["rollout_s"], rel=tolerance)


def test_a_good_ranker_helps_in_the_first_epoch(tmp_path):
    lengths = repeating_lengths()
    runs = {
        name: simulate({"a": job(steps=1, rollout__order=order)}, lengths, tmp_path / name, ranker=ranker)
        for name, order, ranker in (
            ("fifo", "fifo", None), ("blind", "ranked", None), ("ranked", "ranked", Ranker(lengths)),
        )
    }  # fmt: skip
    fifo, blind, ranked = (runs[name].record.steps("a")[0]["rollout_s"] for name in ("fifo", "blind", "ranked"))
    assert ranked < blind <= fifo
    assert runs["ranked"].record.steps("a")[0]["length_tau"] > 0.9
    assert "length_tau" not in runs["blind"].record.steps("a")[0]


def test_each_step_tells_where_its_lengths_come_from_and_what_it_gains(tmp_path):
    lengths = repeating_lengths()
    run = simulate({"a": job(rollout__prompts=16)}, lengths, tmp_path, ranker=Ranker(lengths))
    first, second, third = moves(run)[:3]
    prompts = [prompt_indices(Rows(lengths), step=step, prompts=16, seed=0) for step in range(3)]
    known = sum(p in prompts[0] for p in prompts[1])
    assert 0 < known < 16
    assert first.reason.endswith("; ranker prior, no prompt with history")
    assert second.reason.endswith(f"; ranker prior, {known} of 16 prompts with history")
    assert third.reason.endswith("; ranker prior, 16 of 16 prompts with history")
    assert first.predicted_gain_s is None  # nothing has been decoded yet
    assert all(move.predicted_gain_s >= 0 for move in (second, third))
    assert all(move.workers == [0, 1] for move in (first, second, third))
    oracle = simulate({"a": job(rollout__order="oracle")}, lengths, tmp_path / "oracle")
    assert moves(oracle)[1].reason.endswith("first; lengths are given")


def test_a_ranker_that_fails_is_told_once_and_stops_nothing(tmp_path):
    lengths = repeating_lengths()
    run = simulate({"a": job(rollout__prompts=8)}, lengths, tmp_path, ranker=Ranker(lengths, fails_at=2))
    assert run.controller.drivers["a"].stage == "finished"
    told = [note for note in run.record.notes() if "ranker" in note]
    assert told == ["a: the ranker failed (ValueError: the weights are damaged); prompts are ordered by history alone."]
    assert "ranker" not in moves(run)[-1].reason


@pytest.mark.parametrize("answer", [[0.5], [np.nan] * 8, [2.0] * 8, None])
def test_a_ranker_that_answers_nonsense_counts_as_failed(tmp_path, answer):
    class Nonsense:
        def quantile(self, prompts):
            return answer

    run = simulate({"a": job(rollout__prompts=8, steps=2)}, repeating_lengths(), tmp_path, ranker=Nonsense())
    assert run.controller.drivers["a"].stage == "finished"
    assert sum("the ranker failed" in note for note in run.record.notes()) == 1


def test_a_prompt_is_ranked_once_whatever_the_number_of_epochs(tmp_path):
    lengths = repeating_lengths()
    ranker = Ranker(lengths)
    simulate({"a": job(rollout__prompts=8, steps=6)}, lengths, tmp_path, ranker=ranker)
    assert sorted(ranker.texts) == sorted(ranker.by_prompt)


def test_a_resumed_run_orders_as_if_it_had_never_stopped(tmp_path):
    lengths = repeating_lengths()
    jobs = {"a": job(rollout__prompts=8, steps=8, checkpoint__every=2)}
    whole = simulate(jobs, lengths, tmp_path / "whole")

    def interrupt(event, cluster, controller):
        if isinstance(event, StageEntered) and (event.stage, event.step) == ("train", 5):
            controller.interrupt()

    cut = simulate(jobs, lengths, tmp_path / "cut", on_event=interrupt)
    assert cut.controller.drivers["a"].saver.last_step == 5
    resumed = simulate(jobs, lengths, tmp_path / "cut")
    expected = {m.step: m.reason for m in moves(whole)}
    assert {m.step: m.reason for m in moves(resumed)} == {step: expected[step] for step in (5, 6, 7)}
    for step in (5, 6, 7):
        mine, theirs = resumed.record.steps("a")[step], whole.record.steps("a")[step]
        assert mine["length_tau"] == theirs["length_tau"]
        assert mine["rollout_predicted_s"] == pytest.approx(theirs["rollout_predicted_s"], rel=0.02)


def test_a_checkpoint_whose_knowledge_of_lengths_is_damaged_still_resumes(tmp_path):
    lengths = repeating_lengths()
    simulate({"a": job(rollout__prompts=8, steps=2)}, lengths, tmp_path)
    path = tmp_path / "a" / "step-000002" / "state.json"
    record = json.loads(path.read_text())
    record["state"]["order"]["lengths"] = "AAAA"
    path.write_text(json.dumps(record))
    run = simulate({"a": job(rollout__prompts=8, steps=4)}, lengths, tmp_path)
    assert run.controller.drivers["a"].stage == "finished"
    assert min(run.record.steps("a")) == 2
    assert any("they are learnt anew" in note for note in run.record.notes())


def test_void_steps_are_forgotten_when_a_worker_is_lost(tmp_path):
    lengths = repeating_lengths()
    jobs = {"a": job(rollout__prompts=8, steps=8, checkpoint__every=3)}
    killed = []

    def kill(event, cluster, controller):
        if isinstance(event, StepEnded) and event.step == 4 and not killed:
            killed.append(event)
            cluster.kill(1)

    whole = simulate(jobs, lengths, tmp_path / "whole")
    disturbed = simulate(jobs, lengths, tmp_path / "disturbed", on_event=kill)
    assert len(moves(disturbed)) > len(moves(whole))
    for step, metrics in whole.record.steps("a").items():
        assert disturbed.record.steps("a")[step].get("length_tau") == metrics.get("length_tau")


def test_a_worker_that_is_slower_gets_less_to_do(tmp_path):
    def costs(worker: int, name: str) -> WorkerCosts:
        speed = (1.0, 3.0)[worker]
        decode = DecodeCosts(base_s=0.01 * speed, per_sequence_s=0.001 * speed, per_prompt_token_s=1e-4)
        return WorkerCosts(decode=decode, per_train_token_s=1e-4, update_s=0.1)

    lengths = repeating_lengths()
    fifo, ranked = (
        simulate({"a": job(rollout__order=order)}, lengths, tmp_path / order, costs=costs)
        for order in ("fifo", "ranked")
    )
    assert ranked.record.steps("a")[2]["rollout_s"] < 0.75 * fifo.record.steps("a")[2]["rollout_s"]


def test_prompts_whose_samples_are_cut_off_are_expected_to_be_cut_off_again(tmp_path):
    def natural(pipeline, step, request):
        return [999 if len(request.prompt) == len("prompt 1") else 30] * request.samples

    run = simulate({"a": job(rollout__forced_lengths=None)}, repeating_lengths(), tmp_path, natural=natural)
    assert {s.finish for s in run.record.sequences("a")} == {"stop", "length"}
    assert run.record.steps("a")[2]["length_tau"] > 0.9
    assert run.record.steps("a")[2]["rollout_predicted_s"] == pytest.approx(
        run.record.steps("a")[2]["rollout_s"], rel=0.1
    )


def test_drawn_outcomes_have_the_moments_of_the_belief():
    rng = np.random.default_rng(0)
    beliefs = Beliefs(1000)
    keys = np.repeat(prompt_keys([f"p{i}" for i in range(50)]), 8)
    lengths = np.clip(np.exp(np.repeat(rng.normal(4, 1, 50), 8) + rng.normal(0, 0.4, 400)), 1, 1000).astype(int)
    beliefs.add(np.arange(400), keys)
    beliefs.end(np.arange(400), lengths)
    beliefs.next_step()
    belief = beliefs.upcoming(prompt_keys([f"p{i}" for i in range(0, 50, 10)]))
    drawn = draw(belief, beliefs.params.within_at(belief.mean), samples=8, draws=4000, rng=rng)
    assert drawn.shape == (4000, 5, 8)
    assert drawn.min() >= 1
    assert drawn.max() <= 1000
    assert drawn.mean(axis=(0, 2)) == pytest.approx(belief.expected(), rel=0.05)
    for p in (0.1, 0.5, 0.9):
        assert np.quantile(drawn, p, axis=(0, 2)) == pytest.approx(belief.quantile(p), rel=0.1)


def test_beliefs_survive_packing_to_text():
    values = {"step": 3, "history": np.array([0.1, 1 / 3]), "keys": np.array([2**62 + 1, -5])}
    again = unpack(pack(values))
    assert again == {"step": 3, "history": [0.1, 1 / 3], "keys": [2**62 + 1, -5]}


def test_rank_correlation_is_left_out_where_it_means_nothing():
    assert rank_correlation(np.array([1.0]), np.array([2.0])) is None
    assert rank_correlation(np.ones(3), np.arange(3)) is None
    assert rank_correlation(np.arange(4), np.array([1, 3, 2, 9])) == pytest.approx(2 / 3)
