"""A real API server accepts, preserves and returns slices as the double of the unit tests does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drapools import functions, offer, offers
from kwokslices import foreign_slice, node_slices, simulated_offers
from manifests import DEPLOY, render
from slicerules import INVALID, VALID, Json, document

from accelplane.apiserver import ApiServer, load_config
from accelplane.dra import catalog
from accelplane.dra.model import Features, Offer, Pool
from accelplane.dra.publisher import SlicePublisher
from accelplane.dra.resourceslice import ResourceSlice, from_api

from .build import kubernetes_minor
from .cluster import Cluster
from .machine import wait_until

pytestmark = pytest.mark.cluster

NODE, GPU, QAT = "node-1", "gpu.intel.com", "qat.intel.com"
SLICES = f"/apis/resource.k8s.io/{'v1' if kubernetes_minor() >= 34 else 'v1beta1'}/resourceslices"
NAME = "0000-03-00-0-0x56c0"
GIVEN = offers(
    offer("0000:03:00.0", "unhealthy", reason="temperature"),
    offer("0000:04:00.0", attributes={"tiles": 2}),
    offer("0000:05:00.0", shares=3, capacities={"memory": 16_000_000_000}),
)


DEFAULT, ALL = "default", "all gates"
# With 1.33, the API is served only if it is asked for.
BETA = ("--feature-gates=DynamicResourceAllocation=true", "--runtime-config=resource.k8s.io/v1beta1=true")
GATES = ("DRADeviceTaints", "DRAPartitionableDevices", "DRAConsumableCapacity")
# The scheduler waits for DeviceTaintRules, with the gate of taints.
ALPHA = ("--runtime-config=resource.k8s.io/v1alpha3=true",)


@pytest.fixture(scope="module", params=[DEFAULT, ALL])
def profile(request: pytest.FixtureRequest) -> str:
    minor = kubernetes_minor()
    if minor < 33 or (request.param == ALL and not 34 <= minor <= 35):
        pytest.skip(f"no other slices than with the default gates in 1.{minor}")
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(cluster_is_possible: None, profile: str) -> Iterator[Cluster]:
    options = BETA if kubernetes_minor() < 34 else ALPHA if profile == ALL else ()
    with Cluster.running([], apiserver=options, gates=GATES if profile == ALL else ()) as running:
        status, answer = running.request("POST", "/api/v1/nodes", {"metadata": {"name": NODE}})
        assert status == 201, answer
        yield running


def slices(cluster: Cluster, driver: str) -> list[ResourceSlice]:
    found = cluster.get(SLICES) or {}
    read = [from_api(msgspec.convert(each, ResourceSlice)) for each in found["items"] or ()]
    return [each for each in read if each.spec.driver == driver]


def devices(cluster: Cluster, driver: str) -> dict[str, Any]:
    return {device.name: device for each in slices(cluster, driver) for device in each.spec.devices or ()}


@contextlib.asynccontextmanager
async def publishing(cluster: Cluster, driver: str, given: dict[str, Offer]) -> AsyncGenerator[SlicePublisher]:
    """Publishes what `given` has at each time."""

    def pool(features: Features) -> Pool:
        return catalog.pool(driver, NODE, given, features, held=(), evict="gone")

    publisher = SlicePublisher(ApiServer(load_config(str(cluster.kubeconfig))), NODE, driver)
    publisher.set_pool(pool)
    publisher.registered(True)
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool], publisher: SlicePublisher) -> None:
    for _ in range(200):
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"problems: {publisher.problems}")


async def versions_after_a_while(cluster: Cluster, driver: str) -> Mapping[str, str]:
    await asyncio.sleep(4)
    found = await asyncio.to_thread(slices, cluster, driver)
    return {each.metadata.name: each.metadata.resource_version for each in found}


async def test_devices_are_published_as_the_api_server_supports_them(cluster: Cluster, profile: str) -> None:
    async with publishing(cluster, GPU, dict(GIVEN)) as publisher:
        await until(lambda: bool(devices(cluster, GPU)), publisher)
        before = await versions_after_a_while(cluster, GPU)
        assert await versions_after_a_while(cluster, GPU) == before
        found = devices(cluster, GPU)
        if kubernetes_minor() < 36 and profile == DEFAULT:
            assert publisher.features == Features(taints=False, counters=False, consumable=False)
            shares = {f"0000-05-00-0-0x56c0-s{number}" for number in range(3)}
            assert set(found) == {"0000-04-00-0-0x56c0", *shares}
            return
        assert publisher.features == Features(taints=True, counters=True, consumable=True)
        assert publisher.problems == []
        tiles = {f"0000-04-00-0-0x56c0{part}" for part in ("", "-t0", "-t1")}
        assert set(found) == {NAME, "0000-05-00-0-0x56c0", *tiles}
        assert [taint.key for taint in found[NAME].taints] == ["gpu.intel.com/health"]
        counters = [each.spec for each in slices(cluster, GPU) if each.spec.shared_counters]
        assert [bool(each.devices) for each in counters] == [kubernetes_minor() < 35]


async def test_slices_are_repaired_and_changed(cluster: Cluster) -> None:
    given = dict(functions(200))
    async with publishing(cluster, QAT, given) as publisher:
        await until(lambda: len(devices(cluster, QAT)) == 200, publisher)
        before = await versions_after_a_while(cluster, QAT)
        assert len(before) == 4
        given.popitem()
        publisher.set_pool(lambda features: catalog.pool(QAT, NODE, given, features, held=(), evict="gone"))
        await until(lambda: len(devices(cluster, QAT)) == 199, publisher)
        after = await versions_after_a_while(cluster, QAT)
        assert len(before.items() - after.items()) == 1
        # As the kubelet does when it starts.
        await asyncio.to_thread(cluster.request, "DELETE", f"{SLICES}?fieldSelector=spec.nodeName={NODE}")
        await until(lambda: len(devices(cluster, QAT)) == 199, publisher)
        assert len(await versions_after_a_while(cluster, QAT)) == 4
        assert publisher.problems == []


def test_the_local_rules_are_those_of_the_api_server(cluster: Cluster, profile: str) -> None:
    if kubernetes_minor() < 35 or (kubernetes_minor() == 35 and profile == DEFAULT):
        pytest.skip("the rules are for counter sets in slices of their own, with all gates")
    for device in VALID:
        assert cluster.request("POST", f"{SLICES}?dryRun=All", typed(device))[0] == 201, device
    for device, _field in INVALID:
        # Versions before 1.37 divide by a step of 0.
        assert cluster.request("POST", f"{SLICES}?dryRun=All", typed(device))[0] in {400, 422, 500}, device


def claiming(cluster: Cluster, namespace: str, name: str, device_class: str, **request: Any) -> None:
    """Creates a pod, and a claim of the class, with this name."""
    exactly = {"deviceClassName": device_class, **request}
    claim = {"devices": {"requests": [{"name": "device", "exactly": exactly}]}}
    container = {"name": "main", "image": "main", "resources": {"claims": [{"name": "device"}]}}
    pod = {"containers": [container], "resourceClaims": [{"name": "device", "resourceClaimName": name}]}
    path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims"
    assert cluster.request("POST", path, {"metadata": {"name": name}, "spec": claim})[0] == 201
    path = f"/api/v1/namespaces/{namespace}/pods"
    assert cluster.request("POST", path, {"metadata": {"name": name}, "spec": pod})[0] == 201


def test_no_shipped_class_fails_on_devices_of_other_drivers(cluster: Cluster, profile: str, tmp_path: Path) -> None:
    if kubernetes_minor() < 34:
        pytest.skip("resource.k8s.io/v1 needs Kubernetes 1.34")
    has_gates = kubernetes_minor() >= 36 or profile == ALL
    features = Features(taints=has_gates, counters=has_gates, consumable=has_gates)
    offered = simulated_offers(tmp_path)
    classes = [each for tree in ("classes", "extended-resources") for each in render(DEPLOY / "dra" / tree)]
    unguarded = {"selectors": [{"cel": {"expression": f'device.attributes["{GPU}"].type != "tile"'}}]}
    version = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass"}
    cluster.apply(*classes, {**version, "metadata": {"name": "unguarded"}, "spec": unguarded})
    names = [each["metadata"]["name"] for each in classes]
    for node in cluster.add_kwok_nodes(2):
        layout = "together" if kubernetes_minor() == 34 else "separate"
        for body in (*node_slices(node, "", offered, features=features, layout=layout), foreign_slice(node)):
            assert cluster.request("POST", SLICES, body)[0] == 201, body["metadata"]
    try:
        with cluster.namespace("classes") as namespace:
            for name in names:
                claiming(cluster, namespace, name, name)
            claiming(cluster, namespace, "unguarded", "unguarded", allocationMode="All")

            def conditions() -> dict[str, Json]:
                pods = (cluster.get(f"/api/v1/namespaces/{namespace}/pods") or {"items": []})["items"]
                return {
                    pod["metadata"]["name"]: each
                    for pod in pods
                    for each in pod["status"].get("conditions", ())
                    if each["type"] == "PodScheduled"
                }

            wait_until(lambda: conditions().keys() == {*names, "unguarded"}, "attempts for all pods")
            found = conditions()
            assert "CEL runtime error" in found.pop("unguarded")["message"]
            assert {each.get("reason") for each in found.values()} <= {None, "Unschedulable"}
            scheduled = {name for name, each in found.items() if each["status"] == "True"}
            assert scheduled >= offered.keys() | ({"gpu-tile.intel.com"} if has_gates else set())
    finally:
        cluster.request("DELETE", SLICES)


def typed(device: Json) -> Json:
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", **document(**device)}
