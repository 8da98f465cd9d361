"""The files of `deploy/monitoring` are complete, equal to their sources, and consistent with the code."""

import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import DEPLOY, REPOSITORY, Object, overlay, render
from monitoring import (
    MONITORING,
    RULES,
    SCRAPE,
    alerts,
    dashboards,
    groups,
    metrics,
    panels,
    queries,
    records,
    variable_queries,
)

RUNBOOKS = REPOSITORY / "docs/runbooks.md"
PAGE = REPOSITORY / "docs/monitoring.md"
URL = "https://example.com/accelplane/docs/runbooks.md"

# Name -> (for, severity).
ALERTS = {
    "AccelplaneAgentDown": ("10m", "warning"),
    "AccelplaneAgentMissing": ("15m", "warning"),
    "AccelplaneConfigRefused": ("5m", "warning"),
    "AccelplaneNotRegistered": ("5m", "critical"),
    "AccelplaneRegistersAgainAndAgain": ("", "warning"),
    "AccelplaneScanFailing": ("5m", "warning"),
    "AccelplaneDeviceUnhealthy": ("2m", "warning"),
    "AccelplaneDeviceUnhealthyAndHeld": ("2m", "critical"),
    "AccelplaneHealthUnknown": ("15m", "warning"),
    "AccelplaneDevicesLost": ("10m", "warning"),
    "AccelplaneKubeletDisagrees": ("5m", "warning"),
    "AccelplaneAllocationFailing": ("", "warning"),
    "AccelplaneExhausted": ("30m", "info"),
    "AccelplaneAllocatedIdle": ("5m", "info"),
    "AccelplanePciFatal": ("", "critical"),
    "AccelplanePciCorrectable": ("15m", "warning"),
    "AccelplaneLinkDegraded": ("10m", "warning"),
    "AccelplaneThrottled": ("10m", "warning"),
    "AccelplaneHot": ("5m", "critical"),
    "AccelplaneQatSilent": ("2m", "critical"),
    "AccelplaneQueueFull": ("10m", "warning"),
    "AccelplaneFpgaError": ("1m", "warning"),
    "AccelplaneSlowRecovery": ("", "info"),
    "AccelplaneCdiWriteFailing": ("", "warning"),
    "AccelplaneReadsStuck": ("10m", "warning"),
    "AccelplaneCertificateExpires": ("15m", "warning"),
    "AccelplaneCertificateInvalid": ("5m", "critical"),
}
# Constant -> (alert, default, another value, the end of the expression with it).
CONSTANTS = {
    "registrationsPerHour": ("AccelplaneRegistersAgainAndAgain", "6", "20", " > 20"),
    "pageSeconds": ("AccelplaneReadsStuck", "5", "8", " > 8"),
    "recoverySeconds": ("AccelplaneSlowRecovery", "3600", "600", " > 600"),
    "correctableErrorsPerSecond": ("AccelplanePciCorrectable", "1", "0.1", " > 0.1"),
    "throttledRatio": ("AccelplaneThrottled", "0.5", "0.8", " > 0.8"),
    "temperatureMarginCelsius": ("AccelplaneHot", "5", "10", " < 10"),
    "allocatedRatio": ("AccelplaneExhausted", "0.95", "0.8", " > 0.8"),
    "idleSeconds": ("AccelplaneAllocatedIdle", "1800", "7200", " > 7200"),
    "queueRatio": ("AccelplaneQueueFull", "0.9", "0.5", " > 0.5"),
}
# Metrics of Prometheus and of kube-state-metrics.
FOREIGN = {
    "up",
    "scrape_samples_scraped",
    "kube_node_status_allocatable",
    "kube_pod_status_unschedulable",
    "kube_pod_container_resource_requests",
}
SUFFIX = re.compile(r"_(bucket|sum|count|total)$")


