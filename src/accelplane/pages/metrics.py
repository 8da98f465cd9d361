"""The metrics page of a node's agent."""

import functools
import os
import resource
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from accelplane.devices import HEALTHY, UNHEALTHY, Phase
from accelplane.kubelet.server import LATENCY_BOUNDS, Stage
from accelplane.node.health_history import RECOVERY_BOUNDS
from accelplane.node.hook_results import OWN_PREFIXES
from accelplane.node.status import DraStatus, NodeStatus, PluginStatus, ResourceStatus
from accelplane.pages.exposition import Family, render
from accelplane.pages.hardware_metrics import (
    Dropped,
    exclusive_labels,
    hardware,
    holding,
    idle,
    plugin_of,
    request_counts,
    with_samples,
)
from accelplane.pages.holders import Holders
from accelplane.pages.measurements import families
from accelplane.pages.readings import NodeReadings
from accelplane.plugins import Sample
from accelplane.readings.values import labels

_DESCRIPTORS = "/proc/self/fd"


class Contents(Struct, frozen=True, kw_only=True):
    """The content of the page in addition to the status.

    `samples` are the plugins' measurements, `dropped` the number of those left out by plugin and cause, `requests`
    those to the kubelet by method and outcome, `container_use` the GPU use of containers, `idle` the seconds since the
    last use of held units by plugin and unit, `lag` the seconds by which the event loop was late, `now` the monotonic
    time.
    """

    samples: Sequence[Sample] = ()
    dropped: Mapping[tuple[str, str], int] = {}
    readings: NodeReadings = NodeReadings()
    holders: Holders = Holders()
    container_use: Sequence[Family] = ()
    requests: Mapping[tuple[str, str], int] = {}
    idle: Mapping[tuple[str, str], float] = {}
    lag: float | None = None
    now: float = 0.0


class PageOptions(Struct, frozen=True, kw_only=True):
    """The flags `-metrics-*`. `node` is the value of the label of that name, empty for none."""

    max_samples: int = 10_000
    holders: str = "join"
    holder_labels: str = ""
    node: str = ""


class MetricsPage:
    """Makes the text of `/metrics`, and counts the samples that it leaves out."""

    def __init__(self, options: PageOptions | None = None) -> None:
        self._options = options or PageOptions()
        self._dropped: Dropped = Counter()

    def render(self, status: NodeStatus, contents: Contents, more: Iterable[Family] = ()) -> bytes:
        """The page, with `more` families before those of the process."""
        resources = [resource for plugin in status.plugins.values() for resource in plugin.resources.values()]
        first = (
            *_agent(status),
            *with_samples(_uevents(status.uevents)),
            *_plugins(status.plugins.values()),
            *_resources(resources),
            *with_samples(_dra(status.dra)),
        )
        last = (*more, *_lag(contents.lag), *_process())
        limit = self._options.max_samples - sum(map(len, first)) - sum(map(len, last))
        health = with_samples(_health(status.plugins.values()))
        kept = self._limited([*health, *self._of_devices(status, contents)], limit, contents.dropped)
        dropped = with_samples((_dropped(contents.dropped, self._dropped),))
        found = [*first, *kept, *dropped, *last]
        if self._options.node:
            for family in found:
                family.add_label(labels(node=self._options.node))
        return render(found)

    def _of_devices(self, status: NodeStatus, contents: Contents) -> list[Family]:
        """The families whose number of samples depends on the devices, the most important ones first."""
        options, holders, readings = self._options, contents.holders, contents.readings
        attached: Mapping[tuple[str, str], str] = {}
        if options.holders == "attach":
            attached = exclusive_labels(status, holders, options.holder_labels)
        held = () if options.holders == "off" else holding(
            status, holders, readings, contents.now, options.holder_labels
        )  # fmt: skip
        use = () if options.holders == "off" else contents.container_use
        of_hardware = hardware(readings, status, attached, self._dropped)
        found = with_samples((*held, idle(contents.idle), request_counts(contents.requests), *of_hardware, *use))
        found.sort(key=lambda family: not family.name.startswith(OWN_PREFIXES))  # those of other projects are last
        names = {family.name for family in found}
        for family in families(contents.samples):
            if family.name in names:
                self._dropped["", "invalid-name"] += len(family)
            else:
                found.append(family)
        return found

    def _limited(
        self, found: Iterable[Family], limit: int, dropped_before: Mapping[tuple[str, str], int]
    ) -> Sequence[Family]:
        """The first families, as many as the limit allows with the samples that count what is left out.

        A family is complete or left out.
        """
        kept = list(found)
        total = sum(map(len, kept))
        while kept and total + len(dropped_before.keys() | self._dropped.keys()) > limit:
            family = kept.pop()
            total -= len(family)
            self._dropped.update((plugin_of(sample), "limit") for sample in family.samples)
        return kept


