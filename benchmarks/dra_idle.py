"""Memory and idle cost of agents with and without dynamic resource allocation, which run at the same time.

`python -m benchmarks.dra_idle SECONDS COUNT` prints them as JSON. It is run in a network namespace of its own, which
uevents of other programs do not reach: agent, kubelet and API server share it.
"""

import asyncio
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.agent import FAMILIES, AgentProcess, Memory, NodeSetup, gpu_npu_node, ordinary_node, registered_agent
from benchmarks.dra_agents import dra_agent
from benchmarks.idle import isolation

# The agent asks the kubelet for other device plugins in the first 10 s.
SETTLE_SECONDS, _START_INTERVAL = 15, 3
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # netdevice(7)


class Idle(Struct, frozen=True):
    """Averages per minute: processor time in ms, and voluntary context switches. The memory is that at the end."""

    cpu: float
    switches: float
    memory: Memory


class Agents(Struct, frozen=True):
    """Agents of a node with cards and an NPU, and of the ordinary node, without DRA, and with DRA for what is named."""

    plain: Sequence[Idle]
    cards: Sequence[Idle]
    ordinary: Sequence[Idle]
    ordinary_all: Sequence[Idle]


def run(seconds: int, count: int) -> tuple[Agents, bool]:
    """The agents, `count` of each kind, and whether no uevents have reached them."""
    prefix = isolation()
    command = (*prefix, sys.executable, "-m", "benchmarks.dra_idle", str(seconds), str(count))
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return msgspec.json.decode(output, type=Agents), bool(prefix)


async def _agents(seconds: int, count: int) -> Agents:
    all_families = partial(_with_dra, "dra", len(FAMILIES), ordinary_node)
    kinds = (partial(_without_dra, gpu_npu_node), _with_dra, partial(_without_dra, ordinary_node), all_families)
    starts = [start for start in kinds for _ in range(count)]
    runs = await asyncio.gather(*(_run(start, _START_INTERVAL * place, seconds) for place, start in enumerate(starts)))
    return Agents(*(runs[first : first + count] for first in range(0, len(runs), count)))


async def _run(start: Callable[[], AbstractAsyncContextManager[AgentProcess]], delay: float, seconds: int) -> Idle:
    await asyncio.sleep(delay)
    async with start() as running:
        return await _idle(running, seconds)


@asynccontextmanager
async def _without_dra(make: Callable[[], AbstractContextManager[NodeSetup]]) -> AsyncGenerator[AgentProcess]:
    with make() as setup:
        async with registered_agent(setup) as (running, _kubelet):
            yield running


@asynccontextmanager
async def _with_dra(*arguments: Any) -> AsyncGenerator[AgentProcess]:
    async with dra_agent(*arguments) as (running, _api, _setup):
        yield running


async def _idle(running: AgentProcess, seconds: int) -> Idle:
    await asyncio.sleep(SETTLE_SECONDS)
    cpu, switches = running.cpu_seconds(), running.voluntary_switches()
    await asyncio.sleep(seconds)
    running.check()
    share = 60 / seconds
    cpu, switches = running.cpu_seconds() - cpu, running.voluntary_switches() - switches
    return Idle(cpu * share * 1e3, switches * share, running.memory())


def _enable_loopback() -> None:
    """A new network namespace has a loopback device that is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        name, flags = struct.unpack("16sH14x", fcntl.ioctl(control, _GET_FLAGS, request))
        if not flags & _UP:
            fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH14x", name, flags | _UP))


def main() -> None:
    seconds, count = map(int, sys.argv[1:])
    # Output of libraries goes to standard error, so that it does not mix with the JSON.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _enable_loopback()
    output.write(msgspec.json.encode(asyncio.run(_agents(seconds, count))))
    output.close()


if __name__ == "__main__":
    main()
