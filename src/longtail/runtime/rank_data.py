"""Prompts and lengths of a finished or running run, out of its folder: what a ranker can learn from it.

The log of a run holds lengths but no prompts. These are made again from the run's configuration: which prompts a step
had is a function of the task, the seed and the step. Their token counts are compared with the logged ones, so a data
file that has changed since the run is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from longtail.core.config import Pipeline
from longtail.core.errors import DataError
from longtail.core.events import Event, PipelineStarted, Rollback, SequenceEnded, StepEnded
from longtail.core.types import FinishReason
from longtail.lengths.data_values import Sample
from longtail.lengths.messages import prompt_text
from longtail.rl.tasks import Task, prompt_indices
from longtail.runtime.check_pipeline import Findings, check_prompts
from longtail.runtime.jobfile import JobFile, load_jobs

CONFIG_FILE = "config.yaml"


def samples_of_run(folder: Path, events: Iterable[Event]) -> Mapping[str, list[Sample]]:
    """The samples of each pipeline, named ``RUN:PIPELINE``, lengths in tokens of its model.

    Steps that a rollback has made void are left out, and so are unfinished ones: of those only the short answers have
    ended. Pipelines without a finished step are left out too. Raises :class:`DataError` if the run has no samples or
    its prompts cannot be made again.
    """
    job_file = load_jobs(folder / CONFIG_FILE)
    ended = finished_sequences(events)
    found = {}
    for name, sequences in ended.items():
        pipeline = job_file.jobs.pipelines.get(name)
        if sequences and pipeline is not None:
            found[f"{folder.name}:{name}"] = list(_samples(folder, job_file, name, pipeline, sequences))
    if not found:
        raise DataError(f"{folder}: no step of this run has finished, so there are no lengths yet")
    return found


def finished_sequences(events: Iterable[Event]) -> dict[str, list[SequenceEnded]]:
    """The samples of finished steps by pipeline, each (step, prompt, sample) once, in the order of steps."""
    pending: dict[tuple[str, int], list[SequenceEnded]] = {}
    done: dict[str, dict[int, list[SequenceEnded]]] = {}
    for event in events:
        match event:
            case SequenceEnded():
                pending.setdefault((event.pipeline, event.step), []).append(event)
            case StepEnded():
                steps = done.setdefault(event.pipeline, {})
                steps[event.step] = pending.pop((event.pipeline, event.step), [])
            case Rollback() | PipelineStarted():
                steps = done.get(event.pipeline, {})
                for step in [s for s in steps if s >= event.step]:
                    del steps[step]
                for key in [k for k in pending if k[0] == event.pipeline]:
                    del pending[key]
    return {name: [s for step in sorted(steps) for s in steps[step]] for name, steps in done.items()}


def _samples(
    folder: Path, job_file: JobFile, name: str, pipeline: Pipeline, sequences: list[SequenceEnded]
) -> Iterator[Sample]:
    base = _base(folder, pipeline)
    findings = Findings(replace(job_file, path=base / CONFIG_FILE, lines={}))
    found = check_prompts(findings, name)
    if found is None:
        problem = findings.problems[0][1]
        raise DataError(f"{folder}: the prompts of {name} cannot be made again: {problem}")
    task, tokenizer = found
    texts: dict[tuple[int, int], str] = {}
    for sequence in sequences:
        place = (sequence.step, sequence.prompt)
        if place not in texts:
            prompt = _prompt(task, pipeline, *place)
            tokens = len(tokenizer.encode_prompt(prompt, chat=pipeline.rollout.chat))
            if tokens != sequence.prompt_tokens:
                raise DataError(
                    f"{folder}: prompt {sequence.prompt} in step {sequence.step + 1} of {name} had "
                    f"{sequence.prompt_tokens} tokens when it ran and has {tokens} now: the data or the tokenizer has "
                    "changed since, so its lengths cannot be matched to prompts"
                )
            texts[place] = prompt_text(prompt)
        yield Sample(texts[place], float(sequence.tokens), sequence.finish == FinishReason.LENGTH)


def _prompt(task: Task, pipeline: Pipeline, step: int, prompt: int) -> str | list[dict]:
    indices = prompt_indices(task, step=step, prompts=pipeline.rollout.prompts, seed=pipeline.seed)
    return task.example(indices[prompt]).prompt


def _base(folder: Path, pipeline: Pipeline) -> Path:
    """Where the run's relative paths begin: the job file lay there, and a run does not keep where that was.

    The working directory, or a folder above the run, whichever has the task's file.
    """
    candidates = [Path.cwd(), *folder.absolute().parents[:3]]
    if pipeline.task.endswith(".jsonl"):
        having = [c for c in candidates if (c / Path(pipeline.task).expanduser()).is_file()]
        if not having:
            raise DataError(
                f"{folder}: the task's file {pipeline.task} is neither in the working directory nor beside the run: "
                "start in the folder of the job file"
            )
        return having[0]
    return candidates[0]
