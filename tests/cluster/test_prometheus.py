"""A real Prometheus scrapes agents on two real nodes with the shipped scrape configuration, rules and dashboards.

Only times are shortened: the scrape interval, and the time for which a condition must hold until its alert fires. The
program runs beside the control plane, with the rights that the documentation names.
"""

from __future__ import annotations

import http.client
import json
import re
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import DEPLOY
from monitoring import RULES, SCRAPE, dashboards, metrics, panels, queries, records
from prometheus import program, promtool

from accelplane.simulate import DsaSpec, GpuSpec, IaaSpec, NodeSpec, NpuSpec, QatSpec, QueueSpec, SgxSpec
from accelplane.simulate.tree import SimulatedNode

from . import conftest
from .cluster import Cluster, NodePlan
from .emulated import EmulatedKernel, emulated_kernel
from .families import DSA0, EPC, IAA0, NAMESPACE, QAT0, VFS
from .machine import Daemon, wait_until
from .objects import Object, pod
from .product_image import product_image

pytestmark = pytest.mark.cluster

CY, I915 = "qat.intel.com/cy", "gpu.intel.com/i915"
OFFLOAD = NodeSpec(
    qats=[QatSpec(bdf=QAT0, vfs=VFS)],
    dsas=[DsaSpec(bdf=DSA0, queues=[QueueSpec()] * 2)],
    iaas=[IaaSpec(bdf=IAA0, queues=[QueueSpec()])],
    sgx=SgxSpec(epc=EPC),
)
GPU_FILES = {
    "hwmon/hwmon0/name": "i915", "hwmon/hwmon0/energy1_input": "123456789", "hwmon/hwmon0/power1_max": "120000000",
    "hwmon/hwmon0/temp1_input": "45000", "hwmon/hwmon0/temp1_crit": "100000", "hwmon/hwmon0/temp1_crit_alarm": "0",
    "hwmon/hwmon0/fan1_input": "1200", "hwmon/hwmon0/in0_input": "780", "hwmon/hwmon0/curr1_input": "900",
    "aer_dev_correctable": "RxErr 0\nTOTAL_ERR_COR 0\n", "aer_dev_fatal": "DLP 0\nTOTAL_ERR_FATAL 0\n",
    "current_link_speed": "16.0 GT/s PCIe", "max_link_speed": "16.0 GT/s PCIe", "current_link_width": "16",
    "max_link_width": "16", "power/runtime_status": "active", "power/control": "on",
}  # fmt: skip
GT_FILES = {
    "rps_act_freq_mhz": "600", "rps_max_freq_mhz": "2050", "rc6_residency_ms": "123456", "throttle_reason_status": "0",
}  # fmt: skip
ARGUMENTS = {
    "accelplane_node": ["node", "--plugins=gpu,qat,dsa,iaa,sgx", "--health-interval=1"],
    "npu_plugin": ["-v=2"],
}
AGENTS = {(node, agent) for node in ("node-1", "node-2") for agent in ("accelplane-node", "intel-npu-plugin")}
PORT = 9090
UP = 'up{job="accelplane-agent"}'
HARDWARE = "accelplane_(device|pci|gpu|npu|qat|idxd|sgx|unit_info).*"
FETCH = "import sys, urllib.request as r; sys.stdout.buffer.write(r.urlopen(sys.argv[1], timeout=10).read())"
MONITORING_KINDS = ("PodMonitor", "ServiceMonitor", "PrometheusRule")


