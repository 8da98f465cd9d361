"""The alerts fire, stay silent and resolve; the records have their values. promtool evaluates all rules.

Times are minutes. A case puts its condition on node n1 at minute 10; n2 and n3 have similar series without it.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from monitoring import RULES, SCRAPE, alerts, dashboards, groups, panels, queries, records, variable_queries
from prometheus import promtool

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
    ]


def expected(case: Case) -> Labels:
    labels = {"severity": alerts()[case.alert]["labels"]["severity"], **case.labels}
    if not case.everywhere:
        labels |= {"instance": "n1", "node": "n1"}
        dropped = "agent" in HIDDEN.get(case.alert, ()) or case.alert == "AccelplaneSlowRecovery"
        labels |= {} if dropped else {"agent": "accelplane-node"}
    return labels


def as_test(case: Case) -> dict[str, Any]:
    checks = [
        {"eval_time": f"{minute}m", "alertname": case.alert, "exp_alerts": alerts_then}
        for minute, alerts_then in (
            (case.silent, []),
            (case.fires, [{"exp_labels": expected(case)}]),
            (case.resolved, []),
        )
    ]
    return {
        "name": f"{case.alert}: {next(iter(case.series))}",
        "interval": f"{case.interval}m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": checks,
    }


def run(directory: Path, tests: Sequence[Any], rules: Any, interval: int = 1) -> None:
    """Runs tests with the records, and with the alerts that the tests name: the others would take most of the time."""
    named = {check["alertname"] for test in tests for check in test.get("alert_rule_test", ())}
    needed = [
        {**group, "rules": [rule for rule in group["rules"] if "record" in rule or rule["alert"] in named]}
        for group in rules["groups"]
    ]
    (directory / "rules.yaml").write_text(json.dumps({"groups": needed}))
    document = {
        "rule_files": ["rules.yaml"], "evaluation_interval": f"{interval}m", "fuzzy_compare": True, "tests": tests,
    }  # fmt: skip
    (directory / "tests.yaml").write_text(json.dumps(document))
    promtool("test", "rules", directory / "tests.yaml")


def batches(tests: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Tests of few alerts at a time."""
    for start in range(0, len(tests), 6):
        yield tests[start : start + 6]


def without_annotations() -> object:
    result = groups()
    for group in result:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    return {"groups": result}


def test_every_alert_is_silent_fires_and_resolves(tmp_path: Path) -> None:
    every = cases()
    assert {case.alert for case in every} == {*alerts()}
    for interval in {case.interval for case in every}:
        tests = [as_test(case) for case in every if case.interval == interval]
        for part in batches(tests):
            run(tmp_path, part, without_annotations(), interval)


def test_clusters_with_equal_names_of_nodes_have_separate_alerts(tmp_path: Path) -> None:
    """A Prometheus that has the series of several clusters adds the label cluster."""
    joins = {name for name, rule in alerts().items() if "cluster" in rule["expr"]}
    assert len(joins) > 8
    tests: list[dict[str, Any]] = []
    for case in cases():
        if case.alert not in joins or case.interval != 1:
            continue
        both = {
            series.replace("{", f'{{cluster="{cluster}",', 1): values
            for series, values in case.series.items()
            for cluster in ("east", "west")
        }
        test = as_test(case._replace(series=both))
        fires = test["alert_rule_test"][1]
        fires["exp_alerts"] = [{"exp_labels": {**expected(case), "cluster": each}} for each in ("east", "west")]
        tests.append(test)
    for part in batches(tests):
        run(tmp_path, part, without_annotations())


def test_an_agent_of_another_cluster_does_not_replace_a_missing_one(tmp_path: Path) -> None:
    case = agent_missing()
    series = {name.replace("{", '{cluster="east",', 1): values for name, values in case.series.items()}
    series[series_of("n1", "up", cluster="west", **UP)] = "1x120"
    run(
        tmp_path,
        [as_test(case._replace(series=series, labels={"cluster": "east", **case.labels}))],
        without_annotations(),
    )


def test_a_test_of_an_alert_notices_another_threshold(tmp_path: Path) -> None:
    rules: Any = without_annotations()
    for group in rules["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") == "AccelplaneAllocatedIdle":
                rule["expr"] = rule["expr"].replace("> 1800", "> 2800")
    with pytest.raises(AssertionError, match="AccelplaneAllocatedIdle"):
        run(tmp_path, [as_test(idle())], rules)


def test_the_descriptions_name_node_device_and_holders(tmp_path: Path) -> None:
    case = unhealthy("AccelplaneDeviceUnhealthyAndHeld")
    case.series[series_of("n1", "accelplane_container_devices", **{**HOLDER, "pod": "other"}, **CARD)] = "1x120"
    rule = alerts()[case.alert]
    description = (
        "card0 of plugin gpu on node n1 is unhealthy, reason temperature. Held by ml/other/main ml/train/main."
    )
    annotations = {
        "summary": "Device card0 (gpu) of node n1 is unhealthy and in use.",
        "description": description,
        "runbook": rule["annotations"]["runbook"],
    }
    test = as_test(case)
    test["alert_rule_test"][1]["exp_alerts"][0]["exp_annotations"] = annotations
    run(tmp_path, [test], yaml.load(RULES.read_text(), yaml.CSafeLoader))


