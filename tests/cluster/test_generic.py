"""The generic plugin as users deploy it: its tree on a real kubelet, with device nodes that appear and vanish."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from generictrees import digest
from manifests import own_image

from .cluster import Cluster
from .machine import REPOSITORY, wait_until
from .node import Node
from .objects import pod

pytestmark = pytest.mark.cluster

TREE = REPOSITORY / "deployments/generic_plugin"
SERIAL, KVM = "squat.ai/serial", "squat.ai/kvm"
ZERO = (1, 5)  # /dev/zero
FULL = (1, 7)  # /dev/full
NODES = ("/dev/ttyUSB0", "/dev/ttyUSB1", "/dev/ttyACM0")


@pytest.fixture
def node(image: None, cluster: Cluster, namespace: str) -> Iterator[Node]:
    """The node with the plugin, and with one serial port."""
    node = cluster.nodes["node-1"]
    node.mknod("/dev/ttyUSB0", *ZERO)
    cluster.kubectl("apply", "--kustomize", TREE, "--namespace", namespace)
    wait_until(lambda: node.allocatable(SERIAL) == 1, "the serial port", 60)
    yield node
    cluster.kubectl("delete", "daemonset", "intel-generic-plugin", "-n", namespace, "--ignore-not-found", "--wait")
    cluster.kubectl("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0", "--wait")
    for path in NODES:
        if node.path(path).exists():
            node.remove(path)
    wait_until(lambda: not node.allocatable(SERIAL), "the end of the serial ports")


def test_pods_get_device_nodes_of_the_configuration(node: Node, cluster: Cluster, namespace: str) -> None:
    (plugin,) = cluster.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector=app%3Dintel-generic-plugin")["items"]
    assert plugin["spec"]["containers"][0]["image"] == own_image("intel-generic-plugin")
    node.mknod("/dev/ttyACM0", *FULL)
    wait_until(lambda: node.allocatable(SERIAL) == 2, "the port that was plugged in")
    cluster.apply(pod("worker", namespace=namespace, resources={SERIAL: "1"}))
    cluster.wait_pod("worker", namespace=namespace)

    def run(*command: str, pod_name: str = "worker") -> str:
        return cluster.kubectl("exec", pod_name, "-n", namespace, "--", *command)

    (port,) = run("sh", "-c", "ls /dev/tty[UA]*").split()
    assert run("sh", "-c", f"head -c 3 {port} | od -An -tx1").split() == ["00"] * 3
    # The same ID as the original's: of a container that runs, it stays allocated if the plugin is replaced.
    checkpoint = node.path("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint").read_text()
    assert digest(f"0{port}") in checkpoint
    node.remove(port)
    wait_until(lambda: node.allocatable(SERIAL) == 1, "the port that was unplugged")
    cluster.kubectl("delete", "pod", "worker", "-n", namespace, "--force", "--grace-period=0", "--wait")
    cluster.apply(pod("other", namespace=namespace, resources={SERIAL: "1"}))
    cluster.wait_pod("other", namespace=namespace)
    (remaining,) = {"/dev/ttyUSB0", "/dev/ttyACM0"} - {port}
    assert run("sh", "-c", "ls /dev/tty[UA]*", pod_name="other").split() == [remaining]


def test_containers_share_a_device_by_count(node: Node, cluster: Cluster, namespace: str) -> None:
    if not node.path("/dev/kvm").exists():
        node.mknod("/dev/kvm", *FULL)
    wait_until(lambda: node.allocatable(KVM) == 100, "/dev/kvm for 100 containers")
    for name in ("first", "second"):
        cluster.apply(pod(name, namespace=namespace, resources={KVM: "1"}))
    for name in ("first", "second"):
        cluster.wait_pod(name, namespace=namespace)
        assert cluster.kubectl("exec", name, "-n", namespace, "--", "ls", "/dev/kvm") == "/dev/kvm\n"
