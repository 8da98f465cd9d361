"""Servers of an agent's resources, and their peers."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from gadgets import Table, gadget
from peer import Peer
from waiting import until

from accelplane.devices import UNHEALTHY, Device, Resource
from accelplane.kubelet.server import ResourceServer
from accelplane.node.agent import Agent
from accelplane.node.settings import Settings

Serve = Callable[..., AbstractAsyncContextManager[tuple[Agent, Peer]]]
UNHEALTHY_GADGET = gadget("hot", health=UNHEALTHY, reason="too hot")


class Chooser(Table):
    async def preferred_allocation(
        self, available: Sequence[Device], must_include: Sequence[Device], size: int, in_use: Mapping[str, int]
    ) -> Sequence[str]:
        if size < 0:
            raise ValueError(f"{size} devices cannot be had")
        rest = [device.id for device in reversed(available) if device not in must_include]
        return [*(device.id for device in must_include), *rest][:size]


class Starter(Table):
    def __init__(self, *found: Device) -> None:
        super().__init__(found)
        self.started: list[list[str]] = []

    async def pre_start(self, devices: Sequence[Device]) -> None:
        if any(device.id == "b" for device in devices):
            raise RuntimeError("b does not wake up")
        self.started.append([device.id for device in devices])


@asynccontextmanager
async def serving(directory: str, plugin: Table, *options: tuple[str, Any]) -> AsyncIterator[tuple[Agent, Peer]]:
    """An agent with the plugin, and a peer of its resource `gadget`, without any kubelet."""
    os.makedirs(f"{directory}/device-plugins", exist_ok=True)
    agent = Agent(Settings(root=directory, kubelet_dir=directory, cdi_dir=f"{directory}/cdi"), {"table": plugin})
    task = asyncio.create_task(agent.run())
    path = f"{directory}/device-plugins/{plugin.socket_name('gadget')}"
    try:
        await until(lambda: os.path.exists(path))
        async with Peer(path, *options) as peer:
            yield agent, peer
    finally:
        agent.stop()
        await task


def server(agent: Agent) -> ResourceServer:
    return agent.runners["table"].publisher.served["gadget"].server


def replace_devices(agent: Agent, plugin: Table, *devices: Device | Resource) -> None:
    plugin.found = devices
    agent.runners["table"].scan.request()
