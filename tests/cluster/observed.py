"""A cluster whose real agents are observed by a real Prometheus and by the fleet page.

Two nodes: the first has an emulated kernel with QAT, DSA, IAA, SGX and two GPUs, the second GPUs and an NPU as files.
Prometheus and the fleet run beside the control plane, with the rights that the documentation names. Only times are
shortened: the scrape interval, and the time for which a condition must hold until its alert fires.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml
from manifests import DEPLOY
from monitoring import RULES, SCRAPE
from prometheus import program

from accelplane.fleet.devicelist import FleetDeviceList
from accelplane.simulate import DsaSpec, GpuSpec, IaaSpec, NodeSpec, NpuSpec, QatSpec, QueueSpec, SgxSpec
from accelplane.simulate.tree import SimulatedNode

from .cluster import Cluster
from .emulated import EmulatedKernel, emulated_kernel
from .families import DSA0, EPC, IAA0, NAMESPACE, QAT0, VFS
from .machine import Daemon, wait_until
from .node import Node, NodePlan
from .objects import Object, pod
from .product_image import product_image

CY, I915, ENCLAVE = "qat.intel.com/cy", "gpu.intel.com/i915", "sgx.intel.com/enclave"
IDLE = ("sh", "-c", "trap exit TERM; sleep 100000 & wait")
OFFLOAD = NodeSpec(
    gpus=[GpuSpec()] * 2,
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
TREES = {"accelplane_node": "accelplane_node/overlays/qat"}
AGENTS = {(node, agent) for node in ("node-1", "node-2") for agent in ("accelplane-node", "intel-npu-plugin")}
PORT, FLEET_PORT = 9090, 8080
UP = 'up{job="accelplane-agent"}'
HARDWARE = "accelplane_(device|pci|gpu|npu|qat|idxd|sgx|unit_info).*"


def plug_gpus(node: Node, tree: Path) -> None:
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
        fields = {"resources": [f"../deploy/{TREES.get(tree, tree)}"]}
        fields["patches"] = [{"target": {"kind": "DaemonSet"}, "patch": json.dumps(patch)}]  # type: ignore[assignment]
        (directory / tree).mkdir()
        (directory / tree / "kustomization.yaml").write_text(json.dumps(fields))
    components = ["deploy/monitoring/components/agent-pages"]
    fields = {"namespace": NAMESPACE, "resources": [*ARGUMENTS], "components": components}  # type: ignore[dict-item]
    (directory / "kustomization.yaml").write_text(json.dumps(fields))
    return directory


OF_PROMETHEUS: Sequence[Object] = (
    {"apiGroups": [""], "resources": ["pods", "services", "nodes"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
    {"nonResourceURLs": ["/metrics"], "verbs": ["get"]},
)
OF_FLEET: Sequence[Object] = ({"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]},)


def rights(user: str, rules: Sequence[Object]) -> list[Object]:
    """These rights for a user of the same name as the role."""
    group = "rbac.authorization.k8s.io"
    role: Object = {"apiVersion": f"{group}/v1", "metadata": {"name": user}}
    reference = {"apiGroup": group, "kind": "ClusterRole", "name": user}
    subjects = [{"apiGroup": group, "kind": "User", "name": user}]
    return [
        role | {"kind": "ClusterRole", "rules": list(rules)},
        role | {"kind": "ClusterRoleBinding", "roleRef": reference, "subjects": subjects},
    ]


def fetch(address: str, port: int, path: str) -> str:
    """The body of an answer with status 200. Raises `OSError`."""
    connection = http.client.HTTPConnection(address, port, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read().decode()
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise OSError(f"{path}: {response.status} {body[:300]}")
    return body


class Prometheus:
    """The server on the control plane's machine, and its HTTP API."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        machine = cluster.control
        self.address = cluster.addresses.control
        home = machine.path("/var/lib/prometheus")
        home.mkdir(parents=True)
        cluster.apply(*rights("prometheus", OF_PROMETHEUS))
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
        return fetch(self.address, PORT, f"{path}?{urllib.parse.urlencode(parameters)}")

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


