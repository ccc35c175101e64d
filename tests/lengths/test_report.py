"""The three files of a report: strict JSON, a page that needs nothing else, a picture for any data."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from longtail.core.errors import DataError
from longtail.lengths.data import LengthData
from longtail.lengths.evaluate import evaluate_sources
from longtail.lengths.report import Latency, Report, plain, write_report


def report(
    lengths, sources=None, *, scores=None, units=("words", "tokens", "chars"), names=("a", "b", "c"), **kwargs
) -> Report:
    lengths = np.asarray(lengths, float)
    n = len(lengths)
    rng = np.random.default_rng(0)
    scores = lengths + 0.3 * lengths.mean() * rng.normal(size=n) if scores is None else np.asarray(scores, float)
    numbers = np.zeros(n, np.int32) if sources is None else np.asarray(sources, np.int32)
    count = int(numbers.max(initial=0)) + 1
    data = LengthData(
        [f"prompt {i}" for i in range(n)], lengths, numbers, list(names[:count]), ", ".join(units[:count]),
        kwargs.pop("censored", np.zeros(n, bool)), units=tuple(units[:count]), notes=kwargs.pop("notes", ()),
    )  # fmt: skip
    quantiles = np.argsort(np.argsort(scores, kind="stable"), kind="stable") / max(1, n - 1)
    overall, by_source = evaluate_sources(data, scores, quantiles=quantiles, bootstrap=20)
    return Report(data, quantiles, overall, by_source, **kwargs)


def strict_json(path):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


class Page(HTMLParser):
    """Collects what a page loads, its tags and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href", "data", "action")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


CASES = {
    "usual": report(np.random.default_rng(1).lognormal(4, 1, 300), latency=Latency(0.1, 0.2, 256, 0.01)),
    "three sources": report(np.random.default_rng(1).lognormal(4, 1, 300), np.arange(300) % 3),
    "cut off": report(np.minimum(np.arange(200.0), 120), censored=np.arange(200) >= 120),
    "with zeros": report(np.maximum(0, np.arange(100.0) - 20)),
    "equal lengths": report(np.full(50, 512.0)),
    "equal scores": report(np.arange(50.0), scores=np.zeros(50)),
    "one row": report([5.0]),
    "two rows": report([5.0, 7.0]),
    "only zeros": report([0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_data_gives_strict_json_a_page_and_a_picture(tmp_path, case):
    paths = write_report(CASES[case], tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in paths)
    record = strict_json(tmp_path / "out" / "report.json")
    assert record["overall"]["n"] == len(CASES[case].data)
    assert record["verdict"]
    png = (tmp_path / "out" / "report.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert not page.open or page.open == ["meta"]
    assert record["verdict"] in page.text
    assert len(page.loads) == 1
    assert page.loads[0].startswith("data:image/png;base64,")


def test_the_page_holds_the_figures_of_the_json(tmp_path):
    write_report(CASES["usual"], tmp_path)
    record, page = strict_json(tmp_path / "report.json"), Page((tmp_path / "report.html").read_text())
    assert f"{record['overall']['tau']:.3f}" in page.text
    assert f"{100 * record['overall']['pair_accuracy']:.1f} % of {record['overall']['pairs']:,} pairs" in page.text
    assert "0.100 ms, p99 0.200 ms" in page.text


def test_names_from_data_cannot_break_the_page_or_the_picture(tmp_path):
    evil = "<script>alert(1)</script>&$x_{1}$"
    made = report(np.arange(1.0, 60), names=(evil, "b", "c"), notes=(f"{evil}:3: bad",), ranker={"name": evil})
    write_report(made, tmp_path)
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert evil in page.text
    assert not re.search(r"https?://", text)


def test_plain_makes_strict_json_of_what_numpy_and_cards_hold():
    value = {"a": np.float32(0.5), "b": [np.int64(3), float("nan"), np.array([1.0, np.inf])], 3: (True, None)}
    assert plain(value) == {"a": 0.5, "b": [3, None, [1.0, None]], "3": [True, None]}


def test_a_report_that_cannot_be_written_names_the_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file: the report cannot be written"):
        write_report(CASES["two rows"], tmp_path / "file")