def own_metrics() -> set[str]:
    """The names of metrics in the code, without the suffixes of samples."""
    names: set[str] = set()
    for file in (REPOSITORY / "src/accelplane").rglob("*.py"):
        text = file.read_text()
        prefixes = ["", *re.findall(r'prefix = "(\w+_)"', text)]
        names |= {SUFFIX.sub("", name) for name in re.findall(r'"((?:accelplane|fpga|npu|sgx)_[a-z0-9_]+)"', text)}
        for beginning, end in re.findall(r'f"(\w+_)\{name\}"()', text):
            names |= {f"{beginning}{each}{end}" for each in re.findall(r'\("(\w+)", "', text)}
        for prefix in prefixes[1:]:
            names |= {f"{prefix}{each}" for each in re.findall(r'f"\{prefix\}(\w+)"', text)}
    return names


def test_every_metric_of_rules_and_dashboards_exists_in_the_code() -> None:
    expressions = [rule["expr"] for group in groups() for rule in group["rules"]]
    for dashboard in dashboards().values():
        expressions += variable_queries(dashboard)
        expressions += [text for panel in panels(dashboard) for text in queries(panel)]
    used = set[str]().union(*map(metrics, expressions))
    assert len(used) > 60
    known = own_metrics()
    unknown = {name for name in used - FOREIGN - {*records()} if SUFFIX.sub("", name) not in known}
    assert unknown == set()
    assert used >= FOREIGN
    assert used >= {*records()}


# Labels of every series: those of targets, of histograms, and of several clusters.
TARGET_LABELS = {"cluster", "job", "instance", "node", "agent", "le"}


def documented_labels() -> dict[str, set[str]]:
    """The labels of the agent's metrics, whose names `test_docs` compares with the code."""
    text = (REPOSITORY / "docs/metrics.md").read_text()
    _, separator, devices = text.partition("## Metrics of devices")
    assert separator
    found: dict[str, set[str]] = {}
    for part, common in ((text, set[str]()), (devices, {"plugin", "device", "bdf"})):
        for name, labels in re.findall(r"^\| `(\w+)` \| ([^|]*) \|", part, re.MULTILINE):
            found[name] = common | {*labels.replace(",", " ").split()}
    return found


def test_selectors_and_legends_use_labels_that_the_metrics_have() -> None:
    documented = documented_labels()
    expressions = [(rule["expr"], "") for group in groups() for rule in group["rules"]]
    for dashboard in dashboards().values():
        expressions += [
            (target["expr"], target.get("legendFormat", "")) for each in panels(dashboard) for target in each["targets"]
        ]
    wrong: list[str] = []
    checked = 0
    for expr, legend in expressions:
        bare = re.sub(r'"[^"]*"', '""', expr)
        labels: set[str] = set()
        unknown = False  # metrics of others and records, whose labels come from their expression
        for name in metrics(expr) - {"up"}:
            base = name if name in documented else SUFFIX.sub("", name)
            unknown |= base not in documented
            labels |= documented.get(base, set())
            for selector in re.findall(rf"\b{name}\{{([^}}]*)\}}", bare):
                used = {*re.findall(r"(\w+) *(?:=~|!~|!=|=)", selector)} - TARGET_LABELS
                checked += base in documented
                if base in documented and used - documented[base]:
                    wrong.append(f"{name}: {used - documented[base]}")
        groupings = re.findall(r"\b(?:by|on|without|ignoring) \(([^)]*)\)", bare)
        named = {*",".join(groupings).replace(",", " ").split(), *re.findall(r"\{\{(\w+)\}\}", legend)}
        if not unknown and named - labels - TARGET_LABELS:
            wrong.append(f"{expr}: {named - labels - TARGET_LABELS}")
    assert wrong == []
    assert checked > 80


