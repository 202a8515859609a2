"""Prometheus metrics: counters of this process, and the state of the frontier at the time of the request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from shoal import __version__
from shoal.model import JobState, WorkerStatus

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Meters:
    """Counters of this process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "shoal_api_requests",
            "API requests by route and status.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "shoal_api_request_seconds",
            "Seconds until the response to an API request.",
            ("route",),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.streams = Gauge("shoal_api_streams", "Open event streams.", registry=self.registry)
        ProcessCollector(registry=self.registry)

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        # The route's pattern, never the path: a client could request a million different paths.
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if route != "unmatched" else "any"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self, now: Iterable[Metric]) -> bytes:
        frontier = CollectorRegistry()
        frontier.register(_FrontierCollector(now))
        return generate_latest(self.registry) + generate_latest(frontier)


class _FrontierCollector(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def frontier_metrics(
    queues: Mapping[str, Mapping[str, int]],
    workers: Iterable[WorkerStatus],
    states: Mapping[JobState, int],
    dead: Mapping[str, int],
) -> list[Metric]:
    """Returns the current state of the frontier as metrics."""
    info = GaugeMetricFamily("shoal_build_info", "The running version.", labels=("version",))
    info.add_metric((__version__,), 1)
    waiting = GaugeMetricFamily(
        "shoal_queue_requests", "Requests in a queue by state.", labels=("queue", "state")
    )
    for queue, row in sorted(queues.items()):
        for state, number in row.items():
            waiting.add_metric((queue, state), number)
    gone = GaugeMetricFamily(
        "shoal_dead_requests", "Requests of recent jobs that ended dead or expired.", labels=("queue",)
    )
    for queue, number in sorted(dead.items()):
        gone.add_metric((queue,), number)
    jobs = GaugeMetricFamily("shoal_jobs", "Jobs by state.", labels=("state",))
    for each in JobState:
        jobs.add_metric((each.value,), states.get(each, 0))
    return [info, waiting, gone, jobs, *_workers(list(workers))]


def _workers(workers: list[WorkerStatus]) -> list[Metric]:
    by_state = GaugeMetricFamily("shoal_workers", "Workers by state.", labels=("state",))
    for state in ("working", "idle", "stuck", "silent"):
        by_state.add_metric((state,), sum(worker.state == state for worker in workers))
    label = ("worker",)
    visits = CounterMetricFamily("shoal_worker_visits", "Visits of a worker since it started.", labels=label)
    failed = CounterMetricFamily("shoal_worker_failed_visits", "Visits that ended in an error.", labels=label)
    gauges = {
        "running": GaugeMetricFamily("shoal_worker_running", "Visits in flight.", labels=label),
        "slots": GaugeMetricFamily(
            "shoal_worker_slots", "Maximum number of concurrent visits.", labels=label
        ),
        "rate": GaugeMetricFamily(
            "shoal_worker_visits_per_second", "Visits per second in the last minute.", labels=label
        ),
        "mean": GaugeMetricFamily(
            "shoal_worker_visit_mean_seconds", "Mean time of a visit in the last minute.", labels=label
        ),
        "p95": GaugeMetricFamily(
            "shoal_worker_visit_p95_seconds",
            "95th percentile of the time of a visit in the last minute.",
            labels=label,
        ),
        "stalled_for": GaugeMetricFamily(
            "shoal_worker_still_seconds",
            "Seconds for which visits have been running and none has ended.",
            labels=label,
        ),
    }
    for worker in workers:
        if worker.state == "silent":
            continue  # its figures are old
        heartbeat = worker.heartbeat
        visits.add_metric((heartbeat.worker,), heartbeat.visits)
        failed.add_metric((heartbeat.worker,), heartbeat.failed)
        for name, family in gauges.items():
            family.add_metric((heartbeat.worker,), getattr(heartbeat, name))
    return [by_state, visits, failed, *gauges.values()]
