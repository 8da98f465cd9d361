"""A device that vanishes while a container holds it, or while a call that names it is unanswered.

Kubelets dereference nil when such an ID has left the plugin's list (docs/kubelet-defects.md). Each case runs on three
nodes at once, one for each topology policy with hints. After each the kubelet's process is the same, its log has no
panic, pods keep running, and the node's status is correct.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator

import pytest

from .build import kubernetes_minor
from .conftest import running_cluster
from .gpu_nodes import BY_PATH, I915, KUBELET, NAMESPACE, GpuNode, KubeletProcess, on_all
from .machine import wait_until
from .node import NodePlan

pytestmark = pytest.mark.cluster

POLICIES = ("best-effort", "restricted", "single-numa-node")
CARDS = 3
RENEWED = r'"Regenerating TopologyHints for resource already allocated to pod".* pod="default/{pod}"'
ADMITTED = r'"Topology Affinity".* pod="default/{pod}"'
DENIED = r'"Pod admission denied".* pod="default/{pod}" reason="UnexpectedAdmissionError" message='
LISTED = r'"Processed device updates for resource" resourceName="{resource}" totalCount=(\d+) healthyCount=(\d+)'


@pytest.fixture(scope="module")
def shared_nodes(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[GpuNode]]:
    plans = [NodePlan(name=policy, kubelet={**KUBELET, "topologyManagerPolicy": policy}) for policy in POLICIES]
    with running_cluster(*plans) as cluster:
        yield [GpuNode(node, tmp_path_factory.mktemp(name), CARDS) for name, node in cluster.nodes.items()]


@pytest.fixture
def nodes(shared_nodes: list[GpuNode]) -> Iterator[list[GpuNode]]:
    yield shared_nodes
    on_all(shared_nodes, GpuNode.reset)


def wait_admitted(kubelet: KubeletProcess, pod: str) -> None:
    """Waits until a restarted kubelet has admitted the running pod. Raises `AssertionError` if it rejects the pod."""
    rejected = rf'"Pod admission denied".* pod="default/{pod}".*'
    kubelet.wait_log(f"{ADMITTED.format(pod=pod)}|{rejected}")
    assert not kubelet.found(rejected)


def start(gpus: GpuNode, shares: int = 1) -> None:
    gpus.start_plugin(f"-shared-dev-num={shares}")
    gpus.wait_counts(CARDS * shares, CARDS * shares)


def run_holder(gpus: GpuNode) -> str:
    """A pod that holds one device and can be resized."""
    name = f"holder-{gpus.node.name}"
    gpus.run(name, {I915: 1, "cpu": "10m"})
    return name


def vanish(gpus: GpuNode, holder: str, shares: int = 1) -> tuple[str, str]:
    """Unplugs the holder's card and a free one, in this order in the result, and waits for the removal of the free one.

    The removal delay is over for both when it is for one.
    """
    (device_id,) = gpus.device_ids(holder)
    card = device_id.partition("-")[0]
    free = next(name for name in gpus.cards if name != card)
    gpus.unplug(card, free)
    gpus.wait_capacity_at_most(shares + 1)
    return card, free


def restart_and_renew_hints(gpus: GpuNode, holder: str) -> KubeletProcess:
    """Restarts the kubelet until the plugin registers before the kubelet admits the pod, as it nearly always does."""
    for _ in range(5):
        kubelet = gpus.restart_kubelet()
        wait_admitted(kubelet, holder)
        if kubelet.logged(RENEWED.format(pod=holder)):
            return kubelet
    raise AssertionError(f"{gpus.node.name}: the plugin registered late after each of 5 kubelet starts")


@pytest.mark.parametrize("shares", [1, 2])
def test_kubelet_restarts_while_a_pod_holds_an_unplugged_card(nodes: list[GpuNode], shares: int) -> None:
    def scenario(gpus: GpuNode) -> None:
        start(gpus, shares)
        holder = run_holder(gpus)
        container = gpus.container(holder)
        kubelet = KubeletProcess(gpus.node)
        vanish(gpus, holder, shares)
        kubelet.check()
        kubelet = restart_and_renew_hints(gpus, holder)
        gpus.wait_counts(shares + 1, shares)
        assert gpus.container(holder) == container
        gpus.delete(holder)
        if kubernetes_minor() < 33:  # the kubelet counts the last admitted pod until it admits another one
            gpus.run(f"next-{gpus.node.name}", {"cpu": "10m"})
        if shares == 1:
            gpus.wait_counts(1, 1)
        kubelet.check()

    on_all(nodes, scenario)


def test_kubelet_starts_without_the_api_server_and_gets_its_pods_later(nodes: list[GpuNode]) -> None:
    def scenario(gpus: GpuNode) -> None:
        start(gpus)
        holder = run_holder(gpus)
        container = gpus.container(holder)
        vanish(gpus, holder)
        gpus.node.disconnect()
        kubelet = gpus.restart_kubelet()
        kubelet.wait_log(LISTED.format(resource=I915))
        gpus.node.connect()
        wait_admitted(kubelet, holder)
        assert kubelet.logged(RENEWED.format(pod=holder))
        gpus.wait_counts(2, 1)
        assert gpus.container(holder) == container
        kubelet.check()

    on_all(nodes, scenario)


def test_kubelet_restarts_without_the_api_server_while_a_static_pod_holds_an_unplugged_card(
    nodes: list[GpuNode],
) -> None:
    def scenario(gpus: GpuNode) -> None:
        start(gpus)
        holder = gpus.write_manifest("static", {I915: 1})
        container = gpus.container(holder)
        vanish(gpus, holder)
        gpus.node.disconnect()
        restart_and_renew_hints(gpus, holder)
        kubelet = KubeletProcess(gpus.node)
        gpus.node.connect()
        gpus.wait_counts(2, 1)
        assert gpus.container(holder) == container
        kubelet.check()

    on_all(nodes, scenario)


@pytest.mark.parametrize("shares", [1, 2])
def test_the_first_list_after_an_agent_restart_has_the_allocated_id(nodes: list[GpuNode], shares: int) -> None:
    def scenario(gpus: GpuNode) -> None:
        start(gpus, shares)
        holder = run_holder(gpus)
        container = gpus.container(holder)
        vanish(gpus, holder, shares)
        (plugin,) = gpus.daemons
        plugin.stop()
        gpus.wait_counts(shares + 1, 0)
        kubelet = KubeletProcess(gpus.node)
        plugin.start()
        kubelet.wait_log(LISTED.format(resource=I915))
        assert kubelet.found(LISTED.format(resource=I915))[0] == (str(shares + 1), str(shares))
        kubelet = restart_and_renew_hints(gpus, holder)
        gpus.wait_counts(shares + 1, shares)
        assert gpus.container(holder) == container
        kubelet.check()

    on_all(nodes, scenario)


def test_agent_starts_while_the_kubelet_is_down(nodes: list[GpuNode]) -> None:
    """Only the checkpoint has the allocated IDs."""

    def scenario(gpus: GpuNode) -> None:
        start(gpus)
        holder = run_holder(gpus)
        container = gpus.container(holder)
        (plugin,) = gpus.daemons
        gpus.node.kubelet.stop()
        plugin.stop()
        (device_id,) = gpus.device_ids(holder)
        gpus.unplug(device_id.partition("-")[0])
        plugin.start()
        kubelet = gpus.restart_kubelet()
        wait_admitted(kubelet, holder)
        gpus.wait_counts(CARDS, CARDS - 1)
        assert gpus.container(holder) == container
        kubelet.check()

    on_all(nodes, scenario)


def test_in_place_resize_of_a_pod_that_holds_an_unplugged_card(nodes: list[GpuNode]) -> None:
    if kubernetes_minor() < 33:
        pytest.skip("Kubernetes before 1.33 resizes no pods by default")

    def scenario(gpus: GpuNode) -> None:
        start(gpus)
        holder = run_holder(gpus)
        container = gpus.container(holder)
        card, free = vanish(gpus, holder)
        kubelet = KubeletProcess(gpus.node)
        cpu = {"requests": {"cpu": "20m"}, "limits": {"cpu": "20m"}}
        patch = {"spec": {"containers": [{"name": "main", "resources": cpu}]}}
        gpus.cluster.kubectl(
            "patch", "pod", holder, f"--namespace={NAMESPACE}", "--subresource=resize", f"--patch={json.dumps(patch)}"
        )
        kubelet.wait_log(RENEWED.format(pod=holder))

        def deferred() -> bool:
            conditions = gpus.pods()[holder]["status"].get("conditions", ())
            return any(one["type"] == "PodResizePending" and one["reason"] == "Deferred" for one in conditions)

        def resized() -> bool:
            (status,) = gpus.pods()[holder]["status"]["containerStatuses"]
            return status["resources"]["requests"]["cpu"] == "20m"

        if kubernetes_minor() < 37:
            wait_until(deferred, f"{gpus.node.name}: deferred resize")
        else:  # a resize does not allocate devices
            wait_until(resized, f"{gpus.node.name}: resize")
            assert not deferred()
        assert gpus.container(holder) == container
        gpus.wait_counts(2, 1)
        gpus.plug(card, free)
        gpus.wait_counts(CARDS, CARDS)
        gpus.delete(holder)
        gpus.wait_counts(CARDS, CARDS)
        kubelet.check()

    on_all(nodes, scenario)


def test_a_card_is_plugged_again_while_its_pod_runs(nodes: list[GpuNode]) -> None:
    def scenario(gpus: GpuNode) -> None:
        start(gpus)
        holder = run_holder(gpus)
        container = gpus.container(holder)
        kubelet = KubeletProcess(gpus.node)
        card, free = vanish(gpus, holder)
        gpus.wait_counts(2, 1)
        gpus.plug(card)
        gpus.wait_counts(2, 2)
        gpus.plug(free)
        gpus.wait_counts(CARDS, CARDS)
        gpus.run(f"other-{gpus.node.name}", {I915: CARDS - 1})
        assert gpus.container(holder) == container
        kubelet.check()

    on_all(nodes, scenario)


# A plugin for one device per file in /dev/gadgets. A hook waits as long as /dev/hold-HOOK exists.
GADGETS = """
import asyncio, os, sys
from accelplane.devices import Device
from accelplane.node.agent import Agent
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config

