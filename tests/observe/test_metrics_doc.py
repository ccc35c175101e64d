"""docs/metrics.md is the data dictionary: it lists every field of every event and every metric, and no other."""

import dataclasses
import re
from pathlib import Path

import pytest

from longtail.core.events import EVENTS
from longtail.observe.moves import EVERY_STEP, KINDS
from synthetic_run import step_metrics

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def first_column(section: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)


@pytest.mark.parametrize("kind", EVENTS)
def test_every_field_of_every_event_is_documented(kind):
    section = re.split(r"^##+ ", TEXT.partition(f"### `{kind}`")[2], maxsplit=1, flags=re.MULTILINE)[0]
    assert first_column(section) == [f.name for f in dataclasses.fields(EVENTS[kind]) if f.name != "t"]


def test_every_metric_of_a_step_is_documented():
    section = TEXT.partition("## Metrics of a step")[2].partition("\n## ")[0]
    assert sorted(first_column(section)) == sorted(step_metrics(0.0))


def test_every_kind_of_move_is_documented():
    section = TEXT.partition("#### Kinds of moves")[2].partition("\n##")[0]
    kinds = re.findall(r"^\| ([a-z, ]+) \|", section, flags=re.MULTILINE)
    assert sorted(kind for row in kinds[1:] for kind in row.split(", ")) == sorted([EVERY_STEP, *KINDS])
