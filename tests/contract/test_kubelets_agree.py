"""The behaviour of kubelets towards plugins and pods: the embedded and a real kubelet must behave equally."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from fake_plugin import FakePlugin, HandlerError, listing
from kubelets import Kubelet, PodRejected

from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet import podresources
from accelplane.kubelet.checkpoint import Checkpoint, read_checkpoint

GADGET, GIZMO = "example.com/gadget", "example.com/gizmo"
PREFERS = pb.DevicePluginOptions(get_preferred_allocation_available=True)
PRE_STARTS = pb.DevicePluginOptions(pre_start_required=True)

NONE_HEALTHY = (
    "UnexpectedAdmissionError: Allocate failed due to no healthy devices present; "
    f"cannot allocate unhealthy devices {GADGET}, which is unexpected"
)

Join = Callable[..., Awaitable[FakePlugin]]


@pytest.fixture
async def join(kubelet: Kubelet) -> AsyncIterator[Join]:
    """`await join(…)`: a plugin with these arguments, registered and with its devices in the node's status."""
    async with AsyncExitStack() as running:

        async def joined(*arguments: Any, **more: Any) -> FakePlugin:
            plugin = await running.enter_async_context(FakePlugin(kubelet.directory, *arguments, **more))
            await plugin.register()
            await kubelet.until(lambda resources: plugin.resource in resources)
            return plugin

        yield joined


def refuse(_: object) -> None:
    raise HandlerError("the card is on fire")


def memory(kubelet: Kubelet) -> Checkpoint:
    return read_checkpoint(f"{kubelet.directory}/device-plugins") or Checkpoint()


async def problem(kubelet: Kubelet, wants: dict[str, int], name: str = "pod") -> str:
    """Why a pod was not admitted."""
    with pytest.raises(PodRejected) as caught:
        await kubelet.run_pod(name, wants)
    return str(caught.value)


# The directory


async def test_a_start_deletes_only_sockets(idle_kubelet: Kubelet) -> None:
    plugins = Path(idle_kubelet.directory, "device-plugins")
    plugins.mkdir()
    (plugins / "notes.txt").write_text("kept")
    (plugins / "sub").mkdir()
    (plugins / "link.sock").symlink_to("sub")
    with socket.socket(socket.AF_UNIX) as stale, socket.socket(socket.AF_UNIX) as deeper:
        stale.bind(str(plugins / "old.sock"))
        deeper.bind(str(plugins / "sub/s.sock"))
    await idle_kubelet.start()
    kept = {"sub"} if idle_kubelet.deletes_files else {"notes.txt", "sub", "link.sock"}
    assert {"kubelet.sock", *kept} == set(os.listdir(plugins)) - {"DEPRECATION"}
    assert os.listdir(plugins / "sub") == ["s.sock"]
    await idle_kubelet.kill()
    assert (plugins / "kubelet.sock").is_socket()


# Registration

REFUSALS = [
    ({"version": "v1"}, 'requested API version "v1" is not supported by kubelet. Supported version is ["v1beta1"]'),
    ({"resource": "gadget"}, 'the ResourceName "gadget" is invalid'),
    ({"resource": "example.com/a/b"}, 'the ResourceName "example.com/a/b" is invalid'),
    ({"resource": "kubernetes.io/gadget"}, 'the ResourceName "kubernetes.io/gadget" is invalid'),
    ({"resource": "requests.example.com/gadget"}, 'the ResourceName "requests.example.com/gadget" is invalid'),
    ({"resource": "Example.com/gadget"}, 'the ResourceName "Example.com/gadget" is invalid'),
    ({"resource": f"example.com/{'x' * 64}"}, f'the ResourceName "example.com/{"x" * 64}" is invalid'),
    ({"endpoint": "absent.sock"}, "failed to dial device plugin: context deadline exceeded"),
    ({"endpoint": "x" * 200}, "failed to dial device plugin:"),
]


async def test_invalid_registrations_are_rejected_with_the_same_messages(kubelet: Kubelet) -> None:
    async with FakePlugin(kubelet.directory) as plugin:

        async def outcome(fields: dict[str, str]) -> str:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await plugin.register(**fields)
            return f"{caught.value.code().name}: {caught.value.details()}"

        outcomes = await asyncio.gather(*(outcome(fields) for fields, _ in REFUSALS))
    for (_, expected), found in zip(REFUSALS, outcomes, strict=True):
        assert found.startswith(f"UNKNOWN: {expected}"), found
    assert kubelet.resources() == {}


async def test_a_plugin_whose_options_call_fails_is_rejected(kubelet: Kubelet) -> None:
    async with FakePlugin(kubelet.directory, GetDevicePluginOptions=refuse) as plugin:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await plugin.register()
    assert caught.value.details() == (
        "failed to get device plugin options: rpc error: code = Unknown desc = the card is on fire"
    )


async def test_an_absolute_endpoint_is_still_below_the_directory(kubelet: Kubelet) -> None:
    async with FakePlugin(kubelet.directory) as plugin:
        await plugin.register(endpoint="/gadget.sock")
        await kubelet.until(lambda resources: resources == {GADGET: (3, 3)})


