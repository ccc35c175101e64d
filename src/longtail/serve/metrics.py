"""What the front door counts, for Prometheus. docs/serving.md says what each figure is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

GaugeValue = tuple[str, str, dict[str, str], float | None]
"""Name, help, labels, value."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """A registry of its own, so that several doors can live in one process.

    ``gauges()`` is asked at every scrape: (name, help, labels, value) of what is known then; a value of None is left
    out.
    """

    def __init__(self, gauges: Callable[[], Iterable[GaugeValue]]) -> None:
        r = self.registry = CollectorRegistry(auto_describe=True)
        self.requests = Counter("longtail_requests", "Answered requests", ["client", "path", "status"], registry=r)
        self.gone = Counter("longtail_clients_gone", "Requests whose client went away", ["client"], registry=r)
        self.failures = Counter("longtail_failures", "Answers that failed, by kind", ["upstream", "kind"], registry=r)
        self.unscored = Counter(
            "longtail_unscored", "Requests that went through in order of arrival", ["reason"], registry=r
        )
        self.tokens = Counter("longtail_output_tokens", "Generated tokens", ["client"], registry=r)
        self.scoring = Histogram("longtail_scoring_seconds", "Time to score a request", buckets=_SECONDS, registry=r)
        self.wait = Histogram("longtail_queue_wait_seconds", "Time held back here", buckets=_SECONDS, registry=r)
        self.ttft = Histogram("longtail_ttft_seconds", "Arrival to first token", buckets=_SECONDS, registry=r)
        self.latency = Histogram("longtail_request_seconds", "Arrival to end", buckets=_SECONDS, registry=r)
        self.normalized = Histogram(
            "longtail_normalized_latency_seconds", "Latency per output token", buckets=_PER_TOKEN, registry=r
        )
        self.overdue = Counter("longtail_overdue", "Requests released because of --max-wait", registry=r)
        self.recording_failed = Gauge("longtail_recording_failed", "Rows that could not be recorded", registry=r)
        r.register(_Asked(gauges))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class _Asked(Collector):
    def __init__(self, gauges: Callable[[], Iterable[GaugeValue]]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, help_, labels, value in self._gauges():
            if value is None:
                continue
            if name not in families:
                families[name] = GaugeMetricFamily(name, help_, labels=list(labels))
            families[name].add_metric(list(labels.values()), value)
        return families.values()

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()
