"""The alerts fire, stay silent and resolve; the records have their values. promtool evaluates all rules."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from alertcases import (
    CARD,
    GPU,
    HIDDEN,
    HOLDER,
    UP,
    Case,
    Labels,
    Series,
    agent_missing,
    cases,
    idle,
    series_of,
    unhealthy,
)
from monitoring import RULES, SCRAPE, alerts, dashboards, groups, panels, queries, records, variable_queries
from prometheus import promtool


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
        "runbook_url": rule["annotations"]["runbook_url"],
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
    assert "33 rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    config = {"rule_files": [str(RULES)], "scrape_config_files": [str(SCRAPE)]}
    (tmp_path / "prometheus.yaml").write_text(json.dumps(config))
    promtool("check", "config", "--syntax-only", tmp_path / "prometheus.yaml")


def test_promtool_parses_every_query_of_the_dashboards(tmp_path: Path) -> None:
    texts = [text for each in dashboards().values() for panel in panels(each) for text in queries(panel)]
    texts += [text for each in dashboards().values() for text in variable_queries(each)]
    rules = [{"record": f"query:{number}", "expr": text} for number, text in enumerate(texts)]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(texts)} rules found" in promtool("check", "rules", tmp_path / "rules.yaml")
