"""Allocate, GetPreferredAllocation and PreStartContainer of the agent."""

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from agentservers import UNHEALTHY_GADGET, Chooser, Serve, Starter, replace_devices, server, serving
from gadgets import Table, gadget, gadgets
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer import Peer, refusal
from thoroughness import examples

from accelplane.devices import Allocation, Device, DeviceNode, Mount
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet.server import Stage


class HookPlugin(Table):
    """`allocate` answers for "a", asks for the default for all others, fails for "broken"; then `post_allocate`."""

    async def allocate(self, devices: Sequence[Device]) -> Allocation | None:
        if devices[0].id == "broken":
            raise OSError(5, "Input/output error", "/dev/broken")
        return Allocation(envs={"OWN": "yes"}) if devices[0].id == "a" else None

    async def post_allocate(self, devices: Sequence[Device], allocation: Allocation) -> Allocation:
        if devices[0].id == "cursed":
            raise ValueError("no blessing\nfor this one")
        return Allocation(nodes=allocation.nodes, envs={"BLESSED": ",".join(device.id for device in devices)})


@pytest.fixture
def serve(directory: str) -> Serve:
    """`async with serve(plugin) as (agent, peer)`: a plugin's resource `gadget`, without any kubelet."""
    return functools.partial(serving, directory)


# Allocate


async def test_a_container_gets_the_device_specs_in_the_requested_order(serve: Serve) -> None:
    devices = [
        gadget("a", mounts=(Mount("/m/a"),), envs={"A": "1", "LAST": "a"}, annotations={"k": "a"}),
        gadget("b", mounts=(Mount("/m/b", "/in/b", read_only=False),), envs={"LAST": "b"}, annotations={"k": "b"}),
    ]
    async with serve(Table(devices)) as (_agent, peer):
        (container,) = await peer.allocate(["b", "a"])
    assert [(node.host_path, node.container_path, node.permissions) for node in container.devices] == [
        ("/dev/b", "/dev/b", "rw"), ("/dev/a", "/dev/a", "rw"),
    ]  # fmt: skip
    assert [(mount.host_path, mount.container_path, mount.read_only) for mount in container.mounts] == [
        ("/m/b", "/in/b", False), ("/m/a", "/m/a", True),
    ]  # fmt: skip
    assert dict(container.envs) == {"A": "1", "LAST": "a"}
    assert dict(container.annotations) == {"k": "a"}


async def test_shared_device_nodes_of_two_devices_are_listed_once(serve: Serve) -> None:
    shared = (DeviceNode("/dev/card"), DeviceNode("/dev/render", permissions="r"))
    devices = [gadget(key, nodes=shared, mounts=(Mount("/m"),)) for key in ("card-0", "card-1")]
    async with serve(Table(devices)) as (_agent, peer):
        (container,) = await peer.allocate(["card-0", "card-1", "card-0"])
    assert [node.host_path for node in container.devices] == ["/dev/card", "/dev/render"]
    assert len(container.mounts) == 1


async def test_each_of_several_container_requests_has_its_own_response(serve: Serve) -> None:
    async with serve(Table(gadgets("a", "b"))) as (_agent, peer):
        containers = await peer.allocate(["b"], [], ["a", "b"])
    assert [[node.host_path for node in container.devices] for container in containers] == [
        ["/dev/b"], [], ["/dev/a", "/dev/b"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "nope"], "example.com/gadget: unknown device 'nope' requested"),
        ([""], "example.com/gadget: unknown device '' requested"),
        (["card0-0"], "example.com/gadget: unknown device 'card0-0' requested"),
        (["\u2603\n"], r"example.com/gadget: unknown device '\u2603\n' requested"),
        (["a", "hot"], "example.com/gadget: unhealthy device 'hot (too hot)' requested"),
        ([str(n) for n in range(9)], "unknown device '0', '1', '2', '3', '4' and 4 more requested"),
        (["x" * 5000], f"unknown device '{'x' * 100}' requested"),
    ],
)
async def test_unavailable_ids_fail_the_request_and_are_reported(serve: Serve, ids: list[str], message: str) -> None:
    async with serve(Table([*gadgets("a"), UNHEALTHY_GADGET])) as (agent, peer):
        code, text = await refusal(peer.allocate(["a"], ids))
        assert (code, message in text) == ("UNKNOWN", True), text
        assert server(agent).counters.allocation_failures == 1
        outcome = "unhealthy" if "unhealthy" in message else "unknown-id"
        assert server(agent).counters.allocation_outcomes[outcome] == 1
        assert len(await peer.allocate(["a"])) == 1


