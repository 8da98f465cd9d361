"""The service of DRA drivers at a real kubelet: registration, prepare and unprepare, restarts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import dra_driver
from .build import kubernetes_minor
from .cluster import Cluster
from .conftest import running_cluster
from .dra_driver import DEVICES, DRIVER
from .machine import Daemon, wait_until
from .node import Node, NodePlan
from .objects import Object, pod

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(kubernetes_minor() < 34, reason="dynamic resource allocation is off before 1.34"),
]

API = "/apis/resource.k8s.io/v1"
LOG = Path("/var/lib/kubelet/driver.log")
CLASS: Object = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": DRIVER},
    "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]},
}


class DriverNode:
    """A node with the driver of `dra_driver` as a daemon, and objects of its API."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.cluster: Cluster = node.cluster
        self.daemon: Daemon = node.add_daemon("dra-driver", [sys.executable, dra_driver.__file__, LOG])

    def log(self) -> list[str]:
        return self.node.path(LOG).read_text().split("\n")[:-1] if self.node.path(LOG).exists() else []

    def wait_log(self, line: str, count: int = 1) -> None:
        wait_until(lambda: self.log().count(line) >= count, f"driver: {count} times {line!r}, found {self.log()}", 60)

    def slices(self) -> list[Object]:
        found = self.cluster.get(f"{API}/resourceslices")
        return found["items"] if found else []

    def publish(self) -> None:
        """Writes the slice of the driver, as its publisher would."""
        devices = [{"name": name} for name in DEVICES]
        pool = {"name": self.node.name, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": DRIVER, "nodeName": self.node.name, "pool": pool, "devices": devices}
        self.cluster.apply(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceSlice",
                "metadata": {"name": f"{self.node.name}-{DRIVER}"},
                "spec": spec,
            }
        )

    def claim(self, name: str) -> None:
        request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER}}
        self.cluster.apply(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"devices": {"requests": [request]}},
            }
        )

    def start_pod(self, name: str, claim: str) -> None:
        described = pod(name, "sh", "-c", "echo $CLAIM; sleep 1000000")
        described["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": claim}]
        described["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
        self.cluster.apply(described)

    def delete_pod(self, name: str) -> None:
        self.cluster.kubectl("delete", "pod", name, "--wait=true", "--timeout=60s")


@pytest.fixture(scope="module")
def driver(cluster_is_possible: None) -> Iterator[DriverNode]:
    with running_cluster(NodePlan()) as cluster:
        cluster.apply(CLASS)
        driver = DriverNode(cluster.nodes["node-1"])
        driver.daemon.start()
        driver.wait_log("registered")
        driver.publish()
        yield driver


def test_a_pod_gets_the_devices_of_its_claim_and_frees_them(driver: DriverNode) -> None:
    driver.claim("first")
    driver.start_pod("one", "first")
    driver.cluster.wait_pod("one")
    assert driver.cluster.kubectl("logs", "one").strip() == "first"
    assert driver.log().count("prepare first") == 1
    driver.delete_pod("one")
    driver.wait_log("unprepare first")


def test_a_failed_claim_is_named_in_the_pods_event(driver: DriverNode) -> None:
    driver.claim("bad")
    driver.start_pod("failing", "bad")

    def failed() -> bool:
        events = driver.cluster.kubectl("events", "--for=pod/failing")
        return "NodePrepareResources failed for ResourceClaim bad: device gpu-0 is still held by" in events

    wait_until(failed, "the event of the pod", 60)
    driver.delete_pod("failing")
    driver.wait_log("unprepare bad")


def test_a_restarted_kubelet_registers_the_driver_and_prepares_a_shared_claim_again(driver: DriverNode) -> None:
    driver.claim("shared")
    driver.start_pod("first-user", "shared")
    driver.cluster.wait_pod("first-user")
    registrations = driver.log().count("registered")
    driver.node.kubelet.kill()
    driver.wait_log("not registered")
    driver.node.kubelet.start()
    driver.wait_log("registered", registrations + 1)
    wait_until(lambda: driver.slices() == [], "the slices are deleted at the start of the kubelet", 60)
    driver.publish()
    driver.start_pod("second-user", "shared")
    driver.cluster.wait_pod("second-user")
    assert driver.log().count("prepare shared") == 2
    for name in ("first-user", "second-user"):
        assert "unprepare shared" not in driver.log()
        driver.delete_pod(name)
    driver.wait_log("unprepare shared")


def test_a_restarted_driver_is_used_again_and_its_slice_stays(driver: DriverNode) -> None:
    (before,) = driver.slices()
    registrations = driver.log().count("registered")
    driver.daemon.kill()
    driver.daemon.start()
    driver.wait_log("registered", registrations + 1)
    driver.claim("later")
    driver.start_pod("later-user", "later")
    driver.cluster.wait_pod("later-user")
    (after,) = driver.slices()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    driver.delete_pod("later-user")
    driver.wait_log("unprepare later")


def test_the_pod_resources_api_lists_the_claim(driver: DriverNode) -> None:
    driver.claim("listed")
    driver.start_pod("holder", "listed")
    driver.cluster.wait_pod("holder")
    command = (
        "import asyncio; from accelplane.kubelet.podresources import PodResources; "
        "print(asyncio.run(PodResources('/var/lib/kubelet/pod-resources/kubelet.sock').list_holders()).claims)"
    )
    output = driver.node.run(sys.executable, "-c", command).stdout
    assert f"pod='holder', container='main', driver='{DRIVER}', pool='node-1', device='gpu-0'" in output
    driver.delete_pod("holder")


@pytest.mark.skipif(kubernetes_minor() < 36, reason="the gate ResourceHealthStatus is off before 1.36")
def test_the_status_of_a_pod_has_the_health_of_its_device(driver: DriverNode) -> None:
    driver.claim("watched")
    driver.start_pod("watching", "watched")
    driver.cluster.wait_pod("watching")

    def health() -> list[tuple[str, str]]:
        found = driver.cluster.pod("watching") or {}
        statuses = found["status"]["containerStatuses"][0].get("allocatedResourcesStatus", [])
        return [(each["name"], one["health"]) for each in statuses for one in each["resources"]]

    wait_until(lambda: health() == [("claim:gpu", "Healthy")], "the health of the device in the pod's status", 60)
    driver.delete_pod("watching")


def test_a_stopped_driver_is_unregistered(driver: DriverNode) -> None:
    registrations = driver.log().count("registered")
    driver.daemon.stop()
    driver.claim("unserved")
    driver.start_pod("waiting", "unserved")

    def failed() -> bool:
        return f"DRA driver {DRIVER} is not registered" in driver.cluster.kubectl("events", "--for=pod/waiting")

    wait_until(failed, "the event of the pod", 60)
    driver.delete_pod("waiting")
    driver.daemon.start()
    driver.wait_log("registered", registrations + 1)
