"""The alerts, each with series for which it is silent, fires and resolves.

Times are minutes. A case puts its condition on node n1 at minute 10; n2 and n3 have similar series without it.
"""

import re
from typing import NamedTuple

from monitoring import alerts

from accelplane.node.health_history import RECOVERY_BOUNDS

START = 10
GPU = {"plugin": "gpu", "device": "card0", "bdf": "0000:03:00.0"}
CARD = {"plugin": "gpu", "unit": "card0"}
QAT = {"plugin": "qat", "device": "0000:6b:00.0", "bdf": "0000:6b:00.0"}
FPGA = {"plugin": "fpga", "device": "intel-fpga-dev.0", "bdf": "0000:5e:00.0"}
HOLDER = {"namespace": "ml", "pod": "train", "container": "main", "resource": "gpu.intel.com/i915"}
I915 = {"resource": "gpu.intel.com/i915"}
UP = {"job": "monitoring/accelplane-agent"}

Labels = dict[str, str]
Series = dict[str, str]


def series_of(node: str, metric: str, **labels: str) -> str:
    """A series of the agent of a node."""
    pairs = {"instance": node, "node": node, "agent": "accelplane-node", **labels}
    return metric + "{" + ",".join(f'{name}="{value}"' for name, value in pairs.items()) + "}"


class Case(NamedTuple):
    """An alert with its series. It must be silent, firing and silent again at the three times."""

    alert: str
    series: Series
    labels: Labels
    silent: int
    fires: int
    resolved: int
    interval: int = 1
    everywhere: bool = False


def steps(good: str, bad: str, minutes: int) -> str:
    return f"{good}x{START - 1} {bad}x{minutes - 1} {good}x60"


def gauge(alert: str, metric: str, values: tuple[str, str], more: Series | None = None, **labels: str) -> Case:
    """A gauge with a good and a bad value: n2 always has the good one. `more` are series that do not change."""
    wait = _minutes(alerts()[alert].get("for", "0m"))
    series = {
        series_of("n1", metric, **labels): steps(*values, wait + 10),
        series_of("n2", metric, **labels): f"{values[0]}x120",
    }
    visible_labels = {name: value for name, value in labels.items() if name not in HIDDEN.get(alert, ())}
    return Case(alert, series | (more or {}), visible_labels, START + wait - 1, START + wait + 2, START + wait + 16)


def counter(alert: str, metric: str, **labels: str) -> Case:
    """A counter that is increased once at minute 10 on n1, and was increased long ago on n2."""
    series = {series_of("n1", metric, **labels): "3x9 4x60", series_of("n2", metric, **labels): "7x120"}
    return Case(alert, series, dict(labels), START - 1, START + 2, START + 20)


def _minutes(text: str) -> int:
    found = re.fullmatch(r"(\d+)m", text)
    assert found, text
    return int(found[1])


# Labels that an alert drops.
HIDDEN = {"AccelplaneKubeletDisagrees": ("health", "agent"), "AccelplaneDevicesLost": ("health", "agent")}


def unhealthy(alert: str) -> Case:
    """n1 and n2 have an unhealthy card each; only that of n1 is held. n3 is suspect."""
    minutes = 12
    reason = f"_x{START - 1} 1x{minutes - 1} stale"
    health = "accelplane_unit_health"
    reasons = "accelplane_unit_unhealthy_reason"
    series = {
        series_of("n1", health, phase="unhealthy", **CARD): steps("0", "1", minutes),
        series_of("n1", health, phase="healthy", **CARD): steps("1", "0", minutes),
        series_of("n1", reasons, reason="temperature", **CARD): reason,
        series_of("n1", "accelplane_container_devices", **HOLDER, **CARD): "1x120",
        series_of("n3", health, phase="unhealthy", **CARD): "0x120",
        series_of("n3", health, phase="suspect", **CARD): steps("0", "1", minutes),
        series_of("n3", reasons, reason="memory", **CARD): reason,
    }
    if alert == "AccelplaneDeviceUnhealthyAndHeld":
        series[series_of("n2", health, phase="unhealthy", **CARD)] = steps("0", "1", minutes)
        series[series_of("n2", reasons, reason="temperature", **CARD)] = reason
    labels = {**CARD, "phase": "unhealthy", "reason": "temperature"}
    return Case(alert, series, labels, START + 1, START + 4, START + 20)


def agent_missing() -> Case:
    allocatable = "kube_node_status_allocatable"
    series = {
        f'{allocatable}{{node="n1",resource="gpu_intel_com_i915",unit="integer"}}': "2x120",
        f'{allocatable}{{node="n2",resource="sgx_intel_com_enclave",unit="integer"}}': "2x120",
        f'{allocatable}{{node="n3",resource="cpu",unit="core"}}': "2x120",
        f'{allocatable}{{node="n4",resource="amd_com_onload",unit="integer"}}': "0x120",
        series_of("n1", "up", **UP): "0x29 1x90",
        series_of("n2", "up", **UP): "1x120",
    }
    return Case("AccelplaneAgentMissing", series, {"node": "n1"}, 14, 20, 32, everywhere=True)


