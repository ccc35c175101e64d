"""The live display and the plain lines: what a person sees."""

import io
import math
import os
import pty
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from longtail.core.events import (
    Event,
    MoveEnded,
    MoveMade,
    Note,
    PipelineEnded,
    PipelineStarted,
    Rollback,
    RunEnded,
    RunStarted,
    SequenceEnded,
    Span,
    StageEntered,
    StepEnded,
)
from longtail.observe.live import RunView
from longtail.observe.plain import MOVES_EVERY_S, MOVES_IN_FULL, PlainSink
from longtail.observe.terminal import TerminalSink, console_sink, draw
from longtail.observe.text import duration, number, one_line, reward, sparkline
from synthetic_run import RESUMED, START, step_events, two_pipelines


def screen(view: RunView, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(draw(view, width, view.now))
    return console.export_text().splitlines()


def plain(events: list[Event], **options) -> list[str]:
    stream = io.StringIO()
    sink = PlainSink(stream, **options)
    for event in events:
        sink.write(event)
    sink.close()
    return stream.getvalue().splitlines()


def one_pipeline(steps: int, *, step_s: float) -> list[Event]:
    events: list[Event] = [
        RunStarted(t=START, run="r", version="0.1.0", workers=1, devices=["cpu"], pipelines=["p"]),
        PipelineStarted(t=START, pipeline="p", step=0, steps=steps, model="tiny", task="t", parameters=10),
    ]
    for step in range(1, steps + 1):
        events.append(
            StepEnded(t=START + step * step_s, pipeline="p", step=step - 1, metrics={"reward_mean": step / steps})
        )
    return events


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_state_of_a_run_fits_the_width_one_line_per_pipeline(width):
    view = RunView()
    for event in two_pipelines():
        view.apply(event)
        lines = screen(view, width)
        assert max(map(len, lines)) <= width
        if width >= 80:
            errors = sum(p.error is not None for p in view.pipelines.values())
            plan = view.plan is not None
            assert len(lines) <= 1 + 2 + errors + 1 + plan + 2 + 2


def test_the_display_shows_step_reward_curve_stage_rate_and_workers():
    view = RunView()
    for event in two_pipelines():
        view.apply(event)
        if isinstance(event, SequenceEnded) and event.pipeline == "sums" and event.step == 6 and event.t > RESUMED:
            break
    sums, collatz, workers = (line for line in screen(view, 80)[1:4])
    assert sums == "sums     step  7/20  reward  0.30 ▁▂▄▅▇█  rollout 1/4       66.7 tok/s"
    assert collatz == "collatz  step  7/10  reward  0.60 ▁▂▄▅▇█  rollout 0/4       50.0 tok/s"
    assert workers == "w0+w1  75 %  TP2 sums decode b=2"


def test_the_end_shows_the_outcome_and_the_error():
    text = "\n".join(screen(RunView.of(two_pipelines()), 80))
    assert "finished" in text
    assert "failed" in text
    assert "reward my_rewards:chain returned 7 values for 16 completions (step 9)." in " ".join(text.split())
    assert re.search(r"w0  75 %", text)


def test_hundreds_of_workers_take_few_lines():
    started = RunStarted(t=0.0, run="r", version="0", workers=500, devices=["cuda"] * 500, pipelines=["p"])
    lines = screen(RunView.of([started, Note(t=5.0, level="info", message="x")]), 80)
    assert len(lines) < 15
    assert any("more; all workers 0 %" in line for line in lines)


def test_long_names_and_markup_do_not_break_a_line():
    view = RunView.of(
        [
            PipelineStarted(t=0.0, pipeline="a" * 64, step=0, steps=1_000_000, model="m", task="[red]t", parameters=1),
            Note(t=0.0, level="info", message="[bold]x[/] \x1b[31m" + "y" * 300),
        ]
    )
    lines = screen(view, 80)
    assert max(map(len, lines)) <= 80
    assert "[bold]x[/]" in lines[-1]


def test_a_terminal_run_leaves_its_last_state_and_its_warnings_on_the_screen():
    console = Console(file=io.StringIO(), width=80, height=40, force_terminal=True)
    sink = TerminalSink(console, clock=lambda: RESUMED)
    *events, end = two_pipelines()
    for event in [*events, StepEnded(t=end.t, pipeline="sums", step=19, metrics={"loss": math.nan}), end]:
        sink.write(event)
    sink.close()
    sink.write(Note(level="error", message="after the end"))
    text = console.file.getvalue()
    assert "warning: sums: loss is NaN at step 20" in text
    assert "after the end" not in text
    assert "finished" in text[text.rindex("longtail") :]
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_terminal_that_goes_away_does_not_stop_the_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    for sink in (TerminalSink(Console(file=Gone(), force_terminal=True, width=80)), PlainSink(Gone())):
        for event in two_pipelines():
            sink.write(event)
        sink.close()


def test_the_console_is_plain_lines_unless_it_is_a_terminal_that_can_draw(monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with (tmp_path / "log").open("w") as file:
        assert isinstance(console_sink(file), PlainSink)
    monkeypatch.delenv("FORCE_COLOR")
    _, worker = pty.openpty()
    for term, encoding, kind in [
        ("xterm-256color", "utf-8", TerminalSink),
        ("dumb", "utf-8", PlainSink),
        ("xterm-256color", "ascii", PlainSink),
    ]:
        monkeypatch.setenv("TERM", term)
        with os.fdopen(os.dup(worker), "w", encoding=encoding) as stream:
            assert isinstance(console_sink(stream), kind)


def test_plain_lines_hold_no_escape_codes_whatever_the_messages_hold():
    hostile = "a\x1b[31mred\x1b]0;title\x07 \x9b1m\r\nb [bold]"
    events = [
        *two_pipelines(),
        Note(t=START, level="error", message=hostile),
        PipelineEnded(t=START, pipeline=hostile, step=1, reason="failed", error=hostile),
    ]
    lines = plain(events)
    assert all(line.isprintable() for line in lines)
    assert any(line.endswith("error: ared  1m") and after.strip() == "b [bold]" for line, after in pairwise(lines))


def test_plain_lines_in_ascii_replace_what_they_cannot_say():
    raw = io.BytesIO()
    sink = PlainSink(io.TextIOWrapper(raw, encoding="ascii"))
    sink.write(Note(t=START, level="warning", message="zu groß → kürzen"))
    assert b"warning: zu gro? ? k?rzen" in raw.getvalue()


def test_a_fast_run_does_not_flood_but_shows_its_first_and_last_step():
    lines = [line for line in plain(one_pipeline(1000, step_s=0.05)) if " step " in line]
    assert 45 <= len(lines) <= 55
    assert "p step 1/1000" in lines[0]
    assert "p step 1000/1000" in lines[-1]


def test_a_slow_run_shows_every_step():
    lines = [line for line in plain(one_pipeline(20, step_s=3.0)) if " step " in line]
    assert len(lines) == 20


@pytest.mark.parametrize(
    "end",
    [
        [PipelineEnded(t=START + 1, pipeline="p", step=7, reason="failed", error="boom")],
        [RunEnded(t=START + 1, reason="interrupted")],
        [],
    ],
)
def test_the_last_step_before_any_end_is_shown(end):
    lines = plain([*one_pipeline(20, step_s=0.01)[:9], *end])
    assert sum("step 7/20" in line for line in lines) == 1


def test_a_nan_is_said_loudly_even_when_its_step_is_not_shown():
    events = one_pipeline(100, step_s=0.01)
    events[50] = StepEnded(t=events[50].t, pipeline="p", step=48, metrics={"loss": math.nan, "kl": math.inf})
    assert any(line.endswith("warning: p: loss is NaN at step 49; kl is inf at step 49") for line in plain(events))


def test_a_traceback_keeps_its_lines_and_a_pipeline_is_named_once():
    note = Note(
        t=START, level="error", pipeline="p", message="p: worker 0:\nTraceback:\n  File x\x1b[0m\n\nKeyError: 1\n"
    )
    first, *rest = plain([note])
    assert first.endswith("  error: p: worker 0:")
    assert [line.strip() for line in rest] == ["Traceback:", "File x", "KeyError: 1"]
    assert rest[1].startswith(rest[0][:10] + "  File")


def test_a_fall_back_is_said_with_what_it_costs():
    lines = plain(list(two_pipelines()))
    assert any(
        line.endswith("  sums: continues after step 5 (3 finished steps are void): resumed from checkpoint")
        for line in lines
    )
    assert any(
        "warning: sums: continues after step 10 (2 finished steps are void): worker 1 was lost" in line
        for line in lines
    )


def test_a_resumed_run_continues_its_curve():
    before = [e for e in two_pipelines() if e.t < RESUMED]
    after = [e for e in two_pipelines() if e.t >= RESUMED]
    sink = TerminalSink(Console(file=io.StringIO(), width=80), view=RunView.of(before))
    for event in after:
        sink.write(event)
    sink.close()
    assert len(sink.view.pipelines["sums"].rewards) == 20
    assert any("(resumed)" in line for line in plain(after, view=RunView.of(before)))


def test_a_closed_pipe_ends_the_lines_not_the_process():
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from synthetic_run import two_pipelines\n"
        "from longtail.observe.terminal import console_sink\n"
        "sink = console_sink()\n"
        "for event in list(two_pipelines()) * 20: sink.write(event)\n"
        "sink.close(); print('alive', file=sys.stderr)\n"
        "sys.stdout = None\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parent.parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    process.wait()
    assert said.startswith("alive")


@given(st.text())
def test_one_line_is_printable_text_on_one_line(text):
    line = one_line(text)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", line)
    assert one_line("plain [x] ünï") == "plain [x] ünï"


@given(st.lists(st.floats(), max_size=60), st.integers(0, 20))
def test_a_sparkline_has_at_most_its_width_for_any_numbers(values, width):
    assert len(sparkline(values, width)) == min(width, len(values))


def test_formats_of_numbers_and_times():
    assert sparkline([1, 2, 3, 4], 4) == "▁▃▆█"
    assert sparkline([1, math.nan, 1], 3) == "▁ ▁"
    assert sparkline([-1.7e308, 1.7e308, 1.7e308], 3) == "▁██"
    values = [None, 0.0, 0.414, 1.0, 99.96, 12.34, 1812.4, 1.2e-6, math.nan, -math.inf, 2.5e7, -0.41]
    assert list(map(number, values)) == [
        "-", "0.00", "0.41", "1.00", "100", "12.3", "1,812", "1.2e-06", "NaN", "-inf", "2.5e+07", "-0.41",
    ]  # fmt: skip
    assert list(map(reward, [4.6e-4, -1e-3, 0.5, None, math.nan])) == ["0.00", "0.00", "0.50", "-", "NaN"]
    assert list(map(duration, [0.35, 12.34, 59.96, 245, 3599.9, 7980, None, math.nan])) == [
        "0.35 s", "12.3 s", "1 min 00 s", "4 min 05 s", "1 h 00 min", "2 h 13 min", "-", "-",
    ]  # fmt: skip


def test_the_view_of_an_event_stream_is_drawn_at_any_point():
    view = RunView()
    screen(view, 80)
    for event in step_events(START, "p", 1, reward=math.nan, workers=1):
        view.apply(event)
        screen(view, 80)


def test_a_move_that_every_step_makes_takes_no_line_of_a_display():
    start, *_ = one_pipeline(1, step_s=1.0)
    moves = [
        MoveMade(t=START + 5.0 * i, pipeline="p", step=i, move=move, workers=[0], reason="because")
        for i, move in enumerate(("order", "merge", "hold"))
    ]
    lines = plain([start, *moves])
    assert [line for line in lines if "because" in line] == [line for line in lines if "merge p to w0" in line]
    shown = [line for line in screen(RunView.of([start, *moves]), 80) if "because" in line]
    assert len(shown) == 1
    assert "merge" in shown[0]


def widened(t: float, step: int, *, lasts_s: float = 1.0, **outcome) -> list[Event]:
    """A step that widens ``lasts_s`` seconds before its end."""
    where = {"pipeline": "p", "step": step, "move": "widen", "workers": [0, 1]}
    known = {"predicted_cost_s": 0.02, "gain_s": 1.6, "moved_bytes": 1_258_291, "recomputed_tokens": 0, "cost_s": 0.003}
    return [
        MoveMade(
            t=t, **where, reason="2 samples left", layout="TP2", predicted_gain_s=1.8, predicted_cost_s=0.02
        ),
        MoveEnded(t=t + lasts_s, **where, **known | outcome),
        StepEnded(t=t + lasts_s, pipeline="p", step=step, metrics={"reward_mean": 0.5}),
    ]  # fmt: skip


def test_a_widening_is_told_when_it_is_decided_and_when_it_is_known_what_it_brought():
    start, *_ = one_pipeline(1, step_s=1.0)
    decided, ended, _ = widened(START, 0)
    view = RunView.of([start, decided])
    assert screen(view, 120)[-1] == ("moves   widen p on w0,w1 to TP2: predicted +1.8 s, cost 0.02 s; 2 samples left")
    view.apply(ended)
    brought = "gained +1.6 s net (predicted +1.8 s), cost 3.0 ms (predicted 0.02 s), 1.2 MiB moved"
    assert screen(view, 120)[-1] == f"moves   widen p on w0,w1 to TP2: {brought}"
    assert [line[10:] for line in plain([start, decided, ended])[1:]] == [
        "widen p on w0,w1 to TP2: predicted +1.8 s, cost 0.02 s; 2 samples left",
        f"widen p on w0,w1 to TP2: {brought}",
    ]


def test_a_refused_move_says_why_and_one_whose_gain_is_not_known_what_it_cost():
    start, *_ = one_pipeline(1, step_s=1.0)
    decided, refused, _ = widened(START, 0, refused="12 blocks are free,\x1b[31m and 40 are needed", gain_s=None)
    assert screen(RunView.of([start, decided, refused]), 120)[-1].endswith(
        "widen p on w0,w1 to TP2 refused: 12 blocks are free, and 40 are needed"
    )
    decided, ended, _ = widened(START, 0, gain_s=None, moved_bytes=0, recomputed_tokens=1536)
    assert screen(RunView.of([start, decided, ended]), 120)[-1].endswith(
        "TP2: cost 3.0 ms (predicted 0.02 s), 1,536 tokens recomputed"
    )


def test_a_pipeline_that_widens_in_every_step_is_counted_now_and_then():
    start, *_ = one_pipeline(1, step_s=1.0)
    steps = [event for k in range(300) for event in widened(START + 2.0 * k, k)]
    end = [PipelineEnded(t=START + 600, pipeline="p", step=300, reason="finished")]
    lines = [line[10:] for line in plain([start, *steps, *end]) if "widen" in line]
    in_full = [line for line in lines if line.startswith("widen p on")]
    counted = [line for line in lines if not line.startswith("widen p on")]
    assert len(in_full) == 2 * MOVES_IN_FULL
    assert len(counted) <= 600 / MOVES_EVERY_S + 1
    assert counted[0] == (
        "p in the last 1 min 00 s: widen 31 (gained +49.6 s net (predicted +55.2 s), cost 0.09 s (predicted 0.62 s))"
    )
    told = sum(int(re.search(r"widen (\d+)", line)[1]) for line in counted)
    assert told + MOVES_IN_FULL == 300


def test_rare_moves_all_have_their_lines():
    start, *_ = one_pipeline(1, step_s=1.0)
    steps = [event for k in range(10) for event in widened(START + 100.0 * k, k, lasts_s=40.0)]
    assert sum("widen p on w0,w1" in line for line in plain([start, *steps])) == 20


def test_counted_moves_of_void_steps_are_not_told():
    start, *_ = one_pipeline(1, step_s=1.0)
    steps = [event for k in range(6) for event in widened(START + 2.0 * k, k)]
    lines = plain([start, *steps, Rollback(t=START + 20, pipeline="p", step=0, reason="worker 1 lost")])
    assert sum("widen" in line for line in lines) == 2 * MOVES_IN_FULL


def test_measuring_costs_before_the_first_step_is_shown():
    start, begun, *_ = one_pipeline(1, step_s=1.0)
    profile = [
        StageEntered(t=START + 1, pipeline="p", step=0, stage="profile"),
        Span(
            t=START + 2, worker=0, pipeline="p", substage="profile", step=0, start=START + 1, end=START + 2, busy_s=1.0,
            quanta=1, tokens=0, batch=0.0,
        ),
    ]  # fmt: skip
    assert any(line.endswith("p measures what its work costs here") for line in plain([start, begun, *profile]))
    lines = screen(RunView.of([start, begun, *profile]), 80)
    assert "profile" in lines[1]
    assert lines[2] == "w0  50 %  p profile"