def test_every_alert_of_a_device_describes_its_holders(tmp_path: Path) -> None:
    """A container holds each device of n1 in the first test, and none in the second. A device of n2 is always held."""
    rules: Any = without_annotations()
    texts = {name: rule["annotations"]["description"] for name, rule in alerts().items()}
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "alert" in rule and (found := re.search(r"\{\{- with .*", texts[rule["alert"]])):
                rule["annotations"] = {"holders": found[0]}
    of_devices = {case.alert for case in cases() if not {"device", "unit"}.isdisjoint(case.labels)}
    without_holder = {name for name in of_devices if "accelplane_container_devices" not in texts[name]}
    assert without_holder == {"AccelplaneReadsStuck"}
    every = [case for case in cases() if "No holder is known" in texts[case.alert]]
    tests: list[object] = []
    for case in every:
        place = {"unit": "card0", **case.labels}
        labels = {name: place[name] for name in ("plugin", "unit", "device") if name in place}
        held = {
            series_of(node, "accelplane_container_devices", **{**HOLDER, "pod": pod}, **labels): "1x150"
            for node, pod in (("n1", "train"), ("n1", "other"), ("n2", "stranger"))
        }
        for more, text in ((held, " Held by ml/other/main ml/train/main."), ({}, " No holder is known.")):
            series = {each: values for each, values in case.series.items() if "container_devices" not in each} | more
            test = as_test(case._replace(series=series))
            test["alert_rule_test"] = test["alert_rule_test"][1:2]
            test["alert_rule_test"][0]["exp_alerts"][0]["exp_annotations"] = {"holders": text}
            tests.append(test)
    for part in batches(tests):
        run(tmp_path, part, rules)


def value_test(series: Series, values: dict[str, Sequence[tuple[Labels, float]]]) -> dict[str, Any]:
    """Values of records after ten minutes."""
    checks = [
        {
            "expr": record,
            "eval_time": "10m",
            "exp_samples": [{"labels": _selector(record, labels), "value": value} for labels, value in samples],
        }
        for record, samples in values.items()
    ]
    listed = [{"series": name, "values": text} for name, text in series.items()]
    return {"interval": "1m", "input_series": listed, "promql_expr_test": checks}


def _selector(name: str, labels: Labels) -> str:
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def test_the_records_have_their_values_for_shared_devices_too(tmp_path: Path) -> None:
    energy, names = "accelplane_device_energy_joules_total", "accelplane_container_devices"
    i915 = {"resource": "gpu.intel.com/i915", "plugin": "gpu", "unit": "card0", "device": "card0"}
    one = {**i915, "namespace": "ml", "pod": "one", "container": "main"}
    two = {**i915, "namespace": "ml", "pod": "two", "container": "main"}
    fpga = {"plugin": "fpga", "device": "dfl-fme.0", "bdf": ""}
    nic = {"plugin": "onload", "device": "eth0", "bdf": ""}
    series = {
        series_of("n1", energy, sensor="card", **GPU): "0+6000x20",
        series_of("n1", energy, sensor="package", **GPU): "0+9000x20",
        series_of("n1", "accelplane_device_power_watts", sensor="power1", **fpga): "20x20",
        series_of("n1", "accelplane_device_power_watts", sensor="board", **fpga): "30x20",
        series_of("n1", "accelplane_device_power_watts", sensor="rail", **nic): "5x20",
        series_of("n1", "accelplane_gpu_idle_seconds_total", gt="gt0", **GPU): "0+45x20",
        series_of("n1", "accelplane_gpu_idle_seconds_total", gt="gt1", **GPU): "0+90x20",
        series_of("n1", names, **one): "2x20",
        series_of("n1", names, **two): "1x20",
        series_of("n2", names, **one): "1x20",
        series_of("n1", "accelplane_devices", resource="gpu.intel.com/i915", health="Healthy"): "3x20",
        series_of("n1", "accelplane_devices", resource="gpu.intel.com/i915", health="Unhealthy"): "1x20",
    }
    at = {"instance": "n1", "node": "n1"}
    agent = {**at, "agent": "accelplane-node"}
    elsewhere = {"instance": "n2", "node": "n2", "agent": "accelplane-node"}
    values: dict[str, Sequence[tuple[Labels, float]]] = {
        "accelplane:container_device:one": [({**agent, **one}, 1), ({**agent, **two}, 1), ({**elsewhere, **one}, 1)],
        "accelplane:resource_devices:sum": [({**at, "resource": "gpu.intel.com/i915"}, 4)],
        "accelplane:device_power:watts": [({**at, **GPU}, 100), ({**at, "plugin": "fpga", "device": "dfl-fme.0"}, 30)],
        "accelplane:container_device_power:watts": [({**agent, **one}, 100), ({**agent, **two}, 100)],
        "accelplane:gt_active:ratio": [({**agent, "gt": "gt0", **GPU}, 0.25), ({**agent, "gt": "gt1", **GPU}, 0)],
        "accelplane:namespace_devices:sum": [({"namespace": "ml", "resource": "gpu.intel.com/i915"}, 4)],
    }
    assert {*values} == {*records()}
    run(tmp_path, [value_test(series, values)], yaml.load(RULES.read_text(), yaml.CSafeLoader))


def test_promtool_accepts_the_rules_and_the_scrape_configuration(tmp_path: Path) -> None:
    assert "31 rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    config = {"rule_files": [str(RULES)], "scrape_config_files": [str(SCRAPE)]}
    (tmp_path / "prometheus.yaml").write_text(json.dumps(config))
    promtool("check", "config", "--syntax-only", tmp_path / "prometheus.yaml")


def test_promtool_parses_every_query_of_the_dashboards(tmp_path: Path) -> None:
    texts = [text for each in dashboards().values() for panel in panels(each) for text in queries(panel)]
    texts += [text for each in dashboards().values() for text in variable_queries(each)]
    rules = [{"record": f"query:{number}", "expr": text} for number, text in enumerate(texts)]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(texts)} rules found" in promtool("check", "rules", tmp_path / "rules.yaml")
