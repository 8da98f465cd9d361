"""The holders of devices, from the kubelet's pod resources socket."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from fake_plugin import FakePlugin, listing
from podlists import answering, claim, pods_with_claim

from accelplane.kubelet import podresources_v1_pb2 as pb
from accelplane.kubelet.embedded import EmbeddedKubelet, Pod
from accelplane.kubelet.podresources import (
    ClaimHolder,
    Holder,
    PodResourcesError,
    allocatable,
    list_holders,
)

GADGET = "example.com/gadget"
DEVICES = listing(("d1", "Healthy", [0]), ("d2", "Healthy", [0, 1]), ("d10", "Unhealthy", [1]), "s")


@pytest.fixture
def directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="ak")
    yield path
    shutil.rmtree(path)


async def test_holders_have_each_device_once_whatever_its_nodes(directory: str) -> None:
    async with EmbeddedKubelet(directory) as kubelet, FakePlugin(directory, devices=DEVICES) as plugin:
        await plugin.register()
        await kubelet.until(lambda k: GADGET in k.resources())
        await kubelet.run_pod(Pod("pod", "team", containers={"main": {GADGET: 3}, "idle": {}}))
        assert (await list_holders(kubelet.pod_resources_socket)).devices == (
            Holder("team", "pod", "main", GADGET, ("d1", "d2", "s"), {"d1": (0,), "d2": (0, 1)}),
        )
        assert await allocatable(kubelet.pod_resources_socket) == {GADGET: ("d1", "d2", "s")}


async def test_the_server_gives_an_entry_for_each_device_and_node(directory: str) -> None:
    async with EmbeddedKubelet(directory) as kubelet, FakePlugin(directory, devices=DEVICES) as plugin:
        await plugin.register()
        await kubelet.until(lambda k: GADGET in k.resources())
        await kubelet.run_pod(Pod("pod", containers={"main": {GADGET: 3}}))
        answer = await ask(kubelet.pod_resources_socket, "List", pb.ListPodResourcesRequest())
        (pod,) = pb.ListPodResourcesResponse.FromString(answer).pod_resources
        entries = [
            (list(entry.device_ids), [node.ID for node in entry.topology.nodes]) for entry in pod.containers[0].devices
        ]
        assert sorted(entries) == [(["d1"], [0]), (["d2"], [0]), (["d2"], [1]), (["s"], [])]


async def test_a_pod_is_read_by_name_and_namespace(directory: str) -> None:
    async with EmbeddedKubelet(directory) as kubelet:
        await kubelet.run_pod(Pod("pod", "team", containers={"main": {}}))
        request = pb.GetPodResourcesRequest(pod_name="pod", pod_namespace="team")
        answer = pb.GetPodResourcesResponse.FromString(await ask(kubelet.pod_resources_socket, "Get", request))
        assert [container.name for container in answer.pod_resources.containers] == ["main"]
        request.pod_namespace = "default"
        with pytest.raises(grpc.aio.AioRpcError, match="pod pod in namespace default not found"):
            await ask(kubelet.pod_resources_socket, "Get", request)


async def test_devices_of_claims_are_listed_with_their_cdi_names(directory: str) -> None:
    card = claim("gpu.intel.com", "card0", "intel.com/gpu=b", "intel.com/gpu=a")
    answer = pods_with_claim(card, claim("x.com", "y"), containers=("main", "side"))
    answer.pod_resources[0].containers[0].devices.add(resource_name=GADGET, device_ids=["d1"])
    path = os.path.join(directory, "list.sock")
    async with answering(path, List=answer.SerializeToString()):
        found = await list_holders(path)
        assert found.devices == (Holder("team", "pod", "main", GADGET, ("d1",)),)
    names = ("intel.com/gpu=a", "intel.com/gpu=b")
    assert found.claims == tuple(
        ClaimHolder("team", "pod", container, driver, "node-1", device, cdi)
        for container in ("main", "side")
        for driver, device, cdi in (("gpu.intel.com", "card0", names), ("x.com", "y", ()))
    )


async def test_a_missing_socket_is_reported(directory: str) -> None:
    path = os.path.join(directory, "absent.sock")
    with pytest.raises(PodResourcesError, match=path):
        await list_holders(path)


async def test_a_too_long_socket_path_is_reported_with_the_limit() -> None:
    with pytest.raises(PodResourcesError, match="at most 107"):
        await allocatable("/" + "x" * 200)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"\xff\xff garbage", "List "),
        (b"\x0a\x00" * (9 << 20), "List failed: RESOURCE_EXHAUSTED"),
    ],
)
async def test_an_invalid_server_response_is_an_error(directory: str, answer: bytes, problem: str) -> None:
    path = os.path.join(directory, "liar.sock")
    async with answering(path, List=answer):
        with pytest.raises(PodResourcesError, match=f"{path}: {problem}"):
            await list_holders(path)


async def ask(path: str, method: str, request: Any) -> bytes:
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        call = channel.unary_unary(
            f"/v1.PodResourcesLister/{method}", request_serializer=lambda message: message.SerializeToString()
        )
        return await asyncio.wait_for(call(request), 10)