class FleetPage:
    """`accelplane fleet` on the control plane's machine."""

    def __init__(self, cluster: Cluster) -> None:
        machine = cluster.control
        self.address = cluster.addresses.control
        cluster.apply(*rights("fleet", OF_FLEET))
        config = machine.path("/var/lib/fleet.kubeconfig")
        config.write_text(cluster.user("fleet"))
        words = [
            "-kubeconfig=/var/lib/fleet.kubeconfig", f"-address=:{FLEET_PORT}", "-allow-unauthenticated",
            "-health-probe-bind-address=0", f"-agent-namespaces={NAMESPACE}", "-agent-accounts=accelplane-node,default",
        ]  # fmt: skip
        self.daemon: Daemon = machine.add_daemon(
            "fleet", [sys.executable, "-m", "accelplane", "fleet", *words], ready=self._answers
        )
        self.daemon.start()

    def get(self, path: str) -> str:
        """The body of an answer with status 200. Raises `OSError`."""
        return fetch(self.address, FLEET_PORT, path)

    def devices(self) -> FleetDeviceList:
        return msgspec.json.decode(self.get("/api/v1/devices"), type=FleetDeviceList)

    def _answers(self) -> bool:
        try:
            return bool(self.get("/metrics"))
        except OSError:
            return False


class Setup:
    def __init__(self, cluster: Cluster, kernel: EmulatedKernel, prometheus: Prometheus, fleet: FleetPage) -> None:
        self.cluster = cluster
        self.kernel = kernel
        self.prometheus = prometheus
        self.fleet = fleet

    def up(self) -> set[tuple[str, str]]:
        """Node and agent of all targets that answer."""
        return {(labels["node"], labels["agent"]) for labels, value in self.prometheus.query(UP) if value == 1}

    def agent_pods(self) -> list[Object]:
        selector = "app.kubernetes.io%2Fcomponent%3Dagent"
        listed = self.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={selector}")
        assert listed
        return listed["items"]

    def allocations(self, resource: str = "") -> Mapping[tuple[str, str, str], float]:
        """The device IDs by pod, container and unit, as Prometheus has scraped them."""
        selector = f'{{resource="{resource}"}}' if resource else ""
        found = self.prometheus.query(f"accelplane_container_devices{selector}")
        return {(labels["pod"], labels["container"], labels["unit"]): value for labels, value in found}

    def create(self, described: Object) -> None:
        status, answer = self.cluster.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", described)
        assert status == http.HTTPStatus.CREATED, answer

    def delete_pods(self, label: str) -> None:
        """Deletes the pods with this value of the label `app`, without waiting for their containers."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=app%3D{label}"
        status, answer = self.cluster.request("DELETE", path, {"gracePeriodSeconds": 0})
        assert status == http.HTTPStatus.OK, answer


@contextmanager
def observed_cluster(directory: Path) -> Iterator[Setup]:
    """The cluster, with one pod that holds a QAT function and one with a GPU."""
    kubelet = {"nodeStatusUpdateFrequency": "200ms"}
    plans = [NodePlan(name="node-1", kubelet=kubelet), NodePlan(name="node-2", kubelet=kubelet)]
    with Cluster.running(plans, shares=[program("prometheus").parent]) as cluster:
        cluster.import_image(product_image())
        kernel = emulated_kernel(cluster.nodes["node-1"], OFFLOAD, openable=False)
        plug_gpus(cluster.nodes["node-2"], directory / "gpus")
        with cluster.namespace(NAMESPACE):
            (directory / "agents").mkdir()
            cluster.kubectl("apply", "--kustomize", agents(directory / "agents"))
            instance = Setup(cluster, kernel, Prometheus(cluster), FleetPage(cluster))
            wait_until(lambda: instance.up() == AGENTS, "all agents scraped", 120)
            for name, resource, node in (("worker", CY, "node-1"), ("trainer", I915, "node-2")):
                described = pod(name, *IDLE, namespace=NAMESPACE, resources={resource: "1"})
                described["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
                cluster.apply(described)
                cluster.wait_pod(name, namespace=NAMESPACE)
            yield instance
            instance.fleet.daemon.stop()
            instance.prometheus.daemon.stop()
