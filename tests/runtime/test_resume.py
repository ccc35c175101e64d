"""Starting a run again with a changed job file."""

from __future__ import annotations

import pytest

from longtail.core.config import Jobs
from longtail.runtime.resume import FIXED, compare_for_resume
from longtail.runtime.schema import keys

BASE = {"pipelines": {"a": {"model": "tiny", "task": "collatz"}, "b": {"model": "tiny", "task": "reverse-text"}}}
OTHER_VALUES = {"text": "other", "a whole number": 3, "a number": 0.25, "a list of texts": ["x"]}
"""A value that differs from the default, by the kind of the key."""


def jobs(**changes) -> Jobs:
    pipeline = {**BASE["pipelines"]["a"], **changes}
    return Jobs.model_validate({"pipelines": {**BASE["pipelines"], "a": pipeline}})


def test_an_unchanged_job_file_resumes_without_a_word():
    assert compare_for_resume(jobs(), jobs()) == ([], [])


CHANGEABLE = [path for path, key in keys().items() if path[0] == "pipelines" and not key.is_section]
CHANGEABLE.remove(("pipelines", "*", "algorithm", "name"))  # there is only one so far


@pytest.mark.parametrize("path", CHANGEABLE)
def test_every_changed_key_of_a_pipeline_is_refused_or_honoured_by_name(path):
    key, section = keys()[path], path[2:]
    value = next((c for c in key.choices if c != key.default), None) or OTHER_VALUES.get(key.nouns[0])
    if section == ("task_args",):
        value = {"max_n": 9}
    elif key.nouns[0].startswith("a list of 2"):
        value = [0.5, 0.5]
    elif section == ("rollout", "chunk_tokens"):
        value = 64
    elif section == ("max_slowdown",):
        value = 2.5
    change = {section[-1]: value} if len(section) == 1 else {section[0]: {section[1]: value}}
    problems, notes = compare_for_resume(jobs(), jobs(**change))
    dotted = ".".join(section)
    said = problems if dotted in FIXED else notes
    assert len(problems) + len(notes) == 1
    assert said[0].startswith(f"pipelines.a.{dotted}")


def test_a_refused_change_says_both_values_and_what_to_do():
    problems, notes = compare_for_resume(jobs(), jobs(model="smollm2-135m", steps=200, task_args={"max_n": 9}))
    assert problems == [
        "pipelines.a.model was 'tiny' when this run began and is 'smollm2-135m' now, which would mix two experiments: "
        "undo it, or start over with --fresh.",
        "pipelines.a.task_args.max_n was unset when this run began and is 9 now, which would mix two experiments: "
        "undo it, or start over with --fresh.",
    ]
    assert notes == [
        "pipelines.a.steps was 100 when this run began and is 200 now: the new value holds from the resumed step on."
    ]


def test_pipelines_that_come_and_go_are_noted():
    old, new = jobs(), jobs()
    old = old.model_copy(update={"pipelines": {"a": old.pipelines["a"]}})
    assert compare_for_resume(old, new) == ([], ["pipelines.b is new: it starts at step 0."])
    assert compare_for_resume(new, old) == (
        [],
        ["pipelines.b is no longer in the job file: it stays at its last checkpoint."],
    )


def test_other_workers_are_noted_and_names_and_folders_are_not_compared():
    old, new = jobs(), jobs().model_copy(update={"workers": 3, "runs_dir": "elsewhere", "name": "x"})
    assert compare_for_resume(old, new) == (
        [],
        ["workers was unset and is 3 now: results stay the same up to rounding."],
    )
