"""The GPU plugin on a real node in scenarios of node operation, with the effects on pods.

The plugin is a plain process of the node here; as a DaemonSet it is tested in `test_gpu_base.py`.
"""

from __future__ import annotations

import re
import signal
import statistics
import sys
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from . import conftest
from .build import kubernetes_minor
from .cluster import Cluster
from .gpu_scenarios import CARDS, I915, MONITORING, Setup
from .machine import Daemon, wait_until
from .node import Node, NodePlan
from .objects import Object, pod

pytestmark = pytest.mark.cluster

LEVELZERO = "/var/lib/levelzero/server.sock"
# Tests read the node's status, so it is updated immediately after changes.
QUICK = {"nodeStatusUpdateFrequency": "200ms"}


@pytest.fixture(scope="module")
def shared_setup(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with Cluster.running([NodePlan(kubelet=QUICK)]) as running:
        conftest._running.append(running)
        yield Setup(running, tmp_path_factory.mktemp("cards"))
        conftest._running.remove(running)


@pytest.fixture
def setup(shared_setup: Setup) -> Iterator[Setup]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    with shared_setup.cluster.namespace(name):
        shared_setup.namespace = name
        yield shared_setup
        shared_setup.clean_up()


# Choosing devices


@pytest.mark.parametrize(
    ("policy", "spread"), [("balanced", ["card0", "card1", "card2"]), ("packed", ["card0", "card0", "card1"])]
)
def test_pods_share_cards_by_the_allocation_policy(setup: Setup, policy: str, spread: list[str]) -> None:
    setup.plugin("-shared-dev-num=2", f"-allocation-policy={policy}")
    setup.wait(I915, 2 * CARDS)
    # One after the other, because the policy's choice depends on the devices of earlier pods.
    for name in ("first", "second", "third"):
        setup.run(name, {I915: 1})
    assert sorted(card for name in ("first", "second", "third") for card in setup.cards(name)) == spread
    for name in ("fourth", "fifth", "sixth"):
        setup.request(name, {I915: 1})
    for name in ("fourth", "fifth", "sixth"):
        setup.running(name)
    everywhere = [
        card for name in ("first", "second", "third", "fourth", "fifth", "sixth") for card in setup.cards(name)
    ]
    assert sorted(everywhere) == ["card0", "card0", "card1", "card1", "card2", "card2"]


def test_a_monitoring_pod_gets_every_card_while_other_pods_use_them(setup: Setup) -> None:
    setup.plugin("-enable-monitoring")
    setup.wait(MONITORING, 1)
    setup.run("worker", {I915: CARDS})
    setup.run("monitor", {MONITORING: 1})
    assert setup.cards("monitor") == setup.cards("worker") == ["card0", "card1", "card2"]


@pytest.mark.parametrize("mode", ["all", "only"])
def test_containers_get_devices_by_cdi_names(setup: Setup, mode: str) -> None:
    setup.plugin(f"-cdi={mode}")
    setup.wait(I915, CARDS)
    setup.run("worker", {I915: 1})
    (holding,) = setup.holdings()
    (card,) = setup.cards("worker")
    assert [device.name for device in holding.answer.cdi_devices] == [f"intel.cdi.k8s.io/gpu={card}"]
    assert bool(holding.answer.devices) == (mode == "all")
    assert setup.node.path(f"/run/cdi/intel.cdi.k8s.io-gpu-{card}.yaml").is_file()
    render = f"renderD{128 + int(card.removeprefix('card'))}"
    assert setup.wait_for_pod("worker", "ls", "/dev/dri").split() == ["by-path", card, render]
    assert setup.wait_for_pod(
        "worker", "sh", "-c", f"ls /dev/dri/by-path; dd if=/dev/dri/{render} count=1 && echo opened"
    )


# Hardware


def test_plugging_and_unplugging_cards_does_not_affect_pods(setup: Setup) -> None:
    setup.plugin()
    setup.wait(I915, CARDS)
    setup.run("worker", {I915: 2}, restart="Always")
    before = setup.container_state("worker")
    card = setup.hardware.device(setup.hardware.plug_gpu())
    setup.node.copy_tree(setup.tree)
    setup.node.uevent("add", card.class_path, "drm")
    setup.wait(I915, CARDS + 1)
    setup.run("second", {I915: 2})
    setup.delete("second")
    setup.hardware.unplug(card.name)
    setup.node.copy_tree(setup.tree)
    setup.node.uevent("remove", card.class_path, "drm")
    setup.wait(I915, CARDS)
    assert setup.container_state("worker") == before


SERVICE = """
import asyncio, signal, sys
from accelplane.simulate.levelzero import LevelZeroService

async def main():
    loop = asyncio.get_running_loop()
    async with LevelZeroService(sys.argv[1]) as service:
        loop.add_signal_handler(signal.SIGUSR1, lambda: service.set_health(sys.argv[2], memory=False))
        loop.add_signal_handler(signal.SIGUSR2, lambda: service.set_health(sys.argv[2]))
        print("serving", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_an_unhealthy_card_keeps_its_pod_gets_no_new_one_and_recovers(setup: Setup) -> None:
    bdf = setup.hardware.device("card0").bdf
    service = setup.daemon("levelzero", sys.executable, "-c", SERVICE, LEVELZERO, bdf)
    wait_until(lambda: "serving" in service.tail(), "the Level-Zero service")
    setup.plugin("-health-management", "-health-interval=1", "-allocation-policy=packed")
    setup.wait(I915, CARDS)
    setup.run("patient", {I915: 1}, restart="Always")
    assert setup.cards("patient") == ["card0"]
    before = setup.container_state("patient")

    service.kill(signal.SIGUSR1, wait=False)
    setup.wait(I915, CARDS - 1)
    # The scheduler subtracts allocated from healthy devices, so an allocated unhealthy card blocks another one as well.
    setup.run("next", {I915: CARDS - 2})
    setup.request("waiting", {I915: 1})

    def waits() -> bool:
        pod = setup.cluster.pod("waiting", setup.namespace) or {"status": {}}
        return any(each.get("reason") == "Unschedulable" for each in pod["status"].get("conditions", ()))

    wait_until(waits, "the pod without a card")
    assert setup.container_state("patient") == before
    # A restarted container gets the devices of its pod, healthy or not.
    setup.cluster.kill_container("patient", namespace=setup.namespace)
    wait_until(lambda: setup.container_state("patient")[1] == 1, "the restart of the pod's container")
    assert setup.cards("patient") == ["card0"]

    service.kill(signal.SIGUSR2, wait=False)
    setup.wait(I915, CARDS)
    setup.running("waiting")
    assert sorted(setup.cards("next") + setup.cards("waiting")) == ["card1", "card2"]


# Restarts of programs


@pytest.mark.parametrize("downtime", ["a moment", "until the node is not Ready"])
def test_pods_outlive_the_kubelet_with_their_devices(setup: Setup, downtime: str) -> None:
    setup.plugin("-enable-monitoring")
    setup.wait(I915, CARDS)
    setup.run("worker", {I915: 2}, restart="Always")
    before = setup.container_state("worker"), setup.cards("worker")
    known = setup.node.kubelet.log.stat().st_size
    setup.node.kubelet.kill()
    if downtime != "a moment":
        # No timeout is longer than this until pods are evicted after five minutes.
        wait_until(lambda: not setup.node.ready, "node-1: not Ready", 60)
        setup.request("early", {I915: 1})
    setup.node.kubelet.start()
    setup.node.wait_ready()
    _wait_registered(setup.node, {I915: CARDS, MONITORING: 1}, known)
    setup.wait(I915, CARDS)
    if downtime == "a moment":
        setup.request("early", {I915: 1})
    setup.running("early")
    assert (setup.container_state("worker"), setup.cards("worker")) == before
    assert not set(setup.cards("early")) & set(before[1])


def test_pods_outlive_the_plugin_and_can_restart_without_it(setup: Setup) -> None:
    plugin = setup.plugin("-cdi=all")
    setup.wait(I915, CARDS)
    setup.run("worker", {I915: 2}, restart="Always")
    cards = setup.cards("worker")
    plugin.kill()
    setup.wait(I915, 0)
    assert setup.container_state("worker")[1] == 0
    setup.cluster.kill_container("worker", namespace=setup.namespace)
    wait_until(lambda: setup.container_state("worker")[1] == 1, "the restart of the worker's container")
    assert setup.cards("worker") == cards
    setup.request("late", {I915: 1})
    plugin.start()
    setup.wait(I915, CARDS)
    setup.running("late")
    assert not set(setup.cards("late")) & set(cards)


def test_a_restart_of_containerd_does_not_affect_pods_and_agents(setup: Setup) -> None:
    setup.plugin("-cdi=all")
    setup.wait(I915, CARDS)
    setup.run("worker", {I915: 2}, restart="Always")
    before = setup.container_state("worker")
    setup.node.runtime.kill()
    setup.node.runtime.start()
    setup.run("late", {I915: 1})
    assert setup.container_state("worker") == before
    assert sorted(setup.cards("worker") + setup.cards("late")) == ["card0", "card1", "card2"]


# Reboots


def test_after_a_reboot_pods_restart_with_their_devices_if_the_plugin_registers_first(setup: Setup) -> None:
    plugin = setup.plugin("-cdi=only")
    setup.wait(I915, CARDS)
    setup.run("worker", {I915: 2}, restart="Always")
    cards = setup.cards("worker")

    def start(_: Node) -> None:
        served = plugin.log.read_text().count("serving at")
        plugin.start()
        wait_until(lambda: plugin.log.read_text().count("serving at") > served, "the plugin's socket", 60)

    setup.node.hardware.append(start)
    try:
        setup.node.reboot()
    finally:
        setup.node.hardware.remove(start)
    wait_until(lambda: setup.container_state("worker")[1] == 1, "the restart of the worker's container", 60)
    assert setup.cards("worker") == cards
    setup.wait(I915, CARDS)


def test_after_a_reboot_a_pod_bound_before_the_plugin_registers_fails_and_its_replacement_is_pending(
    setup: Setup,
) -> None:
    plugin = setup.plugin()
    setup.wait(I915, CARDS)
    setup.cluster.apply(_deployment(setup.namespace, {I915: "2"}))
    wait_until(lambda: _phases(setup) == ["Running"], "the deployment's pod")
    (first,) = _pods(setup)
    setup.node.reboot()

    wait_until(lambda: "Failed" in _phases(setup), "the rejection of the pod", 60)
    refused = setup.cluster.pod(first["metadata"]["name"], setup.namespace)
    assert refused
    assert refused["status"]["reason"] == "UnexpectedAdmissionError"
    assert "no healthy devices present" in refused["status"]["message"]
    wait_until(lambda: _phases(setup) == ["Failed", "Pending"], "the pending replacement", 60)
    plugin.start()
    wait_until(lambda: _phases(setup) == ["Failed", "Running"], "the replacement", 60)


def _deployment(namespace: str, limits: Mapping[str, str]) -> Object:
    template = pod("worker", restart="Always", resources=limits)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "worker", "namespace": namespace},
        "spec": {
            "selector": {"matchLabels": {"app": "worker"}},
            "template": {"metadata": {"labels": {"app": "worker"}}, "spec": template["spec"]},
        },
    }


def _pods(setup: Setup) -> list[Object]:
    return (setup.cluster.get(f"/api/v1/namespaces/{setup.namespace}/pods") or {"items": []})["items"]


def _phases(setup: Setup) -> list[str]:
    return sorted(each["status"]["phase"] for each in _pods(setup))


# Two plugins with one resource name


def test_a_plugin_that_starts_later_takes_over_and_the_earlier_one_serves_again_after_its_end(setup: Setup) -> None:
    first = setup.plugin()
    setup.wait(I915, CARDS)
    second = setup.plugin("-shared-dev-num=2", name="second-plugin")
    setup.wait(I915, 2 * CARDS, 90)
    setup.run("worker", {I915: 1}, restart="Always")
    wait_until(lambda: "is in use by" in first.tail(1000), "the first plugin: to find the socket in use", 90)
    setup.wait(I915, 2 * CARDS, 90)
    second.kill()
    # The ID that the pod holds is no device of the first plugin; it stays listed as unhealthy.
    setup.wait(I915, CARDS, 90)
    assert setup.container_state("worker")[1] == 0
    assert first.running


# Kubelets since 1.37 could reject all later registrations of the plugin in these cases.


def test_a_plugin_whose_socket_was_removed_while_the_kubelet_was_stopped_is_registered_after_its_restart(
    setup: Setup,
) -> None:
    plugin = setup.plugin()
    setup.wait(I915, CARDS)
    setup.run("worker", {I915: 1}, restart="Always")
    before = setup.container_state("worker")
    with setup.node.kubelet.suspended():
        known = len(plugin.tail(10_000))
        setup.node.path(f"/var/lib/kubelet/device-plugins/{I915.replace('/', '-')}.sock").unlink()
        # The plugin waits 20 s for the answer of the stopped kubelet, then registers again.
        wait_until(lambda: plugin.tail(10_000)[known:].count("registration at") > 0, "a registration to time out", 60)
    setup.wait(I915, CARDS, 60)
    plugin.kill()
    plugin.start()
    setup.run("second", {I915: 1})
    setup.wait(I915, CARDS)
    assert setup.container_state("worker") == before
    plugin.kill()
    setup.wait(I915, 0)


def test_a_hundred_restarts_of_the_plugin_without_a_pause_leave_no_rejected_registration(setup: Setup) -> None:
    plugin = setup.plugin()
    setup.wait(I915, CARDS)
    setup.run("worker", {I915: 1}, restart="Always")
    before = setup.container_state("worker")
    known = setup.node.kubelet.log.stat().st_size
    for turn in range(RESTARTS):
        plugin.kill(signal.SIGTERM if turn % 2 else signal.SIGKILL)
        plugin.start()
        if turn % 2:
            wait_until(lambda: "registered at" in plugin.tail(), "a registration", 30)
    setup.wait(I915, CARDS)
    assert "already connected" not in log_since(setup.node, known)
    setup.run("late", {I915: 2})
    assert setup.container_state("worker") == before
    sockets = setup.node.path("/var/lib/kubelet/device-plugins").glob("gpu*.sock")
    assert len(list(sockets)) == 2, "the resource's name and the one of its registration"
    plugin.kill()
    setup.wait(I915, 0)


RIVAL = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from fake_plugin import FakePlugin, listing

async def main():
    devices = listing(*"abcdefg")
    async with FakePlugin("/var/lib/kubelet", "gpu.intel.com/i915", "rival.sock", devices=devices) as plugin:
        await plugin.register()
        print("registered", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_registration_by_another_process_applies_until_the_plugin_registers_again(setup: Setup) -> None:
    plugin = setup.plugin()
    setup.wait(I915, CARDS)
    setup.run("worker", {I915: 1}, restart="Always")
    before = setup.container_state("worker")
    contract = Path(__file__).parents[1] / "contract"
    rival = setup.daemon("rival", sys.executable, "-c", RIVAL, contract)
    setup.wait(I915, 7)
    rival.kill()
    if kubernetes_minor() < 37:
        # The kubelet identifies plugins by resource only: the end of the other plugin's stream disconnects both.
        setup.wait(I915, 0)
    plugin.restart()
    setup.wait(I915, CARDS)
    setup.run("late", {I915: 2})
    assert setup.container_state("worker") == before


# Endurance

RESTARTS = 100


def test_a_hundred_kubelet_restarts_lose_no_devices_or_allocations_and_leak_no_memory(setup: Setup) -> None:
    plugin = setup.plugin("-enable-monitoring", "-shared-dev-num=2", "-cdi=all")
    setup.wait(I915, 2 * CARDS)
    setup.wait(MONITORING, 1)
    setup.run("worker", {I915: 3}, restart="Always")
    setup.run("monitor", {MONITORING: 1}, restart="Always")
    before = [setup.container_state(name) for name in ("worker", "monitor")]
    allocations = {holding.resource: (holding.ids, holding.response) for holding in setup.holdings()}
    pods = {holding.pod_uid for holding in setup.holdings()}
    devices = {I915: 2 * CARDS, MONITORING: 1}
    pid, memory, seconds = plugin.pid, [_resident(plugin)], []
    for turn in range(RESTARTS):
        # SIGTERM and SIGKILL.
        known = setup.node.kubelet.log.stat().st_size
        seconds.append(_restart(setup.node, signal.SIGTERM if turn % 2 else signal.SIGKILL, devices))
        now = [holding for holding in setup.holdings() if holding.pod_uid in pods]
        assert {holding.resource: (holding.ids, holding.response) for holding in now} == allocations, (
            f"restart {turn + 1}"
        )
        memory.append(_resident(plugin))
        if turn % 25 == 24:
            # This kubelet runs long enough to sync all pods. Before it has the pods of the API server, it
            # counts the devices of pods that have ended since its checkpoint as allocated.
            _wait_pods_received(setup.node, known)
            setup.run("late", {I915: 3})
            setup.delete("late")
    setup.node.wait_ready()
    setup.wait(I915, 2 * CARDS)
    setup.wait(MONITORING, 1)
    assert [setup.container_state(name) for name in ("worker", "monitor")] == before
    assert plugin.pid == pid
    middle, longest = statistics.median(seconds) * 1000, max(seconds) * 1000
    print(
        f"\nkubelet socket to all resources registered, {RESTARTS} restarts: "
        f"p50 {middle:.0f} ms, max {longest:.0f} ms; plugin resident {memory[0]} KiB at first, "
        f"{memory[10]} after 10, {memory[-1]} after {RESTARTS}"
    )
    # Memory of restarts is released; the interpreter's memory pools are full after about 120 restarts.
    assert memory[-1] < memory[10] + 3 * 1024


def _resident(daemon: Daemon) -> int:
    """KiB."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0])


def _restart(node: Node, number: signal.Signals, devices: Mapping[str, int]) -> float:
    """The time from the new kubelet's socket until all devices are registered."""
    before, known = _socket_time(node), node.kubelet.log.stat().st_size
    node.kubelet.kill(number)
    node.kubelet.start(wait=False)
    wait_until(lambda: _socket_time(node) not in (before, 0), "the kubelet's socket", every=0.002)
    return _wait_registered(node, devices, known) - _socket_time(node)


def _wait_registered(node: Node, devices: Mapping[str, int], known: int) -> float:
    """The time when the last resource had all its devices, from the kubelet's log after byte `known`."""
    # The checkpoint is not sufficient: of two simultaneous resources it may miss one.
    moments: dict[str, float] = {}

    def registered() -> bool:
        for moment, resource, count in _TAKEN_IN.findall(log_since(node, known)):
            if devices.get(resource) == int(count):
                today = datetime.now(UTC).strftime("%Y%m%d")
                moments[resource] = datetime.strptime(f"{today} {moment}+0000", "%Y%m%d %H:%M:%S.%f%z").timestamp()
        return moments.keys() == devices.keys()

    wait_until(registered, "all devices at the kubelet", every=0.02)
    return max(moments.values())


_TAKEN_IN = re.compile(
    r'I\d{4} ([\d:.]+) .*"Processed device updates for resource" '
    r'resourceName="([^"]+)" totalCount=\d+ healthyCount=(\d+)'
)


def _wait_pods_received(node: Node, known: int) -> None:
    wait_until(lambda: 'SyncLoop ADD" source="api"' in log_since(node, known), "the pods in the kubelet")


def log_since(node: Node, known: int) -> str:
    """The kubelet's log from a byte on."""
    with node.kubelet.log.open("rb") as log:
        log.seek(known)
        return log.read().decode(errors="replace")


def _socket_time(node: Node) -> float:
    """The creation time of the kubelet's socket; 0 without one."""
    try:
        return node.path("/var/lib/kubelet/device-plugins/kubelet.sock").stat().st_mtime
    except FileNotFoundError:
        return 0
