"""The families of health on the metrics page."""

from collections.abc import Iterable, Sequence

from accelplane.devices import Phase
from accelplane.node.exposition import Family
from accelplane.node.health_history import RECOVERY_BOUNDS
from accelplane.node.status import PluginStatus


def unit_health(plugins: Iterable[PluginStatus]) -> Sequence[Family]:
    """The health of all units, and the counters of failures and recoveries."""
    phases = Family("accelplane_unit_health", "1 for the health phase of a physical device, 0 for the other phases.")
    known = Family("accelplane_unit_health_known", "0 while the source of the health does not answer.")
    reasons = Family("accelplane_unit_unhealthy_reason", "1 for the kind of reason why a device is not healthy.")
    seconds = Family("accelplane_unit_unhealthy_seconds_total", "Time that a device was unhealthy.", "counter")
    failures = Family("accelplane_unit_failures_total", "Times that a device became unhealthy.", "counter")
    recoveries = Family("accelplane_unit_recovery_seconds", "Time from unhealthy to healthy.", "histogram")
    for plugin in plugins:
        labels = {"plugin": plugin.name}
        for unit, health in plugin.health.items():
            of_unit = {**labels, "unit": unit}
            for phase in Phase:
                phases.add(phase is health.phase, {**of_unit, "phase": phase.value})
            known.add(not health.unknown, of_unit)
            if health.phase is not Phase.HEALTHY:
                reasons.add(1, {**of_unit, "reason": health.cause})
            seconds.add(health.unhealthy_seconds, of_unit)
        for cause, count in sorted(plugin.failures.items()):
            failures.add(count, {**labels, "reason": cause})
        if plugin.health or plugin.failures:
            recoveries.add_histogram(RECOVERY_BOUNDS, plugin.recoveries.counts, plugin.recoveries.seconds, labels)
    return phases, known, reasons, seconds, failures, recoveries
