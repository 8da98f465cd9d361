"""Metrics of a program of controllers, under the names that existing dashboards use.

The names and labels are those of controller-runtime and client-go. Metrics that these do not have begin with
`accelplane_`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from accelplane.http.validity import HELP, Validity

_RECONCILE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_QUEUE = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1, 10, 100, 1000)
_WEBHOOK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class CacheState(Protocol):
    """The state of an informer that is exported as metrics. Times are seconds since the epoch, 0 for never."""

    @property
    def resource(self) -> str: ...
    @property
    def selector(self) -> str: ...
    @property
    def objects(self) -> int: ...
    @property
    def unreadable(self) -> int: ...
    @property
    def synced_at(self) -> float: ...
    @property
    def watching_since(self) -> float: ...


class Metrics:
    """The metrics of one program in a separate registry. `informers` are the running ones."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.informers: set[CacheState] = set()
        registry.register(_CacheCollector(self.informers))
        ProcessCollector(registry=registry)
        self.cache_lists = self._counter(
            "accelplane_cache_lists", "Complete lists requested by caches", "resource", "selector"
        )
        self.requests = self._counter("rest_client_requests", "Requests to the API server", "code", "host", "method")
        self.leader = self._gauge("leader_election_master_status", "1 while this process is the leader", "name")
        self._add_controllers()
        self._add_queues()
        self._add_webhooks()

    def _add_controllers(self) -> None:
        prefix = "controller_runtime_"
        self.reconciles = self._counter(f"{prefix}reconcile", "Reconciliations by result", "controller", "result")
        self.reconcile_errors = self._counter(f"{prefix}reconcile_errors", "Reconciliations that failed", "controller")
        self.terminal_errors = self._counter(
            f"{prefix}terminal_reconcile_errors", "Reconciliations that failed and are not retried", "controller"
        )
        self.reconcile_seconds = self._histogram(
            f"{prefix}reconcile_time_seconds", "Duration of reconciliations", "controller", buckets=_RECONCILE
        )
        self.active_workers = self._gauge(f"{prefix}active_workers", "Workers that are reconciling", "controller")
        self.max_workers = self._gauge(f"{prefix}max_concurrent_reconciles", "Number of workers", "controller")

    def _add_queues(self) -> None:
        self.queue_depth = self._gauge("workqueue_depth", "Keys in the queue", "name")
        self.queue_adds = self._counter("workqueue_adds", "Keys added", "name")
        self.queue_retries = self._counter("workqueue_retries", "Keys added again after a failure", "name")
        self.queue_seconds = self._histogram(
            "workqueue_queue_duration_seconds", "Time of keys in the queue", "name", buckets=_QUEUE
        )
        self.work_seconds = self._histogram(
            "workqueue_work_duration_seconds", "Duration of the processing of keys", "name", buckets=_QUEUE
        )
        self.unfinished = self._gauge("workqueue_unfinished_work_seconds", "Age of unfinished work, summed", "name")
        self.longest = self._gauge(
            "workqueue_longest_running_processor_seconds", "Age of the oldest unfinished work", "name"
        )

    def _add_webhooks(self) -> None:
        prefix = "controller_runtime_webhook_"
        self.webhook_requests = self._counter(f"{prefix}requests", "Admission requests by status", "webhook", "code")
        self.webhook_seconds = self._histogram(
            f"{prefix}latency_seconds", "Duration of admission requests", "webhook", buckets=_WEBHOOK
        )
        self.webhook_in_flight = self._gauge(f"{prefix}requests_in_flight", "Admission requests in flight", "webhook")
        self.webhook_reviews = self._counter("accelplane_webhook_reviews", "Reviews by decision", "webhook", "outcome")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


_CACHE_GAUGES: Sequence[tuple[str, str, Callable[[Sequence[CacheState]], float]]] = (
    ("objects", "Objects in caches", lambda states: sum(each.objects for each in states)),
    ("unreadable_objects", "Objects that cannot be decoded", lambda states: sum(each.unreadable for each in states)),
    (
        "last_sync_timestamp_seconds",
        "Time of the last complete list, 0 before the first one",
        lambda states: min(each.synced_at for each in states),
    ),
    (
        "watch_age_seconds",
        "Age of the current watch, 0 without a watch",
        lambda states: max(time.time() - each.watching_since if each.watching_since else 0.0 for each in states),
    ),
)


class CertificateCollector(Collector):
    """Reads the validity of a serving certificate at collection."""

    def __init__(self, validity: Callable[[], Validity | None]) -> None:
        self._validity = validity

    def collect(self) -> Iterator[GaugeMetricFamily]:
        found = self._validity()
        for name, value in (found.samples() if found is not None else {}).items():
            yield GaugeMetricFamily(name, HELP[name], value=value)


class _CacheCollector(Collector):
    """Reads the state of the running informers at collection."""

    def __init__(self, informers: AbstractSet[CacheState]) -> None:
        self._informers = informers

    def collect(self) -> Iterator[GaugeMetricFamily]:
        groups: dict[tuple[str, str], list[CacheState]] = {}
        for informer in self._informers:
            groups.setdefault((informer.resource, informer.selector), []).append(informer)
        for name, text, value in _CACHE_GAUGES:
            family = GaugeMetricFamily(f"accelplane_cache_{name}", text, labels=("resource", "selector"))
            for labels, states in sorted(groups.items()):
                family.add_metric(labels, value(states))
            yield family
