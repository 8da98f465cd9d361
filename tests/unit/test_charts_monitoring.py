"""The component `monitoring` of the chart renders the objects of `deploy/monitoring`, with the values of the chart."""

import json
from pathlib import Path
from typing import Any

import pytest
from charts import in_hub, rejected, template
from manifests import DEPLOY, Object, in_order, overlay, render
from monitoring import alerts, groups

CHART = "accelplane"
NAMESPACE = "accelerators"
PART_OF = {"app.kubernetes.io/part-of": "accelplane"}


def rendered(**values: object) -> list[Object]:
    return template(CHART, NAMESPACE, components={"monitoring": True}, **values)


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    return {(each["kind"], each["metadata"]["name"]): in_order(each) for each in objects}


def test_the_component_renders_the_objects_of_the_tree() -> None:
    found, expected = by_name(rendered()), by_name(render(DEPLOY / "monitoring"))
    # In the chart the operator has a monitor of its own, with the operator.
    del expected["ServiceMonitor", "accelplane-operator"]
    assert {*found} == {*expected, ("DaemonSet", "accelplane-node"), ("ServiceAccount", "accelplane-node")}
    for key, each in expected.items():
        each["metadata"]["namespace"] = NAMESPACE
        assert found[key] == each, key


def test_the_agent_has_pages_as_with_the_component_of_the_tree(tmp_path: Path) -> None:
    components = ["deploy/monitoring/components/agent-pages"]
    expected = overlay(tmp_path, resources=["deploy/accelplane_node"], components=components, namespace=NAMESPACE)
    found = by_name(rendered())
    assert {key: found[key] for key in by_name(expected)} == by_name(in_hub(expected))


def test_the_monitor_of_the_fleet_looks_in_the_namespace_of_the_release_if_the_fleet_is_there() -> None:
    components = {"monitoring": True, "fleet": True}
    objects = by_name(template(CHART, NAMESPACE, components=components, fleet={"tlsSecret": "tls"}))
    monitor = objects["ServiceMonitor", "accelplane-fleet"]["spec"]
    service = objects["Service", "accelplane-fleet"]
    assert monitor["namespaceSelector"] == {"matchNames": [NAMESPACE]}
    assert service["metadata"]["namespace"] == NAMESPACE
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_pages_are_disabled_without_the_component() -> None:
    _, daemonset = template(CHART, NAMESPACE)
    assert "http-address" not in json.dumps(daemonset)
    assert "ports" not in daemonset["spec"]["template"]["spec"]["containers"][0]


def test_another_kubelet_directory_is_mounted_for_the_holders() -> None:
    daemonset = by_name(rendered(agent={"kubeletDirectory": "/k"}))["DaemonSet", "accelplane-node"]
    volumes = {each["name"]: each.get("hostPath") for each in daemonset["spec"]["template"]["spec"]["volumes"]}
    assert volumes["podresources"] == {"path": "/k/pod-resources"}


def test_constants_are_thresholds_and_links() -> None:
    constants = {"idleSeconds": 7200, "queueRatio": 0.25, "temperatureMarginCelsius": 12, "runbooks": "https://wiki/r"}
    rule = by_name(rendered(monitoring={"constants": constants}))["PrometheusRule", "accelplane"]
    changed: dict[str, Any] = {
        each["alert"]: each for group in rule["spec"]["groups"] for each in group["rules"] if "alert" in each
    }
    expressions = {name: each["expr"] for name, each in alerts().items()}
    expressions["AccelplaneAllocatedIdle"] = expressions["AccelplaneAllocatedIdle"].replace(" > 1800", " > 7200")
    expressions["AccelplaneQueueFull"] = expressions["AccelplaneQueueFull"].replace(" > 0.9", " > 0.25")
    expressions["AccelplaneHot"] = expressions["AccelplaneHot"].replace(" < 5", " < 12")
    assert {name: each["expr"] for name, each in changed.items()} == expressions
    assert changed["AccelplaneHot"]["annotations"]["runbook_url"] == "https://wiki/r#accelplanehot"
    assert len(rule["spec"]["groups"]) == len(groups())


def test_rules_and_dashboards_are_optional_and_labels_can_be_added() -> None:
    labels = {"release": "prometheus"}
    found = by_name(rendered(monitoring={"rules": False, "dashboards": False, "labels": labels}))
    assert {kind for kind, _ in found} == {"DaemonSet", "PodMonitor", "ServiceAccount", "ServiceMonitor"}
    assert found["PodMonitor", "accelplane-agent"]["metadata"]["labels"] == PART_OF | labels


@pytest.mark.parametrize(("values", "word"), [({"idleSecs": 1}, "idleSecs"), ({"queueRatio": "x"}, "queueRatio")])
def test_wrong_constants_are_rejected(values: object, word: str) -> None:
    assert word in rejected(CHART, components={"monitoring": True}, monitoring={"constants": values})
