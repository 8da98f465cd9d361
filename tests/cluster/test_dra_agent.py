"""The GPU agent with DRA on a real node: slices, claims, owners, and programs that are killed meanwhile."""

from __future__ import annotations

import json
import time

import pytest

from .build import kubernetes_minor
from .dra_nodes import API, EXTENDED, GPU, KUBECONFIG, NAMES, DraNode
from .gpu_nodes import I915, NAMESPACE, PLUGIN
from .machine import wait_until
from .objects import Object

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(kubernetes_minor() < 34, reason="dynamic resource allocation is off before 1.34"),
]

FIRST, SECOND = NAMES
HAS_TAINTS = kubernetes_minor() >= 36


@pytest.fixture
def node(gpus: DraNode) -> DraNode:
    """A node whose agent has published both GPUs."""
    gpus.start_agent()
    gpus.wait_devices()
    return gpus


def test_a_pod_gets_the_gpu_of_its_claim_and_no_other(node: DraNode) -> None:
    """Cases 1 to 3."""
    (found,) = node.slices()
    assert found["spec"]["pool"]["name"] == found["spec"]["nodeName"] == node.node.name
    assert [owner["kind"] for owner in found["metadata"]["ownerReferences"]] == ["Node"]
    node.claim("second", device=SECOND)
    node.run_claiming("pod", "second")
    assert node.seen_by("pod") == {"card1", "renderD129"}
    node.delete("pod")
    node.wait_nothing_left()
    node.run_claiming("next", "second")
    assert node.allocated("second") == [SECOND]


def test_each_container_gets_the_device_of_its_request(node: DraNode) -> None:
    """Case 4."""
    exactly = {"exactly": {"deviceClassName": GPU}}
    node.claim("two", {"name": "a", **exactly}, {"name": "b", **exactly})
    described = node.claiming_pod("pod", "two")
    (first,) = described["spec"]["containers"]
    second = {**first, "name": "other", "resources": {"claims": [{"name": "gpu", "request": "b"}]}}
    first["resources"] = {"claims": [{"name": "gpu", "request": "a"}]}
    described["spec"]["containers"] = [first, second]
    node.cluster.apply(described)
    node.cluster.wait_pod("pod", namespace=NAMESPACE)
    seen = [node.seen_by("pod"), node.seen_by("pod", "other")]
    assert sorted(seen, key=sorted) == [{"card0", "renderD128"}, {"card1", "renderD129"}]


def test_a_shared_claim_survives_a_restart_of_the_kubelet(node: DraNode) -> None:
    """Cases 5, 7, 8 and 9."""
    node.claim("shared", device=FIRST)
    node.run_claiming("one", "shared", restart="Always")
    before = node.left()
    node.node.kubelet.kill()
    node.node.kubelet.start()
    node.wait_devices()
    node.run_claiming("two", "shared")
    assert node.left() == before
    node.cluster.kill_container("one")
    wait_until(lambda: node.container("one")[1] == 1, "restart of the container", 60)
    assert node.seen_by("one") == node.seen_by("two") == {"card0", "renderD128"}
    node.delete("one")
    assert node.seen_by("two") == {"card0", "renderD128"}
    assert node.left() == before
    node.delete("two")
    node.wait_nothing_left()


def test_slices_stay_over_a_restart_of_the_agent(node: DraNode) -> None:
    """Cases 10 and 58."""

    def identity() -> list[tuple[str, int]]:
        return [(each["metadata"]["uid"], each["spec"]["pool"]["generation"]) for each in node.slices()]

    before = identity()
    node.restart_agent()
    node.claim("claim")
    node.run_claiming("pod", "claim")
    assert identity() == before
    path = f"/api/v1/nodes/{node.node.name}"
    # The kubelet creates its Node only when it starts.
    node.delete("pod")
    node.cluster.request("DELETE", path)
    node.node.kubelet.kill()
    node.node.kubelet.start()
    wait_until(lambda: node.cluster.get(path), "Node", 30)
    uid = (node.cluster.get(path) or {})["metadata"]["uid"]
    wait_until(
        lambda: [each["metadata"]["ownerReferences"][0]["uid"] for each in node.slices()] == [uid], "new owner", 30
    )
    time.sleep(2)  # for the garbage collector
    node.wait_devices()


def test_a_vanished_gpu_leaves_the_slice_and_its_claim_ends(node: DraNode) -> None:
    """Cases 23 and 24. With taints, pods of a device that is gone are deleted."""
    node.claim("first", device=FIRST)
    node.run_claiming("pod", "first")
    node.unplug("card0")
    if HAS_TAINTS:
        wait_until(lambda: "pod" not in node.pods(), "the pod is deleted", 60)
    else:
        node.wait_devices([SECOND])
        assert node.pods()["pod"]["status"]["phase"] == "Running"
        node.delete("pod")
    node.wait_nothing_left()
    node.wait_devices([SECOND])
    node.plug("card0")
    node.wait_devices()


