"""Fixtures for tests that need a real cluster; they are skipped with the reason if none can be started."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from .cluster import Cluster, why_unavailable
from .distribution import in_turn, position
from .dra_nodes import DraNode, install_classes
from .families import NAMESPACE, Families
from .gpu_nodes import KUBELET
from .hardware import plug_sample_gpu
from .installation import Installation, installed
from .node import Node, NodePlan
from .product_image import product_image

T = TypeVar("T")
_problem = cache(why_unavailable)
_running: list[Cluster] = []
_with_images: list[Cluster] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    directory = Path(__file__).parent
    items.sort(key=lambda item: position(str(item.path)) if directory in item.path.parents else (-1, ""))
    if turn := os.environ.get("ACCELPLANE_TURN"):
        alternating = [item for item in items if item.get_closest_marker("by_turns")]
        chosen = in_turn([item.nodeid.partition("[")[0] for item in alternating], int(turn))
        others = {item for item, is_chosen in zip(alternating, chosen, strict=True) if not is_chosen}
        config.hook.pytest_deselected(items=[*others])
        items[:] = [item for item in items if item not in others]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add logs of the kubelets and the API server to the report of a failed test."""
    report = yield
    if report.failed and item.get_closest_marker("cluster"):
        for cluster in _running:
            for machine in (cluster.control, *cluster.nodes.values()):
                for daemon in machine.daemons.values():
                    report.sections.append((f"end of the log of {daemon}", daemon.tail(15)))
    return report


@contextmanager
def running_cluster(*plans: NodePlan, gates: Sequence[str] = ()) -> Iterator[Cluster]:
    """A cluster whose logs are shown with failed tests. `gates` are enabled in its control plane."""
    with Cluster.running(plans, gates=gates) as running:
        _running.append(running)
        yield running
        _running.remove(running)


def sample_gpus(cards: int) -> Callable[[Node], None]:
    """Hardware of a node: ``count`` simulated GPUs."""

    def copy_into(node: Node) -> None:
        with tempfile.TemporaryDirectory() as tree:
            plug_sample_gpu(node, Path(tree), cards=cards)

    return copy_into


@pytest.fixture(scope="session")
def cluster_is_possible() -> None:
    """Skips the test if no cluster can be started; fails it if one is required."""
    if problem := _problem():
        if os.environ.get("ACCELPLANE_CLUSTER") == "required":
            pytest.fail(f"no cluster: {problem}")
        pytest.skip(f"no cluster: {problem}")


class SharedClusters:
    """Clusters that several files use. An idle cluster still takes processor time, so each ends when it can."""

    def __init__(self) -> None:
        self._started: dict[str, tuple[ExitStack, Any]] = {}

    def start(self, name: str, started: Callable[[], AbstractContextManager[T]]) -> T:
        """The running cluster with this name, which is started if necessary."""
        if name not in self._started:
            with ExitStack() as stack:
                result = stack.enter_context(started())
                self._started[name] = stack.pop_all(), result
        return self._started[name][1]

    def end_all_but(self, names: Container[str]) -> None:
        for name in [name for name in self._started if name not in names]:
            stack, _ = self._started.pop(name)
            stack.close()


@pytest.fixture(scope="session")
def shared_clusters() -> Iterator[SharedClusters]:
    shared = SharedClusters()
    yield shared
    shared.end_all_but(())


@pytest.fixture(scope="module", autouse=True)
def unused_clusters_end(request: pytest.FixtureRequest, shared_clusters: SharedClusters) -> None:
    """Ends the shared clusters that no test of this file uses. The files of each are a group in `distribution`."""
    items = [item for item in request.session.items if item.path == request.path]
    shared_clusters.end_all_but({name for item in items for name in getattr(item, "fixturenames", ())})


@pytest.fixture(scope="module")
def cluster(cluster_is_possible: None, shared_clusters: SharedClusters) -> Cluster:
    """A shared cluster with one node of two GPUs, for all tests that restore their changes."""
    return shared_clusters.start("cluster", lambda: running_cluster(NodePlan(hardware=[sample_gpus(2)])))


@pytest.fixture(scope="module")
def image(cluster: Cluster) -> None:
    """The product's images are on the nodes of ``cluster``."""
    if cluster not in _with_images:
        cluster.import_image(product_image())
        _with_images.append(cluster)


@pytest.fixture
def node(cluster: Cluster) -> Node:
    """The node of ``cluster``."""
    return cluster.nodes["node-1"]


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A Kubernetes namespace of ``cluster`` for this test, ready for pods; its contents go with it."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    with cluster.namespace(name):
        yield name


@contextmanager
def _running_families() -> Iterator[Families]:
    # The node's status is written immediately after changes.
    plan = NodePlan(kubelet={"nodeStatusUpdateFrequency": "200ms"})
    with running_cluster(plan) as cluster:
        cluster.import_image(product_image())
        with cluster.namespace(NAMESPACE):
            yield Families(cluster)


@pytest.fixture(scope="module")
def shared_families(cluster_is_possible: None, shared_clusters: SharedClusters) -> Families:
    """A shared cluster, whose node has QAT, DSA, IAA, DLB and SGX and the product's images."""
    return shared_clusters.start("shared_families", _running_families)


@contextmanager
def _running_dra() -> Iterator[Cluster]:
    with running_cluster(NodePlan(kubelet=KUBELET)) as cluster:
        install_classes(cluster)
        yield cluster


@pytest.fixture(scope="module")
def dra_cluster(cluster_is_possible: None, shared_clusters: SharedClusters) -> Cluster:
    """A shared cluster with device classes, whose node has the GPUs and the agent of `DraNode`."""
    return shared_clusters.start("dra_cluster", _running_dra)


@pytest.fixture
def gpus(dra_cluster: Cluster, tmp_path: Path) -> Iterator[DraNode]:
    """The node of `dra_cluster` with two GPUs, without an agent."""
    node = DraNode(dra_cluster.nodes["node-1"], tmp_path / "tree")
    yield node
    node.reset()


@pytest.fixture(scope="module")
def installation(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A separate control plane for the operators of a test file, with two kwok nodes."""
    with installed(tmp_path_factory.mktemp("operators")) as instance:
        _running.append(instance.cluster)
        yield instance
        _running.remove(instance.cluster)


@pytest.fixture
def start_cluster(cluster_is_possible: None) -> Iterator[Callable[..., Cluster]]:
    """Start a cluster for one test only, with these nodes and host directories."""
    with ExitStack() as undo:

        def start(*plans: NodePlan, shares: Sequence[Path] = ()) -> Cluster:
            running = undo.enter_context(Cluster.running(plans or [NodePlan()], shares=shares))
            _running.append(running)
            undo.callback(_running.remove, running)
            return running

        yield start