# Lists


async def test_every_list_replaces_the_previous_one_and_only_healthy_devices_count(
    kubelet: Kubelet, join: Join
) -> None:
    plugin = await join(devices=listing("a", ("b", "Sick"), ("c", "Healthy", [0])))
    await kubelet.until(lambda resources: resources == {GADGET: (3, 2)})
    await plugin.send(listing("c", ("d", "healthy")))
    await kubelet.until(lambda resources: resources == {GADGET: (2, 1)})
    await plugin.send(listing())
    await kubelet.until(lambda resources: resources == {})
    await plugin.send(listing("a"))
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})


@pytest.mark.parametrize(
    "last_words",
    [None, b"\xff\xff garbage", listing(*(f"{n:0200}" for n in range(22_000)))],
    ids=["end", "garbage", "too long"],
)
async def test_an_ended_or_invalid_stream_makes_all_devices_unhealthy_and_keeps_the_capacity(
    kubelet: Kubelet, join: Join, last_words: pb.ListAndWatchResponse | bytes | None
) -> None:
    plugin = await join()
    await plugin.send(last_words)
    await kubelet.until(lambda resources: resources == {GADGET: (3, 0)})
    assert await problem(kubelet, {GADGET: 1}) == NONE_HEALTHY
    await plugin.send(listing("a", "b"))
    await plugin.register()
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})


async def test_kubelets_until_1_36_disconnect_the_new_plugin_when_the_stream_of_the_earlier_one_ends(
    kubelet: Kubelet, join: Join
) -> None:
    old = await join(devices=listing("a"))
    new = await join(endpoint="new.sock", devices=listing("b", "c"))
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    await old.abort()
    if kubelet.behaviour == "1.34":
        await kubelet.until(lambda resources: resources == {GADGET: (2, 0)})
        await new.register()
        await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    await kubelet.run_pod("pod", {GADGET: 1})
    assert len(new.ids("Allocate")) == 1
    await new.abort()
    await kubelet.until(lambda resources: resources == {GADGET: (2, 0)})


async def test_kubelets_since_1_37_reject_a_path_that_is_connected_and_lose_track_of_the_plugin(
    kubelet: Kubelet, join: Join
) -> None:
    plugin = await join()
    if kubelet.behaviour == "1.34":
        await plugin.register()
        await kubelet.until(lambda resources: resources == {GADGET: (3, 3)})
        return
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await plugin.register()
        assert (caught.value.details() or "").startswith("device plugin already connected: /")
        await plugin.abort()
        assert kubelet.resources() == {GADGET: (3, 3)}, "nobody serves them"
        await plugin.serve()
    other = await join(endpoint="other.sock", devices=listing("x"))
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    await other.abort()
    await kubelet.run_pod("other", {GIZMO: 1})
    assert kubelet.resources() == {GADGET: (1, 1)}


# Admission


@pytest.mark.parametrize("size", [3, 4])
async def test_a_pod_that_requests_more_than_the_free_devices_is_rejected(
    kubelet: Kubelet, join: Join, size: int
) -> None:
    await join()
    await kubelet.run_pod("first", {GADGET: 1})
    assert await problem(kubelet, {GADGET: size}) == (
        "UnexpectedAdmissionError: Allocate failed due to requested number of devices unavailable for "
        f"{GADGET}. Requested: {size}, Available: 2, which is unexpected"
    )


async def test_a_bound_pod_that_requests_an_unknown_resource_runs_without_it(kubelet: Kubelet, join: Join) -> None:
    plugin = await join()
    container = await kubelet.run_pod("pod", {GIZMO: 1})
    assert container.device_ids == {}
    container = await kubelet.run_pod("both", {GIZMO: 1, GADGET: 1})
    assert list(container.device_ids) == [GADGET]
    assert len(plugin.ids("Allocate")) == 1


async def test_a_resource_without_devices_rejects_pods(kubelet: Kubelet, join: Join) -> None:
    plugin = await join()
    await plugin.send(listing())
    await kubelet.until(lambda resources: resources == {})
    assert await problem(kubelet, {GADGET: 1}) == NONE_HEALTHY


def no_answer(_: object) -> pb.AllocateResponse:
    return pb.AllocateResponse()


@pytest.mark.parametrize(
    ("handlers", "text"),
    [
        ({"Allocate": refuse}, "rpc error: code = Unknown desc = the card is on fire, which is unexpected"),
        ({"Allocate": no_answer}, "no containers return in allocation response"),
        (
            {"GetPreferredAllocation": refuse, "options": PREFERS},
            "device plugin GetPreferredAllocation rpc failed with err: rpc error: code = Unknown desc = the card is",
        ),
    ],
)
async def test_an_error_of_a_plugin_fails_the_pod_with_its_message(
    kubelet: Kubelet, join: Join, handlers: dict[str, Any], text: str
) -> None:
    await join(**handlers)
    found = await problem(kubelet, {GADGET: 1})
    assert found.startswith(f"UnexpectedAdmissionError: Allocate failed due to {text}")
    assert memory(kubelet).holdings == ()


