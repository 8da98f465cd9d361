"""What can be counted about controllers, under the names that dashboards for controllers expect.

The names and labels are controller-runtime's and client-go's; `accelplane_webhook_reviews` is our own.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.process_collector import ProcessCollector

_RECONCILE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_QUEUE = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1, 10, 100, 1000)
_WEBHOOK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """The metrics of one program, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.reconciles = Counter(
            "controller_runtime_reconcile", "Reconciliations by result", ["controller", "result"], registry=registry
        )
        self.reconcile_errors = Counter(
            "controller_runtime_reconcile_errors", "Reconciliations that failed", ["controller"], registry=registry
        )
        self.terminal_errors = Counter(
            "controller_runtime_terminal_reconcile_errors",
            "Reconciliations that failed and are not tried again",
            ["controller"],
            registry=registry,
        )
        self.reconcile_seconds = Histogram(
            "controller_runtime_reconcile_time_seconds",
            "How long reconciliations take",
            ["controller"],
            buckets=_RECONCILE,
            registry=registry,
        )
        self.active_workers = Gauge(
            "controller_runtime_active_workers", "Workers that reconcile now", ["controller"], registry=registry
        )
        self.max_workers = Gauge(
            "controller_runtime_max_concurrent_reconciles", "Workers there are", ["controller"], registry=registry
        )
        self.webhook_requests = Counter(
            "controller_runtime_webhook_requests",
            "Admission requests by status",
            ["webhook", "code"],
            registry=registry,
        )
        self.webhook_reviews = Counter(
            "accelplane_webhook_reviews", "Reviews by what was decided", ["webhook", "outcome"], registry=registry
        )
        self.webhook_seconds = Histogram(
            "controller_runtime_webhook_latency_seconds",
            "How long admission requests take",
            ["webhook"],
            buckets=_WEBHOOK,
            registry=registry,
        )
        self.webhook_in_flight = Gauge(
            "controller_runtime_webhook_requests_in_flight",
            "Admission requests being answered",
            ["webhook"],
            registry=registry,
        )
        self.queue_depth = Gauge("workqueue_depth", "Keys that wait", ["name"], registry=registry)
        self.queue_adds = Counter("workqueue_adds", "Keys added", ["name"], registry=registry)
        self.queue_retries = Counter(
            "workqueue_retries", "Keys added again after a failure", ["name"], registry=registry
        )
        self.queue_seconds = Histogram(
            "workqueue_queue_duration_seconds", "How long keys wait", ["name"], buckets=_QUEUE, registry=registry
        )
        self.work_seconds = Histogram(
            "workqueue_work_duration_seconds",
            "How long keys are worked on",
            ["name"],
            buckets=_QUEUE,
            registry=registry,
        )
        self.unfinished = Gauge(
            "workqueue_unfinished_work_seconds", "How long unfinished work takes by now", ["name"], registry=registry
        )
        self.longest = Gauge(
            "workqueue_longest_running_processor_seconds",
            "How long the longest unfinished work takes by now",
            ["name"],
            registry=registry,
        )
        self.requests = Counter(
            "rest_client_requests", "Requests to the API server", ["code", "host", "method"], registry=registry
        )
        self.leader = Gauge(
            "leader_election_master_status", "1 while this process is the leader", ["name"], registry=registry
        )
