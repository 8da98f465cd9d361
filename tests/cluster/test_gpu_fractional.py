"""The tree `fractional_resources` on a real kubelet, whose `/pods` the plugin reads; tests set annotations."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accelplane.kubelet.checkpoint import read_checkpoint

from .build import kubernetes_minor
from .conftest import running_cluster
from .deviceproxy import DeviceProxy
from .gpu_nodes import KubeletProcess
from .hardware import plug_sample_gpu
from .machine import REPOSITORY, wait_until
from .node import Node, NodePlan
from .objects import Object, pod
from .product_image import product_image
from .test_gpu_base import MIB, Plugin

pytestmark = pytest.mark.cluster

TREE = REPOSITORY / "deployments/gpu_plugin/overlays/fractional_resources"
# The role binding of the tree is for this namespace.
NAMESPACE = "default"
I915 = "gpu.intel.com/i915"
CARDS, TILES = 3, 2
TRUST = "/var/lib/kubelet/pki/kubelet.crt"
COMPOSITE = [{"name": "ZE_FLAT_DEVICE_HIERARCHY", "value": "COMPOSITE"}]


def cards_with_tiles(node: Node) -> None:
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        plug_sample_gpu(node, tree, cards=CARDS)
        for card in range(CARDS):
            for tile in range(TILES):
                gt = tree / f"sys/devices/pci0000:00/0000:00:{2 + card:02x}.0/drm/card{card}/gt/gt{tile}"
                gt.mkdir(parents=True)
                (gt / "id").write_text(f"{tile}\n")
        node.copy_tree(tree)


class Gpus:
    """The node with the plugin, and pods with annotations as GPU Aware Scheduling writes them."""

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        self.cluster = plugin.cluster
        self.node = plugin.node

    def pod(self, name: str, annotations: Mapping[str, str], *amounts: int, **container: object) -> Object:
        """A pod that is bound to the node; one container for each amount."""
        described = pod(name, namespace=NAMESPACE, node=self.node.name, resources={I915: "1"}, **container)
        described["metadata"]["annotations"] = dict(annotations)
        (first,) = described["spec"]["containers"]
        described["spec"]["containers"] = [
            {**first, "name": f"c{number}", "resources": {"limits": {I915: str(amount)} if amount else {}}}
            for number, amount in enumerate(amounts or (1,))
        ]
        return described

    def create(self, described: Object) -> None:
        status, answer = self.cluster.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", described)
        assert status == 201, answer

    def run(self, name: str, annotations: Mapping[str, str], *amounts: int, **container: object) -> None:
        self.create(self.pod(name, annotations, *amounts, **container))
        self.cluster.wait_pod(name, namespace=NAMESPACE)

    def cards(self, name: str, container: str = "c0") -> list[str]:
        """The cards of a container, from the kubelet's checkpoint."""
        uid = (self.cluster.pod(name) or {})["metadata"]["uid"]
        found = read_checkpoint(str(self.node.path("/var/lib/kubelet/device-plugins")))
        assert found is not None
        return sorted(
            id_.partition("-")[0]
            for each in found.holdings
            if (each.pod_uid, each.container, each.resource) == (uid, container, I915)
            for id_ in each.ids
        )

    def mask(self, name: str, container: str = "c0") -> str | None:
        """ZE_AFFINITY_MASK in the environment of a container's process."""
        statuses = (self.cluster.pod(name) or {})["status"]["containerStatuses"]
        (id_,) = (each["containerID"].removeprefix("containerd://") for each in statuses if each["name"] == container)
        tasks = [line.split() for line in self.node.run("ctr", "-n=k8s.io", "tasks", "list").stdout.splitlines()]
        (process,) = (number for task, number, *_ in tasks if task == id_)
        environment = self.node.run("cat", f"/proc/{process}/environ").stdout.split("\0")
        return dict(each.split("=", 1) for each in environment if each).get("ZE_AFFINITY_MASK")

    def log(self) -> str:
        """What the plugin's container has logged."""
        uid, number = self.plugin.pod["metadata"]["uid"], self.plugin.restarts
        (directory,) = self.node.path("/var/log/pods").glob(f"*_{uid}")
        return (directory / f"intel-gpu-plugin/{number}.log").read_text()

    def kill_plugin(self) -> None:
        before = self.plugin.restarts
        self.cluster.kill_container(self.plugin.pod["metadata"]["name"], namespace=NAMESPACE)
        wait_until(lambda: self.plugin.restarts > before, "the plugin's next container", 60)
        self.wait_cards()

    def replace_plugin(self) -> None:
        self.cluster.kubectl("delete", "pod", "--selector=app=intel-gpu-plugin", "-n", NAMESPACE, "--wait")
        self.cluster.kubectl("rollout", "status", "daemonset/intel-gpu-plugin", "-n", NAMESPACE, "--timeout=60s")
        self.wait_cards()

    def wait_cards(self) -> None:
        """Waits until this plugin, not a former one, is registered."""
        wait_until(lambda: f"{I915}: new resource" in self.log(), "the resource in the plugin's log", 60)
        wait_until(lambda: self.node.allocatable(I915) == 300 * CARDS, "all shares", 60)

    def delete_pods(self) -> None:
        listed = (self.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods") or {"items": []})["items"]
        names = [each["metadata"]["name"] for each in listed if "ownerReferences" not in each["metadata"]]
        for name in names:
            path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"
            self.cluster.request("DELETE", path, {"gracePeriodSeconds": 0})
        wait_until(lambda: not any(map(self.cluster.pod, names)), "end of pods", 60)


@pytest.fixture(scope="module")
def deployed(cluster_is_possible: None) -> Iterator[Gpus]:
    # A kubelet without configured certificates creates its own in the directory that the plugin mounts.
    settings = {"tlsCertFile": "", "tlsPrivateKeyFile": "", "maxPods": 250, "nodeStatusUpdateFrequency": "200ms"}
    with running_cluster(NodePlan(hardware=[cards_with_tiles], kubelet=settings)) as cluster:
        (node,) = cluster.nodes.values()
        cluster.import_image(product_image())
        cluster.kubectl("label", "node", node.name, "intel.feature.node.kubernetes.io/gpu=true")
        cluster.kubectl("apply", "--kustomize", TREE, "--namespace", NAMESPACE)
        gpus = Gpus(Plugin(cluster, node, NAMESPACE))
        wait_until(lambda: node.allocatable(I915) == 300 * CARDS, "all shares", 60)
        yield gpus


@pytest.fixture
def gpus(deployed: Gpus) -> Iterator[Gpus]:
    yield deployed
    deployed.delete_pods()


def gas(cards: str, tiles: str = "", timestamp: str = "") -> dict[str, str]:
    annotations = {"gas-container-cards": cards, "gas-container-tiles": tiles, "gas-ts": timestamp}
    return {name: value for name, value in annotations.items() if value}


def check_source(gpus: Gpus) -> None:
    """The plugin has read all pods from the kubelet, where that knows the right to list only pods."""
    assert ("from the API server" in gpus.log()) == (kubernetes_minor() < 33)


def test_containers_get_the_cards_and_tiles_of_the_annotations(gpus: Gpus) -> None:
    annotations = gas("card2,card1||card0", "card2:gt1,card1:gt0||card0:gt1")
    gpus.run("annotated", annotations, 2, 0, 1, env=COMPOSITE)
    assert gpus.cards("annotated", "c0") == ["card1", "card2"]
    assert gpus.cards("annotated", "c2") == ["card0"]
    assert [gpus.mask("annotated", f"c{number}") for number in range(3)] == ["0.1,1.0", None, "0.1"]
    check_source(gpus)


def test_concurrently_started_pods_get_different_cards(gpus: Gpus) -> None:
    pods = [gpus.pod(f"p{n}", gas(f"card{n % 3}", f"card{n % 3}:gt{n % 2}", f"{1000 + n}")) for n in range(6)]
    with ThreadPoolExecutor(len(pods)) as pool:
        list(pool.map(gpus.create, pods))
    for n in range(6):
        gpus.cluster.wait_pod(f"p{n}", namespace=NAMESPACE)
    assert [gpus.cards(f"p{n}") for n in range(6)] == [[f"card{n % 3}"] for n in range(6)]
    assert [gpus.mask(f"p{n}") for n in range(6)] == [str(n % 2) for n in range(6)]


def test_an_annotation_that_is_written_during_the_admission_has_no_effect(gpus: Gpus) -> None:
    """The kubelet's list of pods does not change while the kubelet waits for the plugin."""
    if kubernetes_minor() < 33:
        pytest.skip("the plugin reads the pods of older kubelets from the API server")
    kubelet = KubeletProcess(gpus.node)
    gpus.create(gpus.pod("late", {}))
    kubelet.wait_log(r"SyncLoop ADD.*default/late")
    body = {"metadata": {"annotations": gas("card2", "card2:gt1")}}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/late"
    assert gpus.cluster.request("PATCH", path, body, content="application/merge-patch+json")[0] == 200
    gpus.cluster.wait_pod("late", namespace=NAMESPACE)
    assert len(gpus.cards("late")) == 1
    assert gpus.mask("late") is None
    assert "pod default/late has no gas-container-cards; using the default method" in gpus.log()
    # The pod does not block the next one.
    gpus.run("next", gas("card2", "card2:gt1"))
    assert (gpus.cards("next"), gpus.mask("next")) == (["card2"], "1")


def test_restarts_of_plugin_and_kubelet_keep_pods_and_the_next_pod_gets_its_cards(gpus: Gpus) -> None:
    gpus.run("before", gas("card1", "card1:gt1"))
    gpus.kill_plugin()
    gpus.run("between", gas("card2", "card2:gt1"))
    gpus.node.kubelet.stop()
    gpus.node.kubelet.start()
    gpus.wait_cards()
    gpus.run("after", gas("card0", "card0:gt1"))
    for name, card in (("before", "card1"), ("between", "card2"), ("after", "card0")):
        assert (gpus.cards(name), gpus.mask(name)) == ([card], "1")
    check_source(gpus)


# Restarts between GetPreferredAllocation and Allocate, which a proxy holds.

PROXIED = "/var/lib/proxied"
# The kubelet restarts no container while it waits for an Allocate call, so the plugin gets a parent that restarts it.
SUPERVISOR = "import subprocess, sys\nwhile True: subprocess.call(sys.argv[1:])"


class ProxiedPlugin:
    """The plugin behind the proxy."""

    def __init__(self, gpus: Gpus, proxy: DeviceProxy) -> None:
        self.gpus = gpus
        self.proxy = proxy

    def kill_plugin(self) -> None:
        """Kills the plugin and waits until the next one has registered with the proxy."""
        before = len(self.proxy.registrations)
        parent = self.gpus.plugin.process
        children = self.gpus.node.run("cat", f"/proc/{parent}/task/{parent}/children").stdout.split()
        assert len(children) == 1
        self.gpus.node.run("kill", "-KILL", *children)
        wait_until(lambda: I915 in self.proxy.registrations[before:], "the registration of the next plugin", 60)


def patch_plugin(gpus: Gpus, directory: str, command: list[str] | None) -> None:
    """Changes the plugin's directory for sockets and its command."""
    volume = {"name": "kubeletsockets", "hostPath": {"path": directory}}
    container = {"name": "intel-gpu-plugin", "command": command}
    patch = {"spec": {"template": {"spec": {"volumes": [volume], "containers": [container]}}}}
    words = ("daemonset/intel-gpu-plugin", "-n", NAMESPACE)
    gpus.cluster.kubectl("patch", *words, "--type=strategic", f"--patch={json.dumps(patch)}")
    gpus.cluster.kubectl("rollout", "status", *words, "--timeout=60s")


@pytest.fixture
def proxied(gpus: Gpus) -> Iterator[ProxiedPlugin]:
    disk = gpus.node.disk / "root"
    plugin = disk / PROXIED.lstrip("/")
    plugin.mkdir(parents=True)
    proxy = DeviceProxy(disk / "var/lib/kubelet/device-plugins", plugin)
    proxy.start()
    command = ["/usr/bin/python3.11", "-I", "-c", SUPERVISOR, "/usr/local/bin/intel_gpu_device_plugin"]
    try:
        patch_plugin(gpus, PROXIED, command)
        wait_until(lambda: I915 in proxy.registrations, "the registration with the proxy", 60)
        wait_until(lambda: gpus.node.allocatable(I915) == 300 * CARDS, "all shares", 60)
        yield ProxiedPlugin(gpus, proxy)
    finally:
        gpus.delete_pods()
        proxy.stop()
        patch_plugin(gpus, "/var/lib/kubelet/device-plugins", None)
        gpus.wait_cards()
        shutil.rmtree(plugin)


def phase(gpus: Gpus, name: str) -> str:
    return (gpus.cluster.pod(name) or {"status": {}})["status"].get("phase", "")


def test_a_plugin_restarted_between_the_calls_allocates_the_preferred_cards_without_a_mask(
    proxied: ProxiedPlugin,
) -> None:
    gpus = proxied.gpus
    with proxied.proxy.holding() as wait_for_allocate:
        gpus.create(gpus.pod("during", gas("card1", "card1:gt1")))
        wait_for_allocate()
        proxied.kill_plugin()
    gpus.cluster.wait_pod("during", namespace=NAMESPACE)
    # The kubelet has the IDs of the first answer. What else the first plugin knew is lost with it.
    assert (gpus.cards("during"), gpus.mask("during")) == (["card1"], None)
    assert "pod default/during: no devices were chosen for container 0, using the default method" in gpus.log()
    wait_until(lambda: gpus.node.allocatable(I915) == 300 * CARDS, "all shares", 60)
    gpus.run("after", gas("card2", "card2:gt1"))
    assert (gpus.cards("after"), gpus.mask("after")) == (["card2"], "1")


def test_a_kubelet_restart_between_the_calls_gives_the_cards_to_the_pod_or_its_successor(
    proxied: ProxiedPlugin,
) -> None:
    gpus = proxied.gpus
    with proxied.proxy.holding() as wait_for_allocate:
        gpus.create(gpus.pod("during", gas("card1", "card1:gt1")))
        wait_for_allocate()
        kubelet = gpus.node.kubelet
        proxied.proxy.restart_kubelet(kubelet.kill, lambda: kubelet.start(wait=False))
    wait_until(lambda: phase(gpus, "during") in ("Running", "Failed"), "the admission of the pod", 60)
    if phase(gpus, "during") == "Failed":
        # The kubelet rejects a bound pod that it admits before the plugin has registered again. The answer to the call
        # that was lost must not block the pod that a controller then creates.
        status = (gpus.cluster.pod("during") or {})["status"]
        assert status["reason"] == "UnexpectedAdmissionError"
        gpus.delete_pods()
        wait_until(lambda: gpus.node.allocatable(I915) == 300 * CARDS, "all shares", 60)
        gpus.run("during", gas("card1", "card1:gt1"))
    assert (gpus.cards("during"), gpus.mask("during")) == (["card1"], "1")
    gpus.run("after", gas("card2", "card2:gt1"))
    assert (gpus.cards("after"), gpus.mask("after")) == (["card2"], "1")


def test_the_memory_limit_holds_with_two_hundred_pods(gpus: Gpus) -> None:
    """The pods wait for a volume, so they have no container. They are larger than usual pods."""
    volume = {"name": "missing", "configMap": {"name": "missing"}}

    def create(number: int) -> None:
        described = gpus.pod(f"waiting{number}", {"padding": 20_000 * "x"}, 0)
        described["spec"]["volumes"] = [volume]
        described["spec"]["containers"][0]["volumeMounts"] = [{"name": "missing", "mountPath": "/missing"}]
        gpus.create(described)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(create, range(200)))
    gpus.run("worker", gas("card2|card1", "card2:gt1|card1:gt0"), 1, 1)
    assert [gpus.cards("worker", each) for each in ("c0", "c1")] == [["card2"], ["card1"]]
    assert [gpus.mask("worker", each) for each in ("c0", "c1")] == ["1", "0"]
    assert gpus.plugin.memory("memory.limit_in_bytes") == 90 * MIB
    assert gpus.plugin.memory("memory.max_usage_in_bytes") < 60 * MIB
    check_source(gpus)


def test_the_api_server_serves_where_the_kubelet_cannot_be_verified(gpus: Gpus) -> None:
    trust = gpus.node.path(TRUST)
    content = trust.read_bytes()
    trust.write_bytes(b"")
    try:
        gpus.replace_plugin()
        gpus.run("other", gas("card1", "card1:gt1"))
    finally:
        trust.write_bytes(content)
    assert (gpus.cards("other"), gpus.mask("other")) == (["card1"], "1")
    assert "the pods are read from the API server from now on" in gpus.log()