def test_a_gpu_that_is_wedged_gets_no_new_pods_and_recovers(node: DraNode) -> None:
    """Cases 25 to 27: a pod that has the GPU stays."""
    node.claim("held", device=FIRST)
    node.run_claiming("holder", "held")
    container = node.container("holder")
    path = node.hardware.device("card0").class_path
    node.node.uevent("change", path, "drm", WEDGED="rebind")

    def is_tainted() -> bool:
        taints = node.devices()[FIRST].get("taints", ()) if FIRST in node.devices() else ()
        return [(each["key"], each["effect"]) for each in taints] == [(f"{GPU}/health", "NoSchedule")]

    def health() -> list[str]:
        statuses = node.pods()["holder"]["status"]["containerStatuses"][0].get("allocatedResourcesStatus", ())
        return [resource["health"] for each in statuses for resource in each["resources"]]

    if HAS_TAINTS:
        wait_until(is_tainted, "taint", 30)
        wait_until(lambda: health() == ["Unhealthy"], "health of the device in the pod's status", 60)
    else:
        node.wait_devices([SECOND])
    assert node.container("holder") == container
    node.delete("holder")
    node.wait_nothing_left()
    node.claim("any")
    node.run_claiming("pod", "any")
    assert node.allocated("any") == [SECOND]
    function = path.split("/drm/")[0].removeprefix("/sys")
    node.node.uevent("bind", function, "pci")
    wait_until(lambda: not node.devices().get(FIRST, {"taints": "none"}).get("taints"), "recovery", 30)
    node.wait_devices()


def test_units_change_to_dra_and_back_and_are_never_in_both(gpus: DraNode) -> None:
    """Cases 49 and 51."""
    gpus.start_agent("-dra-api=plugin")
    gpus.wait_counts(2, 2)
    gpus.run("plain", {I915: 1})
    (held,) = gpus.device_ids("plain")
    gpus.stop_agent()
    gpus.start_agent("-dra-api=dra")
    free = SECOND if held == "card0-0" else FIRST
    gpus.wait_devices([free], 60)
    gpus.run_claiming("claiming")
    assert gpus.allocated("claiming") == [free]
    assert gpus.seen_by("plain").isdisjoint(gpus.seen_by("claiming"))
    gpus.delete("plain")
    gpus.wait_devices(timeout=60)
    gpus.stop_agent()
    gpus.start_agent("-dra-api=plugin")
    # One unit is free, the other is held by the claim.
    wait_until(lambda: gpus.counts()[1] == 1, f"one {I915}, found {gpus.counts()}", 60)
    gpus.delete("claiming")
    wait_until(lambda: gpus.counts()[1] == 2, f"two {I915}, found {gpus.counts()}", 60)
    assert not gpus.devices()


def test_a_device_plugin_that_still_runs_keeps_dra_from_its_units(gpus: DraNode) -> None:
    """Case 52, with its event."""
    plugin = gpus.start_plugin()
    gpus.wait_counts(2, 2)
    agent = gpus.start_agent()
    text = "another device plugin serves gpu.intel.com/i915"
    wait_until(lambda: text in agent.tail(200), "message", 30)
    wait_until(lambda: "OtherDevicePlugin" in gpus.cluster.kubectl("describe", "node", gpus.node.name), "event", 10)
    assert not gpus.devices()
    plugin.stop()
    gpus.wait_devices()


@pytest.mark.skipif(HAS_TAINTS, reason="a shared GPU is one device: `test_dra_scheduling`")
def test_a_shared_gpu_is_a_device_for_each_share_without_consumable_capacity(gpus: DraNode) -> None:
    """Case 34."""
    gpus.unplug("card1")
    gpus.start_agent("-dra-api=dra", "-shared-dev-num=3")
    shares = [f"{FIRST}-s{number}" for number in range(3)]
    gpus.wait_devices(shares)
    names = ["a", "b", "c"]
    for name in names:
        gpus.run_claiming(name)
        assert gpus.seen_by(name) == {"card0", "renderD128"}
    assert sorted(device for name in names for device in gpus.allocated(name)) == shares
    gpus.start_claiming("d")
    gpus.wait_unschedulable("d")
    gpus.delete("a")
    gpus.cluster.wait_pod("d", namespace=NAMESPACE)