def plug_gpus(node: Any, tree: Path) -> None:
    """Two GPUs and an NPU as files, with sensors."""
    hardware = SimulatedNode(tree, device_nodes="char", numbers=(1, 3))
    hardware.build(NodeSpec(gpus=[GpuSpec(), GpuSpec()], npus=[NpuSpec()]))
    for device in hardware.devices():
        if device.kind == "gpu":
            files = {f"{device.path}/{name}": text for name, text in GPU_FILES.items()}
            files |= {f"{device.class_path}/gt/gt0/{name}": text for name, text in GT_FILES.items()}
            for path, text in files.items():
                file = tree / path.removeprefix("/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
    node.copy_tree(tree)


def agents(directory: Path) -> Path:
    """A kustomization with two agents per node, both with pages."""
    (directory / "deploy").symlink_to(DEPLOY)
    for tree, arguments in ARGUMENTS.items():
        patch = [{"op": "add", "path": "/spec/template/spec/containers/0/args", "value": arguments}]
        fields = {"resources": [f"../deploy/{tree}"]}
        fields["patches"] = [{"target": {"kind": "DaemonSet"}, "patch": json.dumps(patch)}]  # type: ignore[assignment]
        (directory / tree).mkdir()
        (directory / tree / "kustomization.yaml").write_text(json.dumps(fields))
    components = ["deploy/monitoring/components/agent-pages"]
    fields = {"namespace": NAMESPACE, "resources": [*ARGUMENTS], "components": components}  # type: ignore[dict-item]
    (directory / "kustomization.yaml").write_text(json.dumps(fields))
    return directory


def rights(user: str) -> list[Object]:
    """The rights that the documentation names for Prometheus."""
    rules: list[Object] = [
        {"apiGroups": [""], "resources": ["pods", "services", "nodes"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
        {"nonResourceURLs": ["/metrics"], "verbs": ["get"]},
    ]
    group = "rbac.authorization.k8s.io"
    role: Object = {"apiVersion": f"{group}/v1", "metadata": {"name": "prometheus"}}
    reference = {"apiGroup": group, "kind": "ClusterRole", "name": "prometheus"}
    subjects = [{"apiGroup": group, "kind": "User", "name": user}]
    return [
        role | {"kind": "ClusterRole", "rules": rules},
        role | {"kind": "ClusterRoleBinding", "roleRef": reference, "subjects": subjects},
    ]


class Prometheus:
    """The server on the control plane's machine, and its HTTP API."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        machine = cluster.control
        self.address = cluster.addresses.control
        home = machine.path("/var/lib/prometheus")
        home.mkdir(parents=True)
        cluster.apply(*rights("prometheus"))
        (home / "kubeconfig").write_text(cluster.user("prometheus"))
        (home / "scrape.yaml").write_text(yaml.safe_dump(self._scrape()))
        (home / "rules.yaml").write_text(yaml.safe_dump(self._rules()))
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_config_files": ["scrape.yaml"],
        }
        (home / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.daemon: Daemon = machine.add_daemon(
            "prometheus",
            [
                # The program ends at its start if its working directory does not exist.
                "env", "--chdir=/", program("prometheus"), "--config.file=/var/lib/prometheus/prometheus.yaml",
                "--log.level=warn", "--storage.tsdb.path=/var/lib/prometheus/data", f"--web.listen-address=:{PORT}",
            ],
            ready=self._answers,
        )  # fmt: skip
        self.daemon.start()

    @staticmethod
    def _scrape() -> Any:
        config = yaml.safe_load(SCRAPE.read_text())
        for job in config["scrape_configs"]:
            job.update(scrape_interval="1s", scrape_timeout="1s")
            for discovery in job["kubernetes_sd_configs"]:
                discovery["kubeconfig_file"] = "/var/lib/prometheus/kubeconfig"
        return config

    @staticmethod
    def _rules() -> Any:
        rules = yaml.safe_load(RULES.read_text())
        for group in rules["groups"]:
            for rule in group["rules"]:
                rule.pop("for", None)
        return rules

    def _answers(self) -> bool:
        try:
            return bool(self.get("/-/ready"))
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> str:
        """The body of an answer with status 200. Raises `OSError`."""
        connection = http.client.HTTPConnection(self.address, PORT, timeout=30)
        try:
            connection.request("GET", f"{path}?{urllib.parse.urlencode(parameters)}")
            response = connection.getresponse()
            body = response.read().decode()
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise OSError(f"{path} {parameters}: {response.status} {body[:300]}")
        return body

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """The result of an instant query."""
        answer = json.loads(self.get("/api/v1/query", query=expr))["data"]["result"]
        return [(each["metric"], float(each["value"][1])) for each in answer]

    def series(self, name: str) -> set[frozenset[tuple[str, str]]]:
        """The label sets of all series whose name matches, since the start."""
        answer = json.loads(self.get("/api/v1/series", **{"match[]": f'{{__name__=~"{name}"}}'}))["data"]
        return {frozenset(each.items()) for each in answer}

    def firing(self, name: str) -> list[Any]:
        every = json.loads(self.get("/api/v1/alerts"))["data"]["alerts"]
        return [each for each in every if each["labels"]["alertname"] == name and each["state"] == "firing"]


class World:
    def __init__(self, cluster: Cluster, kernel: EmulatedKernel, prometheus: Prometheus) -> None:
        self.cluster = cluster
        self.kernel = kernel
        self.prometheus = prometheus

    def up(self) -> set[tuple[str, str]]:
        """Node and agent of all targets that answer."""
        return {(labels["node"], labels["agent"]) for labels, value in self.prometheus.query(UP) if value == 1}

    def agent_pods(self) -> list[Object]:
        selector = "app.kubernetes.io%2Fcomponent%3Dagent"
        listed = self.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={selector}")
        assert listed
        return listed["items"]


@pytest.fixture(scope="module")
def world(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    binary = program("prometheus").parent
    kubelet = {"nodeStatusUpdateFrequency": "200ms"}
    plans = [NodePlan(name="node-1", kubelet=kubelet), NodePlan(name="node-2", kubelet=kubelet)]
    with Cluster.running(plans, shares=[binary]) as cluster:
        conftest._running.append(cluster)
        cluster.import_image(product_image())
        kernel = emulated_kernel(cluster.nodes["node-1"], OFFLOAD, openable=False)
        plug_gpus(cluster.nodes["node-2"], tmp_path_factory.mktemp("gpus"))
        with cluster.namespace(NAMESPACE):
            cluster.kubectl("apply", "--kustomize", agents(tmp_path_factory.mktemp("agents")))
            made = World(cluster, kernel, Prometheus(cluster))
            wait_until(lambda: made.up() == AGENTS, "all agents scraped", 120)
            for name, resource in (("worker", CY), ("trainer", I915)):
                cluster.apply(
                    pod(name, "sh", "-c", "trap exit TERM; sleep 100000 & wait", namespace=NAMESPACE,
                        resources={resource: "1"})
                )  # fmt: skip
                cluster.wait_pod(name, namespace=NAMESPACE)
            yield made
            made.prometheus.daemon.stop()
        conftest._running.remove(cluster)


def test_agents_are_targets_whose_labels_name_the_node_and_no_pod(world: World) -> None:
    query = world.prometheus.query
    targets = query(UP)
    assert {(labels["node"], labels["agent"], value) for labels, value in targets} == {(*each, 1) for each in AGENTS}
    for labels, _ in targets:
        assert labels["instance"] == labels["node"]
        assert {*labels} == {"__name__", "job", "instance", "node", "agent"}
    names = json.loads(world.prometheus.get("/api/v1/labels"))["data"]
    assert [name for name in names if name.startswith("exported_")] == []
    hardware = world.prometheus.series(HARDWARE)
    assert len(hardware) > 50
    assert not {name for each in hardware for name, _ in each} & {"pod", "namespace", "container", "endpoint"}


def test_holders_are_the_pods_of_users(world: World) -> None:
    def held() -> set[tuple[str, str, str]]:
        found = world.prometheus.query("accelplane_container_devices")
        return {(labels["node"], labels["pod"], labels["resource"]) for labels, _ in found}

    expected = {("node-1", "worker", CY), ("node-2", "trainer", I915)}
    wait_until(lambda: held() == expected, "both pods hold a device")
    (labels,) = (labels for labels, _ in world.prometheus.query('accelplane_container_devices{plugin="gpu"}'))
    assert (labels["namespace"], labels["device"], labels["unit"]) == (NAMESPACE, labels["unit"], labels["device"])
    query = f'accelplane:namespace_devices:sum{{resource="{I915}"}}'
    labels = {"__name__": "accelplane:namespace_devices:sum", "namespace": NAMESPACE, "resource": I915}
    # Rules are evaluated after the scrapes.
    wait_until(lambda: world.prometheus.query(query) == [(labels, 1.0)], "the record has the device")


def test_prometheus_rejects_no_sample_and_promtool_accepts_the_pages(world: World) -> None:
    own = world.prometheus.get("/metrics")
    for cause in ("duplicate_timestamp", "out_of_order", "out_of_bounds"):
        assert f"prometheus_target_scrapes_sample_{cause}_total 0" in own
    assert re.search(r"^prometheus_target_scrapes_exceeded_sample_limit_total 0$", own, re.MULTILINE)
    for each in world.agent_pods():
        url = f"http://{each['status']['podIP']}:9400/metrics"
        page = world.cluster.control.run(sys.executable, "-c", FETCH, url).stdout
        assert promtool("check", "metrics", text=page) == ""


def test_alerts_fire_while_a_held_device_is_unhealthy_and_resolve_after_it(world: World) -> None:
    firing = world.prometheus.firing
    names = "AccelplaneDeviceUnhealthy", "AccelplaneDeviceUnhealthyAndHeld"
    assert not any(firing(name) for name in names)
    world.kernel.do("qat", bdf=QAT0, healthy=False)
    wait_until(lambda: all(firing(name) for name in names), f"firing: {names}", 90)
    for name in names:
        (alert,) = firing(name)
        labels = alert["labels"]
        assert (labels["node"], labels["plugin"], labels["phase"]) == ("node-1", "qat", "unhealthy")
        assert labels["unit"] in alert["annotations"]["description"]
    assert f"Held by {NAMESPACE}/worker/main." in firing(names[1])[0]["annotations"]["description"]
    world.kernel.do("qat", bdf=QAT0, healthy=True)
    wait_until(lambda: not any(firing(name) for name in names), f"resolved: {names}", 90)


def test_every_query_of_the_dashboards_returns_what_is_there(world: World) -> None:
    """A query returns data if all its metrics exist, unless the panel says what its emptiness means."""
    present = {*json.loads(world.prometheus.get("/api/v1/label/__name__/values"))["data"]} | {"up"}
    assert present > {*records()}
    wanted: list[tuple[str, str]] = []
    executed = 0
    for dashboard in dashboards().values():
        for panel in panels(dashboard):
            for text in queries(panel):
                # A subquery has values at full minutes only, and the devices have existed for less.
                expr = text.replace(":1m]", ":1s]")
                world.prometheus.query(expr)
                executed += 1
                if metrics(expr) <= present and "noValue" not in panel["fieldConfig"]["defaults"]:
                    wanted.append((panel["title"], expr))
    assert executed > 90
    assert len(wanted) > 45, len(wanted)

    def empty() -> list[tuple[str, str]]:
        return [each for each in wanted if not world.prometheus.query(each[1])]

    try:
        wait_until(lambda: not empty(), "data of all panels", 30)
    finally:
        assert empty() == []


def test_restarted_agents_continue_their_series(world: World) -> None:
    started = "max by (node, agent) (process_start_time_seconds)"
    before, times = world.prometheus.series(HARDWARE), world.prometheus.query(started)
    for _ in range(2):
        for each in world.agent_pods():
            path = f"/api/v1/namespaces/{NAMESPACE}/pods/{each['metadata']['name']}"
            world.cluster.request("DELETE", path, {"gracePeriodSeconds": 1})

        def again(times: list[tuple[dict[str, str], float]] = times) -> bool:
            now = {(labels["node"], labels["agent"]): value for labels, value in world.prometheus.query(started)}
            earlier = {(labels["node"], labels["agent"]): value for labels, value in times}
            return {*now} == AGENTS and all(now[each] > earlier[each] for each in AGENTS) and world.up() == AGENTS

        wait_until(again, "all agents again", 90)
        times = world.prometheus.query(started)
    assert world.prometheus.series(HARDWARE) == before


def definition(kind: str) -> Object:
    """A definition that accepts everything."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    group = "monitoring.coreos.com"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def test_the_trees_are_applied_with_and_without_the_definitions_of_the_prometheus_operator(world: World) -> None:
    cluster = world.cluster
    with cluster.namespace("monitoring"):
        words = ("apply", "--namespace=monitoring", "--kustomize")
        plain = cluster.kubectl(*words, DEPLOY / "monitoring/overlays/plain")
        assert plain.count("created") == plain.count("configmap/") == 6
        cluster.apply(*map(definition, MONITORING_KINDS))
        established = "--for=condition=Established"
        names = [definition(kind)["metadata"]["name"] for kind in MONITORING_KINDS]
        cluster.kubectl("wait", established, "--timeout=60s", "crd", *names)
        every = cluster.kubectl(*words, DEPLOY / "monitoring")
        found = sorted(re.findall(r"^(\w+)\.monitoring\.coreos\.com/\S+ created$", every, re.MULTILINE))
        assert found == ["podmonitor", "prometheusrule", "servicemonitor", "servicemonitor", "servicemonitor"]