def test_the_generated_files_are_those_of_their_sources(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-B", MONITORING / "source", tmp_path], check=True)
    documents = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert documents == {name: (DEPLOY / name).read_text() for name in documents}, "run make monitoring"
    dashboards = (MONITORING / "dashboards").glob("*.json")
    copies = (DEPLOY / "charts/accelplane/files/monitoring").iterdir()
    assert {str(path.relative_to(DEPLOY)) for path in (*dashboards, *copies)} < {*documents}


def test_the_alerts_equal_those_of_the_documentation() -> None:
    found = {name: (rule.get("for", ""), rule["labels"]["severity"]) for name, rule in alerts().items()}
    assert found == ALERTS
    rows = re.findall(
        r"^\| \[(Accelplane\w+)\]\(runbooks\.md#(\w+)\) \| (\w*) \| (\w+) \|", PAGE.read_text(), re.MULTILINE
    )
    assert {name: (wait, severity) for name, _, wait, severity in rows} == ALERTS
    assert all(anchor == name.lower() for name, anchor, *_ in rows)


def test_every_alert_has_a_runbook_with_all_parts() -> None:
    text = RUNBOOKS.read_text()
    sections = dict(zip(*[iter(re.split(r"^### (\w+)$", text, flags=re.MULTILINE)[1:])] * 2, strict=True))
    assert {*sections} == {*alerts()}
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"] == f"{URL}#{name.lower()}"
        assert {*rule["annotations"]} == {"summary", "description", "runbook_url"}
        parts = re.findall(r"^\*\*(\w+)\.\*\*", sections[name], re.MULTILINE)
        assert parts == ["Meaning", "Impact", "Diagnosis", "Mitigation", "Resolved"], name


def rule_object(objects: Sequence[Object]) -> dict[str, Any]:
    """The alerts of the PrometheusRule by name."""
    (found,) = (each for each in objects if each["kind"] == "PrometheusRule")
    return {rule["alert"]: rule for group in found["spec"]["groups"] for rule in group["rules"] if "alert" in rule}


def test_the_prometheusrule_has_the_rules_of_the_plain_file() -> None:
    (found,) = (each for each in render(MONITORING / "base") if each["kind"] == "PrometheusRule")
    assert found["spec"] == {"groups": groups()}


def test_the_constants_are_the_thresholds_of_the_rules() -> None:
    data = yaml.safe_load((MONITORING / "base/constants.yaml").read_text())["data"]
    assert data == {"runbooks": URL} | {name: default for name, (_, default, _, _) in CONSTANTS.items()}
    for alert, default, _, end in CONSTANTS.values():
        expr = alerts()[alert]["expr"]
        assert expr.endswith(f" {end.split()[0]} {default}")
        assert len(re.findall(" [<>] ", expr)) == 1, alert


def test_a_component_changes_constants_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "constants").mkdir()
    values = {name: value for name, (_, _, value, _) in CONSTANTS.items()} | {"runbooks": "https://wiki/runbooks"}
    patch = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "accelplane-constants"}, "data": values}
    component = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component", "patches": [{"patch": yaml.dump(patch)}],
    }  # fmt: skip
    (tmp_path / "constants/kustomization.yaml").write_text(yaml.dump(component))
    components = ["constants", "deploy/monitoring/components/constants"]
    objects = overlay(tmp_path, resources=["deploy/monitoring/base"], components=components)
    changed = rule_object(objects)
    for alert, _, _, end in CONSTANTS.values():
        assert changed[alert]["expr"].endswith(end)
    thresholds = {alert for alert, *_ in CONSTANTS.values()}
    for name, rule in alerts().items():
        assert changed[name]["annotations"]["runbook_url"] == f"https://wiki/runbooks#{name.lower()}"
        if name not in thresholds:
            assert changed[name]["expr"] == rule["expr"]
    assert all(each["kind"] != "ConfigMap" for each in objects)


