"""The defects of kubelets in docs/kubelet-defects.md, with a plugin that does what Accelplane avoids.

Kubelets before 1.34 keep running. If a test of this file fails with a newer version, the defect may be gone: the page
then needs a change.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator

import pytest

from .build import ClusterError, kubernetes_minor, kubernetes_version
from .conftest import running_cluster
from .gpu_nodes import KUBELET, GpuNode
from .machine import wait_until
from .node import NodePlan

pytestmark = pytest.mark.cluster

THING = "example.com/thing"
# The list is always that of the files in /dev/things, with NUMA node 0. Allocate waits as long as /dev/hold exists.
CARELESS = """
import asyncio, os
from accelplane.devices import Allocation, Device
from accelplane.kubelet.server import ResourceServer

class Allocator:
    prefers = pre_starts = False

    async def allocate(self, ids, *, alone=True):
        while os.path.exists("/dev/hold"):
            print("allocate waits", flush=True)
            await asyncio.sleep(0.05)
        return Allocation()

async def main():
    server = ResourceServer("example.com/thing", "/var/lib/kubelet/device-plugins", "thing.sock", Allocator())
    running = asyncio.create_task(server.run())
    listed = None
    while not running.done():
        if (found := sorted(os.listdir("/dev/things"))) != listed:
            listed = found
            server.publish([Device(resource="thing", id=name, topology=(0,)) for name in found])
        server.wake.notify_all()
        await asyncio.sleep(0.05)
    await running

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def shared_node(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuNode]:
    plan = NodePlan(kubelet={**KUBELET, "topologyManagerPolicy": "best-effort"})
    with running_cluster(plan) as cluster:
        yield GpuNode(cluster.nodes["node-1"], tmp_path_factory.mktemp("tree"), 1)


@pytest.fixture
def node(shared_node: GpuNode) -> Iterator[GpuNode]:
    for name in ("a", "b"):
        shared_node.node.write(f"/dev/things/{name}", "")
    shared_node.start("careless", sys.executable, "-c", CARELESS)
    shared_node.wait_counts(2, 2, THING)
    yield shared_node
    shared_node.node.remove("/dev/hold")
    shared_node.reset()


def wait_panic(node: GpuNode, start: int, timeout: float = 60) -> str:
    """Waits until the kubelet has ended; returns the functions of the panic's trace, without their packages.

    Raises `ClusterError` if it still runs after `timeout` seconds.
    """

    def log() -> str:
        return node.node.kubelet.log.read_bytes()[start:].decode(errors="replace")

    wait_until(lambda: not node.node.kubelet.running, f"the end of the kubelet {kubernetes_version()}", timeout)
    assert "nil pointer dereference" in log(), log()[-2000:]
    return " ".join(re.findall(r"devicemanager\.\(\*ManagerImpl\)\.(\w+)", log()))


def test_an_id_that_leaves_the_list_during_allocate_ends_the_kubelet(node: GpuNode) -> None:
    node.node.write("/dev/hold", "")
    start = node.node.kubelet.log.stat().st_size
    node.create("asks", {THING: 2})
    wait_until(lambda: "allocate waits" in node.daemons[0].tail(), "a call of Allocate")
    node.node.remove("/dev/things/a")
    wait_until(lambda: node.counts(THING)[0] == 1, "a shorter list")
    node.node.remove("/dev/hold")
    if kubernetes_minor() < 34:
        node.cluster.wait_pod("asks")
    else:
        assert "allocateContainerResources" in wait_panic(node, start)


def test_a_held_id_that_has_left_the_list_ends_the_kubelet_at_its_next_start(node: GpuNode) -> None:
    node.run("holder", {THING: 1})
    (held,) = node.device_ids("holder", THING)
    node.node.remove(f"/dev/things/{held}")
    wait_until(lambda: node.counts(THING)[0] == 1, "a shorter list")
    if kubernetes_minor() < 34:
        node.restart_kubelet()
        with pytest.raises(ClusterError):
            wait_panic(node, 0, 20)
        return
    for _ in range(5):  # the plugin nearly always registers before the kubelet admits the pod
        start = node.node.kubelet.log.stat().st_size
        node.restart_kubelet()
        with contextlib.suppress(ClusterError):  # it still runs
            assert "generateDeviceTopologyHints" in wait_panic(node, start, 20)
            return
    pytest.fail("the kubelet runs after each of 5 starts")
