"""The holders of devices, from the kubelet's pod resources socket."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from fake_plugin import FakePlugin, listing
from podlists import answering, claim, pods_with_claim
from waiting import until

from accelplane.kubelet import podresources_v1_pb2 as pb
from accelplane.kubelet.embedded import EmbeddedKubelet, Pod
from accelplane.kubelet.podresources import ClaimHolder, DeviceHolder, PodResources, PodResourcesError

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
        assert (await PodResources(kubelet.pod_resources_socket).list_holders()).devices == (
            DeviceHolder("team", "pod", "main", GADGET, ("d1", "d2", "s"), {"d1": (0,), "d2": (0, 1)}),
        )
        assert await PodResources(kubelet.pod_resources_socket).allocatable() == {GADGET: ("d1", "d2", "s")}


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
        found = await PodResources(path).list_holders()
        assert found.devices == (DeviceHolder("team", "pod", "main", GADGET, ("d1",)),)
    names = ("intel.com/gpu=a", "intel.com/gpu=b")
    assert found.claims == tuple(
        ClaimHolder("team", "pod", container, driver, "node-1", device, cdi)
        for container in ("main", "side")
        for driver, device, cdi in (("gpu.intel.com", "card0", names), ("x.com", "y", ()))
    )


async def test_a_missing_socket_is_reported(directory: str) -> None:
    path = os.path.join(directory, "absent.sock")
    with pytest.raises(PodResourcesError, match=path):
        await PodResources(path).list_holders()


async def test_a_too_long_socket_path_is_reported_with_the_limit() -> None:
    with pytest.raises(PodResourcesError, match="at most 107"):
        await PodResources("/" + "x" * 200).allocatable()


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
            await PodResources(path).list_holders()


def connections(path: str) -> int:
    """The number of open connections at the server of a socket."""
    entries = Path("/proc/net/unix").read_text().splitlines()
    return sum(entry.endswith(f" {path}") for entry in entries) - 1  # one is the socket that listens


EMPTY = pb.ListPodResourcesResponse().SerializeToString()


async def test_the_connection_is_closed_after_a_response(directory: str) -> None:
    path = os.path.join(directory, "list.sock")
    async with answering(path, List=EMPTY):
        await PodResources(path).list_holders()
        await until(lambda: connections(path) == 0)


async def test_a_connection_is_kept_for_later_requests_and_closed_by_its_owner(directory: str) -> None:
    path = os.path.join(directory, "list.sock")
    kubelet = PodResources(path, keep=60)
    async with answering(path, List=EMPTY, GetAllocatableResources=b""):
        for _ in range(2):
            await kubelet.list_holders()
            await kubelet.allocatable()
        assert connections(path) == 1
        await kubelet.close()
        await until(lambda: connections(path) == 0)


async def test_a_kept_connection_is_closed_when_it_is_not_used(directory: str) -> None:
    path = os.path.join(directory, "list.sock")
    kubelet = PodResources(path, keep=0.05)
    async with answering(path, List=EMPTY):
        for _ in range(2):
            await kubelet.list_holders()
            await until(lambda: connections(path) == 0)


async def test_a_kept_connection_is_made_again_after_a_restart_of_the_kubelet(directory: str) -> None:
    path = os.path.join(directory, "list.sock")
    kubelet = PodResources(path, keep=60)
    for name in ("a", "b"):
        answer = pods_with_claim(claim("x.com", name)).SerializeToString()
        async with answering(path, List=answer):
            assert [each.device for each in (await kubelet.list_holders()).claims] == [name]
    with pytest.raises(PodResourcesError, match=path):
        await kubelet.list_holders()


async def test_a_connection_that_ends_with_a_request_is_made_again_once(directory: str) -> None:
    """The end of the connection and the next request can be at the same time."""
    path = os.path.join(directory, "list.sock")
    kubelet = PodResources(path, keep=60)
    answers = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answers
        answers += 1
        await reader.read(1)
        writer.close()

    async with answering(path, List=EMPTY):
        await kubelet.list_holders()
    Path(path).unlink(missing_ok=True)
    async with await asyncio.start_unix_server(answer, path):
        with pytest.raises(PodResourcesError, match="UNAVAILABLE"):
            await kubelet.list_holders()
    assert answers == 2


@pytest.mark.parametrize("how", ["an invalid response", "cancellation"])
async def test_a_kept_connection_is_closed_after_a_request_without_a_response(directory: str, how: str) -> None:
    path = os.path.join(directory, "list.sock")
    kubelet = PodResources(path, keep=60)
    waiting = asyncio.Event()

    async def wait() -> bytes:
        waiting.set()
        await asyncio.sleep(1000)
        return b""

    async with answering(path, List=EMPTY, GetAllocatableResources=wait if how == "cancellation" else b"\xff"):
        await kubelet.list_holders()
        assert connections(path) == 1
        request = asyncio.create_task(kubelet.allocatable())
        if how == "cancellation":
            await waiting.wait()
            request.cancel()
        await asyncio.wait((request,))
        assert request.cancelled() or isinstance(request.exception(), PodResourcesError)
        await until(lambda: connections(path) == 0)
        await kubelet.list_holders()
        await kubelet.close()


async def ask(path: str, method: str, request: Any) -> bytes:
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        call = channel.unary_unary(
            f"/v1.PodResourcesLister/{method}", request_serializer=lambda message: message.SerializeToString()
        )
        return await asyncio.wait_for(call(request), 10)
