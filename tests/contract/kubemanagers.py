"""A manager, and its run until the end of a test."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable

from waiting import until

from accelplane.kube.client import Client
from accelplane.kube.informer import WatchTimeouts
from accelplane.kube.leader import Election
from accelplane.kube.manager import Manager

HASTE = WatchTimeouts(first_delay=0.01, max_delay=0.1)


def make_manager(
    client: Client, identity: str = "", end: Callable[[int], None] = os._exit, *, profiling: bool = False
) -> Manager:
    election = None
    if identity:
        election = Election(
            name="l", namespace="n", identity=identity, lease_duration=1, renew_deadline=0.6, retry_period=0.05
        )
    return Manager(
        client,
        election=election,
        health_address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        watch_timeouts=HASTE,
        end=end,
        profiling=profiling,
        shutdown_delay=0,
    )


@contextlib.asynccontextmanager
async def running(manager: Manager) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(manager.run())
    await until(lambda: len(manager.ports) == 2 or task.done())
    try:
        yield task
        if task.done():
            return
        manager.stop()
        async with asyncio.timeout(5):
            await task
    finally:
        task.cancel()


async def page(manager: Manager, server: str, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", manager.ports[server])
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split(" ")[1]), answer.partition("\r\n\r\n")[2]