def by_kind(objects: Sequence[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def test_the_monitor_of_agents_relabels_as_the_plain_scrape_configuration() -> None:
    (monitor,) = by_kind(render(MONITORING / "base"), "PodMonitor")
    spec = monitor["spec"]
    assert spec["selector"]["matchLabels"] == {
        "app.kubernetes.io/part-of": "accelplane", "app.kubernetes.io/component": "agent",
    }  # fmt: skip
    assert spec["sampleLimit"] == 12000
    (endpoint,) = spec["podMetricsEndpoints"]
    relabelings = endpoint["relabelings"]
    assert [(each.get("targetLabel"), each.get("action")) for each in relabelings] == [
        ("node", None), ("agent", None), ("instance", None), (None, "labeldrop"),
    ]  # fmt: skip
    assert relabelings[3]["regex"] == "namespace|pod|container|endpoint"
    assert (endpoint["port"], endpoint["honorLabels"], endpoint["interval"], endpoint["scrapeTimeout"]) == (
        "pages", True, "30s", "10s",
    )  # fmt: skip
    job = {each["job_name"]: each for each in yaml.safe_load(SCRAPE.read_text())["scrape_configs"]}["accelplane-agent"]
    plain = {each["target_label"]: each["source_labels"] for each in job["relabel_configs"] if "target_label" in each}
    assert plain == {each["targetLabel"]: each["sourceLabels"] for each in relabelings[:3]}
    assert (job["honor_labels"], job["sample_limit"]) == (True, 12000)


def test_agents_with_the_component_serve_what_the_monitor_selects(tmp_path: Path) -> None:
    components = ["deploy/monitoring/components/agent-pages"]
    objects = overlay(tmp_path, resources=["deploy/accelplane_node"], components=components)
    (monitor,) = by_kind(render(MONITORING / "base"), "PodMonitor")
    (daemonset,) = by_kind(objects, "DaemonSet")
    template = daemonset["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    assert container["ports"] == [{"name": "pages", "containerPort": 9400, "protocol": "TCP"}]
    assert container["args"] == ["node", "-http-address=:9400"]
    mounts = {each["mountPath"]: each.get("readOnly") for each in container["volumeMounts"]}
    assert mounts["/var/lib/kubelet/pod-resources"] is True


@pytest.mark.parametrize("tree", ["gpu_plugin", "npu_plugin", "sgx_plugin/base", "dsa_plugin"])
def test_the_kustomizations_of_the_page_add_pages_to_the_agents_of_a_family(tree: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n# (\S+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    root = next(text for name, text in blocks if name == "kustomization.yaml" and "gpu_plugin" in text)
    (tmp_path / "arguments").mkdir()
    (tmp_path / "arguments/kustomization.yaml").write_text(dict(blocks)["arguments/kustomization.yaml"])
    local = re.sub(r"https://example\.com/accelplane\.git/deployments/(\S+)\?ref=main", r"deploy/\1", root)
    objects = overlay(tmp_path, **yaml.safe_load(local.replace("deploy/gpu_plugin", f"deploy/{tree}")))
    (daemonset,) = by_kind(objects, "DaemonSet")
    template = daemonset["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["args"] == ["-v=2", "-http-address=:9400"]
    assert "podresources" in {each["name"] for each in container["volumeMounts"]}
    assert template["metadata"]["labels"]["app.kubernetes.io/component"] == "agent"


@pytest.mark.parametrize(
    ("tree", "prefix"),
    [
        ("sgx_admissionwebhook/overlays/default-with-own-certificates", "intelsgxwebhook-"),
        ("fpga_admissionwebhook/default", "intelfpgawebhook-"),
    ],
)
def test_webhooks_serve_metrics_where_their_monitor_looks(tree: str, prefix: str, tmp_path: Path) -> None:
    plain = by_kind(render(DEPLOY / tree), "Deployment")
    namespace = plain[0]["metadata"]["namespace"]
    objects = overlay(
        tmp_path, resources=[f"deploy/{tree}"], components=["deploy/monitoring/components/webhook-metrics"],
        namespace=namespace,
    )  # fmt: skip
    (monitor,) = (
        each for each in by_kind(render(MONITORING / "base"), "ServiceMonitor")
        if each["metadata"]["name"] == "accelplane-webhook"
    )  # fmt: skip
    (service,) = (
        each for each in by_kind(objects, "Service")
        if monitor["spec"]["selector"]["matchLabels"].items() <= each["metadata"].get("labels", {}).items()
    )  # fmt: skip
    (deployment,) = by_kind(objects, "Deployment")
    template = deployment["spec"]["template"]
    assert service["metadata"]["namespace"] == deployment["metadata"]["namespace"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    (port,) = service["spec"]["ports"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["port"], ports[port["targetPort"]]) == (port["name"], 8080)
    assert "-metrics-bind-address=:8080" in container["args"]
    assert prefix in deployment["metadata"]["name"]


def test_the_monitor_of_the_operator_selects_its_metrics_service() -> None:
    (monitor,) = (
        each for each in by_kind(render(MONITORING / "base"), "ServiceMonitor")
        if each["metadata"]["name"] == "accelplane-operator"
    )  # fmt: skip
    labels = monitor["spec"]["selector"]["matchLabels"]
    (service,) = (
        each for each in by_kind(render(DEPLOY / "operator/default"), "Service")
        if labels.items() <= each["metadata"].get("labels", {}).items()
    )  # fmt: skip
    assert monitor["spec"]["namespaceSelector"]["matchNames"] == [service["metadata"]["namespace"]]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


@pytest.mark.parametrize("tree", ["secure", "secure-with-certmanager"])
def test_the_monitor_of_the_fleet_selects_its_service(tree: str) -> None:
    objects = render(DEPLOY / "fleet/overlays" / tree)
    (monitor,) = (
        each for each in by_kind(render(MONITORING / "base"), "ServiceMonitor")
        if each["metadata"]["name"] == "accelplane-fleet"
    )  # fmt: skip
    (service,), (deployment,) = by_kind(objects, "Service"), by_kind(objects, "Deployment")
    labels = monitor["spec"]["selector"]["matchLabels"]
    assert len(labels) == 2
    assert labels.items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["namespaceSelector"]["matchNames"] == [service["metadata"]["namespace"]]
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert "https" in {each["name"] for each in pod["spec"]["containers"][0]["ports"]}
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    jobs = {each["job_name"]: each for each in yaml.safe_load(SCRAPE.read_text())["scrape_configs"]}
    (discovery,) = jobs["accelplane-fleet"]["kubernetes_sd_configs"]
    assert dict(each.split("=") for each in discovery["selectors"][0]["label"].split(",")) == labels


def test_the_plain_overlay_needs_no_definitions() -> None:
    objects = render(MONITORING / "overlays/plain")
    assert {each["kind"] for each in objects} == {"ConfigMap"}
    data = {each["metadata"]["name"]: each["data"] for each in objects}
    assert data["accelplane-prometheus"] == {"rules.yaml": RULES.read_text(), "scrape.yaml": SCRAPE.read_text()}


def test_each_dashboard_is_in_a_configmap_that_grafana_loads() -> None:
    found = by_kind(render(MONITORING / "dashboards"), "ConfigMap")
    assert {name: text for each in found for name, text in each["data"].items()} == {
        path.name: path.read_text() for path in (MONITORING / "dashboards").glob("*.json")
    }
    assert len(found) == 5
    assert {each["metadata"]["labels"]["grafana_dashboard"] for each in found} == {"1"}


def test_dashboards_have_unique_ids_and_no_fixed_data_source() -> None:
    found = dashboards()
    assert len({each["uid"] for each in found.values()}) == len({each["title"] for each in found.values()}) == 5
    for name, dashboard in found.items():
        numbers = [panel["id"] for panel in dashboard["panels"]]
        assert sorted(numbers) == [*range(1, len(numbers) + 1)], name
        variables = [each["name"] for each in dashboard["templating"]["list"]]
        assert variables[:2] == ["datasource", "cluster"]
        assert len({*variables}) == len(variables)
        assert dashboard["templating"]["list"][0]["type"] == "datasource"
        for panel in panels(dashboard):
            for each in (panel, *panel["targets"]):
                assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert len({each["refId"] for each in panel["targets"]}) == len(panel["targets"])
            for target in panel["targets"]:
                used = {*re.findall(r"\$(?!__)(\w+)", target["expr"])}
                assert "cluster" in used
                assert used <= {*variables}
                assert target["expr"].count('cluster=~"$cluster"') == len(_metric_uses(target["expr"]))
        titles = [panel["title"] for panel in panels(dashboard)]
        assert len({*titles}) == len(titles), name


def _metric_uses(expr: str) -> list[str]:
    bare = re.sub(r'"[^"]*"', '""', expr)
    return re.findall(r"\b(?:accelplane[_:]|kube_|fpga_|controller_runtime_|scrape_)[\w:]+|\bup(?=\{)", bare)


def test_panels_do_not_overlap_and_fit_the_width() -> None:
    for name, dashboard in dashboards().items():
        places = [panel["gridPos"] for panel in dashboard["panels"]]
        assert all(place["x"] + place["w"] <= 24 for place in places), name
        for one, other in itertools.combinations(places, 2):
            beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
            assert beside or below, (name, one, other)