def _dropped(*found: Mapping[tuple[str, str], int]) -> Family:
    counts: Dropped = Counter()
    for each in found:
        counts.update(each)
    family = Family("accelplane_samples_dropped_total", "Samples that pages left out, by cause.", "counter")
    for (plugin, cause), count in sorted(counts.items()):
        family.add(count, {"plugin": plugin, "cause": cause})
    return family


def _lag(seconds: float | None) -> Sequence[Family]:
    family = Family("accelplane_event_loop_lag_seconds", "Delay of the event loop while the page was made.")
    if seconds is not None:
        family.add(seconds)
    return with_samples((family,))


def _agent(status: NodeStatus) -> Iterable[Family]:
    info = Family("accelplane_build_info", "The running version.")
    info.add(1, {"version": status.version})
    rejected = Family("accelplane_config_refused", "1 while the configuration file is rejected.")
    rejected.add(bool(status.config_problem))
    return info, rejected


def _uevents(counts: Mapping[str, int]) -> Sequence[Family]:
    events = Family("accelplane_uevents_total", "Uevents of subsystems that plugins watch.", "counter")
    overflows = Family("accelplane_uevent_overflows_total", "Times that the kernel dropped uevents.", "counter")
    for subsystem, count in sorted(counts.items()):
        if subsystem:
            events.add(count, {"subsystem": subsystem})
        else:
            overflows.add(count)
    return events, overflows


def _plugins(plugins: Iterable[PluginStatus]) -> Iterable[Family]:
    skipped = Family("accelplane_skipped", "Hardware found and not published.")
    scans = Family("accelplane_scans_total", "Scans of the host.", "counter")
    failures = Family("accelplane_scan_failures_total", "Scans that failed.", "counter")
    seconds = Family("accelplane_scan_seconds", "Duration of the last scan.")
    failing = Family("accelplane_scan_failing", "1 while scans fail.")
    writes = Family("accelplane_cdi_writes_total", "CDI files written.", "counter")
    write_failures = Family("accelplane_cdi_write_failures_total", "CDI files that could not be written.", "counter")
    for plugin in plugins:
        labels = {"plugin": plugin.name}
        skipped.add(len(plugin.skipped), labels)
        scans.add(plugin.scan.count, labels)
        failures.add(plugin.scan.failures, labels)
        seconds.add(plugin.scan.seconds, labels)
        failing.add(plugin.scan.failing, labels)
        writes.add(plugin.cdi_writes, labels)
        write_failures.add(plugin.cdi_write_failures, labels)
    return skipped, scans, failures, seconds, failing, writes, write_failures


def _health(plugins: Iterable[PluginStatus]) -> Sequence[Family]:
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


def _resources(resources: Iterable[ResourceStatus]) -> Iterable[Family]:
    devices = Family("accelplane_devices", "Devices advertised to the kubelet.")
    registered = Family("accelplane_registered", "1 while the resource is registered with the kubelet.")
    registrations = Family("accelplane_registrations_total", "Registrations that succeeded.", "counter")
    rejections = Family(
        "accelplane_registration_failures_total", "Registrations that failed, by gRPC status.", "counter"
    )
    lists = Family("accelplane_lists_sent_total", "Device lists sent to the kubelet.", "counter")
    age = Family("accelplane_last_list_age_seconds", "Time since the last device list was sent.")
    failures = Family("accelplane_allocation_failures_total", "Allocate calls that failed.", "counter")
    latency = Family("accelplane_allocation_seconds", "Duration of Allocate calls.", "histogram")
    outcomes = Family("accelplane_allocations_total", "Allocate calls by outcome.", "counter")
    preferred = Family(
        "accelplane_preferred_allocation_seconds", "Duration of GetPreferredAllocation calls.", "histogram"
    )
    now = time.time()
    for each in resources:
        labels, counters = {"resource": each.name}, each.counters
        healthy = [device.health for device in each.devices.values()].count(HEALTHY)
        devices.add(healthy, {**labels, "health": HEALTHY})
        devices.add(len(each.devices) - healthy, {**labels, "health": UNHEALTHY})
        registered.add(each.stage == Stage.REGISTERED, labels)
        registrations.add(counters.registrations, labels)
        for reason, count in counters.registration_failures.items():
            rejections.add(count, {**labels, "reason": reason})
        lists.add(counters.lists_sent, labels)
        if counters.last_list_time:
            age.add(now - counters.last_list_time, labels)
        failures.add(counters.allocation_failures, labels)
        buckets = counters.allocation_buckets or [0] * (len(LATENCY_BOUNDS) + 1)
        latency.add_histogram(LATENCY_BOUNDS, buckets, counters.allocation_seconds_sum, labels)
        for outcome, count in counters.allocation_outcomes.items():
            outcomes.add(count, {**labels, "outcome": outcome})
        if any(counters.preferred_buckets):
            preferred.add_histogram(LATENCY_BOUNDS, counters.preferred_buckets, counters.preferred_seconds_sum, labels)
    found = (devices, registered, registrations, rejections, lists, age, failures, outcomes, latency)
    return *found, *with_samples((preferred,))


