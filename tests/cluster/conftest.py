"""Fixtures for tests that need a real cluster; they are skipped with the reason if none can be started."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest

from .cluster import Cluster, Node, NodePlan, why_unavailable
from .families import NAMESPACE, Families
from .hardware import plug_sample_gpu
from .installation import Installation, installed
from .product_image import product_image

_problem = cache(why_unavailable)
_running: list[Cluster] = []


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
def running_cluster(*plans: NodePlan) -> Iterator[Cluster]:
    """A cluster whose logs are shown with failed tests."""
    with Cluster.running(plans) as running:
        _running.append(running)
        yield running
        _running.remove(running)


def sample_gpus(cards: int) -> Callable[[Node], None]:
    """Hardware of a node: ``count`` simulated GPUs."""

    def put_in(node: Node) -> None:
        with tempfile.TemporaryDirectory() as tree:
            plug_sample_gpu(node, Path(tree), cards=cards)

    return put_in


@pytest.fixture(scope="session")
def cluster_is_possible() -> None:
    """Skips the test where no cluster can be started; fails it where one was promised."""
    if problem := _problem():
        if os.environ.get("ACCELPLANE_CLUSTER") == "required":
            pytest.fail(f"no cluster: {problem}")
        pytest.skip(f"no cluster: {problem}")


@pytest.fixture(scope="session")
def cluster(cluster_is_possible: None) -> Iterator[Cluster]:
    """One cluster with one node of two GPUs, for all tests that restore their changes."""
    with Cluster.running([NodePlan(hardware=[sample_gpus(2)])]) as running:
        _running.append(running)
        yield running
        _running.remove(running)


@pytest.fixture(scope="session")
def image(cluster: Cluster) -> None:
    """The product's images are on the nodes of ``cluster``."""
    cluster.import_image(product_image())


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


@pytest.fixture(scope="session")
def shared_families(cluster_is_possible: None) -> Iterator[Families]:
    """A separate cluster, whose node has QAT, DSA, IAA, DLB and SGX and the product's images."""
    # The node's status is written immediately after changes.
    plan = NodePlan(kubelet={"nodeStatusUpdateFrequency": "200ms"})
    with Cluster.running([plan]) as cluster, ExitStack() as undo:
        _running.append(cluster)
        undo.callback(_running.remove, cluster)
        cluster.import_image(product_image())
        undo.enter_context(cluster.namespace(NAMESPACE))
        yield Families(cluster)


@pytest.fixture(scope="module")
def installation(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A separate control plane for the operators of a test file, with two kwok nodes."""
    with installed(tmp_path_factory.mktemp("operators")) as made:
        _running.append(made.cluster)
        yield made
        _running.remove(made.cluster)


@pytest.fixture
def start_cluster(cluster_is_possible: None) -> Iterator[Callable[..., Cluster]]:
    """Start a cluster for one test alone: nodes as planned, and host directories that they shall see."""
    with ExitStack() as undo:

        def start(*plans: NodePlan, shares: Sequence[Path] = ()) -> Cluster:
            running = undo.enter_context(Cluster.running(plans or [NodePlan()], shares=shares))
            _running.append(running)
            undo.callback(_running.remove, running)
            return running

        yield start