async def test_a_device_is_allocatable_until_it_has_left_the_list(serve: Serve) -> None:
    plugin = Table(gadgets("a", "b"))
    async with serve(plugin) as (agent, peer), peer.watch() as lists:
        replace_devices(agent, plugin, gadget("a"))
        await lists.until({"a": "Healthy", "b": "Unhealthy"})
        assert await refusal(peer.allocate(["b"])) == (
            "UNKNOWN", "example.com/gadget: unhealthy device 'b (not found by the last scan)' requested",
        )  # fmt: skip
        await lists.until({"a": "Healthy"})
        assert await refusal(peer.allocate(["b"])) == ("UNKNOWN", "example.com/gadget: unknown device 'b' requested")


async def test_an_allocate_response_of_the_plugin_replaces_that_of_the_framework_and_skips_post_allocate(
    serve: Serve,
) -> None:
    async with serve(HookPlugin(gadgets("a", "b", "c"))) as (_agent, peer):
        own, default = await peer.allocate(["a"], ["c", "b"])
    assert (dict(own.envs), list(own.devices)) == ({"OWN": "yes"}, [])
    assert dict(default.envs) == {"BLESSED": "c,b"}
    assert [node.host_path for node in default.devices] == ["/dev/c", "/dev/b"]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("broken", "OSError: [Errno 5] Input/output error: '/dev/broken'"),
        ("cursed", "ValueError: no blessing\nfor this one"),
    ],
)
async def test_an_error_of_a_hook_is_reported_unchanged_to_the_pod(serve: Serve, key: str, text: str) -> None:
    async with serve(HookPlugin(gadgets("broken", "cursed", "ok"))) as (_agent, peer):
        assert await refusal(peer.allocate([key])) == ("UNKNOWN", text)
        assert len(await peer.allocate(["ok"])) == 1


@pytest.mark.parametrize(
    "text",
    ["x" * 100_000, os.fsdecode(b"/dev/\xff\xfe"), "\u2603" * 5000, "%41\r\n\0"],
    ids=["long", "no text", "long when encoded", "control characters"],
)
async def test_an_error_with_an_invalid_message_fails_the_call(
    serve: Serve, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # the test runner cannot carry such texts either

    class Verbose(Table):
        async def allocate(self, devices: Sequence[Device]) -> Allocation | None:
            raise RuntimeError(text)

    async with serve(Verbose(gadgets("a"))) as (_agent, peer):
        code, message = await refusal(peer.allocate(["a"]))
    assert code == "UNKNOWN"
    assert message.startswith("RuntimeError: " + text[:3])


async def test_a_response_over_the_message_limit_fails_the_call(serve: Serve) -> None:
    class InvalidResponsePlugin(Table):
        async def allocate(self, devices: Sequence[Device]) -> Allocation | None:
            if devices[0].id == "bytes":
                return Allocation(mounts=(Mount(os.fsdecode(b"/\xff")),))
            return "nonsense"  # type: ignore[return-value]

    async with serve(InvalidResponsePlugin(gadgets("bytes", "nonsense"))) as (_agent, peer):
        for key in ("bytes", "nonsense"):
            assert (await refusal(peer.allocate([key])))[0] == "UNKNOWN"


async def test_a_slow_hook_does_not_delay_other_calls(serve: Serve) -> None:
    release = asyncio.Event()

    class Slow(Table):
        async def post_allocate(self, devices: Sequence[Device], allocation: Allocation) -> Allocation:
            if devices[0].id == "slow":
                await release.wait()
            return allocation

    async with serve(Slow(gadgets("slow", "fast"))) as (_agent, peer):
        slow = asyncio.create_task(peer.allocate(["slow"]))
        assert len(await peer.allocate(["fast"])) == 1
        assert not slow.done()
        release.set()
        assert len(await slow) == 1


async def test_an_expired_deadline_ends_the_call_and_affects_no_others(serve: Serve) -> None:
    class BlockedPlugin(Table):
        async def allocate(self, devices: Sequence[Device]) -> Allocation | None:
            await asyncio.Event().wait()
            return None

    async with serve(BlockedPlugin(gadgets("a"))) as (_agent, peer):
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["a"])])
        call = peer._channel.unary_unary(
            "/v1beta1.DevicePlugin/Allocate",
            request_serializer=pb.AllocateRequest.SerializeToString,
            response_deserializer=pb.AllocateResponse.FromString,
        )
        assert (await refusal(call(request, timeout=0.1)))[0] == "DEADLINE_EXCEEDED"
        assert await peer.options() == pb.DevicePluginOptions()


