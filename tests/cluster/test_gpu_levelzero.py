"""The overlays `health` and `wsl` on a real kubelet: plugin and Level-Zero service, real loader, driver for tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from manifests import overlay

from .cluster import Cluster
from .levelzero import compile_driver, write_state
from .machine import wait_until
from .node import Node
from .objects import Object, pod
from .product_image import ORGANISATION, TAG

pytestmark = pytest.mark.cluster

RESOURCE = "gpu.intel.com/i915"
DXG = "gpu.intel.com/dxg"
DIRECTORY = "/var/lib/levelzero-test"
DEVICES = {"devices": 2, "device_0_bdf": "0000:00:02.0", "device_1_bdf": "0000:00:03.0"}
SIDECAR = f"""
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: intel-gpu-plugin
spec:
  template:
    spec:
      containers:
      - name: intel-gpu-levelzero
        env:
        - {{name: ZE_ENABLE_ALT_DRIVERS, value: {DIRECTORY}/driver.so}}
        - {{name: LEVELZERO_TEST_STATE, value: {DIRECTORY}/state}}
        volumeMounts:
        - {{name: test, mountPath: {DIRECTORY}}}
      volumes:
      - name: test
        hostPath: {{path: {DIRECTORY}}}
"""


class Driver:
    """The driver of the node's cards."""

    def __init__(self, node: Node) -> None:
        self._directory = node.path(DIRECTORY)
        self._directory.mkdir(parents=True)
        compile_driver(self._directory / "driver.so")
        self.set()

    def set(self, **state: object) -> None:
        write_state(self._directory / "state", {**DEVICES, **state})


@pytest.fixture(scope="module")
def driver(image: None, cluster: Cluster) -> Driver:
    return Driver(cluster.nodes["node-1"])


@contextmanager
def deployed_overlay(cluster: Cluster, namespace: str, directory: Path, name: str) -> Iterator[None]:
    """An overlay with the images of this repository and the driver for tests."""
    images = [
        {"name": f"{vendor}/{image}", "newName": f"{ORGANISATION}/{image}", "newTag": TAG}
        for vendor in ("intel", ORGANISATION)
        for image in ("intel-gpu-plugin", "intel-gpu-levelzero")
    ]
    tree, patches = [f"deploy/gpu_plugin/overlays/{name}"], [{"patch": SIDECAR}]
    cluster.apply(*overlay(directory, resources=tree, namespace=namespace, images=images, patches=patches))
    yield
    cluster.kubectl("delete", "daemonset", "intel-gpu-plugin", "-n", namespace, "--ignore-not-found", "--wait")
    cluster.kubectl("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0", "--wait")


@pytest.fixture
def deployed(driver: Driver, cluster: Cluster, node: Node, namespace: str, tmp_path: Path) -> Iterator[None]:
    """The overlay `health`, and both cards allocatable."""
    driver.set()
    with deployed_overlay(cluster, namespace, tmp_path, "health"):
        wait_until(lambda: node.allocatable(RESOURCE) == 2, "both cards", 60)
        yield
    wait_until(lambda: not node.allocatable(RESOURCE), "the end of the cards")


def plugin_pod(cluster: Cluster, namespace: str) -> Object:
    listed = cluster.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector=app%3Dintel-gpu-plugin")
    assert listed is not None
    (found,) = listed["items"]
    return found


def restarts(cluster: Cluster, namespace: str) -> dict[str, int]:
    statuses = plugin_pod(cluster, namespace)["status"]["containerStatuses"]
    return {status["name"]: status["restartCount"] for status in statuses}


def log(cluster: Cluster, namespace: str, container: str) -> str:
    name = plugin_pod(cluster, namespace)["metadata"]["name"]
    return cluster.kubectl("logs", name, "-n", namespace, "-c", container)


