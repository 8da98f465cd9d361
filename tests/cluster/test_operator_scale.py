"""A thousand nodes: every status has all nodes of the resource, without a request per pod."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from accelplane.operator import models

from . import large_cluster
from .cluster import Cluster
from .installation import NAMESPACE
from .machine import wait_until

pytestmark = pytest.mark.cluster

# Every node has a GPU, and a hundred nodes each have another family: all of them on each node would take minutes.
EVERYWHERE = "gpu"
FAMILIES = [family for family in models.KINDS if family != EVERYWHERE]
SHARE, OTHERS = 100, 200
TIMEOUT = 600.0
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


@dataclass(frozen=True)
class LargeCluster:
    """A cluster with plugins on all nodes: the nodes of each family, and the time and requests of the rollout."""

    cluster: Cluster
    nodes: Mapping[str, Sequence[str]]
    seconds: float
    status_writes: Counter[str]
    mapping_writes: Counter[str]
    requests: Counter[str]


@pytest.fixture(scope="module")
def large(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LargeCluster]:
    """A thousand nodes with the samples and an operator, after all pods are ready."""
    with large_cluster.installed(tmp_path_factory.mktemp("crowd")) as installation:
        cluster = installation.cluster
        nodes: dict[str, list[str]] = {}
        for family in FAMILIES:
            labels = large_cluster.selected_by(EVERYWHERE, family)
            nodes[family] = cluster.add_kwok_nodes(SHARE, prefix=family, labels=labels, timeout=TIMEOUT)
        others = cluster.add_kwok_nodes(OTHERS, labels=large_cluster.selected_by(EVERYWHERE), timeout=TIMEOUT)
        nodes[EVERYWHERE] = [name for names in (*nodes.values(), others) for name in names]
        with large_cluster.operator(installation) as (_, requests):
            started = time.monotonic()
            cluster.kubectl("apply", "--kustomize", large_cluster.SAMPLES)
            large_cluster.wait_for_statuses(cluster, {family: len(names) for family, names in nodes.items()}, TIMEOUT)
            seconds = time.monotonic() - started
            mapping_writes = large_cluster.status_writes(cluster, "fpga.intel.com")
            yield LargeCluster(
                cluster, nodes, seconds, large_cluster.status_writes(cluster), mapping_writes, requests()
            )


def places(cluster: Cluster, family: str) -> list[str]:
    """The nodes of a family's pods, as the API server has them."""
    found = cluster.get(f"{PODS}?labelSelector=app%3Dintel-{family}-plugin")
    assert found is not None
    return sorted(each["spec"]["nodeName"] for each in found["items"])


def test_each_status_names_every_node_that_is_selected_and_no_other(large: LargeCluster) -> None:
    assert len(large.nodes[EVERYWHERE]) == 1000
    for family, resource in large_cluster.samples(large.cluster).items():
        names = sorted(large.nodes[family])
        assert resource["status"]["nodeNames"] == names
        assert resource["status"]["numberReady"] == len(names)
        assert resource["status"]["desiredNumberScheduled"] == len(names)
        assert places(large.cluster, family) == names


def test_a_status_is_written_once_a_second_however_many_pods_become_ready(large: LargeCluster) -> None:
    # In addition: one at the creation of resource and DaemonSet.
    most = large.seconds + 10
    assert set(large.status_writes) == {f"{family}deviceplugins" for family in models.KINDS}
    assert all(count <= most for count in large.status_writes.values()), (
        large.status_writes,
        large.seconds,
    )
    # Two for each DaemonSet, and one for the status of each mapping. Events and Leases are not patched.
    assert large.requests["PATCH"] <= large.status_writes.total() + 2 * len(models.KINDS) + large.mapping_writes.total()


def test_deselected_nodes_are_removed_from_the_status_until_selected_again(large: LargeCluster) -> None:
    family = FAMILIES[0]
    names = large.nodes[family]
    labels = {name: value for name, value in large_cluster.selected_by(EVERYWHERE, family).items() if "feature" in name}
    counts = {each: len(found) for each, found in large.nodes.items()}

    large_cluster.label(large.cluster, names, dict.fromkeys(labels))
    fewer = counts | {family: 0, EVERYWHERE: counts[EVERYWHERE] - len(names)}
    large_cluster.wait_for_statuses(large.cluster, fewer, TIMEOUT)
    remaining = sorted({*large.nodes[EVERYWHERE]} - {*names})
    assert large_cluster.samples(large.cluster)[EVERYWHERE]["status"]["nodeNames"] == remaining
    assert places(large.cluster, family) == []

    large_cluster.label(large.cluster, names, labels)
    large_cluster.wait_for_statuses(large.cluster, counts, TIMEOUT)
    assert large_cluster.samples(large.cluster)[family]["status"]["nodeNames"] == sorted(names)


def test_deleting_resources_removes_all_owned_objects(large: LargeCluster) -> None:
    large.cluster.kubectl("delete", "--kustomize", large_cluster.SAMPLES)

    def is_removed() -> bool:
        lists = (f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets", f"{PODS}?limit=1")
        found = [large.cluster.get(path) for path in lists]
        return all(each is not None and not each["items"] for each in found)

    wait_until(is_removed, "DaemonSets and pods: deleted", TIMEOUT, every=1)