def registrations() -> Case:
    name = "accelplane_registrations_total"
    series = {
        series_of("n1", name, **I915): "1x9 2+1x9 11x120",
        series_of("n2", name, **I915): " ".join(f"{count}x14" for count in range(1, 9)),
    }
    return Case("AccelplaneRegistersAgainAndAgain", series, I915, START + 2, START + 20, 100)


def devices_lost() -> list[Case]:
    devices = "accelplane_devices"
    healthy = {"health": "Healthy", **I915}
    up = {series_of(node, "up", **UP): "1x120" for node in ("n1", "n2")}
    fewer = gauge("AccelplaneDevicesLost", devices, ("2", "1"), up, **healthy)
    series = {
        series_of("n1", devices, **healthy): f"2x{START - 1} _x25 2x60",
        series_of("n3", devices, **healthy): f"2x{START - 1} _x25 2x60",
        series_of("n3", "up", **UP): "0x120",
        **up,
    }
    # The records have the value for five minutes more.
    return [fewer, Case("AccelplaneDevicesLost", series, I915, START + 10, START + 20, START + 35)]


def recovery() -> Case:
    """An hour and a half at n1, ten minutes at n2. Both leave the window after a day."""
    name = "accelplane_unit_recovery_seconds_bucket"
    series: Series = {}
    for node, seconds in (("n1", 5400), ("n2", 600)):
        for bound in [*map(str, RECOVERY_BOUNDS), "+Inf"]:
            inside = "1" if float(bound) >= seconds else "0"
            series[series_of(node, name, plugin="gpu", le=bound)] = f"0x1 {inside}x300"
    return Case("AccelplaneSlowRecovery", series, {"plugin": "gpu"}, 5, 30, 27 * 60, interval=10)


def correctable() -> Case:
    name, labels = "accelplane_pci_errors_total", {"severity": "correctable", **GPU}
    series = {series_of("n1", name, **labels): "0x9 120+120x29 3600x60", series_of("n2", name, **labels): "0+30x120"}
    return Case("AccelplanePciCorrectable", series, GPU, START + 8, START + 25, START + 50)


def link() -> Case:
    names = "accelplane_pci_link_transfers_per_second", "accelplane_pci_link_max_transfers_per_second"
    more: Series = {}
    for node, awake, idle in (("n1", 1, 0), ("n2", 1, 0), ("n3", 1, 600), ("n4", 0, 0)):
        more[series_of(node, names[1], **GPU)] = "16x120"
        more[series_of(node, "accelplane_pci_link_lanes", **GPU)] = "16x120"
        more[series_of(node, "accelplane_pci_link_max_lanes", **GPU)] = "16x120"
        more[series_of(node, "accelplane_device_awake", **GPU)] = f"{awake}x120"
        more[series_of(node, "accelplane_unit_idle_seconds", **CARD)] = f"{idle}x120"
        more[series_of(node, "accelplane_unit_info", unit="card0", **GPU, **I915)] = "1x120"
        if node in ("n3", "n4"):
            more[series_of(node, names[0], **GPU)] = "8x120"
    return gauge("AccelplaneLinkDegraded", names[0], ("16", "8"), more, **GPU)


def lanes() -> Case:
    case = link()
    more = {
        series: values.replace("16x", "8x", 1) if "link_max_transfers" in series else values
        for series, values in case.series.items()
        if "accelplane_pci_link_lanes" not in series and "link_transfers" not in series
    }
    more |= {series_of(node, "accelplane_pci_link_transfers_per_second", **GPU): "8x120" for node in ("n1", "n2")}
    return gauge("AccelplaneLinkDegraded", "accelplane_pci_link_lanes", ("16", "4"), more, **GPU)


def throttled() -> Case:
    name, labels = "accelplane_gpu_throttled", {"gt": "gt0", "reason": "any", **GPU}
    series = {
        series_of("n1", name, **labels): "0x9 1x39 0x60",
        series_of("n2", name, **labels): " ".join(["1 0 0 0"] * 30),
        series_of("n3", name, gt="gt0", reason="thermal", **GPU): "1x120",
    }
    return Case("AccelplaneThrottled", series, labels, START + 8, START + 25, START + 60)


def hot() -> list[Case]:
    sensor = {"sensor": "package", **GPU}
    limit, value = "accelplane_device_temperature_limit_celsius", "accelplane_device_temperature_celsius"
    more = {series_of(node, limit, limit="critical", **sensor): "100x120" for node in ("n1", "n2", "n3")}
    more |= {series_of(node, limit, limit="max", **sensor): "90x120" for node in ("n1", "n2", "n3")}
    more[series_of("n3", value, **sensor)] = "95x120"
    return [
        gauge("AccelplaneHot", value, ("80", "96"), more, **sensor),
        gauge("AccelplaneHot", "accelplane_device_alarm", ("0", "1"), **sensor),
    ]


def silent_heartbeat() -> Case:
    name = "accelplane_qat_heartbeat_failures_total"
    series = {series_of("n1", name, **QAT): "3x9 4+1x9 13x60", series_of("n2", name, **QAT): "7x120"}
    return Case("AccelplaneQatSilent", series, QAT, START + 1, START + 8, START + 20)


