"""Shared cards under the default allocation policy: single-device pods are spread evenly over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from .conftest import running_cluster
from .gpu_nodes import I915, KUBELET, GpuNode
from .node import NodePlan

pytestmark = pytest.mark.cluster

CARDS, SHARES, PODS = 4, 10, 8


@pytest.fixture
def gpus(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuNode]:
    with running_cluster(NodePlan(kubelet=KUBELET)) as cluster:
        yield GpuNode(cluster.nodes["node-1"], tmp_path_factory.mktemp("cards"), CARDS)


def pods_by_card(gpus: GpuNode) -> Counter[str]:
    return Counter(id_.partition("-")[0] for each in gpus.holdings() for id_ in each.ids)


def test_single_device_pods_are_spread_over_shared_cards(gpus: GpuNode) -> None:
    """The kubelet offers IDs in random order. Each card has the same number of pods, also after some have ended."""
    gpus.start_plugin(f"-shared-dev-num={SHARES}")
    gpus.wait_counts(CARDS * SHARES, CARDS * SHARES)
    names = [f"pod{index}" for index in range(PODS)]
    for name in names:
        gpus.create(name, {I915: 1})
    for name in names:
        gpus.cluster.wait_pod(name)
    assert pods_by_card(gpus) == dict.fromkeys(gpus.cards, PODS // CARDS)
    of_card0 = [name for name in names if gpus.device_ids(name)[0].startswith("card0-")]
    gpus.delete(*of_card0)
    for name in ("late0", "late1"):
        gpus.run(name, {I915: 1})
    assert pods_by_card(gpus) == dict.fromkeys(gpus.cards, PODS // CARDS)
