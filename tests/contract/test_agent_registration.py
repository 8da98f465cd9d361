"""Registrations whose answers are late or lost, and agents that overlap: one list, and no rejected registration."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest
from agentsockets import own_socket, plugins_dir, server
from conftest import Start
from gadgets import GADGET, Table, gadgets
from kubelets import Kubelet
from registrationproxy import RegistrationProxy
from waiting import until

from accelplane import rpc
from accelplane.kubelet import pluginsocket, sockets
from accelplane.kubelet.pluginsocket import PluginSocket
from accelplane.kubelet.server import Stage
from accelplane.node.agent import Agent
from accelplane.node.settings import Settings


@asynccontextmanager
async def running_agent(directory: str, plugin: Table) -> AsyncIterator[Agent]:
    settings = Settings(root=directory, kubelet_dir=directory, cdi_dir=f"{directory}/cdi")
    agent = Agent(settings, {"table": plugin})
    task = asyncio.create_task(agent.run())
    try:
        yield agent
    finally:
        agent.stop()
        await task


def registration_names(directory: str) -> list[str]:
    return [name for name in os.listdir(plugins_dir(directory)) if name.startswith("example.com-gadget-")]


async def test_each_registration_has_a_name_of_its_own_for_the_same_socket(
    directory: str, kubelet: Kubelet, start_agent: Start
) -> None:
    await start_agent(table=Table(gadgets("a")))
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    (before,) = registration_names(directory)
    assert os.path.samefile(os.path.join(plugins_dir(directory), before), own_socket(directory))
    await kubelet.restart()
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    assert before not in registration_names(directory)


async def test_a_registration_whose_answer_is_late_is_not_repeated(directory: str, kubelet: Kubelet) -> None:
    async with RegistrationProxy(directory) as proxy, running_agent(directory, Table(gadgets("a"))) as agent:
        await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
        await until(lambda: server(agent).stage == Stage.REGISTERED)
        proxy.answers.set()
        await kubelet.run_pod("pod", {GADGET: 1})
        assert len(registration_names(directory)) == 1
    await kubelet.until(lambda resources: resources == {GADGET: (1, 0)})


async def test_a_registration_whose_answer_is_lost_leaves_no_rejected_registration(
    directory: str, kubelet: Kubelet
) -> None:
    async with RegistrationProxy(directory, cut=True) as proxy, running_agent(directory, Table(gadgets("a"))) as agent:
        await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
        proxy.cut = False
        proxy.answers.set()
        await until(lambda: server(agent).stage == Stage.REGISTERED)
    await kubelet.until(lambda resources: resources == {GADGET: (1, 0)})
    async with running_agent(directory, Table(gadgets("a", "b"))) as agent:
        await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
        assert server(agent).counters.registration_failures == {}
        await kubelet.run_pod("pod", {GADGET: 1})
    await kubelet.until(lambda resources: resources == {GADGET: (2, 0)})


async def test_the_list_of_an_agent_that_has_taken_over_stays_the_last_one(
    directory: str, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = Table(gadgets("a"))
    async with running_agent(directory, plugin) as earlier:
        await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
        # Both agents are in this process: the second one shall have started after the first one's socket was made.
        monkeypatch.setattr(pluginsocket, "PROCESS_START", os.lstat(own_socket(directory)).st_mtime + 0.001)
        async with running_agent(directory, Table(gadgets("a", "b"))) as later:
            await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
            plugin.found = gadgets("x", "y", "z")
            scans = earlier.runners["table"].scan.count
            earlier.runners["table"].scan.request()
            await until(lambda: earlier.runners["table"].scan.count > scans)
            await server(earlier).withdraw()
            await until(lambda: server(earlier).stage == Stage.WAITING)
            registrations = 2 if kubelet.behaviour == "1.34" else 1
            await until(lambda: server(later).counters.registrations == registrations)
            await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
            await kubelet.run_pod("pod", {GADGET: 1})
        await until(lambda: server(earlier).stage == Stage.REGISTERED)
        await kubelet.until(lambda resources: resources[GADGET].allocatable == 3)


async def test_a_long_resource_name_has_registration_names_that_fit_into_a_socket_address(directory: str) -> None:
    name = f"{'x' * (sockets.MAX_PATH_BYTES - len(plugins_dir(directory)) - 6)}.sock"
    os.mkdir(plugins_dir(directory))
    endpoint = PluginSocket(plugins_dir(directory), name)
    first = rpc.RpcServer({})
    await endpoint.create(first)
    registered = endpoint.add_registration_name()
    assert len(os.fsencode(os.path.join(plugins_dir(directory), registered))) == sockets.MAX_PATH_BYTES
    assert os.path.samefile(os.path.join(plugins_dir(directory), registered), endpoint.path)
    endpoint.remove()
    await first.stop()
    assert os.listdir(plugins_dir(directory)) == []


@pytest.mark.parametrize(("length", "registered"), [(20, 27), (41, 48), (45, 48), (60, 60)])
async def test_registration_names_fit_into_the_directory_of_the_kubelet(
    directory: str, length: int, registered: int
) -> None:
    """The kubelet can know the directory by a longer path, in which the resource name still fits."""
    os.mkdir(plugins_dir(directory))
    endpoint = PluginSocket(plugins_dir(directory), f"{'x' * length}.sock")
    first = rpc.RpcServer({})
    await endpoint.create(first)
    assert len(endpoint.add_registration_name()) == registered + len(".sock")
    endpoint.remove()
    await first.stop()


async def test_only_sockets_without_a_listener_of_the_same_resource_are_removed(directory: str) -> None:
    os.mkdir(plugins_dir(directory))
    kept = ["example.com-gadget-0a1b2c.sock", "example.com-gadget-xx.sock", "example.com-gizmo-0a1b2d.sock"]
    with ExitStack() as stack:
        for name in (*kept, "example.com-gadget-0a1b2e.sock"):
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.bind(os.path.join(plugins_dir(directory), name))
            if name == kept[0]:
                other.listen()
        endpoint = PluginSocket(plugins_dir(directory), "example.com-gadget.sock")
        own = rpc.RpcServer({})
        await endpoint.create(own)
        endpoint.remove()
        await own.stop()
    assert sorted(os.listdir(plugins_dir(directory))) == sorted(kept)
