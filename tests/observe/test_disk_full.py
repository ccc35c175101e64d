"""A file-size limit of the process stands for a full disk: the kernel refuses the write, after a part of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from longtail.core.events import Note, StepEnded
from longtail.observe.store import EVENTS_FILE, RunStore, encode, read_events

SCRIPT = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from synthetic_run import two_pipelines
from longtail.observe.store import RunStore
from longtail.observe.tensorboard import TensorBoardSink
from longtail.observe.fanout import FanOut

folder = Path(sys.argv[1])
sinks = FanOut([RunStore(folder), TensorBoardSink(folder / "tensorboard")])
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
for event in two_pipelines():
    sinks.write(event)
if "free" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
sinks.close()
print("alive")
"""


def full_disk(folder: Path, *extra: str) -> subprocess.CompletedProcess:
    tests = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", SCRIPT, str(folder), tests, *extra]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)


def test_a_full_disk_gives_one_warning_then_one_at_the_end_and_the_run_goes_on(tmp_path):
    result = full_disk(tmp_path)
    assert result.stdout == "alive\n"
    log = [line for line in result.stderr.splitlines() if EVENTS_FILE in line]
    assert len(log) == 2
    assert "cannot be written (File too large). The run goes on" in log[0]
    assert "is incomplete" in log[1]
    curves = [line for line in result.stderr.splitlines() if EVENTS_FILE not in line]
    assert len(curves) == 2
    size = (tmp_path / EVENTS_FILE).stat().st_size
    assert 4000 < size <= 5000
    assert (tmp_path / EVENTS_FILE).read_bytes().endswith(b"}\n")
    assert len(list(read_events(tmp_path))) > 5


def test_space_that_comes_back_in_time_loses_no_event(tmp_path):
    from longtail.core.events import Progress
    from synthetic_run import two_pipelines

    result = full_disk(tmp_path, "free")
    assert f"{EVENTS_FILE} is incomplete" not in result.stderr
    assert list(read_events(tmp_path)) == [e for e in two_pipelines() if not isinstance(e, Progress)]


@pytest.fixture
def broken_store(tmp_path, monkeypatch):
    """A store whose file refuses every write until ``fail`` is emptied; retries at once and keeps little in memory."""
    warnings, fail = [], [OSError(28, "No space left on device")]
    store = RunStore(tmp_path, warn=warnings.append)
    append = store._file.append

    def refuse(record):
        if fail:
            raise fail[0]
        append(record)

    monkeypatch.setattr(store._file, "append", refuse)
    monkeypatch.setattr(store, "RETRY_S", 0.0)
    monkeypatch.setattr(store, "MAX_PENDING_BYTES", 10 * len(encode(Note(level="info", message="n1"))))
    return store, warnings, fail


def test_what_does_not_fit_in_memory_either_is_counted_and_noted_at_the_gap(tmp_path, broken_store):
    store, warnings, fail = broken_store
    notes = [Note(t=1.5e9 + i, level="info", message=f"n{i}") for i in range(25)]
    for note in notes:
        store.write(note)
    fail.clear()
    last = StepEnded(pipeline="p", step=1, metrics={})
    store.write(last)
    store.close()
    gap, *rest = list(read_events(tmp_path))
    lost = 26 - len(rest)
    assert gap.level == "warning"
    assert gap.message.startswith(f"{lost} events are missing here")
    assert rest == [*notes, last][lost:]
    assert len(warnings) == 2
    assert f"incomplete: {lost} events" in warnings[1]