async def test_a_failed_pre_start_fails_the_start_and_the_pod_keeps_its_devices(kubelet: Kubelet, join: Join) -> None:
    plugin = await join(options=PRE_STARTS, PreStartContainer=refuse)
    assert "PreStartContainer rpc failed with err: rpc error: code = Unknown desc = the card is on fire" in (
        await problem(kubelet, {GADGET: 3})
    )
    assert plugin.ids("PreStartContainer")[0] == ["a", "b", "c"]
    assert len(plugin.ids("Allocate")) == 1
    (holding,) = memory(kubelet).holdings
    assert holding.ids == ("a", "b", "c")


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_preferred_allocation_gets_all_free_devices(kubelet: Kubelet, join: Join, size: int) -> None:
    def prefer(_: object) -> pb.PreferredAllocationResponse:
        response = pb.PreferredAllocationResponse()
        response.container_responses.add(deviceIDs=["x", "c", "c"])
        return response

    plugin = await join(options=PREFERS, GetPreferredAllocation=prefer)
    container = await kubelet.run_pod("pod", {GADGET: size})
    (request,) = plugin.requests["GetPreferredAllocation"]
    (container_request,) = request.container_requests
    assert sorted(container_request.available_deviceIDs) == ["a", "b", "c"]
    assert (list(container_request.must_include_deviceIDs), container_request.allocation_size) == ([], size)
    assert "c" in container.device_ids[GADGET]
    assert len(container.device_ids[GADGET]) == size
    assert plugin.ids("Allocate") == [list(container.device_ids[GADGET])]


async def test_topology_without_a_policy_does_not_change_the_choice(kubelet: Kubelet, join: Join) -> None:
    devices = listing(("a", "Healthy", [0]), ("b", "Healthy", [1]), "c")
    plugin = await join(options=PREFERS, devices=devices)
    await kubelet.run_pod("pod", {GADGET: 1})
    (request,) = plugin.requests["GetPreferredAllocation"]
    assert sorted(request.container_requests[0].available_deviceIDs) == ["a", "b", "c"]
    (holding,) = memory(kubelet).holdings
    assert holding.devices.keys() <= {-1, 0, 1}


# Checkpoint


async def test_the_memory_limit_includes_devices_responses_and_registrations(kubelet: Kubelet, join: Join) -> None:
    await join(devices=listing("a", "b", ("c", "Unhealthy")))
    container = await kubelet.run_pod("pod", {GADGET: 1})
    kept = memory(kubelet)
    (holding,) = kept.holdings
    assert (holding.container, holding.resource, holding.ids) == ("main", GADGET, container.device_ids[GADGET])
    assert holding.devices == {-1: container.device_ids[GADGET]}
    assert holding.answer.devices[0].host_path == f"/dev/{holding.ids[0]}"
    assert {name: sorted(ids) for name, ids in kept.registered.items()} == {GADGET: ["a", "b"]}


async def test_after_a_restart_a_resource_has_no_devices_until_its_plugin_registers(
    kubelet: Kubelet, join: Join
) -> None:
    plugin = await join()
    container = await kubelet.run_pod("pod", {GADGET: 1})
    await kubelet.restart()
    assert not os.path.exists(plugin.path)
    assert kubelet.resources() == {}
    assert await problem(kubelet, {GADGET: 1}, "early") == NONE_HEALTHY
    await plugin.abort()
    await plugin.serve()
    await plugin.register()
    await kubelet.until(lambda resources: resources == {GADGET: (3, 3)})
    later = await kubelet.run_pod("late", {GADGET: 2})
    assert not set(later.device_ids[GADGET]) & set(container.device_ids[GADGET])
    assert len(plugin.ids("Allocate")) == 2


async def test_devices_of_a_deleted_pod_are_allocated_again(kubelet: Kubelet, join: Join) -> None:
    await join()
    await kubelet.run_pod("first", {GADGET: 3})
    await kubelet.delete_pod("first")
    assert (await kubelet.run_pod("second", {GADGET: 3})).device_ids == {GADGET: ("a", "b", "c")}


async def test_checkpoint_names_a_deleted_pod_until_pods_are_listed_and_a_list_arrives(
    kubelet: Kubelet, join: Join
) -> None:
    plugin = await join()
    await kubelet.run_pod("pod", {GADGET: 1})
    await kubelet.run_pod("next", {})  # a kubelet 1.31 counts the last admitted pod until it admits another one
    await kubelet.delete_pod("pod")
    await plugin.send(listing("a", "b"))
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    assert len(memory(kubelet).holdings) == 1
    held = await podresources.PodResources(f"{kubelet.directory}/pod-resources/kubelet.sock").list_holders()
    assert held.devices == ()
    assert len(memory(kubelet).holdings) == 1
    await plugin.send(listing("a"))
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)} and not memory(kubelet).holdings)
