"""Labels and resources of GPU capacity on a real Node, the hook that the init container installs, and overlays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from customresources import plugin
from manifests import overlay, own_image

from accelplane.nodelabels.node_reconciler import amount
from accelplane.operator.daemonsets import render
from accelplane.operator.settings import Settings

from .cluster import Cluster
from .machine import REPOSITORY, wait_until
from .node import Node
from .objects import Object, pod

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("image")]

GPU = "gpu.intel.com"
SELECTED = "intel.feature.node.kubernetes.io/gpu"
OVERLAYS = REPOSITORY / "deployments/gpu_plugin/overlays"
NFD = "/etc/kubernetes/node-feature-discovery"
MEMORY = 4 * 1024**3
CAPACITY = {f"{GPU}/millicores": 2000, f"{GPU}/memory.max": 3 * MEMORY, f"{GPU}/tiles": 3}
LINES = {
    *(f"{name}={amount}" for name, amount in CAPACITY.items()),
    f"{GPU}/cards=card0.card1",
    f"{GPU}/gpu-numbers=0.1",
    f"{GPU}/numa-gpu-map=0-0.1",
}


@pytest.fixture(scope="module", autouse=True)
def tiles(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The node's two cards have memory, and the first one a second tile. The driver is loaded."""
    node = cluster.nodes["node-1"]
    written = [f"/sys/devices/pci0000:00/0000:00:{2 + card:02x}.0/drm/card{card}" for card in (0, 1)]
    for card, directory in enumerate(written):
        node.write(f"{directory}/lmem_total_bytes", f"{MEMORY}\n")
        for tile in range(2 - card):
            node.write(f"{directory}/gt/gt{tile}/id", f"{tile}\n")
    node.write("/sys/module/i915/initstate", "live\n")
    yield
    node.remove("/sys/module/i915")
    for directory in written:
        node.remove(f"{directory}/lmem_total_bytes")
        node.remove(f"{directory}/gt")


@pytest.fixture
def deploy(cluster: Cluster, namespace: str) -> Iterator[Callable[..., Object]]:
    """Applies objects, waits until the one DaemonSet among them is ready everywhere, and deletes them with the test."""
    applied: list[str] = []

    def apply(*objects: Object) -> Object:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        cluster.kubectl("apply", "--filename=-", text=text)
        applied.append(text)
        (daemonset,) = (each["metadata"] for each in objects if each["kind"] == "DaemonSet")
        path = f"/apis/apps/v1/namespaces/{daemonset['namespace']}/daemonsets/{daemonset['name']}"

        def ready() -> bool:
            status = (cluster.get(path) or {}).get("status", {})
            return status.get("desiredNumberScheduled") == status.get("numberReady") == 1

        wait_until(ready, f"DaemonSet {daemonset['name']}", 60)
        return cluster.get(path) or {}

    yield apply
    for text in applied:
        cluster.kubectl("delete", "--filename=-", "--wait", "--ignore-not-found", text=text)
    cluster.kubectl("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0", "--wait")


def rendered(cluster: Cluster, tree: Path, namespace: str = "") -> list[Object]:
    """The objects of a tree, in this namespace if they name none."""
    words = ("create", "--dry-run=client", "--output=json", "--kustomize", tree)
    documents = cluster.kubectl(*words, *(["--namespace", namespace] if namespace else []))
    decoder, found = json.JSONDecoder(), []
    while documents.strip():
        document, end = decoder.raw_decode(documents.lstrip())
        documents = documents.lstrip()[end:]
        found += document.get("items", [document]) if document["kind"] == "List" else [document]
    return found


def with_sysfs_of_the_node(container: Object, spec: Object, at: str) -> None:
    """On hardware every container sees the sysfs of its node. The sysfs of a simulated node has to be mounted."""
    spec.setdefault("volumes", []).append({"name": "sysfs-of-the-node", "hostPath": {"path": "/sys"}})
    mount = {"name": "sysfs-of-the-node", "mountPath": at, "readOnly": True}
    container.setdefault("volumeMounts", []).append(mount)


def node_object(cluster: Cluster) -> Any:
    return cluster.get("/api/v1/nodes/node-1")