# GetPreferredAllocation and PreStartContainer


async def test_a_plugin_chooses_among_the_offered_devices(serve: Serve) -> None:
    async with serve(Chooser(gadgets("a", "b", "c"))) as (_agent, peer):
        assert await peer.preferred(["a", "b", "c"], ["b"], 2) == ["b", "c"]
        assert await peer.preferred(["a", "foreign", ""], [], 3) == ["a"], "unknown ids are not offered to the plugin"
        assert await refusal(peer.preferred(["a"], [], -1)) == ("UNKNOWN", "-1 devices cannot be had")


async def test_missing_hooks_of_a_plugin_are_rejected(serve: Serve) -> None:
    async with serve(Table(gadgets("a"))) as (_agent, peer):
        assert (await refusal(peer.preferred(["a"], [], 1))) == (
            "UNKNOWN", "example.com/gadget: this plugin has no preferred allocation",
        )  # fmt: skip
        assert (await refusal(peer.pre_start(["a"]))) == (
            "UNKNOWN", "example.com/gadget: this plugin has no action before a container starts",
        )  # fmt: skip


async def test_pre_start_is_called_before_a_container_starts_and_can_fail_it(serve: Serve) -> None:
    plugin = Starter(*gadgets("a", "b", "c"))
    async with serve(plugin) as (_agent, peer):
        await peer.pre_start(["c", "a", "c"])
        assert plugin.started == [["c", "a"]]
        assert await refusal(peer.pre_start(["b"])) == ("UNKNOWN", "RuntimeError: b does not wake up")
        assert "unknown device 'x'" in (await refusal(peer.pre_start(["x"])))[1]


# Any requests


@pytest.fixture
async def peer(serve: Serve) -> AsyncIterator[Peer]:
    """Of a plugin with the gadgets a and b and one that is hot, for all examples of a test."""
    async with serve(Chooser([*gadgets("a", "b"), UNHEALTHY_GADGET])) as (agent, peer):
        yield peer
        assert server(agent).stage == Stage.SERVING


IDS = st.lists(st.one_of(st.sampled_from(["a", "b", "hot"]), st.text(max_size=300)), max_size=8)
HYPOTHESIS = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@HYPOTHESIS
@given(containers=st.lists(IDS, max_size=4))
async def test_allocate_succeeds_exactly_for_known_healthy_devices(peer: Peer, containers: list[list[str]]) -> None:
    keys = {key for container in containers for key in container}
    if keys <= {"a", "b"}:
        answers = await peer.allocate(*containers)
        assert [[node.host_path for node in answer.devices] for answer in answers] == [
            [f"/dev/{key}" for key in dict.fromkeys(container)] for container in containers
        ]
    else:
        code, text = await refusal(peer.allocate(*containers))
        assert code == "UNKNOWN"
        assert text.startswith("example.com/gadget: un")
        assert text.isascii()
        assert len(text) < 6000


@HYPOTHESIS
@given(available=IDS, must=IDS, size=st.integers(-(2**31), 2**31 - 1))
async def test_preferred_devices_are_always_among_those_offered(
    peer: Peer, available: list[str], must: list[str], size: int
) -> None:
    if size < 0:
        assert (await refusal(peer.preferred(available, must, size)))[0] == "UNKNOWN"
    else:
        assert set(await peer.preferred(available, must, size)) <= {*available, *must}


@HYPOTHESIS
@given(method=st.sampled_from(["Allocate", "GetPreferredAllocation", "GetDevicePluginOptions"]), data=st.binary())
async def test_invalid_messages_are_rejected_or_decoded_as_by_protobuf(peer: Peer, method: str, data: bytes) -> None:
    types: dict[str, tuple[Any, Any]] = {
        "Allocate": (pb.AllocateRequest, pb.AllocateResponse),
        "GetPreferredAllocation": (pb.PreferredAllocationRequest, pb.PreferredAllocationResponse),
        "GetDevicePluginOptions": (pb.Empty, pb.DevicePluginOptions),
    }

    request, response = types[method]
    try:
        request.FromString(data)
    except DecodeError:
        answer = ("INVALID_ARGUMENT", f"cannot decode the request, expected {request.DESCRIPTOR.name}")
        assert await refusal(peer.call(method, data, response)) == answer
    else:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await peer.call(method, data, response)
