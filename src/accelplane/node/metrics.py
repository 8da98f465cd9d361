"""The metrics page of a node's agent."""

import functools
import os
import resource
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from accelplane.devices import HEALTHY, UNHEALTHY
from accelplane.kubelet.server import LATENCY_BOUNDS, Stage
from accelplane.node.exposition import Family, render
from accelplane.node.hardware_metrics import hardware, holding, request_counts, with_samples
from accelplane.node.health_metrics import unit_health
from accelplane.node.holders import Holders
from accelplane.node.measurements import families
from accelplane.node.readings import NodeReadings
from accelplane.node.status import NodeStatus, PluginStatus, ResourceStatus
from accelplane.plugins import Sample


class Contents(Struct, frozen=True, kw_only=True):
    """What the page shows beside the status.

    `samples` are the plugins' measurements, `requests` those to the kubelet by method and outcome, `container_use` the
    GPU use of containers, `now` the monotonic time.
    """

    samples: Sequence[Sample] = ()
    readings: NodeReadings = NodeReadings()
    holders: Holders = Holders()
    container_use: Sequence[Family] = ()
    requests: Mapping[tuple[str, str], int] = {}
    now: float = 0.0


def page(status: NodeStatus, contents: Contents, more: Iterable[Family] = ()) -> bytes:
    """The text of `/metrics`, with `more` families before those of the process."""
    samples, readings = contents.samples, contents.readings
    resources = [resource for plugin in status.plugins.values() for resource in plugin.resources.values()]
    return render(
        (
            *_agent(status),
            *with_samples(_uevents(status.uevents)),
            *with_samples(unit_health(status.plugins.values())),
            *_plugins(status.plugins.values()),
            *_devices(resources),
            *_resources(resources),
            *with_samples(
                (
                    *holding(status, contents.holders, readings, contents.now),
                    request_counts(contents.requests),
                    *hardware(readings),
                    *contents.container_use,
                )
            ),
            *families(samples),
            *more,
            *_process(),
        )
    )


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


def _devices(resources: Iterable[ResourceStatus]) -> Iterable[Family]:
    devices = Family("accelplane_devices", "Devices advertised to the kubelet.")
    for each in resources:
        counts = Counter({HEALTHY: 0, UNHEALTHY: 0})
        counts.update(device.health for device in each.devices.values())
        for health, count in counts.items():
            devices.add(count, {"resource": each.name, "health": health})
    return (devices,)


def _resources(resources: Iterable[ResourceStatus]) -> Iterable[Family]:
    registered = Family("accelplane_registered", "1 while the resource is registered with the kubelet.")
    registrations = Family("accelplane_registrations_total", "Registrations that succeeded.", "counter")
    rejections = Family(
        "accelplane_registration_failures_total", "Registrations that failed, by gRPC status.", "counter"
    )
    lists = Family("accelplane_lists_sent_total", "Device lists sent to the kubelet.", "counter")
    age = Family("accelplane_last_list_age_seconds", "Time since the last device list was sent.")
    failures = Family("accelplane_allocation_failures_total", "Allocate calls that failed.", "counter")
    latency = Family("accelplane_allocation_seconds", "Duration of Allocate calls.", "histogram")
    now = time.time()
    for each in resources:
        labels, counters = {"resource": each.name}, each.counters
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
    return registered, registrations, rejections, lists, age, failures, latency


def _process() -> Iterator[Family]:
    """What prometheus-client reports of every process, under the same names. See proc_pid_stat(5)."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the first one is the state, field 3 of the manual
        descriptors = len(os.listdir("/proc/self/fd"))
    except OSError:  # no file descriptor is free
        return
    for name, description, value in (
        ("process_virtual_memory_bytes", "Virtual memory size in bytes.", int(fields[20])),
        ("process_resident_memory_bytes", "Resident memory size in bytes.", int(fields[21]) * resource.getpagesize()),
        ("process_start_time_seconds", "Start time of the process since the epoch in seconds.", _start(fields[19])),
        ("process_cpu_seconds_total", "User and system CPU time in seconds.", time.process_time()),
        ("process_open_fds", "Number of open file descriptors.", descriptors),
        ("process_max_fds", "Limit of open file descriptors.", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ):
        family = Family(name, description, "counter" if name.endswith("_total") else "gauge")
        family.add(value)
        yield family


@functools.cache
def _start(ticks: str) -> float:
    """The Unix time at `ticks` after boot, computed once: the difference of two clocks varies by microseconds."""
    since_start = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - since_start
