"""A device that vanishes while a container holds it, or while a call that names it is unanswered.

Kubelets dereference nil when such an id has left the plugin's list (docs/kubelet-defects.md). Each case runs on three
nodes at once, one for each topology policy with hints. After each the kubelet's process is the same, its log has no
panic, pods run on, and the node's status is right.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .cluster import NodePlan
from .conftest import running_cluster
from .gpu_nodes import I915, KUBELET, GpuNode, KubeletProcess, on_all

pytestmark = pytest.mark.cluster

POLICIES = ("best-effort", "restricted", "single-numa-node")
CARDS = 3
RENEWED = r'"Regenerating TopologyHints for resource already allocated to pod".* pod="default/{pod}"'
ADMITTED = r'"Topology Affinity".* pod="default/{pod}"'


@pytest.fixture(scope="module")
def shared_nodes(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[GpuNode]]:
    plans = [NodePlan(name=policy, kubelet={**KUBELET, "topologyManagerPolicy": policy}) for policy in POLICIES]
    with running_cluster(*plans) as cluster:
        yield [GpuNode(node, tmp_path_factory.mktemp(name), CARDS) for name, node in cluster.nodes.items()]


@pytest.fixture
def nodes(shared_nodes: list[GpuNode]) -> Iterator[list[GpuNode]]:
    yield shared_nodes
    on_all(shared_nodes, GpuNode.reset)


def vanish(gpus: GpuNode, holder: str, shares: int) -> None:
    """Unplugs the holder's card and a free one. Returns when the kubelet no longer lists the free one."""
    (held,) = gpus.held(holder)
    card = held.partition("-")[0]
    free = next(name for name in gpus.cards if name != card)
    gpus.unplug(card, free)
    # The removal delay is over for both when it is for the free one.
    gpus.wait_capacity_at_most(shares + 1)


def end_holder_and_check(gpus: GpuNode, holder: str, shares: int) -> None:
    gpus.delete(holder)
    gpus.wait_counts(shares, shares)


def restart_and_renew_hints(gpus: GpuNode, holder: str) -> KubeletProcess:
    """Restarts the kubelet until the plugin registers before the kubelet admits the pod, as it nearly always does."""
    for _ in range(5):
        kubelet = gpus.restart_kubelet()
        kubelet.wait_log(ADMITTED.format(pod=holder))
        if kubelet.logged(RENEWED.format(pod=holder)):
            return kubelet
    raise AssertionError(f"{gpus.node.name}: the plugin registered late after each of 5 kubelet starts")


@pytest.mark.parametrize("shares", [1, 2])
def test_kubelet_restarts_while_a_pod_holds_an_unplugged_card(nodes: list[GpuNode], shares: int) -> None:
    def scenario(gpus: GpuNode) -> None:
        gpus.start_plugin(f"-shared-dev-num={shares}")
        gpus.wait_counts(CARDS * shares, CARDS * shares)
        holder = f"holder-{gpus.node.name}"
        gpus.run(holder, {I915: 1})
        container = gpus.container(holder)
        kubelet = KubeletProcess(gpus.node)
        vanish(gpus, holder, shares)
        kubelet.check()
        kubelet = restart_and_renew_hints(gpus, holder)
        gpus.wait_counts(shares + 1, shares)
        assert gpus.container(holder) == container
        end_holder_and_check(gpus, holder, shares)
        kubelet.check()

    on_all(nodes, scenario)
