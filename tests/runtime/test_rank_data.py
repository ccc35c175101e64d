"""Prompts and lengths out of a run folder: only finished, valid steps, and prompts that are proven to be the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longtail.core.errors import DataError
from longtail.core.events import Event, PipelineStarted, Rollback, SequenceEnded, StepEnded
from longtail.engine.models import resolve_model
from longtail.engine.tokenizer import Tokenizer
from longtail.lengths.data import read_lengths
from longtail.observe.store import RunStore, read_events
from longtail.rl.tasks import load_task
from longtail.runtime.jobfile import dump_resolved, load_jobs
from longtail.runtime.rank_data import finished_sequences, samples_of_run

JOBS = """\
pipelines:
  rev: {model: tiny, task: reverse-text, rollout: {prompts: 2, max_tokens: 20}, algorithm: {group_size: 2}, steps: 3}
  own:
    {model: tiny, task: questions.jsonl, reward: r:f, rollout: {prompts: 2, max_tokens: 20},
     algorithm: {group_size: 2}, steps: 3, seed: 5}
"""
QUESTIONS = ["one", "number two", "the third question", "and a fourth, longer than the others"]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """The folder of a run whose log is still to be written; its job file lies two folders above, as by default."""
    monkeypatch.chdir(tmp_path)
    Path("jobs.yaml").write_text(JOBS)
    Path("questions.jsonl").write_text("".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS))
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    dump_resolved(load_jobs("jobs.yaml").jobs, folder / "config.yaml")
    return folder


def tokens_of(text: str) -> int:
    return len(Tokenizer.load(resolve_model("tiny")).encode_prompt(text, chat=None))


def ended(pipeline: str, step: int, prompt: int, sample: int, tokens: int, text: str, finish: str = "stop") -> Event:
    return SequenceEnded(
        pipeline=pipeline, step=step, prompt=prompt, sample=sample, worker=0, prompt_tokens=tokens_of(text),
        tokens=tokens, finish=finish, preemptions=0, start=0.0, end=1.0,
    )  # fmt: skip


def log(folder: Path, *events: Event) -> None:
    store = RunStore(folder)
    for event in events:
        store.write(event)
    store.close()


def read(folder: Path):
    return read_lengths(folder, read_run=lambda f: samples_of_run(f, read_events(f)))


def test_prompts_are_made_again_and_lengths_belong_to_them(run):
    task = load_task("reverse-text", {}, seed=0, base=Path())
    texts = [task.example(i).prompt for i in range(4)]
    log(
        run,
        *(ended("rev", i // 2, i % 2, s, 10 * i + s, texts[i]) for i in range(4) for s in range(2)),
        StepEnded(pipeline="rev", step=0, metrics={}),
        StepEnded(pipeline="rev", step=1, metrics={}),
    )
    data = read(run)
    assert (data.source_names, data.unit) == (["demo:rev"], "tokens")
    assert dict(zip(data.prompts, data.lengths, strict=True)) == {t: 10 * i + 0.5 for i, t in enumerate(texts)}


def test_a_task_file_is_found_from_elsewhere_and_its_order_followed(run, tmp_path, monkeypatch):
    from longtail.rl.tasks import prompt_indices

    task = load_task("questions.jsonl", {}, seed=5, base=Path())
    texts = [QUESTIONS[i] for step in range(2) for i in prompt_indices(task, step=step, prompts=2, seed=5)]
    log(
        run,
        *(ended("own", i // 2, i % 2, 0, len(text), text, finish="length") for i, text in enumerate(texts)),
        *(StepEnded(pipeline="own", step=s, metrics={}) for s in range(2)),
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    data = read(run)
    assert dict(zip(data.prompts, data.lengths, strict=True)) == {q: len(q) for q in QUESTIONS}
    assert data.censored.all()


def test_data_that_changed_since_the_run_is_noticed(run):
    log(run, ended("own", 0, 0, 0, 5, "no such prompt, and a long one at that"),
        StepEnded(pipeline="own", step=0, metrics={}))  # fmt: skip
    with pytest.raises(DataError, match=r"prompt 0 in step 1 of own had \d+ tokens when it ran and has \d+ now"):
        read(run)
    Path("questions.jsonl").unlink()
    with pytest.raises(DataError, match=r"file questions.jsonl is neither in the working directory nor beside the run"):
        read(run)


def test_a_run_without_a_finished_step_has_no_lengths(run):
    log(run, ended("rev", 0, 0, 0, 5, "x"))
    with pytest.raises(DataError, match="no step of this run has finished"):
        read(run)


def test_void_and_unfinished_steps_are_left_out_and_samples_counted_once():
    def sample(step, tokens):
        return ended("p", step, 0, 0, tokens, "x")

    def done(step):
        return StepEnded(pipeline="p", step=step, metrics={})

    events = [
        sample(0, 10), done(0), sample(1, 11), done(1), sample(2, 12),
        Rollback(pipeline="p", step=1, reason="worker lost"),
        PipelineStarted(pipeline="p", step=1, steps=9, model="m", task="t", parameters=1),
        sample(1, 21), done(1), sample(2, 22), done(2), sample(3, 23),
    ]  # fmt: skip
    assert [(s.step, s.tokens) for s in finished_sequences(events)["p"]] == [(0, 10), (1, 21), (2, 22)]