def slow_page() -> Case:
    name = "accelplane_page_seconds_bucket"
    series: Series = {}
    for bound, count in (("1", "0x120"), ("10", "0x9 3+3x39 120x60"), ("+Inf", "0x9 3+3x39 120x60")):
        series[series_of("n1", name, page="metrics", le=bound)] = count
    for bound in ("1", "10", "+Inf"):
        series[series_of("n2", name, page="metrics", le=bound)] = "0+3x120"
    return Case("AccelplaneReadsStuck", series, {"page": "metrics"}, START + 8, START + 20, START + 60)


def certificates() -> list[Case]:
    """Certificates that last for decades by the clock of the test: the last week of one, and both ends."""
    first, last = (f"accelplane_serving_certificate_not_{end}_timestamp_seconds" for end in ("before", "after"))
    valid_from = {series_of(node, first): "-1000000000x120" for node in ("n1", "n2")}
    valid_until = {series_of(node, last): "1000000000x120" for node in ("n1", "n2")}
    return [
        gauge("AccelplaneCertificateExpires", last, ("1000000000", "600000"), valid_from),
        gauge("AccelplaneCertificateInvalid", last, ("1000000000", "500"), valid_from),
        gauge("AccelplaneCertificateInvalid", first, ("-1000000000", "9000"), valid_until),
    ]


def queue() -> Case:
    labels = {"plugin": "dsa", "device": "dsa0", "unit": "wq0.0", "mode": "shared", "type": "user"}
    more = {series_of(node, "accelplane_idxd_queue_size", **labels): "128x120" for node in ("n1", "n2")}
    return gauge("AccelplaneQueueFull", "accelplane_idxd_queue_entries", ("64", "120"), more, **labels)


def exhausted() -> Case:
    used, all_of = "accelplane_resource_allocated", "accelplane_resource_allocatable"
    series = {
        series_of("n1", used, **I915): steps("5", "10", 40),
        series_of("n2", used, **I915): "10x120",
        series_of("n1", used, resource="npu.intel.com/accel"): "19x120",
        series_of("n1", all_of, resource="npu.intel.com/accel"): "20x120",
        **{series_of(node, all_of, **I915): "10x120" for node in ("n1", "n2")},
    }
    return Case("AccelplaneExhausted", series, I915, START + 29, START + 32, START + 55, everywhere=True)


def idle() -> Case:
    more = {
        series_of("n1", "accelplane_container_devices", **HOLDER, **CARD): "1x120",
        series_of("n2", "accelplane_container_devices", **HOLDER, **CARD): "1x120",
        series_of("n3", "accelplane_unit_idle_seconds", **CARD): "9000x120",
    }
    return gauge("AccelplaneAllocatedIdle", "accelplane_unit_idle_seconds", ("1700", "1900"), more, **CARD)


def cases() -> list[Case]:
    plugin = {"plugin": "gpu"}
    errors = "accelplane_pci_errors_total"
    more = {
        series_of("n1", errors, severity="nonfatal", **GPU): "3x9 5x60",
        series_of("n3", errors, severity="correctable", **GPU): "0+1x120",
    }
    pci = counter("AccelplanePciFatal", errors, severity="fatal", **GPU)
    other = {series_of("n3", "up", job="monitoring/other"): "0x120"}
    allocatable = {series_of(node, "accelplane_resource_allocatable", **I915): "2x120" for node in ("n1", "n2")}
    return [
        gauge("AccelplaneAgentDown", "up", ("1", "0"), other, **UP),
        agent_missing(),
        gauge("AccelplaneConfigRefused", "accelplane_config_refused", ("0", "1")),
        gauge("AccelplaneNotRegistered", "accelplane_registered", ("1", "0"), **I915),
        registrations(),
        gauge("AccelplaneScanFailing", "accelplane_scan_failing", ("0", "1"), **plugin),
        unhealthy("AccelplaneDeviceUnhealthy"),
        unhealthy("AccelplaneDeviceUnhealthyAndHeld"),
        gauge("AccelplaneHealthUnknown", "accelplane_unit_health_known", ("1", "0"), **CARD),
        *devices_lost(),
        gauge("AccelplaneKubeletDisagrees", "accelplane_devices", ("2", "1"), allocatable, health="Healthy", **I915),
        counter("AccelplaneAllocationFailing", "accelplane_allocation_failures_total", **I915),
        exhausted(),
        idle(),
        pci._replace(series=pci.series | more, labels=GPU),
        correctable(),
        link(),
        lanes(),
        throttled(),
        *hot(),
        gauge("AccelplaneQatSilent", "accelplane_qat_up", ("1", "0"), **QAT),
        silent_heartbeat(),
        queue(),
        gauge("AccelplaneFpgaError", "accelplane_fpga_error_flags", ("0", "2"), register="fme_errors", **FPGA),
        recovery(),
        counter("AccelplaneCdiWriteFailing", "accelplane_cdi_write_failures_total", **plugin),
        gauge("AccelplaneReadsStuck", "accelplane_device_stuck", ("0", "1"), **GPU),
        slow_page(),
        *certificates(),
    ]
