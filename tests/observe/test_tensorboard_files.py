import json
import math
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longtail.core.events import PipelineEnded, RunStarted, StepEnded
from longtail.observe.tensorboard import WORKERS_RUN, TensorBoardSink
from synthetic_run import (
    BUSY,
    GAINED_S,
    PREDICTED_S,
    REFUSED,
    RESUMED,
    START,
    STEP_S,
    TOKENS,
    step_events,
    two_pipelines,
)


def written(folder, events):
    sink = TensorBoardSink(folder)
    for event in events:
        sink.write(event)
    sink.close()
    sink.close()


def read(folder) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def steps(accumulator, tag="reward_mean"):
    return [(point.step, pytest.approx(point.value)) for point in accumulator.Scalars(tag)]


def test_tensorboard_shows_every_metric_of_the_valid_steps_only(tmp_path):
    written(tmp_path, two_pipelines())
    sums, collatz = read(tmp_path / "sums"), read(tmp_path / "collatz")
    assert steps(sums) == [(k, 0.05 * k) for k in range(1, 21)]
    assert steps(collatz) == [(k, 0.1 * k) for k in range(1, 9)]
    metrics = set(next(e for e in two_pipelines() if isinstance(e, StepEnded)).metrics)
    assert set(collatz.Tags()["scalars"]) == metrics
    assert {tag for tag in sums.Tags()["scalars"] if "/" not in tag} == metrics
    lengths = [point.histogram_value for point in sums.Histograms("length")]
    assert len(lengths) == 20
    assert (lengths[0].num, lengths[0].min, lengths[0].max, lengths[0].sum) == (4, 10, 40, TOKENS)
    assert sum(lengths[0].bucket) == 4


def test_what_moves_were_predicted_to_bring_and_brought_are_curves_over_the_valid_steps(tmp_path):
    written(tmp_path, two_pipelines())
    sums = read(tmp_path / "sums")
    carried_out = [k for k in range(1, 21) if k != REFUSED]
    assert steps(sums, "widen/count") == [(k, float(k != REFUSED)) for k in range(1, 21)]
    assert steps(sums, "widen/net_gain_s") == [(k, GAINED_S) for k in carried_out]
    assert steps(sums, "widen/predicted_net_gain_s") == [(k, PREDICTED_S - 0.02) for k in carried_out]
    assert steps(sums, "widen/predicted_cost_s") == [(k, 0.02) for k in carried_out]


def test_a_resumed_run_writes_a_second_file_and_continues_the_curves(tmp_path):
    written(tmp_path, [e for e in two_pipelines() if e.t < RESUMED])
    written(tmp_path, [e for e in two_pipelines() if e.t >= RESUMED])
    assert len(list((tmp_path / "sums").iterdir())) == 2
    assert steps(read(tmp_path / "sums")) == [(k, 0.05 * k) for k in range(1, 21)]
    assert steps(read(tmp_path / "collatz")) == [(k, 0.1 * k) for k in range(1, 9)]


def open_below(folder):
    return [file for file in psutil.Process().open_files() if Path(file.path).is_relative_to(folder)]


def test_pipelines_that_are_over_hold_no_files(tmp_path):
    sink = TensorBoardSink(tmp_path)
    for name in "abc":
        for step in range(2):  # a name may come again
            sink.write(StepEnded(pipeline=name, step=step, metrics={"reward_mean": 0.5}))
            sink.write(PipelineEnded(pipeline=name, step=step + 1, reason="finished"))
    assert not open_below(tmp_path)
    assert all(steps(read(tmp_path / name)) == [(1, 0.5), (2, 0.5)] for name in "abc")


def test_nan_and_infinity_are_points_and_hide_no_other(tmp_path):
    metrics = {1: 0.5, 2: math.nan, 3: math.inf, 4: -math.inf, 5: 1e300, 6: 0.25}
    written(tmp_path, [StepEnded(t=k, pipeline="p", step=k - 1, metrics={"loss": v}) for k, v in metrics.items()])
    values = [point.value for point in read(tmp_path / "p").Scalars("loss")]
    assert values[0] == 0.5
    assert math.isnan(values[1])
    assert values[2:5] == [math.inf, -math.inf, math.inf]
    assert values[5] == 0.25


def test_a_step_whose_samples_are_all_equally_long_has_a_histogram(tmp_path):
    events = list(step_events(START, "p", 1, reward=0.0))
    same = [type(e)(**{**vars(e), "tokens": 7}) if e.kind == "sequence" else e for e in events]
    written(tmp_path, same)
    histogram = read(tmp_path / "p").Histograms("length")[0].histogram_value
    assert (histogram.num, histogram.min, histogram.max) == (4, 7, 7)


def test_worker_utilisation_is_a_curve_over_the_run(tmp_path):
    events = [RunStarted(t=START, run="r", version="0", workers=2, devices=["cpu"] * 2, pipelines=["p"])]
    for step in range(1, 31):
        events += step_events(START + (step - 1) * STEP_S, "p", step, reward=0.0, workers=1)
    written(tmp_path, events)
    curves = read(tmp_path / WORKERS_RUN)
    points = curves.Scalars("w0/utilisation")
    assert len(points) == 6
    assert [p.value for p in points] == [pytest.approx(BUSY)] * 6
    assert [p.step - points[0].step for p in points] == [0, 10, 20, 30, 40, 50]
    assert [p.value for p in curves.Scalars("w1/utilisation")] == [0.0] * 6


def test_writing_needs_no_torch(tmp_path):
    script = (
        "import sys, json; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from synthetic_run import two_pipelines\n"
        "import longtail.observe.store, longtail.observe.terminal, longtail.observe.summary, longtail.observe.lock\n"
        "from longtail.observe.tensorboard import TensorBoardSink\n"
        "sink = TensorBoardSink(Path(sys.argv[1]))\n"
        "for event in two_pipelines(): sink.write(event)\n"
        "sink.close()\n"
        "print(json.dumps([m for m in ('torch', 'ray', 'tensorflow') if m in sys.modules]))\n"
    )
    tests = str(Path(__file__).parent.parent)
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path), tests], capture_output=True, check=True)
    assert json.loads(result.stdout) == []
