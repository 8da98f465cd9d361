"""A real API server behaves as the double (`accelplane.kube.testing`) does in `tests/contract/test_kube_testing.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest
from apibehaviour import ALL, NAMESPACE, Connect

from accelplane.kube.client import Client, load_config

from .cluster import Cluster

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster(cluster_is_possible: None) -> Iterator[Cluster]:
    with Cluster.running([]) as running, running.namespace(NAMESPACE):
        yield running


@pytest.mark.parametrize("behaviour", ALL, ids=lambda one: one.__name__)
async def test_api_server_behaves_as_the_double(
    cluster: Cluster, behaviour: Callable[[Connect], Awaitable[None]]
) -> None:
    config = load_config(str(cluster.kubeconfig))
    clients: list[Client] = []

    def connect(manager: str) -> Client:
        clients.append(Client(config, field_manager=manager))
        return clients[-1]

    try:
        await behaviour(connect)
    finally:
        for client in clients:
            await client.close()
