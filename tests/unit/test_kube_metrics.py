"""The metrics of controllers and webhooks: their names and labels are those of controller-runtime and client-go."""

from accelplane.kube.metrics import Metrics

LABELS = {
    "accelplane_cache_lists": ("resource", "selector"),
    "accelplane_webhook_reviews": ("webhook", "outcome"),
    "controller_runtime_active_workers": ("controller",),
    "controller_runtime_max_concurrent_reconciles": ("controller",),
    "controller_runtime_reconcile": ("controller", "result"),
    "controller_runtime_reconcile_errors": ("controller",),
    "controller_runtime_reconcile_time_seconds": ("controller",),
    "controller_runtime_terminal_reconcile_errors": ("controller",),
    "controller_runtime_webhook_latency_seconds": ("webhook",),
    "controller_runtime_webhook_requests": ("webhook", "code"),
    "controller_runtime_webhook_requests_in_flight": ("webhook",),
    "leader_election_master_status": ("name",),
    "rest_client_requests": ("code", "host", "method"),
    "workqueue_adds": ("name",),
    "workqueue_depth": ("name",),
    "workqueue_longest_running_processor_seconds": ("name",),
    "workqueue_queue_duration_seconds": ("name",),
    "workqueue_retries": ("name",),
    "workqueue_unfinished_work_seconds": ("name",),
    "workqueue_work_duration_seconds": ("name",),
}


def test_objects_have_their_names_and_labels() -> None:
    metrics = Metrics()
    for each in vars(metrics).values():
        names = getattr(each, "_labelnames", ())
        if names:
            each.labels(*names)
    found = {
        family.name: tuple(name for name in family.samples[0].labels if name != "le")
        for family in metrics.registry.collect()
        if family.samples and not family.name.startswith("process_")
    }
    assert found == LABELS
    assert all(family.documentation for family in metrics.registry.collect())
