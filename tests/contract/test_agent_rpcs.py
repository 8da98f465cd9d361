"""RPCs of a plugin's socket, called with gRPC's reference implementation."""

import asyncio
import functools
import math
import os
from collections.abc import AsyncIterator
from typing import ClassVar

import pytest
from agentservers import UNHEALTHY_GADGET, Chooser, Serve, Starter, replace_devices, server, serving
from gadgets import Table, gadget, gadgets
from peer import Peer, refusal
from waiting import until

from accelplane.devices import UNHEALTHY, Device, Resource
from accelplane.kubelet.server import Stage


@pytest.fixture
def serve(directory: str) -> Serve:
    """`async with serve(plugin) as (agent, peer)`: a plugin's resource `gadget`, without any kubelet."""
    return functools.partial(serving, directory)


# Options


@pytest.mark.parametrize(
    ("plugin", "pre_start", "preferred"), [(Table(), False, False), (Starter(), True, False), (Chooser(), False, True)]
)
async def test_options_report_the_hooks_of_a_plugin(
    serve: Serve, plugin: Table, pre_start: bool, preferred: bool
) -> None:
    plugin.found = gadgets("a")
    async with serve(plugin) as (_agent, peer):
        options = await peer.options()
    assert (options.pre_start_required, options.get_preferred_allocation_available) == (pre_start, preferred)


# Lists


async def test_a_stream_begins_with_the_whole_list_in_natural_order(serve: Serve) -> None:
    async with serve(Table([*gadgets("g10", "g2", "g1"), UNHEALTHY_GADGET])) as (_agent, peer), peer.watch() as lists:
        devices = await lists.next()
    assert list((devices or {}).items()) == [
        ("g1", "Healthy"), ("g2", "Healthy"), ("g10", "Healthy"), ("hot", "Unhealthy"),
    ]  # fmt: skip


async def test_topology_is_sent_for_devices_that_have_a_node_and_is_absent_for_the_others(serve: Serve) -> None:
    devices = [gadget("both", topology=(0, 1)), gadget("empty", topology=()), gadget("none", topology=None)]
    async with serve(Table(devices)) as (_agent, peer), peer.watch() as lists:
        message = await lists.message()
    assert message is not None
    assert {device.ID: device.HasField("topology") for device in message.devices} == {
        "both": True, "empty": False, "none": False,
    }  # fmt: skip
    assert [node.ID for node in message.devices[0].topology.nodes] == [0, 1]


async def test_every_change_sends_a_complete_list_and_no_change_sends_none(serve: Serve) -> None:
    plugin = Table(gadgets("a"))
    async with serve(plugin) as (agent, peer), peer.watch() as lists:
        assert await lists.next() == {"a": "Healthy"}
        replace_devices(agent, plugin, *gadgets("a", "b"))
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        scans = agent.runners["table"].scan.count
        replace_devices(agent, plugin, *gadgets("b", "a"))
        await until(lambda: agent.runners["table"].scan.count > scans)
        replace_devices(agent, plugin, gadget("a"), gadget("b", health=UNHEALTHY))
        assert await lists.next() == {"a": "Healthy", "b": "Unhealthy"}
        # A change of a field that lists do not contain also sends a new list, because Allocate returns it.
        replace_devices(agent, plugin, gadget("a"), gadget("b", health=UNHEALTHY, envs={"X": "1"}))
        assert await lists.next() == {"a": "Healthy", "b": "Unhealthy"}


async def test_a_removed_device_is_unhealthy_before_it_leaves_the_list(serve: Serve) -> None:
    plugin = Table(gadgets("a", "b"))
    async with serve(plugin) as (agent, peer), peer.watch() as lists:
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        replace_devices(agent, plugin, gadget("a"))
        assert await lists.next() == {"a": "Healthy", "b": "Unhealthy"}
        assert await lists.next() == {"a": "Healthy"}


async def test_a_device_that_returns_immediately_stays(serve: Serve) -> None:
    plugin = Table(gadgets("a", "b"))
    async with serve(plugin) as (agent, peer), peer.watch() as lists:
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        replace_devices(agent, plugin, gadget("a"))
        assert await lists.next() == {"a": "Healthy", "b": "Unhealthy"}
        replace_devices(agent, plugin, *gadgets("a", "b"))
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        replace_devices(agent, plugin, *gadgets("a", "b", "c"))
        assert await lists.next() == {"a": "Healthy", "b": "Healthy", "c": "Healthy"}


class PersistentPlugin(Table):
    removal_delay: ClassVar[float] = math.inf


async def test_removed_devices_stay_unhealthy_with_an_infinite_removal_delay(serve: Serve) -> None:
    plugin = PersistentPlugin(gadgets("a", "b"))
    async with serve(plugin) as (agent, peer), peer.watch() as lists:
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        replace_devices(agent, plugin)
        assert await lists.next() == {"a": "Unhealthy", "b": "Unhealthy"}
        code, text = await refusal(peer.allocate(["a"]))
        assert code == "UNKNOWN"
        assert "not found by the last scan" in text
        scans = agent.runners["table"].scan.count
        replace_devices(agent, plugin, gadget("b"), gadget("c"))
        assert await lists.next() == {"a": "Unhealthy", "b": "Healthy", "c": "Healthy"}
        replace_devices(agent, plugin, *gadgets("a", "b", "c"))
        assert await lists.next() == {"a": "Healthy", "b": "Healthy", "c": "Healthy"}
        assert agent.runners["table"].scan.count == scans + 2, "only events caused scans"


