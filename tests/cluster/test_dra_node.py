"""A real node with claims: reboots, programs that are killed or replaced, devices that vanish or block."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accelplane.simulate import DlbSpec, GpuSpec, NodeSpec, QatSpec

from .build import kubernetes_minor
from .dra_nodes import API, GPU, NAMES, DraNode
from .emulated import emulated_kernel, kernel_of
from .gpu_nodes import NAMESPACE
from .machine import wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(kubernetes_minor() < 34, reason="dynamic resource allocation is off before 1.34"),
]

FIRST, SECOND = NAMES
QAT, DLB = "qat.intel.com", "dlb.intel.com"
AGENT = (Path(sys.executable).with_name("accelplane"), "node")


@pytest.fixture
def node(gpus: DraNode) -> DraNode:
    """A node whose agent has published both GPUs."""
    gpus.start_agent()
    gpus.wait_devices()
    return gpus


def prepared_ids(node: DraNode) -> list[list[str]]:
    """The CDI names of the devices of all claims."""
    return [device["cdiIds"] for _, entry in sorted(node.journal().items()) for device in entry["devices"]]


def test_without_the_agent_its_slices_are_deleted_and_pods_with_claims_wait(node: DraNode) -> None:
    """Case 11."""
    assert node.agent is not None
    node.agent.kill()
    wait_until(lambda: not node.slices(), "the kubelet deletes the slices", 60)
    node.start_claiming("pod")
    node.wait_unschedulable("pod")
    assert not node.allocated("pod")
    node.start_agent()
    node.cluster.wait_pod("pod", namespace=NAMESPACE)


def test_after_a_reboot_a_container_gets_the_gpu_of_its_claim_by_address(node: DraNode) -> None:
    """Cases 15 and 16."""
    node.claim("first", device=FIRST)
    node.run_claiming("pod", "first", restart="Always")
    assert node.numbers("pod") == {"card0": "e2:0", "renderD128": "e2:80"}
    files, ids = node.left(), prepared_ids(node)
    uid = node.pods()["pod"]["metadata"]["uid"]
    node.reboot()
    node.wait_started("pod", restarts=1)
    assert node.pods()["pod"]["metadata"]["uid"] == uid
    assert node.allocated("first") == [FIRST]
    assert node.numbers("pod") == {"card1": "e2:1", "renderD129": "e2:81"}
    assert (node.left(), prepared_ids(node)) == (files, ids)
    node.wait_devices()
    node.delete("pod")
    node.wait_nothing_left()


def test_a_gpu_of_a_container_whose_pod_was_deleted_by_force_is_in_no_other_container(node: DraNode) -> None:
    """Case 18."""
    # Each minute the kubelet unprepares the claims of pods that it does not know, also while their containers run.
    node.node.kubelet.restart()
    node.wait_devices()
    node.claim("old", device=FIRST)
    node.run_claiming("holder", "old")
    (holder,) = node.containers_with("/dev/dri/card0")
    with node.blocked_runtime(holder):
        node.cluster.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/holder", {"gracePeriodSeconds": 0})
        node.delete_claims("old")
        node.claim("new", device=FIRST)
        node.start_claiming("next", "new")
        message = f"device {FIRST} is still held by claim {NAMESPACE}/old, waiting for its pod to end"
        wait_until(lambda: message in node.events("next"), "event of the pod", 30)
        assert node.containers_with("/dev/dri/card0") == {holder}

    def has_changed() -> bool:
        found = node.containers_with("/dev/dri/card0")
        assert len(found) <= 1
        node.touch("next")
        return bool(found - {holder})

    wait_until(has_changed, "the next container has the GPU", 60, every=0.2)
    node.cluster.wait_pod("next", namespace=NAMESPACE)


def test_pods_start_while_an_agent_replaces_another(gpus: DraNode) -> None:
    """Case 44: in a DaemonSet with `maxSurge: 1` the new pod starts before the old one ends."""
    old, new = (gpus.add_agent(name, "-dra-api=dra", pod_uid=f"uid-{name}") for name in ("old", "new"))
    gpus.agent = new
    gpus.start_registered(old)
    gpus.wait_devices()
    before = identity(gpus)
    stopping = threading.Event()
    started = {"first": 0, "second": 0}

    def start_pods(claim: str) -> None:
        for number in itertools.count(1):
            gpus.run_claiming(f"{claim}-{number}", claim)
            started[claim] = number
            gpus.delete(f"{claim}-{number}")
            if stopping.is_set():
                break

    def wait_more() -> None:
        earlier = dict(started)
        wait_until(
            lambda: (
                all(started[claim] > number + 1 for claim, number in earlier.items())
                or any(stream.done() for stream in streams)
            ),
            "two more pods",
            60,
        )
        assert identity(gpus) == before

    gpus.claim("first", device=FIRST)
    gpus.claim("second", device=SECOND)
    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(start_pods, claim) for claim in started]
        try:
            gpus.start_registered(new)
            wait_more()
            old.stop(30)
            wait_more()
        finally:
            stopping.set()
        for stream in streams:
            stream.result()
    path = f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=reason=FailedPrepareDynamicResources"
    failures = (gpus.cluster.get(path) or {"items": []})["items"]
    assert [
        each["message"] for each in failures if each["involvedObject"]["name"].startswith(("first-", "second-"))
    ] == []
    assert identity(gpus) == before


def identity(node: DraNode) -> list[tuple[str, str]]:
    """Changes if a slice is written, deleted or created."""
    return [(each["metadata"]["uid"], each["metadata"]["resourceVersion"]) for each in node.slices()]


# Programs that are killed


def kill_agent(node: DraNode) -> None:
    node.restart_agent()


def kill_kubelet(node: DraNode) -> None:
    node.node.kubelet.kill()
    node.node.kubelet.start(wait=False)


def kill_runtime(node: DraNode) -> None:
    node.node.runtime.kill()
    node.node.runtime.start()


def kill_api_server(node: DraNode) -> None:
    node.cluster.apiserver.kill()
    node.cluster.apiserver.start()
    wait_until(lambda: node.cluster.get(f"{API}/resourceslices"), "API server", 60)


def is_reserved(node: DraNode) -> bool:
    found = node.cluster.get(f"{API}/namespaces/{NAMESPACE}/resourceclaims/first") or {"status": {}}
    return bool(found["status"].get("reservedFor"))


Step = tuple[str, Callable[[DraNode], object]]
STEPS: tuple[tuple[Step, Step], ...] = (
    (("the claim is reserved", is_reserved), ("the pod is deleted", lambda _node: True)),
    (
        ("the claim is in the journal", lambda node: node.journal()),
        ("the CDI file is removed", lambda node: not node.cdi_files()),
    ),
    (("the CDI file is written", lambda node: node.cdi_files()), ("the pod is gone", lambda node: not node.pods())),
)


@pytest.mark.skipif(kubernetes_minor() < 36, reason="the kubelet's retries are the same, and one version is enough")
@pytest.mark.parametrize(
    ("kill", "steps"),
    [(kill_agent, STEPS), (kill_kubelet, STEPS), (kill_runtime, STEPS), (kill_api_server, STEPS[:2])],
    ids=["agent", "kubelet", "runtime", "API server"],
)
def test_pods_start_and_end_while_a_program_is_killed(
    node: DraNode, kill: Callable[[DraNode], None], steps: Sequence[tuple[Step, Step]]
) -> None:
    """Cases 12 to 14 from outside: the program is killed at each step."""
    node.claim("first", device=FIRST)
    for number, ((start, is_starting), (end, is_ending)) in enumerate(steps):
        name = f"pod-{number}"
        node.start_claiming(name, "first")
        wait_until(lambda: is_starting(node), start, 30, every=0.001)  # noqa: B023
        kill(node)
        node.wait_started(name)
        assert node.seen_by(name) == {"card0", "renderD128"}, start
        node.cluster.kubectl("delete", "pod", name, "--wait=false", "--grace-period=1")
        wait_until(lambda: is_ending(node), end, 60, every=0.001)  # noqa: B023
        kill(node)
        wait_until(lambda: not node.pods(), f"end of the pod, killed when {end}", 120)
        node.wait_nothing_left()


# Devices that vanish or block


def test_a_gpu_that_vanishes_before_its_claim_is_prepared_is_named(node: DraNode) -> None:
    """Case 22."""
    node.claim("first", device=FIRST)
    with node.node.kubelet.suspended():
        node.start_claiming("pod", "first")
        wait_until(lambda: is_reserved(node) and "pod" in node.pods(), "the pod is scheduled", 30)
        node.unplug("card0")
        node.wait_devices([SECOND])
    message = f"device {FIRST} is no longer on this node; delete the pod to get another device"
    wait_until(lambda: message in node.events("pod"), "event of the pod", 60)
    assert not node.left()
    node.delete("pod")


@pytest.fixture
def offload(gpus: DraNode) -> Iterator[DraNode]:
    """A node with a GPU, two virtual functions of QAT and two DLB devices, all emulated, and an agent for them."""
    gpus.unplug(*gpus.cards)
    hardware = NodeSpec(gpus=[GpuSpec()], qats=[QatSpec(vfs=2)], dlbs=[DlbSpec(), DlbSpec()])
    kernel = emulated_kernel(gpus.node, hardware, openable=False)
    gpus.start_agent("-plugins=gpu,qat,dlb", "-dra-api=dra", "-health-interval=1", program=AGENT)
    for driver, number in ((GPU, 1), (QAT, 2), (DLB, 2)):
        wait_until(lambda: len(gpus.devices(driver)) == number, f"{number} devices of {driver}", 30)  # noqa: B023
    yield gpus
    kernel.clear_faults()
    gpus.delete(*gpus.pods())
    gpus.stop_agent()
    kernel.daemon.stop()


def address_of(node: DraNode, driver: str, device: str) -> str:
    return node.devices(driver)[device]["attributes"]["resource.kubernetes.io/pciBusID"]["string"]


def test_a_claim_of_two_drivers_gives_a_container_the_devices_of_both(offload: DraNode) -> None:
    """Case 6."""
    requests = ({"name": name, "exactly": {"deviceClassName": f"{name}.intel.com"}} for name in ("gpu", "qat"))
    offload.claim("both", *requests)
    offload.run_claiming("pod", "both")
    (function,) = offload.devices(QAT).keys() & set(offload.allocated("both"))
    address = address_of(offload, QAT, function)
    group = offload.node.path(f"/sys/bus/pci/devices/{address}/iommu_group").readlink().name
    listed = offload.cluster.kubectl("exec", "pod", "--", "sh", "-c", "echo $QAT0; cd /dev; ls -d dri/[cr]* vfio/*")
    assert set(listed.split()) == {address, "dri/card0", "dri/renderD128", f"vfio/{group}", "vfio/vfio"}
    assert {each.split("/")[-3] for each in offload.journal()} == {GPU, QAT}
    assert len(offload.cdi_files()) == 2
    offload.delete("pod")
    offload.wait_nothing_left()


def test_a_device_that_blocks_while_claimed_affects_no_other_device(offload: DraNode) -> None:
    """Reads of the files of a DLB device do not return while a claim holds it."""
    kernel = kernel_of(offload.node)
    offload.claim("held", device_class=DLB)
    offload.run_claiming("holder", "held")
    container = offload.container("holder")
    (device,) = offload.allocated("held")
    (other,) = offload.devices(DLB).keys() - {device}
    files, address = f"/sys/bus/pci/devices/{address_of(offload, DLB, device)}/*", address_of(offload, DLB, other)

    def is_offered(name: str) -> bool:
        found = offload.devices(DLB).get(name)
        return found is not None and not found.get("taints")

    kernel.do("block", path=files)
    kernel.unplug(address)  # the agent scans again
    wait_until(lambda: not is_offered(device) and not is_offered(other), "the device is not offered", 60)
    kernel.plug(DlbSpec(bdf=address))
    wait_until(lambda: is_offered(other), "the other device is offered", 60)
    offload.claim("other", device_class=DLB)
    offload.run_claiming("beside", "other")
    assert offload.container("holder") == container
    offload.delete("holder")
    wait_until(lambda: len(offload.journal()) == 1, "the claim of the device that blocks is unprepared", 60)
    kernel.do("unblock", path=files)
    wait_until(lambda: is_offered(device), "the device is offered again", 60)
    offload.run_claiming("next", "held")
    assert offload.allocated("held") == [device]