FAILURES: dict[str, dict[str, object]] = {
    "memory": {"device_0_memory": "4:17179869184"},
    "temperature": {"device_0_sensors": "0:120"},
    "lost": {"device_0_zesDevicePciGetState": 0x70000001},
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.usefixtures("deployed")
def test_a_failing_card_is_not_allocatable_until_it_recovers_and_pods_keep_running(
    driver: Driver, cluster: Cluster, node: Node, namespace: str, failure: str
) -> None:
    for name in ("first", "second"):
        cluster.apply(pod(name, namespace=namespace, resources={RESOURCE: "1"}, restart="Always"))
    for name in ("first", "second"):
        cluster.wait_pod(name, namespace=namespace)
    start = time.monotonic()
    driver.set(**FAILURES[failure])
    wait_until(lambda: node.allocatable(RESOURCE) == 1, "one card less", 60)
    print(f"one card less after {time.monotonic() - start:.1f} s")
    start = time.monotonic()
    driver.set()
    wait_until(lambda: node.allocatable(RESOURCE) == 2, "the card again", 60)
    print(f"the card again after {time.monotonic() - start:.1f} s")
    for name in ("first", "second"):
        found = cluster.pod(name, namespace)
        assert found is not None
        assert found["status"]["phase"] == "Running"
        assert found["status"]["containerStatuses"][0]["restartCount"] == 0
    assert restarts(cluster, namespace) == {"intel-gpu-plugin": 0, "intel-gpu-levelzero": 0}


MESSAGES = {"hang": "no response within", "crash": "ended with signal 11"}


@pytest.mark.parametrize("fault", MESSAGES)
@pytest.mark.usefixtures("deployed")
def test_a_driver_that_hangs_or_crashes_for_one_card_does_not_hide_the_failure_of_the_other(
    driver: Driver, cluster: Cluster, node: Node, namespace: str, fault: str
) -> None:
    driver.set(device_0_zesDeviceEnumTemperatureSensors=fault)
    wait_until(
        lambda: MESSAGES[fault] in log(cluster, namespace, "intel-gpu-levelzero"), f"the message of a {fault}", 60
    )
    driver.set(device_0_zesDeviceEnumTemperatureSensors=fault, device_1_quality=2)
    wait_until(lambda: node.allocatable(RESOURCE) == 1, "one card less", 60)
    driver.set()
    wait_until(lambda: node.allocatable(RESOURCE) == 2, "the card again", 60)
    assert restarts(cluster, namespace) == {"intel-gpu-plugin": 0, "intel-gpu-levelzero": 0}


def test_in_wsl_the_gpus_of_the_service_are_allocatable_and_a_pod_gets_the_device_and_its_mask(
    driver: Driver, cluster: Cluster, node: Node, namespace: str, tmp_path: Path
) -> None:
    node.mknod("/dev/dxg", 1, 3)
    libraries = node.path("/usr/lib/wsl")
    (libraries / "lib").mkdir(parents=True, exist_ok=True)
    (libraries / "lib/libdxcore.so").write_text("a library of Windows\n")
    driver.set(devices=3, device_1_vendor="0x10de")
    with deployed_overlay(cluster, namespace, tmp_path, "wsl"):
        # The indices 0 and 2: the other GPU is not Intel's.
        wait_until(lambda: node.allocatable(DXG) == 2, "both GPUs", 60)
        for name in ("first", "second"):
            cluster.apply(pod(name, namespace=namespace, resources={DXG: "1"}))
        for name in ("first", "second"):
            cluster.wait_pod(name, namespace=namespace)
        echo = ("sh", "-c", "echo $ZE_AFFINITY_MASK")
        masks = [exec_in(cluster, namespace, name, *echo) for name in ("first", "second")]
        assert sorted(masks) == ["0\n", "2\n"]
        assert exec_in(cluster, namespace, "first", "cat", "/usr/lib/wsl/lib/libdxcore.so") == "a library of Windows\n"
        assert exec_in(cluster, namespace, "first", "sh", "-c", "test -c /dev/dxg && echo there") == "there\n"
        assert restarts(cluster, namespace) == {"intel-gpu-plugin": 0, "intel-gpu-levelzero": 0}
    wait_until(lambda: not node.allocatable(DXG), "the end of the GPUs")
    node.remove("/dev/dxg")


def exec_in(cluster: Cluster, namespace: str, name: str, *command: str) -> str:
    return cluster.kubectl("exec", name, "-n", namespace, "--", *command)