class VanishingPlugin(Table):
    removal_delay: ClassVar[float] = 0.0


async def test_removed_devices_leave_the_list_immediately_without_a_removal_delay(serve: Serve) -> None:
    plugin = VanishingPlugin(gadgets("a", "b"))
    async with serve(plugin) as (agent, peer), peer.watch() as lists:
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        replace_devices(agent, plugin, gadget("a"))
        assert await lists.next() == {"a": "Healthy", "b": "Unhealthy"}, "until no container uses it"
        assert await lists.next() == {"a": "Healthy"}


async def test_a_removed_resource_sends_an_empty_list_and_ends_the_stream(serve: Serve) -> None:
    plugin = Table(gadgets("a"))
    async with serve(plugin) as (agent, peer), peer.watch() as lists:
        assert await lists.next() == {"a": "Healthy"}
        replace_devices(agent, plugin)
        assert await lists.next() == {"a": "Unhealthy"}
        assert await lists.next() == {}
        code, _text = await refusal(lists.next())
        assert code == "UNAVAILABLE"
        await until(lambda: not os.path.exists(f"{agent.settings.sockets_dir}/example.com-gadget.sock"))


async def test_a_registered_resource_without_devices_sends_an_empty_list(serve: Serve) -> None:
    async with serve(Table([Resource("gadget")])) as (_agent, peer), peer.watch() as lists:
        assert await lists.next() == {}


async def test_every_one_of_several_streams_gets_every_list(serve: Serve) -> None:
    plugin = Table(gadgets("a"))
    async with (
        serve(plugin) as (agent, peer),
        peer.watch() as one,
        peer.watch() as two,
        Peer(f"{agent.settings.sockets_dir}/example.com-gadget.sock") as late,
    ):
        assert [await one.next(), await two.next()] == [{"a": "Healthy"}] * 2
        replace_devices(agent, plugin, *gadgets("a", "b"))
        assert [await one.next(), await two.next()] == [{"a": "Healthy", "b": "Healthy"}] * 2
        async with late.watch() as three:
            assert await three.next() == {"a": "Healthy", "b": "Healthy"}


async def test_a_blocked_stream_gets_only_the_latest_list(serve: Serve) -> None:
    def shelf(turn: int) -> list[Device]:
        return gadgets(*(f"turn-{turn}-{'x' * 200}-{number}" for number in range(300)))

    plugin = Table(shelf(0))
    # A window of 64 KiB that the peer does not enlarge; a list takes more than that.
    async with serve(plugin, ("grpc.http2.bdp_probe", 0)) as (agent, peer):
        call = peer.stream()
        await call.initial_metadata()
        sent = server(agent).counters
        for turn in range(1, 11):
            scans = agent.runners["table"].scan.count
            replace_devices(agent, plugin, *shelf(turn))
            await until(lambda before=scans: agent.runners["table"].scan.count > before)
        assert sent.lists_sent < 6
        turns: list[set[str]] = []
        while not turns or turns[-1] != {"10"}:
            async with asyncio.timeout(10):
                message = await call.read()
            healthy = (device.ID for device in message.devices if device.health == "Healthy")
            turns.append({key.split("-")[1] for key in healthy})
        assert len(turns) < 6
        call.cancel()


async def test_streams_of_disconnected_clients_are_removed(serve: Serve) -> None:
    async with serve(Table(gadgets("a"))) as (agent, _peer):
        peers = [Peer(f"{agent.settings.sockets_dir}/example.com-gadget.sock") for _ in range(20)]
        calls = [peer.stream() for peer in peers]
        await asyncio.gather(*(call.read() for call in calls))
        assert len(server(agent)._streams) == 20
        for call in calls[:10]:
            call.cancel()
        await asyncio.gather(*(peer.close() for peer in peers))
        await until(lambda: len(server(agent)._streams) == 0)


async def test_a_list_over_the_message_limit_of_the_kubelet_is_truncated_and_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    devices = gadgets(*(f"{'x' * 240}{number}" for number in range(20_000)))
    limit = ("grpc.max_receive_message_length", 4 * 1024 * 1024)
    async with serve(Table(devices), limit) as (_agent, peer), peer.watch() as lists:
        message = await lists.message()
    assert message is not None
    assert 15_000 < len(message.devices) < 20_000
    omitted = 20_000 - len(message.devices)
    assert f"{omitted} of 20000 devices left out" in caplog.text


# Any requests


@pytest.fixture
async def peer(serve: Serve) -> AsyncIterator[Peer]:
    """Of a plugin with the gadgets a and b and one that is hot, for all examples of a test."""
    async with serve(Chooser([*gadgets("a", "b"), UNHEALTHY_GADGET])) as (agent, peer):
        yield peer
        assert server(agent).stage == Stage.SERVING