class Gadgets(Plugin[Config]):
    namespace = "example.com"

    def scan(self, host):
        for name in host.names("/dev/gadgets"):
            yield Device(resource="gadget", id=name, envs={"GADGET": name}, topology=(0,))

    async def preferred_allocation(self, available, must_include, size, *_):
        await self.hold("preferred", available)
        return sorted(device.id for device in available)[:size]

    async def post_allocate(self, devices, allocation):
        await self.hold("allocate", devices)
        return allocation

    async def hold(self, hook, devices):
        while os.path.exists(f"/dev/hold-{hook}"):
            print(hook, "waits", flush=True)
            await asyncio.sleep(0.05)

asyncio.run(Agent(Settings(), {"gadgets": Gadgets()}).run())
"""
GADGET = "example.com/gadget"


@pytest.mark.parametrize("hook", ["preferred", "allocate"])
def test_a_device_is_removed_during_an_allocation_call(nodes: list[GpuNode], hook: str) -> None:
    def scenario(gpus: GpuNode) -> None:
        # The last in natural order is never chosen: it shows when the removal delay is over.
        for name in ("g0", "g1", "g2"):
            gpus.node.write(f"/dev/gadgets/{name}", "")
        gpus.node.write(f"/dev/hold-{hook}", "")
        plugin = gpus.start("gadgets", sys.executable, "-c", GADGETS)
        gpus.wait_counts(3, 3, GADGET)
        kubelet = KubeletProcess(gpus.node)
        name = f"asks-{gpus.node.name}"
        gpus.create(name, {GADGET: 1})
        wait_until(lambda: f"{hook} waits" in plugin.tail(), f"{gpus.node.name}: call of the hook {hook}")
        gpus.node.remove("/dev/gadgets/g0")
        gpus.node.remove("/dev/gadgets/g2")
        # The call of GetPreferredAllocation names g2, too.
        gpus.wait_counts(3 if hook == "preferred" else 2, 1, GADGET)
        gpus.node.remove(f"/dev/hold-{hook}")
        kubelet.wait_log(DENIED.format(pod=name))
        gpus.wait_counts(1, 1, GADGET)
        gpus.run(f"next-{gpus.node.name}", {GADGET: 1})
        kubelet.check()

    try:
        on_all(nodes, scenario)
    finally:
        for gpus in nodes:
            gpus.node.remove(f"/dev/hold-{hook}")
            gpus.node.remove("/dev/gadgets")


def test_a_card_unplugged_before_allocate_fails_the_pod_and_leaves_no_directory(nodes: list[GpuNode]) -> None:
    """Container runtimes create the missing source of a bind mount as a directory."""

    def scenario(gpus: GpuNode) -> None:
        start(gpus)
        kubelet = KubeletProcess(gpus.node)
        (plugin,) = gpus.daemons
        links = sorted(path.name for path in gpus.node.path(BY_PATH).iterdir())
        name = f"late-{gpus.node.name}"
        # A suspended agent cannot notice the removal before the call arrives.
        with plugin.suspended():
            gpus.unplug(*gpus.cards)
            gpus.create(name, {I915: 1})
            kubelet.wait_log(rf'"SyncLoop ADD" source="api" pods=.*default/{name}"')
        kubelet.wait_log(
            rf'"Pod admission denied".* pod="default/{name}" reason="UnexpectedAdmissionError" message=.*card'
        )
        assert links
        assert not any(gpus.node.path(f"{BY_PATH}/{link}").exists() for link in links)
        gpus.plug(*gpus.cards)
        gpus.wait_counts(CARDS, CARDS)
        gpus.run(f"next-{gpus.node.name}", {I915: CARDS})
        kubelet.check()

    on_all(nodes, scenario)


CHANGES = 100


@pytest.mark.parametrize("seed", [1])
def test_random_unplugs_while_pods_start_and_stop(nodes: list[GpuNode], seed: int) -> None:
    def scenario(gpus: GpuNode) -> None:
        chance = random.Random(f"{seed} {gpus.node.name}")  # noqa: S311 - a test's order, repeatable
        start(gpus, 2)
        survivor = f"survivor-{gpus.node.name}"
        gpus.run(survivor, {I915: 1})
        container = gpus.container(survivor)
        kubelet = KubeletProcess(gpus.node)
        names: list[str] = []
        changes = 0
        while changes < CHANGES:
            kubelet.check()
            match chance.choices(("change", "create", "delete", "restart"), (10, 3, 2, 0.4))[0]:
                case "change":
                    card = chance.choice(gpus.cards)
                    (gpus.unplug if card in gpus.plugged() else gpus.plug)(card)
                    changes += 1
                case "create":
                    names.append(f"pod{len(names)}-{gpus.node.name}")
                    gpus.create(names[-1], {I915: chance.choice((1, 1, 2))})
                case "delete" if names:
                    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{chance.choice(names)}"
                    gpus.cluster.request("DELETE", path, {"gracePeriodSeconds": 1})
                case "restart":
                    kubelet = gpus.restart_kubelet()
                case _:
                    pass
        assert gpus.container(survivor) == container
        gpus.delete(*gpus.pods())
        gpus.plug(*(card for card in gpus.cards if card not in gpus.plugged()))
        gpus.wait_counts(2 * CARDS, 2 * CARDS)
        gpus.unplug(*gpus.cards[1:])
        gpus.wait_counts(2, 2)
        kubelet.check()

    on_all(nodes, scenario)