def test_the_init_container_of_a_custom_resource_installs_a_hook_with_the_right_labels(
    cluster: Cluster, node: Node, namespace: str, deploy: Callable[..., Object]
) -> None:
    resource = plugin("gpu", image=own_image("intel-gpu-plugin"), initImage=own_image("intel-gpu-initcontainer"))
    daemonset: Any = render(resource, Settings(namespace=namespace)).as_object()
    daemonset["metadata"].pop("ownerReferences", None)
    spec = daemonset["spec"]["template"]["spec"]
    with_sysfs_of_the_node(spec["initContainers"][0], spec, "/host-sys")
    deploy(daemonset)
    hook = f"{NFD}/source.d/intel-gpu-nfdhook"
    result = node.run(hook)
    assert set(result.stdout.splitlines()) == LINES
    node.remove(hook)


def test_the_labeller_makes_resources_that_pods_can_request_and_labels_that_select_the_plugin(
    cluster: Cluster, node: Node, namespace: str, deploy: Callable[..., Object]
) -> None:
    objects = rendered(cluster, REPOSITORY / "deployments/labels/overlays/gpu")
    (daemonset,) = (each for each in objects if each["kind"] == "DaemonSet")
    spec = daemonset["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    # Below /proc the runtime admits no mount.
    container["args"] += ["-root=/host"]
    with_sysfs_of_the_node(container, spec, "/host/sys")
    deploy(*objects)

    def allocatable() -> dict[str, int | None]:
        found = node_object(cluster)["status"]["allocatable"]
        return {name: amount(found.get(name)) for name in CAPACITY}

    wait_until(lambda: allocatable() == CAPACITY, "the capacity of GPUs", 60)
    labels = node_object(cluster)["metadata"]["labels"]
    assert {f"{key}={value}" for key, value in labels.items()} >= LINES
    assert labels[f"{GPU}/product"] == "Flex_170"
    cluster.apply(pod("fraction", namespace=namespace, resources={f"{GPU}/millicores": "500", f"{GPU}/tiles": "1"}))
    cluster.wait_pod("fraction", namespace=namespace)
    plugins = rendered(cluster, OVERLAYS / "nfd_labeled_nodes", namespace)
    deploy(*plugins)
    wait_until(lambda: node.allocatable(f"{GPU}/i915_monitoring") == 1, "the monitoring resource")
    assert node.allocatable(f"{GPU}/i915") == 2


def test_with_the_resource_manager_the_plugin_keeps_a_feature_file_on_the_node(
    node: Node, namespace: str, deploy: Callable[..., Object], tmp_path: Path, cluster: Cluster
) -> None:
    cluster.kubectl("label", "node", "node-1", f"{SELECTED}=true", "--overwrite")
    # Kubelets with another certificate directory do not create the directory of the mount.
    node.run("mkdir", "-p", "/var/lib/kubelet/pki")
    objects = overlay(tmp_path, resources=["deploy/gpu_plugin/overlays/fractional_resources"], namespace=namespace)
    deploy(*objects)
    file = node.path(f"{NFD}/features.d/intel-gpu-resources.txt")
    wait_until(file.exists, "the feature file")
    assert set(file.read_text().splitlines()) == LINES
    tile = "/sys/devices/pci0000:00/0000:00:03.0/drm/card1/gt/gt1"
    node.write(f"{tile}/id", "1\n")
    # On hardware a card with other tiles is another card, which the kernel reports.
    cluster.kubectl("rollout", "restart", "daemonset", "intel-gpu-plugin", "--namespace", namespace)
    wait_until(lambda: file.exists() and f"{GPU}/tiles=4\n" in file.read_text(), "the tile", 60)
    node.remove(tile)
    cluster.kubectl("delete", "daemonset", "intel-gpu-plugin", "--namespace", namespace, "--wait")
    wait_until(lambda: not file.exists(), "the end of the file")
    cluster.kubectl("label", "node", "node-1", f"{SELECTED}-")


# The cards of the node are not on the list of allowlist-arc.
PUBLISHED = {
    "monitoring_shared-dev_nfd": {"i915": 60, "i915_monitoring": 1},
    "xpumd": {"i915": 2, "monitoring": 1},
    "allowlist-arc": {},
}


@pytest.mark.parametrize("tree", PUBLISHED)
def test_an_overlay_becomes_ready(
    cluster: Cluster, node: Node, namespace: str, deploy: Callable[..., Object], tree: str
) -> None:
    cluster.kubectl("label", "node", "node-1", f"{SELECTED}=true", "--overwrite")
    deploy(*rendered(cluster, OVERLAYS / tree, namespace))
    for name, expected in PUBLISHED[tree].items():
        wait_until(lambda name=name, quantity=expected: node.allocatable(f"{GPU}/{name}") == quantity, name)
    cluster.kubectl("label", "node", "node-1", f"{SELECTED}-")
