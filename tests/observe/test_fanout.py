from longtail.core.events import Note
from longtail.observe.fanout import FanOut
from synthetic_run import two_pipelines


class Recorder:
    def __init__(self):
        self.events, self.closed = [], 0

    def write(self, event):
        self.events.append(event)

    def close(self):
        self.closed += 1


class Faulty(Recorder):
    def write(self, event):
        raise RuntimeError("a bug")


def test_a_sink_that_fails_is_dropped_with_one_warning_and_the_others_get_everything():
    before, after, warnings = Recorder(), Recorder(), []
    sinks = FanOut([before, Faulty(), after], warn=warnings.append)
    events = list(two_pipelines())
    for event in events:
        sinks.write(event)
    sinks.close()
    sinks.close()
    assert before.events == after.events == events
    assert before.closed == after.closed == 1
    assert len(warnings) == 2
    assert "Faulty stopped working" in warnings[0]
    assert "a bug" in warnings[0]
    assert "incomplete because of an earlier error: Faulty" in warnings[1]


def test_a_sink_that_fails_to_close_does_not_keep_the_others_open():
    class Stuck(Recorder):
        def close(self):
            raise OSError("stuck")

    last, warnings = Recorder(), []
    sinks = FanOut([Stuck(), last], warn=warnings.append)
    sinks.write(Note(level="info", message="x"))
    sinks.close()
    assert last.closed == 1
    assert "Stuck" in warnings[0]