def _dra(drivers: Mapping[str, DraStatus]) -> Sequence[Family]:
    """The DRA drivers of plugins whose units may belong to dynamic resource allocation."""
    units = Family("accelplane_dra_units", "Units by the API that may hand them out.")
    registered = Family("accelplane_dra_registered", "1 while the DRA driver is registered with the kubelet.")
    published = Family("accelplane_dra_published_units", "Units in the ResourceSlices of this node.")
    unhealthy = Family("accelplane_dra_unhealthy_units", "Units in a state that claims should not get, by state.")
    claims = Family("accelplane_dra_claims", "Claims that are prepared.")
    prepares = Family("accelplane_dra_prepares_total", "Claims of calls to prepare, by result.", "counter")
    unprepares = Family("accelplane_dra_unprepares_total", "Claims of calls to unprepare, by result.", "counter")
    for name, driver in drivers.items():
        labels = {"plugin": name}
        owners = Counter(unit.owner for unit in driver.units.values())
        for owner in ("dra", "none", "plugin"):
            units.add(owners[owner], {**labels, "owner": owner})
        registered.add(driver.stage == "registered", labels)
        published.add(sum(unit.published for unit in driver.units.values()), labels)
        states = Counter(unit.state for unit in driver.units.values())
        for state in ("unhealthy", "recovering", "unbound", "gone", "cleanup"):
            unhealthy.add(states[state], {**labels, "state": state})
        claims.add(len({claim for unit in driver.units.values() for claim in unit.claims}), labels)
        for family, failed, succeeded in (
            (prepares, driver.prepare_failures, driver.prepares),
            (unprepares, driver.unprepare_failures, driver.unprepares),
        ):
            family.add(succeeded, {**labels, "result": "ok"})
            family.add(failed, {**labels, "result": "error"})
    return units, registered, published, unhealthy, claims, prepares, unprepares


def _process() -> Iterator[Family]:
    """The process metrics of prometheus-client, under the same names. See proc_pid_statm(5)."""
    try:
        # The kernel makes this text in a fraction of the time that it needs for `stat`.
        size, resident = (int(pages) * resource.getpagesize() for pages in _text_of("statm").split()[:2])
        started = _start_time()
        descriptors = os.stat(_DESCRIPTORS).st_size or len(os.listdir(_DESCRIPTORS))  # the size is 0 before Linux 6.2
    except OSError:  # no file descriptor is free
        return
    for name, description, value in (
        ("process_virtual_memory_bytes", "Virtual memory size in bytes.", size),
        ("process_resident_memory_bytes", "Resident memory size in bytes.", resident),
        ("process_start_time_seconds", "Start time of the process since the epoch in seconds.", started),
        ("process_cpu_seconds_total", "User and system CPU time in seconds.", time.process_time()),
        ("process_open_fds", "Number of open file descriptors.", descriptors),
        ("process_max_fds", "Limit of open file descriptors.", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ):
        family = Family(name, description, "counter" if name.endswith("_total") else "gauge")
        family.add(value)
        yield family


def _text_of(name: str) -> str:
    """The content of a small file of this process. Raises `OSError`."""
    descriptor = os.open(f"/proc/self/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    finally:
        os.close(descriptor)


@functools.cache
def _start_time() -> float:
    """The Unix time, computed once: the difference of two clocks varies by microseconds. See proc_pid_stat(5)."""
    ticks = _text_of("stat").rpartition(")")[2].split()[19]  # field 22 of the manual; the first one here is field 3
    since_start = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - since_start
