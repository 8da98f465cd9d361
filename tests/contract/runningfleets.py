"""A running fleet, nodes with doubles of agents, and functions that wait for a state of the fleet."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
from fleetagents import AgentDouble, node, response
from kubeapi import KubeApi
from waiting import until

from accelplane.fleet.agents import AgentTimes
from accelplane.fleet.fleet import Fleet
from accelplane.fleet.model import Node
from accelplane.fleet.options import FleetOptions
from accelplane.fleet.view import FleetView
from accelplane.kube.client import Client
from accelplane.kube.informer import WatchTimeouts

HASTE = WatchTimeouts(idle=5, duration=60, first_delay=0.01, max_delay=0.1)
TIMES = AgentTimes(wait=30, answer=0.5, first_delay=0.02, max_delay=0.1, min_interval=0.01, poll=0.05, check=0.1)


@asynccontextmanager
async def fleet_of(
    api: KubeApi,
    options: FleetOptions | None = None,
    times: AgentTimes = TIMES,
    client: Client | None = None,
    *,
    loopback: bool = True,
) -> AsyncIterator[Fleet]:
    client = client or Client(api.config, field_manager="test", timeout=1)
    options = msgspec.structs.replace(options or FleetOptions(), loopback_agents=loopback)
    fleet = Fleet(client, options, agent_times=times, watch_timeouts=HASTE, unserved_retry=0.05)
    running = asyncio.create_task(fleet.run())
    try:
        yield fleet
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()


@asynccontextmanager
async def agents_of(api: KubeApi, *names: str) -> AsyncIterator[list[AgentDouble]]:
    """Nodes with agents."""
    async with AsyncExitStack() as stack:
        doubles = [await stack.enter_async_context(AgentDouble(name).serving()) for name in names]
        for double in doubles:
            api.put("nodes", node(double.node))
            api.put("pods", double.pod())
        yield doubles


def state(fleet: FleetView, name: str) -> str:
    found = fleet.cluster().nodes.get(name)
    return found.agents[0].state if found is not None and found.agents else ""


async def node_with(fleet: FleetView, name: str, condition: Callable[[Node], bool]) -> Node:
    """The node as soon as the condition holds."""

    def holds() -> bool:
        found = fleet.cluster().nodes.get(name)
        return found is not None and condition(found)

    await until(holds)
    return fleet.cluster().nodes[name]


async def connected(fleet: FleetView, *names: str) -> None:
    await until(lambda: all(state(fleet, name) == "connected" for name in names))


def invalid_agent(body: bytes, **options: str) -> Callable[[str], bytes]:
    return lambda _head: response(body, **options)