def test_an_administrator_gets_all_gpus_beside_their_users(node: DraNode) -> None:
    """Case 41."""
    node.run_claiming("user")
    namespace = "monitoring"
    labels = {"resource.kubernetes.io/admin-access": "true"}
    node.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}})
    wait_until(
        lambda: node.cluster.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/default"), "service account", 30
    )
    request = {"deviceClassName": GPU, "allocationMode": "All", "adminAccess": True}
    claim: Object = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "all", "namespace": namespace},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": request}]}},
    }
    monitor = node.claiming_pod("monitor", "all")
    monitor["metadata"]["namespace"] = namespace
    node.cluster.apply(claim, monitor)
    node.cluster.wait_pod("monitor", namespace=namespace)
    listed = node.cluster.kubectl("exec", "monitor", f"--namespace={namespace}", "--", "ls", "/dev/dri")
    assert {"card0", "card1", "renderD128", "renderD129"} <= set(listed.split())
    node.cluster.kubectl("delete", "namespace", namespace, "--grace-period=1")
    assert node.pods()["user"]["status"]["phase"] == "Running"
    node.delete("user")
    node.wait_nothing_left()


@pytest.mark.skipif(kubernetes_minor() < 36, reason="extended resources are allocated as claims from 1.36 on")
def test_a_pod_that_requests_the_old_resource_gets_a_claim(node: DraNode) -> None:
    """Case 46."""
    node.cluster.kubectl("apply", "--kustomize", EXTENDED)
    described = node.pod("old", {I915: 1})
    del described["spec"]["nodeName"]
    node.cluster.apply(described)
    found = node.cluster.wait_pod("old", namespace=NAMESPACE)
    assert found["status"]["extendedResourceClaimStatus"]["resourceClaimName"]
    assert len(node.seen_by("old")) == 2
    node.delete("old")
    node.wait_nothing_left()
    node.cluster.kubectl("delete", "--kustomize", EXTENDED)


def test_prepared_claims_work_without_the_api_server(node: DraNode) -> None:
    """Case 55."""
    node.claim("first", device=FIRST)
    node.run_claiming("pod", "first", restart="Always")
    container = node.container("pod")[0].removeprefix("containerd://")
    node.cluster.apiserver.kill()
    node.node.run("ctr", "--namespace=k8s.io", "tasks", "kill", "--signal=SIGKILL", container)
    node.unplug("card1")
    node.cluster.apiserver.start()
    wait_until(lambda: node.container("pod")[1] >= 1, "restart of the container", 60)
    assert node.seen_by("pod") == {"card0", "renderD128"}
    node.wait_devices([FIRST], 60)


def test_a_pod_gets_a_generic_device_by_a_claim(gpus: DraNode) -> None:
    """The driver is the domain. A device is behind a link of udev, and two claims share another one."""
    node, driver = gpus.node, "devices.example.com"
    node.mknod("/dev/meter0", 1, 5)
    node.run("sh", "-c", "mkdir -p /dev/serial && ln -sf ../meter0 /dev/serial/meter")
    devices = [
        {"name": "meter", "groups": [{"paths": [{"path": "/dev/serial/meter", "mountPath": "/dev/meter"}]}]},
        {"name": "zero", "groups": [{"count": 2, "paths": [{"path": "/dev/zero"}]}]},
    ]
    program = PLUGIN.with_name("generic-device-plugin")
    flags = [f"--device={json.dumps(each)}" for each in devices]
    command = (program, "--listen=", f"--domain={driver}", "--dra-api=dra", *flags)
    agent = node.add_daemon("generic", command, environment={"NODE_NAME": node.name, "KUBECONFIG": KUBECONFIG})
    gpus.daemons.append(agent)
    agent.start()
    shares = 1 if kubernetes_minor() >= 36 else 2
    metadata, selector = {"name": driver}, {"cel": {"expression": f"device.driver == '{driver}'"}}
    gpus.cluster.apply(
        {
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": metadata,
            "spec": {"selectors": [selector]},
        }
    )  # fmt: skip

    def claim(name: str, kind: str) -> None:
        expression = f'device.attributes["{driver}"].type == "{kind}"'
        selectors = [{"cel": {"expression": expression}}]
        gpus.claim(name, {"name": "a", "exactly": {"deviceClassName": driver, "selectors": selectors}})
        gpus.run_claiming(name, name)

    try:
        wait_until(lambda: len(gpus.devices(driver)) == 1 + shares, "the devices", 30)
        claim("one", "meter")
        read = gpus.cluster.kubectl("exec", "one", "--", "sh", "-c", "head -c 2 /dev/meter | od -An -tx1")
        assert read.split() == ["00", "00"]
        assert not node.allocatable(f"{driver}/meter")
        claim("two", "zero")
        claim("three", "zero")
        gpus.delete("one", "two", "three")
    finally:
        for each in gpus.slices(driver):
            gpus.cluster.request("DELETE", f"{API}/resourceslices/{each['metadata']['name']}")
